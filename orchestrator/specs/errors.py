"""The one tree of exceptions raised on purpose.

OrchestratorError
├── SpecError          bad input: a job, a cluster or a command line says something impossible
├── IllegalPlan        a combination of settings that no engine can run
└── ServiceError       the service cannot be reached, or refuses
A failing world (a dead rank, a lost node) is never an exception: it is data (`Evidence`).
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from typing import NoReturn

GIVEN_MAX = 400  # characters of what was given
# columns of a line, and before what is allowed
LINE = 80
INDENT = 11


class OrchestratorError(Exception):
    """Base of every error that this project raises on purpose."""


class SpecError(OrchestratorError, ValueError):
    """Bad input. The error names all of: what is wrong, where, the value, the allowed values, and what to do."""

    def __init__(
        self,
        what: str,
        *,
        source: str = "",
        path: str = "",
        got: object = None,
        allowed: str = "",
        hint: str = "",
    ) -> None:
        self.what, self.source, self.path, self.got, self.allowed, self.hint = (
            what,
            source,
            path,
            got,
            allowed,
            hint,
        )
        super().__init__(what)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, with_allowed: bool = True) -> str:
        """Return the error as lines for a terminal; `with_allowed=False` leaves out the allowed
        values.
        """
        where = ": ".join(part for part in (self.source, self.path) if part)
        lines = [f"{where}: {self.what}" if where else self.what]
        if self.got is not None:
            got = repr(self.got)
            if len(got) > GIVEN_MAX:  # cut between words, where it has any
                got = f"{got[:GIVEN_MAX].rpartition(' ')[0] or got[:GIVEN_MAX]} ..."
            lines.append(f"  given:   {got}")
        if self.allowed and with_allowed:
            lines.append(f"  allowed: {_wrap_line(str(self.allowed))}")
        if self.hint:
            lines.append(f"  to do:   {self.hint}")
        return "\n".join(lines)


def _wrap_line(text: str) -> str:
    """Return a long line wrapped at whole words to 80 columns."""
    lines = text.splitlines()
    if len(lines) != 1 or len(text) <= LINE - INDENT:
        return text
    wrapped = textwrap.wrap(text, LINE - INDENT, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * INDENT}".join(wrapped)


class IllegalPlan(OrchestratorError, ValueError):
    """A plan (settings of a run) that no engine can run; the message names the settings that exclude each other."""


class ServiceError(OrchestratorError):
    """The service cannot be reached or refuses a request; the message says what to do."""


class UnknownError(ServiceError):
    """No such job, attempt, rank, node, user or token exists, or its files were removed."""


class StorageError(ServiceError):
    """The journal's disk refused a write. Nothing of this change was stored; a later try may succeed."""


class ReadOnlyError(ServiceError):
    """The service is read-only, since a part of its journal (event log) cannot be read."""


class UncertainError(ServiceError):
    """The database did not answer during a commit. Only the journal knows whether this change was stored."""


def convert_error_to_json(error: OrchestratorError) -> dict[str, str]:
    """Return the error as JSON for the API: its kind, its text, and the fields of a SpecError."""
    view = {"kind": "bad_input" if isinstance(error, SpecError) else "refused", "error": str(error)}
    if not isinstance(error, SpecError):
        return view
    parts = {
        "source": error.source,
        "path": error.path,
        "given": "" if error.got is None else repr(error.got)[:GIVEN_MAX],
        "allowed": str(error.allowed),
        "to_do": error.hint,
    }
    return view | {name: text for name, text in parts.items() if text}


def find_closest_word(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is spelled most like `word`; None where none is similar."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggest_word(word: str, candidates: Iterable[str], otherwise: str = "") -> str:
    """Return a hint that names the candidate spelled most like `word`; `otherwise` where none is
    similar.
    """
    near = find_closest_word(word, candidates)
    return f"did you mean {near!r}?" if near else otherwise


def refuse_unknown(value: NoReturn) -> NoReturn:
    """Raise AssertionError for a value that no branch handles; mypy proves that this never happens."""
    raise AssertionError(f"no branch here says what follows from {value!r}")
