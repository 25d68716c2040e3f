r"""The engine of users' regular expressions, for their check at submission and for every later use.

The engine is RE2: its time is linear in the text, and its memory is bounded (google/re2, README.md).
So a pattern of a user can neither stall a service nor fill its memory.
RE2 has no lookaround, no back-references, no `\Z` and no `\u0041`.
"""

from __future__ import annotations

from typing import Any

import re2

PATTERN_CHARACTERS_MAX = 1000
COUNT_DIGITS_MAX = 15  # of a step or an epoch: below 2**53
MISSING_SYNTAX = r"lookahead, lookbehind, back-references, `\Z` and `\u0041` are not among it"

_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


def compile_pattern(pattern: str) -> Any:
    """Return the compiled pattern. Raises ValueError with RE2's reason where it refuses the
    pattern.
    """
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise ValueError(f"the pattern has more than {PATTERN_CHARACTERS_MAX} characters")
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        message = str(error.args[0].decode(errors="replace") if error.args else error)
        raise ValueError(f"no regular expression of RE2's: {message} ({MISSING_SYNTAX})") from None
    except UnicodeEncodeError:
        raise ValueError("the pattern has characters that UTF-8 cannot encode") from None


class LinePattern:
    """A user's pattern, searched in lines of text.

    A pattern that an earlier version accepted and the engine refuses matches nothing; `problem` says why.
    """

    def __init__(self, pattern: str) -> None:
        self.problem: str | None = None
        self._compiled = None
        try:
            self._compiled = compile_pattern(pattern)
        except ValueError as error:
            self.problem = f"the pattern {pattern[:80]!r} is not evaluated: {error}"

    def matches(self, line: str) -> bool:
        """Return whether the pattern matches anywhere in the line, which must be encodable in UTF-8."""
        return self._compiled is not None and self._compiled.search(line) is not None

    def list_groups(self, line: str) -> list[str]:
        """Return the text of the pattern's only group for each match in the line, in order."""
        if self._compiled is None:
            return []
        return [match.group(1) or "" for match in self._compiled.finditer(line)]


def parse_count(text: str) -> int | None:
    """Return the whole number in a text of ASCII digits; None for another text or more than
    COUNT_DIGITS_MAX digits.
    """
    is_count = text.isascii() and text.isdecimal() and len(text) <= COUNT_DIGITS_MAX
    return int(text) if is_count else None
