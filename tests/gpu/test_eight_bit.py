"""AdamW with moments in 8 bits: near AdamW, on from its checkpoint, and within its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from orchestrator.memory.engines.optimizers import update_temporary_bytes  # noqa: E402
from orchestrator.specs.choices import Optimizer  # noqa: E402
from orchestrator.specs.job.model import DecoderSpec, ModelSpec, TrainingSpec  # noqa: E402
from orchestrator.training.build import build_engine, build_recipe  # noqa: E402
from orchestrator.training.checkpoint import checkpoint  # noqa: E402
from orchestrator.training.checkpoint.checkpoint import SavedCheckpoint, TrainingProgress  # noqa: E402
from orchestrator.training.checkpoint.fragment import Narrow  # noqa: E402
from orchestrator.training.engines.optimizers import OptimizerUpdates  # noqa: E402
from tests.gpu.runs import TRAINING, plan, run_of, train  # noqa: E402

EIGHT_BIT = plan(optimizer=Optimizer.ADAMW_8BIT)
DECODER = DecoderSpec(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
)  # tensors of 4096 elements and more are quantised


def test_it_stays_near_adamw_and_goes_on_from_its_checkpoint(
    tmp_path: Path, device: torch.device
) -> None:
    model = ModelSpec(decoder=DECODER)
    full = train(run_of(tmp_path, device, plan(), model=model), device)
    run = run_of(tmp_path, device, EIGHT_BIT, model=model)
    eight = train(run, device)
    assert eight.losses == pytest.approx(full.losses, abs=2e-2, rel=0)
    state = eight.engine.state()
    assert any(isinstance(value, Narrow) for value in state.values())
    saved = SavedCheckpoint(
        path=tmp_path / "checkpoint", cursor=TrainingProgress(step=TRAINING.max_steps)
    )
    checkpoint.save_state(saved.path, state, saved.cursor)
    again = build_engine(run, build_recipe(run), device, saved).state()
    for name, value in state.items():
        torch.testing.assert_close(_values(again[name]), _values(value), rtol=0.01, atol=0)


def _values(value: torch.Tensor | Narrow) -> torch.Tensor:
    return value.parts[0, 0].dequantize() if isinstance(value, Narrow) else value


@pytest.mark.long
def test_a_compiled_update_is_that_of_single_operations(device: torch.device) -> None:
    from torchao.optim import AdamW8bit

    weights = []
    for stance in ("default", "force_eager"):
        weight = torch.nn.Parameter(torch.ones(64, 128, device=device))
        optimizer = AdamW8bit([weight], lr=0.1)
        for step in range(3):
            weight.grad = torch.sin(
                torch.arange(64 * 128, device=device, dtype=torch.float32) * (step + 1)
            ).view(64, 128)
            with torch.compiler.set_stance(stance):
                optimizer.step()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_a_compiled_update_holds_no_more_than_is_predicted(cuda: torch.device) -> None:
    size = 16 * 2**20
    weight = torch.nn.Parameter(torch.ones(4096, size // 4096, device=cuda))
    updates = OptimizerUpdates(
        [("weight", weight)], TrainingSpec(optimizer=Optimizer.ADAMW_8BIT), cuda, steps_done=0
    )
    updates.allocate()
    peaks_bytes = []
    for step in range(3):
        weight.grad = torch.ones_like(weight)
        updates.prepare(step)
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        updates.update()
        peaks_bytes.append(torch.cuda.max_memory_allocated() - before_bytes)
    print(f"bytes of an element: {[peak_bytes / size for peak_bytes in peaks_bytes]}")
    assert peaks_bytes[-1] <= 1.05 * update_temporary_bytes(EIGHT_BIT, size, is_cuda=True)
