"""The moments of a training step that may be its memory peak: points of the forward and backward
pass, and counted bytes.

A pass point records which parts have finished their backward pass. The live activations
(memory.activations) and the engine's buffers (memory.torch_engines, memory.deepspeed) follow from
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple

from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import BackwardPeak, ModelProfile, Segment

Causes = tuple[tuple[str, int], ...]

# the cause whose bytes the profile says; all others follow from counting
ACTIVATIONS = "activations"
FP32_BYTES = 4
# Places in `activations`, behind those of all passages: when the forward pass comes to the last
# layer, and of none.
FORWARDED = -2
NOTHING = -1
_BYTES = itemgetter(1)  # of a cause


class Moment(NamedTuple):
    """A moment that may be the memory peak: its counted bytes by cause, and its index in the rank's
    live activations.

    It is a tuple, as PassPoint is, since a search makes thousands: that takes a third of the time
    of a frozen dataclass.
    """

    name: str
    counted: Causes
    # index into the rank's `activations`: that of a passage, FORWARDED or NOTHING
    activations: int = NOTHING

    @property
    def counted_bytes(self) -> int:
        return sum(map(_BYTES, self.counted))


class PointKind(Enum):
    """Where in one part's forward or backward pass a point lies."""

    ENTRY = "start of forward"
    FORWARD = "forward"
    START = "start of backward"
    PEAK = "backward"
    GRADIENT = "gradient"
    ARRIVAL = "coming gradient"
    END = "end of backward"


class PassPoint(NamedTuple):
    """A point of the forward or backward pass at which a part of the model may have its memory
    peak.
    """

    name: str
    point: PointKind
    segment: Segment
    place: int  # index of the segment in the model, or in the pipeline stage
    position: int  # of the part in its segment, in backward order: the deepest is 0
    done: int  # trained parameters of parts that have finished their backward pass
    gradients: int  # trained parameters of this part whose gradient exists
    # part of `gradients` that an engine copies and frees at once; 0 if counted as activations
    fresh: int
    units_done: int  # parameters of layers that have finished their backward pass
    ends_done: int  # part of `done` that belongs to no layer
    ahead: Segment | None = None  # of a layer: the next one in backward order
    behind: Segment | None = None  # of a layer: the previous one in backward order
    turn: int = 0  # trained parameters of its recipe, where several alternate
    outside: bool = False  # see TracedMoment
    since: int = 0  # of an arrival: `gradients` at the previous recorded one
    peak: BackwardPeak | None = None  # of a part with several peaks

    @property
    def backward(self) -> bool:
        return self.point is not PointKind.FORWARD and self.point is not PointKind.ENTRY


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """The part of a model on one rank; with pipeline parallelism, the layers of its stages.

    `stage` is one of its pipeline stages: all of `profile` unless stages are interleaved. Every
    further micro-batch in flight keeps the activations of its stage. Ranks are compared by
    identity: there is one object of each (pipeline.list_critical_ranks).
    """

    name: str  # position in the pipeline; "" without one
    profile: ModelProfile
    stage: ModelProfile
    has_loss: bool = True
    others: tuple[tuple[ModelProfile, int], ...] = ()  # (stage, further passes of it in flight)
    accumulates: bool = False  # whether gradients of an earlier micro-batch exist at the peak
    earlier: int | None = None  # trained parameters with such gradients; None: all
    messages: int = 0  # hidden states and gradients buffered for the pipeline, one micro-batch each
    full_layers: int = 0  # first layers in full recomputation, where the others are selective
    # whether each parameter is updated in the backward pass, once its gradient is complete
    updates: bool = False

    @cached_property
    def pass_points(self) -> tuple[PassPoint, ...]:
        if self.stage.moments:
            return list_traced_pass_points(self.stage)
        return list_pass_points(
            self.stage,
            self.has_loss,
            gathers_ahead=not self.messages,
            full_layers=self.full_layers,
            updates_in_backward=self.updates,
        )

    @cached_property
    def parameters(self) -> int:
        return self.profile.parameters

    @cached_property
    def gathered_parameters(self) -> int:
        return self.profile.gathered_parameters

    @cached_property
    def trained_parameters(self) -> int:
        return self.profile.trained_parameters

    @cached_property
    def accumulated(self) -> int:
        """Number of trained parameters for which gradients of earlier micro-batches exist."""
        if not self.accumulates:
            return 0
        if self.earlier is None:
            return self.trained_parameters
        return self.earlier

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the stored weights: trained ones in fp32 or the script's type, frozen ones in their stored type."""
        return self.profile.compute_weight_bytes(self.profile.parameter_bytes)

    @cached_property
    def end_parameters(self) -> int:
        """Number of parameters outside of layers: embedding and head."""
        return sum(segment.parameters for segment in self.profile.segments if not segment.is_unit)

    @cached_property
    def trained_end_parameters(self) -> int:
        return sum(
            segment.trained_parameters for segment in self.profile.segments if not segment.is_unit
        )

    def estimate_buffer_bytes(self, plan: Plan) -> int:
        """Return the bytes of pipeline messages that the rank holds in a step (training/engines/pipeline.py)."""
        return self.messages * plan.micro_batch_size * self.profile.boundary_bytes


def count_recomputed_parts_by_segment(stage: ModelProfile, full_layers: int) -> list[int]:
    """Return, for each segment, how many of its parts are among the stage's first `full_layers`
    layers.
    """
    if not full_layers:
        return [0] * len(stage.segments)
    counts = []
    left = full_layers
    for segment in stage.segments:
        counts.append(min(left, segment.count) if segment.is_unit else 0)
        left -= counts[-1]
    return counts


@lru_cache(maxsize=8192)
def list_pass_points(
    stage: ModelProfile,
    has_loss: bool,
    *,
    gathers_ahead: bool,
    full_layers: int = 0,
    updates_in_backward: bool,
) -> tuple[PassPoint, ...]:
    """Return the pass points (moments that may be the peak) of one micro-batch through the stage,
    in order of time.

    Between the second part of a segment and the last everything changes linearly, so three points
    are enough; but the last has none ahead. Where an engine gathers one part ahead of another
    (`gathers_ahead`), as no pipeline does, the last but one counts too. Where the first layers keep
    less than the others, the last of them and the first of the others count as well. With
    `updates_in_backward` a parameter is updated once its gradient is made. Then so does the largest
    one of a part without declared peaks.
    """
    segments = stage.segments
    last = segments[-1]
    chunks = segments[-1].chunks
    in_forward = min(chunks.gradients, last.trained_parameters) if chunks is not None else 0
    fresh = min(in_forward, last.largest_gradient)
    points = [
        PassPoint(
            f"forward of last {segment.name}", PointKind.FORWARD, segment, place, 0, 0, 0, 0, 0, 0
        )
        for place, segment in enumerate(segments)
        if segment.forward_transient_bytes
    ]
    points.append(
        PassPoint(
            f"forward {last.name}",
            PointKind.FORWARD,
            last,
            len(segments) - 1,
            0,
            0,
            in_forward,
            fresh,
            0,
            0,
        )
    )
    done = units = ends = passed = 0
    layers = []
    for segment in segments:
        if segment.is_unit:
            for _ in range(segment.count):
                layers.append(segment)
    full = count_recomputed_parts_by_segment(stage, full_layers)
    for place, segment in reversed(list(enumerate(segments))):
        positions = {0, min(1, segment.count - 1), segment.count - 1}
        if gathers_ahead and segment.count > 3:
            positions.add(segment.count - 2)
        if 0 < full[place] < segment.count:
            positions |= {segment.count - full[place] - 1, segment.count - full[place]}
        repeated = segment.is_unit
        is_loss = has_loss and segment is last and segment.count == 1
        for position in sorted(positions):
            layer = len(layers) - 1 - passed - position
            points += [
                PassPoint(
                    name=f"{point.value} of {_describe_order(segment, position)}{segment.name}",
                    point=point,
                    segment=segment,
                    place=place,
                    position=position,
                    done=done + position * segment.trained_parameters,
                    gradients=gradients,
                    fresh=min(gradients, segment.largest_gradient) if peak is None else peak.fresh,
                    units_done=units + position * stage.count_gathered_parameters(segment),
                    ends_done=ends,
                    ahead=layers[layer - 1] if repeated and layer > 0 else None,
                    behind=layers[layer + 1] if repeated and layer + 1 < len(layers) else None,
                    peak=peak,
                    since=max(
                        (arrival.own for arrival in segment.arrivals if arrival.own < gradients),
                        default=0,
                    ),
                )
                for point, gradients, peak in _list_backward_points(
                    segment,
                    is_loss=is_loss,
                    has_arrivals=gathers_ahead,
                    updates_in_backward=updates_in_backward,
                )
            ]
        done += segment.count * segment.trained_parameters
        if repeated:
            units += segment.count * stage.count_gathered_parameters(segment)
            passed += segment.count
        else:
            ends += segment.trained_parameters
    return tuple(points)


@lru_cache(maxsize=1024)
def list_traced_pass_points(stage: ModelProfile) -> tuple[PassPoint, ...]:
    """Return the pass points (moments that may be the peak) of a traced model, under every kind of
    checkpointing.
    """
    layers = [(place, segment) for place, segment in enumerate(stage.segments) if segment.is_unit]
    first = {
        place: sum(before.count for _, before in layers[:number])
        for number, (place, _) in enumerate(layers)
    }
    units = [segment for _, segment in layers for _ in range(segment.count)]
    points = []
    come: dict[object, int] = {}
    for moment in stage.moments:
        segment = stage.segments[moment.segment]
        ahead = None
        behind = None
        if segment.is_unit:
            layer = first[moment.segment] + segment.count - 1 - moment.position
            ahead = units[layer - 1] if layer > 0 else None
            behind = units[layer + 1] if layer + 1 < len(units) else None
        since = 0
        if moment.fresh:
            part = moment.mode, moment.turn, moment.segment, moment.position, moment.zero3
            point = PointKind.ARRIVAL
            since = come.get(part, 0)
            come[part] = moment.own
        elif moment.backward:
            point = PointKind.START if moment.starts else PointKind.PEAK
        else:
            point = PointKind.ENTRY if moment.starts else PointKind.FORWARD
        points.append(
            PassPoint(
                name=f"{point.value} of {_describe_order(segment, moment.position)}{segment.name}",
                point=point,
                segment=segment,
                place=moment.segment,
                position=moment.position,
                done=moment.done,
                gradients=moment.own,
                fresh=moment.fresh,
                units_done=moment.units_done,
                ends_done=moment.ends_done,
                ahead=ahead,
                behind=behind,
                turn=stage.turns[moment.turn] if stage.turns else 0,
                outside=moment.outside,
                since=since,
            )
        )
    return tuple(points)


def _describe_order(segment: Segment, position: int) -> str:
    if segment.count == 1:
        return ""
    if position == 0:
        return "last "
    if position == segment.count - 1:
        return "first "
    return ""


def _list_backward_points(
    segment: Segment, *, is_loss: bool, has_arrivals: bool, updates_in_backward: bool
) -> list[tuple[PointKind, int, BackwardPeak | None]]:
    """Return (kind of point, gradients made by then, peak) for the start, the peaks and the end of
    one part's backward pass.

    In a repeated part without peaks of its own, the largest activations and the gradient of the
    largest matrix (of the feed-forward) meet. A loss that holds all logits has its peak before the
    head has any gradient. One in chunks has the head's from the forward pass.
    """
    trained = segment.trained_parameters
    largest = segment.largest_gradient
    if is_loss and segment.chunks is not None:
        return [
            (PointKind.PEAK, min(segment.chunks.gradients, trained), None),
            (PointKind.END, trained, None),
        ]
    if is_loss and segment.peaks:
        return [
            *((PointKind.PEAK, peak.own, peak) for peak in segment.peaks),
            (PointKind.END, trained, None),
        ]
    if is_loss:
        return [
            (PointKind.PEAK, 0, None),
            (PointKind.GRADIENT, largest, None),
            (PointKind.END, trained, None),
        ]
    points: list[tuple[PointKind, int, BackwardPeak | None]] = [(PointKind.START, 0, None)]
    points += [(PointKind.PEAK, peak.own, peak) for peak in segment.peaks] or [
        (PointKind.PEAK, largest, None)
    ]
    if updates_in_backward and not segment.peaks:
        points.append((PointKind.GRADIENT, largest, None))
    points += [
        (PointKind.ARRIVAL, arrival.own, arrival) for arrival in segment.arrivals if has_arrivals
    ]
    return [*points, (PointKind.END, trained, None)]
