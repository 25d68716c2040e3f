"""Tensor-parallel ranks compute norms and residuals of their own tokens only.

`test_equality.py` holds the losses of whole plans; here stand the laws of the tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.recipe import Recipe, materialise
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines.randomness import Randomness
from orchestrator.training.engines.recompute import apply_checkpointing
from orchestrator.training.engines.tensor_parallel import shard_recipe
from orchestrator.training.models.decoder import make_decoder_recipe
from tests.training import gang

RANKS, SAMPLES = 4, 2
DECODER = dataclasses.replace(gang.DECODER, num_key_value_heads=4)


class _Messages(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "orchestrator"):
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield
    dist.destroy_process_group()


def _recipe(tmp_path: Path) -> Recipe:
    return make_decoder_recipe(
        DECODER, TextDataset(gang.ragged_text(tmp_path), gang.SEQUENCE_LENGTH), seed=0
    )


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_a_layer_sees_its_ranks_tokens_and_all_reduces_nothing(
    tmp_path: Path, mode: ActivationCheckpointing
) -> None:
    recipe = _recipe(tmp_path)
    apply_checkpointing(recipe.layers, mode)
    cut = shard_recipe(
        recipe,
        init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)),
        SAMPLES,
        gang.SEQUENCE_LENGTH,
    )
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"), cut.place)
    cut.spread_tokens(recipe.layers)
    shapes = []
    for layer in recipe.layers:
        layer.input_layernorm.register_forward_hook(
            lambda _module, inputs, _out: shapes.append(inputs[0].shape)
        )
    with _Messages() as forward:
        hidden = recipe.module.hidden(torch.zeros(SAMPLES, gang.SEQUENCE_LENGTH, dtype=torch.int64))
    share = (1, SAMPLES * gang.SEQUENCE_LENGTH // RANKS, DECODER.hidden_size)
    assert {*shapes, hidden.shape} == {share}
    with _Messages() as backward:
        hidden.sum().backward()
    layers = DECODER.num_hidden_layers
    sums, again = 2 * layers, {"none": 0, "selective": 2 * layers, "full": 2 * layers}[mode]
    # one of both for every half of a layer; the embedding's sum
    assert forward.count == {
        "_allgather_base_": sums,
        "summed_product": sums,
        "_reduce_scatter_base_": 1,
    }
    # the second half of a layer that is recomputed in full needs no sum
    replayed = {"summed_product": layers} if mode is ActivationCheckpointing.FULL else {}
    # gradients of sums are gathered, also the embedding's, and inputs once more
    gathered = {"_allgather_base_": 2 * sums + 1 + again, "_reduce_scatter_base_": sums}
    assert backward.count == gathered | replayed


@pytest.mark.usefixtures("four_ranks")
def test_a_gathered_module_with_a_part_that_is_not_cut_is_refused(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path)
    uncut = {
        name: word for name, word in recipe.tensor_parallel.items() if not name.endswith("up_proj")
    }
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    with pytest.raises(SpecError, match="has a part that is not cut"):
        shard_recipe(
            dataclasses.replace(recipe, tensor_parallel=uncut), mesh, SAMPLES, gang.SEQUENCE_LENGTH
        )


def test_every_ranks_tokens_are_dropped_by_draws_of_their_own(tmp_path: Path) -> None:
    def mask(part: int) -> list[float]:
        recipe = dataclasses.replace(_recipe(tmp_path), layers=(nn.Dropout(0.5),))
        Randomness(recipe, seed=0, token_part=part).begin(steps_done=0, micro_batch_index=0)
        return recipe.layers[0](torch.ones(64)).tolist()

    assert mask(1) == mask(1)
    assert len({tuple(mask(part)) for part in range(RANKS)}) == RANKS
