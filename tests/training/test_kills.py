"""Laws of survival: the curve stays the same if any rank dies at any moment, or any file is damaged."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.specs.choices import Engine, ParallelLayout, ZeroStage
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from orchestrator.training.checkpoint import folder as checkpoint_folder
from tests.ranks import Rank
from tests.training import gang

TOLERANCE = 2e-6
TRAINING = dataclasses.replace(
    gang.TRAINING, max_steps=16, checkpoint_every_steps=2, keep_checkpoints=2
)
KILLED_AFTER_STEPS_MAX = 4  # of one life: so a training takes about five
# of DeepSpeed's ranks, forked on a busy machine; on an idle one a training under DDP takes 0.7
STARTUP_S = 1.5
SEED = 20
DEADLINE_S = 120
POLL_S = 0.001
PEER_LOST = 1  # exit code of a rank that meets its broken connection before its launcher kills it


def two_ranks(engine: Engine, stage: int, accumulation: int = 1) -> Plan:
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(dp=2),
        micro_batch_size=gang.GLOBAL_BATCH // 2 // accumulation,
        gradient_accumulation_steps=accumulation,
    )


PLANS = (
    *(two_ranks(Engine.TORCH, stage, accumulation) for stage in (0, 3) for accumulation in (1, 2)),
    *(
        two_ranks(Engine.DEEPSPEED, stage, accumulation)
        for stage in (1, 2, 3)
        for accumulation in (1, 4)
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The moment of a kill: after a time or a number of steps, during the write of a checkpoint or not."""

    rank: int
    steps: int
    while_writing: bool
    delay_s: float


def deaths(seed: int, count: int) -> list[tuple[Plan, Death]]:
    """Every second kill hits the write of a checkpoint; of the rest, one in three hits the start."""
    drawn = random.Random(seed)
    drawn_deaths = []
    for number in range(count):
        writing, at_start = number % 2 == 0, number % 6 == 5
        death = Death(
            rank=drawn.randrange(2),
            steps=0 if at_start else drawn.randint(1, KILLED_AFTER_STEPS_MAX),
            while_writing=writing,
            delay_s=drawn.uniform(0, STARTUP_S if at_start else 0.02),
        )
        drawn_deaths.append((drawn.choice(PLANS), death))
    return drawn_deaths


@pytest.mark.parametrize(
    "kills",
    [4, pytest.param(30, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
    ids="{} kills".format,
)
def test_killed_ranks_lose_no_step_beyond_the_last_checkpoint_and_change_no_loss(
    tmp_path: Path, kills: int
) -> None:
    text = gang.ragged_text(tmp_path)
    reference = gang.training_run(tmp_path, "reference", gang.torch_plan(), text, training=TRAINING)
    gang.launch([gang.Part(run=reference)])
    expected = gang.losses(reference)
    waiting, job, hits = deaths(SEED, kills), 0, 0
    for life in range(
        2 * kills
    ):  # one that reaches the end before its death is not counted: the next dies sooner
        if not waiting:
            break
        plan, death = waiting[0]
        label = f"seed {SEED}, life {life}, job {job}: {death} under {plan}"
        run = gang.training_run(tmp_path, f"job{job}", plan, text, training=TRAINING)
        finished, was_writing = _live(run, death, expected, label)
        if finished:
            job, waiting[0] = job + 1, (plan, dataclasses.replace(death, delay_s=death.delay_s / 2))
        else:
            waiting.pop(0)
            hits += was_writing
    assert not waiting, f"only {kills - len(waiting)} of {kills} deaths came about"
    assert 3 * hits >= kills, f"{hits} of {kills} deaths hit the writing of a checkpoint"
    run = gang.training_run(
        tmp_path, f"job{job}", two_ranks(Engine.TORCH, 0), text, training=TRAINING
    )
    began_at = _newest_step(run)
    _check_life(
        run,
        gang.finish(gang.spawn(run), DEADLINE_S),
        expected,
        began_at,
        f"seed {SEED}, the last life",
    )
    assert _newest_step(run) == TRAINING.max_steps


def alter(path: Path) -> None:
    """Change one byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", checkpoint_folder.MANIFEST)
DAMAGES: tuple[tuple[Callable[[Path], None], str], ...] = (
    (alter, "its content is not what was written"),
    (truncate, "bytes instead of|its content is not what was written"),  # of the manifest
    (Path.unlink, "it is missing"),
)
Harmed = tuple[str, Callable[[Path], None], str]
HARMED: list[Harmed] = [(file, harm, message) for file in FILES for harm, message in DAMAGES]


@pytest.mark.long
@pytest.mark.parametrize(
    "cases", [HARMED[::2], pytest.param(HARMED, marks=pytest.mark.long)], ids=["every other", "all"]
)
def test_a_damaged_checkpoint_is_named_and_quarantined_and_the_one_before_is_used(
    cases: list[Harmed], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, until_6 = gang.ragged_text(tmp_path), dataclasses.replace(TRAINING, max_steps=6)
    base = gang.training_run(tmp_path, "base", PLANS[2], text, training=until_6)
    gang.launch([gang.Part(run=base)])
    until_8 = dataclasses.replace(TRAINING, max_steps=8)
    runs = [
        gang.training_run(tmp_path, f"job{n}", PLANS[0], text, training=until_8)
        for n in range(len(cases))
    ]
    for run, (file, harm, _) in zip(runs, cases, strict=True):
        shutil.copytree(_checkpoints(base), _checkpoints(run))
        harm(_checkpoints(run) / "step-00000006" / file)
    lost = gang.training_run(tmp_path, "lost", PLANS[0], text, training=until_8)
    shutil.copytree(_checkpoints(base), _checkpoints(lost))
    for path in checkpoint_folder.list_published(_checkpoints(lost)):
        alter(path / FILES[0])
    whole = gang.training_run(tmp_path, "whole", PLANS[0], text, training=until_8)
    capfd.readouterr()
    gang.launch([gang.Part(run=run) for run in (whole, lost, *runs)])
    errors, expected = capfd.readouterr().err, gang.losses(whole)
    for run, (file, _, message) in zip(runs, cases, strict=True):
        assert gang.losses(run) == pytest.approx(
            {s: expected[s] for s in range(5, 9)}, abs=TOLERANCE, rel=0
        ), file
        path = _checkpoints(run) / "step-00000006"
        assert re.search(
            rf"{re.escape(str(path))} is damaged.*\n  {re.escape(file)}: .*({message})", errors
        ), (
            file,
            message,
        )
        assert (_checkpoints(run) / "damaged-step-00000006").is_dir()
    assert gang.losses(lost) == pytest.approx(expected, abs=TOLERANCE, rel=0)
    assert "no intact checkpoint is left: training starts from the beginning" in errors


def _live(
    run: TrainingRun, death: Death, expected: dict[int, float], label: str
) -> tuple[bool, bool]:
    """Run an attempt, which must keep the laws; return whether it finished and whether it died writing a checkpoint."""
    began_at = _newest_step(run)
    ranks = gang.spawn(run)
    try:
        was_writing = _kill(run, ranks, death)
    finally:
        codes = gang.finish(ranks, DEADLINE_S)  # survivors get SIGKILL, as from a launcher
    if was_writing is not None:
        codes = [code for rank, code in enumerate(codes) if rank == death.rank or code != PEER_LOST]
    _check_life(run, codes, expected, began_at, label)
    return was_writing is None, bool(was_writing)


def _check_life(
    run: TrainingRun, codes: list[int], expected: dict[int, float], began_at: int, label: str
) -> None:
    curve = gang.losses(run)
    if curve:
        assert min(curve) == began_at + 1, label
        assert max(curve) <= _newest_step(run) + 2 * TRAINING.checkpoint_every_steps, (
            label
        )  # one save is in flight
        assert curve == pytest.approx(
            {step: expected[step] for step in curve}, abs=TOLERANCE, rel=0
        ), label
    assert set(codes) <= {0, -signal.SIGKILL}, f"{label}: {codes}"
    for path in checkpoint_folder.list_published(_checkpoints(run)):
        assert checkpoint_folder.find_damage(path) == [], label
    assert not list(_checkpoints(run).glob("damaged-*")), label


def _kill(run: TrainingRun, ranks: list[Rank], death: Death) -> bool | None:
    """Kill as planned; returns whether that was during the write of a checkpoint, None if training had ended."""
    deadline_s = time.monotonic() + DEADLINE_S
    if death.steps == 0:
        time.sleep(death.delay_s)
    while death.steps and len(gang.losses(run)) < death.steps:
        if _ended(ranks, deadline_s):
            return None
    while death.while_writing:
        if _ended(ranks, deadline_s):
            return None
        if not _is_writing(run):
            continue
        time.sleep(death.delay_s / 4)
        _signal(ranks, signal.SIGSTOP)
        if _is_writing(run):
            break
        _signal(ranks, signal.SIGCONT)  # too late: it has its name
    if death.steps and not death.while_writing:
        time.sleep(death.delay_s)
    writing = _is_writing(run)
    if ranks[death.rank].poll() is not None:
        return None
    ranks[death.rank].kill()
    _signal([rank for rank in ranks if rank is not ranks[death.rank]], signal.SIGCONT)
    time.sleep(death.delay_s if death.steps else 0)  # until a launcher notices
    _signal(ranks, signal.SIGKILL)
    return writing


def _ended(ranks: list[Rank], deadline_s: float) -> bool:
    if time.monotonic() > deadline_s:
        pytest.fail("nothing happened")
    time.sleep(POLL_S)
    return any(rank.poll() is not None for rank in ranks)


def _signal(ranks: list[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.send_signal(number)


def _is_writing(run: TrainingRun) -> bool:
    checkpoints = _checkpoints(run)
    return checkpoints.is_dir() and any(
        path.name.startswith(".writing-") for path in checkpoints.iterdir()
    )


def _newest_step(run: TrainingRun) -> int:
    newest = checkpoint_folder.find_latest_complete(_checkpoints(run))
    return checkpoint_folder.read_step_of_checkpoint(newest) if newest else 0


def _checkpoints(run: TrainingRun) -> Path:
    return Path(run.job_folder) / "checkpoints"
