"""Predicted compute seconds of a micro-batch: matrix products by shape, memory-bound operators, kernel launches."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.frozen import frozen
from orchestrator.specs.profile import LossChunks, ModelProfile, Segment

# Of the data sheet's peak, what the fastest product reaches where the device was not measured: 0.80
# on H100, 0.86 on
# A100, 0.76 on L4, 0.70 on L40S (mag-/gpu_benchmark README.md).
PRODUCT_EFFICIENCY = 0.80
# Of the fastest product, what a whole model reaches of whose products nothing is known: dense
# training reaches 38 to
# 43 % of the peak on H100 (Grattafiori et al. 2024, arXiv:2407.21783, table 4), whose fastest
# product reaches 80 %. It
# includes memory-bound operators.
MODEL_EFFICIENCY = 0.50
# Of the peak, what attention reaches: FlashAttention-2 35 % on H100 (Shah et al. 2024,
# arXiv:2407.08608, section 1),
# on A100 with a causal mask 30 % (512 tokens) to 55 % (16k) of it (Dao 2023, arXiv:2307.08691,
# figure 4).
ATTENTION_EFFICIENCY = 0.35
# Products of its backward pass for one of the forward pass: five for two, since scores are computed
# again (same,
# section 3.1); four where they were kept.
ATTENTION_BACKWARD = 2.5
EAGER_ATTENTION_BACKWARD = 2.0
# Achieved over nominal bandwidth of kernels that stream through memory (calculon-ai/calculon
# systems/a100_80g.json:
# 0.75 for 10 MB, 0.90 for 100 MB).
BANDWIDTH_EFFICIENCY = 0.80
# Output tiles of cuBLAS and their rates, the largest being 1 (NVIDIA, Matrix Multiplication
# Background User's Guide,
# section 2.3: which there are, and that small ones reuse less of what they load). A tile of a x b
# loads (a + b) / ab
# values per operation; the rates are what follows if that takes an eighth of the largest tile's
# time: a guess.
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.96),
    (128, 64, 0.89),
    (64, 128, 0.89),
    (64, 64, 0.80),
)
SPLITS = (
    2,
    4,
)  # of the inner dimension, where tiles are few (split-K): the sums are added in memory
# Start and end of a kernel, in which the device is not full: a guess of its order. A launch takes
# some microseconds.
KERNEL_S = 3e-6
# What memory-bound operators move per byte that they keep, where nobody counted them. A layer of
# Megatron keeps
# 34 sbh + 5 as^2 (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1). Its norms, activation,
# dropouts and
# residuals read and write 38 sbh, softmax and its dropout 9 as^2; backwards 77 and 11.
FORWARD_TRAFFIC = 1.5
BACKWARD_TRAFFIC = 2.25
# Bytes that our loss in chunks moves for each logit: maximum, difference, exponential, sum,
# quotient and mask, and in
# low precision two conversions (training/models/cross_entropy.py). Then for each element of the
# weight's gradient, to
# which every chunk is added. They took 22 and 10 ms of a step on an H100, and take 20 and 8 by this
# (tests/gpu/measured/, 2026-11-26).
LOGIT_TRAFFIC_BYTES = {Precision.FP32: 40, Precision.BF16: 52, Precision.FP16: 52}
GRADIENT_TRAFFIC_BYTES = {Precision.FP32: 8, Precision.BF16: 10, Precision.FP16: 10}
# All-reduces of a layer that is cut over ranks: of the outputs of its two pairs of products, and of
# their inputs'
# gradients (Shoeybi et al. 2019, arXiv:1909.08053, section 3). What has fewer products has one of
# these: an embedding
# that of its output, a head that of its input's gradient.
LAYER_MESSAGES = 4
# Python and launches of one forward pass of one layer: Megatron needs (2384.8 - 660.4) ms for 24
# more tokens and 384
# more of prompt on 96 layers at batch 1 (NVIDIA/FasterTransformer docs, GPT-175B on 8 A100): 0.7 ms
# a layer, behind
# which its kernels hide. A backward pass launches twice as many. Our decoder took 1.2 ms on an H200
# in a virtual
# machine whose launches take twice as long, transformers' Llama 1.9 ms (tests/gpu/measured/,
# 2026-11-28).
HOST_FORWARD_S = 7e-4
# What else the host does, in such forward passes: on the same H200 a layer that is recomputed in
# full took 1.9 more;
# selectively 5.0 and 3.8 more, since torch looks at each of its operators twice; under FSDP2 2.9
# more, which gathers
# twice and reduces once.
FULL_PASSES = 1.9
SELECTIVE_PASSES = 4.4
COLLECTIVE_PASSES = 1.0
# The same on a CPU rank, where it hides behind nothing: about 33 operators of 4 us.
CPU_FORWARD_S = 4e-4 / 3


class RecomputedLayers(NamedTuple):
    """Equal layers, with the seconds of each when recomputed in full and when selectively."""

    layers: int
    full_s: float
    selective_s: float


@frozen
class MicroBatchSeconds:
    """Compute seconds of one micro-batch on one rank, without messages."""

    forward_s: float
    backward_s: float
    replay_s: float  # a second forward pass through the parts that full checkpointing recomputes
    selective_replay_s: float  # the same for what selective checkpointing does not keep
    parts: int
    replayed_parts: int
    # of equal layers, first to last
    layers: tuple[RecomputedLayers, ...]
    messages: int  # that tensor-parallel ranks wait for, recomputing left out


@lru_cache(maxsize=16384)
def predict_micro_batch_seconds(
    profile: ModelProfile,
    micro_batch_size: int,
    device: DeviceSpec,
    precision: Precision,
    *,
    compiled: bool = False,
) -> MicroBatchSeconds:
    """Return the compute seconds of one micro-batch on a rank that holds `profile`.

    The bytes that a layer's operators move were counted while its Python code ran. The operators of
    a compiled layer are fused, so it counts as a layer whose bytes nobody counted
    (docs/concepts/memory-model.md has both beside an H200).
    """
    forward_s = backward_s = replay_s = selective_replay_s = 0.0
    parts = replayed = messages = 0
    layers = []
    bandwidth = device.memory_bandwidth * BANDWIDTH_EFFICIENCY
    attention_backward = (
        EAGER_ATTENTION_BACKWARD if profile.attention == "eager" else ATTENTION_BACKWARD
    )
    for segment in profile.segments:
        ahead, back, moved = _forward_backward_s_and_traffic(
            segment,
            micro_batch_size,
            device,
            precision,
            attention_backward,
            compiled and segment.is_unit,
        )
        forward_s += segment.count * ahead
        backward_s += segment.count * back
        parts += segment.count
        is_counted = bool(segment.matmuls) or not segment.forward_flops
        messages += segment.count * (
            min(LAYER_MESSAGES, max(1, len(segment.matmuls))) if is_counted else LAYER_MESSAGES
        )
        full_s = selective_s = 0.0
        if segment.checkpointed_bytes < segment.saved_bytes or not is_counted:
            full_s = ahead
            replay_s += segment.count * ahead
            replayed += segment.count
            if segment.selective_bytes is not None:
                again = segment.saved_bytes - segment.selective_bytes
                selective_s = micro_batch_size * again * moved / bandwidth
                selective_replay_s += segment.count * micro_batch_size * again * moved / bandwidth
        if segment.is_unit:
            layers.append(RecomputedLayers(segment.count, full_s, selective_s))
    return MicroBatchSeconds(
        forward_s=forward_s,
        backward_s=backward_s,
        replay_s=replay_s,
        selective_replay_s=selective_replay_s,
        parts=parts,
        replayed_parts=replayed,
        layers=tuple(layers),
        messages=messages,
    )


@lru_cache(maxsize=16384)
def _forward_backward_s_and_traffic(
    segment: Segment,
    micro_batch_size: int,
    device: DeviceSpec,
    precision: Precision,
    attention_backward_factor: float,
    is_fused: bool,
) -> tuple[float, float, float]:
    """Return (forward seconds, backward seconds, bytes moved per kept byte in the forward pass) of
    a part.

    A backward pass has two products for one of the forward pass; what is frozen needs no gradient
    of its weights.
    """
    peak = device.get_peak_flops(precision)
    trained = segment.trained_parameters / segment.parameters if segment.parameters else 1.0
    if not segment.matmuls:
        forward_s = (
            micro_batch_size
            * segment.forward_flops
            / (compute_peak_matmul_flops(device, precision) * MODEL_EFFICIENCY)
        )
        return forward_s, (1 + trained) * forward_s, 2.0
    forward_s = backward_s = products = 0.0
    rates = compute_matmul_rates(device, precision)
    for rows, inner, columns in segment.matmuls:
        products += 2.0 * rows * inner * columns
        count = micro_batch_size * rows
        forward_s += estimate_matmul_s(count, inner, columns, *rates)
        backward_s += estimate_matmul_s(count, columns, inner, *rates)
        backward_s += trained * estimate_matmul_s(inner, count, columns, *rates)
    attention_s = (
        micro_batch_size
        * max(0.0, segment.forward_flops - products)
        / (peak * ATTENTION_EFFICIENCY)
    )
    bandwidth = device.memory_bandwidth * BANDWIDTH_EFFICIENCY
    # what the memory-bound operators of the part move for a sample
    forward_bytes = FORWARD_TRAFFIC * segment.saved_bytes
    backward_bytes = BACKWARD_TRAFFIC * segment.saved_bytes
    if not is_fused:
        forward_bytes = segment.forward_moved_bytes or forward_bytes
        backward_bytes = segment.backward_moved_bytes or backward_bytes
    cast_s = 3 * segment.cast_bytes / bandwidth  # fp32 to 16 bits, and back
    forward_s += attention_s + micro_batch_size * forward_bytes / bandwidth + cast_s
    backward_s += (
        attention_backward_factor * attention_s
        + micro_batch_size * backward_bytes / bandwidth
        + cast_s
    )
    if segment.chunks is not None:
        forward_s += (
            _compute_loss_moved_bytes(segment, segment.chunks, micro_batch_size, precision)
            / bandwidth
        )
    return forward_s, backward_s, FORWARD_TRAFFIC


def _compute_loss_moved_bytes(
    segment: Segment, chunks: LossChunks, micro_batch_size: int, precision: Precision
) -> float:
    """Return the bytes of memory traffic for the logits of a loss in chunks, and for its weight's
    gradient.
    """
    (_, hidden, vocab_size), *_ = segment.matmuls
    tokens = micro_batch_size * chunks.sample_tokens
    added = tokens / chunks.chunk_tokens if segment.trained_parameters else 0.0
    return vocab_size * (
        tokens * LOGIT_TRAFFIC_BYTES[precision] + added * hidden * GRADIENT_TRAFFIC_BYTES[precision]
    )


class MatmulRates(NamedTuple):
    """How fast a device multiplies matrices."""

    width: int  # bytes of an element
    flops: float  # FLOP/s
    bandwidth: float  # bytes/s
    multiprocessors: int | None  # tiles at once
    start_s: float


def compute_matmul_rates(device: DeviceSpec, precision: Precision) -> MatmulRates:
    """Return how fast the device multiplies matrices in this precision."""
    return MatmulRates(
        precision.value_bytes,
        compute_peak_matmul_flops(device, precision),
        device.memory_bandwidth * BANDWIDTH_EFFICIENCY,
        device.multiprocessors,
        KERNEL_S if device.kind.traits.runs_beside_host else 0.0,
    )


def compute_peak_matmul_flops(device: DeviceSpec, precision: Precision) -> float:
    """Return the FLOP/s of the device's fastest matrix product in this precision."""
    if (
        device.measured_tflops is None
        or precision is Precision.FP32
        or not device.supports(precision)
    ):
        return device.get_peak_flops(precision) * PRODUCT_EFFICIENCY
    return min(1e12 * device.measured_tflops, device.get_peak_flops(precision))


@lru_cache(maxsize=65536)
def estimate_matmul_s(
    rows: int,
    inner: int,
    columns: int,
    element_bytes: int,
    flops_per_s: float,
    bytes_per_s: float,
    multiprocessors: int | None,
    start_s: float,
) -> float:
    """Return the seconds of a (rows x inner) by (inner x columns) matrix product at a device's
    `compute_matmul_rates`.

    Tiles of the result go to multiprocessors in waves, the last of which is as long as a full one;
    the largest tile is the fastest where there are enough of them (NVIDIA, Matrix Multiplication
    Background User's Guide, section 3.2).
    """
    moved_s = element_bytes * (rows * inner + inner * columns + rows * columns) / bytes_per_s
    if multiprocessors is None:
        return start_s + max(2.0 * rows * inner * columns / flops_per_s, moved_s)
    fastest_s = math.inf
    for tall, broad, rate in TILES:
        tiles = -(-rows // tall) * -(-columns // broad)
        tile_s = 2.0 * tall * broad * inner * multiprocessors / (flops_per_s * rate)
        fastest_s = min(fastest_s, max(-(-tiles // multiprocessors) * tile_s, moved_s))
        for split in SPLITS if tiles < multiprocessors else ():
            waves = -(-tiles * split // multiprocessors)
            sums_s = 8.0 * split * rows * columns / bytes_per_s
            fastest_s = min(fastest_s, max(waves * tile_s / split, moved_s) + sums_s)
    return start_s + fastest_s


def predict_host_launch_s(
    part_count: int,
    fully_recomputed_count: int,
    selectively_recomputed_count: int,
    collective_count: int,
    device: DeviceSpec,
) -> float:
    """Return the seconds that the host spends on Python and kernel launches for one micro-batch.

    Backward has twice the launches of forward. `part_count` counts the model's parts;
    `fully_recomputed_count` and `selectively_recomputed_count` count those that are recomputed.
    `collective_count` counts the collectives that FSDP2 starts. On a CPU any recomputation costs
    one more pass, and nothing overlaps.
    """
    if not device.kind.traits.runs_beside_host:
        return (
            3 * part_count + fully_recomputed_count + selectively_recomputed_count
        ) * CPU_FORWARD_S
    passes = (
        3 * part_count
        + FULL_PASSES * fully_recomputed_count
        + SELECTIVE_PASSES * selectively_recomputed_count
        + COLLECTIVE_PASSES * collective_count
    )
    return passes * HOST_FORWARD_S
