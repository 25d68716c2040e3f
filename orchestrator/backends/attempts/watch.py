"""The life cycle of one attempt: start or resume, watch, report the end, release the devices."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from orchestrator.backends.attempts.durable import (
    DISK_AWAY,
    Fence,
    read_attempt_number,
    write_durably,
)
from orchestrator.backends.attempts.evidence import (
    Ending,
    collect_evidence,
    find_first_failed_rank,
    read_ending,
    write_ending,
)
from orchestrator.backends.attempts.identity import make_file_access
from orchestrator.backends.attempts.launch_request import list_started_ranks
from orchestrator.backends.attempts.launcher import (
    GRACE_AFTER_FAILURE_S,
    GRACE_AFTER_OOM_S,
    LauncherStatus,
)
from orchestrator.backends.attempts.left_files import read_exit_code
from orchestrator.backends.attempts.nodes import NodeWatch
from orchestrator.backends.attempts.ports import ClusterAway, LauncherGroup, Launchers
from orchestrator.backends.attempts.progress import Progress
from orchestrator.backends.attempts.script_output import FileAccess, get_output_folder
from orchestrator.backends.attempts.start import StartFailed, start_ranks
from orchestrator.backends.attempts.workdir import copy_upload, relocate_uploads
from orchestrator.backends.redaction import mask_evidence
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.specs.attempt import Attempt, AttemptStatus, Evidence, list_devices_of
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Event, Finished, PaceReported, Released, Started
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder

TICK_S = 0.25
AWAY_S = 1.0  # between two tries to reach a cluster that is away
# a rank that SIGKILL does not end by then sits in the kernel: its launcher is given up
END_TIMEOUT_S = 30.0
ERROR_CHARACTERS_MAX = 500
PROBE_GRACE_S = 1.0  # nothing of a probe is worth saving, nor of ranks that train apart

Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


def make_set_event() -> threading.Event:
    """Return a threading.Event that is already set."""
    event = threading.Event()
    event.set()
    return event


@frozen
class WatchContext:
    """Objects that all watchers of one backend share, such as the nodes, the launchers and the
    clock.
    """

    home: Path
    python: str
    nodes: NodeWatch
    launchers: Launchers
    clock: Callable[[], float]
    emit: Callable[[Event], None]
    closing: threading.Event
    ownership: Ownership
    fence: Fence | None  # of this service, already stored
    inherit_env: tuple[str, ...] = ()
    users: Mapping[str, UserSpec] = field(default_factory=dict)
    serving: threading.Event = field(
        default_factory=make_set_event
    )  # set once the service answers requests


class Ownership(Protocol):
    """Interface to this service's exclusive ownership of the journal (event log)."""

    @property
    def fence(self) -> int | None:
        """Fencing number of this owner of the journal; None where the journal is a file, which the
        kernel locks.
        """

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        """Return None if this service owns the journal and may act; raise ServiceError otherwise.

        With `may_wait` false, only local knowledge is checked: the call never waits, and raises in
        doubt.
        """


class Closed(Exception):
    """The service is closing: watching stops, and the attempt continues."""


@dataclass(slots=True)
class Gang:
    """All launchers of an attempt, with their last statuses."""

    group: LauncherGroup
    statuses: dict[str, LauncherStatus] = field(default_factory=dict)  # by node, as last reported
    lost: set[str] = field(default_factory=set)

    def list_open_nodes(self) -> list[str]:
        """Return the nodes whose launchers have neither ended nor disappeared."""
        ended = {node for node, status in self.statuses.items() if status["state"] == "ended"}
        return [node for node in self.group.nodes if node not in self.lost | ended]

    def list_running_nodes(self) -> list[str]:
        """Return the open nodes whose launchers are not yet ending their ranks."""
        return [
            node
            for node in self.list_open_nodes()
            if node not in self.statuses or not self.statuses[node]["ending"]
        ]


@dataclass(slots=True)
class EndingGang:
    """State of the requested end of an attempt on all of its nodes, such as its reason and time."""

    hung_for_s: float | None = None
    aborted: bool = False
    stopped: bool = False
    give_up_at_s: float = -math.inf  # once aborted or stopped
    # nodes that were lost before any launcher was asked to end
    lost_before: frozenset[str] = frozenset()


class AttemptWatch:
    """Watcher of one attempt, in its own thread."""

    def __init__(self, job: Job, attempt: Attempt, context: WatchContext) -> None:
        self._asked = job
        self._job = relocate_uploads(job, context.home)
        self._attempt = attempt
        self._world = context
        self._jobs = JobFolder(context.home, job.id)
        self._folder: AttemptFolder = self._jobs.attempt(attempt.number)
        self._started = list_started_ranks(job.spec, attempt.placement)
        self._about = {"job": job.id, "attempt": attempt.number}  # fields of the log
        self._devices = list_devices_of(attempt.placement)
        self._stop_grace_s: float | None = None
        self._has_finished = False  # its end was emitted
        self._free_before_bytes: tuple[
            int, ...
        ] = ()  # unknown where a restarted service takes the attempt up

    def stop(self, grace_s: float) -> None:
        """Request the attempt's end; the watcher's thread acts within TICK_S seconds."""
        self._stop_grace_s = grace_s

    def run(self) -> None:
        """Watch the attempt until its devices are released; return early when the service closes.

        Any exception ends this attempt alone: its end is reported with the error, and its devices
        are released.
        """
        try:
            self._world.nodes.occupy_devices(self._devices)
            self._wait_for_service()
            if self._attempt.evidence is None:
                self._report_end(self._run_to_end())
            self._end_launchers_safely()
            self._world.nodes.release_devices(self._devices)
        except Closed:
            return
        except Exception as error:  # the edge of a thread
            log.exception("attempt %s", self._attempt.name, extra=self._about)
            self._end_without_reading(f"{type(error).__name__}: {error}")
        self._emit_unless_closing(
            Released(job_id=self._job.id, number=self._attempt.number, at_s=self._world.clock())
        )

    def _wait_for_service(self) -> None:
        """Wait until the service answers requests, since patterns of users run from here on. Raises Closed."""
        while not self._world.serving.wait(TICK_S):  # ends with the service at the latest
            self._check_closing()

    def _end_without_reading(self, error: str) -> None:
        """Report the attempt's end with this error after a fault of its watcher, without reading
        any file that it left.
        """
        if self._attempt.evidence is None and not self._has_finished:
            evidence = Evidence(
                collect_error=error[:ERROR_CHARACTERS_MAX], stopped=self._stop_grace_s is not None
            )
            event = Finished(
                job_id=self._job.id,
                number=self._attempt.number,
                evidence=evidence,
                at_s=self._world.clock(),
            )
            self._emit_unless_closing(event)
        for release in (
            self._end_launchers_safely,
            partial(self._world.nodes.release_devices, self._devices),
        ):
            try:
                release()
            except Closed:
                return
            except Exception:  # the other one is tried all the same
                log.exception("attempt %s", self._attempt.name, extra=self._about)

    def _emit_unless_closing(self, event: Event) -> None:
        if not self._world.closing.is_set():
            self._world.emit(event)

    def _run_to_end(self) -> Ending:
        try:
            written = read_ending(self._folder)
            if written is not None:  # the service was restarted before the journal had this end
                return written
            group = self._retry(self._start_or_resume)
            return group if isinstance(group, Ending) else self._watch_ranks(group)
        except Closed:
            raise
        except StartFailed as error:
            self._end_launchers_safely()
            return Ending(launch_error=str(error), no_program=error.no_program)
        except (
            Exception
        ) as error:  # the edge: whatever goes wrong with a launch is its end, and nothing else's
            self._check_closing()
            log.exception("attempt %s", self._attempt.name, extra=self._about)
            self._end_launchers_safely()
            return Ending(launch_error=f"{type(error).__name__}: {error}")

    def _report_end(self, ending: Ending) -> None:
        self._retry(self._confirm_ownership)
        self._retry(lambda: write_ending(self._folder, ending))
        collected = collect_evidence(
            self._job.spec, self._attempt, self._jobs, ending, self._file_access()
        )
        evidence = mask_evidence(collected, self._job.spec, os.environ)
        at_s = self._world.clock()
        self._emit_event(
            Finished(job_id=self._job.id, number=self._attempt.number, evidence=evidence, at_s=at_s)
        )
        self._has_finished = True

    def _file_access(self) -> FileAccess:
        """Return the rights with which the job's files are searched: those of the job's user."""
        return make_file_access(self._job, self._world.users, self._world.python)

    def _end_launchers_safely(self) -> None:
        try:
            self._retry(self._end_launchers)
        except Closed:
            raise
        except Exception:  # the edge of a thread: others go on
            self._check_closing()
            log.exception("attempt %s", self._attempt.name, extra=self._about)

    def _end_launchers(self) -> None:
        self._confirm_ownership()
        self._world.launchers.end_launchers(self._attempt)

    def _confirm_ownership(self) -> None:
        """Return None if this service surely owns the journal. Raises ClusterAway in doubt: another
        service may act instead.
        """
        try:
            self._world.ownership.confirm_ownership(may_wait=False)
        except ServiceError as error:
            raise ClusterAway(str(error)) from None

    def _retry(self, call: Callable[[], Answer]) -> Answer:
        """Return the call's result; repeat the call while the cluster is away or the disk takes no
        writes. Raises Closed.
        """
        while True:  # ends with the service at the latest
            self._check_closing()
            try:
                return call()
            except ClusterAway:
                self._world.closing.wait(AWAY_S)
            except OSError as error:
                if error.errno not in DISK_AWAY:
                    raise
                self._world.closing.wait(AWAY_S)

    def _start_or_resume(self) -> LauncherGroup | Ending:
        """Return the attempt's launchers with running ranks; create and start them if the attempt
        has not begun.

        Returns the ending instead where it cannot be started.
        """
        self._confirm_ownership()
        began = any(self._folder.log(rank).exists() for rank in self._started)
        group = self._world.launchers.find_launchers(self._attempt)
        if not began and len(group.nodes) < len(self._attempt.placement):
            self._world.launchers.end_launchers(self._attempt)
            placed = self._create_launchers()
            if isinstance(placed, Ending):
                return placed
            group = placed
        if len(group.nodes) == len(self._attempt.placement) and self._stop_grace_s is None:
            if group.is_idle():
                live = self._world.nodes.list_live_nodes()
                nodes = {part.node: live[part.node].launch for part in self._attempt.placement}
                self._confirm_ownership()  # placing may have taken minutes
                world = self._world
                settings = (world.home, world.python, world.fence, world.inherit_env, world.users)
                start_ranks(self._job, self._attempt, group, nodes, *settings)
            if self._attempt.status is AttemptStatus.LAUNCHING:
                self._emit_event(
                    Started(
                        job_id=self._job.id, number=self._attempt.number, at_s=self._world.clock()
                    )
                )
        return group

    def _create_launchers(self) -> LauncherGroup | Ending:
        newest = read_attempt_number(self._jobs.epoch)
        if newest > self._attempt.number:
            return Ending(launch_error=f"attempt {newest} of this job exists already")
        live = self._world.nodes.list_live_nodes()
        gone = tuple(part.node for part in self._attempt.placement if part.node not in live)
        if gone:
            return Ending(nodes_lost=gone)
        output = self._folder.output if self._attempt.probe else self._jobs.output
        for folder in (self._folder.path, output, self._jobs.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        copy_upload(self._asked, self._world.home)
        write_durably(self._jobs.epoch, str(self._attempt.number))
        self._free_before_bytes = self._world.nodes.list_free_bytes_when_idle(self._devices)
        placed = self._world.launchers.create_launchers(self._attempt, self._jobs, live)
        return Ending(launch_error=placed) if isinstance(placed, str) else placed

    def _watch_ranks(self, launchers: LauncherGroup) -> Ending:
        """Watch the ranks until they end, and return how: by themselves, stopped, hung, or with
        lost nodes.
        """
        gang = Gang(launchers)
        gang.lost = {
            part.node for part in self._attempt.placement if part.node not in launchers.nodes
        }
        spec = self._job.spec
        output = self._folder.output if self._attempt.probe else get_output_folder(spec, self._jobs)
        recovered = any(map(ran_out_of_memory, self._job.attempts))
        progress = Progress(
            spec,
            self._folder,
            self._attempt.plan.world_size,
            self._started,
            output,
            includes_peak=recovered,
            file_access=self._file_access(),
        )
        ending = EndingGang()
        known_step_s = self._attempt.pace.step_s if self._attempt.pace else self._attempt.step_s
        while gang.list_open_nodes():  # bounded: the watchdog ends a gang that stands still
            self._check_closing()
            try:
                self._poll_launchers(gang)
                if not ending.aborted and not ending.stopped:
                    ending.lost_before = frozenset(gang.lost)
                if not ending.aborted and ending.hung_for_s is None and not ending.stopped:
                    cpu_s = sum(status["cpu_s"] for status in gang.statuses.values())
                    ending.hung_for_s = progress.find_hung_for_s(
                        self._world.nodes.compute_idle_for_s(self._devices), cpu_s
                    )
                    pace = progress.find_changed_pace(known_step_s, self._world.clock())
                    if pace is not None:
                        known_step_s = pace.step_s
                        self._emit_event(
                            PaceReported(
                                job_id=self._job.id,
                                number=self._attempt.number,
                                pace=pace,
                                at_s=pace.at_s,
                            )
                        )
                is_over = progress.has_lone_ranks() or (
                    self._attempt.probe and progress.is_probed()
                )
                if self._stop_grace_s is None and is_over:
                    self._stop_grace_s = PROBE_GRACE_S
                self._end_ranks(gang, ending)
            except ClusterAway:  # its ranks go on, and nothing is known of them
                self._world.closing.wait(AWAY_S)
                ending.give_up_at_s = max(ending.give_up_at_s, time.monotonic() + END_TIMEOUT_S)
        return self._make_ending(gang, ending, progress.first_and_last_step)

    def _end_ranks(self, gang: Gang, requested_end: EndingGang) -> None:
        """Ask the launchers to end their ranks if that is due. Raises ClusterAway; the caller then
        asks again.
        """
        self._confirm_ownership()
        grace_s = 0.0 if requested_end.hung_for_s is not None else self._find_failure_grace_s(gang)
        if grace_s is not None and not requested_end.aborted:
            # a launcher whose own rank failed has set an end to it, with more time for a rank that
            # said why
            gang.group.abort(
                gang.list_open_nodes()
                if requested_end.hung_for_s is not None
                else gang.list_running_nodes(),
                grace_s,
            )
            requested_end.aborted = True
            requested_end.give_up_at_s = time.monotonic() + grace_s + END_TIMEOUT_S
        if self._stop_grace_s is not None and not requested_end.stopped:
            gang.group.stop(gang.list_open_nodes(), self._stop_grace_s)
            requested_end.stopped = True
            requested_end.give_up_at_s = time.monotonic() + self._stop_grace_s + END_TIMEOUT_S
        if (
            requested_end.aborted or requested_end.stopped
        ) and time.monotonic() > requested_end.give_up_at_s:
            if self._is_disk_away():  # a launcher tells an end once its exit code is written
                requested_end.give_up_at_s = time.monotonic() + END_TIMEOUT_S
            else:
                gang.lost.update(gang.list_open_nodes())

    def _is_disk_away(self) -> bool:
        """Return whether the attempt's folder cannot be written to now."""
        probe = self._folder.path / "writable"
        try:
            write_durably(probe, "1")
            probe.unlink()
        except OSError as error:
            return error.errno in DISK_AWAY
        return False

    def _poll_launchers(self, gang: Gang) -> None:
        """Wait at most one tick for a changed status of any launcher."""
        live = self._world.nodes.list_live_nodes()
        for node, status in gang.group.poll(gang.list_open_nodes(), TICK_S).items():
            if status is None:
                gang.lost.add(node)
            else:
                gang.statuses[node] = status
        gang.lost.update(node for node in gang.list_open_nodes() if node not in live)

    def _find_failure_grace_s(self, gang: Gang) -> float | None:
        """Return the seconds that the other nodes' ranks have left after a node failed; None
        without a failure.
        """
        if any(status["oom"] for status in gang.statuses.values()):
            return GRACE_AFTER_OOM_S
        failing = any(status["ending"] or status["error"] for status in gang.statuses.values())
        return GRACE_AFTER_FAILURE_S if failing or gang.lost else None

    def _make_ending(
        self, gang: Gang, requested_end: EndingGang, logged_steps: tuple[int, int] | None
    ) -> Ending:
        live = self._retry(self._world.nodes.list_live_nodes)
        for node in sorted(gang.lost & live.keys()):
            pids = [*gang.statuses[node]["pids"].values()] if node in gang.statuses else []
            self._retry(
                partial(self._world.launchers.end_orphan_processes, self._folder, live[node], pids)
            )
        firsts = [
            status["first_ended"] for status in gang.statuses.values() if status["first_ended"]
        ]
        first = (
            min(firsts, key=lambda failure: failure[1])[0]
            if firsts
            else find_first_failed_rank(self._folder, self._started)
        )
        errors = [
            status["error"]
            for status in gang.statuses.values()
            if status["error"] and not status["pids"]
        ]
        return Ending(
            nodes_lost=tuple(
                sorted(
                    node for node in gang.lost if not self._has_all_exit_codes(node, requested_end)
                )
            ),
            first_ended_rank=first,
            host_oom_kills=max(
                (status["host_oom_kills"] for status in gang.statuses.values()), default=0
            ),
            disk_full=any(status.get("disk_full", False) for status in gang.statuses.values()),
            hung_for_s=requested_end.hung_for_s,
            launch_error=errors[0] if errors else None,
            no_program=any(
                status["no_program"]
                for status in gang.statuses.values()
                if status["error"] in errors[:1]
            ),
            stopped=requested_end.stopped,
            counts=logged_steps,
            free_before_bytes=self._free_before_bytes,
        )

    def _has_all_exit_codes(self, node: str, requested_end: EndingGang) -> bool:
        """Return whether every rank of `node` wrote its exit code before its launcher disappeared.

        An exit by SIGKILL counts only once a launcher was asked to end its ranks. Ray kills a
        worker's children before the worker itself, and the launcher may still write that down
        (KillChildProcs, core_worker.cc, Ray 2.60).
        """
        codes: list[int | None] = []
        rank = 0
        for part in self._attempt.placement:
            ranks = range(rank, rank := rank + len(part.devices))
            if part.node == node:
                codes = [
                    read_exit_code(self._folder, number)
                    for number in ranks
                    if number in self._started
                ]
        was_killed = {code for code in codes if code} == {
            -signal.SIGKILL
        } and node in requested_end.lost_before
        return None not in codes and not was_killed

    def _emit_event(self, event: Event) -> None:
        self._check_closing()
        self._world.emit(event)

    def _check_closing(self) -> None:
        if self._world.closing.is_set():
            raise Closed
