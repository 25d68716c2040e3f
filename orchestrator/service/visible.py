"""Escapes untrusted text for a terminal: control sequences become readable escapes."""

from __future__ import annotations

import re
from typing import Any

# Control characters but tab and line feed, those that turn the direction of text (UTR 36, section
# 2.10), and the halves
# of surrogate pairs, which a name of a file may have and no stream takes.
_OTHERS = r"\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_STEERING = re.compile(rf"[\x00-\x08\x0b-\x1f{_OTHERS}]")
_COLOUR = r"\x1b\[[0-9;]*m"
_STEERING_BUT_COLOURS = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b-\x1f{_OTHERS}]")
_STEERING_LOG = re.compile(rf"{_COLOUR}|[\x00-\x08\x0b\x0c\x0e-\x1f{_OTHERS}]")


def escape_controls(value: Any) -> Any:
    """Return plain data (texts, lists, dicts) with the control sequences in its texts replaced by
    readable escapes.
    """
    if isinstance(value, str):
        return _STEERING.sub(_escape_match, value)
    if isinstance(value, dict):
        return {escape_controls(key): escape_controls(inner) for key, inner in value.items()}
    return [escape_controls(inner) for inner in value] if isinstance(value, list) else value


def escape_except_colours(text: str) -> str:
    """Return the text with its control sequences escaped, except those of colours."""
    return _STEERING_BUT_COLOURS.sub(_escape_match_except_colours, text)


def escape_log(text: str) -> str:
    """Return a piece of a log for a terminal: colours and carriage returns stay, other control
    sequences are escaped.
    """
    return _STEERING_LOG.sub(_escape_match_except_colours, text)


def _escape_match_except_colours(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else _escape_match(match)


def _escape_match(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
