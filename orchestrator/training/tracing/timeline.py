"""Converts recorded training steps to a ModelProfile: linear in micro-batch and depth, reduced to candidate peaks.

Pure arithmetic on the records of `tracing`; no tensor is touched here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.group_values import group_values
from orchestrator.specs.profile import ModelProfile, Product, Segment, Source, TracedMoment
from orchestrator.specs.replace import replace
from orchestrator.training.tracing.repeats import RepeatPattern

LINEAR = (
    "fixed_bytes",
    "sample_bytes",
    "own",
    "done",
    "ends_done",
    "units_done",
)  # along equal layers


# fields of a Segment that are those of its Place
COUNTED = (
    "parameters",
    "largest_parameter",
    "trained",
    "frozen_bytes",
    "factored",
    "matmuls",
    "viewed",
    "side_by_side",
    "looked_up",
    "last_parameter",
)
ORDERED = ("tensors", "leaf", "leaf_until", "registered")


class StepsDiffer(Exception):
    """Two recorded steps, which should differ in sizes only, ran different operations."""


class Event(NamedTuple):
    """Live bytes after an operation, and the gradients that existed: see TracedMoment."""

    live_bytes: int
    gradients: int
    done: int
    ends_done: int
    units_done: int
    outside: bool = False
    fresh: int = 0


@dataclass(slots=True)
class ModelPlace:
    """A layer, or the code between two layers: `flops` of one forward pass, all else as in Segment."""

    name: str
    is_layer: bool
    parameters: int = 0
    trained: int = 0
    frozen_bytes: int = 0
    largest_parameter: int = 0
    factored: int = 0
    flops: float = 0.0
    matmuls: tuple[Product, ...] = ()
    tensors: tuple[int, ...] = ()
    viewed: int = 0
    leaf: tuple[int, ...] = ()
    leaf_until: int = 0
    side_by_side: int = 0
    looked_up: int = 0
    last_parameter: int = 0
    registered: tuple[int, ...] = ()

    def is_like(self, other: ModelPlace) -> bool:
        """Return whether both are layers that differ only in their names."""
        return self.is_layer and replace(self, name="") == replace(other, name="")


@dataclass(slots=True)
class PlaceVisit:
    """A single visit to a place: the state at its start, then after each allocation."""

    place: int
    turn: int
    backward: bool
    events: list[Event]


@frozen
class RecordedSteps:
    """Records of a training step at each of two micro-batch sizes."""

    mode: ActivationCheckpointing
    sharded: bool
    zero3: bool
    samples: tuple[int, int]
    phases: tuple[list[PlaceVisit], list[PlaceVisit]]
    bytes_by_place: tuple[Mapping[int, int], Mapping[int, int]] = (
        {},
        {},
    )  # when the backward pass begins


Stretch = tuple[
    TracedMoment, ...
]  # a phase as linear functions of the micro-batch, its start first


SavedBytes = dict[tuple[int, ActivationCheckpointing], int]  # of a sample, by place and mode


@frozen
class Timeline:
    """The segments of a model and their events over a step. The first two and the last two of
    several equal layers stand for all of these layers.
    """

    segments: tuple[tuple[ModelPlace, int], ...]  # with the number of equal places
    stretches: tuple[Stretch, ...]
    saved_bytes: SavedBytes = field(default_factory=dict)


def make_timeline(
    places: Sequence[ModelPlace],
    recorded: Sequence[RecordedSteps],
    repeat_pattern: RepeatPattern | None = None,
    recorded_layers: int = 0,
) -> Timeline:
    """Return the timeline of one model from its recorded steps. Raises StepsDiffer where these do
    not fit together.

    `repeat_pattern`: pattern of repeating layers, of which `recorded_layers` were recorded. The
    others are extrapolated linearly.
    """
    stretches = []
    for steps in recorded:
        stretches.extend(_fit_lines(steps))
    saved = _find_saved_bytes(stretches)
    used = {stretch[0].segment for stretch in stretches}
    kept_places = [index for index, place in enumerate(places) if index in used or place.parameters]
    groups = list(_group_equal_layers(places, kept_places, stretches))
    dropped = range(0)
    if repeat_pattern is not None:
        more = _UnrecordedLayers(places, repeat_pattern, recorded_layers)
        stretches = more.stretches(stretches, recorded)
        keys = tuple(saved)
        saved = {
            (n, mode): saved.get((more.get_recorded_place(n), mode), 0)
            for n in more.places
            for _, mode in keys
        }
        groups, dropped = more.groups(groups)
        places = [*more.places.values()]
    segment_of = {}
    for i, group in enumerate(groups):
        for n, place in enumerate(group):
            segment_of[place] = (i, len(group) - 1 - n)
    chosen = []
    for stretch in stretches:
        segment, position = segment_of[stretch[0].segment]
        is_end = position < 2 or position >= len(groups[segment]) - 2
        if is_end and stretch[0].segment not in dropped:
            chosen.append(
                tuple(moment._replace(segment=segment, position=position) for moment in stretch)
            )
    return Timeline(
        segments=tuple((places[group[-1]], len(group)) for group in groups),
        stretches=tuple(chosen),
        saved_bytes={
            (index, steps.mode): max(saved.get((place, steps.mode), 0) for place in group)
            for index, group in enumerate(groups)
            for steps in recorded
        },
    )


class _UnrecordedLayers:
    """The layers of a repeat pattern that were not recorded. Each is like the recorded layer one
    period before it.

    An event grows by equal amounts from a period to the next one. In a forward pass, it depends on
    the layers before it alone. In a backward pass, each layer before it adds the bytes that it
    holds when that pass begins, and no gradient; the rest of the growth is due to the layers behind
    it.
    """

    def __init__(
        self, places: Sequence[ModelPlace], repeat_pattern: RepeatPattern, recorded_layers: int
    ) -> None:
        self._recorded = places
        self._stack = repeat_pattern
        self._layers = [index for index, place in enumerate(places) if place.is_layer][
            :recorded_layers
        ]
        if len(self._layers) < recorded_layers:
            raise StepsDiffer("some layers do not run")
        head = repeat_pattern.lead + 2 * repeat_pattern.period
        self._from = self._layers[head]
        self._width = self._layers[head] - self._layers[head - repeat_pattern.period]
        self._times = (repeat_pattern.length - recorded_layers) // repeat_pattern.period
        self._shift = self._times * self._width
        self._inner = self._layers[
            head - repeat_pattern.period
        ]  # the first place that the start of the model does not change
        self._last = self._layers[-1 - repeat_pattern.period]  # the first place of the last period
        added = self._times * repeat_pattern.period
        self.places = dict(enumerate(places[: self._from]))
        for number in range(self._from, self._from + self._shift):
            later = (number - self._from) // self._width + 1
            self.places[number] = _rename_place(
                places[self.get_recorded_place(number)], later * repeat_pattern.period
            )
        for number, place in enumerate(places[self._from :], self._from):
            self.places[number + self._shift] = (
                _rename_place(place, added) if number in self._layers else place
            )

    def get_recorded_place(self, place: int) -> int:
        """Return the number of the recorded place that a place of the whole model repeats, or that
        is the place itself.
        """
        if place >= self._from + self._shift:
            return place - self._shift
        return (
            place
            if place < self._from
            else self._from - self._width + (place - self._from) % self._width
        )

    def groups(self, recorded_groups: Sequence[list[int]]) -> tuple[list[list[int]], range]:
        """Return (groups of all places, from `recorded_groups`; places in the middle where layers
        of several kinds form no group).
        """
        every = {*self._layers[self._stack.lead :]}
        of_origin = {}
        for order, group in enumerate(recorded_groups):
            for place in group:
                of_origin[place] = order
        is_alike = any(every <= {*group} for group in recorded_groups)
        parts: dict[object, list[int]] = {}
        for number in self.places:
            origin = self.get_recorded_place(number)
            if origin in of_origin:
                is_alone = not is_alike and (self._layers[0] <= origin <= self._layers[-1])
                parts.setdefault(("place", number) if is_alone else of_origin[origin], []).append(
                    number
                )
        return [*parts.values()], range(0) if is_alike else range(
            self._from, self._last + self._shift
        )

    def stretches(
        self, recorded_stretches: Sequence[Stretch], recorded_steps: Sequence[RecordedSteps]
    ) -> list[Stretch]:
        """Return the event lines of the whole model's visits. Raises StepsDiffer where periods do
        not grow by equal amounts.
        """
        slopes = self._compute_slopes(recorded_stretches)
        holdings = {
            (steps.mode, steps.sharded, steps.zero3): self._compute_held_slopes(steps)
            for steps in recorded_steps
        }
        grown = []
        for stretch in recorded_stretches:
            start = stretch[0]
            kind = _make_moment_kind(start)[1:]
            if kind not in slopes:
                raise StepsDiffer("a pass does not reach the layers")
            slope = slopes[kind]
            before = holdings[start.mode, start.sharded, start.zero3]
            is_behind = start.segment >= self._from
            if start.backward:
                growth = (
                    before
                    if is_behind
                    else [all_ - part for all_, part in zip(before, slope, strict=True)]
                )
            else:
                growth = slope if is_behind else [0] * len(LINEAR)
            number = start.segment + (self._shift if is_behind else 0)
            grown.append(
                tuple(_shift_moment(moment, number, growth, self._times) for moment in stretch)
            )
        return grown

    def _compute_slopes(self, stretches: Sequence[Stretch]) -> dict[object, list[int]]:
        """Return, for each pass, by how many bytes and gradient elements an event grows from one
        period of layers to the next.

        Raises StepsDiffer where the layers do not grow by equal amounts.
        """
        lives = group_values((stretch[0].segment, stretch) for stretch in stretches)
        slopes: dict[object, list[int]] = {}
        for number in range(self._inner, self._last):
            pair = number, number + self._width
            parts = [replace(self._recorded[place], name="") for place in pair]
            first, second = (lives.get(place, []) for place in pair)
            shapes = [
                [(*_make_moment_kind(stretch[0])[1:], len(stretch)) for stretch in life]
                for life in (first, second)
            ]
            if parts[0] != parts[1] or shapes[0] != shapes[1]:
                raise StepsDiffer("the operations of layers differ")
            for earlier, later in zip(
                itertools.chain(*first), itertools.chain(*second), strict=True
            ):
                slope = [getattr(later, name) - getattr(earlier, name) for name in LINEAR]
                if slopes.setdefault(_make_moment_kind(earlier)[1:], slope) != slope:
                    raise StepsDiffer("layers do not grow by equal amounts")
        return slopes

    def _compute_held_slopes(self, steps: RecordedSteps) -> list[int]:
        """Return the bytes (fixed, and per sample) that one period of layers holds when the
        backward pass begins.
        """
        few, many = steps.samples
        periods = {
            tuple(
                sum(by_place.get(first + n, 0) for n in range(self._width))
                for by_place in steps.bytes_by_place
            )
            for first in range(self._inner, self._last + 1)
        }
        if len(periods) > 1:
            raise StepsDiffer("layers do not hold equal amounts")
        ((fewer_bytes, more_bytes),) = periods
        sample_bytes = -((fewer_bytes - more_bytes) // (many - few))
        line = {"fixed_bytes": fewer_bytes - few * sample_bytes, "sample_bytes": sample_bytes}
        return [line.get(name, 0) for name in LINEAR]


def _shift_moment(
    moment: TracedMoment, segment: int, growth_per_period: Sequence[int], periods: int
) -> TracedMoment:
    numbers: dict[str, Any] = {
        name: getattr(moment, name) + periods * growth
        for name, growth in zip(LINEAR, growth_per_period, strict=True)
    }
    return moment._replace(segment=segment, **numbers)


def _rename_place(place: ModelPlace, layers_later: int) -> ModelPlace:
    """Return the place named as the layer `layers_later` layers further on."""
    prefix, _, number = place.name.rpartition(".")
    return (
        replace(place, name=f"{prefix}.{int(number) + layers_later}") if number.isdigit() else place
    )


def make_profile(
    timeline: Timeline, *, family: str, precision: Precision, **profile_fields: Any
) -> ModelProfile:
    """Return the timeline as a ModelProfile with all moments that may be the memory peak, and with
    `profile_fields`.
    """
    none, selective, full = ActivationCheckpointing
    segments = []
    for index, (place, count) in enumerate(timeline.segments):
        # the order of gradients is known where all of them came
        is_ordered = sum(place.tensors) == place.trained
        names = COUNTED + ORDERED if is_ordered else COUNTED
        segment = Segment(
            name=_make_segment_name(place, count),
            count=count,
            saved_bytes=timeline.saved_bytes.get((index, none), 0),
            checkpointed_bytes=timeline.saved_bytes.get((index, full), 0),
            selective_bytes=timeline.saved_bytes.get((index, selective), 0),
            transient_bytes=0,
            forward_flops=place.flops,
            unit=place.is_layer and count == 1,
            **{name: getattr(place, name) for name in names},
        )
        segments.append(segment)
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.TRACED,
        segments=tuple(segments),
        moments=_select_peak_moments(timeline),
        **profile_fields,
    )


def _make_segment_name(place: ModelPlace, count: int) -> str:
    """Return the name of a segment; for several layers, the prefix before their numbers."""
    return place.name if count == 1 else place.name.rpartition(".")[0] or place.name


def _fit_lines(steps: RecordedSteps) -> list[Stretch]:
    """Return the bytes of every event as a linear function of the micro-batch size, fitted through
    the two recorded sizes.
    """
    few, many = steps.samples
    lines = []
    for first, second in zip(*steps.phases, strict=False):
        if (first.place, first.turn, first.backward) != (
            second.place,
            second.turn,
            second.backward,
        ):
            raise StepsDiffer("the micro-batch changes the order of layers")
        ones = first.events
        twos = second.events
        if [event[1:] for event in ones] != [event[1:] for event in twos]:
            both = {event[1:] for event in ones} & {event[1:] for event in twos}
            ones = _select_largest_events(ones, both)
            twos = _select_largest_events(twos, both)
        stretch = []
        for number, (at_first, at_second) in enumerate(zip(ones, twos, strict=False)):
            sample_bytes = -((at_first.live_bytes - at_second.live_bytes) // (many - few))
            stretch.append(
                TracedMoment(
                    mode=steps.mode,
                    turn=first.turn,
                    segment=first.place,
                    position=0,
                    backward=first.backward,
                    starts=number == 0,
                    fixed_bytes=at_first.live_bytes - few * sample_bytes,
                    sample_bytes=sample_bytes,
                    own=at_second.gradients,
                    done=at_second.done,
                    ends_done=at_second.ends_done,
                    units_done=at_second.units_done,
                    sharded=steps.sharded,
                    outside=at_second.outside,
                    fresh=at_second.fresh,
                    zero3=steps.zero3,
                )
            )
        lines.append(tuple(stretch))
    return lines


def _select_largest_events(
    events: Sequence[Event], common_gradients: Set[tuple[int, ...]]
) -> list[Event]:
    """Return the first event, and the largest event for each set of gradients, for steps that ran
    different operations.

    `common_gradients`: sets of gradients that occur at both micro-batch sizes. Other events join
    the set before them.
    """
    largest: dict[tuple[int, ...], Event] = {}
    gradients = events[0][1:]
    for event in events[1:]:
        if event[1:] in common_gradients:
            gradients = event[1:]
        largest[gradients] = max(largest.get(gradients, event), Event(event.live_bytes, *gradients))
    return [events[0], *largest.values()]


def _find_saved_bytes(stretches: Sequence[Stretch]) -> SavedBytes:
    """Return {(place, kind of checkpointing): bytes per sample that its forward pass saves}: live
    bytes after it minus before it.
    """
    saved: SavedBytes = {}
    for this, following in itertools.pairwise(stretches):
        start = this[0]
        end = following[0]
        passes = [
            (moment.mode, moment.turn, moment.sharded, moment.zero3) for moment in (start, end)
        ]
        if passes[0] == passes[1] and not (start.backward or start.sharded or start.zero3):
            key = start.segment, start.mode
            saved[key] = saved.get(key, 0) + max(0, end.sample_bytes - start.sample_bytes)
    return saved


def _group_equal_layers(
    places: Sequence[ModelPlace], used_places: Sequence[int], stretches: Sequence[Stretch]
) -> Iterator[list[int]]:
    """Yield groups of places in order: equal layers that follow each other form one group."""
    by_place = group_values((stretch[0].segment, stretch) for stretch in stretches)
    group: list[int] = []
    for place in used_places:
        if group and not places[place].is_like(places[group[-1]]):
            yield from _group_if_linear(group, by_place)
            group = []
        group.append(place)
    yield from _group_if_linear(group, by_place)


def _group_if_linear(
    group: list[int], by_place: Mapping[int, list[Stretch]]
) -> Iterator[list[int]]:
    """Yield the layers as one group if all but the first and the last grow linearly, else one group
    for each.
    """
    lives = [by_place.get(place, []) for place in group]
    kinds = set()
    for life in lives:
        kinds.add(tuple(_make_moment_kind(stretch[0])[1:] for stretch in life))
    if len(kinds) == 1 and all(itertools.starmap(_grow_equally, zip(*lives[1:-1], strict=True))):
        yield group
    else:
        yield from ([place] for place in group)


def _grow_equally(*stretches: Stretch) -> bool:
    """Return whether the events of successive layers grow by equal amounts."""
    if len({len(stretch) for stretch in stretches}) > 1:
        return False
    for moments in zip(*stretches, strict=True):
        for name in LINEAR:
            values = [getattr(moment, name) for moment in moments]
            if len({after - before for before, after in itertools.pairwise(values)}) > 1:
                return False
    return True


def _make_moment_kind(moment: TracedMoment) -> tuple[object, ...]:
    return (moment.segment, moment.mode, moment.sharded, moment.zero3, moment.turn, moment.backward)


def _select_peak_moments(traced: Timeline) -> tuple[TracedMoment, ...]:
    """Return the moments that can be the memory peak, in order.

    - The start of a layer is one: a sharding engine holds more there than later.
    - Another moment is one unless a moment of the same part, after its forward pass, dominates it. That is: at least as
      many bytes of both kinds, and as many gradients. Backward passes of leaves count apart: ZeRO-3 holds more then.
    - Forward and backward outside layers are not compared: if weights stay gathered, FSDP2 has a flat buffer in
      forward only.
    - Moments outside and inside the model are not compared: FSDP2 has a flat buffer in one of them.
    """
    by_part: dict[object, list[TracedMoment]] = {}
    chosen = []
    for stretch in reversed(traced.stretches):  # the backward pass first
        start, *others = stretch
        place, _ = traced.segments[start.segment]
        moments = [
            peer for peer in (others if place.is_layer else [start, *others]) if not peer.fresh
        ]
        moments.sort(key=lambda m: (m.own + m.done, m.fixed_bytes + m.sample_bytes), reverse=True)
        worst = [start] if place.is_layer else []
        for moment in moments:
            passes = None if place.is_layer else start.backward
            comparable = passes, moment.outside, moment.own < place.leaf_until
            beaten = by_part.setdefault(
                (*_make_moment_kind(start)[:-1], start.position, *comparable), []
            )
            if not any(
                peer.fixed_bytes >= moment.fixed_bytes and peer.sample_bytes >= moment.sample_bytes
                for peer in beaten
            ):
                beaten.append(moment)
                worst.append(moment)
        chosen.append([*worst, *_list_gradient_arrivals(stretch)])
    return tuple(moment for worst in reversed(chosen) for moment in worst)


def _list_gradient_arrivals(stretch: Stretch) -> Iterator[TracedMoment]:
    """Yield the moments at which gradients arrive, without a moment that needs no more than the
    next one.
    """
    arrivals = [moment for moment in stretch if moment.fresh]
    for this, following in itertools.zip_longest(arrivals, arrivals[1:]):
        names = ("fixed_bytes", "sample_bytes", "fresh")
        if following is None or any(
            getattr(this, name) > getattr(following, name) for name in names
        ):
            yield this
