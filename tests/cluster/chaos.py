"""Faults drawn from a seed over many small jobs on four hosts, and what has to hold at their end.

    python -m tests.cluster.chaos --seed 1 --faults 1000 --jobs 300 --limit-s 20000

The same seed draws the same faults in the same order; which process one meets depends on what runs at that moment.
Exit code 1 where a law is broken. The figures go to .bench/chaos.json.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.__main__ import FOLDER, table
from benchmarks.figure import Figure, at_least, at_most, informs, say
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Event, Released, Submitted
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.run import JobFolder
from tests.cluster.machines import NODES, Cluster, cluster, until

SEEDS, STEPS, STEP_S = 5, 30, 0.15  # of the jobs
ASKED_S = 120.0  # that a submission is asked for: a lease, and a start on a busy machine
SETTLE_S = 120.0  # for the cluster to come back after the last fault
JOB_S = 30.0  # more for each job
RECORD_S = 2.0  # more for each attempt, until MLflow has its record
KINDS = {  # of a fault -> seconds that it may last; 0: it is over at once
    "kill the service": 0.0,
    "kill the standby": 0.0,
    "kill a launcher": 0.0,
    "kill a rank": 0.0,
    "kill a raylet": 0.0,
    "kill Ray's head": 0.0,
    "kill MLflow": 0.0,
    "kill PostgreSQL": 0.0,
    "promote PostgreSQL's standby": 0.0,
    "freeze the service": 15.0,
    "freeze the standby": 15.0,
    "freeze a launcher": 8.0,
    "freeze a rank": 8.0,
    "freeze a raylet": 12.0,
    "freeze Ray's head": 12.0,
    "freeze MLflow": 8.0,
    "freeze PostgreSQL": 8.0,
    "freeze the shared disk": 8.0,
    "cut a host off": 12.0,
    "half-open link of a host to the head": 12.0,
    "half-open link of the service to PostgreSQL": 15.0,
    "half-open link of two hosts": 12.0,
    "cut link of two hosts": 12.0,
    "full disk of a host": 8.0,
}
GAP_S = (0.5, 4.0)  # between two faults
JOB = """\
name: chaos
command: {python} {trainer} --seed {seed} --steps {steps} --step-s {step_s}
probe: never
gpus: 1
global_batch_size: 1
steps: {steps}
knobs:
  micro_batch_size: {{flag: --batch-size, default: 1}}
  output_dir: {{flag: --output}}
  resume_from: {{flag: --resume}}
success: {{artifacts: [model.json]}}
retries: {{node: 64, startup: 64, hang: 64, preemption: 64}}
"""
TRAINER = Path(__file__).with_name("trainer.py")
Diary = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChosenFault:
    """A fault of a schedule."""

    kind: str
    gap_s: float  # before it
    lasts_s: float
    draw: float  # from 0 to 1: which of the candidates it meets

    def one_of(self, candidates: Sequence[Any]) -> Any:
        return candidates[int(self.draw * len(candidates))] if candidates else None


def schedule(seed: int, faults: int) -> list[ChosenFault]:
    """Return the faults that a seed draws; fewer faults are the first ones of more."""
    drawn = random.Random(seed)
    chosen_faults = []
    for _ in range(faults):
        kind = drawn.choice(list(KINDS))
        gap_s, lasts_s, draw = (
            drawn.uniform(*GAP_S),
            KINDS[kind] * drawn.uniform(0.1, 1.0),
            drawn.random(),
        )
        chosen_faults.append(ChosenFault(kind, gap_s, lasts_s, draw))
    return chosen_faults


@dataclass(slots=True)
class Night:
    """A cluster under faults, and what its clients were told."""

    cluster: Cluster
    submissions: int = 0
    answered: list[str] = field(default_factory=list)
    unanswered: int = 0  # submissions that no service took, however often asked
    waits_s: list[float] = field(default_factory=list)  # until each of the others was answered
    met: Counter[str] = field(default_factory=Counter)  # faults that met something, by kind

    def inflict(self, fault: ChosenFault) -> None:
        """Wait for the fault's moment, do it, undo it after its time, and start again what has ended."""
        time.sleep(fault.gap_s)
        undo = self._begin(fault)
        if undo is not None:
            self.met[fault.kind] += 1
            time.sleep(fault.lasts_s)
            undo()
        self.cluster.supervise()

    def _begin(self, fault: ChosenFault) -> Callable[[], None] | None:
        """Do it; how it is undone, or None where there is nothing that it could meet."""
        made = self.cluster
        verb, _, what = fault.kind.partition(" ")
        holder = _holder(made)
        if fault.kind == "cut a host off":
            host = made.hosts[NODES[int(fault.draw * len(NODES))]]
            host.cut()
            return host.heal
        if "link" in fault.kind:
            return _cut_link(made, fault, holder)
        if verb == "promote":
            return _promote(made, holder, with_service=fault.draw < 0.5)
        if what == "the shared disk":
            made.freeze_disk()
            return made.thaw_disk
        if verb == "full":
            host = made.hosts[fault.one_of(list(made.hosts))]
            return host.empty_disk if host.fill_disk() else None
        pid = {
            "the service": lambda: _pid(made, f"service-{holder}"),
            "the standby": lambda: _pid(made, f"service-{_other(holder)}"),
            "a launcher": lambda: fault.one_of(made.launchers()),
            "a rank": lambda: fault.one_of(made.ranks()),
            "a raylet": lambda: made.raylet(NODES[int(fault.draw * len(NODES))]),
            "Ray's head": made.ray_head,
            "MLflow": lambda: _pid(made, "mlflow"),
            "PostgreSQL": lambda: _pid(made, "database"),
        }[what]()
        if pid is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            return (lambda: None) if verb == "kill" else (lambda: _thaw(made, pid))
        return None

    def submit(self, seed: int) -> None:
        """Submit a job, under one key to whichever service answers, for as long as a failover may take."""
        spec, began_s, key = (
            _spec(self.cluster, seed),
            time.monotonic(),
            f"chaos-{self.submissions}",
        )
        self.submissions += 1
        while time.monotonic() < began_s + ASKED_S:
            with contextlib.suppress(AssertionError):  # no service yet
                self.answered.append(
                    self.cluster.ask(
                        lambda client: client.submit_job(spec, idempotency_key=key),
                        "an answer",
                        2.0,
                    )
                )
                self.waits_s.append(time.monotonic() - began_s)
                return
            self.cluster.supervise()
        self.unanswered += 1


def _spec(made: Cluster, seed: int) -> dict[str, Any]:
    file = made.folder / f"job{seed}.yaml"
    text = JOB.format(python=sys.executable, trainer=TRAINER, seed=seed, steps=STEPS, step_s=STEP_S)
    file.write_text(text)
    return read_job(file).model_dump(mode="json")


def _holder(made: Cluster) -> str:
    """The node whose service owns the journal; while none does, n0."""
    return made.serving() or "n0"


def _other(node: str) -> str:
    return "n1" if node == "n0" else "n0"


def _pid(made: Cluster, part: str) -> int | None:
    try:
        return made.parts[part].pid
    except ProcessLookupError:
        return None


def _cut_link(made: Cluster, fault: ChosenFault, holder: str) -> Callable[[], None]:
    """Drop packets from one host to another, or both ways; return the function that undoes it."""
    verb, _, what = fault.kind.partition(" ")
    if what.endswith("PostgreSQL"):
        ways = [(holder, made.database)]
    elif what.endswith("the head"):
        ways = [(str(fault.one_of(NODES)), made.hosts["head"].address)]
    else:
        first, other = fault.one_of(list(itertools.permutations(made.hosts, 2)))
        ways = [(first, made.hosts[other].address)]
        if verb == "cut":
            ways.append((other, made.hosts[first].address))
    for node, to in ways:
        made.cut(node, to)

    def undo() -> None:
        for node, to in ways:
            made.heal(node, to)

    return undo


def _promote(made: Cluster, holder: str, *, with_service: bool) -> Callable[[], None]:
    """Give PostgreSQL a synchronous standby, and lose the primary for good, half of the time with the service."""
    made.attach_standby()
    if with_service and (pid := _pid(made, f"service-{holder}")) is not None:
        os.kill(pid, signal.SIGKILL)
    made.promote()
    return lambda: None


def _thaw(made: Cluster, pid: int) -> None:
    """Let a process go on, and the `nsenter` of a part, which stops with it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    for part in made.parts.values():
        part.thaw()


# --------------------------------------------------------------------------------------------------------------- laws


def undisturbed(folder: Path, seed: int) -> dict[int, float]:
    """Return the loss by step of an undisturbed run."""
    command = [
        sys.executable,
        str(TRAINER),
        "--seed",
        str(seed),
        "--steps",
        str(STEPS),
        "--step-s",
        "0",
    ]
    subprocess.run(
        [*command, "--output", str(folder)], check=True, capture_output=True, timeout=120
    )
    return {line["step"]: line["loss"] for line in read_diary(folder)}


def read_diary(output: Path) -> Diary:
    """Return a line per step of any attempt, without lines that a kill cut off."""
    path = output / "diary.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def changed_curves(
    diaries: Mapping[str, Diary], wanted: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Return jobs whose curve lacks a step or differs in a loss from an undisturbed run."""
    return [
        job_id
        for job_id, diary in diaries.items()
        if {line["step"] for line in diary} != set(wanted[job_id])
        or any(line["loss"] != wanted[job_id][line["step"]] for line in diary)
    ]


def overlaps(spans: Sequence[tuple[tuple[str, int], str, float, float]]) -> list[str]:
    """Return pairs of attempts that overlap on a device, from spans (device, attempt, from, to)."""
    pairs = []
    for device, of_device in itertools.groupby(sorted(spans), key=lambda span: span[0]):
        newest: tuple[str, float] | None = None
        for _, name, began_s, ended_s in sorted(of_device, key=lambda span: span[2]):
            if newest is not None and began_s < newest[1] and name != newest[0]:
                pairs.append(f"{newest[0]} and {name} on {device[0]}:{device[1]}")
            newest = (name, ended_s) if newest is None or ended_s > newest[1] else newest
    return pairs


def journalled_spans(
    jobs: Sequence[Job], events: Sequence[Event]
) -> list[tuple[tuple[str, int], str, float, float]]:
    """Return the spans from launch to release of each attempt's devices, by the journal."""
    released = {
        (event.job_id, event.number): event.at_s for event in events if isinstance(event, Released)
    }
    return [
        (
            (part.node, index),
            attempt.name,
            attempt.launched_at_s,
            released.get((job.id, attempt.number), float("inf")),
        )
        for job in jobs
        for attempt in job.attempts
        for part in attempt.placement
        for index in part.devices
    ]


def real_spans(
    jobs: Sequence[Job], diaries: Mapping[str, Diary]
) -> list[tuple[tuple[str, int], str, float, float]]:
    """Return the spans from the first to the last step of each attempt, by its processes."""
    spans = []
    for job in jobs:
        for attempt in job.attempts:
            times = [line["at_s"] for line in diaries[job.id] if line["attempt"] == attempt.number]
            for part in attempt.placement if times else ():
                spans += [
                    ((part.node, index), attempt.name, min(times), max(times))
                    for index in part.devices
                ]
    return spans


def not_recorded_once(attempts: Iterable[str], runs: Iterable[tuple[str, bool]]) -> list[str]:
    """Return attempts without exactly one ended run, from runs (attempt, whether it has ended)."""
    once, run_counts = Counter((name, True) for name in attempts), Counter(runs)
    return sorted({name for name, _ in (once - run_counts) + (run_counts - once)})


def records(made: Cluster) -> list[tuple[str, bool]]:
    """Return the MLflow runs of attempts: the attempt's name, and whether the run has ended."""
    from mlflow import MlflowClient

    client = MlflowClient(made.mlflow)
    experiments = [
        experiment.experiment_id
        for experiment in client.search_experiments()
        if experiment.name != "Default"
    ]
    runs: list[tuple[str, bool]] = []
    token = None
    while True:
        page = client.search_runs(experiments, max_results=1000, page_token=token)
        children = [run for run in page if "mlflow.parentRunId" in run.data.tags]
        runs += [(str(run.info.run_name), run.info.status != "RUNNING") for run in children]
        token = page.token
        if not token:
            return runs


# ---------------------------------------------------------------------------------------------------------------- run


def run(seed: int, faults: int, jobs: int, limit_s: float) -> list[Figure]:
    """Figures of one night under the faults of a seed; after `limit_s` no further fault or job comes."""
    drawn = schedule(seed, faults)
    with cluster(standby_database=False, own_disk=True) as made:
        night = Night(made)
        until(lambda: made.status("n1", "/readyz") == 503, "the standby")
        say(f"seed {seed}: {faults} faults over {jobs} jobs")
        began_s = time.monotonic()
        submitted, inflicted = 0, 0
        for number, fault in enumerate(drawn):
            if time.monotonic() - began_s > limit_s:
                break
            while submitted * faults < (number + 1) * jobs:
                night.submit(submitted % SEEDS)
                submitted += 1
            night.inflict(fault)
            inflicted += 1
            say(f"{number + 1}/{faults} {fault.kind} {fault.lasts_s:.1f} s")
        disturbed_s = time.monotonic() - began_s
        say("all faults are over")
        ended, events = _settled(made, SETTLE_S + JOB_S * jobs)
        return [informs("faults", inflicted, ""), *_figures(night, ended, events, disturbed_s)]


def _settled(made: Cluster, patience_s: float) -> tuple[list[Job], list[Event]]:
    """Return ended jobs and events once all jobs have ended and released their devices, or after `patience_s`.

    Only the journal tells: to a service a job has ended as soon as it succeeded, however long its devices take.
    """
    result: tuple[list[Job], list[Event]] = ([], [])

    def all_ended() -> bool:
        made.supervise()
        with (
            contextlib.suppress(ServiceError, SQLAlchemyError),
            closing(Journal(made.dsn, reads_only=True)) as journal,
        ):
            result[0][:], result[1][:] = (
                journal.list_ended_jobs(1_000_000),
                journal.iterate_events(),
            )
            submitted_ids = {event.job_id for event in result[1] if isinstance(event, Submitted)}
            return submitted_ids == {job.id for job in result[0]}
        return False

    with contextlib.suppress(AssertionError):
        until(all_ended, "the end of all jobs", patience_s, 1.0)
    return result


def _undelivered(made: Cluster, patience_s: float) -> int:
    """Return the number of records that MLflow lacks, once it is 0 or `patience_s` have passed."""
    behind = "SELECT count(*) FROM outbox WHERE id > (SELECT last_row FROM trackers WHERE name = 'mlflow')"
    waiting = [-1]

    def none() -> bool:
        made.supervise()
        with contextlib.suppress(psycopg.OperationalError):  # it is coming back
            waiting[0] = int(made.sql(behind)[0][0])
        return waiting[0] == 0

    with contextlib.suppress(AssertionError):
        until(none, "the records", patience_s, 1.0)
    return waiting[0]


def _figures(
    night: Night, ended: Sequence[Job], events: Sequence[Event], disturbed_s: float
) -> list[Figure]:
    made = night.cluster
    submitted_ids = {event.job_id for event in events if isinstance(event, Submitted)}
    seeds = {job.id: int(job.spec.command[job.spec.command.index("--seed") + 1]) for job in ended}
    curves = {
        seed: undisturbed(made.folder / f"undisturbed{seed}", seed) for seed in set(seeds.values())
    }
    diaries = {job.id: read_diary(JobFolder(made.home, job.id).output) for job in ended}
    attempts = [attempt for job in ended for attempt in job.attempts]
    names = Counter(attempt.name for attempt in attempts)
    waiting = _undelivered(made, SETTLE_S + RECORD_S * len(attempts))
    runs: list[tuple[str, bool]] = []

    def answers() -> bool:
        made.supervise()
        with contextlib.suppress(Exception):  # MLflow is coming back
            runs[:] = records(made)
            return True
        return False

    until(answers, "MLflow's answer")
    broken = {
        "jobs that were answered for and are not in the journal": sorted(
            set(night.answered) - submitted_ids
        ),
        "submissions that became two jobs": sorted(submitted_ids)[night.submissions :],
        "submissions that were answered with one job": sorted(
            (Counter(night.answered) - Counter(submitted_ids)).elements()
        ),
        "jobs that have not ended": sorted(submitted_ids - {job.id for job in ended}),
        "jobs that ended otherwise than expected": [
            f"{job.id}: {job.status}, {job.reason}"
            for job in ended
            if job.status is not JobStatus.SUCCEEDED
        ],
        "pairs of attempts on one device at once, by the journal": overlaps(
            journalled_spans(ended, events)
        ),
        "pairs of attempts on one device at once, by what ran": overlaps(
            real_spans(ended, diaries)
        ),
        "attempts of one name": sorted(name for name, count in names.items() if count != 1),
        "attempts without exactly one MLflow record": not_recorded_once(names, runs),
        "loss curves that differ from an undisturbed run": changed_curves(
            diaries, {job_id: curves[seed] for job_id, seed in seeds.items()}
        ),
    }
    for law, cases in broken.items():
        for case in cases[:10]:
            print(f"{law}: {case}")
    return [
        informs("faults that met something", sum(night.met.values()), ""),
        *(informs(kind, night.met[kind], "times") for kind in KINDS),
        informs("time under faults", disturbed_s, "s"),
        informs("attempts", len(attempts), ""),
        informs(
            "longest wait for the answer to a submission", max(night.waits_s, default=0.0), "s"
        ),
        at_most("submissions that no service answered", night.unanswered, "", 0),
        at_least("jobs that ended", len(ended), "", len(night.answered)),
        at_most("records that were not delivered", abs(waiting), "", 0),
        *(at_most(law, len(cases), "", 0) for law, cases in broken.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--faults", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed
    figures = run(options.seed, options.faults, options.jobs, options.limit_s)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "chaos.json").write_text(json.dumps(figures, indent=1))
    counted = f"{figures[0]['value']:g} of {options.faults} faults"
    Console().print(table(f"chaos, seed {options.seed}, {counted}, {options.jobs} jobs", figures))
    return 0 if all(figure["holds"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
