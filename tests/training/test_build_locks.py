"""Laws of build locks, on real processes: a lock lives as long as its holder, and one process at a time has it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

GUARDED = "from orchestrator.training.guard import build_locks; build_locks.install_build_locks()\n"
BEGIN = "from torch.utils.file_baton import FileBaton\nimport sys, time\nb = FileBaton(sys.argv[1], 0.05)\n"
HOLD = "assert b.try_acquire()\nprint('held', flush=True)\nsys.stdin.readline()\nb.release()\n"
TRY = "print(b.try_acquire(), flush=True)\nsys.stdin.readline()\n"
WAIT = "print('waits', flush=True)\nb.wait()\nprint('free', flush=True)\n"
BOUND_S = 60.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path):
    processes: list[subprocess.Popen[str]] = []

    def start_one(code: str, *, guarded: bool = True) -> subprocess.Popen[str]:
        program = (GUARDED if guarded else "") + BEGIN + code
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate(timeout=BOUND_S)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lock_of_a_killed_build_goes_to_the_next_one(start: Start, guarded: bool) -> None:
    holder = start(HOLD, guarded=guarded)
    assert line_of(holder) == "held"
    holder.kill()
    holder.wait(BOUND_S)
    began_s = time.monotonic()
    assert line_of(start(TRY)) == "True"
    assert time.monotonic() - began_s < BOUND_S / 2


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lock_of_a_live_build_is_respected_and_waited_for(start: Start, guarded: bool) -> None:
    holder = start(HOLD, guarded=guarded)
    assert line_of(holder) == "held"
    assert line_of(start(TRY)) == "False"
    waiter = start(WAIT)
    assert line_of(waiter) == "waits"
    holder.communicate("\n", timeout=BOUND_S)
    assert line_of(waiter) == "free"


@pytest.mark.long
def test_who_waits_for_a_build_that_is_killed_ends_with_a_reason(start: Start) -> None:
    holder = start(HOLD)
    assert line_of(holder) == "held"
    waiter = start(WAIT)
    assert line_of(waiter) == "waits"
    holder.kill()
    holder.wait(BOUND_S)
    _, errors = waiter.communicate(timeout=BOUND_S)
    assert waiter.returncode == 1
    assert "was killed: start it again" in errors


@pytest.mark.long
def test_of_several_that_find_a_left_lock_one_gets_it(start: Start) -> None:
    holder = start(HOLD)
    assert line_of(holder) == "held"
    holder.kill()
    holder.wait(BOUND_S)
    contenders = [start(TRY) for _ in range(4)]
    assert sorted(map(line_of, contenders)) == ["False"] * 3 + ["True"]
