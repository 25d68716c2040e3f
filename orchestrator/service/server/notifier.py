"""Sends notices that depend on time, not on events: late jobs and reports. Also tests targets on request."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from orchestrator.backends.journal.outbox import Notices
from orchestrator.backends.notify.notice import Notice, make_job_notice, make_notice
from orchestrator.backends.notify.targets import Target
from orchestrator.scheduling.reports.deadlines import describe_late_jobs
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.ended import make_report
from orchestrator.service.server.polling import poll_until
from orchestrator.service.views.report import format_markdown, make_report_title
from orchestrator.specs.cluster import describe_unreadable
from orchestrator.specs.errors import SpecError, suggest_word
from orchestrator.specs.job_record import Job
from orchestrator.specs.notify import NoticeKind, NotifySpec

LOOK_S = 20.0  # between two looks: a forecast of 2,000 waiting jobs takes seconds
UNREADABLE_S = 30.0  # for so long devices must be unreadable: one reading that times out is no news
DAY_S = 86_400.0
SHIFT_S = 3600.0  # by which clocks are put forward or back

log = logging.getLogger(__name__)


class Notifier:
    """Sends notices that no event causes, such as morning reports and late jobs, to the
    notification targets.
    """

    def __init__(
        self,
        spec: NotifySpec,
        targets: Mapping[str, Target],
        notices: Notices,
        controller: Controller,
        clock: Callable[[], float],
        list_sweeps: Callable[[], Sequence[SweepReport]],
    ) -> None:
        """Make the notifier; nothing is sent yet. A report that was due before the first start
        counts as sent.
        """
        self.targets = targets
        self._spec = spec
        self._notices = notices
        self._controller = controller
        self._clock = clock
        self._sweeps = list_sweeps
        if spec.report_at is not None and not notices.was_kind_sent(NoticeKind.REPORT):
            due_s = self._compute_last_report_due_s(clock())
            notices.mark_sent(make_notice(NoticeKind.REPORT, repr(due_s), due_s, "", "", {}))

    def run(self, stop: threading.Event) -> None:
        """Send due notices every LOOK_S seconds until `stop` is set, or the journal is lost."""
        poll_until(stop, self.send_due_notices, LOOK_S, log, "looking for late jobs failed")

    def send_due_notices(self) -> None:
        """Send the notices that are due now: of jobs expected to be late, of a report, and of
        unreadable rows and devices.

        Each is sent once.
        """
        now_s = self._clock()
        self._notices.append_notices(
            [
                *self._make_late_job_notices(now_s),
                *self._make_report_notices(now_s),
                *self._make_unreadable_row_notices(now_s),
                *self._make_driver_notices(now_s),
            ]
        )

    def send_test_notices(self, target_names: Sequence[str]) -> dict[str, str | None]:
        """Send a test notice to these targets, or to all if none is named. Return {name: error, or
        None}.

        Raises SpecError for an unknown target.
        """
        for name in target_names:
            if name not in self.targets:
                hint = suggest_word(
                    name, self.targets, "`notify.targets` of the cluster file names them"
                )
                raise SpecError("no such target", source="TARGET", got=name, hint=hint)
        now_s = self._clock()
        trial = make_notice(
            "test", secrets.token_hex(8), now_s, "A test", "`orc notify test` sent this.", {}
        )
        problems: dict[str, str | None] = dict.fromkeys(target_names or self.targets)
        for name in problems:
            try:
                self.targets[name].deliver([trial])
            except OSError as error:
                problems[name] = str(error)
        return problems

    def _make_late_job_notices(self, now_s: float) -> list[Notice]:
        state = self._controller.state
        due = [job.id for job in state.live_jobs if job.deadline_s is not None]
        ids = {job_id: _make_late_notice(state.jobs[job_id], now_s, "").id for job_id in due}
        sent_ids = self._notices.find_sent([*ids.values()]) if ids else set()
        reasons = describe_late_jobs(
            state, [job_id for job_id in due if ids[job_id] not in sent_ids]
        )
        return [
            _make_late_notice(state.jobs[job_id], now_s, reason)
            for job_id, reason in reasons.items()
        ]

    def _make_report_notices(self, now_s: float) -> list[Notice]:
        if self._spec.report_at is None:
            return []
        due_s = self._compute_last_report_due_s(now_s)
        if self._notices.find_sent(
            [make_notice(NoticeKind.REPORT, repr(due_s), due_s, "", "", {}).id]
        ):
            return []
        report = make_report(self._controller, due_s - DAY_S, now_s, self._sweeps())
        data = {
            "summary": report.summary,
            "since_s": repr(report.since_s),
            "until_s": repr(report.until_s),
        }
        heading = f"Report, {make_report_title(report)}"
        return [
            make_notice(
                NoticeKind.REPORT, repr(due_s), now_s, heading, format_markdown(report), data
            )
        ]

    def _make_unreadable_row_notices(self, now_s: float) -> list[Notice]:
        problem = self._controller.describe_unreadable_rows()
        if problem is None:
            return []
        return [
            make_notice(
                NoticeKind.UNREADABLE,
                problem,
                now_s,
                "The journal has unreadable rows",
                problem,
                {},
            )
        ]

    def _make_driver_notices(self, now_s: float) -> list[Notice]:
        """Return a notice for each node whose devices the driver cannot read, one per moment at
        which they became unreadable.
        """
        nodes = {node.name: node for node in self._controller.state.nodes}
        since = {(entry.node, entry.since_s) for entry in self._controller.state.unreadable}
        notices = []
        for name, since_s in sorted(since):
            if name in nodes and now_s - since_s >= UNREADABLE_S:
                places = describe_unreadable([nodes[name]])
                text = f"Nothing new starts there, and what runs goes on: {places}. `nvidia-smi` there says more."
                data = {"node": name, "reason": places}
                key = f"{name}/{since_s!r}"
                title = f"{name} has devices that cannot be read"
                notices.append(make_notice(NoticeKind.DRIVER, key, now_s, title, text, data))
        return notices

    def _compute_last_report_due_s(self, now_s: float) -> float:
        """Return when a report was last due, in seconds since 1970."""
        assert self._spec.report_at is not None
        first_s = self._spec.report_at.compute_due_s(now_s - DAY_S - SHIFT_S)
        next_s = self._spec.report_at.compute_due_s(first_s)
        return next_s if next_s <= now_s else first_s


def _make_late_notice(job: Job, at_s: float, reason: str) -> Notice:
    return make_job_notice(
        NoticeKind.LATE, job, job.key, at_s, "will be late", f"{job.id} {reason}"
    )
