"""From recorded training steps to a ModelProfile: linear in micro-batch and depth, reduced to candidate peaks.

Arithmetic on what `tracing` records; no tensor is touched here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.profile import ModelProfile, Segment, Source, TracedMoment
from orchestrator.specs.replace import replace

LINEAR = ("fixed_bytes", "sample_bytes", "own", "done", "ends_done", "units_done")  # along equal layers


class Unlike(Exception):
    """Two steps that should differ in sizes only ran different operations."""


class Event(NamedTuple):
    """Live bytes after an operation, and the gradients that existed: see TracedMoment."""

    live_bytes: int
    own: int
    done: int
    ends_done: int
    units_done: int
    outside: bool = False
    fresh: int = 0


@dataclass(slots=True)
class Place:
    """A layer, or the code between two: `flops` of one forward pass, all else as in Segment."""

    name: str
    is_layer: bool
    parameters: int = 0
    trained: int = 0
    frozen_bytes: int = 0
    largest_parameter: int = 0
    factored: int = 0
    flops: float = 0.0
    matmuls: tuple[tuple[int, int, int], ...] = ()
    tensors: tuple[int, ...] = ()
    viewed: int = 0
    leaf: tuple[int, ...] = ()
    leaf_until: int = 0
    side_by_side: int = 0
    looked_up: int = 0
    last_parameter: int = 0
    registered: tuple[int, ...] = ()

    def is_like(self, other: Place) -> bool:
        """Whether both are layers that differ in their names only."""
        return self.is_layer and replace(self, name="") == replace(other, name="")


@dataclass(slots=True)
class Phase:
    """A visit to a place: the state at its start, then after each allocation."""

    place: int
    turn: int
    backward: bool
    events: list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The same training step at two micro-batch sizes."""

    mode: ActivationCheckpointing
    sharded: bool
    zero3: bool
    samples: tuple[int, int]
    phases: tuple[list[Phase], list[Phase]]


Stretch = tuple[TracedMoment, ...]  # a phase as linear functions of the micro-batch, its start first


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Segments and their events; the first two and the last two of equal layers represent all."""

    segments: tuple[tuple[Place, int], ...]  # with the number of equal places
    stretches: tuple[Stretch, ...]
    saved_bytes: dict[tuple[int, ActivationCheckpointing], int] = field(default_factory=dict)


def timeline(places: Sequence[Place], recorded: Sequence[Steps]) -> Timeline:
    """The timeline of one model from its recorded steps. Raises Unlike."""
    stretches = [stretch for steps in recorded for stretch in _lines(steps)]
    saved = _saved(stretches)
    used = {stretch[0].segment for stretch in stretches}
    kept_places = [at for at, place in enumerate(places) if at in used or place.parameters]
    groups = list(_groups(places, kept_places, stretches))
    segment_of = {place: (at, len(group) - 1 - n) for at, group in enumerate(groups) for n, place in enumerate(group)}
    kept = []
    for stretch in stretches:
        at, position = segment_of[stretch[0].segment]
        if position < 2 or position >= len(groups[at]) - 2:
            kept.append(tuple(moment._replace(segment=at, position=position) for moment in stretch))
    return Timeline(
        segments=tuple((places[group[-1]], len(group)) for group in groups),
        stretches=tuple(kept),
        saved_bytes={
            (at, steps.mode): max(saved.get((place, steps.mode), 0) for place in group)
            for at, group in enumerate(groups)
            for steps in recorded
        },
    )


def deeper(shallow: Timeline, deep: Timeline, *, apart: int, more: int) -> Timeline:
    """`deep` extrapolated linearly by `more` layers; it has `apart` more than `shallow`. Raises Unlike."""

    def line(first: int, second: int) -> int:
        added, rest = divmod((second - first) * more, apart)
        if rest:
            raise Unlike("its layers differ")
        return second + added

    if [_name(*each) for each in shallow.segments] != [_name(*each) for each in deep.segments]:
        raise Unlike("the segments differ between depths")
    counts = [line(few, many) for (_, few), (_, many) in zip(shallow.segments, deep.segments, strict=True)]
    if [_kind(one[0]) for one in shallow.stretches] != [_kind(two[0]) for two in deep.stretches]:
        raise Unlike("the phases differ between depths")
    stretches = []
    for first, second in zip(shallow.stretches, deep.stretches, strict=True):
        if len(first) != len(second):
            raise Unlike("the operations differ between depths")
        at, position = second[0].segment, second[0].position
        if position >= 2:  # counted from the first layer
            position += counts[at] - deep.segments[at][1]
        grown = []
        for one, two in zip(first, second, strict=True):
            numbers: dict[str, Any] = {name: line(getattr(one, name), getattr(two, name)) for name in LINEAR}
            grown.append(two._replace(position=position, **numbers))
        stretches.append(tuple(grown))
    segments = tuple((place, count) for (place, _), count in zip(deep.segments, counts, strict=True))
    return replace(deep, segments=segments, stretches=tuple(stretches))


def profile(found: Timeline, *, family: str, precision: Precision, **known: Any) -> ModelProfile:
    """The timeline as a ModelProfile with the moments that can be the peak; `known` are further fields."""
    none, selective, full = ActivationCheckpointing
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.TRACED,
        segments=tuple(
            Segment(
                name=_name(place, count),
                count=count,
                parameters=place.parameters,
                saved_bytes=found.saved_bytes.get((at, none), 0),
                checkpointed_bytes=found.saved_bytes.get((at, full), 0),
                selective_bytes=found.saved_bytes.get((at, selective), 0),
                transient_bytes=0,
                forward_flops=place.flops,
                largest_parameter=place.largest_parameter,
                trained=place.trained,
                frozen_bytes=place.frozen_bytes,
                factored=place.factored,
                matmuls=place.matmuls,
                tensors=place.tensors if sum(place.tensors) == place.trained else (),
                unit=place.is_layer and count == 1,
                viewed=place.viewed,
                leaf=place.leaf if sum(place.tensors) == place.trained else (),
                leaf_until=place.leaf_until if sum(place.tensors) == place.trained else 0,
                side_by_side=place.side_by_side,
                looked_up=place.looked_up,
                last_parameter=place.last_parameter,
                registered=place.registered if sum(place.tensors) == place.trained else (),
            )
            for at, (place, count) in enumerate(found.segments)
        ),
        moments=_worst(found),
        **known,
    )


def _name(place: Place, count: int) -> str:
    """The name of a segment; for several layers, the prefix before their numbers."""
    return place.name if count == 1 else place.name.rpartition(".")[0] or place.name


def _lines(steps: Steps) -> list[Stretch]:
    """Every event as a linear function of the micro-batch, through the two recorded sizes."""
    few, many = steps.samples
    found = []
    for first, second in zip(*steps.phases, strict=False):
        if (first.place, first.turn, first.backward) != (second.place, second.turn, second.backward):
            raise Unlike("the micro-batch changes the order of layers")
        ones, twos = first.events, second.events
        if [event[1:] for event in ones] != [event[1:] for event in twos]:
            both = {event[1:] for event in ones} & {event[1:] for event in twos}
            ones, twos = _by_gradients(ones, both), _by_gradients(twos, both)
        stretch = []
        for number, (one, two) in enumerate(zip(ones, twos, strict=False)):
            sample_bytes = -((one.live_bytes - two.live_bytes) // (many - few))
            stretch.append(
                TracedMoment(
                    mode=steps.mode,
                    turn=first.turn,
                    segment=first.place,
                    position=0,
                    backward=first.backward,
                    starts=number == 0,
                    fixed_bytes=one.live_bytes - few * sample_bytes,
                    sample_bytes=sample_bytes,
                    own=two.own,
                    done=two.done,
                    ends_done=two.ends_done,
                    units_done=two.units_done,
                    sharded=steps.sharded,
                    outside=two.outside,
                    fresh=two.fresh,
                    zero3=steps.zero3,
                )
            )
        found.append(tuple(stretch))
    return found


def _by_gradients(events: Sequence[Event], both: Set[tuple[int, ...]]) -> list[Event]:
    """The start and the largest event per set of gradients; used if the micro-batch changes the operations.

    `both`: sets of gradients that occur at both micro-batches. Other events join the set before them.
    """
    largest: dict[tuple[int, ...], Event] = {}
    gradients = events[0][1:]
    for event in events[1:]:
        gradients = event[1:] if event[1:] in both else gradients
        largest[gradients] = max(largest.get(gradients, event), Event(event.live_bytes, *gradients))
    return [events[0], *largest.values()]


def _saved(stretches: Sequence[Stretch]) -> dict[tuple[int, ActivationCheckpointing], int]:
    """Saved bytes per sample of a place's forward pass: live bytes after it minus before it."""
    found: dict[tuple[int, ActivationCheckpointing], int] = {}
    for this, following in itertools.pairwise(stretches):
        start, end = this[0], following[0]
        passes = [(each.mode, each.turn, each.sharded, each.zero3) for each in (start, end)]
        if passes[0] == passes[1] and not (start.backward or start.sharded or start.zero3):
            key = start.segment, start.mode
            found[key] = found.get(key, 0) + max(0, end.sample_bytes - start.sample_bytes)
    return found


def _groups(places: Sequence[Place], used: Sequence[int], stretches: Sequence[Stretch]) -> Iterator[list[int]]:
    """Places in order, with equal layers grouped."""
    by_place: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        by_place.setdefault(stretch[0].segment, []).append(stretch)
    group: list[int] = []
    for place in used:
        if group and not places[place].is_like(places[group[-1]]):
            yield from _alike(group, by_place)
            group = []
        group.append(place)
    yield from _alike(group, by_place)


def _alike(group: list[int], by_place: dict[int, list[Stretch]]) -> Iterator[list[int]]:
    """The layers as one group if all but the first and the last grow linearly, else each alone."""
    lives = [by_place.get(place, []) for place in group]
    kinds = {tuple(_kind(stretch[0])[1:] for stretch in life) for life in lives}
    if len(kinds) == 1 and all(_is_line(*stretches) for stretches in zip(*lives[1:-1], strict=True)):
        yield group
    else:
        yield from ([place] for place in group)


def _is_line(*stretches: Stretch) -> bool:
    """Whether the events of successive layers grow by equal amounts."""
    if len({len(stretch) for stretch in stretches}) > 1:
        return False
    for moments in zip(*stretches, strict=True):
        for name in LINEAR:
            values = [getattr(moment, name) for moment in moments]
            if len({after - before for before, after in itertools.pairwise(values)}) > 1:
                return False
    return True


def _kind(moment: TracedMoment) -> tuple[object, ...]:
    return (moment.segment, moment.mode, moment.sharded, moment.zero3, moment.turn, moment.backward)


def _worst(found: Timeline) -> tuple[TracedMoment, ...]:
    """The moments that can be the peak, in order.

    - The start of a layer is one: a sharding engine holds more there than later.
    - Another moment is one unless a moment of the same part, after its forward pass, dominates it. That is: at least as
      many bytes of both kinds, and as many gradients. Backward passes of leaves count apart: ZeRO-3 holds more then.
    - Forward and backward outside layers are not compared: if weights stay gathered, FSDP2 has a flat buffer in
      forward only.
    - Moments outside and inside the model are not compared: FSDP2 has a flat buffer in one of them.
    """
    by_part: dict[object, list[TracedMoment]] = {}
    kept = []
    for stretch in reversed(found.stretches):  # the backward pass first
        start, *others = stretch
        place, _ = found.segments[start.segment]
        moments = [one for one in (others if place.is_layer else [start, *others]) if not one.fresh]
        moments.sort(key=lambda one: (one.own + one.done, one.fixed_bytes + one.sample_bytes), reverse=True)
        worst = [start] if place.is_layer else []
        for moment in moments:
            passes = None if place.is_layer else start.backward
            held = passes, moment.outside, moment.own < place.leaf_until
            beaten = by_part.setdefault((*_kind(start)[:-1], start.position, *held), [])
            if not any(
                one.fixed_bytes >= moment.fixed_bytes and one.sample_bytes >= moment.sample_bytes for one in beaten
            ):
                beaten.append(moment)
                worst.append(moment)
        kept.append([*worst, *_arrivals(stretch)])
    return tuple(moment for worst in reversed(kept) for moment in worst)


def _arrivals(stretch: Stretch) -> Iterator[TracedMoment]:
    """The moments at which gradients arrive, without those that the next one dominates."""
    arrivals = [moment for moment in stretch if moment.fresh]
    for this, following in itertools.zip_longest(arrivals, arrivals[1:]):
        names = ("fixed_bytes", "sample_bytes", "fresh")
        if following is None or any(getattr(this, name) > getattr(following, name) for name in names):
            yield this
