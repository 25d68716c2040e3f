"""Laws of context parallelism: messages for attention alone.

`test_equality.py` and `test_hf.py` hold the losses.
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
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, ZeroStage
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.plan import Plan
from orchestrator.training.contract.context import Context
from orchestrator.training.contract.recipe import materialise
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines.recompute import apply_checkpointing
from orchestrator.training.engines.torch_engine import TorchEngine
from orchestrator.training.models.decoder import make_decoder_recipe
from tests.training import gang

# Of four context-parallel ranks two have each key-value head.
DECODER = dataclasses.replace(
    gang.DECODER, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True
)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_a_layer_has_its_ranks_tokens_and_sends_for_attention_alone(
    tmp_path: Path, mode: ActivationCheckpointing
) -> None:
    recipe = make_decoder_recipe(
        DECODER, TextDataset(gang.ragged_text(tmp_path), gang.SEQUENCE_LENGTH), seed=0
    )
    apply_checkpointing(recipe.layers, mode)
    context = Context(dist.group.WORLD)
    assert recipe.context_parallel
    recipe.context_parallel(context)
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    lengths = []
    for layer in recipe.layers:
        layer.register_forward_hook(lambda _module, inputs, _out: lengths.append(inputs[0].shape))
    tokens = torch.zeros(2, gang.SEQUENCE_LENGTH, dtype=torch.int64)
    with _Messages() as forward:
        hidden = recipe.module.hidden(context.own(tokens))  # type: ignore[operator]
    assert set(lengths) == {(2, gang.SEQUENCE_LENGTH // 4, DECODER.hidden_size)}
    layers = DECODER.num_hidden_layers
    assert forward.count == {"alltoall_base_": 4 * layers}
    with _Messages() as backward:
        hidden.sum().backward()
    again = 1 if mode is ActivationCheckpointing.NONE else 2
    assert backward.count == {"alltoall_base_": 4 * layers * again}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("layout", "length", "changes", "message"),
    [
        ({"cp": 4}, 32, {"context_parallel": None}, "cannot share a context"),
        ({"cp": 4}, 30, {}, "no divisor of sequence_length = 30"),
        (
            {"cp": 2, "tp": 2},
            32,
            {"tensor_parallel_sizes": {"num_key_value_heads": 6}},
            "num_key_value_heads = 6",
        ),
        (
            {"cp": 4},
            32,
            {"tensor_parallel_sizes": {"num_attention_heads": 6}},
            "num_attention_heads = 6",
        ),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    tmp_path: Path, layout: dict[str, int], length: int, changes: dict[str, Any], message: str
) -> None:
    recipe = make_decoder_recipe(DECODER, TextDataset(gang.ragged_text(tmp_path), length), seed=0)
    chosen = Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(**layout),
        zero_stage=ZeroStage.PARAMETERS,
        micro_batch_size=8,
    )
    with pytest.raises(SpecError, match=message):
        TorchEngine(
            dataclasses.replace(recipe, **changes), chosen, gang.TRAINING, torch.device("cpu"), None
        )


@pytest.mark.parametrize("engine", [Engine.DEEPSPEED, Engine.SCRIPT])
def test_a_plan_shares_samples_on_our_torch_engine_only_and_evenly(engine: Engine) -> None:
    with pytest.raises(IllegalPlan, match="cp > 1 is engine=torch's"):
        Plan(engine=engine, layout=ParallelLayout(cp=2), micro_batch_size=1)
    with pytest.raises(IllegalPlan, match="cp=2 does not divide sequence_length=31"):
        Plan(
            engine=Engine.TORCH, layout=ParallelLayout(cp=2), micro_batch_size=1, sequence_length=31
        )


class _Messages(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))
