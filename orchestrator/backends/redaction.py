"""Hides the values of a job's secrets and variables in evidence and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from orchestrator.backends.environment import is_secret_name
from orchestrator.specs.attempt import Evidence
from orchestrator.specs.command_line import Env
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace

SHORTEST_HIDDEN = 4  # characters; hiding "1" would leave no text readable
SHORTEST_BY_NAME = 8  # of what is a secret by its variable's name alone: `MAX_TOKENS=4096` is none

Hide = Callable[[str], str]


def make_hider(spec: JobSpec, environment: Env) -> Hide:
    """Return a function that replaces the values of the job's secrets in a text by their variables'
    names.
    """
    return _make_replacer(
        [*_list_values_and_names(spec, environment), *((value, name) for name, value in spec.env)]
    )


def mask_evidence(evidence: Evidence, spec: JobSpec, environment: Env) -> Evidence:
    """Return the evidence with the values of the job's secrets replaced by their variables'
    names.
    """
    return _hide_in_value(evidence, _make_replacer(_list_values_and_names(spec, environment)))


def list_secret_values(spec: JobSpec, environment: Env) -> tuple[bytes, ...]:
    """Return the values of the job's secrets as bytes, for `mask_secrets`."""
    values = {
        value.encode(errors="surrogateescape")
        for value, _ in _list_values_and_names(spec, environment)
    }
    return tuple(sorted(value for value in values if len(value) >= SHORTEST_HIDDEN))


def mask_secrets(text: bytes, secret_values: Sequence[bytes]) -> bytes:
    """Return the text with each byte of a secret replaced by an asterisk, so that offsets stay
    valid.

    A secret that is cut off at the text's end is also masked.
    """
    for value in secret_values:
        text = text.replace(value, b"*" * len(value))
        cut = next(
            (n for n in range(len(value) - 1, SHORTEST_HIDDEN - 1, -1) if text.endswith(value[:n])),
            0,
        )
        text = text[: len(text) - cut] + b"*" * cut
    return text


def _list_values_and_names(spec: JobSpec, environment: Env) -> list[tuple[str, str]]:
    """Return (value, name) of the job's declared secrets, and of every variable with the name of a
    secret.

    The variables are those of the service and of the job.
    """
    by_name = [
        (value, name) for name, value in (*environment.items(), *spec.env) if is_secret_name(name)
    ]
    named = [(environment.get(name, ""), name) for name in spec.secrets]
    return named + [pair for pair in by_name if len(pair[0]) >= SHORTEST_BY_NAME]


def _hide_in_value(value: Any, hide: Hide) -> Any:
    if type(value) is str:  # an enumeration is no text
        return hide(value)
    if type(value) is tuple:
        return tuple(_hide_in_value(part, hide) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value,
            **{
                field.name: _hide_in_value(getattr(value, field.name), hide)
                for field in fields(value)
            },
        )
    return value


def _make_replacer(values_and_names: list[tuple[str, str]]) -> Hide:
    values_and_names = values_and_names + [
        (json.dumps(value)[1:-1], name) for value, name in values_and_names
    ]  # as they stand in JSON
    longest_first = sorted(
        (pair for pair in values_and_names if len(pair[0]) >= SHORTEST_HIDDEN),
        key=lambda p: -len(p[0]),
    )

    def hide(text: str) -> str:
        for value, name in longest_first:
            text = text.replace(value, f"[{name}]")
        return text

    return hide
