"""Serialisation of journal rows. Old rows are read by their types only, without today's validation rules.

A request is validated where it is submitted, a plan where it is about to run. A rule that is stricter than on the day
on which a row was written leaves that row readable.
"""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import CoreConfig, PydanticSerializationError, SchemaSerializer, SchemaValidator

from orchestrator.specs.attempt import ErrorReport, Heartbeat, OomReport
from orchestrator.specs.events import Event
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.report_bounds import bound_report
from orchestrator.specs.spec_model import HISTORY

EVENTS = Annotated[Event, Field(discriminator="type")]
# What a core schema says of values beyond their type
# (docs.pydantic.dev/latest/api/pydantic_core_schema).
RULES = (
    "ge",
    "gt",
    "le",
    "lt",
    "multiple_of",
    "pattern",
    "min_length",
    "max_length",
    "allow_inf_nan",
)
CONFIG_RULES = ("str_max_length", "str_min_length")
BOUNDED = ("int", "float", "str", "tuple", "list", "dict", "set", "frozenset")
FUNCTIONS = (
    "function-before",
    "function-after",
    "function-wrap",
)  # those around the schema of a value
DATA = ("metadata", "default", "expected", "cls", "members")  # no schemas
REPORTS = (
    Heartbeat,
    OomReport,
    ErrorReport,
)  # which earlier versions kept as a rank had written them
AS_WRITTEN = CoreConfig(ser_json_inf_nan="constants", allow_inf_nan=True)  # a loss may be NaN


class Unreadable(ValueError):
    """A stored text does not hold an object of the expected type."""


class Codec:
    """Writes an object as JSON, with NaN and infinities, and reads it back without validation.

    Fields are read by their types. A field whose written form differs from its value (`10min` for
    600.0) keeps its parser. Bounds, patterns, validators of whole objects and `__post_init__` are
    left out. An unknown key is an error: fields that a later version wrote must not be lost
    silently.
    """

    def __init__(self, type_form: Any) -> None:
        """Make the codec of a type, which is any annotation that pydantic takes."""
        schema = _drop_rules(TypeAdapter(type_form).core_schema)
        # each class has a validator of its own, which was made from its schema with all rules
        self._validator = SchemaValidator(schema, AS_WRITTEN, _use_prebuilt=False)
        self._serializer = SchemaSerializer(schema, AS_WRITTEN, _use_prebuilt=False)

    def write(self, value: object, exclude: set[str] | None = None) -> str:
        """Return the JSON of a value, without the fields in `exclude`. Raises Unreadable for a text
        that UTF-8 cannot encode.
        """
        try:
            return self._serializer.to_json(value, exclude=exclude, warnings="error").decode()
        except PydanticSerializationError as error:
            raise Unreadable(str(error)) from None

    def read(self, text: str) -> Any:
        """Return the value from the JSON that `write` returned. Raises Unreadable with the first
        problem and its place.
        """
        try:
            return self._validator.validate_json(text, extra="forbid", context=HISTORY)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise Unreadable(f"{place}: {first['msg']}" if place else str(first["msg"])) from None

    def encode_and_decode(self, value: object) -> Any:
        """Return the value as it is after writing and reading; a lone surrogate in a text becomes
        `?`.

        Raises Unreadable where it cannot be read back.
        """
        try:
            text = self.write(value)
        except Unreadable:
            try:
                plain = self._serializer.to_python(value, mode="json", warnings="error")
            except PydanticSerializationError as error:
                raise Unreadable(str(error)) from None
            text = json.dumps(plain, ensure_ascii=False).encode(errors="replace").decode()
        return self.read(text)


def find_codec(type_form: Any) -> Codec:
    """Return the codec of a type. It is built once, since building its schemas takes 50 ms."""
    return _made(type_form)


_made = functools.cache(Codec)


def _drop_rules(schema: Any, *, is_parsed: bool = False) -> Any:
    """Return a copy of pydantic's core schema that reads the same forms but checks no rules.

    `is_parsed`: the written form of the field differs from its value, so that its parser stays.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(_drop_rules(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind in FUNCTIONS:
        is_parsed = is_parsed or "serialization" in schema
        if not is_parsed:
            inner = _drop_rules(schema["schema"])
            return inner | {"ref": schema["ref"]} if "ref" in schema else inner
        return schema | {"schema": _drop_rules(schema["schema"], is_parsed=True)}
    parts = {key: part if key in DATA else _drop_rules(part) for key, part in schema.items()}
    if kind in BOUNDED:
        parts = {key: part for key, part in parts.items() if key not in RULES}
    if kind in ("dataclass", "model"):
        config = {
            key: rule for key, rule in parts.get("config", {}).items() if key not in CONFIG_RULES
        }
        parts["config"] = config | AS_WRITTEN
    if kind == "dataclass":
        parts["post_init"] = False
        if parts["cls"] in REPORTS:
            return _add_report_bounds(parts)
    return parts


def _add_report_bounds(schema: JsonObject) -> JsonObject:
    """Return the schema of a rank's report with a step that cuts values of earlier versions to
    today's bounds.
    """
    reference = {"ref": schema.pop("ref")} if "ref" in schema else {}
    function = {"type": "no-info", "function": bound_report}
    return {"type": "function-after", "function": function, "schema": schema, **reference}
