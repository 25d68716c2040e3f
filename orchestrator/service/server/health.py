"""Present problems of a service, in one sentence each, for probes and people."""

from __future__ import annotations

from collections.abc import Callable


class Health:
    """Present problems from all registered sources. Every method is thread-safe."""

    def __init__(self) -> None:
        self._sources: list[tuple[Callable[[], str | None], bool]] = []

    def watch(self, source: Callable[[], str | None], *, is_fatal: bool = False) -> None:
        """Register a source: a function that returns one sentence at once, or None while all is well.

        No job is accepted while a fatal source has a problem.
        """
        self._sources.append((source, is_fatal))

    def problems(self) -> list[str]:
        """Return one sentence per present problem; [] while all is well."""
        return [problem for source, _ in self._sources if (problem := source()) is not None]

    def failures(self) -> list[str]:
        """Return the problems that prevent accepting jobs; [] while the service is ready."""
        return [
            problem
            for source, is_fatal in self._sources
            if is_fatal and (problem := source()) is not None
        ]
