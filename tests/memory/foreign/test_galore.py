"""Laws of optimizers that step gradients of low rank (GaLore), in other people's trainings."""

from __future__ import annotations

import pytest
import torch

from orchestrator.memory.foreign.plain import plain_moments
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.errors import SpecError

GALORE = {
    "id": "x1",
    "model": "LLaMA 7B",
    "framework": "transformers Trainer",
    "n_gpus": "1",
    "micro_batch": "1",
    "seq_len": "512",
    "precision": "pure bf16",
    "act_ckpt": "True",
}


def galore(optimizer: str, **columns: str) -> Training:
    return described_row(GALORE | {"optimizer": optimizer} | columns).training


def state_bytes(training: Training) -> float:
    return dict(dict(plain_moments(training))["optimizer step"])["optimizer states"]


@pytest.mark.parametrize("rank", [128, 1024])
def test_galore_keeps_states_of_its_rank_and_what_projects_onto_it(rank: int) -> None:
    """Zhao et al. 2024 (arXiv:2403.03507), table 1: of m x n, m <= n, there are m r + 2 n r elements."""
    training = galore(f"GaLore AdamW rank {rank}")
    matrices = [sorted(size) for size in training.shape.projections.values()]
    layers = training.shape.layers
    saved = 2 * sum(2 * m * n - (m * rank + 2 * n * rank) for m, n in matrices) * layers  # bytes of bf16
    assert state_bytes(galore("AdamW")) - state_bytes(training) == saved


def test_galore_in_fp32_keeps_all_directions() -> None:
    """galore_torch/galore_projector.py takes the first rows of what a decomposition returned: a view of all of it."""
    rows = torch.linalg.svd(torch.randn(12, 8), full_matrices=False)[2][:2]
    assert rows.untyped_storage().nbytes() == 4 * 8 * 8
    wide, narrow = (galore(f"GaLore AdamW rank {rank}", precision="fp32") for rank in (64, 128))
    projections = wide.shape.projections.values()
    stepped = 64 * sum(max(size) for size in projections) * wide.shape.layers
    assert state_bytes(narrow) - state_bytes(wide) == 4 * 2 * stepped


def test_galore_per_layer_holds_no_gradients_and_decomposes_in_the_backward_pass() -> None:
    """Three fp32 matrices as large as the gradient and one of its shorter side are there beside the backward pass."""
    whole, layered = galore("GaLore AdamW rank 64"), galore("GaLore AdamW rank 64, per-layer updates")
    (name, _), *_ = [moment for moment in plain_moments(whole) if moment[0] == "backward of last layer"]
    at_work = [dict(dict(plain_moments(training))[name])["activations at work"] for training in (whole, layered)]
    m, n = sorted(whole.shape.projections["up"])
    assert at_work[1] - at_work[0] == 4 * m * (3 * n + m)
    gradients = [dict(dict(plain_moments(training))["optimizer step"])["gradients"] for training in (whole, layered)]
    assert gradients[1] < gradients[0] / 10


def test_galore_of_cut_gradients_is_refused() -> None:
    with pytest.raises(SpecError, match="GaLore projects whole gradients"):
        galore("GaLore AdamW rank 64", sharding="FSDP FULL_SHARD")


def test_galore_has_the_default_rank_of_its_framework() -> None:
    assert galore("GaLore AdamW").optimizer.projected_rank == 128
    assert galore("galore", framework="LLaMA-Factory").optimizer.projected_rank == 16
    assert galore("", peft="GaLore r=64").optimizer.projected_rank == 64
