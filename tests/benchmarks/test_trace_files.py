"""Every trace format becomes the same thing: who comes when, what is told of it, what is true."""

from __future__ import annotations

import re
from math import log
from pathlib import Path
from statistics import median, pstdev

import pytest

from benchmarks.measured import misjudge
from benchmarks.trace_files import SCALING, _read_speeds, read_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.specs.errors import SpecError

SHARED = Path(__file__).parents[3] / "shared" / "traces"
PHILLY = """\
timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-09 06:01:55,2951.4,8,23611.2,6214e9
"""
DEADLINES = """\
job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration
965d,1932025,100,resnet50,1933904,256,4,200
"""
PLANS = """\
name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla
vit-0,60,3163.09,vit,2,16,0,zero-dp,1000,0
"""
ELASTICFLOW = """\
job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration
0,3715485,2011,cifar10,3719996,4096,1,5644
"""
STEPS_PER_SECOND = """\
global_batch_size,1,2,4,64
2048,0.7,1.2,2.5,3.7
4096,0.5,0.8,nan,2.0
"""
THROUGHPUT = """\
exec_plan,placement,iter_time,forward
ga,1,0.2,0
zero-dp,2,0.15,0
ga,2,0.12,0
ga,11,0.16,0
ga,8,0,0
"""


def read(path: Path, text: str) -> Trace:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return read_trace(path)


def test_philly_jobs_take_what_they_took_on_the_devices_that_they_had(tmp_path: Path) -> None:
    trace = read(tmp_path / "philly.csv", PHILLY)
    assert trace.name == "philly"
    wide, short = trace.arrivals
    assert (wide.at_s, short.at_s) == (0.0, 3600.0), "in the order of their times, the first at 0"
    assert (wide.spec.steps, wide.spec.speeds, wide.rigid_devices) == (2951, ((8, 1.0),), 8)
    assert (short.spec.steps, short.spec.speeds, short.spec.gpus.max) == (66, ((1, 1.0),), 1)


def test_deadlines_move_to_the_clock_of_the_trace_and_speeds_scale_from_the_one_that_is_known(
    tmp_path: Path,
) -> None:
    (job,) = read(tmp_path / "cluster01.csv", DEADLINES).arrivals
    assert (job.at_s, job.deadline_s, job.rigid_devices) == (0.0, 1933904 - 1932025, 4)
    speeds = dict(job.spec.speeds)
    assert speeds[4] == pytest.approx(2.0)
    assert speeds[8] == pytest.approx(2.0 / 2**SCALING)
    assert sorted(speeds) == [1, 2, 4, 8, 16, 32, 64]


def test_plans_tell_the_best_of_each_number_of_devices_and_know_other_placements(
    tmp_path: Path,
) -> None:
    throughput = tmp_path / "throughput" / "vit.csv"
    throughput.parent.mkdir()
    throughput.write_text(THROUGHPUT)
    (job,) = read(tmp_path / "workloads" / "base.csv", PLANS).arrivals
    assert job.spec.speeds == ((1, 0.2), (2, 0.12))
    assert dict(job.shapes) == {(1,): 0.2, (2,): 0.12, (1, 1): 0.16}, "a time of 0 did not run"
    assert (job.spec.steps, job.rigid_devices, job.spec.family) == (1000, 2, "vit")


def test_a_job_with_is_sla_is_promised_the_speed_of_its_exec_plan_on_what_it_asks_for(
    tmp_path: Path,
) -> None:
    throughput = tmp_path / "throughput" / "vit.csv"
    throughput.parent.mkdir()
    throughput.write_text(THROUGHPUT)
    (best_effort,) = read(tmp_path / "workloads" / "base.csv", PLANS).arrivals
    (job,) = read(tmp_path / "workloads" / "mt.csv", PLANS.replace(",1000,0", ",1000,1")).arrivals
    assert (best_effort.spec.guarantee, best_effort.submitted_step_s) == (None, 0.15)
    assert job.spec.guarantee is not None
    assert (job.spec.guaranteed_gpus, job.spec.guarantee.step) == (2, 0.15), (
        "not the 0.12 s of the fastest plan"
    )
    (unmeasured,) = read(
        tmp_path / "workloads" / "mt.csv", PLANS.replace("zero-dp,1000,0", "gc,1000,1")
    ).arrivals
    assert unmeasured.spec.guarantee is not None
    assert unmeasured.spec.guarantee.step is None, "the fastest plan's counts"
    told_wrong = misjudge(Trace(name="mt", arrivals=(job,)), 0.5, 1).arrivals[0]
    assert told_wrong.spec.guarantee is not None
    assert told_wrong.spec.guarantee.step is not None
    assert told_wrong.spec.guarantee.step * told_wrong.step_factor == pytest.approx(0.15)
    with pytest.raises(SpecError, match=r"(?s)is_sla: neither yes nor no.*'2'"):
        read(tmp_path / "workloads" / "mt.csv", PLANS.replace(",1000,0", ",1000,2"))


def test_deadlines_with_a_table_of_speeds_know_what_every_measured_number_of_devices_takes(
    tmp_path: Path,
) -> None:
    table = tmp_path / "scheduler" / "throughputs_T4" / "cifar10.csv"
    table.parent.mkdir(parents=True)
    table.write_text(STEPS_PER_SECOND)
    (job,) = read(tmp_path / "traces_for_ElasticFlow" / "few.csv", ELASTICFLOW).arrivals
    assert job.spec.speeds == ((1, 2.0), (2, 1.25), (64, 0.5)), "nan did not run"
    assert (job.at_s, job.deadline_s, job.spec.steps, job.rigid_devices) == (
        0.0,
        3719996 - 3715485,
        2011,
        1,
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "a,b\n1,2\n", "no known trace has these columns"),
        ("a.csv", PHILLY.replace("66.0", "soon"), "a.csv:2: duration: not a number of seconds"),
        ("a.csv", PHILLY.replace("66.0,1", "66.0,0"), "num_gpus: not a number of things"),
        ("a.csv", PHILLY.replace("2017-10-09 07", "Monday"), "timestamp: not a time"),
        ("a.csv", "timestamp,duration,num_gpus\n", "the trace has no job"),
        ("a.csv", PLANS, "no measurements of this application"),
    ],
)
def test_a_bad_trace_is_one_clear_error(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        read(tmp_path / name, text)


def test_a_misjudged_trace_is_told_wrongly_and_stays_as_long(tmp_path: Path) -> None:
    row = PHILLY.splitlines()[1]
    true = read(tmp_path / "philly.csv", "\n".join((PHILLY.splitlines()[0], *[row] * 2000)))
    misjudged = misjudge(true, 0.5, seed=3)
    factors = [arrival.spec.speeds[0][1] for arrival in misjudged.arrivals]
    assert all(
        factor * arrival.step_factor == pytest.approx(1.0)
        for factor, arrival in zip(factors, misjudged.arrivals, strict=True)
    )
    assert pstdev(map(log, factors)) == pytest.approx(0.5, rel=0.05)
    assert misjudge(true, 0.5, seed=3) == misjudged != misjudge(true, 0.5, seed=4)
    assert misjudge(true, 0.0, seed=3) == true


@pytest.mark.skipif(not SHARED.exists(), reason="the published traces are not on this machine")
def test_scaling_is_the_median_of_what_was_measured_in_one_node() -> None:
    exponents = []
    for path in sorted((SHARED / "plans" / "throughput").glob("*.csv")):
        times: dict[tuple[int, ...], float] = {}
        for (_, shape), step_s in _read_speeds(path).items():
            times[shape] = min(step_s, times.get(shape, step_s))
        if (1,) in times and (8,) in times:
            exponents.append(log(times[1,] / times[8,]) / log(8))
    assert len(exponents) == 6
    assert median(exponents) == pytest.approx(SCALING, abs=0.005)


@pytest.mark.skipif(not SHARED.exists(), reason="the published traces are not on this machine")
def test_the_published_traces_are_read_whole() -> None:
    base = read_trace(SHARED / "plans" / "workloads" / "base.csv")
    assert len(base.arrivals) == 406
    assert all(arrival.rigid_devices in dict(arrival.spec.speeds) for arrival in base.arrivals)
    assert len(read_trace(SHARED / "deadlines" / "cluster01.csv").arrivals) == 1595
