"""A secret planted in every place that takes one is found nowhere: real service, Ray, ranks and MLflow."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest

import orchestrator
from orchestrator.backends.environment import INHERITED, is_secret_name
from orchestrator.backends.redaction import make_hider, mask_evidence, mask_secrets
from orchestrator.service.client.client import Client, read_service_file
from orchestrator.service.client.lifecycle import start_service, stop_service
from orchestrator.service.intake.intake import read_job
from orchestrator.service.server.routes.attempt_files import read_with_secrets_masked
from orchestrator.specs.attempt import Evidence
from tests.backends.ray_jobs import until
from tests.scheduling.world import script
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
    command_lines = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command_lines[process.name] = (process / "cmdline").read_bytes()
        except OSError:
            continue
    return command_lines


OF_THE_SHELL = {
    "HF_TOKEN": "planted-of-the-hub-4712",
    "AWS_SECRET_ACCESS_KEY": "planted-of-the-cloud-4713",
}
SEES = """\
import glob, os
print("environment", *os.environ.items(), flush=True)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print("others", open(path, "rb").read(), flush=True)
    except OSError:
        pass
"""
HIDES = """\
import os, sys
from orchestrator.service.server.own_environment import reexecute_without_secret_variables
reexecute_without_secret_variables()
print(os.environ["HF_TOKEN"], flush=True)
sys.stdin.read()
"""
NOBODY = 65534


def shared_python() -> str:
    """An interpreter that every user of this machine can start; skips the test where there is none."""
    if os.geteuid() != 0:
        pytest.skip("another user's process needs root")
    program = f"import sys; sys.version_info >= (3, 11) or 1 / 0; open({orchestrator.__file__!r})"
    for python in (
        os.path.realpath(sys.executable),
        shutil.which("python3", path="/usr/local/bin:/usr/bin"),
    ):
        with suppress(OSError, subprocess.CalledProcessError, TypeError):
            subprocess.run(
                [python, "-c", program], check=True, user=NOBODY, stderr=subprocess.DEVNULL
            )
            return str(python)
    pytest.skip("no interpreter of Python 3.11 is open to other users")


@pytest.mark.long
def test_a_job_without_secrets_sees_none_of_the_shells_and_nobody_reads_them_of_a_process_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    others = {"MY_SETTING": "passed-on", "MY_KEY": "not-passed-on", "OTHER": "neither"}
    for name, text in {**OF_THE_SHELL, **others}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("ORC_MLFLOW", "http://127.0.0.1:1")
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        Path("clusters/two-virtual-devices.yaml").read_text() + "\ninherit_env: [MY_*]\n"
    )
    (tmp_path / "sees.py").write_text(SEES)
    texts = {}
    start_service(home, cluster, None)
    try:
        for name, rest in (("sees", ""), ("names", "secrets: [HF_TOKEN]\n")):
            file = tmp_path / f"{name}.yaml"
            command = f"name: {name}\ncommand: {sys.executable} sees.py\nglobal_batch_size: 1\nprobe: never\ngpus: 1\n"
            file.write_text(command + rest)
            with closing(Client(home)) as client:
                job_id = client.submit_job(read_job(file).model_dump(mode="json"))
                until(
                    lambda job_id=job_id: (
                        client.fetch_job_and_version(job_id)[0]["status"] == "succeeded"
                    ),
                    f"the end of {name}",
                    120.0,
                )
                log = (home / "jobs" / job_id / "attempts" / "1" / "rank0.log").read_text()
                texts[name] = log, client.read_log_and_offset(job_id, 1, 0, 0)[0]
        log, shown = texts["sees"]
        assert "('PATH', " in log
        assert "('MY_SETTING', 'passed-on')" in log
        assert not [
            word for word in (*OF_THE_SHELL.values(), "not-passed-on", "neither") if word in log
        ]
        log, shown = texts["names"]
        assert OF_THE_SHELL["HF_TOKEN"] in log, "it is what the job named"
        assert f"('HF_TOKEN', '{'*' * len(OF_THE_SHELL['HF_TOKEN'])}')" in shown.decode()
        service = Path(f"/proc/{read_service_file(home)['pid']}/environ").read_bytes()
        assert b"PATH=" in service
        assert not [word for word in OF_THE_SHELL.values() if word.encode() in service]
    finally:
        stop_service(home, force=True)


def test_a_process_that_hides_its_environment_is_closed_to_others_of_its_user() -> None:
    python = shared_python()
    root = str(Path(orchestrator.__file__).parents[1])
    variables = {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1", **OF_THE_SHELL}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    with subprocess.Popen([python, "-c", HIDES], env=variables, **user, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == f"{OF_THE_SHELL['HF_TOKEN']}\n"
        environ = Path(f"/proc/{process.pid}/environ")
        assert not [word for word in OF_THE_SHELL.values() if word.encode() in environ.read_bytes()]
        for file in (environ, environ.with_name("mem")):
            read = subprocess.run(["cat", str(file)], **user, capture_output=True, text=True)
            assert "Permission denied" in read.stderr
        process.stdin.close()
        assert process.wait(30) == 0


def test_a_child_of_the_service_never_inherits_its_environment_unasked() -> None:
    """What the service keeps in memory would be its child's: each starts with an environment of its own."""
    package = Path(orchestrator.__file__).parent
    calls = [
        f"{file.relative_to(package)}:{call.lineno}"
        for folder in ("backends", "service/server", "service/client", "service/intake")
        for file in (package / folder).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("subprocess.Popen", "subprocess.run")
        if not any(word.arg == "env" for word in call.keywords)
    ]
    assert [where.partition(":")[0] for where in calls] == [
        "backends/local/watch.py",
        "service/client/lifecycle.py",
    ], "the core of `orc launch` and the service itself, of a user"


def test_a_secret_is_hidden_wherever_a_reader_begins_and_offsets_stay(tmp_path: Path) -> None:
    path, secret = tmp_path / "rank0.log", b"planted-of-the-hub-4712"
    text = b"before " + secret + b" after " + secret[:9]
    path.write_bytes(text)
    whole = read_with_secrets_masked(path, 0, [secret])
    assert whole == b"before " + b"*" * len(secret) + b" after " + b"*" * 9
    assert all(
        read_with_secrets_masked(path, offset, [secret]) == whole[offset:]
        for offset in range(len(text))
    )
    assert mask_secrets(b"plan", [secret]) == b"****"
    assert mask_secrets(b"pla", [secret]) == b"pla"


def test_what_is_named_like_a_secret_is_hidden_in_evidence_and_records_though_no_job_names_it() -> (
    None
):
    spec = script("lm", gpus=1, env={"MY_TOKEN": "planted-of-a-job-4714", "MODE": "offline-or-not"})
    environment = {**OF_THE_SHELL, "API_KEY": "test", "MY_SETTING": "passed-on"}
    printed = f"test {OF_THE_SHELL['HF_TOKEN']} planted-of-a-job-4714 passed-on offline-or-not"
    hidden = mask_evidence(Evidence(launch_error=printed), spec, environment)
    assert hidden.launch_error == "test [HF_TOKEN] [MY_TOKEN] passed-on offline-or-not"
    assert (
        make_hider(spec, environment)(printed) == "test [HF_TOKEN] [MY_TOKEN] passed-on [MODE]"
    ), "records hide all of `env`"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "PGPASSWORD",
        "WANDB_API_KEY",
        "MY_CREDENTIALS",
        "GITHUB_PAT",
    ],
)
def test_a_variable_is_a_secret_by_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "KEYBOARD", "MONKEYS"]
)
def test_a_variable_of_another_name_is_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.long
def test_a_secret_is_in_no_journal_log_record_answer_or_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 s. A program that prints its secret has it in the folder of its own attempt, and there alone."""
    monkeypatch.setenv("PLANTED", OF_A_JOB)
    here, go = Machine(folder=tmp_path / "here", mlflow=None), tmp_path / "go"
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
        keeper, leaked = here.orc(
            "submit", str(here.folder / "keeps.yaml"), str(here.folder / "leaks.yaml")
        )["ids"]
        log = home / "jobs" / keeper / "attempts" / "1" / "rank0.log"
        for _ in range(60):
            answers = [here.orc("show", job_id) for job_id in (keeper, leaked)]
            if answers[1]["status"] == "failed" and log.exists() and HAS_IT in log.read_text():
                break
        else:
            pytest.fail(f"they did not come so far: {answers}")
        shown = [
            *answers,
            here.orc("queue"),
            here.orc("explain", leaked),
            here.orc("audit"),
            here.orc("token", "list"),
        ]
        for secret in planted:
            assert not [pid for pid, command in processes().items() if secret.encode() in command]
            assert secret not in json.dumps(shown)
        go.touch()
    finally:
        here.orc("down", "--force")
    attempt_folder = home / "jobs" / leaked / "attempts" / "1"
    files = [
        path for path in home.rglob("*") if path.is_file() and attempt_folder not in path.parents
    ]
    files.remove(home / "token")
    assert {"journal.sqlite", "service.log"} <= {path.name for path in files}
    for secret in planted:
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []


def test_the_documented_list_is_what_jobs_inherit() -> None:
    page = Path(__file__).parents[2] / "docs" / "security.md"
    table = page.read_text().partition("## What a job inherits")[2].partition("\n\n`env`")[0]
    listed = set(re.findall(r"`([^`]+)`", table))
    assert listed | {name.upper() for name in listed if name.endswith("_proxy")} == set(INHERITED)
