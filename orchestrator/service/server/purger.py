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
    empty_trash_and_list_errors,
    list_removable_parts,
    measure_size_bytes,
    move_to_trash,
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
    """The result of a purge (removal of old files): what is removed and why, what stays by reason,
    errors, the home's bytes.
    """

    goes: list[tuple[Part, str]] = field(default_factory=list)
    stays: dict[str, tuple[int, int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # part -> why it could not be moved
    home_bytes: int = 0
    beyond_bytes: int = 0  # above the budget after all that may go
    more: int = 0  # parts that go in the next pass

    def count_staying(self, why_kept: str, size_bytes: int) -> None:
        """Count a part of this size that is kept for this reason."""
        parts, total = self.stays.get(why_kept, (0, 0))
        self.stays[why_kept] = parts + 1, total + size_bytes


class Purger:
    """Removes files of ended jobs that the cluster file's `keep` no longer protects. Every method
    is thread-safe.
    """

    def __init__(
        self,
        home: Path,
        keep_rules: KeepSpec,
        trackers: Sequence[str],
        controller: Controller,
        journal: Journal,
        accounts: Accounts,
    ) -> None:
        """Make the purger; nothing is removed before `run` or `purge`."""
        self._home = home
        self._keep = keep_rules
        self._trackers = trackers
        self._controller = controller
        self._journal = journal
        self._accounts = accounts
        self._lock = threading.Lock()
        self._problem: str | None = None  # of the last pass
        self._left: list[str] = []  # in the trash, and why
        self._next_s = 0.0

    def run(self, stop: threading.Event) -> None:
        """Empty the trash every LOOK_S seconds until `stop` is set; if `keep` has rules, purge
        every PASS_S seconds.
        """
        with suppress(OSError):  # now, since a full disk may have no room for a folder
            (self._home / TRASH).mkdir(mode=0o700, exist_ok=True)
        poll_until(
            stop,
            lambda: self._purge_if_due(stop),
            LOOK_S,
            log,
            "files of ended jobs cannot be removed",
        )

    @property
    def problem(self) -> str | None:
        """A sentence on files that could not be removed, and why; None if all could be."""
        return "; ".join(filter(None, (self._problem, *self._left[:SHOWN_MAX]))) or None

    def purge(
        self,
        principal: Principal,
        request_id: str,
        *,
        is_dry: bool,
        pause: Callable[[], object] = lambda: None,
    ) -> Purge:
        """Remove at most PARTS_MAX parts of job folders that the rules of `keep` no longer protect;
        with `is_dry`, only list them.

        `pause` is called now and then. Raises ServiceError where the service does not own its
        journal, where rows of it cannot be read, and where another purge is running.
        """
        if not self._lock.acquire(blocking=False):
            raise ServiceError(
                "files of ended jobs are being removed already: try again in a minute"
            )
        try:
            planned_for = {*self._controller.state.jobs}
            purge = self._plan_purge(pause)
            if not is_dry:
                self._remove_parts(purge, planned_for, principal, request_id, pause)
                self._problem = self._describe_problem(purge)
            return purge
        finally:
            self._lock.release()

    def _purge_if_due(self, stop: threading.Event) -> None:
        self._left = empty_trash_and_list_errors(self._home, TRASH_PARTS)
        now_s = self._controller.get_now_s()
        if self._keep != UNLIMITED and now_s >= self._next_s:
            self._next_s = now_s + PASS_S
            purge = self.purge(SERVICE, "", is_dry=False, pause=lambda: stop.wait(PAUSE_S))
            if purge.more:
                self._next_s = now_s

    def _plan_purge(self, pause: Callable[[], object]) -> Purge:
        self._check_may_purge()
        # before the live jobs: what has ended by then has ended for good
        ends = self._journal.read_status_and_end_by_job()
        needed = self._find_reasons_to_keep(ends.keys())
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
                purge.home_bytes += measure_size_bytes(path, tick)
        jobs = self._home / "jobs"
        for path in sorted(jobs.iterdir()) if jobs.is_dir() else ():
            total_bytes = measure_size_bytes(path, tick)
            purge.home_bytes += total_bytes
            if path.is_symlink() or jobs.is_symlink():
                purge.count_staying("its folder is behind a link", total_bytes)
            elif path.name in ends and path.name not in needed:
                spare += list_removable_parts(self._home, path.name, *ends[path.name], tick)
            elif path.name in self._controller.state.jobs:
                purge.count_staying("its job has not ended", total_bytes)
            else:
                purge.count_staying(
                    needed.get(path.name, "the journal has no such job"), total_bytes
                )
        self._choose_parts(purge, spare)
        return purge

    def _choose_parts(self, purge: Purge, removable_parts: Sequence[Part]) -> None:
        """Divide these parts, which no job needs any more, into those that the purge removes and
        those that stay.

        Their age decides, then the home's budget of bytes.
        """
        keep = self._keep
        now_s = self._controller.get_now_s()
        young = list[Part]()

        def is_due(part: Part) -> bool:
            period_s = getattr(keep, part.kind)
            return period_s is not None and now_s - part.ended_at_s >= period_s

        newest = {
            part.job: part.kind for part in removable_parts if part.kind in OUTPUTS and is_due(part)
        }
        for part in sorted(
            removable_parts, key=lambda part: (part.ended_at_s, part.job, part.path)
        ):
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
                purge.count_staying(f"keep.{part.kind} is not set", part.size_bytes)
            else:
                purge.count_staying(
                    f"{keep.format_setting(part.kind)}, since the job ended", part.size_bytes
                )
        purge.beyond_bytes = 0 if keep.budget is None else max(0, left_bytes - keep.budget)
        purge.more = max(0, len(purge.goes) - PARTS_MAX)
        del purge.goes[PARTS_MAX:]

    def _remove_parts(
        self,
        purge: Purge,
        known_job_ids: set[str],
        principal: Principal,
        request_id: str,
        pause: Callable[[], object],
    ) -> None:
        """Move the chosen parts to the trash.

        A part stays where that fails, or where a job newer than the plan needs it. `known_job_ids`
        are the jobs that the plan knew.
        """
        planned = purge.goes
        purge.goes = []
        planned_jobs = {part.job for part, _ in planned}
        needed = dict[str, str]()
        looked_at = None
        for part, why in planned:
            self._check_may_purge()
            if (jobs := self._controller.state.jobs) is not looked_at:
                fresh = [job for job in jobs.values() if job.id not in known_job_ids]
                looked_at = jobs
                known_job_ids |= {job.id for job in fresh}
                needed |= _find_reasons_from_jobs(fresh, planned_jobs)
            if part.job in needed:
                purge.count_staying(needed[part.job], part.size_bytes)
                continue
            removal = Removal(
                at_s=self._controller.get_now_s(),
                why=why,
                by=principal.name,
                size_bytes=part.size_bytes,
            )
            try:
                move_to_trash(self._home, part, removal)
            except OSError as error:
                purge.failed[f"{part.job}/{part.path}"] = error.strerror or str(error)
                continue
            purge.goes.append((part, why))
            action = f"purge {part.job}/{part.path}: {part.size_bytes} bytes, {why}"
            log.info("user=%s action=%s", principal.name, action)
            try:
                self._accounts.add_audit_row(principal, request_id, action, 200)
            except ServiceError as error:  # as on a full disk, which this is to mend
                log.error("a removal has no row in the audit log: %s", error)
            pause()

    def _find_reasons_to_keep(self, ended_ids: Set[str]) -> dict[str, str]:
        """Return {id of ended job: why its files are still needed}."""
        needed = _find_reasons_from_jobs(self._controller.state.jobs.values(), ended_ids)
        for sweep_id in self._journal.sweeps.list_open_sweeps():
            trials = [trial.job for trial in self._journal.sweeps.list_trials(sweep_id)]
            first = self._controller.find_job(trials[0]) if trials else None
            named = {*trials} | (
                _collect_possible_job_ids(first.spec) if first is not None else set()
            )
            needed |= dict.fromkeys(named & ended_ids, f"{sweep_id} has not ended")
        for name in self._trackers:
            pending = self._journal.outbox.list_pending(name, RECORDS_MAX)
            waiting = (
                ended_ids
                if len(pending) == RECORDS_MAX
                else {record.job.id for _, record in pending} & ended_ids
            )
            needed |= dict.fromkeys(waiting, f"records wait for {name}")
        return needed

    def _check_may_purge(self) -> None:
        self._controller.confirm_ownership()
        if (problem := self._controller.describe_unreadable_rows()) is not None:
            raise ServiceError(
                f"nothing is removed while it is not known which files jobs need: {problem}"
            )

    def _describe_problem(self, purge: Purge) -> str | None:
        parts = [
            f"{part} cannot be removed: {why}" for part, why in [*purge.failed.items()][:SHOWN_MAX]
        ]
        if purge.beyond_bytes and not purge.more:
            beyond = format_bytes(purge.beyond_bytes)
            parts.append(
                f"the home holds {beyond} more than {self._keep.format_setting('budget')}, and nothing more may go"
            )
        return "; ".join(parts) or None


def _find_reasons_from_jobs(jobs: Iterable[Job], ended_ids: Set[str]) -> dict[str, str]:
    """Return {id of ended job: sentence that names the unfinished job which still refers to it}."""
    needed = dict[str, str]()
    for job in jobs:
        if not job.status.ended:
            compared = list_compared_job_ids(job) if job.spec.is_compared else ()
            named = (_collect_possible_job_ids(job.spec) | {*compared}) & ended_ids
            needed |= dict.fromkeys(named, f"{job.id}, which has not ended, names its job")
    return needed


def _collect_possible_job_ids(spec: JobSpec) -> set[str]:
    """Return all words of a job's spec that may be job ids: in `depends_on`, paths, its command and
    its variables.
    """
    text = re.sub(r"\\[nrtbf]", " ", spec.model_dump_json())
    return {*WORD.findall(text)}


def view_purge(purge: Purge, *, is_dry: bool) -> Mapping[str, object]:
    """Return the purge's result as JSON for the API."""
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
