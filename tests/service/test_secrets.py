"""A secret planted in every place that takes one is found nowhere: real service, Ray, ranks and MLflow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.service.test_reach import Machine

OF_A_JOB = "planted-of-a-job-4711"
HAS_IT = "it-is-in-the-environment"
JOB = """\
name: {name}
command: {python} -c "import os, pathlib, time; print('{has_it}' if os.environ['PLANTED'] else ''); {then}"
secrets: [PLANTED]
global_batch_size: 1
probe: never
"""
WAITS = "[time.sleep(0.1) for _ in range(1500) if not pathlib.Path('{go}').exists()]"
LEAKS = "raise ValueError(os.environ['PLANTED'])"


def processes() -> dict[str, bytes]:
    """Command lines of all processes by id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found[process.name] = (process / "cmdline").read_bytes()
        except OSError:
            continue
    return found


@pytest.mark.long
def test_a_secret_is_in_no_journal_log_record_answer_or_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 s. A program that prints its secret has it in the folder of its own attempt, and there alone."""
    monkeypatch.setenv("PLANTED", OF_A_JOB)
    here, go = Machine(folder=tmp_path / "here"), tmp_path / "go"
    here.folder.mkdir()
    for name, then in (("keeps", WAITS.format(go=go)), ("leaks", LEAKS)):
        file = here.folder / f"{name}.yaml"
        file.write_text(JOB.format(name=name, python=sys.executable, has_it=HAS_IT, then=then))
    here.orc("up", "--log-format", "json")
    try:
        here.orc("user", "set", "ada", "--role", "member")
        token = here.orc("token", "create", "ada")["secret"]
        home = here.folder / "home"
        planted = [OF_A_JOB, token, (home / "token").read_text()]
        kept, leaked = here.orc("submit", str(here.folder / "keeps.yaml"), str(here.folder / "leaks.yaml"))["ids"]
        log = home / "jobs" / kept / "attempts" / "1" / "rank0.log"
        for _ in range(60):
            answers = [here.orc("show", job_id) for job_id in (kept, leaked)]
            if answers[1]["status"] == "failed" and log.exists() and HAS_IT in log.read_text():
                break
        else:
            pytest.fail(f"they did not come so far: {answers}")
        shown = [*answers, here.orc("queue"), here.orc("explain", leaked), here.orc("audit"), here.orc("token", "list")]
        for secret in planted:
            assert not [pid for pid, command in processes().items() if secret.encode() in command]
            assert secret not in json.dumps(shown)
        go.touch()
    finally:
        here.orc("down", "--force")
    own = home / "jobs" / leaked / "attempts" / "1"
    files = [path for path in home.rglob("*") if path.is_file() and own not in path.parents]
    files.remove(home / "token")
    assert {"journal.sqlite", "service.log"} <= {path.name for path in files}
    for secret in planted:
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
