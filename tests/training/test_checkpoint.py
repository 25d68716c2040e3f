"""Laws of the checkpoint: runs of elements are rectangles; nothing unfinished or stale counts as complete."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchao.optim.subclass_8bit import OptimState8bit

from orchestrator.specs.choices import Engine, ParallelLayout, ZeroStage
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.checkpoint import TrainingProgress
from orchestrator.training.checkpoint.fragment import Fragment, Narrow, list_rectangles
from orchestrator.training.checkpoint.host_copy import divide_parts
from orchestrator.training.contract import loss_scale
from orchestrator.training.guard.virtual_device import VirtualDevice
from tests.ranks import start_ranks
from tests.training import gang

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a run of its elements."""
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(runs())
def test_rectangles_hold_the_run_in_order_and_are_few(
    run: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = run
    numbers = torch.arange(math.prod(shape)).view(shape)
    parts = list(list_rectangles(shape, start, stop))
    pieces = [
        numbers[
            tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        ].flatten()
        for part in parts
    ]
    assert torch.cat(pieces).tolist() == list(range(start, stop)) if pieces else start == stop
    assert len(parts) <= 2 * len(shape) - 1


@settings(max_examples=10, deadline=None)
@given(saved=runs())
@pytest.mark.filterwarnings("ignore")  # torch says that it saves without a process group
def test_whole_and_fragmented_states_load_either_way(
    tmp_path_factory: pytest.TempPathFactory, saved: tuple[tuple[int, ...], int, int]
) -> None:
    dims, start, stop = saved
    shape, folder = torch.Size(dims), tmp_path_factory.mktemp("checkpoint") / "a"
    whole = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
    state = {"model.cut": Fragment(whole.flatten(), 0, shape), "model.whole": whole}
    checkpoint.save_state(folder, state, TrainingProgress(step=3, samples=24))
    pieces = {name: torch.full((stop - start,), -1.0) for name in state}
    checkpoint.load_state(
        folder, {name: Fragment(piece, start, shape) for name, piece in pieces.items()}
    )
    full = torch.full(shape, -1.0)
    checkpoint.load_state(folder, {"model.cut": full})
    assert (
        pieces["model.cut"].tolist() == pieces["model.whole"].tolist() == list(range(start, stop))
    )
    assert full.equal(whole)
    assert checkpoint.open_checkpoint(folder).cursor == TrainingProgress(step=3, samples=24)


@pytest.mark.filterwarnings("ignore")  # torch says that it saves without a process group
def test_a_checkpoint_has_the_fp32_values_of_weights_that_are_held_in_bf16(tmp_path: Path) -> None:
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    checkpoint.save_state(
        tmp_path, {"x": checkpoint.prepare_weight_for_saving(weight)}, TrainingProgress()
    )
    loaded, again = torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.bfloat16)
    checkpoint.load_state(tmp_path, {"x": loaded})
    checkpoint.load_state(tmp_path, {"x": checkpoint.prepare_weight_for_saving(again)})
    stored = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["x"]
    assert stored.properties.dtype is torch.float32  # type: ignore[union-attr]
    assert loaded.equal(weight.float())
    assert again.equal(weight)


@pytest.mark.filterwarnings("ignore")  # torch says that it saves without a process group
def test_a_checkpoint_has_the_fp32_values_of_what_is_held_in_8_bits(tmp_path: Path) -> None:
    values = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))

    def zero_state() -> Narrow:
        return Narrow({(0, 0): OptimState8bit.zeros(values.shape)}, values.shape)

    def found_in(folder: Path) -> torch.Tensor:
        loaded = torch.full(values.shape, -1.0)
        checkpoint.load_state(folder, {"x": loaded})
        return loaded

    checkpoint.save_state(tmp_path / "plain", {"x": values}, TrainingProgress())
    of_plain, again = zero_state(), zero_state()
    checkpoint.load_state(tmp_path / "plain", {"x": of_plain})
    checkpoint.save_state(tmp_path / "quantised", {"x": of_plain}, TrainingProgress())
    in_8_bits = found_in(tmp_path / "quantised")
    assert in_8_bits.equal(of_plain.parts[0, 0].dequantize())
    assert 0 < (in_8_bits - values).abs().max() < 0.05 * values.abs().max()
    checkpoint.load_state(tmp_path / "quantised", {"x": again})
    torch.testing.assert_close(again.parts[0, 0].dequantize(), in_8_bits, rtol=0.01, atol=0)


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 9), st.just(0), max_size=8).map(sorted),
        min_size=1,
        max_size=5,
    )
)
def test_every_part_is_written_once_by_a_holder_and_replicated_parts_are_balanced(
    holdings: list[list[int]],
) -> None:
    everyone = [[(f"n{part}", (part,), 1 + part) for part in parts] for parts in holdings]
    all_shares = divide_parts(everyone)
    written = [part for share in all_shares for part in share]
    assert sorted(written) == sorted({part for parts in everyone for part in parts})
    assert all(set(share) <= set(parts) for share, parts in zip(all_shares, everyone, strict=True))
    loads = [
        sum(size for *_, size in share) for share in divide_parts([everyone[0]] * len(everyone))
    ]
    assert max(loads) - min(loads) <= max((size for *_, size in everyone[0]), default=0)


@pytest.mark.filterwarnings("ignore")  # torch says that it saves without a process group
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model.other": torch.zeros(3)}, r"the checkpoint has no model.other"),
        (
            {"model.w": torch.zeros(3), "optim.state.w.exp_avg": torch.zeros(3)},
            r"has no optim.state.w.exp_avg",
        ),
        ({"model.w": torch.zeros(4)}, r"another shape\n  given:   \(3,\)\n  allowed: \(4,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_one_clear_error(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    checkpoint.save_state(tmp_path / "a", {"model.w": torch.ones(3)}, TrainingProgress())
    with pytest.raises(SpecError) as error:
        checkpoint.load_state(tmp_path / "a", state)
    assert re.search(message, str(error.value))
    assert str(tmp_path / "a") in str(error.value)
    assert "to do:" in str(error.value)


@pytest.mark.filterwarnings("ignore")  # torch says that it loads without a process group
def test_a_loss_scale_is_kept_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    checkpoint.save_state(tmp_path / "a", {"model.w": torch.ones(3)}, TrainingProgress())
    weight, scale = torch.zeros(3), torch.tensor([7.0, 2.0])
    checkpoint.load_state(tmp_path / "a", {"model.w": weight, loss_scale.STATE: scale})
    assert (weight.tolist(), scale.tolist()) == ([1.0] * 3, [7.0, 2.0])


@pytest.mark.filterwarnings("ignore")  # torch says that it saves without a process group
def test_files_match_their_checksums(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    files = checkpoint.save_state(folder, {"model.w": torch.rand(1000)}, TrainingProgress())
    checkpoint_folder.write_manifest(folder, files)
    assert set(files) == {path.name for path in folder.iterdir()} - {checkpoint_folder.MANIFEST}
    assert checkpoint_folder.find_damage(folder) == []


def test_only_complete_checkpoints_are_ever_the_latest(tmp_path: Path) -> None:
    assert checkpoint_folder.find_latest_complete(tmp_path / "nothing") is None
    _complete(tmp_path, 3)
    _complete(tmp_path, 12)
    _complete(tmp_path, 13)
    os.truncate(tmp_path / "step-00000013" / "data", 99)
    checkpoint_folder.get_complete_checkpoint_path(tmp_path, 99).mkdir()  # no manifest
    _written(tmp_path, epoch=1, step=40)
    (tmp_path / "step-00000050.partial").mkdir()
    assert checkpoint_folder.find_latest_complete(tmp_path) == tmp_path / "step-00000012"
    assert checkpoint_folder.read_step_of_checkpoint(tmp_path / "step-00000012") == 12


def test_publishing_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _written(tmp_path, epoch=1, step=step)
        checkpoint_folder.publish_checkpoint(tmp_path, 1, step, keep_count=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_no_checkpoint_is_removed_if_the_new_one_is_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        _complete(tmp_path, step)
    os.truncate(_written(tmp_path, epoch=1, step=3) / "data", 99)
    with pytest.raises(OSError, match="data: 99 bytes instead of 100"):
        checkpoint_folder.publish_checkpoint(tmp_path, 1, 3, keep_count=1)
    assert [
        checkpoint_folder.read_step_of_checkpoint(path)
        for path in checkpoint_folder.list_complete(tmp_path)
    ] == [
        1,
        2,
    ]


def test_damaged_checkpoints_do_not_count_towards_those_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _complete(tmp_path, step)
    (tmp_path / "step-00000003" / "data").unlink()
    _written(tmp_path, epoch=1, step=4)
    checkpoint_folder.publish_checkpoint(tmp_path, 1, 4, keep_count=2)
    assert [
        checkpoint_folder.read_step_of_checkpoint(path)
        for path in checkpoint_folder.list_complete(tmp_path)
    ] == [
        2,
        4,
    ]


def test_only_the_newest_damaged_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3):
        _complete(tmp_path, step)
        checkpoint_folder.quarantine_checkpoint(
            checkpoint_folder.get_complete_checkpoint_path(tmp_path, step)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-step-00000002",
        "damaged-step-00000003",
    ]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    _complete(tmp_path, 5)
    (_written(tmp_path, epoch=2, step=5) / "new").touch()
    checkpoint_folder.publish_checkpoint(tmp_path, 2, 5, keep_count=2)
    assert (tmp_path / "step-00000005" / "new").exists()


def test_only_leftovers_of_dead_attempts_are_removed(tmp_path: Path) -> None:
    _written(tmp_path, epoch=1, step=5)
    newer = _written(tmp_path, epoch=3, step=5)
    _complete(tmp_path, 4)
    (tmp_path / ".removing-step-00000001").mkdir()
    checkpoint_folder.remove_unfinished(tmp_path, attempt_number=2)
    assert sorted(tmp_path.iterdir()) == sorted([newer, tmp_path / "step-00000004"])


@pytest.mark.parametrize(("newest", "stale"), [(None, False), (1, False), (2, False), (3, True)])
def test_an_attempt_is_stale_if_a_newer_one_exists(
    tmp_path: Path, newest: int | None, stale: bool
) -> None:
    if newest is not None:
        (tmp_path / "epoch").write_text(f"{newest}\n")
    assert checkpoint_folder.has_newer_attempt(tmp_path / "epoch", attempt_number=2) == stale


def test_asking_for_checkpoints_imports_no_torch() -> None:
    code = "import sys, orchestrator.training.checkpoint.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.filterwarnings("ignore")  # torch says that it loads without a process group
def test_running_out_of_memory_while_loading_is_still_that_error(tmp_path: Path) -> None:
    checkpoint.save_state(tmp_path / "a", {"model.w": torch.ones(10_000)}, TrainingProgress())
    target = torch.zeros(10_000)
    with pytest.raises(torch.OutOfMemoryError), VirtualDevice(1_000):
        checkpoint.load_state(tmp_path / "a", {"model.w": target})


@pytest.mark.long
def test_neither_saving_nor_resuming_needs_more_memory_than_training_and_an_engine_leaves_none(
    tmp_path: Path,
) -> None:
    plans = [
        Plan(
            engine=engine,
            zero_stage=ZeroStage(stage),
            layout=ParallelLayout(dp=2),
            micro_batch_size=4,
        )
        for engine, stage in (
            (Engine.TORCH, 0),
            (Engine.TORCH, 3),
            *((Engine.DEEPSPEED, n) for n in range(4)),
        )
    ]
    text = gang.ragged_text(tmp_path)
    runs = [gang.training_run(tmp_path, f"job{n}", plan, text) for n, plan in enumerate(plans)]
    paths = [str(AttemptFolder(run.attempt_folder).run) for run in runs]
    assert gang.finish(start_ranks("tests.training.peaks", [str(tmp_path), *paths], 2)) == [0, 0]
    for rank in range(2):
        for plan, peaks in zip(
            plans, json.loads((tmp_path / f"peaks-{rank}.json").read_text()), strict=True
        ):
            assert max(peaks["build"], peaks["save"], peaks["resume"]) <= peaks["train"], (
                rank,
                plan,
                peaks,
            )
            assert peaks["left"] < peaks["train"] / 20, (rank, plan, peaks)


def _written(checkpoints: Path, *, epoch: int, step: int) -> Path:
    path = checkpoint_folder.get_unfinished_checkpoint_path(checkpoints, epoch, step)
    path.mkdir(parents=True)
    (path / "data").write_bytes(bytes(range(100)))
    checkpoint_folder.write_manifest(
        path, {"data": checkpoint_folder.make_manifest_entry(100, zlib.crc32(bytes(range(100))))}
    )
    return path


def _complete(checkpoints: Path, step: int) -> None:
    _written(checkpoints, epoch=1, step=step).rename(
        checkpoint_folder.get_complete_checkpoint_path(checkpoints, step)
    )
