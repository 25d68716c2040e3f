"""Laws of the kit for a machine with a GPU, on steps that compute nothing; `make gpu-rehearsal` runs the real ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.kit.__main__ import STEPS, steps
from tests.gpu.kit.install import ARCHIVE, join, split
from tests.gpu.kit.runner import LIMITS_MAX_S, RESULTS

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
from pathlib import Path
from tests.gpu.kit.runner import Step, run
run([Step(name=name, limit_s=limit_s, command=(sys.executable, "-c", code))
     for name, limit_s, code in json.loads(sys.argv[1])], Path(sys.argv[2]))
"""
LINES = "from tests.gpu.kit.runner import record\nfor n in range({}): record({{'name': 'x' * 5000, 'n': n}})"
# A process of a session of its own, which outlives its parent, as Ray's and the service's do.
ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open({!r}, "w").write(str(child.pid))
"""


def start(folder: Path, *chosen: tuple[str, float, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN, json.dumps(chosen), str(folder / "log.txt")]
    environment = {**os.environ, RESULTS: str(folder / "results.jsonl"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def command_of(pid: int) -> bytes:
    """Empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_all_steps_end_within_a_call_and_what_was_never_seen_comes_first() -> None:
    assert sum(step.limit_s for step in steps("full")) <= LIMITS_MAX_S
    assert list(STEPS)[:3] == ["install", "ours", "launch"]


def test_a_step_at_its_limit_leaves_its_line_and_the_next_one_runs(tmp_path: Path) -> None:
    never = "import time; print('so far', flush=True); time.sleep(300)"
    chosen = [
        ("stuck", 1.0, never),
        ("broken", 9.0, "raise SystemExit(3)"),
        ("works", 9.0, LINES.format(1)),
    ]
    assert start(tmp_path, *chosen).wait(60) == 0
    stuck, broken, line, works = lines(tmp_path)
    assert (stuck["step"], stuck["ended"], stuck["log"].strip()) == ("stuck", "limit", "so far")
    assert 1.0 <= stuck["wall_s"] < 15.0
    assert (broken["step"], broken["ended"], broken["code"]) == ("broken", "failed", 3)
    assert (line["n"], works["step"], works["ended"]) == (0, "works", "done")


def test_what_a_step_leaves_behind_is_ended_before_the_next(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    alive = f"import os; os.kill(int(open({str(pid)!r}).read()), 0)"
    assert (
        start(tmp_path, ("leaves", 20.0, ORPHAN.format(str(pid))), ("looks", 20.0, alive)).wait(60)
        == 0
    )
    leaves, looks = lines(tmp_path)
    assert (leaves["ended"], leaves["killed"]) == ("done", 1)
    assert "ProcessLookupError" in looks["log"]


@pytest.mark.parametrize("seed", range(3))
def test_whenever_the_kit_is_killed_its_lines_are_whole_and_its_step_ends_with_it(
    seed: int, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    code = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))\n{LINES.format(10**9)}"
    kit = start(tmp_path, ("writes", 60.0, code))
    results = tmp_path / "results.jsonl"
    least_bytes = random.Random(seed).randrange(10**4, 10**6)
    until(lambda: results.exists() and results.stat().st_size >= least_bytes)
    kit.kill()
    kit.wait(10)
    until(lambda: not command_of(int(pid.read_text())))
    written = lines(tmp_path)
    assert [line["n"] for line in written] == list(range(len(written)))
    assert len(written) >= least_bytes // 6000


def test_what_is_split_is_joined_again(tmp_path: Path) -> None:
    content = os.urandom(100_001)
    (tmp_path / ARCHIVE).write_bytes(content)
    folders = [tmp_path / "1", tmp_path / "2"]
    split(tmp_path / ARCHIVE, folders)
    assert not (tmp_path / ARCHIVE).exists()
    join(tmp_path / ARCHIVE, folders)
    assert (tmp_path / ARCHIVE).read_bytes() == content
