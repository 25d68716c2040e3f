"""Parser for a line of metrics or samples written by a training: bounded, typed and finite.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite

LINE_CHARACTERS_MAX = 64 * 1024
NAMES_MAX = 200  # of a row
INTEGER_MAX = 2**53 - 1  # what every reader of JSON holds exactly
NUMBER_MAX = 1e30  # of a metric: sums and squares of it are finite
SECONDS_MAX = 1e11  # of a time since 1970: the year 5138


def parse_metric_row(line: str) -> Mapping[str, int | float]:
    """Return {name: number} of a line with a JSON object, without numbers out of range.

    A metric may be infinite or NaN, since trainings diverge; a time may not. A line that is too
    long or no object, such as the last one of a killed writer, has no numbers.
    """
    if len(line) > LINE_CHARACTERS_MAX:
        return {}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(row, dict) or len(row) > NAMES_MAX:
        return {}
    return {name: value for name, value in row.items() if _is_storable_metric(name, value)}


def _is_storable_metric(name: str, value: object) -> bool:
    has_diverged = isinstance(value, float) and not isfinite(value) and not name.endswith("_s")
    return has_diverged or is_bounded_number(name, value)


def is_bounded_number(name: str, value: object) -> bool:
    """Return whether a value is a finite number within the bounds of the unit with which `name`
    ends.
    """
    if type(value) is int:
        maximum: float = SECONDS_MAX if name.endswith("_s") else INTEGER_MAX
        return abs(value) <= maximum
    if type(value) is float:
        maximum = SECONDS_MAX if name.endswith("_s") else NUMBER_MAX
        return abs(value) <= maximum  # false for NaN, too
    return False
