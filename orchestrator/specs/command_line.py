"""The types of what a process is started with. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

Argv = tuple[str, ...]  # the words of a command
Env = Mapping[str, str]  # variables by name
