"""Present problems of a service, in one sentence each, for probes and people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Source = Callable[[], str | None]  # one sentence at once, or None while all is well


class Health:
    """What is wrong with the service now, from all sources of problems. Every method is
    thread-safe.
    """

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._fatal: list[Source] = []
        self._delaying: list[Source] = []

    def register_source(
        self,
        find_problem: Source,
        *,
        is_fatal: bool = False,
        delays_jobs: bool = True,
    ) -> None:
        """Register a function that returns a problem as a sentence, or None.

        No job is accepted while a fatal source has a problem. A problem that delays jobs is added
        to the reasons of waiting jobs; one that only concerns notices delays none.
        """
        self._sources.append(find_problem)
        if is_fatal:
            self._fatal.append(find_problem)
        if delays_jobs:
            self._delaying.append(find_problem)

    def list_problems(self) -> list[str]:
        """Return one sentence per problem of the service now; [] while all is well."""
        return _list_problems(self._sources)

    def list_delays(self) -> list[str]:
        """Return the problems for which jobs may have to wait now; [] without any."""
        return _list_problems(self._delaying)

    def list_failures(self) -> list[str]:
        """Return the problems for which no job is accepted now; [] while the service is ready."""
        return _list_problems(self._fatal)


def _list_problems(sources: Sequence[Source]) -> list[str]:
    return [problem for source in sources if (problem := source()) is not None]
