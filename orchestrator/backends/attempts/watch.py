"""What becomes of one attempt? Started or taken up, watched, told how it ended, its devices released."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from orchestrator.backends.attempts.evidence import (
    Ending,
    collect,
    first_ended,
    read_ending,
    read_exit_code,
    write_ending,
)
from orchestrator.backends.attempts.launch_request import LaunchNode, LaunchRequest, launch_request, started_ranks
from orchestrator.backends.attempts.launcher import (
    BEFORE_TIMEOUT_S,
    GRACE_AFTER_FAILURE_S,
    GRACE_AFTER_OOM_S,
    read_epoch,
    write_durably,
)
from orchestrator.backends.attempts.progress import Progress
from orchestrator.backends.attempts.script_output import newest_checkpoint, output_folder
from orchestrator.backends.attempts.workdir import link_all_but
from orchestrator.backends.ray import gang
from orchestrator.backends.ray.nodes import NodeWatch
from orchestrator.specs.attempt import Attempt, AttemptStatus
from orchestrator.specs.errors import OrchestratorError
from orchestrator.specs.events import Event, Finished, PaceReported, Released, Started
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder

LONG_POLL_S = 2.0
TICK_S = 0.25
CALL_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0  # a rank that SIGKILL does not end by then sits in the kernel: its launcher is given up
UNAVAILABLE_MAX = 60  # unanswered calls in a row, half a second apart, before a launcher counts as lost
PROBE_GRACE_S = 1.0  # nothing of a probe is worth saving
STALE_LOCK_S = 900.0  # a C++ build takes up to 350 s on a busy 2-core machine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What every watcher shares."""

    home: Path
    python: str
    nodes: NodeWatch
    clock: Callable[[], float]
    emit: Callable[[Event], None]
    closing: threading.Event


class Closed(Exception):
    """The service is closing: let go of the attempt, which goes on."""


@dataclass(slots=True)
class Gang:
    """What the watcher knows of the launchers."""

    launchers: gang.Launchers
    pending: dict[Any, str] = field(default_factory=dict)  # reference of a long poll -> node
    statuses: dict[str, dict[str, Any]] = field(default_factory=dict)
    unanswered: dict[str, int] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def open(self) -> list[str]:
        """Nodes whose launchers have neither ended nor gone."""
        return [
            node
            for node in self.launchers
            if node not in self.lost and self.statuses.get(node, {}).get("state") != "ended"
        ]

    def unending(self) -> list[str]:
        """Of these, the ones whose launchers have not set their ranks an end themselves."""
        return [node for node in self.open() if not self.statuses.get(node, {}).get("ending")]


class AttemptWatch:
    """Follows one attempt in its own thread."""

    def __init__(self, job: Job, attempt: Attempt, world: World) -> None:
        self._job, self._attempt, self._world = job, attempt, world
        self._jobs = JobFolder(world.home, job.id)
        self._folder: AttemptFolder = self._jobs.attempt(attempt.number)
        self._started = started_ranks(job.spec, attempt.placement)
        self._devices = [(part.node, index) for part in attempt.placement for index in part.devices]
        self._stop_grace_s: float | None = None
        self._free_before_bytes: tuple[int, ...] = ()  # nobody knows it any more where a restarted service takes it up

    def stop(self, grace_s: float) -> None:
        """Ask for the end; the thread obeys within a tick."""
        self._stop_grace_s = grace_s

    def run(self) -> None:
        """The whole life; returns early, and silently, where the service closes."""
        self._world.nodes.occupy(self._devices)
        try:
            if self._attempt.evidence is None:
                self._finish(self._ending())
            self._remove()
            self._world.nodes.release(self._devices)
            self._emit(Released(job_id=self._job.id, number=self._attempt.number, at_s=self._world.clock()))
        except Closed:
            return

    def _ending(self) -> Ending:
        written = read_ending(self._folder)
        if written is not None:  # it ended before the service was restarted, and nobody had taken note
            return written
        try:
            launchers = self._take_up()
            return launchers if isinstance(launchers, Ending) else self._watch(launchers)
        except Closed:
            raise
        except Exception as error:  # the edge: whatever goes wrong with a launch is its end, and nothing else's
            self._check_closing()
            log.exception("attempt %s", self._attempt.name)
            self._remove()
            return Ending(launch_error=f"{type(error).__name__}: {error}")

    def _finish(self, ending: Ending) -> None:
        try:
            write_ending(self._folder, ending)
        except OSError:  # a full disk: only a restart right now would miss it
            log.exception("attempt %s", self._attempt.name)
        evidence = collect(self._job.spec, self._attempt, self._jobs, ending)
        at_s = self._world.clock()
        self._emit(Finished(job_id=self._job.id, number=self._attempt.number, evidence=evidence, at_s=at_s))

    def _remove(self) -> None:
        try:
            gang.remove(self._attempt)
        except RayError:
            self._check_closing()
            log.exception("attempt %s", self._attempt.name)

    def _take_up(self) -> gang.Launchers | Ending:
        """Launchers whose ranks run; they are started where nothing of the attempt exists."""
        began = any(self._folder.log(rank).exists() for rank in self._started)
        launchers = gang.find(self._attempt)
        if not began and len(launchers) < len(self._attempt.placement):
            gang.remove(self._attempt)
            placed = self._place()
            if isinstance(placed, Ending):
                return placed
            launchers = placed
        if len(launchers) == len(self._attempt.placement) and self._stop_grace_s is None:
            if any(_is_idle(launcher) for launcher in launchers.values()):
                self._start(launchers)
            if self._attempt.status is AttemptStatus.LAUNCHING:
                self._emit(Started(job_id=self._job.id, number=self._attempt.number, at_s=self._world.clock()))
        return launchers

    def _place(self) -> gang.Launchers | Ending:
        newest = read_epoch(self._jobs.epoch)
        if newest > self._attempt.number:
            return Ending(launch_error=f"attempt {newest} of this job exists already")
        live = self._world.nodes.live()
        gone = tuple(part.node for part in self._attempt.placement if part.node not in live)
        if gone:
            return Ending(nodes_lost=gone)
        output = self._folder.output if self._attempt.probe else self._jobs.output
        for folder in (self._folder.path, output, self._jobs.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._jobs.epoch, str(self._attempt.number))
        self._free_before_bytes = self._world.nodes.free_before(self._devices)
        launchers = gang.place(self._attempt, self._jobs, live)
        if isinstance(launchers, str):
            return Ending(launch_error=launchers)
        return launchers

    def _start(self, launchers: gang.Launchers) -> None:
        """Start every rank. Launchers that have started theirs change nothing, so it can be said again."""
        request = self._request(launchers)
        secrets = {name: os.environ[name] for name in request.secrets}
        write_files(request)
        remove_stale_locks(self._world.home / "torch_extensions")
        if request.before is not None:
            first, (rank, *_) = request.ranks[0]
            env = {**secrets, **dict(rank.env)}
            answer = launchers[first].run_before.remote(request.before, env, request.workdir)
            code = ray.get(answer, timeout=BEFORE_TIMEOUT_S + CALL_TIMEOUT_S)
            if code != 0:
                raise OSError(f"what goes before a restart ended with {code}: see {self._folder.before}")
        devices = {part.node: len(part.devices) for part in self._attempt.placement}
        answers = [
            launchers[node].start.remote(
                [(rank.rank, rank.argv, {**secrets, **dict(rank.env)}) for rank in ranks],
                request.workdir,
                devices[node] // len(ranks),
            )
            for node, ranks in request.ranks
        ]
        for status in ray.get(answers, timeout=CALL_TIMEOUT_S):
            if status["error"] and not status["pids"]:
                raise OSError(status["error"])

    def _request(self, launchers: gang.Launchers) -> LaunchRequest:
        missing = [name for name in self._job.spec.secrets if name not in os.environ]
        if missing:
            raise OrchestratorError(f"secret {missing[0]} is not in the environment of the service")
        live = self._world.nodes.live()
        nodes = {part.node: live[part.node].launch for part in self._attempt.placement}
        return request_of(
            self._job, self._attempt, self._world.home, nodes, self._master_port(launchers), self._world.python
        )

    def _master_port(self, launchers: gang.Launchers) -> int:
        """The same port however often the launch is taken up again."""
        path = self._folder.path / "master_port"
        if not path.exists():
            first = launchers[self._attempt.placement[0].node]
            write_durably(path, str(ray.get(first.free_port.remote(), timeout=CALL_TIMEOUT_S)))
        return int(path.read_text())

    def _watch(self, launchers: gang.Launchers) -> Ending:
        """How the gang ended: by itself, stopped, hung, or with nodes that went away."""
        known = Gang(launchers)
        known.lost = {part.node for part in self._attempt.placement if part.node not in launchers}
        spec = self._job.spec
        output = self._folder.output if self._attempt.probe else output_folder(spec, self._jobs)
        progress = Progress(spec, self._folder, self._attempt.plan.world_size, self._started, output)
        stopped, hung_for_s, aborted, give_up_at_s = False, None, False, float("inf")
        known_step_s = self._attempt.pace.step_s if self._attempt.pace else self._attempt.step_s
        while known.open():  # bounded: the watchdog ends a gang that stands still
            self._check_closing()
            self._poll(known)
            grace_s = self._failure_grace_s(known)
            if not aborted and hung_for_s is None and not stopped:
                cpu_s = sum(status["cpu_s"] for status in known.statuses.values())
                hung_for_s = progress.hung_for_s(self._world.nodes.idle_for_s(self._devices), cpu_s)
                grace_s = 0.0 if hung_for_s is not None else grace_s
                pace = progress.pace(known_step_s, self._world.clock())
                if pace is not None:
                    known_step_s = pace.step_s
                    self._emit(
                        PaceReported(job_id=self._job.id, number=self._attempt.number, pace=pace, at_s=pace.at_s)
                    )
            if grace_s is not None and not aborted:
                aborted, give_up_at_s = True, time.monotonic() + grace_s + END_TIMEOUT_S
                # a launcher whose own rank failed has set an end to it, with more time for a rank that said why
                told = known.open() if hung_for_s is not None else known.unending()
                self._tell(known, told, "abort", grace_s)
            if self._attempt.probe and self._stop_grace_s is None and progress.is_probed():
                self._stop_grace_s = PROBE_GRACE_S
            if self._stop_grace_s is not None and not stopped:
                stopped, give_up_at_s = True, time.monotonic() + self._stop_grace_s + END_TIMEOUT_S
                self._tell(known, known.open(), "stop", self._stop_grace_s)
            if time.monotonic() > give_up_at_s:
                known.lost.update(known.open())
        return self._judge(known, stopped, hung_for_s, progress.counts)

    def _poll(self, known: Gang) -> None:
        """Wait at most a tick for news of any launcher."""
        live = self._world.nodes.live()
        polled = set(known.pending.values())
        for node in known.open():
            if node not in polled:
                version = known.statuses.get(node, {}).get("version", 0)
                known.pending[known.launchers[node].wait.remote(version, LONG_POLL_S)] = node
        ready, _ = ray.wait(list(known.pending), num_returns=1, timeout=TICK_S)
        for reference in ready:
            node = known.pending.pop(reference)
            try:
                known.statuses[node] = ray.get(reference, timeout=CALL_TIMEOUT_S)
                known.unanswered[node] = 0
            except ActorUnavailableError:
                known.unanswered[node] = known.unanswered.get(node, 0) + 1
                if known.unanswered[node] > UNAVAILABLE_MAX:
                    known.lost.add(node)
                time.sleep(2 * TICK_S)
            except RayError:
                known.lost.add(node)
        known.lost.update(node for node in known.open() if node not in live)

    def _failure_grace_s(self, known: Gang) -> float | None:
        """How long the other nodes still have, where one has failed; None where all is well."""
        if any(status["oom"] for status in known.statuses.values()):
            return GRACE_AFTER_OOM_S
        failing = any(status["ending"] or status["error"] for status in known.statuses.values())
        return GRACE_AFTER_FAILURE_S if failing or known.lost else None

    def _tell(self, known: Gang, nodes: Iterable[str], verb: str, grace_s: float) -> None:
        for node in nodes:
            getattr(known.launchers[node], verb).remote(grace_s)

    def _judge(self, known: Gang, stopped: bool, hung_for_s: float | None, counts: tuple[int, int] | None) -> Ending:
        live = self._world.nodes.live()
        for node in sorted(known.lost & live.keys()):
            pids = known.statuses.get(node, {}).get("pids", {})
            gang.end_orphans(self._folder, live[node], list(pids.values()))
        firsts = [status["first_ended"] for status in known.statuses.values() if status["first_ended"]]
        first = min(firsts, key=lambda seen: seen[1])[0] if firsts else first_ended(self._folder, self._started)
        errors = [status["error"] for status in known.statuses.values() if status["error"] and not status["pids"]]
        return Ending(
            nodes_lost=tuple(sorted(node for node in known.lost if not self._all_told(node))),
            first_ended_rank=first,
            host_oom_kills=max((status["host_oom_kills"] for status in known.statuses.values()), default=0),
            hung_for_s=hung_for_s,
            launch_error=errors[0] if errors else None,
            no_program=any(status["no_program"] for status in known.statuses.values() if status["error"] in errors[:1]),
            stopped=stopped,
            counts=counts,
            free_before_bytes=self._free_before_bytes,
        )

    def _all_told(self, node: str) -> bool:
        """Whether every rank of `node` had ended, with its exit code on the disk, before its launcher went."""
        rank = 0
        for part in self._attempt.placement:
            ranks = range(rank, rank := rank + len(part.devices))
            if part.node == node:
                return all(read_exit_code(self._folder, one) is not None for one in ranks if one in self._started)
        return False

    def _emit(self, event: Event) -> None:
        self._check_closing()
        self._world.emit(event)

    def _check_closing(self) -> None:
        if self._world.closing.is_set():
            raise Closed


def _is_idle(launcher: Any) -> bool:
    """Whether it was never told to start; one that is gone is not (its node counts as lost a moment later)."""
    try:
        return bool(ray.get(launcher.status.remote(), timeout=CALL_TIMEOUT_S)["state"] == "idle")
    except RayError:
        return False


def request_of(
    job: Job, attempt: Attempt, home: Path, nodes: Mapping[str, LaunchNode], master_port: int, python: str
) -> LaunchRequest:
    """What starting `attempt` means, with what the disk says now: the script's config file and its checkpoints."""
    spec, output = job.spec, output_folder(job.spec, JobFolder(home, job.id))
    config = "" if spec.config is None else (Path(spec.workdir or ".") / spec.config.file).read_text(encoding="utf-8")
    return launch_request(
        job,
        attempt,
        home,
        nodes,
        master_port=master_port,
        python=python,
        resume_from=newest_checkpoint(spec, output) if spec.is_script and not attempt.probe else None,
        config_text=config,
    )


def write_files(request: LaunchRequest) -> None:
    """Have everything on the disk that the ranks of the request read."""
    if request.linked is not None:
        link_all_but(Path(request.linked[0]), request.linked[1], Path(request.workdir))
    for path, text in request.files:
        write_durably(Path(path), text)


def remove_stale_locks(extensions: Path) -> None:
    """Remove locks of C++ builds that were killed: the next build would wait for them for ever, silently."""
    for lock in extensions.glob("*/lock"):
        if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
            lock.unlink(missing_ok=True)
