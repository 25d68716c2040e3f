"""Nouns as the text of a row, and back."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from orchestrator.specs.errors import ServiceError


def adapter(noun: Any) -> TypeAdapter[Any]:
    """Adapter between a noun and JSON that allows NaN, as a loss may be."""
    return TypeAdapter(noun | None, config=ConfigDict(ser_json_inf_nan="constants"))  # a bare noun takes no config


def dump(noun: TypeAdapter[Any], value: object, exclude: set[str] | None = None) -> str:
    """The text of a row."""
    return noun.dump_json(value, exclude=exclude, warnings="error").decode()


def read(noun: TypeAdapter[Any], journal: str, table: str, row: object, body: str) -> Any:
    """The noun that `dump` wrote. Raises ServiceError with journal, table and row where the text is no such noun."""
    try:
        return noun.validate_json(body, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ServiceError(
            f"journal {journal}: row {row} of table {table} cannot be read back ({where}: {first['msg']}). "
            "Another version of the orchestrator wrote it, or it was edited. Open the journal with the version "
            "that wrote it, or move the file away to begin an empty one."
        ) from error
