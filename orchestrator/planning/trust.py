"""Trust in a kind of plan (how proven it is in practice), and the choice among plans of similar predicted step time.

A choice rests on the ratio of two predicted step times, since their errors go together. Where it lies within its own
error, the simpler plan is chosen: it fails in fewer ways, and more people have run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import MARGIN, REPORTED_ERROR
from orchestrator.specs.choices import Offload, OffloadTarget, ZeroStage
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.frozen import frozen
from orchestrator.specs.mechanics import Fsdp2, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import list_changed_settings

# Errors of the ratio of two predicted step times (logarithms), over published pairs of trainings on
# A100: plans that
# differ in batches, ranks and checkpointing alone (243 pairs), pipelines (723), tensor-parallel
# plans (1,248: 0.193).
# Nothing is taken for an error above SPREAD_MAX: from 0.16 on simpler plans cost 7 % in the mean on
# the same pairs.
# The figures were counted before this rule was written (November 2026).
ALIKE_SPREAD = 0.059
PIPELINE_SPREAD = 0.063
OTHER_SPREAD = 0.12
SPREAD_MAX = 0.13
# After an out-of-memory failure the plan's own way is kept where it costs at most so much (a
# logarithm: 25 %).
RECOVERY_SPREAD = 0.223
BATCHES = ("micro_batch_size", "gradient_accumulation_steps")
# of what a device has: fuller plans yield to roomier ones of the same kind that are as fast
TIGHT = 0.9


class Trust(NamedTuple):
    """How far a plan is from plain data parallelism; less is more trusted."""

    rank: float  # of its least proven mechanism
    mechanisms: int


PLAIN, SHARDED, ZERO3, OFFLOADED, TENSOR, CONTEXT, PIPELINE, UNSEEN = (
    0.0,
    1.0,
    2.0,
    4.0,
    5.0,
    6.0,
    7.0,
    8.0,
)
INCUMBENT = Trust(-1.0, 0)  # of a plan that ran here


@lru_cache(maxsize=16384)
def rate_trust(plan: Plan) -> Trust:
    """Return how far the plan is from plain data parallelism, in the order in which practitioners
    adopt mechanisms.

    Mechanisms that never ran on a CUDA device here come last: state on NVMe. The order was fixed
    before published plans were judged by it, but for one change: recomputation had half a rank, and
    fewer plans then had the mechanics that experts chose. Raises AssertionError for unknown
    mechanics.
    """
    ranks = [rank for rank in _list_trust_ranks(plan) if rank > PLAIN]
    return Trust(max(ranks, default=PLAIN), len(ranks))


def _list_trust_ranks(plan: Plan) -> list[float]:
    """Return one trust rank for each mechanism that a plan may have; PLAIN for a mechanism that it
    lacks.
    """
    mechanics = plan.mechanics
    match mechanics:
        case Replicated():
            shared = PLAIN
        case Fsdp2() | ScriptFsdp():
            shared = SHARDED
        case Zero():
            shared = ZERO3 if mechanics.stage is ZeroStage.PARAMETERS else SHARDED
        case _:
            refuse_unknown(mechanics)
    layout = plan.layout
    offloads = plan.offload is not Offload.NONE
    return [
        shared,
        SHARDED if plan.dp_replicate > 1 else PLAIN,
        SHARDED if plan.optimizer_in_backward else PLAIN,
        OFFLOADED if plan.activation_offload else PLAIN,
        (UNSEEN if plan.offload_target is not OffloadTarget.CPU else OFFLOADED)
        if offloads
        else PLAIN,
        TENSOR if layout.tp > 1 else PLAIN,
        CONTEXT if layout.cp > 1 else PLAIN,
        CONTEXT if plan.expert_parallel > 1 else PLAIN,
        PIPELINE if layout.pp > 1 else PLAIN,
    ]


def get_allowed_memory_fill(plan: Plan) -> float:
    """Return the fraction of a device's memory, margin included, that a plan may fill before its
    family is measured.

    Tensors of our own engines were exact to 0.5 % on the cards that we measured; scripts are off by
    REPORTED_ERROR.
    """
    return TIGHT if get_engine_facts(plan.engine).is_ours else MARGIN / REPORTED_ERROR


@lru_cache(maxsize=16384)
def make_plan_kind(plan: Plan) -> tuple[object, ...]:
    """Return a key for the plan's engine and sharding; equal for plans that differ only in batches,
    ranks or checkpointing.
    """
    mechanics = plan.mechanics
    layout = plan.layout
    state = (
        plan.engine,
        type(mechanics),
        mechanics.stage,
        plan.offload,
        plan.offload_target,
        plan.optimizer_in_backward,
    )
    return (*state, layout.tp, layout.cp, layout.pp, plan.expert_parallel, plan.dp_replicate > 1)


def estimate_step_ratio_spread(plan: Plan, other_plan: Plan) -> float:
    """Return the standard error of the log ratio of two plans' predicted step times.

    Pairs that nobody measured have OTHER_SPREAD.
    """
    if make_plan_kind(plan) == make_plan_kind(other_plan):
        return ALIKE_SPREAD
    if plan.layout.pp > 1 and other_plan.layout.pp > 1:
        return PIPELINE_SPREAD
    if plan.layout.tp > 1 and other_plan.layout.tp > 1:
        return SPREAD_MAX
    return OTHER_SPREAD


class Choice(NamedTuple):
    """A plan that fits, with the quantities on which the choice depends."""

    plan: Plan
    seconds: float
    fill: float = 0.0  # used share of a device's memory
    crosses_nodes: bool = False


@frozen
class ChoiceRule:
    """The rule by which a job chooses among plans that fit."""

    is_fastest: bool = False  # always choose the fastest plan
    incumbents: frozenset[Plan] = frozenset()  # plans that ran here, which are trusted most
    before: Plan | None = None  # plan that ran out of memory
    room: float = 1.0  # of a device that a plan may fill, where a roomier one costs little

    def choose_plan_index(self, choices: Sequence[Choice]) -> int:
        """Return the index of the plan to use, among plans for the same number of devices.

        The most trusted plan within the error of the fastest one is used. One reference decides, so
        there are no cycles. After an out-of-memory failure the engine and the mechanics stay where
        that costs at most RECOVERY_SPREAD, then as many settings beside the batch split as can. A
        plan that would fill more than TIGHT of a device yields to the plan of its kind with the
        most free memory that is as fast.

        Across nodes this order is not the order of practitioners: they use tensor and pipeline
        parallelism before they shard over a network. By it 6 of 43 published plans have the
        mechanics that experts chose, by step times alone 14 (benchmarks/experts.yaml). So there
        only plans of the fastest one's kind, and incumbents, are near.

        A plan that would fill more than `room` yields to roomier ones that cost at most
        RECOVERY_SPREAD, and that offload nothing unless it does. Beyond, a failure costs less than
        a slower training.
        """
        best = self._choose_index(choices)
        if choices[best].fill <= self.room or choices[best].plan in self.incumbents:
            return best
        limit_s = min(choice.seconds for choice in choices) * math.exp(RECOVERY_SPREAD)
        rank = max(ZERO3, rate_trust(choices[best].plan).rank)
        cheap = [
            index
            for index, choice in enumerate(choices)
            if choice.seconds <= limit_s and rate_trust(choice.plan).rank <= rank
        ]
        roomy = [index for index in cheap if choices[index].fill <= self.room]
        if roomy:
            return roomy[self._choose_index([choices[index] for index in roomy])]
        return min((best, *cheap), key=lambda index: choices[index].fill)

    def _choose_index(self, choices: Sequence[Choice]) -> int:
        indices = range(len(choices))
        fastest = min(indices, key=lambda index: choices[index].seconds)
        if self.is_fastest:
            return fastest
        near = [
            index for index in indices if self._is_near_fastest(choices[index], choices[fastest])
        ]
        best = min(near, key=lambda index: self._make_preference_key(choices[index]))
        if choices[best].fill <= TIGHT or choices[best].plan in self.incumbents:
            return best
        alike = [index for index in near if _is_as_good(choices[index], choices[best])]
        return min(alike, key=lambda index: choices[index].fill)

    def choose_indices_worth_devices(self, choices: Sequence[Choice]) -> list[int]:
        """Return the indices of the plans that are worth their devices, fewest devices first.

        `choices` has one plan per number of devices, in ascending order. Each chosen plan is faster
        than the one before it by more than half of the error: it is faster in most cases.
        """
        chosen: list[int] = []
        for index, choice in enumerate(choices):
            if chosen:
                narrower = choices[chosen[-1]]
                spread = (
                    0.0
                    if self.is_fastest
                    else estimate_step_ratio_spread(choice.plan, narrower.plan) / 2
                )
                if choice.seconds * math.exp(spread) >= narrower.seconds:
                    continue
            chosen.append(index)
        return chosen

    def _is_near_fastest(self, choice: Choice, fastest: Choice) -> bool:
        is_alike = make_plan_kind(choice.plan) == make_plan_kind(fastest.plan)
        if self.before is not None and make_plan_kind(choice.plan) == make_plan_kind(self.before):
            spread = RECOVERY_SPREAD
        elif fastest.crosses_nodes and not is_alike and choice.plan not in self.incumbents:
            spread = 0.0
        else:
            spread = estimate_step_ratio_spread(choice.plan, fastest.plan)
        return choice.seconds <= fastest.seconds * math.exp(spread)

    def _make_preference_key(self, choice: Choice) -> tuple[object, ...]:
        trusted = INCUMBENT if choice.plan in self.incumbents else rate_trust(choice.plan)
        if self.before is None:
            return trusted, choice.seconds
        leaves = (
            choice.plan.engine is not self.before.engine,
            make_plan_kind(choice.plan) != make_plan_kind(self.before),
        )
        touched = sum(
            change.setting not in BATCHES
            for change in list_changed_settings(self.before, choice.plan)
        )
        return *leaves, touched, trusted, choice.seconds


def _is_as_good(choice: Choice, best: Choice) -> bool:
    """Return whether a plan of the same kind and trust is as fast as the best, within the error of
    step times.
    """
    is_alike = make_plan_kind(choice.plan) == make_plan_kind(best.plan) and rate_trust(
        choice.plan
    ) <= rate_trust(best.plan)
    return is_alike and choice.seconds <= best.seconds * math.exp(ALIKE_SPREAD)
