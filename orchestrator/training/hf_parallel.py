"""How the layers of a transformers model are cut: tensor-parallel plans and pipeline stages, by family.

Every rank has attention heads of its own and columns of its own in the feed-forward (arXiv:1909.08053, section 3). The
attention modules of transformers count their heads from what the projections return, so they need no other change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from orchestrator.specs.errors import SpecError
from orchestrator.training.recipe import Stages


class HeadNorm(ParallelStyle):
    """A norm over the width of each head [B, T, heads, width]: a rank has part of the heads and all of the weight."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_cut(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return (DTensor.from_local(inputs[0], mesh, [Shard(2)], run_check=False),)

        return distribute_module(module, device_mesh, None, to_cut, _to_local)  # type: ignore[arg-type]


class HeadBias(ParallelStyle):
    """T5's relative attention bias, an embedding [distance, heads]: a rank has the columns of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            weight = distribute_tensor(part.weight.data, mesh, [Shard(1)])  # type: ignore[arg-type,union-attr]
            part.register_parameter("weight", nn.Parameter(weight))

        def to_whole(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

        return distribute_module(module, device_mesh, cut, to_whole, _to_local)  # type: ignore[arg-type]


class OwnHeads(ParallelStyle):
    """T5's attention makes a bias of zeros for as many heads as it has: those of one rank. It holds no parameters."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.n_heads //= device_mesh.size()
        return module


def _to_local(_module: nn.Module, output: Any, _mesh: DeviceMesh) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output


LLAMA_PLAN: dict[str, str | ParallelStyle] = {
    "model.embed_tokens": "embedding",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "head",
}
T5_PLAN: dict[str, str | ParallelStyle] = {
    "*Attention": OwnHeads(),
    "*Attention.[qkv]": "colwise",
    "*Attention.o": "rowwise",
    "*Attention.relative_attention_bias": HeadBias(),
    "*DenseReluDense.wi*": "colwise",
    "*DenseReluDense.wo": "rowwise",
}
PLANS = {
    "llama": LLAMA_PLAN,
    "mistral": LLAMA_PLAN,
    "qwen2": LLAMA_PLAN,
    "qwen3": LLAMA_PLAN | {"model.layers.*.self_attn.[qk]_norm": HeadNorm()},
    "gemma": LLAMA_PLAN,
    "t5": T5_PLAN,
}
STAGED = ("llama", "mistral", "qwen2", "qwen3", "gemma")


def tensor_parallel_of(module: Any, tp: int) -> Mapping[str, str | ParallelStyle]:
    """The family's tensor-parallel plan; empty where it has none. Raises SpecError where `tp` does not divide heads."""
    config = module.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or tp
        if config.model_type in PLANS and heads % tp:
            raise SpecError(f"tp={tp} does not divide the heads", path=f"model.hf.{name}", got=heads)
    return PLANS.get(config.model_type, {})


def stages_of(module: Any) -> Stages | None:
    """How the family's layers are cut into pipeline stages; None where they are not."""
    if module.config.model_type not in STAGED:
        return None
    return Stages(
        first=("model.embed_tokens",), last=("model.norm", "lm_head"), hidden=_hidden, loss_sum=_stage_loss_sum
    )


def _hidden(module: Any, x: Tensor) -> Tensor:
    base = module.base_model
    if base.norm is None:  # the model calls it; a module without parameters changes no name
        base.norm = nn.Identity()
    given = "inputs_embeds" if base.embed_tokens is None else "input_ids"
    return base(**{given: x}, use_cache=False).last_hidden_state


def _stage_loss_sum(module: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return module.lm_head(hidden, labels)
