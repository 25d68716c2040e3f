"""The pydantic base class of all sections of a job or cluster file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from orchestrator.specs import units
from orchestrator.specs.globs import parse_glob
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.packaged import load_table
from orchestrator.specs.patterns import compile_pattern

# Longest text of a field, in characters: PATH_MAX of Linux. Words of a command and values of
# variables may be longer.
TEXT_LENGTH_MAX = 4096
# of one argument or variable: MAX_ARG_STRLEN of Linux (execve(2)), less its NUL
WORD_LENGTH_MAX = 2**17 - 1
WORDS_MAX = 4096

Word = Annotated[str, Field(max_length=WORD_LENGTH_MAX)]


HISTORY = "history"  # context of pydantic under which rows of a journal are read: nothing is judged


class SpecModel(BaseModel):
    """Immutable pydantic base class that refuses unknown keys. `keys.yaml` says what each key means."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, str_max_length=TEXT_LENGTH_MAX
    )


def _split_command(command: object) -> object:
    """Return a command string split as a POSIX shell would split it; it never reaches a shell."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command


Command = Annotated[
    tuple[Word, ...],
    Field(max_length=WORDS_MAX),
    BeforeValidator(_split_command),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "examples": ["python train.py"],
        }
    ),
]

# of a mapping, which is stored as pairs: they can be hashed
AS_PAIRS = BeforeValidator(lambda raw: tuple(raw.items()) if isinstance(raw, dict) else raw)
StringMap = Annotated[  # a mapping of words that can be hashed
    tuple[tuple[str, Word], ...],
    Field(max_length=WORDS_MAX),
    AS_PAIRS,
    PlainSerializer(dict, return_type=dict[str, str]),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


VARIABLE = r"^[^=\s]{1,255}$"
Variable = Annotated[str, Field(pattern=VARIABLE)]  # name of an environment variable


def _check_variable_names(variables: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    for name, _ in variables:
        if re.fullmatch(VARIABLE, name) is None:
            raise ValueError(
                f"no name of an environment variable: {name[:80]!r} (without = and spaces, at most 255)"
            )
    return variables


Environment = Annotated[StringMap, AfterValidator(_check_variable_names)]


def _check_pattern(pattern: str) -> str:
    compile_pattern(pattern)
    return pattern


def _check_counter_pattern(pattern: str) -> str:
    if compile_pattern(pattern).groups != 1:
        raise ValueError(
            r"the pattern needs one group, around the number that counts up: 'epoch (\d+)'"
        )
    return pattern


def _check_number_pattern(pattern: str) -> str:
    if compile_pattern(pattern).groups != 1:
        raise ValueError(r"the pattern needs one group, around the value: 'eval_loss=(\S+)'")
    return pattern


def _check_glob(pattern: str) -> str:
    parse_glob(pattern)
    return pattern


Glob = Annotated[str, AfterValidator(_check_glob)]  # a shell pattern of files
Pattern = Annotated[
    str, AfterValidator(_check_pattern), WithJsonSchema({"type": "string", "format": "regex"})
]
Counter = Annotated[
    str,
    AfterValidator(_check_counter_pattern),
    WithJsonSchema({"type": "string", "format": "regex"}),
]

Number = Annotated[
    str,
    AfterValidator(_check_number_pattern),
    WithJsonSchema({"type": "string", "format": "regex"}),
]


def make_json_schema(spec_class: type[SpecModel]) -> JsonObject:
    """Return the JSON Schema (2020-12) of a file of this type; defaults appear as in a file
    (`10min`, not 600.0).
    """
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema"
    } | spec_class.model_json_schema()
    for section in (schema, *schema.setdefault("$defs", {}).values()):
        for key in section.get("properties", {}).values():
            if "default" in key:
                key["default"] = _format_default_in_file(key["default"], key)
    _add_meanings(schema, load_table(__package__, "keys"))
    return schema


def _add_meanings(schema: Any, sections: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to each key in a schema its description and example, found by the section's title."""
    parts = schema.values() if isinstance(schema, dict) else schema
    for part in parts:
        if isinstance(part, dict | list):
            _add_meanings(part, sections)
    if isinstance(schema, dict) and "properties" in schema:
        for name, entry in sections.get(schema["title"], {}).items():
            key = schema["properties"][name]
            key["description"] = entry["meaning"]
            if "example" in entry:
                key["examples"] = [entry["example"]]


def _format_default_in_file(default: object, key: JsonObject) -> object:
    if default == [] and key.get("type") == "object":
        return {}
    if isinstance(default, bool) or not isinstance(default, int | float):
        return default
    return units.format_in_largest_unit(default, str(key.get("pattern")))
