"""Commands of other tools, and our command with the same meaning: `synonyms.yaml` has them by tool.

Any other unknown word gets our commands of similar spelling, if any, and `orc --help`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

WORDS_MAX = 3


@cache
def load_commands() -> Mapping[str, tuple[str, str]]:
    """Return (our command, the other tool) by the words of that tool."""
    from orchestrator.specs.packaged import load_table

    commands = dict[str, tuple[str, str]]()
    for tool, phrases in load_table(__package__, "synonyms").items():
        for name, command in phrases.items():
            commands[name] = command, tool
    return commands


def instead_of(arguments: Sequence[str]) -> tuple[str, str, str] | None:
    """Return (words of another tool at the start of a command line, our command, the tool); None without any."""
    commands = load_commands()
    terms = [argument.partition("=")[0].lower() for argument in arguments[:WORDS_MAX]]
    for count in range(len(terms), 0, -1):
        name = " ".join(terms[:count])
        if name in commands:
            return name, *commands[name]
    return None
