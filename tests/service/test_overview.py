"""Laws of the overview: what failed comes first, once for an array, with the line of the log that names the cause."""

from __future__ import annotations

import html

from orchestrator.service.pages.overview import (
    FAILURES_MAX,
    FAILURES_S,
    find_last_line_of_excerpt,
    make_overview_data,
)
from orchestrator.service.views.records import make_job_view
from orchestrator.specs.attempt import Failure, FailureKind
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.replace import replace
from tests.service.worlds import World

TRACEBACK = "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'labels'\n\n"


def failed_job(
    world: World, name: str, array: str | None = None, kind: FailureKind = FailureKind.USER_ERROR
) -> Job:
    """Return a job that ended at 1000 s, after the error of TRACEBACK."""
    world.submit()
    world.turn_until("succeeded")
    job = next(job for job in world.controller.state.jobs.values() if job.attempts)
    failure = Failure(kind=kind, reason="the script raised an error", rank=0, excerpt=TRACEBACK)
    attempt = replace(job.attempts[-1], failure=failure, ended_at_s=1000.0)
    return replace(job, id=name, array=array, status=JobStatus.FAILED, attempts=(attempt,))


def shown(world: World, jobs: list[Job], now_s: float) -> list[tuple[str, int, str]]:
    state = replace(world.controller.state, jobs=Jobs({}))
    data = make_overview_data(state, jobs, make_job_view, {}, now_s)
    return [(row["job"]["id"], row["more"], row["line"]) for row in data["failures"]]


def test_a_failure_is_shown_for_a_day_with_the_last_line_of_its_log(world: World) -> None:
    job = failed_job(world, "a-1")
    assert shown(world, [job], 1000.0 + FAILURES_S) == [("a-1", 0, "KeyError: 'labels'")]
    assert shown(world, [job], 1001.0 + FAILURES_S) == []
    retry = replace(job, id="a-2", retry_of="a-1", status=JobStatus.SUCCEEDED)
    assert shown(world, [job, retry], 1000.0) == [], "who retried it has answered it"


def test_members_of_an_array_that_failed_alike_are_one_row(world: World) -> None:
    alike = failed_job(world, "a-1", array="a-1")
    jobs = [replace(alike, id=f"a-{number}") for number in range(1, 5)]
    other = failed_job(world, "a-9", array="a-1", kind=FailureKind.HUNG)
    alone = [replace(alike, id=f"b-{number}", array=None) for number in range(2)]
    state = replace(world.controller.state, jobs=Jobs({}))
    rows = make_overview_data(state, [*jobs, other, *alone], make_job_view, {}, 2000.0)["failures"]
    assert [(row["job"]["id"], row["more"]) for row in rows] == [
        ("a-1", 3),
        ("a-9", 0),
        ("b-0", 0),
        ("b-1", 0),
    ]


def test_the_page_has_a_bounded_number_of_failures_and_counts_the_others(world: World) -> None:
    job = failed_job(world, "a-1")
    jobs = [replace(job, id=f"a-{number}") for number in range(FAILURES_MAX + 5)]
    state = replace(world.controller.state, jobs=Jobs({}))
    data = make_overview_data(state, jobs, make_job_view, {}, 2000.0)
    assert (len(data["failures"]), data["more_failures"], data["counts"]["failed"]) == (
        FAILURES_MAX,
        5,
        25,
    )


def test_the_telling_line_of_an_empty_excerpt_is_empty() -> None:
    assert find_last_line_of_excerpt(" \n\n") == ""


def test_a_question_stands_on_the_page_with_a_button_that_answers_it(world: World) -> None:
    job_id = world.submit()
    asks = "no plan is left, whatever this sentence says"
    job = world.controller.state.jobs[job_id]
    asking = replace(job, status=JobStatus.QUEUED, attempts=(), asks=asks, reason=f"asks: {asks}")
    asking = replace(asking, answer=(("allow", "semantic"),))
    world.controller._state = replace(world.controller.state, jobs=Jobs([asking]))
    for path in ("/ui/overview", f"/ui/jobs/{job_id}"):
        text = html.unescape(world.client.get(path).text)
        assert f'hx-post="/jobs/{job_id}/retry" hx-vals=\'{{"allow": "semantic"}}\'' in text, path


def test_the_first_page_is_the_overview_and_its_parts_are_of_the_live_queue(world: World) -> None:
    for _ in range(3):
        job_id = world.submit()
    world.controller.run_once(1.0)
    answer = world.client.get("/", follow_redirects=True)
    assert answer.url.path == "/ui/overview"
    assert "Running" in answer.text
    assert f"/ui/jobs/{job_id}" in answer.text
