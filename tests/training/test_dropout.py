"""Laws of dropout as on CUDA: a traced step saves, allocates and frees what the fused kernel does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from orchestrator.memory.profiles import make_decoder_profile
from orchestrator.specs.choices import Precision
from orchestrator.specs.job.model import DecoderSpec, ModelSpec, TrainingSpec
from orchestrator.specs.profile import ModelProfile
from orchestrator.training.contract.recipe import Batch, Recipe
from orchestrator.training.tracing.allocator import AllocationLedger
from orchestrator.training.tracing.cuda_autocast import autocast_as_on_cuda
from orchestrator.training.tracing.model_builder import Arithmetic, Request
from orchestrator.training.tracing.op_recorder import OpRecorder
from orchestrator.training.tracing.trace import trace_arithmetics

P, WIDTH, LAYERS, LENGTH = 0.25, 24, 4, 32
ARITHMETICS = {
    "fp32": Arithmetic(precision=Precision.FP32, autocast=False),
    "cast": Arithmetic(precision=Precision.BF16, autocast=False),
    "autocast": Arithmetic(precision=Precision.BF16, autocast=True),
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}


class Rows:
    """Samples of one row each."""

    def __len__(self) -> int:
        return 64

    def token_count(self, _index: int) -> int:
        return 1

    def batch(self, indices: Any) -> Batch:
        return (torch.zeros(len(indices), WIDTH),)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(P), nn.Linear(2 * WIDTH, WIDTH))


def build(_config: dict[str, Any]) -> Recipe:
    """The traced factory: successive blocks; the first one's input is a product."""
    blocks = [block() for _ in range(LAYERS)]
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    return Recipe(
        module=module, loss_sum=lambda it, rows: it(*rows).sum(), dataset=Rows(), layers=blocks
    )


def trace_profiles(model: ModelSpec, *arithmetics: Arithmetic) -> list[ModelProfile]:
    fields: dict[str, Any] = {
        "training": TrainingSpec(),
        "family": "model",
        "sequence_length": LENGTH,
    }
    return trace_arithmetics(Request(model=model, arithmetics=arithmetics, **fields))


def as_on(arithmetic: Arithmetic, *, cuda: bool) -> Arithmetic:
    return Arithmetic(precision=arithmetic.precision, autocast=arithmetic.autocast, cuda=cuda)


def saved_tensors_of(made: Callable[[], Any], *, but: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Bytes that autograd saves for the backward pass of the result, each storage once."""
    saved_tensors: dict[int, Tensor] = {}

    def saved(tensor: Tensor) -> Tensor:
        saved_tensors.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        made()
    outside = {tensor.untyped_storage()._cdata for tensor in but}
    return [tensor for storage, tensor in saved_tensors.items() if storage not in outside]


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def autograd_bytes(arithmetic: Arithmetic) -> int:
    """Return the bytes of a further row in a block that calls torch.native_dropout by name."""
    dtype = (
        torch.bfloat16
        if arithmetic.precision is Precision.BF16 and not arithmetic.autocast
        else torch.float32
    )
    first, _, last = module = block().to(dtype)

    def bytes_of(rows: int) -> int:
        inputs = torch.ones(
            rows, WIDTH, dtype=torch.bfloat16 if arithmetic.autocast else dtype, requires_grad=True
        )

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=arithmetic.autocast):
                return last(torch.native_dropout(first(inputs), P, True)[0])  # type: ignore[no-any-return]

        return size(saved_tensors_of(forward, but=tuple(module.parameters())))

    return bytes_of(5) - bytes_of(4)


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_a_trace_as_on_cuda_saves_the_tensors_of_the_fused_kernel(arithmetic: Arithmetic) -> None:
    model = ModelSpec(factory=f"{__file__}:build", config={})
    on_cpu, on_cuda = trace_profiles(
        model, as_on(arithmetic, cuda=False), as_on(arithmetic, cuda=True)
    )
    (before,), (after,) = (
        [part.saved_bytes for part in profile.segments if part.count > 1]
        for profile in (on_cpu, on_cuda)
    )
    width = 4 if arithmetic.precision is Precision.FP32 else 2
    assert after == autograd_bytes(arithmetic)
    assert before - after == (width - 1) * 2 * WIDTH, "a byte an element where a factor was"


@pytest.mark.parametrize("name", ["fp32", "autocast"])
@pytest.mark.parametrize("cuda", [False, True])
def test_the_closed_form_of_a_decoder_saves_what_its_trace_does(name: str, cuda: bool) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    decoder, how = DecoderSpec(**sizes, num_attention_heads=4, dropout=P), ARITHMETICS[name]
    (trace,) = trace_profiles(ModelSpec(decoder=decoder), as_on(how, cuda=cuda))
    closed_form = make_decoder_profile(
        decoder, "model", how.precision, LENGTH, 1, how.autocast, cuda
    )
    of_layers = [
        [part.saved_bytes for part in profile.segments if part.count > 1]
        for profile in (trace, closed_form)
    ]
    assert of_layers[0] == of_layers[1]


def ledger(*, cuda: bool) -> AllocationLedger:
    """Allocations and frees of a step that applies dropout to 1,024 numbers and sums them."""
    module = nn.Dropout(P)
    recorder = OpRecorder([Recipe(module=module, loss_sum=lambda it, _: it, dataset=Rows())], {})
    here = autocast_as_on_cuda() if cuda else contextlib.nullcontext()
    with here, FakeTensorMode(), recorder.step(1), recorder.turn(0):
        loss = module(torch.zeros(1024, requires_grad=True)).sum()
        recorder.mark_backward_start()
        loss.backward()
    return recorder.ledger


def test_dropout_allocates_result_mask_and_gradient_only() -> None:
    on_cpu, on_cuda = ledger(cuda=False), ledger(cuda=True)
    first, *made = [size for size in on_cuda.sizes if size > 8]
    assert (first, made) == (4096, [4096, 1024, 4096])
    assert [size for size in on_cpu.sizes if size > 8] == [4096] * 4
    assert on_cpu.peak_bytes - on_cuda.peak_bytes == 3072
    mask, gradient = on_cuda.sizes.index(1024), len(on_cuda.sizes) - 1
    assert on_cuda.requests.index(gradient) < on_cuda.requests.index(-mask - 1), (
        "it is read where the gradient is made"
    )


NOT_FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: functional.dropout(x * 1, P, inplace=True),
    "1d": lambda x: functional.dropout1d(x, P),
    "2d": lambda x: functional.dropout2d(x[..., None], P),
    "3d": lambda x: functional.dropout3d(x[..., None, None], P),
    "alpha": lambda x: functional.alpha_dropout(x, P, training=True),
    "alpha of features": lambda x: functional.feature_alpha_dropout(x, P, training=True),
    "everything": lambda x: functional.dropout(x, 1.0),
    "nothing": lambda x: functional.dropout(x, 0.0),
    "not in training": lambda x: functional.dropout(x, P, training=False),
    "of no elements": lambda x: functional.dropout(x[:0], P),
}


@pytest.mark.parametrize("kind", NOT_FUSED)
def test_dropout_without_a_cuda_kernel_saves_the_same_on_cpu_and_cuda(kind: str) -> None:
    inputs = torch.ones(3, 5, 7, requires_grad=True)

    def saved() -> list[tuple[torch.dtype, torch.Size]]:
        return [
            (tensor.dtype, tensor.shape)
            for tensor in saved_tensors_of(lambda: NOT_FUSED[kind](inputs))
        ]

    on_cpu = saved()
    with autocast_as_on_cuda():
        assert saved() == on_cpu
    assert all(dtype is torch.float32 for dtype, _ in on_cpu)


def test_outside_the_context_dropout_is_the_cpus() -> None:
    inputs = torch.ones(64, requires_grad=True)
    with autocast_as_on_cuda():
        inside = functional.dropout(inputs, P)
    assert inside.grad_fn is not None
    assert inside.grad_fn.name() == "NativeDropoutBackward0"
    assert [tensor.dtype for tensor in saved_tensors_of(lambda: functional.dropout(inputs, P))] == [
        torch.float32
    ]


def test_attention_saves_seeds_in_fused_kernels_and_byte_masks_beside_scores() -> None:
    shape, scores = (2, 3, LENGTH, 8), torch.Size((2, 3, LENGTH, LENGTH))
    with FakeTensorMode(), autocast_as_on_cuda():
        q, k, v = (torch.ones(shape, requires_grad=True) for _ in range(3))
        kernel = saved_tensors_of(
            lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=P), but=(q, k, v)
        )
        matrices = saved_tensors_of(
            lambda: torch.ops.aten._scaled_dot_product_attention_math(q, k, v, dropout_p=P)[0]
        )
    out, log_sum_exp, seed, offset = sorted(kernel, key=lambda tensor: -tensor.numel())
    assert (out.shape, log_sum_exp.shape) == (shape, shape[:-1])
    assert [(tensor.dtype, tensor.numel()) for tensor in (seed, offset)] == [(torch.int64, 1)] * 2
    whole = [tensor.dtype for tensor in matrices if tensor.numel() == scores.numel()]
    assert sorted(whole, key=str) == [torch.bool, torch.float32, torch.float32], (
        "mask, softmax, what was not dropped"
    )


def test_attention_with_dropout_takes_fewer_heads_of_keys_than_of_queries() -> None:
    with FakeTensorMode(), autocast_as_on_cuda():
        q = torch.ones((2, 4, LENGTH, 8), requires_grad=True)
        k, v = (torch.ones((2, 2, LENGTH, 8), requires_grad=True) for _ in range(2))
        out = functional.scaled_dot_product_attention(q, k, v, dropout_p=P, enable_gqa=True)
        out.sum().backward()
    assert out.shape == q.shape
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["fp32", "cast"])
def test_on_cuda_a_gpt2_saves_no_scores_and_one_byte_per_mask_element(name: str) -> None:
    """Residuals are dropped twice in a layer. Without dropout of its scores its attention is the same on both."""
    kinds = [as_on(ARITHMETICS[name], cuda=cuda) for cuda in (False, True)]

    def spared_bytes(**dropout: float) -> int:
        on_cpu, on_cuda = trace_profiles(ModelSpec(hf=GPT2 | {"embd_pdrop": 0.0} | dropout), *kinds)
        of_layers = [
            [part.saved_bytes for part in profile.segments if part.count > 1]
            for profile in (on_cpu, on_cuda)
        ]
        ((before,), (after,)) = of_layers
        return before - after

    masks = LENGTH * 2 * GPT2["n_embd"] * ((4 if name == "fp32" else 2) - 1)
    assert spared_bytes(resid_pdrop=0.0, attn_pdrop=0.0) == 0
    assert spared_bytes(resid_pdrop=P, attn_pdrop=0.0) == masks
    scores = spared_bytes(resid_pdrop=0.0, attn_pdrop=P)
    assert scores >= LENGTH * GPT2["n_head"] * LENGTH * 3 * 4 - 4 * LENGTH * GPT2["n_head"]
    assert spared_bytes(resid_pdrop=P, attn_pdrop=P) == scores + masks
