"""Laws of moved bytes: the profile's are those that a layer's operators read and write on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.models.adapters import AdaptedLayer
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.planning.kernels import GRADIENT_TRAFFIC_BYTES, LOGIT_TRAFFIC_BYTES
from orchestrator.specs.choices import Precision
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.training.models import cross_entropy
from orchestrator.training.models.decoder import Layer, _make_rotary_tables

TOKENS = 64
SMALL = TOKENS * 32  # elements: below are rotary tables and what a norm keeps of a row
TOLERANCE = 0.03
# Views move nothing, fresh memory neither; products and attention have a time of their own.
NOT_COUNTED = (
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "t.default",
        "permute",
        "expand",
        "unsqueeze",
        "squeeze",
    ),
    *(
        "slice",
        "split",
        "select",
        "as_strided",
        "detach",
        "alias",
        "lift",
        "empty",
        "new_empty",
        "mm",
    ),
    *("gather", "scatter_add"),  # one logit of a row
)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


class Counted(TorchDispatchMode):
    """Bytes of the large tensors that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0

    def add(self, *tensors: Any) -> None:
        large = (
            tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel() >= SMALL
        )
        self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in large)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).removeprefix("aten.").startswith(NOT_COUNTED):
            self.add(*tree_leaves((args, kwargs, out)))
        return out


class Attention(torch.autograd.Function):
    """Output and gradients as a fused kernel lays them out, and nothing that is moved."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(query, *others)
        return _by_tokens(query)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return tuple(map(_by_tokens, ctx.saved_tensors))


def _by_tokens(heads: Tensor) -> Tensor:
    batch, count, tokens, width = heads.shape
    return heads.new_empty(batch, tokens, count, width).transpose(1, 2)


def norm_of(counted: Counted) -> Callable[..., Tensor]:
    """RMS norm as CUDA's kernels: forwards read and write; backwards one more, and both again for the weight."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(hidden, weight)
            counted.add(hidden, hidden)
            return torch.empty_like(hidden)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            hidden, weight = ctx.saved_tensors
            counted.add(hidden, grad, hidden, grad, hidden)
            return torch.empty_like(hidden), torch.empty_like(weight)

    return lambda hidden, _shape, weight, *_eps: Norm.apply(hidden, weight)


def our_layer() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    spec = DecoderSpec(**SIZES)
    layer = Layer(spec)
    tables = _make_rotary_tables(0, TOKENS, spec.head_dim, torch.device("meta"))
    return layer, lambda x: layer(x, *tables)


def their_layer(family: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    transformers = pytest.importorskip("transformers")
    written = getattr(transformers.models, family)
    modeling, name = getattr(written, f"modeling_{family}"), family.capitalize()
    config = getattr(transformers, f"{name}Config")(**SIZES, head_dim=64)
    config._attn_implementation = "sdpa"
    layer = getattr(modeling, f"{name}DecoderLayer")(config, 0)
    rotary = getattr(modeling, f"{name}RotaryEmbedding")(config)

    def run(x: Tensor) -> Tensor:
        out = layer(
            x, position_embeddings=rotary(x, torch.arange(TOKENS)[None]), attention_mask=None
        )
        return out[0] if isinstance(out, tuple) else out

    return layer, run


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("family", ["ours", "llama", "mistral", "qwen3"])
def test_operators_move_what_is_said(
    family: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and residual stream are bf16, too, where FSDP2 and DeepSpeed run in bf16."""
    counted = Counted()
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, v, *_, **__: Attention.apply(q, k, v),
    )
    monkeypatch.setattr(functional, "rms_norm", norm_of(counted))
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    with torch.device("meta"):
        layer, run = our_layer() if family == "ours" else their_layer(family)
        x = torch.empty(1, TOKENS, SIZES["hidden_size"], dtype=dtype, requires_grad=True)
        layer.to(dtype)
        with counted:
            out = run(x)
            forward_bytes = counted.moved_bytes
            out.backward(torch.empty_like(out))
    model: Any = (
        {"decoder": DecoderSpec(**SIZES)}
        if family == "ours"
        else {"hf": {"model_type": family, **SIZES, "head_dim": 64}}
    )
    job = JobSpec(
        name="moved",
        global_batch_size=1,
        model=ModelSpec(**model),
        data=DataSpec(text=("x",), sequence_length=TOKENS),
    )
    profile = find_rank_profile(
        read_model_request(job),
        RankShare(precision=precision, sequence_length=TOKENS, autocast=False, cuda=True),
    )
    assert profile is not None
    (segment,) = (candidate for candidate in profile.segments if candidate.name == "layer")
    assert segment.forward_moved_bytes == pytest.approx(forward_bytes, rel=TOLERANCE)
    assert segment.backward_moved_bytes == pytest.approx(
        counted.moved_bytes - forward_bytes, rel=TOLERANCE
    )


def counted_projection(
    sizes: tuple[int, int], dtype: torch.dtype, *, adapted: bool, autocast: bool
) -> tuple[int, int]:
    """Bytes that a projection moves forwards and backwards, on the CPU: meta tensors have no autocast.

    The adapter has rank 1: casts of its weights have a place of their own (`cast_bytes`).
    """
    peft = pytest.importorskip("peft")
    module = nn.Module()
    module.proj = nn.Linear(*sizes, bias=False)
    module.requires_grad_(False)
    if adapted:
        config = peft.LoraConfig(r=1, target_modules=["proj"])
        peft.inject_adapter_in_model(config, module)
    if not autocast:
        module.to(dtype)
    x = torch.randn(1, TOKENS, sizes[0], dtype=dtype, requires_grad=True)
    counted = Counted()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), counted:
        out = module.proj(x)
    forward_bytes = counted.moved_bytes
    with counted:
        out.backward(torch.empty_like(out))
    return forward_bytes, counted.moved_bytes - forward_bytes


@pytest.mark.parametrize("sizes", [(256, 256), (256, 1024), (1024, 256)])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)],
    ids=["autocast", "bf16", "fp32"],
)
def test_an_adapter_moves_what_is_said_beside_its_base(
    sizes: tuple[int, int], dtype: torch.dtype, autocast: bool
) -> None:
    layer = AdaptedLayer(
        projections={"up_proj": sizes},
        targets=(),
        dropout=False,
        width=4 if dtype is torch.float32 else 2,
        autocast=autocast,
        cuda=True,
    )
    plain = counted_projection(sizes, dtype, adapted=False, autocast=autocast)
    adapted = counted_projection(sizes, dtype, adapted=True, autocast=autocast)
    for number in range(2):
        moved_bytes = adapted[number] - plain[number]
        assert TOKENS * layer.forward_and_backward_traffic_bytes[number] == pytest.approx(
            moved_bytes, rel=TOLERANCE
        )


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_loss_moves_what_is_said_of_a_logit_and_of_a_gradient(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, hidden = 4096, 16
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16

    def moved_bytes(chunk_tokens: int, *, trains: bool) -> int:
        monkeypatch.setattr(cross_entropy, "CHUNK_TOKENS", chunk_tokens)
        counted = Counted()
        weight = torch.zeros(vocab_size, hidden, dtype=dtype, requires_grad=trains)
        states = torch.zeros(TOKENS, hidden, dtype=dtype, requires_grad=True)
        with counted:
            cross_entropy.linear_cross_entropy(
                states, weight, torch.zeros(TOKENS, dtype=torch.long)
            )
        return counted.moved_bytes

    assert moved_bytes(TOKENS, trains=False) == TOKENS * vocab_size * LOGIT_TRAFFIC_BYTES[precision]
    more = moved_bytes(TOKENS // 2, trains=True) - moved_bytes(
        TOKENS, trains=True
    )  # one chunk more is added
    assert more == vocab_size * hidden * GRADIENT_TRAFFIC_BYTES[precision]
