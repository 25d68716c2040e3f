"""The processor time that the tests of a folder may take; a run that takes more fails, though each test passes.

What outlives its test (a service, Ray) counts where the kernel counts for a group of processes (cgroup v1, as root).
Elsewhere only this process and the children that it waited for count, so that a budget holds there, too.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
SLOWEST = 10
# Twice the seconds of two busy cores of 2026-11-28. A folder without a number has OTHERS_S.
BUDGETS_S = {
    "tests": 220.0,
    "tests/backends": 380.0,
    "tests/memory": 210.0,
    "tests/night": 140.0,
    "tests/scheduling": 380.0,
    "tests/service": 870.0,
    "tests/trainers": 180.0,
    "tests/training": 700.0,
}
OTHERS_S = 100.0


class Account:
    """The processor seconds of this run, by test."""

    def __init__(self) -> None:
        self._group: Path | None = ACCOUNTS / f"orc-tests-{os.getpid()}"
        try:
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._group = None
        self.taken_s: dict[str, float] = {}

    def used_s(self) -> float:
        """Return the processor seconds until now."""
        if self._group is not None:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before_s = self.used_s()
        result = yield
        self.taken_s[item.nodeid] = self.used_s() - before_s
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders = self._folders()
        terminalreporter.section(f"{sum(folders.values()):.0f} s of processor time")
        for folder, taken_s in folders.most_common():
            terminalreporter.line(f"{taken_s:7.1f} s of {budget_s(folder):4.0f}  {folder}")
        for test, taken_s in Counter(self.taken_s).most_common(SLOWEST):
            terminalreporter.line(f"{taken_s:7.1f} s  {test}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        over = [folder for folder, taken_s in self._folders().items() if taken_s > budget_s(folder)]
        if over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nover the budget of processor time in tests/budget.py: {', '.join(over)}")

    def pytest_unconfigure(self) -> None:
        if self._group is not None:
            with contextlib.suppress(OSError):  # what outlives the run keeps the group
                (ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
                self._group.rmdir()

    def _folders(self) -> Counter[str]:
        folders: Counter[str] = Counter()
        for test, taken_s in self.taken_s.items():
            folders[str(Path(test.partition("::")[0]).parent)] += taken_s
        return folders


def budget_s(folder: str) -> float:
    """Return the seconds that a folder may take."""
    return BUDGETS_S.get(folder, OTHERS_S)


def pytest_configure(config: pytest.Config) -> None:
    """Count a run of `make test`: what is long, or new cases of a property, has no budget."""
    if "not long" in str(config.option.markexpr):
        config.pluginmanager.register(Account(), "processor time")
