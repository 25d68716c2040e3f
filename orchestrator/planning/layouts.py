"""Parallel layouts of a job: the numbers of devices, and the degrees along each axis, that are possible."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import gcd

from orchestrator.memory.models.hf import DecoderShape
from orchestrator.planning.cost import Hardware
from orchestrator.planning.request import PlanRequest
from orchestrator.planning.work import PlanCounter
from orchestrator.specs.choices import ParallelLayout
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import LAYERS_MAX
from orchestrator.specs.plan import can_share_heads

# Tokens of a sample that a context-parallel rank has at least, where nobody pins its degree:
# experts share samples of
# 16,384 tokens and more (Grattafiori et al. 2024, arXiv:2407.21783, table 4: 131,072 tokens over 16
# ranks, 8,192 over
# one). Shorter runs of tokens have shorter products, and messages that start as often.
OWN_TOKENS_MIN = 8192


def list_layouts(
    request: PlanRequest, hardware: Hardware, plan_counter: PlanCounter
) -> tuple[ParallelLayout, ...]:
    """Return every possible parallel layout of the job; beyond one node, in whole nodes.

    dp divides the global batch; tp stays inside a node, where the messages of every layer go, and
    cp as long as it can; pp leaves every rank a layer. Raises SpecError where no allowed number of
    devices divides the global batch, and TooManyPlans.
    """
    if request.speeds:
        return _list_layouts_of_measured_speeds(request, hardware)
    per_node = hardware.devices_per_node
    most = min(request.gpus.max, hardware.devices)
    allowed = {
        world
        for world in range(request.gpus.min, most + 1)
        if world <= per_node or world % per_node == 0
    }
    if request.is_on_one_node:
        allowed = {world for world in allowed if world <= per_node}
    if request.is_script and request.knobs.micro_batch_size is None:
        # it takes no micro-batch: another number of ranks would be another global batch
        allowed &= {request.gpus.min}
    tensor = list_tensor_parallel_degrees(request, hardware)
    pipeline = list_pipeline_degrees(request, most)
    of_a_sample = tuple(_list_cp_and_tp_degrees(request, hardware, tensor, most))
    shares = list_divisors(request.global_batch_size)
    choices = [
        ParallelLayout(dp=dp, cp=cp, tp=tp, pp=pp)
        for (cp, tp), dp, pp in product(of_a_sample, shares, pipeline)
        if dp * cp * tp * pp in allowed and pp <= request.global_batch_size // dp
    ]
    plan_counter.count_examined(len(choices))
    if not choices:
        raise _make_no_layout_error(request, hardware)
    return tuple(choices)


def _list_layouts_of_measured_speeds(
    request: PlanRequest, hardware: Hardware
) -> tuple[ParallelLayout, ...]:
    """Return one layout for each number of devices in the job's `speeds`.

    Where that number does not divide the global batch, the script itself shares samples between
    devices. Such a layout has the number as `tp`.
    """
    most = min(request.gpus.max, hardware.devices)
    counts = [count for count, _ in request.speeds if request.gpus.min <= count <= most]
    if not counts:
        raise _make_no_layout_error(request, hardware)
    shared = [gcd(count, request.global_batch_size) for count in counts]
    return tuple(
        ParallelLayout(dp=dp, tp=count // dp) for count, dp in zip(counts, shared, strict=True)
    )


def list_tensor_parallel_degrees(request: PlanRequest, hardware: Hardware) -> tuple[int, ...]:
    """Return the possible degrees: 1, and each power of two that divides devices per node, heads,
    feed-forward and vocabulary size alike.

    Experts are not split. A model with a declared profile has the degrees declared there.
    """
    per_node = hardware.devices_per_node
    if request.model is not None and request.profile is not None:
        return (
            1,
            *(degree for degree in request.profile.tensor_parallel if per_node % degree == 0),
        )
    shape = request.dense_shape
    if shape is None:
        return (1,)
    common = gcd(
        per_node,
        shape.num_attention_heads,
        shape.kv_heads,
        shape.intermediate_size,
        shape.vocab_size,
    )
    return tuple(degree for degree in _list_powers_of_two(per_node) if common % degree == 0)


def _list_cp_and_tp_degrees(
    request: PlanRequest, hardware: Hardware, tp_degrees: tuple[int, ...], device_count: int
) -> Iterator[tuple[int, int]]:
    """Yield each (cp, tp) whose ranks lie on one node or fill whole nodes, and share the attention
    heads equally.
    """
    shape = request.shape
    per_node = hardware.devices_per_node
    for cp, tp in product(list_context_parallel_degrees(request, device_count), tp_degrees):
        if cp == 1:
            yield cp, tp
            continue
        assert shape is not None, "no degree but 1 where no shape is known"
        is_regular = per_node % (cp * tp) == 0 or cp * tp % per_node == 0
        if is_regular and can_share_heads(
            shape.num_attention_heads, shape.kv_heads, ParallelLayout(cp=cp, tp=tp)
        ):
            yield cp, tp


def list_context_parallel_degrees(request: PlanRequest, device_count: int) -> tuple[int, ...]:
    """Return 1, the pinned degree, and the powers of two that leave each rank at least
    OWN_TOKENS_MIN tokens of a sample.

    Only 1 where our engine cannot split a model's attention by heads, and for mixtures of experts,
    whose memory nobody counted.
    """
    shape = request.dense_shape
    if shape is None:
        return (1,)
    pinned = request.pins.get("cp")
    return tuple(
        degree
        for degree in _list_powers_of_two(device_count)
        if degree in (1, pinned) or request.data_length // degree >= OWN_TOKENS_MIN
    )


def list_expert_parallel_degrees(request: PlanRequest, dp: int) -> tuple[int, ...]:
    """Return the expert-parallel degrees above 1 that `dp` ranks allow for the job's model."""
    return tuple(
        ep for ep in list_divisors(dp)[1:] if find_expert_parallel_obstacle(request, dp, ep) is None
    )


def find_expert_parallel_obstacle(request: PlanRequest, dp: int, ep: int) -> str | None:
    """Return text on why `ep` of `dp` ranks cannot spread the model's experts; None where they can.

    Ranks with the same experts share them equally: as many experts each, or as much of each expert.
    """
    shape = request.shape
    if not isinstance(shape, DecoderShape) or shape.experts is None:
        return "no experts of this model are known that ranks could hold"
    experts = shape.experts
    ranks = dp // ep
    if experts.count % ep:
        return f"{ep} does not divide its {experts.count} experts"
    rank_experts = experts.count // ep
    if rank_experts % ranks and (2 * experts.width % ranks or shape.hidden_size % ranks):
        return f"{ranks} ranks with the same {rank_experts} experts could not share them equally"
    return None


def list_pipeline_degrees(request: PlanRequest, device_count: int) -> tuple[int, ...]:
    """Return the possible numbers of pipeline stages, up to the number of layers.

    They are the divisors of the number of layers, the powers of two, and the divisors of the
    devices. Stages differ by a layer where the degree does not divide the layers, so that no device
    needs to stay idle.
    """
    layers = count_splittable_layers(request)
    whole = (degree for degree in list_divisors(device_count) if degree <= layers)
    return tuple(sorted({*list_divisors(layers), *_list_powers_of_two(layers), *whole}))


def count_splittable_layers(request: PlanRequest) -> int:
    """Return the number of layers that a pipeline may split; 1 where it may not split the model."""
    if request.model is not None and request.profile is not None:
        return request.profile.layers if request.profile.pipeline else 1
    shape = request.shape
    layers = 1 if shape is None else shape.num_hidden_layers
    if layers > LAYERS_MAX:  # of a configuration that somebody else wrote
        raise SpecError(
            "too many layers to plan", path="model.hf", got=layers, allowed=f"{LAYERS_MAX} at most"
        )
    return layers


def _list_powers_of_two(up_to: int) -> list[int]:
    """Return the powers of two up to `up_to`."""
    return [1 << power for power in range(up_to.bit_length())]


@lru_cache(maxsize=1024)
def list_divisors(number: int) -> tuple[int, ...]:
    """Return every divisor of `number`, ascending."""
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(number // divisor for divisor in low)}))


def _make_no_layout_error(request: PlanRequest, hardware: Hardware) -> SpecError:
    low = request.gpus.min
    per_node = hardware.devices_per_node
    nearest = max(
        (dp for dp in list_divisors(request.global_batch_size) if dp <= max(low, 1)), default=1
    )
    step = low if low <= per_node else per_node * -(-low // per_node)
    rounded = step * max(1, round(request.global_batch_size / step))
    return SpecError(
        "the global batch cannot be cut evenly over the devices that the job allows",
        path="global_batch_size",
        got=f"{request.global_batch_size} samples over {request.gpus.min} to {request.gpus.max} devices",
        allowed="a number of devices that divides the global batch, also after what the model can be cut by "
        f"(tensor and pipeline parallel); whole nodes of {per_node} beyond one node",
        hint=f"say global_batch_size: {rounded}, or gpus: {{min: {nearest}, max: {max(request.gpus.max, nearest)}}}",
    )
