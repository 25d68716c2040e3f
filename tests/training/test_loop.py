"""The ends of a training: finished, SIGTERM, a newer attempt. The real entry point, in real processes."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from orchestrator.specs.choices import Engine, ParallelLayout
from orchestrator.specs.job.model import Freeze, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import STALE_EXIT_CODE, AttemptFolder, JobFolder, TrainingRun
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from tests.training import gang

ENDLESS = dataclasses.replace(gang.TRAINING, max_steps=10**6, checkpoint_every_steps=10**6)
TWO_RANKS = Plan(
    engine=Engine.TORCH, layout=ParallelLayout(dp=2), micro_batch_size=gang.GLOBAL_BATCH // 2
)
DEADLINE_S = 120


def test_sigterm_to_one_rank_saves_once_and_ends_all_by_that_signal(tmp_path: Path) -> None:
    run = gang.training_run(
        tmp_path, "job", TWO_RANKS, gang.ragged_text(tmp_path), training=ENDLESS
    )
    ranks = gang.spawn(run)
    try:
        _wait_for_steps(AttemptFolder(run.attempt_folder), 3)
        ranks[1].terminate()
    finally:
        codes = gang.finish(ranks, DEADLINE_S)
    assert codes == [-signal.SIGTERM] * 2
    assert [checkpoint_folder.read_step_of_checkpoint(path) for path in checkpoints_of(run)] == [
        gang.metrics(run)[-1]["step"]
    ]


def test_sigterm_in_the_middle_of_a_save_still_saves_the_last_step(tmp_path: Path) -> None:
    training = dataclasses.replace(ENDLESS, checkpoint_every_steps=3)
    run = gang.training_run(
        tmp_path, "job", TWO_RANKS, gang.ragged_text(tmp_path), training=training
    )
    checkpoints = JobFolder(tmp_path, "job").checkpoints
    ranks = gang.spawn(run)
    try:
        _wait_until(lambda: checkpoints.is_dir() and any(checkpoints.glob(".writing-*")))
        ranks[1].terminate()
    finally:
        codes = gang.finish(ranks, DEADLINE_S)
    assert codes == [-signal.SIGTERM] * 2
    assert (
        checkpoint_folder.read_step_of_checkpoint(checkpoints_of(run)[-1])
        == gang.metrics(run)[-1]["step"]
    )
    assert not list(checkpoints.glob(".*"))


def test_a_checkpoint_that_cannot_be_written_ends_the_attempt_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    training = dataclasses.replace(ENDLESS, checkpoint_every_steps=2)
    run = gang.training_run(
        tmp_path, "job", TWO_RANKS, gang.ragged_text(tmp_path), training=training
    )
    in_the_way = checkpoint_folder.get_unfinished_checkpoint_path(
        JobFolder(tmp_path, "job").checkpoints, run.epoch, 4
    )
    in_the_way.parent.mkdir()
    in_the_way.touch()
    assert gang.finish(gang.spawn(run), DEADLINE_S) == [1, 1]
    assert [checkpoint_folder.read_step_of_checkpoint(path) for path in checkpoints_of(run)] == [2]
    assert f"File exists: '{in_the_way}'" in capfd.readouterr().err


FAILS_AT_STEP_5 = """
import dataclasses, torch
from tests.training import tiny_model

def build(config):
    recipe, calls = tiny_model.build(config), []

    def loss_sum(module, batch):
        calls.append(batch)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no memory for this batch")
        return recipe.loss_sum(module, batch)

    return dataclasses.replace(recipe, loss_sum=loss_sum)
"""


def test_a_failing_attempt_leaves_the_checkpoint_that_was_in_flight(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(FAILS_AT_STEP_5)
    text = gang.ragged_text(tmp_path)
    config = {
        "seed": 0,
        "width": 256,
        "depth": 4,
        "text": text,
        "sequence_length": gang.SEQUENCE_LENGTH,
    }
    model = ModelSpec(factory=f"{tmp_path / 'model.py'}:build", config=config)
    run = gang.training_run(tmp_path, "job", TWO_RANKS, text, model=model, training=gang.TRAINING)
    assert gang.finish(gang.spawn(run), DEADLINE_S) == [1, 1]
    assert "no memory for this batch" in capfd.readouterr().err
    assert [checkpoint_folder.read_step_of_checkpoint(path) for path in checkpoints_of(run)] == [4]


def test_a_stale_attempt_publishes_nothing_and_ends_on_all_ranks(tmp_path: Path) -> None:
    training = dataclasses.replace(ENDLESS, checkpoint_every_steps=4)
    run = gang.training_run(
        tmp_path, "job", TWO_RANKS, gang.ragged_text(tmp_path), training=training
    )
    (JobFolder(tmp_path, "job").epoch).write_text("2")
    assert gang.finish(gang.spawn(run), DEADLINE_S) == [STALE_EXIT_CODE] * 2
    assert checkpoints_of(run) == []
    assert (
        len(gang.metrics(run)) >= training.checkpoint_every_steps
    )  # it learned so when it wanted to publish


def test_a_finished_training_ends_at_once_when_launched_again(tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    leftover = checkpoint_folder.get_unfinished_checkpoint_path(
        JobFolder(tmp_path, "job").checkpoints, 0, 3
    )
    leftover.mkdir(parents=True)
    run = gang.training_run(tmp_path, "job", gang.torch_plan(), text)
    assert gang.finish(gang.spawn(run)) == [0]
    lines = gang.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, gang.TRAINING.max_steps + 1))
    assert all(set(line) == {"step", "loss", "step_s", "tokens", "grad_norm"} for line in lines)
    assert (
        len({line["tokens"] for line in lines}) > 1
    )  # ragged: a wrong weight of tokens would show
    assert not leftover.exists()
    again = gang.training_run(tmp_path, "job", gang.torch_plan(), text)
    assert gang.finish(gang.spawn(again)) == [0]
    assert gang.metrics(again) == []


def test_frozen_parameters_stay_until_their_step_and_a_restart_in_any_phase_changes_nothing(
    tmp_path: Path,
) -> None:
    text = gang.ragged_text(tmp_path)
    freeze = (
        Freeze(parameters="embed*", until_step=3),
        Freeze(parameters="layers.0.*", until_step=5),
    )
    training = dataclasses.replace(gang.TRAINING, freeze=freeze, checkpoint_every_steps=2)
    whole = gang.training_run(tmp_path, "whole", gang.torch_plan(), text, training=training)
    restarted = [
        gang.training_run(
            tmp_path,
            "restarted",
            gang.torch_plan(),
            text,
            training=dataclasses.replace(training, max_steps=until),
        )
        for until in (3, 4, 6, 8)  # where more thaws, and in the middle of two phases
    ]
    gang.launch([gang.Part(run=run) for run in (whole, *restarted)])
    pieces = {step: loss for run in restarted for step, loss in gang.losses(run).items()}
    assert pieces == pytest.approx(gang.losses(whole), abs=2e-6, rel=0)
    checkpoints = JobFolder(tmp_path, "whole").checkpoints
    weights = {
        step: _weights(checkpoint_folder.get_complete_checkpoint_path(checkpoints, step))
        for step in (2, 3, 5, 8)
    }
    assert _changed(weights[2], weights[3]) == {"layers.1", "norm", "lm_head"}
    assert _changed(weights[3], weights[5]) == {"layers.1", "norm", "lm_head", "embed_tokens"}
    assert _changed(weights[5], weights[8]) == {
        "layers.1",
        "norm",
        "lm_head",
        "embed_tokens",
        "layers.0",
    }


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight in a checkpoint, by name."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(metadata[name].size) for name in metadata if name.startswith("model.")
    }
    checkpoint.load_state(folder, weights)
    return weights


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """The parts of the model whose weights differ: `layers.<n>` or a module's name."""
    names = {name.removeprefix("model.") for name in before if not before[name].equal(after[name])}
    return {
        ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        for name in names
    }


def checkpoints_of(run: TrainingRun) -> list[Path]:
    """The published checkpoints, oldest first; all are complete."""
    published = checkpoint_folder.list_published(Path(run.job_folder) / "checkpoints")
    assert not any(checkpoint_folder.find_damage(path) for path in published)
    return published


def _wait_for_steps(attempt: AttemptFolder, count: int) -> None:
    _wait_until(
        lambda: attempt.metrics.exists() and attempt.metrics.read_text().count("\n") >= count
    )


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {DEADLINE_S} s")
        time.sleep(0.005)
