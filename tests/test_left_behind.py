"""The law of a night: what one job leaves behind ends that job as its training ended, and stops nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import COMMAND_S

PATIENCE_S = 240.0
MEANWHILE_S = 60.0
TRAIN = """\
import os, pathlib, sys, time
mode, output = sys.argv[1:3]
pathlib.Path(output, "model.pt").write_text("weights")
print("A" + "a" * 45 + "!")
poison = {"nan": '{"rank": 0, "step": 1, "steps_done": 1, "step_s": NaN, "peak_bytes": 1, "phase": "x", "at_s": 1}',
          "deep": "[" * 200000, "long": '"' + "x" * 5000000}
if mode in poison:
    heartbeat = pathlib.Path(os.environ["ORC_GUARD"]).with_name("rank0.heartbeat.json")
    for _ in range(20):
        heartbeat.write_text(poison[mode])
        time.sleep(0.1)
"""
JOB = """\
name: {name}
command: [{python}, {folder}/train.py, {mode}, {out}]
global_batch_size: 2
gpus: 1
probe: never
launch: self
{section}
"""
JOBS = {
    "absolute": ("-", "success: {{artifacts: [{out}/model.pt]}}"),
    "upwards": ("-", "success: {{artifacts: [../absolute/../upwards/model.pt]}}\nworkdir: {out}"),
    "stars": ("-", "success: {{artifacts: ['**t']}}\nworkdir: {out}"),
    "backtracks": ("-", "success: {{log: '(a+)+!$'}}"),
    "nan": ("nan", ""),
    "deep": ("deep", ""),
    "long": ("long", ""),
}


class Service:
    """A service of its own home, by its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"

    def orc(self, *arguments: str, expected: int = 0) -> Any:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("ORC_")}
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", *arguments, "--json"],
            env={**inherited, "ORC_HOME": str(self.home)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert ended.returncode == expected, (arguments, ended.stdout, ended.stderr)
        return json.loads(ended.stdout) if ended.stdout.strip() else None

    def get(self, path: str) -> int:
        port = json.loads((self.home / "service.json").read_text())["port"]
        token = (self.home / "token").read_text()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return int(answer.status)

    def statuses(self) -> dict[str, str]:
        return {job["name"]: job["status"] for job in self.orc("queue")["jobs"]}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    started = Service(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    started.orc("up")
    yield started
    started.orc("down", "--force")


@pytest.mark.long
def test_what_a_job_leaves_behind_stops_nobody(service: Service) -> None:
    folder = service.folder
    for name, (mode, section) in JOBS.items():
        out = folder / name
        out.mkdir()
        text = JOB.format(
            name=name,
            python=sys.executable,
            folder=folder,
            mode=mode,
            out=out,
            section=section.format(out=out),
        )
        (folder / f"{name}.yaml").write_text(text)
    (folder / "unicode.yaml").write_text(
        (folder / "backtracks.yaml").read_text().replace("(a+)+!$", "\\u0041")
    )
    service.orc("submit", str(folder / "unicode.yaml"), expected=2)
    service.orc("submit", *(str(folder / f"{name}.yaml") for name in JOBS))
    (folder / "meanwhile").mkdir()
    (folder / "meanwhile.yaml").write_text(
        (folder / "nan.yaml").read_text().replace("nan", "meanwhile")
    )
    began_s = time.monotonic()
    while set(service.statuses().values()) - {"succeeded", "failed"}:
        assert time.monotonic() - began_s < PATIENCE_S, service.statuses()
        assert [service.get(path) for path in ("/readyz", "/metrics", "/jobs", "/ui/queue")] == [
            200
        ] * 4
    assert service.statuses() == dict.fromkeys(JOBS, "succeeded")
    service.orc("submit", str(folder / "meanwhile.yaml"))
    began_s = time.monotonic()
    while service.statuses()["meanwhile"] != "succeeded":
        assert time.monotonic() - began_s < MEANWHILE_S, service.statuses()
    service.orc("down")
    service.orc("up")
    assert service.get("/readyz") == 200
    assert set(service.statuses().values()) == {"succeeded"}
