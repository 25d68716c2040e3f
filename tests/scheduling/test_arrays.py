"""An array: kept together or not at all, and never more of it at once than it says."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import Event, Submitted
from orchestrator.specs.job.sections import Member
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.pending import Pending
from tests.scheduling.factories import node
from tests.scheduling.test_dependence import controller
from tests.scheduling.test_queue import gone, played, script, seen


def sweep(count: int, at_most: int) -> list[JobSpec]:
    spec = script({1: 100.0})
    members = [Member(number=number, of=count, max_concurrent=at_most) for number in range(count)]
    return [spec.model_copy(update={"member": member}) for member in members]


def submissions(count: int, at_most: int) -> list[Event]:
    return [
        Submitted(job_id=f"job-{order}", order=order, spec=spec, at_s=1.0, array="job-1")
        for order, spec in enumerate(sweep(count, at_most), 1)
    ]


def test_the_next_of_an_array_starts_when_one_has_left_its_devices() -> None:
    events = [seen(node(devices=4)), *submissions(3, 2)]
    state, launches = played(*events)
    assert set(launches) == {"job-1", "job-2"}
    assert (
        describe_status(state.jobs["job-3"])
        == "waits for others of the array job-1: at most 2 run at once"
    )
    assert get_pending_code(state.jobs["job-3"], state.at_s) is Pending.ARRAY_LIMIT
    assert "job-3" in played(*events, *gone(2, 50.0))[1]


def test_what_an_array_may_not_use_is_for_others() -> None:
    other = Submitted(job_id="job-4", order=4, spec=script({2: 100.0}), at_s=2.0)
    _, launches = played(seen(node(devices=4)), *submissions(3, 2), other)
    assert set(launches) == {"job-1", "job-2", "job-4"}


def test_the_jobs_of_a_comparison_start_in_their_turns_however_long_they_are() -> None:
    """Two strategies, three times each; the second is short, and short jobs go first elsewhere."""
    specs = [script({1: 1000.0}), script({1: 10.0})] * 3
    members = [Member(number=number, of=6, max_concurrent=1, compared=True) for number in range(6)]
    events: list[Event] = [seen(node(devices=2))]
    for order, (spec, member) in enumerate(zip(specs, members, strict=True), 1):
        compared = spec.model_copy(update={"member": member})
        events.append(
            Submitted(job_id=f"job-{order}", order=order, spec=compared, at_s=1.0, array="job-1")
        )
    for number in range(1, 6):
        state, launches = played(*events)
        assert list(launches) == [f"job-{order}" for order in range(1, number + 1)]
        assert describe_status(state.jobs["job-6"]).startswith(
            "waits for others of the array job-1: "
        )
        events += gone(number, 100.0 * number)


def test_a_forecast_lets_the_next_of_an_array_begin_when_one_has_ended() -> None:
    """Launch and training take 130 s; two of five may run at once, though four could."""
    state, _ = played(seen(node(devices=4)), *submissions(5, 2))
    forecasts = make_forecast(state)
    assert [forecasts[f"job-{number}"].start_s for number in range(1, 6)] == [
        1.0,
        1.0,
        131.0,
        131.0,
        261.0,
    ]


def test_two_arrays_of_one_submission_are_two() -> None:
    service = controller()
    ids = service.submit_all(
        [(spec, None) for spec in (*sweep(2, 1), *sweep(3, 1), script({1: 10.0}))]
    )
    assert [service.find_job(job_id).array for job_id in ids] == [
        "job-1",
        "job-1",
        "job-3",
        "job-3",
        "job-3",
        None,
    ]


def test_one_wrong_job_refuses_the_whole_array() -> None:
    service = controller()
    *good, last = sweep(3, 1)
    wrong = JobSpec.model_validate(last.model_dump() | {"depends_on": "nobody-9"})
    with pytest.raises(SpecError):
        service.submit_all([(spec, None) for spec in (*good, wrong)])
    assert service.state.submitted == 0


def test_jobs_and_whole_arrays_are_cancelled_together_or_not_at_all() -> None:
    service = controller()
    first, second, third, alone = service.submit_all(
        [(spec, None) for spec in (*sweep(3, 1), script({1: 10.0}))]
    )
    with pytest.raises(ServiceError, match="no job 'nobody'"):
        service.cancel_jobs([alone, "nobody"])
    with pytest.raises(ServiceError, match=f"job {alone} is of no array"):
        service.cancel_jobs([first, alone], whole_arrays=True)
    assert not any(job.status.ended for job in service.state.jobs.values())
    assert service.cancel_jobs([second]) == [second]
    assert service.cancel_jobs([second], whole_arrays=True) == [first, third], (
        "what has ended is left alone"
    )
    cancelled_ids = [
        job_id
        for job_id in (first, second, third, alone)
        if (job := service.find_job(job_id)).cancelling or job.status.ended
    ]
    assert cancelled_ids == [first, second, third]
