"""Check for texts that a journal, a process and a path can hold. Standard library only."""

from __future__ import annotations

VALUE_LENGTH_MAX = 2**17  # of one text: Linux takes no longer argument (MAX_ARG_STRLEN, execve(2))


def why_no_text(text: str) -> str:
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
