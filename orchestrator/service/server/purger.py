"""Removes files of ended jobs by the cluster file's `keep`, and reports what stays and why.

Nothing of an unfinished job is removed, nothing that such a job names, and nothing before its records have been sent.
In doubt, as where a row of the journal cannot be read, files count as needed.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.attempts.ended_files import (
    TRASH,
    Part,
    Removal,
    empty_trash,
    parts_of,
    remove,
    size_bytes,
)
from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.journal import Journal
from orchestrator.scheduling.reports.comparison import list_compared_job_ids
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.polling import poll_until
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.keep import UNLIMITED, KeepSpec, PartKind
from orchestrator.specs.units import format_bytes

LOOK_S = 5.0  # between two looks at the trash
PASS_S = 3600.0  # between two passes over the home
TRASH_PARTS = 10  # deleted in a look
SHOWN_MAX = 3  # parts that cannot be removed, in a problem
PARTS_MAX = 10_000  # removed in a pass
RECORDS_MAX = 1000  # whose jobs are looked up; where more wait, every job counts as one of theirs
PAUSE_EVERY, PAUSE_S = 500, 0.02  # entries of folders between two pauses of the service's own pass
OUTPUTS = (PartKind.UNSUCCESSFUL, PartKind.RESULTS)
WORD = re.compile(r"[A-Za-z0-9._-]+")
SERVICE = Principal(
    name="keep", role=Role.ADMIN
)  # who removes in the audit log, where nobody asked

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Purge:
    """Result of a purge: removed parts with reasons, (count, bytes) that stay by reason, errors, and home bytes."""

    goes: list[tuple[Part, str]] = field(default_factory=list)
    stays: dict[str, tuple[int, int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # part -> why it could not be moved
    home_bytes: int = 0
    beyond_bytes: int = 0  # above the budget after all that may go
    more: int = 0  # parts that go in the next pass

    def stay(self, reason: str, count_bytes: int) -> None:
        """Count something that stays for this reason."""
        parts, total = self.stays.get(reason, (0, 0))
        self.stays[reason] = parts + 1, total + count_bytes


class Purger:
    """Removes files of ended jobs in one home. Every method is thread-safe."""

    def __init__(
        self,
        home: Path,
        keep: KeepSpec,
        trackers: Sequence[str],
        controller: Controller,
        journal: Journal,
        accounts: Accounts,
    ) -> None:
        """Nothing is removed before `run` or `purge`."""
        self._home = home
        self._keep = keep
        self._trackers = trackers
        self._controller = controller
        self._journal = journal
        self._accounts = accounts
        self._lock = threading.Lock()
        self._problem: str | None = None  # of the last pass
        self._left: list[str] = []  # in the trash, and why
        self._next_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Empty the trash every LOOK_S, and purge every PASS_S if `keep` sets anything, until `stop` is set."""
        with suppress(OSError):  # now, since a full disk may have no room for a folder
            (self._home / TRASH).mkdir(mode=0o700, exist_ok=True)
        poll_until(
            stop, lambda: self._look(stop), LOOK_S, log, "files of ended jobs cannot be removed"
        )

    @property
    def problem(self) -> str | None:
        """Text on why some files could not be removed; None without any."""
        return "; ".join(filter(None, (self._problem, *self._left[:SHOWN_MAX]))) or None

    def purge(
        self,
        by: Principal,
        request_id: str,
        *,
        is_dry: bool,
        pause: Callable[[], object] = lambda: None,
    ) -> Purge:
        """Remove at most PARTS_MAX parts that `keep` no longer protects; with `is_dry`, only list them.

        `pause` is called now and then. Raises ServiceError where the service does not own its journal, where rows of it
        cannot be read, and where another purge is running.
        """
        if not self._lock.acquire(blocking=False):
            raise ServiceError(
                "files of ended jobs are being removed already: try again in a minute"
            )
        try:
            planned_for = {*self._controller.state.jobs}
            purge = self._plan(pause)
            if not is_dry:
                self._remove(purge, planned_for, by, request_id, pause)
                self._problem = self._problem_of(purge)
            return purge
        finally:
            self._lock.release()

    def _look(self, stop: threading.Event) -> None:
        self._left = empty_trash(self._home, TRASH_PARTS)
        now_s = self._controller.now_s()
        if self._keep != UNLIMITED and now_s >= self._next_s:
            self._next_s = now_s + PASS_S
            purge = self.purge(SERVICE, "", is_dry=False, pause=lambda: stop.wait(PAUSE_S))
            if purge.more:
                self._next_s = now_s

    def _plan(self, pause: Callable[[], object]) -> Purge:
        self._check()
        # before the live jobs: what has ended by then has ended for good
        ends = self._journal.ends()
        needed = self._needed(ends.keys())
        purge = Purge()
        spare = list[Part]()
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            if count % PAUSE_EVERY == 0:
                pause()

        for path in sorted(self._home.iterdir()):
            if path.name not in ("jobs", TRASH):
                purge.home_bytes += size_bytes(path, tick)
        jobs = self._home / "jobs"
        for path in sorted(jobs.iterdir()) if jobs.is_dir() else ():
            total_bytes = size_bytes(path, tick)
            purge.home_bytes += total_bytes
            if path.is_symlink() or jobs.is_symlink():
                purge.stay("its folder is behind a link", total_bytes)
            elif path.name in ends and path.name not in needed:
                spare += parts_of(self._home, path.name, *ends[path.name], tick)
            elif path.name in self._controller.state.jobs:
                purge.stay("its job has not ended", total_bytes)
            else:
                purge.stay(needed.get(path.name, "the journal has no such job"), total_bytes)
        self._choose(purge, spare)
        return purge

    def _choose(self, purge: Purge, spare: Sequence[Part]) -> None:
        """Share out the parts that no job needs: by their age, then by the budget."""
        keep = self._keep
        now_s = self._controller.now_s()
        young = list[Part]()

        def is_due(part: Part) -> bool:
            period_s = getattr(keep, part.kind)
            return period_s is not None and now_s - part.ended_at_s >= period_s

        newest = {part.job: part.kind for part in spare if part.kind in OUTPUTS and is_due(part)}
        for part in sorted(spare, key=lambda part: (part.ended_at_s, part.job, part.path)):
            if is_due(part):
                purge.goes.append((part, keep.format_setting(part.kind)))
            elif (
                part.kind is PartKind.SUPERSEDED and part.job in newest
            ):  # older ones stay no longer than the newest
                purge.goes.append((part, keep.format_setting(newest[part.job])))
            else:
                young.append(part)
        left_bytes = purge.home_bytes - sum(part.size_bytes for part, _ in purge.goes)
        order = [*PartKind]
        for part in sorted(young, key=lambda part: order.index(part.kind)):
            if (
                keep.budget is not None
                and left_bytes > keep.budget
                and part.kind is not PartKind.RESULTS
            ):
                purge.goes.append((part, keep.format_setting("budget")))
                left_bytes -= part.size_bytes
            elif getattr(keep, part.kind) is None:
                purge.stay(f"keep.{part.kind} is not set", part.size_bytes)
            else:
                purge.stay(
                    f"{keep.format_setting(part.kind)}, since the job ended", part.size_bytes
                )
        purge.beyond_bytes = 0 if keep.budget is None else max(0, left_bytes - keep.budget)
        purge.more = max(0, len(purge.goes) - PARTS_MAX)
        del purge.goes[PARTS_MAX:]

    def _remove(
        self,
        purge: Purge,
        planned_for: set[str],
        by: Principal,
        request_id: str,
        pause: Callable[[], object],
    ) -> None:
        """Move the parts to the trash; those stay that cannot be moved, or that a job beyond `planned_for` names."""
        planned = purge.goes
        purge.goes = []
        planned_jobs = {part.job for part, _ in planned}
        needed = dict[str, str]()
        looked_at = None
        for part, why in planned:
            self._check()
            if (jobs := self._controller.state.jobs) is not looked_at:
                fresh = [job for job in jobs.values() if job.id not in planned_for]
                looked_at = jobs
                planned_for |= {job.id for job in fresh}
                needed |= _needed_by_jobs(fresh, planned_jobs)
            if part.job in needed:
                purge.stay(needed[part.job], part.size_bytes)
                continue
            removal = Removal(
                at_s=self._controller.now_s(), why=why, by=by.name, size_bytes=part.size_bytes
            )
            try:
                remove(self._home, part, removal)
            except OSError as error:
                purge.failed[f"{part.job}/{part.path}"] = error.strerror or str(error)
                continue
            purge.goes.append((part, why))
            action = f"purge {part.job}/{part.path}: {part.size_bytes} bytes, {why}"
            log.info("user=%s action=%s", by.name, action)
            try:
                self._accounts.record(by, request_id, action, 200)
            except ServiceError as error:  # as on a full disk, which this is to mend
                log.error("a removal has no row in the audit log: %s", error)
            pause()

    def _needed(self, ended: Set[str]) -> dict[str, str]:
        """Return why files of ended jobs are needed, by the ids of these jobs."""
        needed = _needed_by_jobs(self._controller.state.jobs.values(), ended)
        for sweep_id in self._journal.sweeps.open():
            trials = [trial.job for trial in self._journal.sweeps.trials(sweep_id)]
            first = self._controller.job(trials[0]) if trials else None
            named = {*trials} | (_possible_ids(first.spec) if first is not None else set())
            needed |= dict.fromkeys(named & ended, f"{sweep_id} has not ended")
        for name in self._trackers:
            pending = self._journal.outbox.pending(name, RECORDS_MAX)
            waiting = (
                ended
                if len(pending) == RECORDS_MAX
                else {record.job.id for _, record in pending} & ended
            )
            needed |= dict.fromkeys(waiting, f"records wait for {name}")
        return needed

    def _check(self) -> None:
        self._controller.confirm()
        if (problem := self._controller.unreadable()) is not None:
            raise ServiceError(
                f"nothing is removed while it is not known which files jobs need: {problem}"
            )

    def _problem_of(self, purge: Purge) -> str | None:
        parts = [
            f"{part} cannot be removed: {why}" for part, why in [*purge.failed.items()][:SHOWN_MAX]
        ]
        if purge.beyond_bytes and not purge.more:
            beyond = format_bytes(purge.beyond_bytes)
            parts.append(
                f"the home holds {beyond} more than {self._keep.format_setting('budget')}, and nothing more may go"
            )
        return "; ".join(parts) or None


def _needed_by_jobs(jobs: Iterable[Job], ended: Set[str]) -> dict[str, str]:
    """Return which of these jobs has not ended and names an ended one, as a reason by the id of the ended one."""
    needed = dict[str, str]()
    for job in jobs:
        if not job.status.ended:
            compared = list_compared_job_ids(job) if job.spec.is_compared else ()
            named = (_possible_ids(job.spec) | {*compared}) & ended
            needed |= dict.fromkeys(named, f"{job.id}, which has not ended, names its job")
    return needed


def _possible_ids(spec: JobSpec) -> set[str]:
    """Return the words of a job file, each a possible id: of `depends_on`, of a path, of a command or a variable."""
    text = re.sub(r"\\[nrtbf]", " ", spec.model_dump_json())
    return {*WORD.findall(text)}


def purge_view(purge: Purge, *, is_dry: bool) -> Mapping[str, object]:
    """Return the purge as JSON for the API."""
    return {
        "dry_run": is_dry,
        "goes": [
            {"job": part.job, "part": part.path, "kind": part.kind, "bytes": part.size_bytes,
             "ended_at_s": part.ended_at_s, "why": why}
            for part, why in purge.goes
        ],
        "stays": [
            {"reason": reason, "count": count, "bytes": total} for reason, (count, total) in purge.stays.items()
        ],
        "failed": purge.failed,
        "home_bytes": purge.home_bytes,
        "beyond_bytes": purge.beyond_bytes,
        "more": purge.more,
    }  # fmt: skip
