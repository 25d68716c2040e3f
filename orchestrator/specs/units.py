"""Conversion between bytes or seconds and texts such as `1.5GiB`, `450GB/s` and `10min`."""

from __future__ import annotations

import re

BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SECOND_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}

BYTES_MAX = 2**60
BANDWIDTH_MAX = 10**18  # bytes per second
NUMBER_MAX = 2.0**63
SECONDS_MAX = 100 * 366 * 86400.0

SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(B|kB|KiB|MB|MiB|GB|GiB|TB|TiB)$"
BANDWIDTH_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(B|kB|MB|GB|TB)/s$"
DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)? ?(s|min|h|d)$"


def parse_bytes(text: object) -> int:
    """Return the bytes of a text such as `1.5GiB`, or `1.5GB` in decimal units. Raises ValueError.

    The error names the allowed units.
    """
    number, unit = _split_unit(text, "a size such as 1.5GiB", BINARY_UNITS)
    sizes = DECIMAL_UNITS | BINARY_UNITS
    if unit in sizes:
        return round(number * sizes[unit])
    meant = {"KB": "kB", "K": "KiB", "M": "MiB", "G": "GiB", "T": "TiB"}
    hint = f"; did you mean {number:g}{meant[unit]}?" if unit in meant else ""
    raise ValueError(f"sizes take one of {', '.join(sizes)}, not {unit or 'no unit'!r}{hint}")


def parse_bandwidth(text: object) -> int:
    """Return the bytes per second of `450GB/s` (decimal, as data sheets write it). Raises ValueError."""
    number, unit = _split_unit(text, "a bandwidth such as 450GB/s", DECIMAL_UNITS)
    if unit.endswith("/s") and unit[:-2] in DECIMAL_UNITS:
        return round(number * DECIMAL_UNITS[unit[:-2]])
    raise ValueError(
        f"bandwidths take one of {', '.join(f'{u}/s' for u in DECIMAL_UNITS)}, not {unit!r}"
    )


def parse_seconds(text: object) -> float:
    """Return the seconds of `90s`, `10min` or `2h`. Raises ValueError with the allowed units."""
    number, unit = _split_unit(text, "a duration such as 10min", SECOND_UNITS)
    if unit in SECOND_UNITS:
        return number * SECOND_UNITS[unit]
    raise ValueError(f"durations take one of {', '.join(SECOND_UNITS)}, not {unit or 'no unit'!r}")


_UNITS_OF = {
    SIZE_PATTERN: BINARY_UNITS,
    BANDWIDTH_PATTERN: {f"{unit}/s": size for unit, size in DECIMAL_UNITS.items()},
    DURATION_PATTERN: SECOND_UNITS,
}


def format_in_largest_unit(number: float, unit_pattern: str) -> str | float:
    """Return the number in the largest unit that needs at most one decimal, such as `12.5GB/s`.

    A number whose pattern has no known unit is returned unchanged.
    """
    if unit_pattern not in _UNITS_OF:
        return number
    sizes = [
        (unit, size)
        for unit, size in _UNITS_OF[unit_pattern].items()
        if number >= size and 10 * number % size == 0
    ]
    unit, size = sizes[-1] if sizes else next(iter(_UNITS_OF[unit_pattern].items()))
    return f"{number / size:g}{unit}"


def _split_unit(text: object, example: str, factor_by_unit: dict[str, int]) -> tuple[float, str]:
    match = (
        re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]*)", text.strip())
        if isinstance(text, str)
        else None
    )
    if match is None:
        raise ValueError(f"expected {example} with one of {', '.join(factor_by_unit)}")
    number = float(match[1])
    if number > NUMBER_MAX:
        raise ValueError(f"the number is too large: at most {NUMBER_MAX:g}")
    return number, match[2]


def format_bytes(count: float) -> str:
    """Return a byte count as text: three significant digits in the largest fitting binary unit."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= BINARY_UNITS[unit]:
            return (
                f"{count / BINARY_UNITS[unit]:.2f} {unit}"
                if unit != "KiB"
                else f"{count / 2**10:.0f} KiB"
            )
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text: `0.213 s`, `42 s`, `12 min`, `3.4 h`."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_probability(probability: float) -> str:
    """Return a probability as text, such as `98.7 %`; never 0 or 100 %, since it comes from a
    model.
    """
    if probability > 0.999:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < probability < 0.001 else f"{100 * probability:.1f} %"
