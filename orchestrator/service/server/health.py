"""Present problems of a service, in one sentence each, for probes and people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Source = Callable[[], str | None]  # one sentence at once, or None while all is well


class Health:
    """Present problems from all registered sources. Every method is thread-safe."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._fatal: list[Source] = []
        self._delaying: list[Source] = []

    def watch(
        self,
        source: Source,
        *,
        is_fatal: bool = False,
        delays_jobs: bool = True,
    ) -> None:
        """Register a source.

        No job is accepted while a fatal source has a problem. A problem that delays jobs stands in the reason of those
        that wait; a notice that reaches nobody delays none.
        """
        self._sources.append(source)
        if is_fatal:
            self._fatal.append(source)
        if delays_jobs:
            self._delaying.append(source)

    def problems(self) -> list[str]:
        """Return one sentence per present problem; [] while all is well."""
        return _sentences_of(self._sources)

    def delays(self) -> list[str]:
        """Return the problems for which jobs may wait."""
        return _sentences_of(self._delaying)

    def failures(self) -> list[str]:
        """Return the problems that prevent accepting jobs; [] while the service is ready."""
        return _sentences_of(self._fatal)


def _sentences_of(sources: Sequence[Source]) -> list[str]:
    return [problem for source in sources if (problem := source()) is not None]
