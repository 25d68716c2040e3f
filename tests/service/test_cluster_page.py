"""Laws of the cluster page: the use of each device in the last hour, as far as its attempts sampled it."""

from __future__ import annotations

import json
import time

from orchestrator.backends.attempts.system_metrics import Sampler, Watched
from orchestrator.service.pages.cluster import LOOK_BACK_S, SAMPLES_BYTES, make_device_use_data
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder
from tests.service.worlds import World

NAME = "system/gpu_{}_{}"


def running(world: World, launched_at_s: float = 0.0) -> Job:
    """Return a job that runs on the first device of the node `virtual`."""
    world.submit()
    world.turn_until("running")
    job = next(job for job in world.controller.state.jobs.values() if job.attempts)
    attempt = replace(job.attempts[-1], launched_at_s=launched_at_s)
    JobFolder(world.home, job.id).attempt(1).path.mkdir(parents=True)
    return replace(job, attempts=(attempt,))


def sample(world: World, job: Job, at_s: float, percent: float, busy: float | None = None) -> None:
    row = {"at_s": at_s, NAME.format(0, "memory_usage_percentage"): percent}
    row |= {} if busy is None else {NAME.format(0, "utilization_percentage"): busy}
    with JobFolder(world.home, job.id).attempt(1).system("virtual").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_numbers_of_now_are_of_a_fresh_sample_of_a_live_attempt(world: World) -> None:
    job = running(world)
    sample(world, job, 900.0, 40.0, 97.0)
    (use,) = make_device_use_data([job], world.home, 920.0).values()
    assert use["now"] == {"memory": "40 %", "busy": "97 %"}
    assert make_device_use_data([job], world.home, 2000.0)["virtual", 0]["now"] == {}
    ended = replace(job, attempts=(replace(job.attempts[0], ended_at_s=910.0),))
    assert make_device_use_data([ended], world.home, 920.0)["virtual", 0]["now"] == {}


def test_the_last_hour_is_drawn_and_no_more(world: World) -> None:
    job = running(world)
    sample(world, job, 100.0, 77.0)
    sample(world, job, 5000.0, 40.0)
    sample(world, job, 5010.0, 50.0)
    chart = make_device_use_data([job], world.home, 5010.0)["virtual", 0]["chart"]
    assert chart.count(",") - chart.count(", ") == 2
    assert chart.count("50 %") == 1
    ended = replace(job, attempts=(replace(job.attempts[0], ended_at_s=5010.0),))
    assert make_device_use_data([ended], world.home, 5011.0 + LOOK_BACK_S) == {}


def test_a_file_of_a_hostile_script_breaks_nothing(world: World) -> None:
    job = running(world)
    path = JobFolder(world.home, job.id).attempt(1).system("virtual")
    lines = [
        b"{",
        b"[]",
        b"\xff",
        b'{"at_s": "x"}',
        b'{"at_s": NaN}',
        b'{"at_s": 9, "system/gpu_0_memory_usage_percentage": {}}',
    ]
    path.write_bytes(b"\n".join([b"x" * 2 * SAMPLES_BYTES, *lines]))
    assert make_device_use_data([job], world.home, 10.0) == {}
    path.unlink()
    path.symlink_to("/proc/self/mem")
    assert make_device_use_data([job], world.home, 10.0) == {}


def test_what_a_sampler_writes_is_what_the_page_shows(world: World) -> None:
    job = running(world, time.time())
    folder = JobFolder(world.home, job.id).attempt(1)
    folder.heartbeat(0).parent.mkdir(parents=True, exist_ok=True)
    folder.heartbeat(0).write_text(json.dumps({"live_bytes": 64}))
    folder.guard.write_text(json.dumps({"virtual_capacity_bytes": 256}))
    sampler = Sampler(folder, Watched(node="virtual", devices=(0,)))
    sampler.take_sample([0], 256)
    assert make_device_use_data([job], world.home, time.time())["virtual", 0]["now"] == {
        "memory": "25 %"
    }
    page = world.client.get("/ui/cluster").text
    assert "memory 25 %" in page
    assert 'class="spark"' in page
