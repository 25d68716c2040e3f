"""Laws of `orc launch`: the line as typed, its recovery, its state, its exit."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.service.commands.launch.core import answer_question, judge_last_attempt
from orchestrator.service.commands.launch.records import Records
from orchestrator.service.commands.launch.shown import explain_folder, report_folder, view_folder
from orchestrator.service.demo.run import write_demo_files
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import parse_job
from orchestrator.specs.plan import Plan
from tests import fake_card
from tests.backends.local.lines import ORC, SCRIPT, VIRTUAL, WAIT_S, Line, wait_for
from tests.trainers.driver import Drive, cluster

ANYTHING = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=12
)
FLAGS = st.sampled_from(
    [
        "--batch-size",
        "64",
        "--accumulate=2",
        "--output",
        "x y",
        "--resume",
        ";",
        "|",
        "2>&1",
        "--",
        "-c",
        "*",
        "$HOME",
    ]
)
WATCHER_MIB_MAX = 40
START_CPU_S_MAX = 2.5


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    line = Line(tmp_path)
    monkeypatch.setenv("PATH", line.env["PATH"])
    return line


@given(argv=st.lists(FLAGS | ANYTHING, max_size=8))
@settings(max_examples=25, deadline=None)
def test_what_is_planned_first_is_the_argv_as_typed(
    tmp_path_factory: pytest.TempPathFactory, argv: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("line")
    (folder / "train.py").write_text(SCRIPT)
    request = {"devices": "virtual-1GiB", "dry_run": False, "once": False, "resume": False}
    for command in (["python", "train.py", *argv], ["env", "A=1", "torchrun", "train.py", *argv]):
        answer = answer_question({"request": {**request, "command": command}, "cwd": str(folder)})
        assert [argv for _, argv, _ in answer["ranks"]] == [tuple(command)]


def test_what_runs_is_the_argv_word_for_word(line: Line) -> None:
    argv = [
        "--limit",
        "300",
        ";",
        "|",
        "&&",
        ">",
        "2>&1",
        "<",
        "*",
        "$HOME",
        "a b",
        "'",
        '"',
        "\\",
        "",
        "é\n",
    ]
    assert line.run(*VIRTUAL, "python", "train.py", *argv) == 0
    assert line.argvs == [["train.py", *argv]]


def test_a_line_that_runs_out_goes_on_from_its_checkpoint_with_the_same_batch(line: Line) -> None:
    (line.folder / "out").mkdir()
    older = line.folder / "out/checkpoint-9.pt"  # another training's
    older.write_text("9")
    os.utime(older, (1, 1))
    typed = ["train.py", "--limit", "64"]
    assert line.run(*VIRTUAL, "python", *typed) == 0, line.text
    first, second = line.argvs
    assert first == typed
    assert second[: len(typed)] == typed
    values = dict(zip(second[3::2], second[4::2], strict=True))
    assert int(values["--batch-size"]) * int(values["--accumulate"]) == 256
    assert values["--resume"] == str(line.folder / "out/checkpoint-2.pt")
    ends = [text for text in line.text.splitlines() if text.startswith("[orc] attempt 1 ended")]
    assert len(ends) == 1, line.text
    assert "CUDA out of memory" in ends[0]
    assert "micro_batch_size 256 -> " in ends[0]


def test_a_line_that_was_ended_goes_on_and_a_finished_one_runs_again(line: Line) -> None:
    argv = (*VIRTUAL, "python", "train.py", "--wait", "2")
    process = line.start(*argv)
    wait_for(lambda: "waits" in line.text, "it never waited")
    other = subprocess.run(
        [*ORC, *argv],
        cwd=line.folder,
        env=line.env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (other.returncode, f"process {process.pid}" in other.stderr) == (125, True), other
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak_kib = next(int(text.split()[1]) for text in status.splitlines() if "VmHWM" in text)
    assert peak_kib < WATCHER_MIB_MAX * 1024
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert line.run(*argv) == 0, line.text
    assert "goes on" in line.text
    assert line.argvs[-1][-2:] == ["--resume", str(line.folder / "out/checkpoint-2.pt")]
    assert line.run("--once", *argv) == 0
    assert len(line.argvs) == 2, "a finished line was run once more"
    again = line.start(*argv)
    wait_for(lambda: "waits" in line.text, "a finished line did not begin anew")
    (line.folder / "train.py").write_text(
        SCRIPT.replace("range(step + 1, 5)", "range(step + 1, 6)")
    )
    again.send_signal(signal.SIGKILL)
    again.wait(WAIT_S)
    assert line.argvs[-1] == ["train.py", "--wait", "2"]
    assert line.run("--resume", *argv) == 0, line.text
    assert line.argvs[-1][-1].endswith("checkpoint-2.pt")


def test_a_changed_script_begins_anew(line: Line) -> None:
    argv = (*VIRTUAL, "python", "train.py", "--code", "3")
    assert line.start(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(WAIT_S) == 3
    (line.folder / "train.py").write_text(f"{SCRIPT}#")
    again = line.start(*argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, text = again.communicate(timeout=WAIT_S)
    assert (again.returncode, b"has changed: it begins anew" in text) == (3, True), text
    assert line.argvs == [["train.py", "--code", "3"]] * 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("sh", "-c", "exit 3"), 3),
        (("sh", "-c", "kill -6 $$"), 134),
        (("no-such-program",), 127),
        (("--no-such-option", "true"), 125),
        (("--devices", "virtual-much", "true"), 125),
    ],
)
def test_the_exit_code_is_the_last_attempts_or_says_whose_fault_it_was(
    line: Line, command: tuple[str, ...], code: int
) -> None:
    process = line.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert process.wait(WAIT_S) == code


def test_several_processes_of_a_starter_run_the_command_as_typed(tmp_path: Path) -> None:
    line = Line(tmp_path, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert line.run("python", "train.py", "--code", "4") == 4
    assert line.argvs == [["train.py", "--code", "4"]]
    assert not (tmp_path / ".orc-launch").exists()


def test_keys_of_a_terminal_reach_a_script_that_has_one_of_its_own(line: Line) -> None:
    source = (
        "import sys, time\nprint(sys.stdin.isatty(), sys.stdout.isatty())\nprint('got', input())\n"
    )
    (line.folder / "train.py").write_text(f"{source}time.sleep(100)\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(line.folder)
        os.execve(sys.executable, [*ORC, *VIRTUAL, "python", "train.py"], line.env)
    shown = b""

    def is_shown(text: bytes) -> bool:
        nonlocal shown
        shown += os.read(terminal, 1024)
        return text in shown

    wait_for(lambda: is_shown(b"True True"), "the script was given no terminal")
    os.write(terminal, b"typed\n")
    wait_for(lambda: is_shown(b"got typed"), "the script was given no keys")
    os.write(terminal, b"\x1a")
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "Ctrl-Z did not stop the line"
    os.kill(pid, signal.SIGCONT)
    os.write(terminal, b"\x03")
    wait_for(lambda: is_shown(b"KeyboardInterrupt"), "Ctrl-C did not reach the script")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    os.close(terminal)


def test_a_script_whose_reader_has_gone_ends(line: Line) -> None:
    (line.folder / "train.py").write_text("for number in range(100_000): print('line', number)\n")
    process = line.start(*VIRTUAL, "python", "train.py", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    assert process.wait(WAIT_S) == 1
    assert line.text.count("attempt") == 1, line.text


def test_a_dry_run_says_what_would_run_and_leaves_nothing(line: Line) -> None:
    assert line.run("--dry-run", *VIRTUAL, "python", "train.py") == 0
    assert "attempt 1: python train.py" in line.text
    assert "micro_batch_size by --batch-size" in line.text
    assert (line.argvs, (line.folder / ".orc-launch").exists()) == ([], False)


def test_a_script_without_another_plan_ends_with_its_code_and_flags_that_would_help(
    line: Line,
) -> None:
    source = SCRIPT.replace('p.add_argument("--accumulate", type=int, default=1)\n', "")
    (line.folder / "train.py").write_text(source.replace("{a.accumulate}", "1"))
    assert line.run(*VIRTUAL, "python", "train.py", "--limit", "64") == 1
    assert "what would help: --batch-size 128 (another training" in line.text


@pytest.mark.long
def test_mlflow_gets_a_run_of_each_attempt_unless_the_script_logs_itself(line: Line) -> None:
    from mlflow import MlflowClient  # which takes seconds

    uri = f"sqlite:///{line.folder}/mlflow.db"
    line.env["MLFLOW_TRACKING_URI"] = uri
    assert line.run(*VIRTUAL, "python", "train.py", "--limit", "64") == 0
    runs = MlflowClient(uri).search_runs(["0", "1"])
    assert len(runs) == 3, line.text
    (line.folder / "train.py").write_text(f"if False:\n    import mlflow\n{SCRIPT}")
    assert line.run(*VIRTUAL, "python", "train.py", "--limit", "64") == 0
    assert len(MlflowClient(uri).search_runs(["0", "1"])) == 3


def test_what_comes_before_the_script_costs_little(line: Line) -> None:
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "sys.exit(use.ru_utime + use.ru_stime > float(" + repr(str(START_CPU_S_MAX)) + "))\n"
    )
    argv = [sys.executable, "-c", code, *ORC, *VIRTUAL, "true"]
    assert subprocess.run(argv, cwd=line.folder, env=line.env).returncode == 0


def plans_of(job: Job) -> list[tuple[Plan, str]]:
    """Return each attempt's plan with its outcome."""
    outcomes = [str(attempt.failure.kind) if attempt.failure else "" for attempt in job.attempts]
    return list(zip((attempt.plan for attempt in job.attempts), outcomes, strict=True))


def test_a_line_decides_as_the_service_and_its_records_can_be_read_back(
    line: Line, tmp_path: Path
) -> None:
    command = ["python", "train.py", "--limit", "40"]
    assert line.run(*VIRTUAL, *command) == 0
    (home,) = (line.folder / ".orc-launch").iterdir()
    with (home / "records.jsonl").open("a") as file:
        file.write('{"event": {"type": "fin')  # cut off
    records = Records(home)
    judge_last_attempt(records)
    spec = parse_job(propose_job_file(command, line.folder, {}), "proposal", [("probe", "never")])
    job = Drive(tmp_path / "home", cluster("1GiB", devices=1)).run(spec)
    assert len(job.attempts) > 1
    assert plans_of(records.job) == plans_of(job)
    assert view_folder(line.folder)["status"] == JobStatus.SUCCEEDED
    assert explain_folder(line.folder / "out")["job"]["id"] == records.job.id
    assert report_folder(line.folder, 0.0, time.time()).recovered
    with pytest.raises(SpecError, match="no line ran here"):
        view_folder(line.folder / "..")


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "memory"),
    [
        (["python", "train_bytes.py", "--batch-size", "256", "--data", "corpus/ast.txt"], "256MiB"),
        (["python", "train_bytes.py", "--batch-size", "96", "--data", "corpus/ast.txt"], "64MiB"),
        (["env", "A=1", "python", "train_bytes.py", "--data", "corpus/ast.txt"], "128MiB"),
        (
            ["torchrun", "train_bytes.py", "--batch-size", "256", "--data", "corpus/ast.txt"],
            "256MiB",
        ),
    ],
)
def test_a_line_of_a_trainer_decides_as_the_service(
    line: Line, tmp_path: Path, command: list[str], memory: str
) -> None:
    write_demo_files(tmp_path)
    command = [*command, "--steps", "2", "--output", "out"]
    assert line.run("--devices", f"virtual-{memory}", *command) == 0, line.text
    (home,) = (line.folder / ".orc-launch").iterdir()
    records = Records(home)
    judge_last_attempt(records)
    spec = parse_job(propose_job_file(command, tmp_path, {}), "proposal", [("probe", "never")])
    job = Drive(tmp_path / "home", cluster(memory, devices=1)).run(spec)
    assert len(job.attempts) > 1
    assert plans_of(records.job) == plans_of(job)


CARD_SCRIPT = """
import argparse, os, time, torch
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=32768)
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--wait", action="store_true")
a = p.parse_args()
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(a.accumulate):
    batch = torch.randn(a.batch_size, 1024, device="cuda")
    (model(batch).square().mean() / a.accumulate).backward()
optimizer.step()
print("trained on", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
time.sleep(100 * a.wait)
"""


@pytest.mark.long
def test_a_line_on_a_card_names_it_recovers_there_and_holds_it(line: Line, tmp_path: Path) -> None:
    line.env |= fake_card.environment(tmp_path, [1024, 1024])
    (line.folder / "train.py").write_text(CARD_SCRIPT)
    assert line.run("--devices", "1", "python", "train.py") == 0, line.text
    assert "device 0 = GPU-00000001" in line.text
    assert "attempt 1 ended: rank 0 ran out of device memory" in line.text
    assert "trained on 1" in line.text
    process = line.start("python", "train.py", "--batch-size", "64", "--wait")
    wait_for(lambda: "trained on None" in line.text, "it never trained")
    argv = [*ORC, "--dry-run", "python", "train.py"]
    other = subprocess.run(argv, cwd=line.folder, env=line.env, stderr=subprocess.PIPE, text=True)
    assert f"which process {process.pid} uses too" in other.stderr
    process.terminate()
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
