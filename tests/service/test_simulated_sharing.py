"""`orc simulate --share`: cards with two jobs, in simulated time."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.cli import main
from orchestrator.service.commands.simulate import Outcome, simulate_trace
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.job.spec import JobSpec

CARDS = 3
GIB = 2**30
CLUSTER = ClusterSpec.model_validate(
    {
        "name": "cards",
        "nodes": [{"name": "n", "devices": CARDS, "device": "a100-80gb", "host_memory": "256GiB"}],
    }
)


def night(seed: int, *, gib_max: int, devices_max: int = 1, jobs: int = 24) -> Trace:
    """Jobs of drawn lengths and planned bytes, all at once or one after the other."""
    draw = random.Random(seed)
    arrivals = []
    at_s = 0.0
    for index in range(jobs):
        at_s += draw.choice((0.0, draw.uniform(0.0, 400.0)))
        spec = JobSpec(
            name=f"job{index}",
            command="python x.py",
            global_batch_size=2,
            gpus={"min": 1, "max": draw.randint(1, devices_max)},
            steps=draw.randint(50, 900),
            speeds={"1": "1s", "2": "0.6s"} if devices_max > 1 else {"1": "1s"},
            profile={
                "parameters": 10_000_000,
                "activations_per_sample": f"{draw.uniform(1, gib_max / 2):.2f}GiB",
            },
        )
        arrivals.append(Arrival(at_s=at_s, spec=spec))
    return Trace(name="night", arrivals=tuple(arrivals))


def card_of(process: SimulatedProcess) -> set[tuple[str, int]]:
    """The cards of an attempt: the place of a guest is named for its card."""
    cards = set()
    for node, index in process.devices:
        name, _, guest = node.partition("-guest")
        cards.add((name, int(guest) if guest else index))
    return cards


def by_card(outcomes: tuple[Outcome, ...]) -> dict[tuple[str, int], list[SimulatedProcess]]:
    processes = defaultdict(list)
    for outcome in outcomes:
        for process in outcome.attempts:
            assert len(card_of(process)) == len(process.devices), "two ranks of a job share a card"
            for card in card_of(process):
                processes[card].append(process)
    return processes


def together_s(process: SimulatedProcess, others: list[SimulatedProcess]) -> float:
    """Seconds in which this attempt trained beside another one on a card."""
    assert process.started_at_s is not None
    assert process.ended_at_s is not None
    spans = []
    for other in others:
        if other is not process and other.started_at_s is not None:
            assert other.ended_at_s is not None
            begin_s = max(process.started_at_s, other.started_at_s)
            spans.append((begin_s, min(process.ended_at_s, other.ended_at_s)))
    total_s = 0.0
    until_s = 0.0
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.46, 0.77, 1.0])
def test_a_card_has_two_jobs_at_most_whose_planned_bytes_fit_and_each_trains_at_the_given_rate(
    seed: int, rate: float
) -> None:
    outcomes = simulate_trace(
        night(seed, gib_max=60, devices_max=2), CLUSTER, shared_card_rate=rate
    ).outcomes
    cards = by_card(outcomes)
    beside_s = 0.0
    memory_bytes = CLUSTER.nodes[0].device.memory
    for processes in cards.values():
        for process in processes:
            neighbours = [
                other
                for other in processes
                if other is not process
                and other.launched_at_s <= process.launched_at_s < (other.released_at_s or 0.0)
            ]
            assert len(neighbours) <= 1
            planned = [member.attempt.estimate.device_bytes for member in (process, *neighbours)]
            assert sum(planned) <= memory_bytes
    for outcome in outcomes:
        assert outcome.ended_at_s is not None, "every job ends"
        for process in outcome.attempts:
            if process.ending is not None or process.started_at_s is None:
                continue
            neighbours = [other for card in card_of(process) for other in cards[card]]
            slow_s = together_s(process, neighbours)
            beside_s += slow_s
            assert process.ended_at_s is not None
            alone_s = process.ended_at_s - process.started_at_s - slow_s
            needed_s = (process.last_step - process.first_step) * process.step_s
            assert alone_s + rate * slow_s == pytest.approx(needed_s, abs=1e-3)
    assert beside_s > 0, "nothing was shared in this night"


def test_jobs_of_which_two_fit_on_no_card_never_share_one() -> None:
    trace = night(1, gib_max=2, jobs=12)
    large = tuple(
        Arrival(
            at_s=arrival.at_s,
            spec=arrival.spec.model_copy(
                update={
                    "profile": arrival.spec.profile.model_copy(
                        update={"activations_per_sample": 25 * GIB}
                    )
                }
            ),
        )
        for arrival in trace.arrivals
        if arrival.spec.profile is not None
    )
    trace = Trace(name="large", arrivals=large)
    outcomes = simulate_trace(trace, CLUSTER, shared_card_rate=0.5).outcomes
    assert all(outcome.ended_at_s is not None for outcome in outcomes)
    for processes in by_card(outcomes).values():
        assert all(together_s(process, processes) == 0.0 for process in processes)


def test_a_shared_card_counts_once_in_the_report() -> None:
    report = simulate_trace(night(2, gib_max=20), CLUSTER, shared_card_rate=0.9).report
    assert 0 < report["utilisation"] <= 1.0
    assert report["devices"] == CARDS


@pytest.mark.parametrize("rate", ["0", "1.5", "-1", "nan"])
def test_a_rate_that_is_no_part_of_a_speed_is_refused(
    rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "night.yaml", "--share", rate])
    assert ended.value.code == 2
    assert "--share" in capsys.readouterr().err
