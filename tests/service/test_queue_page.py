"""Laws of the queue page: an array is one row, and a job whose steps are known shows how far it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.service.pages.queue import MEMBERS_MAX, Filter, make_queue_data
from orchestrator.service.views.records import make_job_view
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.parse import parse_job
from orchestrator.specs.run import JobFolder
from orchestrator.specs.state import State
from tests.service.worlds import JOB, World

ENDS = (JobStatus.RUNNING, JobStatus.QUEUED, JobStatus.SUCCEEDED, JobStatus.FAILED)


def array(name: str, statuses: Sequence[JobStatus]) -> list[Job]:
    spec = parse_job(JOB, "job.yaml")
    return [
        Job(
            id=f"{name}-{number}",
            spec=spec,
            order=number,
            submitted_at_s=0.0,
            status=status,
            array=f"{name}-0",
        )
        for number, status in enumerate(statuses)
    ]


def queue(jobs: Sequence[Job], criteria: Filter) -> Mapping[str, Any]:
    return make_queue_data(State(jobs=Jobs(jobs)), [], make_job_view, {}, criteria, 1)


def test_members_of_an_array_are_one_row_where_its_liveliest_job_is() -> None:
    data = queue([*array("a", ENDS), *array("b", ENDS[2:])], Filter())
    (live,), (ended,) = data["running"], data["ended"]
    assert live["counts"] == [
        (status, 1) for status in ("queued", "running", "succeeded", "failed")
    ]
    assert (live["id"], live["ended"], live["jobs"]) == ("a-0", 2, 4)
    assert ended["counts"] == [("succeeded", 1), ("failed", 1)]
    assert data["waiting"] == []


def test_a_row_has_a_bounded_number_of_jobs_and_the_filter_shows_all_of_them() -> None:
    jobs = array("a", [JobStatus.QUEUED] * (MEMBERS_MAX + 3))
    (row,) = queue(jobs, Filter())["waiting"]
    assert (len(row["members"]), row["more"]) == (MEMBERS_MAX, 3)
    rows = queue([*jobs, *array("b", ENDS)], Filter(array="a-0"))["waiting"]
    assert [row["id"] for row in rows] == [job.id for job in jobs]


def test_an_array_unfolds_without_javascript_and_is_cancelled_as_a_whole(world: World) -> None:
    member = {"number": 0, "of": 2, "max_concurrent": 1}
    jobs = [
        {"spec": {**parse_job(JOB, "").model_dump(mode="json"), "member": {**member, "number": n}}}
        for n in (0, 1)
    ]
    first, second = world.client.post("/jobs/batch", json={"jobs": jobs}).json()["ids"]
    page = world.client.get("/ui/queue").text
    assert f'<details id="array-{first}">' in page
    assert f'href="/ui/jobs/{second}"' in page
    assert f"Cancel all {first}" in page
    assert '{"jobs": ["' + first + '"], "whole_arrays": true}' in page


def test_a_job_whose_steps_are_known_shows_its_share(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    folder = JobFolder(world.home, job_id).attempt(1)
    folder.heartbeat(0).parent.mkdir(parents=True)
    beat = Heartbeat(
        rank=0, step=25, steps_done=25, step_s=0.5, peak_bytes=1, phase="step", at_s=1.0, loss=2.5
    )
    folder.heartbeat(0).write_text(json.dumps(asdict(beat)))
    page = world.client.get("/ui/queue").text
    assert 'max="100" value="25"' in page
    assert "25 %" in page
    assert "loss 2.500" in page


def test_a_script_with_steps_shows_how_many_there_are() -> None:
    spec = parse_job(
        "name: a\ncommand: python a.py\nglobal_batch_size: 8\nworkdir: /srv\nsteps: 40\n",
        "job.yaml",
    )
    beat = Heartbeat(rank=0, step=3, steps_done=3, step_s=0.5, peak_bytes=1, phase="step", at_s=1.0)
    progress = make_job_view(
        Job(id="a-1", spec=spec, order=1, submitted_at_s=0.0, continues_step=10), [beat]
    )["progress"]
    assert progress is not None
    assert (progress["step"], progress["max_steps"]) == (13, 40)
