"""Memory of a mixture of experts in transformers, in closed form, for Llama-style model families.

Every token goes to some of the experts, whose matrices lie in two tensors of a layer. transformers 5.23 sorts the
copies of all tokens by their expert and multiplies them group by group (`grouped_mm_experts_forward` in
transformers/integrations/moe.py). A layer's bytes therefore follow from the number of copies, not from the routing.
Where experts are spread over ranks, a rank's bytes follow from the copies that come to it. Routing is taken to be
balanced, so that as many come as it sends. `uneven` says how many times as many may come (see UNEVEN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.specs.choices import Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.packaged import load_table
from orchestrator.specs.profile import BackwardPeak, ModelProfile, Product
from orchestrator.specs.replace import replace

# How often over what it sends a rank may receive, as plans are made: the capacity factor with which
# Switch Transformers
# were trained (Fedus et al. 2021, arXiv:2101.03961, section 2.2: 1.25, beyond which they drop
# tokens). We drop none.
UNEVEN = 1.25
FAMILIES = load_table(__package__, "families")
# Settings of a family where config.json says nothing.
DEFAULTS: Mapping[str, JsonObject] = FAMILIES["mixtures"]
# Names that a configuration may say instead (`attribute_map` of its class).
OTHER_NAMES: Mapping[str, Mapping[str, str]] = FAMILIES["other_names"]


@frozen
class Experts:
    """The feed-forward part of a mixture-of-experts layer: routed experts, and a shared one, if any.

    The routing weights of the experts' outputs are fp32, or of the type of the router's product.
    """

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    weights_in_fp32: bool = True
    weights_add_up: bool = True  # they are divided by their sum
    router_first: bool = True  # the router's parameter stands before those of the experts


def rename_expert_keys(config: Mapping[str, Any]) -> JsonObject:
    """Return a mixture-of-experts configuration with its family's keys renamed to those of
    DEFAULTS.
    """
    names = OTHER_NAMES.get(config["model_type"], {})
    return {names.get(name, name): value for name, value in config.items()}


def find_experts(config: JsonObject) -> Experts | None:
    """Return the experts in a complete configuration; None where our memory formulas do not hold
    for the model.

    They do not hold where some layers have no experts, a loss keeps the routing, or inputs are
    jittered.
    """
    alike = not config.get("mlp_only_layers") and config.get("decoder_sparse_step", 1) == 1
    if not alike or config.get("output_router_logits") or config.get("router_jitter_noise"):
        return None
    if config["model_type"] == "mixtral":
        if not isinstance(width := config.get("intermediate_size"), int):
            return None
        return Experts(
            count=config["num_local_experts"], chosen=config["num_experts_per_tok"], width=width
        )
    return Experts(
        count=config["num_experts"],
        chosen=config["num_experts_per_tok"],
        width=config["moe_intermediate_size"],
        shared_width=config.get("shared_expert_intermediate_size", 0),
        weights_in_fp32=False,
        weights_add_up=config.get("norm_topk_prob", False),
        router_first=config["model_type"] == "qwen2_moe",
    )


def add_experts(
    profile: ModelProfile,
    experts: Experts,
    hidden_size: int,
    sample_tokens: int,
    *,
    autocast: bool,
    expert_parallel: int,
    receive_factor_max: float,
) -> ModelProfile:
    """Return the profile with a mixture of experts in each layer; `profile` must lack feed-forward
    parts.

    Experts are spread over `expert_parallel` ranks. A rank's experts receive at most
    `receive_factor_max` times as many copies of tokens as the rank sends
    (training/contract/dispatch.py).

    Each coefficient is a slope of live storages over one of the sizes. They meet traced steps of 21
    mixtures to the byte (transformers 5.23, torch 2.13.0, 2026-11). Autocast does not reach the
    experts.
    """
    embedding, layer, head = profile.segments
    h = hidden_size
    f = experts.width
    shared = experts.shared_width
    count = experts.count
    down = count * f * h
    router = count * h
    routing = _Routing(
        sample_tokens=sample_tokens,
        experts=experts,
        expert_parallel=expert_parallel,
        receive_factor_max=receive_factor_max,
    )
    saved_bytes, selective_bytes = _compute_saved_and_selective_bytes(
        profile, routing, h, autocast=autocast
    )
    parts = (*((h, *(3 * (shared * h,))) if shared else ()), down, 2 * down, router)
    copies = routing.received
    products: tuple[Product, ...] = (
        (sample_tokens, h, count),
        (copies, h, 2 * f),
        (copies, f, h),
    )
    if shared:
        products += (
            (sample_tokens, h, 1),
            (sample_tokens, h, shared),
            (sample_tokens, h, shared),
            (sample_tokens, shared, h),
        )
    cast = router + 3 * shared * h + (h if shared else 0)
    attention = tuple(size for size in layer.tensors if size)
    layer = replace(
        layer,
        parameters=layer.parameters + sum(parts),
        saved_bytes=layer.saved_bytes + saved_bytes,
        selective_bytes=(layer.selective_bytes or 0) + selective_bytes,
        forward_flops=layer.forward_flops
        + 2.0 * sum(rows * inner * columns for rows, inner, columns in products),
        matmuls=(*(product for product in layer.matmuls if all(product)), *products),
        cast_bytes=layer.cast_bytes + (2 * cast if layer.cast_bytes else 0),
        largest_parameter=2 * down,
        factored=(layer.factored or 0) + _compute_factored_elements(experts, h),
        tensors=(*parts, *attention),
        arrivals=(),
        side_by_side=sum(parts),  # its block is one of DeepSpeed's leaf modules
        viewed=3 * down,  # transposed (`_grouped_linear`)
        peaks=_list_expert_peaks(profile, routing, h, autocast=autocast),
        experts=3 * down,
        routed_bytes=2 * routing.sent * h * _get_expert_element_bytes(profile, autocast=autocast)
        if expert_parallel > 1
        else 0,
        forward_moved_bytes=0,
        backward_moved_bytes=0,
    )
    return replace(
        profile,
        expert_parallel=expert_parallel,
        segments=(embedding, layer, head),
        updated_before_largest=_compute_updated_before_largest(
            experts, embedding.largest_parameter, h
        ),
    )


@frozen
class _Routing:
    """Numbers of a sample's tokens on one rank, and of the token copies that its experts send and
    receive.
    """

    sample_tokens: int
    experts: Experts
    expert_parallel: int
    receive_factor_max: float

    @property
    def sent(self) -> int:
        return self.sample_tokens * self.experts.chosen

    @property
    def received(self) -> int:
        return round(self.sent * self.receive_factor_max) if self.expert_parallel > 1 else self.sent


def _compute_routed_saved_bytes(
    profile: ModelProfile, routing: _Routing, hidden_size: int, *, autocast: bool
) -> int:
    """Return the bytes that router and experts save of a sample for the backward pass.

    Of every copy of a token: its input, gathered by expert; both halves of the first product, the
    activated gate and the gated product; the second product's result, since its weight is
    multiplied with it; 40 bytes of indices and weights. Of the token: the router's probabilities,
    in fp32, and the sum of its weights. Where experts are spread over ranks, a rank has the results
    of the copies that it sent. Of those that it received it has everything else, with 8 bytes of
    indices.
    """
    experts = routing.experts
    k = experts.chosen
    low = profile.precision is not Precision.FP32
    weights = (2 * k if low and not experts.weights_in_fp32 else 0) + (
        0 if experts.weights_add_up else 4 * k + 4
    )
    w = _get_expert_element_bytes(profile, autocast=autocast)
    places = 8 if routing.expert_parallel > 1 else 0
    return (
        routing.received * (w * (4 * experts.width + hidden_size) + places)
        + routing.sent * (w * hidden_size + 40)
        + routing.sample_tokens * (4 * experts.count + 4 - weights)
    )


def _compute_shared_expert_saved_bytes(
    profile: ModelProfile, experts: Experts, hidden_size: int, *, autocast: bool
) -> int:
    """Return the bytes that the shared expert (a feed-forward part) and its gate save of a token; 0
    without a shared expert.
    """
    if not experts.shared_width:
        return 0
    width = profile.precision.value_bytes
    return width * (4 * experts.shared_width + hidden_size + 1) + (
        6 * hidden_size if autocast and width == 2 else 0
    )


def _compute_saved_and_selective_bytes(
    profile: ModelProfile, routing: _Routing, hidden_size: int, *, autocast: bool
) -> tuple[int, int]:
    """Return (bytes that a sample's experts save, bytes that they save under selective
    checkpointing: products only).
    """
    width = profile.precision.value_bytes
    experts = routing.experts
    routed = _compute_routed_saved_bytes(profile, routing, hidden_size, autocast=autocast)
    shared = _compute_shared_expert_saved_bytes(profile, experts, hidden_size, autocast=autocast)
    shared_products = (
        width * (2 * experts.shared_width + hidden_size + 1) if experts.shared_width else 0
    )
    unread = 2 * hidden_size if autocast and width == 2 else 0  # the experts' input is not cast
    selective = shared_products + width * (experts.count - hidden_size)
    return routed + routing.sample_tokens * (shared - unread), routing.sample_tokens * selective


def _list_expert_peaks(
    profile: ModelProfile, routing: _Routing, hidden_size: int, *, autocast: bool
) -> tuple[BackwardPeak, ...]:
    """Return the memory peaks of the experts' backward pass: after each product, and where
    gradients add up.

    A gradient of all experts of a rank is one tensor and made whole, whatever the routing was.
    Where experts are spread, the gradients of token copies go back to their ranks in between.
    """
    experts = routing.experts
    tokens = routing.sample_tokens
    sent = routing.sent
    received = routing.received
    k = experts.chosen
    f = experts.width
    width = profile.precision.value_bytes
    w = _get_expert_element_bytes(profile, autocast=autocast)
    down = experts.count // routing.expert_parallel * experts.width * hidden_size
    came_in = (
        width * (hidden_size - 1) if experts.shared_width else 0
    )  # of what the shared expert returned
    base = tokens * came_in - 8 * sent
    routed = _compute_routed_saved_bytes(profile, routing, hidden_size, autocast=autocast)
    saved = routed + tokens * _compute_shared_expert_saved_bytes(
        profile, experts, hidden_size, autocast=autocast
    )
    # of what experts saved, all but their input
    gone = received * w * 4 * f + sent * w * hidden_size + 8 * sent
    gathered = tokens * (8 if w == 4 else 4) * hidden_size - gone + base
    attention = tokens * (18 if w == 2 else 10 if width == 2 else 8) * hidden_size - saved
    weighted = (
        3 * w * k * hidden_size
        if w == 4 or not experts.weights_in_fp32
        else 14 * k * hidden_size - 8 * k
    )
    more = w * hidden_size * (received - sent)  # gradients of what came instead of answers
    returned: tuple[BackwardPeak, ...] = ()
    if routing.expert_parallel > 1:
        gathered -= (
            w * hidden_size * (received - sent) + 8 * received
        )  # the gradients are of what was sent
        returned = (BackwardPeak(3 * down, 0, received * w * (hidden_size - 4 * f) + base),)
    return (
        BackwardPeak(0, 0, tokens * (weighted + came_in)),
        BackwardPeak(down, 0, received * 2 * w * f - sent * w * hidden_size + base),
        BackwardPeak(down, down, received * w * f + more + base),
        BackwardPeak(3 * down, 2 * down, base + more - 2 * received * w * f),
        *returned,
        BackwardPeak(3 * down, 0, max(gathered, attention)),
    )


def _get_expert_element_bytes(profile: ModelProfile, *, autocast: bool) -> int:
    """Return the bytes per element in which experts compute; autocast does not reach their products
    (`_grouped_mm`).
    """
    return 4 if autocast else profile.precision.value_bytes


def _compute_factored_elements(experts: Experts, hidden_size: int) -> int:
    """Return the elements of Adafactor's second moments: one row and one column for each matrix of
    each expert.
    """
    f = experts.width
    shared = experts.shared_width
    routed = experts.count * (2 * f + hidden_size + hidden_size + f) + experts.count + hidden_size
    return (
        routed - 3 * hidden_size + (3 * (shared + hidden_size) + 1 + hidden_size if shared else 0)
    )


def _compute_updated_before_largest(experts: Experts, table_elements: int, hidden_size: int) -> int:
    """Return `ModelProfile.updated_before_largest`: the first expert tensor is updated before the
    second, half its size.
    """
    first = 2 * experts.count * experts.width * hidden_size
    before = experts.count * hidden_size if experts.router_first else 0
    return max(2 * table_elements, 2 * first + before) - 2 * max(table_elements, first)
