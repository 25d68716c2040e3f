"""The core of `orc launch`, a child of its watcher: reads one question, and says what to start, or how it ends.

It plans, judges and decides as the service does, by the same scheduler, evidence and requests.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.evidence import Ending, collect_evidence, read_ending
from orchestrator.backends.attempts.launch_request import LaunchNode, RankRequest
from orchestrator.backends.attempts.launcher import find_free_port
from orchestrator.backends.attempts.leftovers import make_process_mark
from orchestrator.backends.attempts.output_scan import SearchResult
from orchestrator.backends.attempts.script_output import FileAccess
from orchestrator.backends.attempts.start import prepare_request, write_request_files
from orchestrator.backends.local.drive import LocalScheduler
from orchestrator.backends.ports import Lookups
from orchestrator.backends.redaction import mask_evidence
from orchestrator.planning.render import render_script_command
from orchestrator.planning.request import read_script_request
from orchestrator.scheduling.options.asks import apply_permissions
from orchestrator.scheduling.reports.advice import ELSEWHERE, advise_after_failure
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.commands.launch.devices import (
    Machine,
    find_device_lock_path,
    find_machine_with_devices,
    read_holder,
)
from orchestrator.service.commands.launch.records import FOLDER, Records
from orchestrator.service.commands.launch.typed_job import (
    TypedJob,
    compute_command_digest,
    compute_named_files_digest,
    make_job_without_knobs,
    make_restart_argv,
    read_typed_job,
)
from orchestrator.service.visible import escape_controls
from orchestrator.specs.actions import Launch, Record
from orchestrator.specs.attempt import Attempt, Failure, Heartbeat, Phase
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.command_line import Argv
from orchestrator.specs.errors import OrchestratorError
from orchestrator.specs.events import (
    Finished,
    NodesSeen,
    Released,
    RetryRequested,
    Started,
    Submitted,
    TimerFired,
    UpdateRequested,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.profile import Source
from orchestrator.specs.replace import replace

OWN_ERROR = 125
GUARD_SETTINGS = "ORC_GUARD"  # variable by which each Python process of a script is guarded
TRACKER = "MLFLOW_TRACKING_URI"
REQUEUES_MAX = 64  # of one job of Slurm
REQUEUE_TIMEOUT_S = 30.0
WAKES_MAX = 8  # back-offs and waits that are passed before the next launch
HOLDER = "orc launch"  # who holds a job between two lines
# Variables of a request that a command in the foreground has from its caller, or does without.
LEFT_OUT = ("TORCH_EXTENSIONS_DIR", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")

RECORDED = (
    "argv",
    "lead",
    "python",
    "output",
    "hints",
    "logs_itself",
)  # of a typed job, in its run

TOLD_TO_END = Heartbeat(
    rank=0,
    step=0,
    steps_done=0,
    step_s=None,
    peak_bytes=0,
    phase=Phase.STARTUP,
    at_s=0.0,
    signal=signal.SIGTERM,
)


@dataclass(frozen=True)
class RecentFiles(FileAccess):
    """File search that finds only files written since this run's records began: older ones belong
    to another training.
    """

    since_s: float = 0.0

    def search(
        self, root: Path, patterns: Sequence[str], checkpoint_files: Sequence[str] | None = None
    ) -> SearchResult:
        """Return the files below `root` that match these shell patterns and were written since
        `since_s`.
        """
        result = super().search(root, patterns, checkpoint_files)
        fresh = (match for match in result.matches if match.mtime_ns >= self.since_s * 1e9)
        return replace(result, matches=tuple(fresh))


def answer_question(question: JsonObject) -> JsonObject:
    """Return what the watcher process of `orc launch` must do next (start an attempt, or exit), for
    its question.
    """
    if "request" in question:
        return _plan_first_attempt(question["request"], Path(question["cwd"]))
    records = Records(Path(question["state"]))
    number = judge_last_attempt(records)
    return _decide_next_step(records, number, question)


def _plan_first_attempt(request: JsonObject, folder: Path) -> JsonObject:
    """Return the first attempt of a typed command, or the next attempt where an earlier one was
    left. Raises SpecError.
    """
    command = request["command"]
    is_dry = request["dry_run"]
    machine = find_machine_with_devices(request["devices"])
    identity = compute_command_digest((*command, request["devices"] or ""), folder, os.environ)
    home = folder / FOLDER / identity
    records = Records(home)
    holder = read_holder(records.lock)
    if holder is not None and not is_dry:
        text = f"process {holder.get('pid')} on {holder.get('host')} runs this line already"
        return {"exit": OWN_ERROR, "lines": [text]}
    records.writes = not is_dry
    judge_last_attempt(records)
    job = read_typed_job(command, folder, machine.node.devices, home)
    run = {name: getattr(job, name) for name in RECORDED}
    run |= {"content": compute_named_files_digest(command, folder), **request}
    lines = [*machine.notes, *(job.notes if is_dry else job.notes[:1])]
    note = _begin_or_resume_run_and_note(records, job.spec, run)
    if note is None:
        return {"exit": 0, "lines": ["this line has finished before: --once runs it once"]}
    answer = _plan_next_attempt(records, machine)
    if answer is None and job.argv is not None:  # such as a batch that cannot be cut
        _submit_job(records, make_job_without_knobs(job.argv, folder), run, afresh=True)
        answer = _plan_next_attempt(records, machine)
    if answer is None:
        return {"exit": OWN_ERROR, "lines": [*lines, f"no plan: {records.job.reason}"]}
    lines += [*filter(None, [note]), *answer["lines"]]
    if is_dry:
        return {"exit": 0, "lines": [*lines, *_describe_dry_run(job)]}
    return {**answer, "lines": lines}


def _begin_or_resume_run_and_note(records: Records, spec: JobSpec, run: JsonObject) -> str | None:
    """Begin a run, or continue the last one; return a note for the user, or "".

    Returns None where the run has finished before and `--once` is set.
    """
    before = records.drive.job
    is_same = records.run.get("content") == run["content"]
    if before is None:
        _submit_job(records, spec, run, afresh=True)
        return ""
    if before.status is JobStatus.SUCCEEDED:
        if is_same and run["once"]:
            return None
        _submit_job(records, spec, run, afresh=not is_same)
        return ""
    if is_same or run["resume"]:
        _resume_job(records, spec, before)
        return f"goes on with what attempt {len(before.attempts)} of this line left"
    _submit_job(records, spec, run, afresh=True)
    return "its script or configuration has changed: it begins anew"


def _submit_job(
    records: Records, spec: JobSpec, run: JsonObject, *, afresh: bool, continued_job: str = ""
) -> None:
    """Begin a run by submitting its job to the scheduler; `continued_job` is the id of the job that
    it continues.
    """
    order = 1 if afresh else records.drive.scheduler.state.submitted + 1
    now_s = time.time()
    name = f"{spec.name}-{order}"
    records.begin_run({"at_s": now_s, **run, "job": name}, afresh=afresh)
    records.record_event(
        Submitted(job_id=name, order=order, spec=spec, retry_of=continued_job or None, at_s=now_s)
    )


def _resume_job(records: Records, spec: JobSpec, earlier_job: Job) -> None:
    """Resume a job that was left between two attempts; submit it again where it has ended."""
    if earlier_job.held_by is not None:
        records.record_event(
            UpdateRequested(job_id=earlier_job.id, spec=earlier_job.spec, at_s=time.time())
        )
    elif earlier_job.status.ended or earlier_job.asks:
        _submit_job(records, spec, records.run, afresh=False, continued_job=earlier_job.id)


def _plan_next_attempt(records: Records, machine: Machine) -> JsonObject | None:
    """Return the next attempt as the JSON from which the watcher starts it; None where the
    scheduler starts none.
    """
    drive = records.drive
    now_s = time.time()
    nodes = make_idle_nodes(machine.cluster)
    records.record_event(NodesSeen(nodes=nodes, declared=nodes, at_s=now_s))
    at_s = now_s
    for _ in range(WAKES_MAX):
        wake_s = drive.scheduler.wake_at_s()
        if drive.launches or records.job.asks or wake_s is None:
            break
        at_s = wake_s
        records.record_event(TimerFired(at_s=at_s))
    if not drive.launches:
        return None
    launch = drive.launches.pop()
    records.record_event(Started(job_id=launch.job.id, number=launch.attempt.number, at_s=at_s))
    if not records.typed and records.run["argv"] is not None:
        records.record_typed_start()
    launch = Launch(job=records.job, attempt=records.job.attempts[-1])
    return _prepare_attempt(records, machine, launch) | {"wait_s": at_s - now_s}


def _prepare_attempt(records: Records, machine: Machine, launch: Launch) -> JsonObject:
    """Write an attempt's files, and return the JSON from which the watcher starts it."""
    attempt = launch.attempt
    folder = records.folder.attempt(attempt.number)
    node = LaunchNode(
        name=machine.node.name,
        address="127.0.0.1",
        device=machine.node.device,
        devices=machine.node.devices,
        cpus=os.cpu_count() or 1,
        device_ids=machine.node.device_ids,
    )
    nodes = {node.name: node}
    access = _make_recent_files(records)
    request = prepare_request(
        launch.job, attempt, records.home, nodes, find_free_port(), sys.executable, access
    )
    if records.writes:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_durably(records.folder.epoch, str(attempt.number))
        write_request_files(request)
        if machine.is_cpu:
            guard = json.loads(folder.guard.read_text())
            write_durably(folder.guard, json.dumps(guard | {"virtual_capacity_bytes": None}))
    resumes = (str(folder.resume), json.dumps({"checkpoint": None})) not in request.files
    is_command = records.run["argv"] is not None
    is_typed = is_command and not resumes and records.typed == str(attempt.plan)
    ((_, processes),) = request.ranks
    ranks = [
        _make_rank_argv_and_variables(process, records, launch.job.spec, is_typed)
        for process in processes
    ]
    for _, _, env in ranks:
        env |= machine.env
    return {
        "state": str(records.home),
        "folder": str(folder.path),
        "epoch_path": str(records.folder.epoch),
        "epoch": attempt.number,
        "mark": make_process_mark(folder, node.name),
        "watched": {
            "node": node.name,
            "devices": attempt.placement[0].devices,
            "driver": machine.node.device.kind.traits.driver,
            "device_ids": node.device_ids,
        },
        "ranks": ranks,
        "workdir": request.workdir,
        "count": len(attempt.placement[0].devices) // len(ranks),
        "judges": not records.run["logs_itself"] and (not is_command or TRACKER in os.environ),
        "lines": [f"attempt {attempt.number}: {shlex.join(ranks[0][1])}"],
        "locks": _list_locks_to_hold(records, machine, attempt),
    }


def _make_rank_argv_and_variables(
    request: RankRequest, records: Records, spec: JobSpec, runs_as_typed: bool
) -> tuple[int, Sequence[str], dict[str, str]]:
    """Return (rank, argv, additional variables) of a process to start; `runs_as_typed` keeps the
    command as typed.
    """
    env = dict(request.env)
    run = records.run
    if not spec.is_script:
        return request.rank, request.argv, env
    if runs_as_typed:
        return request.rank, run["argv"], {GUARD_SETTINGS: env[GUARD_SETTINGS]}
    for name in LEFT_OUT:
        env.pop(name, None)
    return request.rank, make_restart_argv(request, spec, run["lead"], run["python"]), env


def _make_recent_files(records: Records) -> RecentFiles:
    return RecentFiles(sys.executable, None, records.run["at_s"])


def _list_locks_to_hold(records: Records, machine: Machine, attempt: Attempt) -> list[JsonObject]:
    """Return the locks that the watcher must hold: that of its folder, and one per device with the
    promised bytes.
    """
    line = shlex.join(records.run["argv"] or ())[:200]
    content: JsonObject = {"line": line, "host": machine.node.name}
    locks: list[JsonObject] = [
        {"path": str(records.lock), "content": content, "refuses": "another process took this line"}
    ]
    if attempt.estimate.source is not Source.ASSUMED:
        content = {**content, "promise_bytes": attempt.needed_bytes}
    for device in attempt.placement[0].devices:
        path = find_device_lock_path(machine.uuids[device]) if machine.uuids else None
        if path is not None:
            locks.append({"path": str(path), "content": content, "refuses": ""})
    return locks


def judge_last_attempt(records: Records) -> int:
    """Judge how the last attempt ended, unless that was done; return its number, or 0 without an
    attempt.

    Its files decide. The watcher does not judge a success. An attempt without an ending means that
    its watcher was killed.
    """
    job = records.drive.job
    if job is None or not job.attempts:
        return 0
    if job.attempts[-1].evidence is not None:
        return len(job.attempts)
    attempt = job.attempts[-1]
    now_s = time.time()
    ending = read_ending(records.folder.attempt(attempt.number)) or Ending(stopped=True)
    if ending.stopped:
        records.record_event(
            UpdateRequested(job_id=job.id, spec=job.spec, held_by=HOLDER, at_s=now_s)
        )
    evidence = collect_evidence(
        job.spec, attempt, records.folder, ending, _make_recent_files(records)
    )
    evidence = mask_evidence(evidence, job.spec, os.environ)
    if ending.stopped and not evidence.heartbeats:  # our signal, which no guard saw come
        evidence = replace(evidence, heartbeats=(TOLD_TO_END,))
    number = attempt.number
    records.record_event(Finished(job_id=job.id, number=number, evidence=evidence, at_s=now_s))
    records.record_event(Released(job_id=job.id, number=number, at_s=now_s))
    return number


def _decide_next_step(records: Records, attempt_number: int, question: JsonObject) -> JsonObject:
    """Return the attempt to start after the one with this number, or the exit code with which to
    end.
    """
    job = records.job
    code = question["code"]
    if job.status is JobStatus.SUCCEEDED:
        return {"exit": 0, "lines": _send_run_and_list_errors(records)}
    failure = job.attempts[attempt_number - 1].failure
    end = f"attempt {attempt_number} ended: {job.reason if failure is None else failure.reason}"
    if question["signals"]:
        end = f"attempt {attempt_number} was ended by {signal.Signals(question['signals'][0]).name}"
        left = "the same line again goes on from here"
        if records.run["requeue"]:
            left = _requeue_slurm_job_and_describe()
        return {"exit": code, "lines": [f"{end}; {left}"]}
    machine = find_machine_with_devices(records.run["devices"])
    answer = _plan_next_attempt(records, machine)
    if answer is None:
        lines = [
            end,
            *_suggest_help(records, machine, failure),
            *_send_run_and_list_errors(records),
        ]
        return {"exit": code or 1, "lines": lines}
    changes = "; ".join(map(str, records.job.attempts[-1].change)) or "the same plan again"
    return {**answer, "lines": [f"{end}. Next: {changes}", *answer["lines"]]}


def _send_run_and_list_errors(records: Records) -> list[str]:
    """Send the run to MLflow if the environment names a server and the script does not log itself.

    Returns a list with the error, or [].
    """
    uri = os.environ.get(TRACKER)
    if not uri or records.run["logs_itself"]:
        return []
    # Importing MLflow takes seconds.
    from orchestrator.backends.mlflow.tracker import MlflowTracker

    job = records.job
    state = records.drive.scheduler.state
    lookups = Lookups(state=lambda: state, job=lambda _: job, sweep=lambda _: None)
    attempts = [Record(job=job, attempt=attempt) for attempt in job.attempts]
    try:
        MlflowTracker(uri, records.home, lookups).send([*enumerate(attempts)])
    except Exception as error:  # the edge: a server that is away costs no training
        return [f"not recorded in MLflow: {type(error).__name__}: {error}"]
    return []


def _requeue_slurm_job_and_describe() -> str:
    """Make Slurm queue this job again; return a phrase that says whether it did."""
    job = os.environ.get("SLURM_JOB_ID", "")
    count = os.environ.get("SLURM_RESTART_COUNT", "0")
    if not job or not count.isdecimal() or int(count) >= REQUEUES_MAX:
        return f"not queued again: job {job or 'unknown'} of Slurm, restarted {count} times"
    asks = ("squeue", "--noheader", "--format=%T", "--jobs", job)
    argv = ("scontrol", "requeue", job)
    try:
        state = subprocess.check_output(asks, timeout=REQUEUE_TIMEOUT_S, text=True).strip()
        if state != "RUNNING":  # somebody cancelled it
            return f"not queued again: its job is {state.lower()}"
        subprocess.run(argv, check=True, timeout=REQUEUE_TIMEOUT_S, stdout=sys.stderr)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not queued again: {error}"
    return f"job {job} of Slurm is queued again"


def _suggest_help(records: Records, machine: Machine, failure: Failure | None) -> list[str]:
    """Return lines that say what a person can do, such as a smaller batch, given as arguments of
    the script.
    """
    job = records.job
    if not job.asks:
        hints = (
            records.run["hints"] if failure is not None and failure.kind.shortage is None else ""
        )
        return [f"what would help: {hints or advise_after_failure(failure, ELSEWHERE)}"]
    allowed = dict(job.answer)
    limit = allowed.get("allow")
    batch = allowed.get("global_batch_size")
    spec = apply_permissions(
        job.spec, None if limit is None else str(limit), None if batch is None else int(batch)
    )
    other = LocalScheduler(Scheduler(records.drive.scheduler.state))
    other.apply_event(RetryRequested(job_id=job.id, spec=spec, at_s=time.time()))
    nodes = make_idle_nodes(machine.cluster)
    other.apply_event(NodesSeen(nodes=nodes, declared=nodes, at_s=time.time() + 1))
    flags = [shlex.join(_list_arguments_of_restart(launch)) for launch in other.launches]
    meaning = f"{batch} samples a step" if batch is not None else f"{limit} changes"
    return [
        "no plan of the same training is left",
        f"what would help: {' '.join(flags)} (another training: {meaning})",
    ]


def _list_arguments_of_restart(launch: Launch) -> Argv:
    """Return the arguments that a restart adds to the command as typed."""
    spec = launch.job.spec
    rendered = render_script_command(
        read_script_request(spec),
        launch.attempt.plan,
        output_dir="",
        resume_from=None,
        deepspeed_config_path=None,
    )
    return rendered.arguments[len(spec.command or ()) :]


def _describe_dry_run(job: TypedJob) -> list[str]:
    """Return the lines of a dry run: which flags a restart would change, and where it looks for
    checkpoints.
    """
    knobs = [
        f"{name} by {place}"
        for name, knob in job.spec.knobs
        if isinstance(knob, Knob)
        if (place := knob.flag or knob.override or knob.key or knob.env or knob.switch)
    ]
    places = ", ".join(job.spec.resume.checkpoints)
    return [
        f"a restart changes {'; '.join(knobs) or 'nothing: no flag of this command is known'}",
        f"a restart goes on from the newest of {places} that this line wrote"
        if job.spec.knobs.resume_from
        else "a restart begins anew: no flag for a checkpoint is known",
    ]


def answer_stdin() -> None:
    """Read one question of the watcher from standard input, and write the answer to standard
    output.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    question = json.load(sys.stdin)
    try:
        answer = answer_question(question)
    except OrchestratorError as error:
        answer = {"exit": OWN_ERROR, "lines": [str(error)]}
    answer["lines"] = [escape_controls(line) for line in answer["lines"]]
    json.dump(answer, answers)
    answers.close()


if __name__ == "__main__":
    answer_stdin()
