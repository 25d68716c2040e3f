"""The laws of the morning: what has to hold when a night is over, whatever was drawn.

Each law yields its breaches. A breach that a later issue will mend stands in the row of its kind,
and has to show.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.service.terminal.follow import ENDS
from tests.cluster.chaos import not_recorded_once, overlaps
from tests.night.catalogue import Kind

RETURN_S = 60.0  # after a fault: ends that it caused may be seen so late
CAUSED = {  # fault -> kinds of failure that it may cause
    "reboot": frozenset({"node_lost", "preempted", "startup"}),
    "kill the service": frozenset(),
    "kill a rank": frozenset({"preempted"}),
    "kill MLflow": frozenset(),
    "kill Ray": frozenset({"node_lost", "preempted", "startup"}),
    "drain": frozenset(),
    "suspend": frozenset({"moved", "preempted"}),
    "update": frozenset(),
    "purge": frozenset(),
    "full disk": frozenset(
        {"disk_full", "startup"}
    ),  # a rank that cannot write its log says nothing
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An accepted job with its row of the table."""

    id: str
    kind: Kind
    way: str = "CLI"  # by which it was submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflicted:
    """A fault that met something."""

    kind: str
    at_s: float
    until_s: float
    job: str | None = None  # None: every job that ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one attempt did, by its own log."""

    steps: tuple[tuple[int, float], ...] = ()  # with the time of each, 0 where it is not told
    saves: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A command of the report, typed by the test."""

    command: str
    exit_code: int
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice as the webhook got it."""

    id: str
    kind: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Morning:
    """Everything that is known of a night when it is over."""

    entries: tuple[Entry, ...]
    faults: tuple[Inflicted, ...]
    jobs: Mapping[str, Mapping[str, Any]]  # as `orc show` has them
    nodes: Sequence[Mapping[str, Any]]
    traces: Mapping[str, Trace]  # by the name of the attempt
    runs: Sequence[tuple[str, bool]]  # MLflow's: name of the attempt, and whether the run has ended
    report: Mapping[str, Any]
    advice: Mapping[str, Sequence[Advice]]  # by job
    notices: Sequence[Notice]
    absent: frozenset[str] = field(
        default=frozenset()
    )  # successes without the file that they leave
    processes: Sequence[tuple[str, str]] = ()  # (job, command) of each that is left

    def present(self) -> Iterator[tuple[Entry, Mapping[str, Any]]]:
        """Yield the jobs that the service still has."""
        for entry in self.entries:
            if entry.id in self.jobs:
                yield entry, self.jobs[entry.id]

    def causes(self, job_id: str, attempt: Mapping[str, Any]) -> list[str]:
        """Return the faults that met an attempt."""
        met = []
        for fault in self.faults:
            is_of_job = fault.job in (None, job_id)
            ended_s = attempt["ended_at_s"] or float("inf")
            if is_of_job and attempt["launched_at_s"] <= fault.until_s and fault.at_s <= ended_s:
                met.append(fault.kind)
        return met


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A law that a job or the service broke."""

    law: str
    job: str  # "": the service
    text: str


def trainings(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the attempts that train: all but the probes."""
    return [attempt for attempt in job["attempts"] if attempt["outcome"] != "probed"]


def name_of(job_id: str, attempt: Mapping[str, Any]) -> str:
    """Return the name of an attempt."""
    return f"{job_id}-{attempt['number']}"


# ----------------------------------------------------------------------------------------- laws


def none_is_lost(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry in morning.entries:
        if entry.id not in morning.jobs:
            yield entry.id, "was accepted, and the service has no such job"


def ends_as_its_row(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry, job in morning.present():
        if job["status"] not in ENDS:
            # It may wait or ask where its row allows that, with a reason and a time.
            waits = job["asks"] or (job["reason"] and re.search(r"\d{1,2}:\d\d", job["reason"]))
            if job["status"] not in entry.kind.ends or not waits:
                yield entry.id, f"has not ended: {job['status']}, {job['reason']!r}"
        elif job["status"] not in entry.kind.ends:
            yield entry.id, f"ended as {job['status']}: {job['reason']}"
        elif job["status"] == "succeeded":
            yield from _unfinished(morning, entry, job)
        elif not re.search(entry.kind.telling, job["reason"]):
            yield entry.id, f"does not say {entry.kind.telling!r}: {job['reason']}"


def _unfinished(
    morning: Morning, entry: Entry, job: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    # a fault may meet an attempt after its last step: the next one then makes none
    last_step = 0
    for attempt in job["attempts"]:
        trace = morning.traces[name_of(entry.id, attempt)]
        last_step = max((step for step, _ in trace.steps), default=last_step)
    if last_step != entry.kind.steps:
        yield entry.id, f"succeeded after step {last_step} of {entry.kind.steps}"
    if entry.id in morning.absent:
        yield entry.id, f"succeeded without {entry.kind.leaves}"


def attempts_as_its_row(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry, job in morning.present():
        added = 0
        for attempt in job["attempts"]:
            outcome = attempt["outcome"]
            added += any(outcome in CAUSED[cause] for cause in morning.causes(entry.id, attempt))
        if len(job["attempts"]) > entry.kind.attempts_max + added:
            outcomes = ", ".join(attempt["outcome"] for attempt in job["attempts"])
            yield (
                entry.id,
                f"more than {entry.kind.attempts_max} attempts and {added} by faults: {outcomes}",
            )


def nobody_innocent_is_accused(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry, job in morning.present():
        for attempt in job["attempts"]:
            failure = attempt["failure"]
            if failure is None or failure["kind"] in entry.kind.failures:
                continue
            causes = morning.causes(entry.id, attempt)
            if not any(failure["kind"] in CAUSED[cause] for cause in causes):
                yield (
                    entry.id,
                    f"attempt {attempt['number']} is {failure['kind']}: {failure['reason']}",
                )
    for node in morning.nodes:
        for place in node["suspended"]:
            yield "", f"a device of {node['name']} is suspended: {place['reason']}"
        if any(node["driver_errors"]) or node["drained"]:
            yield "", f"{node['name']} is drained or unreadable"


def none_runs_twice_at_once(morning: Morning) -> Iterator[tuple[str, str]]:
    by_job = []
    by_device = []
    for job_id, job in morning.jobs.items():
        for attempt in job["attempts"]:
            name = name_of(job_id, attempt)
            ended_s = attempt["ended_at_s"] or float("inf")
            times = [at_s for _, at_s in morning.traces[name].steps if at_s]
            by_job.append(((job_id, 0), name, attempt["launched_at_s"], ended_s))
            if times:
                by_job.append(((job_id, 1), name, min(times), max(times)))
                by_device.append(((attempt["placement"], 0), name, min(times), max(times)))
    for pair in (*overlaps(by_job), *overlaps(by_device)):
        yield "", pair


def no_device_is_held(morning: Morning) -> Iterator[tuple[str, str]]:
    running = {job_id for job_id, job in morning.jobs.items() if job["status"] == "running"}
    for node in morning.nodes:
        holders = set(node["jobs"]) - running
        if holders or (node["busy"] and not running):
            yield "", f"devices {node['busy']} of {node['name']} are held by {sorted(holders)}"


def no_process_outlives_its_job(morning: Morning) -> Iterator[tuple[str, str]]:
    for job_id, command in morning.processes:
        job = morning.jobs.get(job_id)
        if job is None or job["status"] in ENDS:
            yield job_id, f"has left a process: {command}"


def no_step_is_repeated(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry, job in morning.present():
        saved, reached = 0, 0
        for attempt in trainings(job):
            trace = morning.traces[name_of(entry.id, attempt)]
            steps = [step for step, _ in trace.steps]
            if not steps:
                continue
            if steps[0] <= saved:
                yield (
                    entry.id,
                    f"attempt {attempt['number']} begins at step {steps[0]}, and {saved} was saved",
                )
            if steps[0] > reached + 1 and reached:
                yield (
                    entry.id,
                    f"attempt {attempt['number']} begins at step {steps[0]} after {reached}",
                )
            # a script that went on from its last step would never end: that checkpoint is left out
            saves = [step for step in trace.saves if step < entry.kind.steps]
            saved = max(saved, attempt["checkpoint_step"] or 0, *saves)
            reached = steps[-1]


def mlflow_is_complete(morning: Morning) -> Iterator[tuple[str, str]]:
    names = []
    for job_id, job in morning.jobs.items():
        names += [name_of(job_id, attempt) for attempt in job["attempts"]]
    for name in not_recorded_once(names, morning.runs):
        yield "", f"{name} has not exactly one ended run"


def the_report_tells(morning: Morning) -> Iterator[tuple[str, str]]:
    lines = {}
    for section in ("failed", "refused"):
        lines |= {line["id"]: line["sentence"] for line in morning.report[section]}
    for entry, job in morning.present():
        if job["status"] not in ("failed", "refused"):
            if entry.id in lines:
                yield entry.id, f"did not fail, and the report says so: {lines[entry.id]}"
        elif entry.id not in lines:
            yield entry.id, "failed, and the report does not name it"
        elif entry.kind.fails and not re.search(entry.kind.telling, lines[entry.id]):
            yield entry.id, f"the report does not say {entry.kind.telling!r}: {lines[entry.id]}"


def advice_does_what_it_says(morning: Morning) -> Iterator[tuple[str, str]]:
    for entry, job in morning.present():
        if job["status"] not in ("failed", "refused"):
            continue
        sentences = [line for line in morning.report["to_do"] if line.startswith(f"{entry.id}:")]
        if not any(re.search(entry.kind.advice, sentence) for sentence in sentences):
            yield entry.id, f"the report does not advise {entry.kind.advice!r}: {sentences}"
        commands = morning.advice.get(entry.id, ())
        if not commands:
            yield entry.id, "the report has no command for it"
        for advice in commands:
            if advice.exit_code != 0:
                yield entry.id, f"`{advice.command}` ended with {advice.exit_code}: {advice.output}"
        logs = [advice.output for advice in commands if advice.command.startswith("orc logs")]
        pattern = entry.kind.logged or entry.kind.telling
        if logs and not any(re.search(pattern, log) for log in logs):
            yield entry.id, f"`orc logs` does not show {pattern!r}"


def each_notice_comes_once(morning: Morning) -> Iterator[tuple[str, str]]:
    # A notice that comes again has the same id.
    ids = {notice.id: (notice.kind, notice.job) for notice in morning.notices}
    counts = Counter(ids.values())
    for (kind, job_id), count in counts.items():
        if count > 1 and kind != "orc.node_lost":  # one for each attempt that lost its node
            yield job_id, f"{kind} came {count} times"
    is_calm = not any(fault.kind in ("reboot", "kill the service") for fault in morning.faults)
    if is_calm and len(ids) != len(morning.notices):
        yield "", "a notice came again, though nothing was killed"
    for entry, job in morning.present():
        wanted = int(job["status"] in ("failed", "refused") or bool(job["asks"]))
        count = counts["orc.failed", entry.id]
        if min(count, 1) != wanted:
            yield entry.id, f"{job['status']}, and {count} notices of a failure"
        if counts["orc.late", entry.id]:
            yield entry.id, "is told to be late, and its deadline is days away"


LAWS: Mapping[str, Callable[[Morning], Iterator[tuple[str, str]]]] = {
    "no accepted job is lost": none_is_lost,
    "each job ends as its row says": ends_as_its_row,
    "each job has as many attempts as its row says": attempts_as_its_row,
    "nobody innocent is accused": nobody_innocent_is_accused,
    "no job runs twice at once": none_runs_twice_at_once,
    "no device is held by what has ended": no_device_is_held,
    "no process outlives its job": no_process_outlives_its_job,
    "no step is repeated beyond its checkpoint": no_step_is_repeated,
    "MLflow has one ended run of each attempt": mlflow_is_complete,
    "the report names each failure with its telling line": the_report_tells,
    "each advice does what it says": advice_does_what_it_says,
    "each notice comes once": each_notice_comes_once,
}


def breaches(morning: Morning) -> list[Breach]:
    """Return every breach of every law."""
    broken = []
    for law, check in LAWS.items():
        broken += [Breach(law=law, job=job, text=text) for job, text in check(morning)]
    return broken


def verdict(morning: Morning) -> tuple[list[Breach], list[str]]:
    """Return (breaches that no row expects, sentences on expected ones that did not show)."""
    marks = {}
    for entry in morning.entries:
        for law, issue in entry.kind.mended_by.items():
            marks[law, entry.id] = (
                f"{entry.id} ({entry.kind.name}) keeps the law {law!r}: take the mark of issue {issue} away"
            )
    unexpected = []
    shown = set()
    for breach in breaches(morning):
        if (breach.law, breach.job) in marks:
            shown.add((breach.law, breach.job))
        else:
            unexpected.append(breach)
    return unexpected, [text for key, text in marks.items() if key not in shown]
