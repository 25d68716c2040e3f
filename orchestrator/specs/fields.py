"""Field types of job, cluster and policy files: parsing, serialisation and JSON Schema of each."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from orchestrator.specs import units
from orchestrator.specs.clock import Deadline, Window, parse_deadline, parse_window

DEVICES_MAX = 2**22  # of a cluster: 65,536 nodes of 64 devices
PRIORITY_MAX = 10**9

Bytes = Annotated[
    int,
    Field(le=units.BYTES_MAX),
    BeforeValidator(units.parse_bytes),
    PlainSerializer(lambda count: f"{count}B", return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.SIZE_PATTERN, "examples": ["1.5GiB"]}),
]
Bandwidth = Annotated[
    int,
    Field(gt=0, le=units.BANDWIDTH_MAX),
    BeforeValidator(units.parse_bandwidth),
    PlainSerializer(lambda count: f"{count}B/s", return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.BANDWIDTH_PATTERN, "examples": ["450GB/s"]}),
]


def _format_all_digits(number: float) -> str:
    """Return all digits of a float as text, without an exponent."""
    shortest = repr(number)
    return f"{Decimal(shortest):f}" if "e" in shortest else shortest


Seconds = Annotated[
    float,
    Field(le=units.SECONDS_MAX),
    BeforeValidator(units.parse_seconds),
    # every digit, and never an exponent: what is read back is the same float
    PlainSerializer(
        lambda seconds: _format_all_digits(seconds).removesuffix(".0") + "s", return_type=str
    ),
    WithJsonSchema({"type": "string", "pattern": units.DURATION_PATTERN, "examples": ["10min"]}),
]


def _parse_speeds(speeds: object) -> object:
    return (
        tuple((int(str(count)), step_s) for count, step_s in speeds.items())
        if isinstance(speeds, dict)
        else speeds
    )


Speeds = Annotated[  # seconds per optimizer step by number of devices, fewest devices first
    tuple[tuple[Annotated[int, Field(ge=1, le=DEVICES_MAX)], Seconds], ...],
    BeforeValidator(_parse_speeds),
    AfterValidator(lambda speeds: tuple(sorted(speeds))),
    PlainSerializer(
        lambda speeds: {str(count): f"{_format_all_digits(step_s)}s" for count, step_s in speeds},
        return_type=dict[str, str],
    ),
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "string"}, "examples": [{"1": "2.1s"}]}
    ),
]

Hours = Annotated[
    Window,
    BeforeValidator(lambda raw: raw if isinstance(raw, Window) else parse_window(raw)),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["22:00-08:00 Europe/Berlin mon-fri"]}),
]

DeadlineField = Annotated[
    Deadline,
    BeforeValidator(lambda raw: raw if isinstance(raw, Deadline) else parse_deadline(raw)),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["08:00", "2026-11-23T08:00 Europe/Berlin"]}),
]


# Classes of priority by name; between them there is room for numbers.
PRIORITIES = {"high": 100, "normal": 0, "low": -100}


def _parse_priority(raw: object) -> object:
    if isinstance(raw, str) and raw.lstrip("+-").isdecimal():
        return int(raw)
    if isinstance(raw, str) and raw not in PRIORITIES:
        raise ValueError(f"a priority is {', '.join(PRIORITIES)} or a whole number")
    return PRIORITIES[raw] if isinstance(raw, str) else raw


Priority = Annotated[  # higher first
    int,
    Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX),
    BeforeValidator(_parse_priority),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": -PRIORITY_MAX, "maximum": PRIORITY_MAX},
                {"enum": list(PRIORITIES)},
            ],
            "default": 0,
        }
    ),
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]  # of what a file declares
USER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._@-]{0,62}$"
UserName = Annotated[str, Field(pattern=USER_NAME)]
