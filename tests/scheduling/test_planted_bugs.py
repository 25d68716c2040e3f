"""The checker that finds nothing in the real core finds each planted bug."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta, timezone
from math import inf
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import pytest

from orchestrator.scheduling import scheduler
from orchestrator.scheduling import transitions as core
from orchestrator.scheduling.base import drain, tuning
from orchestrator.scheduling.base import start_windows as windows
from orchestrator.scheduling.base.job_updates import replace_job
from orchestrator.scheduling.options import job_options as job_options
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.policies.adaptive import AdaptivePolicy
from orchestrator.scheduling.queue import fair_share as fair
from orchestrator.scheduling.queue import wait_queue as line
from orchestrator.scheduling.queue.fair_share import make_equal_fair_share_key
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass import dispatch
from orchestrator.scheduling.scheduling_pass import index as index
from orchestrator.scheduling.scheduling_pass import preemption as elastic
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.service.server import controller as service
from orchestrator.specs import clock
from orchestrator.specs.actions import Action, Launch, Record
from orchestrator.specs.attempt import Attempt, AttemptStatus, Failure, FailureKind, Verdict
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Event, Finished
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.policy import PolicySpec
from tests.scheduling import transition, world
from tests.scheduling.invariants import violations
from tests.scheduling.transition import history
from tests.scheduling.world import (
    STORM,
    MemoryJournal,
    Scenario,
    backend_of,
    play,
    random_crowd,
    random_rush,
    random_scenario,
    random_tide,
)

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = 120
# events: what a restart later in the night would cost to check is better spent on another night
FOLDED_MAX = 60


def wrong_scheduler(change: Callable[..., Any]) -> Plant:
    """`change(before, after, actions)` returns the state and the actions that each step shall leave instead."""

    class Wrong(Scheduler):
        def step(self, event: Event) -> tuple[Action, ...]:
            before, actions = self.state, super().step(event)
            after, actions = change(before, self.state, actions)
            if after is not self.state:
                super().__init__(after)
            return actions

    return lambda patch: patch.setattr(transition, "Scheduler", Wrong)


def devices_never_busy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AvailabilityProfile, "occupy", lambda *_: None)


def devices_free_before_release(patch: pytest.MonkeyPatch) -> None:
    def live(job: Any) -> Any:
        attempts = () if job is None else job.attempts
        return {
            attempt.number: attempt
            for attempt in attempts
            if attempt.status is not AttemptStatus.ENDED
        }

    patch.setattr(index, "_list_attempts_holding_devices", live)
    patch.setattr(index, "waits_for_devices", lambda job: job.status is JobStatus.QUEUED)


def bugs_are_retried(patch: pytest.MonkeyPatch) -> None:
    judge = core.add_verdict
    again = Verdict(row=9, wait_s=0.0)

    def lenient(*arguments: Any) -> Failure:
        failure = judge(*arguments)
        return failure if failure.ending is None else replace(failure, verdict=again)

    patch.setattr(core, "add_verdict", lenient)


def refuted_plans_forgotten(patch: pytest.MonkeyPatch) -> None:
    for kind in FailureKind:
        patch.setattr(kind, "restart", kind.restart and kind.restart._replace(refutes_plan=False))
    patch.setattr(core, "make_observation", lambda *_: None)
    patch.setattr(job_options, "_find_least_failed_bytes", lambda *_: float("inf"))


def only_the_same_plan_refuted(patch: pytest.MonkeyPatch) -> None:
    """Nothing is learnt but that this very plan is bad."""
    patch.setattr(core, "make_observation", lambda *_: None)
    patch.setattr(job_options, "_find_least_failed_bytes", lambda *_: float("inf"))
    patch.setattr(job_options, "_keep_likely_to_fit", lambda *arguments: arguments[3])


def budgets_never_end(patch: pytest.MonkeyPatch) -> None:
    true_failed = core._apply_failure
    endless = Retries(oom=64, node=64, startup=64, hang=64, preemption=64)

    def lenient(job: Job, attempt: Attempt, failure: Failure, at_s: float) -> Job:
        rich = replace(job, spec=job.spec.model_copy(update={"retries": endless}))
        return replace(true_failed(rich, attempt, failure, at_s), spec=job.spec)

    patch.setattr(core, "_apply_failure", lenient)


def one_budget_for_all(patch: pytest.MonkeyPatch) -> None:
    for kind in FailureKind:
        patch.setattr(kind, "restart", kind.restart and kind.restart._replace(budget="hang"))


def releases_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "_apply_released", lambda state, _event: (state, ()))


def cancels_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "_apply_cancel_requested", lambda state, _event: (state, ()))


def cancelled_jobs_restart(patch: pytest.MonkeyPatch) -> None:
    true_failed = core._apply_failure

    def stubborn(job: Job, attempt: Attempt, failure: Failure, at_s: float) -> Job:
        lost = replace(failure, kind=FailureKind.PREEMPTED)
        return replace(
            true_failed(replace(job, cancelling=False), attempt, lost, at_s),
            cancelling=job.cancelling,
        )

    patch.setattr(core, "_apply_failure", stubborn)


def last_comes_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        line.WaitingJob,
        "sort_key",
        property(lambda waiting: (-waiting.rank, -waiting.job.order, waiting.job.id)),
    )


def priority_ignored(patch: pytest.MonkeyPatch) -> None:
    true_order = AdaptivePolicy.iterate_in_order
    everybody = lambda self: [entry for entry in true_order(self) if entry[1] == inf]  # noqa: E731
    patch.setattr(
        AdaptivePolicy,
        "iterate_in_order",
        lambda self: sorted(everybody(self), key=lambda entry: entry[0].sort_key),
    )


def batch_doubled(patch: pytest.MonkeyPatch) -> None:
    true_begin = dispatch._start_attempt

    def larger(state: Any, index: Any, job: Job, chosen: Any) -> Any:
        plan = chosen.candidate.plan
        plan = replace(plan, gradient_accumulation_steps=2 * plan.gradient_accumulation_steps)
        return true_begin(
            state, index, job, replace(chosen, candidate=replace(chosen.candidate, plan=plan))
        )

    patch.setattr(dispatch, "_start_attempt", larger)


def late_ends_believed(patch: pytest.MonkeyPatch) -> None:
    true_finished = core._apply_finished

    def again(state: Any, event: Finished) -> Any:
        job, attempt = core._find_job_and_attempt(state, event.job_id, event.number)
        if job and attempt and attempt.status is AttemptStatus.ENDED:
            state = replace_job(
                state, core._replace_attempt(job, replace(attempt, status=AttemptStatus.RUNNING))
            )
            event = replace(event, evidence=replace(event.evidence, ranks=()))
        return true_finished(state, event)

    patch.setattr(core, "_apply_finished", again)


def nodes_lost_blamed_on_users(patch: pytest.MonkeyPatch) -> None:
    true_classify = core.classify_end

    def blind(job: Any, attempt: Any, evidence: Any, capacity_bytes: Any = None) -> Any:
        failure = true_classify(job, attempt, evidence, capacity_bytes)
        lost = failure is not None and failure.kind is FailureKind.NODE_LOST
        return replace(failure, kind=FailureKind.USER_ERROR) if lost else failure

    patch.setattr(core, "classify_end", blind)


def nobody_wakes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "wake_at_s", lambda _: None)
    patch.setattr(world, "HOUR_S", 1e9)


def a_rank_without_device(patch: pytest.MonkeyPatch) -> None:
    true_place = AvailabilityProfile.find_devices_now

    def short(self: AvailabilityProfile, *arguments: Any) -> Any:
        first, *others = true_place(self, *arguments) or (None,)
        return first and (replace(first, devices=first.devices[:-1] or first.devices), *others)

    patch.setattr(AvailabilityProfile, "find_devices_now", short)


def everything_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_options, "estimate_needed_free_bytes", lambda *_: 0)


def refused_after_running(patch: pytest.MonkeyPatch) -> None:
    for module in (core, dispatch):
        patch.setattr(
            module,
            "JobStatus",
            type("Wrong", (), {**JobStatus.__members__, "FAILED": JobStatus.REFUSED}),
        )


def nobody_adopted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service.Controller, "_adopt_attempt", lambda *_: None)


def the_tail_forgotten(patch: pytest.MonkeyPatch) -> None:
    true_load = MemoryJournal.load_state_and_events
    patch.setattr(
        MemoryJournal,
        "load_state_and_events",
        lambda self: (true_load(self)[0], true_load(self)[1][:-1]),
    )


def dependants_begin_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "set_pending_dependencies", lambda job, *_: job)


def failed_dependencies_ignored(patch: pytest.MonkeyPatch) -> None:
    """A job starts however the job that it depends on ended."""
    true_answer = scheduler.remove_ended_dependency
    patch.setattr(
        scheduler,
        "remove_ended_dependency",
        lambda job, ended: true_answer(job, replace(ended, status=JobStatus.SUCCEEDED)),
    )


def the_clock_is_utc(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clock, "_load_zone", lambda _: ZoneInfo("UTC"))
    patch.setattr(clock, "_list_spans", clock._list_spans.__wrapped__)  # which remembers


def clocks_never_change(patch: pytest.MonkeyPatch) -> None:
    """A zone is as far from UTC as it is in winter."""
    winter = {"Europe/Berlin": 1, "America/New_York": -5, "UTC": 0}
    patch.setattr(
        clock, "_load_zone", lambda name: timezone(timedelta(hours=winter[name or "UTC"]))
    )
    patch.setattr(clock, "_list_spans", clock._list_spans.__wrapped__)


def windows_never_close(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(windows.StartHours, "find_first_start_s", lambda _self, from_s, _seconds: from_s)


def nights_promised_twice(patch: pytest.MonkeyPatch) -> None:
    """Plant: reservations for later are open to all later jobs."""
    patch.setattr(
        AvailabilityProfile,
        "_find_first_unreserved_s",
        lambda self, number, device, start_s, _: max(
            start_s, self._list_device_free_times(number)[device]
        ),
    )


def arrays_run_all_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "find_array_wait", lambda *_: None)


def turns_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerIndex, "make_fair_share_lookup", lambda _: make_equal_fair_share_key)


def most_used_first(patch: pytest.MonkeyPatch) -> None:
    true_places = SchedulerIndex.make_fair_share_lookup

    def turned(self: SchedulerIndex) -> Any:
        place = true_places(self)
        return lambda user: tuple(-used for used in place(user))

    patch.setattr(SchedulerIndex, "make_fair_share_lookup", turned)


def guarantees_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PolicySpec, "has_quotas", False)


def nothing_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "add_attempt_to_usage", lambda state, *_: state.usage)


def nothing_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fair, "_decay_device_s", lambda usage, *_: usage.device_s)


def launch_twice(_before: Any, after: Any, actions: Any) -> Any:
    return after, (*actions, *(action for action in actions if isinstance(action, Launch)))


def launch_untold(before: Any, after: Any, actions: Any) -> Any:
    """Plant: launches are forgotten for one event."""
    launched = {
        action.job.id: before.jobs.get(action.job.id)
        for action in actions
        if isinstance(action, Launch)
    }
    jobs = {job_id: job for job_id, job in launched.items() if job is not None}
    return replace(after, jobs={**after.jobs, **jobs}), actions


def untold(_before: Any, after: Any, actions: Any) -> Any:
    return after, tuple(action for action in actions if not isinstance(action, Record))


def drains_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(core, "apply_drain", lambda state, _event: state)


def drained_nodes_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "ALWAYS", ((inf, inf),))


def maintenance_forgotten_at_launch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AvailabilityProfile, "set_closed_windows", lambda *_: None)


def nobody_leaves_for_a_maintenance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index, "list_leave_time_s_by_job_id", lambda *_: {})


def moves_cost_a_retry(patch: pytest.MonkeyPatch) -> None:
    true_classify = core.classify_end

    def forgetful(job: Any, attempt: Any, evidence: Any, capacity_bytes: Any = None) -> Any:
        return true_classify(job, replace(attempt, moved_for=""), evidence, capacity_bytes)

    patch.setattr(core, "classify_end", forgetful)


def moved_without_rest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tuning, "TUNING", tuning.Tuning(rest=-1.0))


def everybody_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index, "can_be_stopped", lambda _job: True)


def growth_unforeseen(patch: pytest.MonkeyPatch) -> None:
    place = AvailabilityProfile.find_devices_without_attempt
    patch.setattr(
        AvailabilityProfile,
        "find_devices_without_attempt",
        lambda *where: place(*where[:3], 0.0, where[4]),
    )


def slack_of(seconds: float) -> Plant:
    """Plant: running jobs have this slack, whatever their deadlines."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        movable = elastic.list_movable_jobs
        patch.setattr(
            elastic,
            "list_movable_jobs",
            lambda *arguments: [replace(move, slack_s=seconds) for move in movable(*arguments)],
        )

    return plant


def claims_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Plant: devices that are kept for a moving job are promised to no job."""
    patch.setattr(SchedulerIndex, "reserve_for_migration", lambda *_: None)


BUGS: dict[str, tuple[Plant, str, int]] = {
    "devices never busy": (devices_never_busy, "together", 0),
    "devices free before release": (devices_free_before_release, "together", 0),
    "bugs are retried": (bugs_are_retried, "was tried again after user_error", 0),
    "refuted plans forgotten": (refuted_plans_forgotten, "repeats the plan", 1),
    "only the same plan refuted": (only_the_same_plan_refuted, "needs no less memory", 2),
    "budgets never end": (budgets_never_end, "was tried again", 1),
    "one budget for all": (one_budget_for_all, "was given up", 0),
    "releases unheard": (releases_unheard, "never gave its devices back", 0),
    "cancels unheard": (cancels_unheard, "although it is cancelled", 2),
    "cancelled jobs restart": (cancelled_jobs_restart, "although its job is cancelled", 11),
    "last comes first": (last_comes_first, "start", 29),
    "priority ignored": (priority_ignored, "start", 9),
    "batch doubled": (batch_doubled, "trains with batch 16, not 8", 0),
    "late ends believed": (late_ends_believed, "ended twice", 1),
    "nodes lost blamed on users": (nodes_lost_blamed_on_users, "is taken for user_error", 0),
    "nobody wakes": (nobody_wakes, "never ended", 1),
    "a rank without device": (a_rank_without_device, "devices for", 0),
    "everything fits": (everything_fits, "predicted not to fit", 0),
    "refused after running": (refused_after_running, "was refused after it ran", 0),
    "nobody adopted": (nobody_adopted, "never ended", 0),
    "the tail forgotten": (the_tail_forgotten, "does not hold", 0),
    "drains unheard": (drains_unheard, "not drained", 1),
    "drained nodes taken": (drained_nodes_taken, "which is drained", 3),
    "maintenance forgotten at launch": (maintenance_forgotten_at_launch, "into its maintenance", 0),
    "nobody leaves for a maintenance": (
        nobody_leaves_for_a_maintenance,
        "runs on in the maintenance",
        2,
    ),
    "moves cost a retry": (moves_cost_a_retry, "was moved and is taken for", 2),
    "launched twice": (wrong_scheduler(launch_twice), "was launched 2 times", 0),
    "launch not remembered": (
        wrong_scheduler(launch_untold),
        "is launched but is not its job's newest attempt",
        0,
    ),
    "dependants begin at once": (dependants_begin_at_once, "after which it comes", 0),
    "failed dependencies ignored": (failed_dependencies_ignored, "after which it comes", 0),
    "arrays run all at once": (arrays_run_all_at_once, "run at once", 12),
    "the clock is UTC": (the_clock_is_utc, "outside of", 2),
    "clocks never change": (clocks_never_change, "outside of", 2),
    "windows never close": (windows_never_close, "outside of", 1),
    "nights promised twice": (nights_promised_twice, "are promised the same devices", 3),
    "nothing recorded": (wrong_scheduler(untold), "no record says so", 0),
}


SHARING_BUGS: dict[str, tuple[Plant, str, int]] = {
    "turns ignored": (turns_ignored, "which is equal and ahead", 0),
    "most used first": (most_used_first, "which is equal and ahead", 0),
    "guarantees ignored": (guarantees_ignored, "'s own while", 94),
    "nothing charged": (nothing_charged, "is said to have used", 0),
    "nothing forgotten": (nothing_forgotten, "is said to have used", 0),
}


MOVING_BUGS: dict[str, tuple[Plant, str, int]] = {
    "moved without rest": (moved_without_rest, "s after its launch", 5),
    "everybody moved": (everybody_moved, "although it would lose by that", 6),
    "growth unforeseen": (growth_unforeseen, "was promised", 0),
    "claims forgotten": (claims_forgotten, "which is kept for", 4),
}


def the_due_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(line.WaitQueue, "_count_overdue", lambda *_: 0)


RUSHING_BUGS: dict[str, tuple[Plant, str, int]] = {
    "the due forgotten": (the_due_forgotten, "is due and has nothing promised", 14),
    "deadlines of those who run ignored": (slack_of(inf), "is moved for no earlier deadline", 7),
    "time enough supposed": (slack_of(1e9), "misses its deadline by making way", 18),
}


def stormy(seed: int) -> Scenario:
    """A stormy night."""
    return replace(random_scenario(random.Random(seed)), hazards=STORM)


KINDS: tuple[tuple[dict[str, tuple[Plant, str, int]], Callable[[int], Scenario]], ...] = (
    (BUGS, stormy),
    (SHARING_BUGS, lambda seed: random_crowd(random.Random(seed))),  # users share too few devices
    (MOVING_BUGS, lambda seed: random_tide(random.Random(seed))),  # jobs are moved
    (RUSHING_BUGS, lambda seed: random_rush(random.Random(seed))),  # jobs have deadlines
)
ALL = {bug: (*planted, night) for bugs, night in KINDS for bug, planted in bugs.items()}


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], bool]:
    """Return whether the night of a seed shows the bug, which stays planted."""
    planted = set[str]()

    def shows(bug: str, seed: int) -> bool:
        plant, sentence, _, night = ALL[bug]
        if bug in BUGS:
            monkeypatch.setattr(world, "TURNS_MAX", 400)
        if bug not in planted:
            plant(monkeypatch)
            planted.add(bug)
        return any(sentence in violation for violation in find_breaches(night(seed)))

    return shows


# What the first night shows is short; the others take as many nights as stand beside them
@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.long] * (ALL[bug][2] > 0)) for bug in ALL]
)
def test_a_planted_bug_is_found_in_the_first_night_that_shows_it(
    bug: str, tells: Callable[[str, int], bool]
) -> None:
    assert tells(bug, ALL[bug][2]), (
        f"nobody said {ALL[bug][1]!r}: the search of the long test finds another night"
    )


@pytest.mark.long
@pytest.mark.parametrize("bug", ALL)
def test_the_night_that_stands_beside_a_bug_is_the_first_that_shows_it(
    bug: str, tells: Callable[[str, int], bool]
) -> None:
    assert next((seed for seed in range(SEEDS) if tells(bug, seed)), None) == ALL[bug][2]


class Watched(service.Controller):
    """The production controller, which says where it begins with another state than its journal leads to."""

    forgotten: ClassVar[list[str]] = []

    def __init__(self, journal: Any, *others: Any) -> None:
        super().__init__(journal, *others, make_scheduler=transition.Scheduler)
        if (
            0 < len(journal.events) <= FOLDED_MAX
            and history(journal.events)[-1].state != self.state
        ):
            self.forgotten.append("the service shows what the journal does not hold")


def find_breaches(scenario: Scenario) -> list[str]:
    """Violations in a night in which the service dies at times, and which a bug may keep from ending."""
    journal, backend = MemoryJournal(kill_after=set(range(7, 200, 20))), backend_of(scenario)
    Watched.forgotten.clear()
    with suppress(AssertionError, ServiceError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "Controller", Watched)
        play(scenario, journal, backend)
    return Watched.forgotten + violations(history(journal.events), backend.processes, complete=True)


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, SEEDS // 2), marks=pytest.mark.long)], ids=repr
)
def test_the_checker_says_nothing_about_the_real_core(seeds: range) -> None:
    assert [violation for seed in seeds for violation in find_breaches(stormy(seed))] == []
