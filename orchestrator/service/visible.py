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


def visible(value: Any) -> Any:
    """Return plain data with control sequences in its texts escaped."""
    if isinstance(value, str):
        return _STEERING.sub(_escaped, value)
    if isinstance(value, dict):
        return {visible(key): visible(inner) for key, inner in value.items()}
    return [visible(inner) for inner in value] if isinstance(value, list) else value


def visible_but_colours(text: str) -> str:
    """Return the text with control sequences escaped, but for those of colours."""
    return _STEERING_BUT_COLOURS.sub(_escaped_but_colours, text)


def visible_log(text: str) -> str:
    """Return a piece of a log for a terminal, with colours and carriage returns, but no other control sequence."""
    return _STEERING_LOG.sub(_escaped_but_colours, text)


def _escaped_but_colours(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else _escaped(match)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
