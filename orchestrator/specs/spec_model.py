"""What every section of a job or cluster file is made of."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema


class SpecModel(BaseModel):
    """Frozen, and no unknown key passes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _split_command(command: object) -> object:
    """A command string cut as a POSIX shell would cut it; it never reaches a shell."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command


Command = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_command),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "examples": ["python train.py"],
        }
    ),
]

Words = Annotated[  # a mapping of words that can be hashed
    tuple[tuple[str, str], ...],
    BeforeValidator(lambda words: tuple(words.items()) if isinstance(words, dict) else words),
    PlainSerializer(dict, return_type=dict[str, str]),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression of Python's: {error}") from None
    return pattern


def _counts(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups != 1:
        raise ValueError(r"the pattern needs one group, around the number that counts up: 'epoch (\d+)'")
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles), WithJsonSchema({"type": "string", "format": "regex"})]
Counter = Annotated[str, AfterValidator(_counts), WithJsonSchema({"type": "string", "format": "regex"})]
