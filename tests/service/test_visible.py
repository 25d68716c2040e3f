"""Laws of others' text at a terminal: people can read all of it, and none of it steers the terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.service.visible import escape_controls, escape_log

CLEAR = "\x1b]0;owned\x07\x1b[2J\u202e"


@given(st.text())
def test_no_text_steers_a_terminal_and_plain_text_stays(text: str) -> None:
    shown = escape_controls({"a": [text]})["a"][0]
    assert all(char in "\t\n" or (char.isprintable() or ord(char) > 0x9F) for char in shown)
    assert not {*"\x1b\x07\x08\u202e\u2066"} & {*shown}
    if text.isprintable():
        assert shown == text


def test_logs_keep_their_colours_and_carriage_returns() -> None:
    assert escape_log("\x1b[31mred\x1b[0m 10%\r20%\n") == "\x1b[31mred\x1b[0m 10%\r20%\n"
    assert escape_log(CLEAR) == "\\x1b]0;owned\\x07\\x1b[2J\\u202e"
