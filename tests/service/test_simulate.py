"""Laws of the simulated world under any decisions of the queue, and of its reports."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import scheduler
from benchmarks.measured import Arrival, as_measured, misjudge, simulate, true_step_s
from benchmarks.peers import Peer, tiresias
from orchestrator.backends.simulated import traces
from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.backends.simulated.traces import Trace
from orchestrator.cli import main
from orchestrator.scheduling.base.migration import SAVE_S
from orchestrator.scheduling.step import step
from orchestrator.service.commands.live_queue import simulate_queue
from orchestrator.service.commands.simulate import Outcome, Simulated, compute_quantile, simulate_on
from orchestrator.service.terminal.gantt import draw_gantt
from orchestrator.service.terminal.simulation_tables import make_simulated_table
from orchestrator.specs.attempt import Attempt, FailureKind
from orchestrator.specs.cluster import ClusterSpec, NodeSpec, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import NodesSeen, Submitted
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from tests.scheduling.faulty_world import FaultyBackend, FaultyProcess

LAUNCH_COST_S = 30.0
CLUSTER = ClusterSpec(
    name="three-nodes",
    nodes=[NodeSpec(name="node", count=3, devices=4, device="a100-80gb", host_memory="1TiB")],
    launch_cost=f"{LAUNCH_COST_S}s",
)
CHANCE = 0.3  # that a job runs out of memory, and that an attempt takes a node down with it
OUT_OF_MEMORY = Fault(kind=FaultKind.OOM, rank=0, step=1)


class Storm(FaultyBackend):
    """Attempts take their true times; first attempts run out of memory, and nodes are lost."""

    startup_s = (LAUNCH_COST_S, LAUNCH_COST_S)
    release_s = (0.0, 0.0)
    stop = SimulatedBackend.stop

    def __init__(self, arrivals: list[traces.Arrival], cluster: ClusterSpec, seed: int) -> None:
        hazards = {FailureKind.NODE_LOST: CHANCE}
        super().__init__(cluster, seed=seed, hazards=hazards, repeat_chance=0.0)
        self._arrivals = arrivals

    def _compute_true_step_s(self, job: Job, attempt: Attempt) -> float:
        return true_step_s(self._arrivals[job.order - 1], attempt)

    def _factors(self, _: Job) -> tuple[float, float]:
        return 1.0, 0.0  # a trace has no memory measurements

    def _make_process(self, job: Job, attempt: Attempt) -> FaultyProcess:
        is_hit = self._stream("burst", job.id).random() < CHANCE
        return super()._make_process(replace(job, fault=OUT_OF_MEMORY) if is_hit else job, attempt)


def storm(trace: Trace, seed: int) -> Simulated:
    arrivals: list[traces.Arrival] = []
    run = simulate_on(trace, CLUSTER, arrivals, Storm(arrivals, CLUSTER, seed))
    return as_measured(trace, CLUSTER, arrivals, run)


def job(name: str, steps: int, speeds: dict[int, float], **fields: object) -> JobSpec:
    declared = {str(count): f"{step_s}s" for count, step_s in speeds.items()}
    return JobSpec(
        name=name,
        command="python x.py",
        global_batch_size=4,
        steps=steps,
        speeds=declared,
        **fields,
    )


def day(seed: int, jobs: int = 40) -> Trace:
    """Jobs of one to four devices within an hour or two."""
    draw = random.Random(seed)
    arrivals = []
    for index in range(jobs):
        alone_s = draw.uniform(0.5, 4.0)
        speeds = {
            count: alone_s / count**0.8 for count in (1, 2, 4) if count <= draw.choice((1, 2, 4, 4))
        }
        spec = job(f"job{index}", draw.randint(10, 2000), speeds)
        arrivals.append(
            Arrival(at_s=index * draw.uniform(0, 200), spec=spec, rigid_devices=max(speeds))
        )
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    return Trace(
        name=f"day{seed}",
        arrivals=tuple(replace(arrival, at_s=arrival.at_s - first_s) for arrival in arrivals),
    )


def attempts(outcomes: Iterable[Outcome]) -> list[SimulatedProcess]:
    return [process for outcome in outcomes for process in outcome.attempts]


def breaches(trace: Trace, outcomes: tuple[Outcome, ...]) -> list[str]:
    """Violations of the world's laws by a run."""
    violations = []
    spans_by_device: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for arrival, outcome in zip(trace.arrivals, outcomes, strict=True):
        done = 0
        for process in outcome.attempts:
            name = process.attempt.name
            assert process.ended_at_s is not None
            if process.launched_at_s < arrival.at_s:
                violations.append(f"{name} ran before it was submitted")
            if process.first_step != done:
                violations.append(
                    f"{name} began at step {process.first_step}, its checkpoint is at {done}"
                )
            if process.evidence is not None:
                done = max(done, process.evidence.checkpoint_step or 0)
            for device in process.devices:
                spans_by_device.setdefault(device, []).append(
                    (process.launched_at_s, process.ended_at_s, name)
                )
            if process.started_at_s is not None:
                launch_s, ran_s = (
                    process.started_at_s - process.launched_at_s,
                    process.ended_at_s - process.started_at_s,
                )
                if launch_s != pytest.approx(CLUSTER.launch_cost):
                    violations.append(f"{name} was launched in {launch_s} s")
                needed_s = (process.last_step - process.first_step) * process.step_s
                if process.ending is None and ran_s != pytest.approx(needed_s, abs=1e-3):
                    violations.append(f"{name} trained {ran_s} s instead of {needed_s} s")
    for device, spans in spans_by_device.items():
        spans.sort()
        violations += [
            f"{device} is held by {before[2]} and {after[2]}"
            for before, after in pairwise(spans)
            if after[0] < before[1] - 1e-6
        ]
    return violations


@pytest.mark.parametrize("is_calm", [True, False], ids=["calm", "storm"])
@pytest.mark.parametrize("seed", range(3))
def test_the_laws_of_the_world_hold_under_the_production_queue(seed: int, is_calm: bool) -> None:
    trace = day(seed)
    run = simulate(trace, CLUSTER) if is_calm else storm(trace, seed)
    assert breaches(trace, run.outcomes) == []
    assert run.report["finished"] == len(trace.arrivals) or not is_calm
    if not is_calm:
        endings = {process.ending for process in attempts(run.outcomes)}
        assert {FailureKind.DEVICE_OOM, FailureKind.NODE_LOST} <= endings, (
            "the storm left nobody out"
        )


@pytest.mark.parametrize("order", scheduler.PEERS)
def test_the_laws_of_the_world_hold_under_every_policy_that_the_benchmark_compares(
    order: str,
) -> None:
    trace = day(7)
    outcomes = scheduler.theirs(order, CLUSTER)(trace, 7).outcomes
    assert breaches(trace, outcomes) == []
    assert all(outcome.ended_at_s is not None for outcome in outcomes)
    widths = [process.attempt.plan.world_size for process in attempts(outcomes)]
    assert order == Peer.TIRESIAS or widths == [arrival.rigid_devices for arrival in trace.arrivals]


def test_a_preempted_job_continues_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiresias takes the devices of a long job for a short one, and gives them back."""
    monkeypatch.setattr(tiresias, "DEMOTED_DEVICE_S", 600.0)
    resumed = {"knobs": {"resume_from": {"flag": "--resume"}}, "resume": {"on_sigterm": True}}
    long = Arrival(at_s=0.0, spec=job("long", 2000, {4: 1.0}, **resumed))
    short = Arrival(at_s=1000.0, spec=job("short", 100, {4: 1.0}, **resumed))
    one_node = CLUSTER.model_copy(
        update={"nodes": (CLUSTER.nodes[0].model_copy(update={"count": 1}),)}
    )
    trace = Trace(name="two", arrivals=(long, short))
    first, second = simulate(trace, one_node.replace_order(Peer.TIRESIAS)).outcomes
    before, after = first.attempts
    assert after.first_step == 1000 - LAUNCH_COST_S
    assert before.ended_at_s == second.attempts[0].launched_at_s == 1000.0 + SAVE_S
    assert first.ended_at_s == pytest.approx(2000 + 100 + 3 * LAUNCH_COST_S + SAVE_S)


def test_wrong_estimates_change_predictions_and_not_the_simulated_times() -> None:
    trace = Trace(name="one", arrivals=(Arrival(at_s=0.0, spec=job("a", 1000, {1: 2.0})),))
    misjudged = misjudge(trace, 0.5, seed=1)
    assert misjudged.arrivals[0].spec.speeds != trace.arrivals[0].spec.speeds
    for night in (trace, misjudged):
        (outcome,) = simulate(night, CLUSTER).outcomes
        assert outcome.completion_s == pytest.approx(2000 + LAUNCH_COST_S)
        assert outcome.slowdown == pytest.approx(1.0)


def test_a_measured_placement_takes_its_measured_time() -> None:
    """Two devices on two nodes are slower than declared: here no node has two."""
    spread = ClusterSpec(
        name="spread",
        nodes=[NodeSpec(name="n", count=2, devices=1, device="a100-80gb", host_memory="1TiB")],
    )
    arrival = Arrival(at_s=0.0, spec=job("a", 100, {2: 1.0}), shapes=(((2,), 1.0), ((1, 1), 3.0)))
    (outcome,) = simulate(Trace(name="one", arrivals=(arrival,)), spread).outcomes
    assert outcome.completion_s == pytest.approx(300.0 + spread.launch_cost)


def test_a_job_that_no_node_can_hold_is_counted_as_not_finished() -> None:
    trace = Trace(
        name="wide",
        arrivals=(
            Arrival(at_s=0.0, spec=job("wide", 10, {64: 1.0}), deadline_s=1e6),
            Arrival(at_s=0.0, spec=job("narrow", 10, {1: 1.0}), deadline_s=1e6),
        ),
    )
    report = simulate(trace, CLUSTER).report
    assert (report["jobs"], report["finished"]) == (2, 1)
    assert (report["deadlines"], report["deadlines_met"]) == (2, 1)


def test_the_report_counts_what_happened() -> None:
    """Two jobs, each on all devices, one after the other."""
    spec = job("a", 100, {4: 1.0})
    one_node = CLUSTER.model_copy(
        update={"nodes": (CLUSTER.nodes[0].model_copy(update={"count": 1}),)}
    )
    arrivals = (
        Arrival(at_s=0.0, spec=spec, deadline_s=150.0),
        Arrival(at_s=10.0, spec=spec, deadline_s=150.0),
    )
    report = simulate(Trace(name="two", arrivals=arrivals), one_node).report
    assert report["makespan_s"] == pytest.approx(260.0)
    assert report["mean_completion_s"] == pytest.approx((130 + 250) / 2)
    assert report["p99_completion_s"] == pytest.approx(250.0)
    assert report["worst_slowdown"] == pytest.approx(250 / 130)
    assert report["gpu_hours"] == pytest.approx(4 * 260 / 3600)
    assert report["utilisation"] == pytest.approx(1.0)
    assert report["deadlines_met"] == 1
    assert report["restarts"] == 0
    assert report["cost"] is None, "no price is known"
    node = one_node.nodes[0]
    device = node.device.model_copy(update={"price_per_hour": 2.5})
    priced = one_node.model_copy(update={"nodes": (node.model_copy(update={"device": device}),)})
    report = simulate(Trace(name="two", arrivals=arrivals), priced).report
    assert report["cost"] == pytest.approx(2.5 * 4 * 260 / 3600)


def test_the_report_counts_promises_that_are_kept_broken_and_refused() -> None:
    """The first job runs as fast as declared, the second half as fast; the request of the third is impossible."""
    fields = {"guarantee": "requested"}
    arrivals = (
        Arrival(at_s=0.0, spec=job("kept", 10, {4: 1.0}, **fields)),
        Arrival(at_s=0.0, spec=job("slow", 10, {4: 1.0}, **fields), shapes=(((4,), 2.0),)),
        Arrival(at_s=0.0, spec=job("wide", 10, {1: 9.0}, gpus={"min": 1, "max": 4}, **fields)),
        Arrival(at_s=0.0, spec=job("other", 10, {1: 1.0})),
    )
    run = simulate(Trace(name="four", arrivals=arrivals), CLUSTER)
    assert [run.report[key] for key in ("guaranteed", "promised", "promises_kept", "finished")] == [
        3,
        2,
        1,
        3,
    ]
    shown = Console(record=True, file=StringIO())
    shown.print(make_simulated_table(run))
    assert "1 of 2, 1 refused" in shown.export_text()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_night() -> None:
    def serialize(run: Simulated) -> str:
        return json.dumps(
            [
                run.report,
                [(p.attempt.name, p.launched_at_s, p.devices) for p in attempts(run.outcomes)],
            ]
        )

    def play(seed: int) -> str:
        return serialize(storm(misjudge(day(5), 0.5, seed), seed))

    assert play(1) == play(1) != play(2)


def test_quantiles_are_values_that_were_seen() -> None:
    assert compute_quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert compute_quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert compute_quantile([7.0], 0.0) == 7.0


def test_the_picture_shows_every_node() -> None:
    run = simulate(day(1), CLUSTER)
    drawn = draw_gantt(run.outcomes, CLUSTER)
    assert [line.split()[0] for line in drawn.splitlines()[:4]] == [
        "node0",
        "node1",
        "node2",
        "waiting",
    ]
    assert "█" in drawn


def test_the_command_plays_a_list_of_job_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(
        "name: job\ncommand: python x.py\nglobal_batch_size: 4\nsteps: 100\nspeeds: {1: 2s, 2: 1.2s}\n"
    )
    (tmp_path / "x.py").write_text("")
    (tmp_path / "night.yaml").write_text(
        "jobs:\n- {at: 0s, file: job.yaml}\n- {at: 1min, file: job.yaml}\n"
    )
    (tmp_path / "cluster.yaml").write_text(
        "name: two\nnodes: [{name: n, devices: 2, device: a100-80gb, host_memory: 64GiB}]\n"
    )
    command = [
        "simulate",
        str(tmp_path / "night.yaml"),
        "--cluster",
        str(tmp_path / "cluster.yaml"),
    ]
    answers = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--json"])
        assert ended.value.code == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    report = json.loads(answers[0])
    assert (report["trace"], report["cluster"], report["finished"]) == ("night", "two", 2)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "2 of 2" in output
    assert "decisions" in output


def simulated_by_command(folder: Path, policy: str, *arguments: str) -> int | str | None:
    """The exit code of a simulation of jobs that may use one or both of two devices."""
    (folder / "job.yaml").write_text(
        "name: job\ncommand: python x.py\nglobal_batch_size: 4\nsteps: 100\nspeeds: {1: 2s, 2: 1.2s}\n"
    )
    (folder / "x.py").write_text("")
    (folder / "night.yaml").write_text("jobs:\n" + "- {at: 0s, file: job.yaml}\n" * 6)
    (folder / "cluster.yaml").write_text(
        "name: two\nnodes: [{name: n, devices: 2, device: a100-80gb, host_memory: 64GiB}]\n"
        f"policy: {policy}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "simulate",
                str(folder / "night.yaml"),
                "--cluster",
                str(folder / "cluster.yaml"),
                *arguments,
            ]
        )
    return ended.value.code


@pytest.mark.parametrize(
    ("policy", "makespan_s"), [("{objective: makespan}", None), ("{order: fifo}", 6 * 150.0)]
)
def test_the_command_plays_the_policy_of_the_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, makespan_s: float | None
) -> None:
    """Six jobs of 200 s on one device or 120 s on two: FIFO takes both for each, after a launch of 30 s."""
    assert simulated_by_command(tmp_path, policy, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert f"{report['policy']} {report['objective']}" in ("adaptive makespan", "fifo completion")
    assert (report["makespan_s"] == 6 * 150.0) == (makespan_s is not None)


def test_an_unknown_policy_and_a_table_of_a_spreadsheet_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated_by_command(tmp_path, "{order: lifo}") == 2
    assert "adaptive" in capsys.readouterr().err
    (tmp_path / "trace.csv").write_text("timestamp,num_gpus,duration\n2023-08-01 10:00:00,1,600\n")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(tmp_path / "trace.csv")])
    assert ended.value.code == 2
    assert "trace.csv" in capsys.readouterr().err


def test_a_live_queue_is_played_with_what_it_waits_for_its_hours_and_its_deadlines() -> None:
    """The queue at noon has a running job, a job that depends on it, an evening job and a job with a deadline."""
    noon_s = 1782907200.0  # Wednesday, 1 July 2026, 12:00 UTC
    specs = [
        job("first", 3600, {1: 1.0}),
        job("second", 60, {1: 1.0}, depends_on="first"),
        job("evening", 60, {1: 1.0}, start_window="22:00-23:00 Europe/Berlin wed"),
        job("due", 60, {1: 1.0}, deadline="14:30 Europe/Berlin"),
    ]
    state, _ = step(State(), NodesSeen(nodes=make_idle_nodes(CLUSTER), at_s=noon_s))
    for order, spec in enumerate(specs, 1):
        spec = JobSpec.model_validate(
            spec.model_dump() | ({"depends_on": "first-1"} if spec.depends_on else {})
        )
        event = Submitted(job_id=f"{spec.name}-{order}", order=order, spec=spec, at_s=noon_s)
        state, _ = step(state, event)
    first, second, evening, due = simulate_queue(
        state, CLUSTER, is_live=True, coming_trials={}, home=Path()
    ).outcomes
    assert first.ended_at_s == second.started_at_s == LAUNCH_COST_S + 3600
    assert evening.started_at_s == 8 * 3600
    assert due.deadline_s == 1800
    assert due.in_time


def test_an_empty_queue_is_reported_and_not_simulated() -> None:
    with pytest.raises(SpecError, match="queue: no job runs or waits"):
        simulate_queue(State(), CLUSTER, is_live=True, coming_trials={}, home=Path())
