"""Nights whose causes nobody knows: messages are random words, and only facts tell one cause from another."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from benchmarks.draws import stream
from orchestrator.specs.attempt import ErrorReport, Evidence, FailureKind, RankEnd
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State
from tests.scheduling.faulty_world import FaultyProcess, evidence_of
from tests.scheduling.world import (
    CALM,
    HOUR_S,
    MemoryJournal,
    MortalBackend,
    Scenario,
    cluster,
    device,
    play,
)

NIGHTS, NIGHTS_LONG = 60, 2000
NODES, DEVICES, JOBS = 3, 4, 12
STEP_S = 1.0
AWAY_S = 1200.0  # of the hub
WORDS = (
    "ribbon",
    "otter",
    "quartz",
    "lantern",
    "meadow",
    "copper",
    "violin",
    "harbor",
    "saffron",
    "glacier",
)
SAVABLE_MIN, EXTRA_ATTEMPTS_MAX, EXTRA_SHARE_MAX = 0.95, 2, 0.02
HEALTHY_SUSPENDED_MAX = 0.01  # in a night


@dataclass(frozen=True)
class Causes:
    """The hidden causes of a night; `bugs` and `leaks` map the position of a job to steps."""

    bugs: dict[int, int]
    leaks: dict[int, int]
    bad_device: tuple[str, int] | None
    bad_node: str | None
    hub_away_s: float | None
    flake_chance: float
    preemption_chance: float


@dataclass
class Tally:
    """The totals of many nights."""

    savable: int = 0
    saved: int = 0
    lost: list[str] = field(default_factory=list)
    suspended: int = 0  # places without a fault
    device_s: float = 0.0
    extra_s: float = 0.0  # of attempts of a program that cannot succeed, after its first
    bug_attempts: Counter[int] = field(default_factory=Counter)
    lost_to_device: Counter[int] = field(
        default_factory=Counter
    )  # jobs lost in a night to its one bad device


def random_causes(draw: random.Random, steps: list[int]) -> Causes:
    bugs = {
        job: draw.choice((0, draw.randrange(1, count)))
        for job, count in enumerate(steps)
        if draw.random() < 0.08
    }
    leaks = {
        job: draw.randint(800, 1500)
        for job in range(len(steps))
        if job not in bugs and draw.random() < 0.03
    }
    card = (f"n{draw.randrange(NODES)}", draw.randrange(DEVICES)) if draw.random() < 0.3 else None
    return Causes(
        bugs=bugs,
        leaks=leaks,
        bad_device=card,
        bad_node=f"n{draw.randrange(NODES)}" if card is None and draw.random() < 0.15 else None,
        hub_away_s=draw.uniform(0.0, HOUR_S) if draw.random() < 0.2 else None,
        flake_chance=0.03,
        preemption_chance=0.05,
    )


class HiddenCauses(MortalBackend):
    """The simulated world, in which attempts end by causes that their evidence does not name."""

    causes: Causes

    def _destiny(self, process: FaultyProcess, _: random.Random) -> tuple[FailureKind | None, int]:
        cause, step = self.fate_of(process)
        if cause == "preempted":
            return FailureKind.PREEMPTED, step
        return (None if cause is None else FailureKind.UNKNOWN), step

    def fate_of(self, process: FaultyProcess) -> tuple[str | None, int]:
        """The cause that an attempt meets first, and after which step."""
        causes, draw, first = (
            self.causes,
            stream(self._seed, "hidden", process.attempt.name),
            process.first_step,
        )
        number = process.job.order - 1
        hub_s = causes.hub_away_s
        if hub_s is not None and 0.0 <= process.launched_at_s - hub_s < AWAY_S:
            return "hub", first
        ends: list[tuple[int, str | None]] = [(process.last_step, None)]
        if number in causes.bugs:
            ends.append((max(first, causes.bugs[number]), "bug"))
        if number in causes.leaks:
            ends.append((first + causes.leaks[number], "leak"))
        if causes.bad_device in process.devices or causes.bad_node in process.nodes:
            ends.append((first + draw.randint(0, 1200), "place"))
        if draw.random() < causes.flake_chance:
            ends.append((draw.randint(first, process.last_step), "flake"))
        if draw.random() < causes.preemption_chance:
            ends.append((draw.randint(first, process.last_step), "preempted"))
        step, cause = min(ends, key=lambda end: end[0])
        return (None, process.last_step) if step >= process.last_step else (cause, step)

    def _symptoms(
        self, process: FaultyProcess, ending: FailureKind | None, **facts: Any
    ) -> Evidence:  # type: ignore[override]
        if ending is not FailureKind.UNKNOWN:
            return evidence_of(process, ending, **facts)
        evidence = evidence_of(process, FailureKind.USER_ERROR, **facts)
        cause, _ = self.fate_of(process)
        draw = stream(self._seed, "symptom", process.attempt.name)
        message = " ".join(draw.choices(WORDS, k=8))
        stable = stream(
            self._seed,
            "symptom",
            process.job.id if cause in ("bug", "leak") else process.attempt.name,
        )
        kind, code = {
            "bug": (stable.choice(("TypeError", "KeyError", "RuntimeError")), 1),
            "leak": ("RuntimeError", 1),
            "place": (
                stable.choice(("RuntimeError", "torch.AcceleratorError", "")),
                stable.choice((1, -6, -11)),
            ),
            "flake": (stable.choice(("RuntimeError", "OSError", "")), stable.choice((1, -11, 3))),
            "hub": ("requests.exceptions.ConnectionError", 1),
            None: ("", 1),
        }[cause]
        file = (
            "/venv/lib/python3.11/site-packages/requests/api.py"
            if cause == "hub"
            else "/home/ada/train.py"
        )
        line = stable.randint(1, 5)
        frame = f'  File "{file}", line {line}, in step{line}\n    call()'
        text = (
            f"Traceback (most recent call last):\n{frame}\n{kind}: {message}" if kind else message
        )
        step, is_reported = facts["step"], bool(kind) and stable.random() < 0.5
        report = ErrorReport(rank=0, step=step, phase="forward", type=kind, traceback=text)
        beats = () if cause == "hub" else evidence.heartbeats
        return replace(
            evidence,
            ranks=tuple(
                RankEnd(rank=end.rank, exit_code=code, log_tail=text) for end in evidence.ranks
            ),
            errors=(report,) if is_reported else (),
            heartbeats=beats,
            first_ended_rank=0,
        )


def play_night(seed: int, tally: Tally) -> None:
    """Play one night and add what came of it."""
    draw = random.Random(seed)
    steps = [draw.randint(1200, 7200) for _ in range(JOBS)]
    jobs = tuple(
        (
            draw.uniform(0.0, HOUR_S),
            JobSpec(
                name=f"job{number}",
                command="python train.py",
                global_batch_size=8,
                profile={"parameters": 8_000_000, "layers": 4, "activations_per_sample": "40MiB"},
                steps=count,
                speeds={1: f"{STEP_S:.6f}s"},
                knobs={"resume_from": {"flag": "--resume"}},
                training={"checkpoint_every_steps": draw.choice((100, 300, 10_000))},
            ),
            None,
        )
        for number, count in enumerate(steps)
    )
    scenario = Scenario(
        cluster=cluster(("n", NODES, DEVICES, device("large", "80GiB", "cuda"))),
        jobs=tuple(sorted(jobs, key=lambda job: job[0])),
        cancels=(),
        hazards=CALM,
        repeat_chance=0.0,
        seed=seed,
    )
    backend = HiddenCauses(
        scenario.cluster, seed=seed, hazards={FailureKind.STARTUP: 0.0}, repeat_chance=0.0
    )
    backend.causes = random_causes(draw, [spec.steps or 0 for _, spec, _ in scenario.jobs])
    state = play(scenario, MemoryJournal(), backend)
    count_night(state, backend, seed, tally)


def count_night(state: State, backend: HiddenCauses, seed: int, tally: Tally) -> None:
    causes, lost_to_device = backend.causes, 0
    for job in state.jobs.values():
        lengths_s = [
            (attempt.ended_at_s or 0.0) - attempt.launched_at_s for attempt in job.attempts
        ]
        tally.device_s += sum(lengths_s)
        if job.order - 1 in causes.bugs:
            tally.bug_attempts[bug_attempts(job, backend)] += 1
            tally.extra_s += sum(
                length_s
                for length_s, attempt in zip(lengths_s, job.attempts, strict=True)
                if attempt.number > 1
                and backend.fate_of(backend.processes[attempt.name])[0] == "bug"
            )
            continue
        leak = causes.leaks.get(job.order - 1)
        if leak is not None and job.spec.training.checkpoint_every_steps >= leak:
            continue  # each attempt ends before its first checkpoint
        tally.savable += 1
        tally.saved += job.status is JobStatus.SUCCEEDED
        if job.status is not JobStatus.SUCCEEDED:
            ends = [backend.fate_of(backend.processes[attempt.name])[0] for attempt in job.attempts]
            tally.lost.append(f"night {seed}, {job.id} after {ends}: {job.reason}")
            lost_to_device += ends[-1:] == ["place"]
    if causes.bad_device is not None:
        tally.lost_to_device[lost_to_device] += 1
    for suspension in state.suspensions:
        place = (suspension.node, suspension.device)
        tally.suspended += suspension.node != causes.bad_node and place != causes.bad_device


def bug_attempts(job: Job, backend: HiddenCauses) -> int:
    """Return the number of attempts of a job that its bug ended."""
    return sum(
        backend.fate_of(backend.processes[attempt.name])[0] == "bug" for attempt in job.attempts
    )


def judge_nights(count: int) -> Tally:
    tally = Tally()
    for seed in range(count):
        play_night(seed, tally)
    print(tally)
    return tally


def assert_laws(tally: Tally, nights: int) -> None:
    assert tally.saved >= SAVABLE_MIN * tally.savable, "\n".join(tally.lost[:20])
    assert max(tally.bug_attempts, default=0) <= 1 + EXTRA_ATTEMPTS_MAX, tally.bug_attempts
    assert tally.extra_s <= EXTRA_SHARE_MAX * tally.device_s, (tally.extra_s, tally.device_s)
    assert tally.suspended <= max(1.0, HEALTHY_SUSPENDED_MAX * nights), tally.suspended
    assert max(tally.lost_to_device, default=0) <= 1, tally.lost_to_device


def test_nights_with_hidden_causes_save_what_can_be_saved_and_cost_little() -> None:
    assert_laws(judge_nights(NIGHTS), NIGHTS)


@pytest.mark.long
def test_many_nights_with_hidden_causes() -> None:
    assert_laws(judge_nights(NIGHTS_LONG), NIGHTS_LONG)
