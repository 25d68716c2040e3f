"""Job arrays: one document with `{placeholders}` becomes one document for each set of values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from orchestrator.specs.errors import SpecError, find_closest_word
from orchestrator.specs.json_object import JsonObject

JOBS_MAX = 1000  # of one array: as Slurm's MaxArraySize, less one
INDEX = "index"  # a placeholder that every array has: 0, 1, 2 ...
ALLOWED = (
    "array: {lr: [1e-3, 1e-4], seed: [0, 1]} (all combinations), or a list of {lr: 1e-3, seed: 0}"
)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def expand_array(data: Mapping[str, Any], source: str) -> list[JsonObject]:
    """Return one job document for each set of values in `array:`, in the order of the sets. Raises
    SpecError.

    A value that is one placeholder alone takes the replacement with its type, such as a number.
    Elsewhere its text is inserted. All jobs of an array belong to one family, whatever their names.
    """
    rest = {key: value for key, value in data.items() if key not in ("array", "max_concurrent")}
    rows = list(_list_value_sets(data["array"], source))
    used = set(list_placeholders(rest))
    unused = [name for name in rows[0] if name not in used]
    if unused:
        near = find_closest_word(unused[0], used - {INDEX})
        hint = (
            f"the file says {{{near}}}"
            if near
            else f"write {{{unused[0]}}} where it belongs, such as in `command`"
        )
        raise SpecError(
            "no part of the job says this placeholder",
            source=source,
            path="array",
            got=unused[0],
            hint=hint,
        )
    max_concurrent = read_max_concurrent(data, len(rows), source)
    rest = set_array_name_as_family(rest)
    return [
        fill_placeholders(rest, {INDEX: number, **row})
        | {"member": {"number": number, "of": len(rows), "max_concurrent": max_concurrent}}
        for number, row in enumerate(rows)
    ]


def read_max_concurrent(data: Mapping[str, Any], default: int, source: str) -> int:
    """Return the maximum number of the array's jobs that may run at once; `default` where the array
    sets none. Raises SpecError.
    """
    count = data.get("max_concurrent", default)
    if not isinstance(count, int) or not 1 <= count <= JOBS_MAX:
        raise SpecError(
            "not a number of jobs",
            source=source,
            path="max_concurrent",
            got=count,
            allowed=f"1 to {JOBS_MAX}",
        )
    return count


def set_array_name_as_family(data: Mapping[str, Any]) -> JsonObject:
    """Return the document with `family` set to the array's name without its placeholders."""
    if not isinstance(data.get("name"), str):
        return dict(data)
    family = re.sub(rf"[-_.]*{_PLACEHOLDER.pattern}", "", data["name"])
    return {"family": family.strip("-_.") or "array"} | dict(data)


def _list_value_sets(array: object, source: str) -> Iterator[JsonObject]:
    """Yield {placeholder: value} for each job of the array. Raises SpecError."""
    if (
        isinstance(array, dict)
        and array
        and all(isinstance(values, list) and values for values in array.values())
    ):
        count = 1
        for values in array.values():
            count *= len(values)
        _check_job_count(count, source)
        rows: Sequence[JsonObject] = [
            dict(zip(array, values, strict=True)) for values in product(*array.values())
        ]
    elif isinstance(array, list) and array and all(isinstance(row, dict) and row for row in array):
        _check_job_count(len(array), source)
        rows = array
    else:
        raise SpecError("not the values of an array", source=source, path="array", allowed=ALLOWED)
    for row in rows:
        if set(row) != set(rows[0]):
            raise SpecError(
                "each entry says the same placeholders",
                source=source,
                path="array",
                got=row,
                allowed=", ".join(rows[0]),
            )
        wrong = [
            name for name, value in row.items() if isinstance(value, dict | list) or name == INDEX
        ]
        if wrong or not all(_PLACEHOLDER.fullmatch(f"{{{name}}}") for name in row):
            raise SpecError(
                "not the values of an array", source=source, path="array", got=row, allowed=ALLOWED
            )
        yield row


def _check_job_count(job_count: int, source: str) -> None:
    if job_count > JOBS_MAX:
        raise SpecError(
            "too many jobs in one array",
            source=source,
            path="array",
            got=job_count,
            allowed=f"{JOBS_MAX}",
        )


def list_placeholders(value: object) -> Iterator[str]:
    """Yield the names of all placeholders in the texts of a document or a part of it."""
    if isinstance(value, str):
        yield from _PLACEHOLDER.findall(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from list_placeholders(key)
            yield from list_placeholders(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from list_placeholders(inner)


def fill_placeholders(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of `value` with its placeholders replaced by these values; other braces stay."""
    if isinstance(value, str):
        whole = _PLACEHOLDER.fullmatch(value)
        if whole and whole[1] in values:
            return values[whole[1]]
        return _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), value)
    if isinstance(value, dict):
        return {
            fill_placeholders(key, values): fill_placeholders(inner, values)
            for key, inner in value.items()
        }
    return (
        [fill_placeholders(inner, values) for inner in value] if isinstance(value, list) else value
    )
