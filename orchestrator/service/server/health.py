"""What is wrong around a service now, in one sentence each, for probes and people."""

from __future__ import annotations

from collections.abc import Callable


class Health:
    """The problems that its sources tell. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], str | None]] = []

    def watch(self, source: Callable[[], str | None]) -> None:
        """Ask `source` too, which waits for nothing: one sentence, or None while all is well."""
        self._sources.append(source)

    def problems(self) -> list[str]:
        """One sentence for each thing that is wrong now; empty while all is well."""
        return [problem for source in self._sources if (problem := source()) is not None]
