"""The table of docs/reference/failures-and-retries.md, row by row: how a job goes on after an unexplained end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.scheduling.base.drain import list_active_suspensions
from orchestrator.scheduling.failures.endings import make_ending
from orchestrator.scheduling.failures.places import list_device_sets_to_avoid, update_suspensions
from orchestrator.scheduling.failures.verdict import add_verdict
from orchestrator.specs.attempt import (
    Attempt,
    Cause,
    Ending,
    ErrorReport,
    Evidence,
    Extent,
    Failure,
    FailureKind,
    Finding,
    Heartbeat,
    NodeDevices,
    RankEnd,
)
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from orchestrator.specs.suspension import UnexplainedEnd
from tests.scheduling.factories import attempt, job, script_spec
from tests.scheduling.world import cluster, device

NODES = make_idle_nodes(
    cluster(("a", 1, 2, device("large", "80GiB")), ("b", 1, 2, device("large", "80GiB")))
)
STRANGE = Ending(
    signature="RuntimeError in train.py:step",
    step=40,
    elapsed_s=100.0,
    is_own=False,
    may_pass=False,
)
OWN = replace(STRANGE, signature="KeyError in train.py:step", is_own=True)
EARLY = replace(STRANGE, step=None, elapsed_s=9.0)
REFUSED = replace(EARLY, signature="ConnectionError", may_pass=True)


def ended_attempt(
    ending: Ending, number: int = 1, place: tuple[str, int] = ("a", 0), saved: int | None = None
) -> Attempt:
    failure = Failure(kind=FailureKind.UNKNOWN, reason="it ended", ending=ending)
    return replace(
        attempt(),
        number=number,
        placement=(NodeDevices(node=place[0], devices=(place[1],)),),
        launched_at_s=1000.0 * number - ending.elapsed_s,
        ended_at_s=1000.0 * number,
        evidence=Evidence(checkpoint_step=saved),
        failure=failure,
    )


def judged(
    *attempts: Attempt, others: tuple[UnexplainedEnd, ...] = (), spec: Job | None = None
) -> Failure:
    """The last attempt with its verdict, after those before it got theirs."""
    record = replace(spec or job(script_spec()), attempts=attempts[:-1])
    last = attempts[-1]
    assert last.failure is not None
    return add_verdict(record, last, last.failure, others, NODES)


def with_verdict(before: Attempt, *earlier: Attempt) -> Attempt:
    return replace(before, failure=judged(*earlier, before))


def elsewhere(key: str, ending: Ending, place: tuple[str, int]) -> UnexplainedEnd:
    return UnexplainedEnd(
        job=key,
        family=key,
        ending=ending,
        placement=(NodeDevices(node=place[0], devices=(place[1],)),),
        at_s=900.0,
    )


FIRST = with_verdict(ended_attempt(STRANGE))
SAME_DEVICE = ended_attempt(STRANGE, 2)
ROWS = {
    "1: another job ended on the device": (
        1,
        judged(ended_attempt(STRANGE), others=(elsewhere("x", EARLY, ("a", 0)),)),
    ),
    "1: another job ended on the node just now": (
        1,
        judged(ended_attempt(STRANGE), others=(elsewhere("x", EARLY, ("a", 1)),)),
    ),
    "2: three jobs alike on two nodes": (
        2,
        judged(
            ended_attempt(REFUSED),
            others=(elsewhere("x", REFUSED, ("b", 0)), elsewhere("y", REFUSED, ("a", 1))),
        ),
    ),
    "4: the user's word": (
        4,
        judged(ended_attempt(OWN), spec=job(script_spec(retries={"on_error": 1}))),
    ),
    "5: twice alike on two devices": (5, judged(FIRST, ended_attempt(STRANGE, 2, ("b", 1)))),
    "6: twice alike on one device": (6, judged(FIRST, SAME_DEVICE)),
    "7: and on it again": (
        7,
        judged(FIRST, with_verdict(SAME_DEVICE, FIRST), ended_attempt(STRANGE, 3)),
    ),
    "7: twice the program's own on one device": (
        7,
        judged(with_verdict(ended_attempt(OWN)), ended_attempt(OWN, 2)),
    ),
    "7: each time alike, at another step": (
        7,
        judged(
            FIRST,
            with_verdict(ended_attempt(replace(STRANGE, step=21), 2), FIRST),
            ended_attempt(replace(STRANGE, step=37), 3),
        ),
    ),
    "8: a checkpoint kept the steps": (8, judged(ended_attempt(STRANGE, saved=30))),
    "9: nothing kept them": (9, judged(ended_attempt(STRANGE))),
    "10: the program's own, at the start": (10, judged(ended_attempt(replace(OWN, step=None)))),
    "11: no step was made": (11, judged(ended_attempt(EARLY))),
}


@pytest.mark.parametrize(("row", "failure"), ROWS.values(), ids=list(ROWS))
def test_the_first_row_that_fits_decides_and_the_reason_says_why(
    row: int, failure: Failure
) -> None:
    assert failure.verdict is not None
    assert failure.verdict.row == row
    is_final = row in (5, 7, 10)
    assert (failure.verdict.wait_s is None, failure.kind is FailureKind.USER_ERROR) == (
        is_final,
        is_final,
    )
    assert failure.reason.startswith("it ended; ")


def test_what_a_network_refused_accuses_no_place_and_is_no_bug_however_often_alike() -> None:
    first = with_verdict(ended_attempt(REFUSED))
    again = judged(first, ended_attempt(REFUSED, 2), others=(elsewhere("x", EARLY, ("a", 0)),))
    assert again.verdict is not None
    assert (again.verdict.row, again.verdict.wait_s) == (11, 1200.0)
    assert list_device_sets_to_avoid(replace(job(), attempts=(first,)), NODES, 1000.0) == ()


def test_a_bug_within_training_costs_one_more_attempt_at_once() -> None:
    failure = judged(ended_attempt(OWN))
    assert failure.verdict is not None
    assert failure.verdict.wait_s == 2.0


def test_an_attempt_that_gains_ten_minutes_uses_no_budget() -> None:
    short, long = (
        judged(ended_attempt(replace(STRANGE, elapsed_s=s), saved=30)).verdict
        for s in (599.0, 600.0)
    )
    assert short is not None
    assert long is not None
    assert (short.budget, long.budget) == ("unknown", "")


def test_exit_codes_limit_what_on_error_allows() -> None:
    spec = job(script_spec(retries={"on_error": 1, "exit_codes": [75]}))
    failure = judged(ended_attempt(replace(OWN, step=None)), spec=spec)
    assert failure.verdict is not None
    assert failure.verdict.row == 10, "the attempt has no exit code"


def state_after(*steps: tuple[Job, Attempt, Failure | None]) -> State:
    state = State(nodes=NODES)
    for record, last, failure in steps:
        state = update_suspensions(
            replace(state, at_s=last.ended_at_s or 0.0), record, last, failure
        )
    return state


def named(key: str) -> Job:
    return replace(job(script_spec(name=key)), id=key)


def test_a_device_is_suspended_by_two_jobs_and_trusted_after_a_success() -> None:
    first, other = ended_attempt(STRANGE), ended_attempt(EARLY, 2)
    suspect = judged(other, others=(elsewhere(named("x").key, STRANGE, ("a", 0)),))
    steps = [(named("x"), first, judged(first)), (named("y"), other, suspect)]
    suspended = state_after(*steps)
    assert [(entry.place, entry.until_s) for entry in list_active_suspensions(suspended)] == [
        ("device 0 of a", 3800.0)
    ]
    assert not list_active_suspensions(
        state_after(*steps, (named("z"), replace(other, failure=None), None))
    )


def test_a_job_that_ends_alike_elsewhere_takes_back_what_it_accused() -> None:
    first, other, again = (
        ended_attempt(STRANGE),
        ended_attempt(EARLY, 2),
        ended_attempt(EARLY, 3, ("b", 0)),
    )
    suspect = judged(other, others=(elsewhere(named("x").key, STRANGE, ("a", 0)),))
    accuser = replace(named("y"), attempts=(replace(other, number=1, failure=suspect),))
    cleared = state_after(
        (named("x"), first, judged(first)),
        (named("y"), other, suspect),
        (
            accuser,
            replace(again, number=2),
            judged(replace(other, number=1, failure=suspect), replace(again, number=2)),
        ),
    )
    assert not list_active_suspensions(cleared)


def test_a_log_that_names_broken_hardware_accuses_and_suspends_nothing_alone_nor_ever_the_last_place() -> (
    None
):
    failure = Failure(kind=FailureKind.NODE_LOST, reason="ECC", rank=0, broken=Extent.DEVICE)
    last = ended_attempt(STRANGE)
    first, second = (named("x"), last, failure), (named("y"), last, failure)
    assert not list_active_suspensions(state_after(first)), "any script can print it"
    assert not list_active_suspensions(state_after(first, first)), "however often"
    assert [entry.place for entry in list_active_suspensions(state_after(first, second))] == [
        "device 0 of a"
    ]
    virtual = replace(last, evidence=Evidence(virtual=True))
    assert not list_active_suspensions(
        state_after((named("x"), virtual, failure), (named("y"), virtual, failure))
    )
    assert list_device_sets_to_avoid(
        replace(job(), attempts=(replace(last, failure=failure),)), NODES, 1000.0
    )
    alone = State(nodes=NODES[:1], at_s=1000.0)
    both = replace(last, placement=(NodeDevices(node="a", devices=(0, 1)),))
    for key in "xy":
        alone = update_suspensions(alone, named(key), both, failure)
    assert not alone.suspensions


def test_a_sweep_whose_trials_all_end_alike_suspends_nothing_and_no_crowd_suspends_more_than_half() -> (
    None
):
    failure = Failure(kind=FailureKind.NODE_LOST, reason="ECC", broken=Extent.DEVICE)
    state = State(nodes=NODES, at_s=1000.0)
    everywhere = [
        ended_attempt(STRANGE, place=place) for place in (("a", 0), ("a", 1), ("b", 0), ("b", 1))
    ]
    for number, last in enumerate((*everywhere, *everywhere)):
        state = update_suspensions(
            state, replace(named("trial"), id=f"trial-{number}"), last, failure
        )
    assert not state.suspensions
    for number, last in enumerate((*everywhere, *everywhere)):
        state = update_suspensions(state, named(f"job{number}"), last, failure)
    assert len(list_active_suspensions(state)) == 2


def full_disk(number: int, at_s: float, ran_s: float = 60.0, saved: int | None = None) -> Attempt:
    full = Failure(kind=FailureKind.DISK_FULL, reason="OSError: [Errno 28] No space left on device")
    evidence = Evidence(checkpoint_step=saved)
    times = {"launched_at_s": at_s - ran_s, "ended_at_s": at_s}
    return replace(attempt(), number=number, evidence=evidence, failure=full, **times)


def test_a_full_disk_is_waited_for_longer_and_longer_and_not_for_ever() -> None:
    record, at_s, waits = job(script_spec()), 1000.0, list[float]()
    while True:
        last = full_disk(len(record.attempts) + 1, at_s)
        assert last.failure is not None
        failure = add_verdict(record, last, last.failure, (), NODES)
        assert failure.verdict is not None
        assert failure.kind is FailureKind.DISK_FULL
        if failure.verdict.wait_s is None:
            break
        waits.append(failure.verdict.wait_s)
        record = replace(record, attempts=(*record.attempts, replace(last, failure=failure)))
        at_s += waits[-1] + 60.0
    assert waits[:6] == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0]
    assert set(waits[6:]) == {1800.0}
    assert 12 * 3600.0 < at_s - 1000.0 < 13 * 3600.0
    assert "no space for 12 hours" in failure.reason


@pytest.mark.parametrize(
    ("saved", "waits"),
    [
        ((40, 40, 40), (60.0, 120.0, None)),  # nothing new was kept
        ((None, None, None), (60.0, 120.0, None)),
        ((40, 40, 90), (60.0, 120.0, 60.0)),  # the last attempt trained on
        ((40, 90, 90), (60.0, 60.0, 120.0)),
    ],
)
def test_the_wait_for_space_begins_anew_after_an_attempt_that_left_a_newer_checkpoint(
    saved: tuple[int | None, ...], waits: tuple[float | None, ...]
) -> None:
    record, waited = job(script_spec()), list[float | None]()
    for number, step in enumerate(saved, 1):
        last = full_disk(number, number * 22_000.0, saved=step)
        assert last.failure is not None
        failure = add_verdict(record, last, last.failure, (), NODES)
        assert failure.verdict is not None
        waited.append(failure.verdict.wait_s)
        record = replace(record, attempts=(*record.attempts, replace(last, failure=failure)))
    assert tuple(waited) == waits


@pytest.mark.parametrize(("saved", "waits"), [(None, False), (40, True)])
def test_no_attempt_follows_a_full_disk_that_kept_nothing_of_hours(
    saved: int | None, waits: bool
) -> None:
    last = full_disk(1, 50_000.0, ran_s=3 * 3600.0, saved=saved)
    assert last.failure is not None
    failure = add_verdict(job(script_spec()), last, last.failure, (), NODES)
    assert failure.verdict is not None
    assert (failure.verdict.wait_s is not None) == waits


@pytest.mark.parametrize(
    ("frames", "are_alike"),
    [('  File "/home/ada/train.py", line 9, in step\n    batch["labels"]\n', True), ("", False)],
)
def test_the_programs_own_line_is_the_place_and_a_phase_only_without_one(
    frames: str, are_alike: bool
) -> None:
    text = f"Traceback (most recent call last):\n{frames}KeyError: 'labels'\n"
    cause = Cause.NOT_OOM
    finding = Finding(cause=cause, line="KeyError: 'labels'", excerpt=text)
    endings = [
        make_ending(
            attempt(),
            Evidence(),
            RankEnd(rank=0, exit_code=1),
            finding,
            ErrorReport(rank=0, step=2, phase=phase, type="KeyError", traceback=text),
            ("python", "train.py"),
        )
        for phase in ("backward", "optimizer")
    ]
    assert (endings[0].signature == endings[1].signature) is are_alike


def interrupted_attempt(
    number: int,
    step: int,
    ran_s: float = 100.0,
    kind: FailureKind = FailureKind.PREEMPTED,
    saved: int | None = None,
) -> Attempt:
    """Return an attempt that SIGKILL ended, on device a/0 for odd numbers and on a/1 for even."""
    beat = Heartbeat(rank=0, step=step, steps_done=step, step_s=1.0, peak_bytes=0, phase="", at_s=0)
    ended = ended_attempt(replace(STRANGE, elapsed_s=ran_s), number, ("a", number % 2))
    return replace(
        ended,
        evidence=Evidence(heartbeats=(beat,), checkpoint_step=saved),
        failure=Failure(kind=kind, reason="rank 0 was ended from outside by SIGKILL"),
    )


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (interrupted_attempt(4, 12), FailureKind.UNKNOWN),
        (interrupted_attempt(4, 13), FailureKind.PREEMPTED),
        (interrupted_attempt(4, 12, ran_s=300.0), FailureKind.PREEMPTED),
        (interrupted_attempt(4, 12, kind=FailureKind.NODE_LOST), FailureKind.NODE_LOST),
    ],
)
def test_the_third_interruption_after_one_step_and_one_time_is_the_programs(
    last: Attempt, kind: FailureKind
) -> None:
    first = interrupted_attempt(1, 40)
    failure = judged(first, interrupted_attempt(2, 12), interrupted_attempt(3, 12), last)
    assert failure.kind is kind
    assert (failure.verdict is not None) == (kind is FailureKind.UNKNOWN)


def test_interruptions_before_the_first_step_or_between_other_ends_are_from_outside() -> None:
    early = [interrupted_attempt(number, 0) for number in range(1, 9)]
    assert judged(*early).kind is FailureKind.PREEMPTED
    moved = replace(interrupted_attempt(2, 12), failure=None)
    attempts = (interrupted_attempt(1, 12), moved, interrupted_attempt(3, 12))
    assert judged(*attempts).kind is FailureKind.PREEMPTED


@pytest.mark.parametrize(
    ("ran_s", "saved", "is_programs"),
    [
        (100.0, (None, None, None), True),
        (100.0, (10, 10, 10), True),
        (100.0, (10, 20, 30), False),
        (7200.0, (10, 10, 10), True),
        (7200.0, (10, 20, 30), False),
        (7200.0, (None, None, None), False),
    ],
)
def test_a_job_that_advances_between_regular_interruptions_is_preempted(
    ran_s: float, saved: tuple[int | None, ...], is_programs: bool
) -> None:
    """A machine that is taken away every two hours leaves as many slow steps each time."""
    attempts = [
        interrupted_attempt(number, 12, ran_s, saved=step) for number, step in enumerate(saved, 1)
    ]
    assert (judged(*attempts).kind is FailureKind.UNKNOWN) == is_programs


def test_a_program_that_interrupts_itself_is_given_up_and_accuses_no_device() -> None:
    attempts: list[Attempt] = []
    for number in range(1, 6):
        last = interrupted_attempt(number, 12)
        failure = judged(*attempts, last)
        attempts.append(replace(last, failure=failure))
        if failure.verdict is not None and failure.verdict.wait_s is None:
            break
    assert failure.kind is FailureKind.USER_ERROR
    assert "after step 12" in failure.reason
    assert failure.ending is not None
    assert failure.ending.may_pass
