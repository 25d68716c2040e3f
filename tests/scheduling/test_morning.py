"""Laws of the morning report, on seeded nights of the simulated world."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from orchestrator.scheduling.reports.advice import BY_ABOUT, advise_after_failure
from orchestrator.scheduling.reports.morning import (
    NOT_LOST,
    MorningReport,
    get_ended_at_s,
    make_morning_report,
)
from orchestrator.specs.attempt import FailureKind, FaultSubject
from orchestrator.specs.job.sections import Member
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.state import State
from orchestrator.specs.suspension import Suspension
from tests.scheduling.strangers import failure_of
from tests.scheduling.world import (
    MemoryJournal,
    backend_of,
    play,
    random_rush,
    random_scenario,
    random_tide,
)

NIGHTS = [
    (night, seed) for night in (random_scenario, random_rush, random_tide) for seed in range(2)
]


@pytest.fixture(scope="module", params=NIGHTS, ids=lambda night: f"{night[0].__name__}-{night[1]}")
def state(request: pytest.FixtureRequest) -> State:
    night, seed = request.param
    scenario = night(random.Random(f"{night.__name__} {seed}"))
    return play(scenario, MemoryJournal(), backend_of(scenario))


def report_of(
    state: State, since_s: float | None = None, until_s: float | None = None
) -> MorningReport:
    """The report of the whole night, or of a part of it."""
    begin_s = min(job.submitted_at_s for job in state.jobs.values())
    end_s = max(get_ended_at_s(job) for job in state.jobs.values())
    return make_morning_report(
        state,
        state.jobs.values(),
        begin_s if since_s is None else since_s,
        end_s if until_s is None else until_s,
    )


def failed_attempts(job: Job) -> int:
    return sum(
        attempt.failure is not None and attempt.failure.kind not in NOT_LOST
        for attempt in job.attempts
    )


def test_each_job_stands_in_the_list_of_its_status_and_in_no_other(state: State) -> None:
    report = report_of(state)
    lists = {
        JobStatus.SUCCEEDED: report.succeeded,
        JobStatus.FAILED: report.failed,
        JobStatus.REFUSED: report.refused,
        JobStatus.CANCELLED: report.cancelled,
        JobStatus.RUNNING: report.running,
        JobStatus.QUEUED: report.waiting,
    }
    statuses = {line.id: status for status, lines in lists.items() for line in lines}
    assert statuses == {job.id: job.status for job in state.jobs.values()}
    assert sum(map(len, lists.values())) == len(state.jobs)


def test_recovered_are_the_succeeded_jobs_with_a_failed_attempt_and_each_says_its_failures(
    state: State,
) -> None:
    failure_counts = {
        line.id: line.sentence.count("; then ") + 1 for line in report_of(state).recovered
    }
    succeeded = [job for job in state.jobs.values() if job.status is JobStatus.SUCCEEDED]
    assert failure_counts == {
        job.id: failed_attempts(job) for job in succeeded if failed_attempts(job)
    }


def test_the_device_seconds_are_those_of_the_attempts_and_two_halves_add_up(state: State) -> None:
    report = report_of(state)
    attempts = [attempt for job in state.jobs.values() for attempt in job.attempts]
    devices = {
        attempt.name: sum(len(part.devices) for part in attempt.placement) for attempt in attempts
    }
    held_s = sum(
        devices[attempt.name] * ((attempt.ended_at_s or report.until_s) - attempt.launched_at_s)
        for attempt in attempts
    )
    assert report.cost.held_s == pytest.approx(held_s)
    middle_s = (report.since_s + report.until_s) / 2
    first, second = report_of(state, until_s=middle_s), report_of(state, since_s=middle_s)
    assert first.cost.held_s + second.cost.held_s == pytest.approx(held_s)
    assert first.cost.lost_s + second.cost.lost_s == pytest.approx(report.cost.lost_s)


def test_the_cost_is_that_of_the_devices_at_their_prices_and_unknown_where_one_has_none(
    state: State,
) -> None:
    def priced(price: float | None) -> MorningReport:
        nodes = tuple(
            replace(node, device=node.device.model_copy(update={"price_per_hour": price}))
            for node in state.nodes
        )
        return report_of(replace(state, nodes=nodes, declared=()))

    assert priced(None).cost.money is None
    cost = priced(2.0).cost
    assert cost.money == pytest.approx(2.0 * cost.held_s / 3600)


def test_saved_is_what_jobs_trained_that_succeeded_though_they_had_failed(state: State) -> None:
    report = report_of(state)
    jobs = {line.id for line in report.recovered}
    spans = [
        span
        for span in report.spans
        if span.job in jobs and span.outcome in ("succeeded", FailureKind.MOVED)
    ]
    assert report.cost.saved_s == pytest.approx(
        sum(len(span.devices) * (span.until_s - span.from_s) for span in spans)
    )
    assert bool(jobs) == (report.cost.saved_s > 0)
    assert report.cost.saved_s <= report.cost.trained_s


def test_a_strategy_that_no_plan_has_is_no_refused_job_and_nothing_to_do(state: State) -> None:
    job = next(iter(state.jobs.values()))
    refused = replace(job, status=JobStatus.REFUSED, attempts=())
    compared = replace(
        refused,
        spec=job.spec.model_copy(
            update={"member": Member(number=0, of=1, max_concurrent=1, compared=True)}
        ),
    )
    for variant, counts in ((refused, True), (compared, False)):
        report = report_of(replace(state, jobs=state.jobs.replace_job(variant)))
        assert (job.id in {line.id for line in report.refused}) is counts
        assert any(sentence.startswith(f"{job.id}:") for sentence in report.to_do) is counts


def test_a_job_that_ended_before_the_span_is_left_out(state: State) -> None:
    middle_s = sorted(get_ended_at_s(job) for job in state.jobs.values())[len(state.jobs) // 2]
    report = report_of(state, since_s=middle_s)
    lines = (*report.succeeded, *report.failed, *report.refused, *report.cancelled)
    assert {line.id for line in lines} == {
        job.id for job in state.jobs.values() if get_ended_at_s(job) >= middle_s
    }


def test_every_failed_and_refused_job_has_something_to_do_with_its_command(state: State) -> None:
    report = report_of(state)
    for line in (*report.failed, *report.refused):
        assert any(
            sentence.startswith(f"{line.id}: ") and "`orc " in sentence for sentence in report.to_do
        ), line.id


def test_nothing_is_to_do_for_a_job_that_was_retried(state: State) -> None:
    failed_ids = [line.id for line in report_of(state).failed]
    job = next(job for job in state.jobs.values() if job.id not in failed_ids)
    for failed_id in failed_ids[:3]:
        retried = replace(
            state, jobs=Jobs({**state.jobs, job.id: replace(job, retry_of=failed_id)}.values())
        )
        assert not any(
            sentence.startswith(f"{failed_id}:") for sentence in report_of(retried).to_do
        )


def test_says_to_mend_the_program_only_where_the_program_is_wrong(state: State) -> None:
    for job in state.jobs.values():
        if job.status is JobStatus.FAILED and job.last is not None and job.last.failure is not None:
            advice = next(
                sentence
                for sentence in report_of(state).to_do
                if sentence.startswith(f"{job.id}: ")
            )
            assert ("mend the program" in advice) is (
                job.last.failure.kind is FailureKind.USER_ERROR
            ), advice


def test_a_suspended_device_is_to_be_looked_at_until_its_suspension_is_over(state: State) -> None:
    open_again = Suspension(
        node="n0",
        device=3,
        since_s=0.0,
        until_s=state.at_s,
        count=1,
        reason="two jobs ended on it",
        jobs=(),
    )
    closed = replace(open_again, device=4, until_s=state.at_s + 1.0)
    to_do = report_of(replace(state, suspensions=(open_again, closed))).to_do
    assert [
        sentence.partition(" takes")[0] for sentence in to_do if "two jobs ended on it" in sentence
    ] == ["device 4 of n0"]


def test_a_report_of_500_jobs_takes_less_than_a_second_of_processor_time(state: State) -> None:
    jobs = list(state.jobs.values())
    many = {
        f"{job.id}-{k}": replace(job, id=f"{job.id}-{k}")
        for k in range(500 // len(jobs) + 1)
        for job in jobs
    }
    began_s = time.process_time()
    report = report_of(replace(state, jobs=many))
    assert time.process_time() - began_s < 1.0, "0.05 s on an idle machine"
    assert report.summary.endswith(".")


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("EOFError: EOF when reading a line", FaultSubject.PERSON),
        ("ModuleNotFoundError: No module named 'flash_attn'", FaultSubject.MODULE),
        ("json.JSONDecodeError: Expecting value", FaultSubject.DATA),
        ("OSError: image file is truncated (1 bytes not processed)", FaultSubject.DATA),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'b'", FaultSubject.PATH),
        ("PermissionError: [Errno 13] Permission denied: '/data'", FaultSubject.PERMISSION),
        ("requests.exceptions.ConnectionError: refused", FaultSubject.SERVICE),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", FaultSubject.DEVICE),
        ("FloatingPointError: loss is nan", FaultSubject.NUMBERS),
        ("KeyError: 'labels'", None),
    ],
)
def test_advice_names_what_the_failure_is_about(line: str, about: FaultSubject | None) -> None:
    failure = failure_of({"text": line})
    assert failure is not None
    assert failure.about is about
    if about is not None:
        assert advise_after_failure(failure) == BY_ABOUT[about]


def test_jobs_that_left_their_cards_idle_are_named_with_what_would_fill_them(state: State) -> None:
    """A short attempt, a busy one, and one that nobody measured are not named."""
    shares = [None, 3.0, 49.9, 50.0, 97.0]
    jobs, expected_ids = [], set()
    for number, job in enumerate(state.jobs.values()):
        last = job.last
        if last is None or last.evidence is None or last.started_at_s is None:
            continue
        busy_percent = shares[number % len(shares)]
        measured = replace(last, evidence=replace(last.evidence, busy_percent=busy_percent))
        jobs.append(replace(job, attempts=(*job.attempts[:-1], measured)))
        lasted_s = (last.ended_at_s or last.started_at_s) - last.started_at_s
        if busy_percent is not None and busy_percent < 50 and lasted_s >= 600:
            expected_ids.add(job.id)
    report = make_morning_report(replace(state, jobs=Jobs(jobs)), (), 0.0, 1e12)
    assert {line.id for line in report.idle} == expected_ids
    for line in report.idle:
        assert "% of the time, measured" in line.sentence
        assert "may fill them" in line.sentence
