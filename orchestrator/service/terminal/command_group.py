"""The group of all commands: help in panels, and translation of other tools' commands to ours."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from orchestrator.service.terminal.synonyms import find_foreign_words_our_command_and_tool
from orchestrator.specs.errors import SpecError

# in the order in which help shows them; a command of no panel comes last, under "Others"
PANELS = {
    "Begin": ("demo", "doctor", "up", "down", "open", "init", "launch"),
    "Plan, before anything starts": ("plan", "estimate", "fit", "simulate", "calibrate", "schema"),
    "Submit and follow": (
        "submit",
        "run",
        "queue",
        "show",
        "explain",
        "logs",
        "get",
        "watch",
        "forecast",
    ),
    "Change jobs": ("cancel", "retry", "hold", "release", "suspend", "resume", "update"),
    "Compare and report": ("compare", "report", "diagnose", "rehearse", "replay"),
    "Operate": (
        "drain",
        "teams",
        "join",
        "leave",
        "cluster",
        "purge",
        "backup",
        "restore",
        "notify",
    ),
    "Access": ("login", "logout", "whoami", "user", "token", "audit"),
}
OTHERS = "Others"


class Commands(TyperGroup):
    """The group of all `orc` commands, which shows its help in panels."""

    def __init__(self, **attributes: Any) -> None:
        """Make the group, and assign each command to its panel of the help."""
        super().__init__(**attributes)
        panels = {name: panel for panel, names in PANELS.items() for name in names}
        order = [*panels]
        self.commands = dict(
            sorted(
                self.commands.items(),
                key=lambda item: order.index(item[0]) if item[0] in panels else len(order),
            )
        )
        for name, command in self.commands.items():
            command.rich_help_panel = panels.get(name, OTHERS)  # type: ignore[attr-defined]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; raise SpecError, with a suggestion if
        possible, for an unknown word.
        """
        if self.get_command(ctx, args[0]) is None and (
            answer := find_foreign_words_our_command_and_tool(args)
        ):
            phrase, command, tool = answer
            hint = f"`orc {command}` does here what {phrase} does in {tool}"
            raise SpecError("no command of orc", source="the command line", got=args[0], hint=hint)
        return super().resolve_command(ctx, args)
