"""Spans of a trace, as W3C Trace Context and OpenTelemetry have them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # W3C Trace Context, section 3.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The span of a client, under which its job stands."""

    trace_id: int
    span_id: int
    is_sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of a trace that has ended."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    begins_s: float  # since 1970
    ends_s: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    error: str = ""


def parent_of(traceparent: str) -> Parent | None:
    """Return the span that a `traceparent` names; None for anything else."""
    match = TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return Parent(trace_id=trace_id, span_id=span_id, is_sampled=bool(flags & 1)) if trace_id and span_id else None
