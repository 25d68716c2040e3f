"""Commands of other tools, and our command with the same meaning: `synonyms.yaml` has them by tool.

Any other unknown word gets our commands of similar spelling, if any, and `orc --help`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

WORDS_MAX = 3


@cache
def load_our_command_by_foreign_words() -> Mapping[str, tuple[str, str]]:
    """Return {words of another tool's command: (our command, name of that tool)}."""
    from orchestrator.specs.packaged import load_table

    commands = dict[str, tuple[str, str]]()
    for tool, phrases in load_table(__package__, "synonyms").items():
        for name, command in phrases.items():
            commands[name] = command, tool
    return commands


def find_foreign_words_our_command_and_tool(
    arguments: Sequence[str],
) -> tuple[str, str, str] | None:
    """Return (words of another tool's command at the start of the arguments, our command, name of
    that tool).

    None if the arguments begin with no such words.
    """
    commands = load_our_command_by_foreign_words()
    terms = [argument.partition("=")[0].lower() for argument in arguments[:WORDS_MAX]]
    for count in range(len(terms), 0, -1):
        name = " ".join(terms[:count])
        if name in commands:
            return name, *commands[name]
    return None
