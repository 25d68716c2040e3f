"""Texts that a journal, a process and a path can hold, and lists in sentences. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

VALUE_LENGTH_MAX = 2**17  # of one text: Linux takes no longer argument (MAX_ARG_STRLEN, execve(2))


def explain_unstorable(text: str) -> str:
    """Return why the text cannot be stored or passed to a process; "" where it can."""
    if len(text) > VALUE_LENGTH_MAX:
        return "the text is too long"
    if "\0" in text:
        return "the text has a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text is not UTF-8: it has half of a surrogate pair"
    return ""


def join_first_words(words: Iterable[str], count: int) -> str:
    """Return the first words with commas between them, and how many more there are: `a, b and 3 more`."""
    shown = list(words)
    more = len(shown) - count
    return ", ".join(shown[:count]) + (f" and {more} more" if more > 0 else "")
