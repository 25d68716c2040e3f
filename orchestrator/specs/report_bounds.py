"""Bounds for a rank's reports: each field must have its type, be finite, and lie in the range of
its unit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.metric_row import is_bounded_number

BYTES_MAX = 2**60  # of a field that counts bytes
TEXT_CHARACTERS_MAX = 200  # of a short text
TEXTS_MAX = 16  # short texts of one field
OPTIONAL = ("step_s", "requested_bytes")  # required fields that may be None
LONG_TEXTS = {"message": 64 * 1024, "traceback": 64 * 1024}  # whose ends are kept

Report = TypeVar("Report")


def split_bounded_values(kind: type[Any], data: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    """Return (values of a report's fields that are typed and in range, reasons for the fields that
    are not).

    A loss that is infinite or NaN is left out without a reason: trainings diverge.
    """
    hashable: Any = kind  # mypy takes no type for one
    values = JsonObject()
    reasons = list[str]()
    for name, adapter in make_field_validators(hashable).items():
        if name not in data:
            continue
        raw = tuple(data[name]) if isinstance(data[name], list) else data[name]
        try:
            value = adapter.validate_python(raw)
            problem = ""
        except (ValidationError, OverflowError):
            value = None
            problem = f"{name} has a wrong type"
        if isinstance(value, tuple):
            value = tuple(cut_report_text(name, entry) for entry in value[:TEXTS_MAX])
        elif not problem and not isinstance(value, str) and not is_in_range(name, value):
            value = None
            problem = f"{name} is out of range"
        if not problem:
            values[name] = cut_report_text(name, value) if isinstance(value, str) else value
        elif name in OPTIONAL:
            values[name] = None
        if problem and not (name == "loss" and isinstance(data[name], float)):
            reasons.append(problem)
    return values, reasons


def is_in_range(field_name: str, value: object) -> bool:
    """Return whether a report's value is in the range that the unit in the field's name allows;
    only a loss may be negative.
    """
    if value is None or isinstance(value, bool):
        return True
    if not is_bounded_number(field_name, value) or not isinstance(value, int | float):
        return False
    smallest = 1 if field_name == "capacity_bytes" else 0
    if field_name == "pass_done":
        return 0 <= value <= 1
    if field_name.endswith("_bytes") and value > BYTES_MAX:
        return False
    return field_name == "loss" or value >= smallest


def cut_report_text(field_name: str, text: str) -> str:
    """Return the part of a report's text that is stored: the end of a long field, the beginning of
    a short one.
    """
    text = text.encode(errors="replace").decode()
    return (
        text[-LONG_TEXTS[field_name] :] if field_name in LONG_TEXTS else text[:TEXT_CHARACTERS_MAX]
    )


@functools.lru_cache(maxsize=8)
def make_field_validators(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    """Return {field: strict validator} of a dataclass; cached."""
    hints = get_type_hints(kind)
    config = ConfigDict(strict=True)
    return {entry.name: TypeAdapter(hints[entry.name], config=config) for entry in fields(kind)}


def bound_report(report: Report) -> Report:
    """Return the report, which an earlier version may have stored, with values cut to today's
    bounds; a required number becomes 0.
    """
    kind = type(report)
    stored = {entry.name: getattr(report, entry.name) for entry in fields(kind)}  # type: ignore[arg-type]
    values, _ = split_bounded_values(kind, stored)
    if values == stored:
        return report
    zeros = {
        name: type(value)(0) for name, value in stored.items() if isinstance(value, int | float)
    }
    defaults = {entry.name for entry in fields(kind) if entry.default is not MISSING}  # type: ignore[arg-type]
    required = {name: zero for name, zero in zeros.items() if name not in defaults}
    return kind(**{**required, **values})
