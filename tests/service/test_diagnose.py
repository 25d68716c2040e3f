"""`orc diagnose` names the first cause with its place, refuses what is no log, and tells no secret in a case."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts import left_files
from orchestrator.backends.attempts.evidence import (
    Ending,
    collect_evidence,
    make_rank_end,
    write_ending,
)
from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.log_scan import CALM_LINES, LogScan
from orchestrator.scheduling.failures.verdict import add_verdict
from orchestrator.service.commands import diagnose as work
from orchestrator.service.commands.diagnose import diagnose_training
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.attempt import ErrorReport, Heartbeat, NodeDevices
from orchestrator.specs.errors import SpecError
from orchestrator.specs.packaged import load_table
from orchestrator.specs.replace import replace
from orchestrator.specs.run import AttemptFolder, GuardSettings, JobFolder, write_json
from tests.scheduling.corpus import REPORTED, names
from tests.scheduling.factories import attempt, job, script_spec

WATCHDOG = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
BUG = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    x = f()\nRuntimeError: odd\nbye\n'

JOBS = Path(__file__).parents[2] / "jobs"
GUIDE = Path(__file__).parents[2] / "docs/guides/what-happens.md"
ENDS = [
    row.split(" | ")[:2]
    for row in re.findall(r"^\| (.* \| (?:`[a-z_]+`|none) \|.*)", GUIDE.read_text(), re.M)
]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("logs", "exit_codes", "oom_kills", "kind", "place"),
    [
        ((f"step 1\n{WATCHDOG}", f"step 1\nstep 2\n{OOM}\n"), (), 0, "device_oom", ("1.log", 3)),
        ((f"step 1\n{WATCHDOG}",), (-6,), 0, "hung", ("0.log", 2)),
        (("step 1\r" * 50 + "\n" + BUG,), (), 0, "startup", ("0.log", 5)),
        (("step 1\nstep 2\n",), (137,), 1, "host_oom", ("0.log", 2)),
        (("step 1\nstep 2\n",), (143,), 0, "preempted", ("0.log", 2)),
        (("step\n" * 300_000 + f"{OOM}\n",), (), 0, "device_oom", ("0.log", 300_001)),
        (("step 1\n",), (0,), 0, None, (None, None)),
    ],
)
def test_names_the_first_cause_with_its_place(
    tmp_path: Path,
    logs: tuple[str, ...],
    exit_codes: tuple[int, ...],
    oom_kills: int,
    kind: str | None,
    place: tuple[Any, Any],
) -> None:
    paths = [write(tmp_path / f"{rank}.log", text) for rank, text in enumerate(logs)]
    diagnosis = diagnose_training(paths, exit_codes, oom_kills)
    assert diagnosis.kind == kind
    file = None if diagnosis.file is None else Path(diagnosis.file).name
    assert (file, diagnosis.line_number) == place
    assert diagnosis.orc_would
    assert diagnosis.you_can


def test_says_to_mend_the_program_only_where_the_program_is_wrong(tmp_path: Path) -> None:
    advice = {}
    for text in (
        "KeyError: 'labels'",
        "RuntimeError: odd",
        WATCHDOG,
        OOM,
        "No CUDA GPUs are available",
    ):
        diagnosis = diagnose_training([write(tmp_path / "log", text)], (), 0)
        advice[diagnosis.kind] = diagnosis.you_can
    assert {kind for kind, text in advice.items() if "mend the program" in text} == {"user_error"}
    assert len(advice) == len(set(advice.values())) == 5


def test_advice_for_a_run_elsewhere_names_what_anybody_can_do_without_the_service(
    tmp_path: Path,
) -> None:
    advice = diagnose_training([write(tmp_path / "log", OOM)], (), 0).you_can
    for way in ("accumulation", "gradient checkpointing", "8-bit optimizer", "LoRA", "orc init"):
        assert way in advice
    for text in (
        "KeyError: 'labels'",
        "RuntimeError: odd",
        WATCHDOG,
        OOM,
        "No space left on device",
    ):
        advice = diagnose_training([write(tmp_path / "log", text)], (), 0).you_can
        assert not re.search(r"orc retry|submit|degrade|hang_timeout", advice), advice


@pytest.mark.parametrize("content", [None, b"\x7fELF\0\0\1", "a folder"])
def test_what_is_no_log_is_one_error(tmp_path: Path, content: object) -> None:
    path = tmp_path / "log"
    if content == "a folder":
        path.mkdir()
    elif isinstance(content, bytes):
        write(path, content)
    with pytest.raises(SpecError) as error:
        diagnose_training([path], (), 0)
    assert str(path) in str(error.value)


def test_a_name_that_leads_to_no_log_is_one_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    os.mkfifo(tmp_path / "pipe")
    for path in (
        loop,
        tmp_path / "pipe",
        tmp_path / ("x" * 5000),
        Path("~nobody-of-that-name/log"),
        Path("/dev/zero"),
    ):
        with pytest.raises(SpecError, match="LOG"):
            diagnose_training([path], (), 0)


ODD_LOGS = {
    "carriage returns": b"\r" * 20_000_000,
    "line feeds": b"\n" * 20_000_000,
    "short lines": b"\rstep 1/2 " * 4_000_000,
    "after a complaint": f"{OOM}\n".encode() + b"\r\n" * 10_000_000,
    "after a frame of another rank": b'[rank1]:   File "a.py", line 1, in f\n' + b"\r" * 20_000_000,
    "one line": b"x" * 100_000_000,
    "NULs": b"step 1\n" * 2000 + b"\0" * 50_000_000,
    "bytes that are no text": b"\xff\xfe\xc0" * 10_000_000,
    "nothing": b"",
}


@pytest.mark.parametrize("name", ODD_LOGS)
def test_an_odd_log_is_diagnosed_in_two_seconds(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "log", ODD_LOGS[name])
    begun_s = time.process_time()
    diagnosis = diagnose_training([path], (), 0)
    assert time.process_time() - begun_s <= 2.0
    assert (diagnosis.kind, len(diagnosis.line) <= 800) == ("startup", True)


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_are_passed_over_change_no_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Reported failures, each line on its own, amid ordinary lines, and blocks of several sizes."""
    draw = random.Random(seed)
    parts = [draw.choice(REPORTED)["text"] for _ in range(draw.randint(1, 4))]
    for place in range(len(parts), -1, -1):
        fillers = ("step 1\n", "\r", "\r\n", "", "Requested : 2.00 GiB\n", "    source = 1\n")
        parts.insert(
            place,
            "\n" + draw.choice(fillers) * draw.choice((1, 3, CALM_LINES, CALM_LINES + 5, 2000)),
        )
    path = write(tmp_path / "log", "".join(map(str, parts)))
    scan = LogScan(log_name=path.name)
    for offset, line in left_files.iterate_log_lines(path):
        scan.read_line(line, offset)
    expected = make_rank_end(path, 0, 1, scan, scan.findings)
    for block_bytes in (2000, 5000, 16384):
        monkeypatch.setattr(left_files, "BLOCK_BYTES", block_bytes)
        assert work._read_rank_end(path, 0, 1) == expected


FOLLOWED = """step 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in f
[rank1]:     x = source
step 2
Traceback (most recent call last):
  File "b.py", line 2, in g
    y = source
torch.OutOfMemoryError: Allocation on device
    Currently allocated     : 6.89 GiB
    Requested               : 2.00 GiB
    Device limit            : 23.69 GiB
[rank1]:     z = source
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB
RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB
    Requested               : 2.00 GiB
RuntimeError: CUDA error: out of memory
  at
    return tensor.pin_memory()
"""


OF_A_RANK = """[rank1]:   File "a.py", line 1, in f
step 2
[rank1]:     z = source
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB
"""
TOO_LATE = (
    "RuntimeError: CUDA error: out of memory\n" + "step\n" * 5 + "    return tensor.pin_memory()\n"
)


@pytest.mark.parametrize(
    "text",
    [FOLLOWED, OF_A_RANK, TOO_LATE, *(f"{entry['text']}" for entry in REPORTED)],
    ids=["all", "rank", "late", *names()],
)
def test_a_line_that_is_passed_over_by_itself_is_no_part_of_any_complaint(text: str) -> None:
    """The smallest blocks: each line that may be passed over alone is."""
    fed, scan = LogScan(), LogScan()
    for offset, line in enumerate(text.splitlines()):
        fed.read_line(line, offset)
        if not scan.skip_ordinary_lines(f"{line}\n"):
            scan.read_line(line, offset)
    assert (scan.findings, scan.root_rank) == (fed.findings, fed.root_rank)


@pytest.mark.parametrize(("end", "kind"), ENDS, ids=[end[:40] for end, _ in ENDS])
def test_an_end_that_the_guide_shows_has_the_kind_that_it_says(
    tmp_path: Path, end: str, kind: str
) -> None:
    assert len(ENDS) >= 20
    line = "" if end.startswith("exit code") else end.split("`")[1]
    raised = re.match(r"[\w.]*[A-Z]\w+: ", line)
    text = (
        f'Traceback (most recent call last):\n  File "train.py", line 3, in main\n{line}\n'
        if raised
        else f"{line}\n"
    )
    stated = re.search(r"exit code (-?\d+)", end)
    codes = (int(stated[1]) if stated else 1,)
    diagnosis = diagnose_training([write(tmp_path / "log", text)], codes, int("oom_kill" in end))
    assert diagnosis.kind == (None if kind == "none" else kind.strip("`"))


def test_each_log_may_have_an_exit_code_of_its_own_and_a_clean_one_hides_nothing(
    tmp_path: Path,
) -> None:
    ends = {
        f"{OOM}\n": "device_oom",
        "KeyError: 'labels'\n": "user_error",
        WATCHDOG: "hung",
        "OSError: [Errno 28] No space left on device\n": "disk_full",
        "slurmstepd: error: *** STEP 7.0 ON n0 CANCELLED AT 2026-01-01T00:00:00 ***\n": "preempted",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\n": "node_lost",
    }
    for text, kind in ends.items():
        clean = write(tmp_path / "clean.log", "step 1 loss 2.0\nstep 2 loss 1.9\n")
        failed = write(tmp_path / "failed.log", text)
        for codes in ((), (1,), (1, 1), (0, 1)):
            assert diagnose_training([clean, failed], codes, 0).kind == kind, (text, codes)
            assert diagnose_training([failed, clean], tuple(reversed(codes)), 0).kind == kind
    with pytest.raises(SpecError, match="exit code for each log"):
        diagnose_training([clean, failed], (1, 1, 1), 0)


def test_a_log_is_read_after_an_exit_with_0(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log", f'Traceback (most recent call last):\n  File "a.py", line 1\n{OOM}\n'
    )
    assert diagnose_training([path], (0,), 0).kind == "device_oom"
    handled = write(tmp_path / "handled", f"WARNING {OOM}; half of the batch\nstep 1\nstep 2\n")
    assert diagnose_training([handled], (0,), 0).kind is None
    saved = write(
        tmp_path / "told", "step 69\nReceived SIGTERM, finishing the current step\nsaved\n"
    )
    assert diagnose_training([saved], (0,), 0).kind == "preempted"


ERRORS = (
    OOM,
    "KeyError: 'labels'",
    "RuntimeError: odd",
    "requests.exceptions.ConnectionError: refused",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.distributed.DistBackendError: remote process exited or there was a network error",
)


def draw_attempt(draw: random.Random, folder: AttemptFolder, ranks: int) -> Ending:
    """Write what the ranks of an attempt leave, and return what its watcher saw."""
    folder.path.mkdir(parents=True)
    settings = GuardSettings(attempt_folder=str(folder.path), virtual_capacity_bytes=None)
    write_json(folder.guard, settings)
    for rank in range(ranks):
        error = draw.choice(ERRORS)
        text = "step 1\nstep 2\n"
        if draw.random() < 0.3:
            text += f"WARNING {draw.choice(ERRORS)}\n"
        code = draw.choice((0, 1, 1, 1, -9, -15, -6))
        if code == 1:
            text += f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{error}\n'
        folder.log(rank).write_text(text)
        folder.exit_code(rank).write_text(str(code))
        step = draw.choice((0, 4))
        beat = Heartbeat(
            rank=rank,
            step=step,
            steps_done=step,
            step_s=0.1,
            peak_bytes=9,
            phase="forward",
            at_s=1.0,
            torch_version="2",
        )
        write_json(folder.heartbeat(rank), beat)
        if code == 1 and draw.random() < 0.5 and error is not OOM:
            kind = error.partition(":")[0]
            report = ErrorReport(rank=rank, step=step, phase="forward", type=kind, traceback=text)
            write_json(folder.error(rank), report)
    ending = Ending(
        first_ended_rank=draw.choice((None, 0, ranks - 1)),
        host_oom_kills=draw.choice((0, 0, 0, 1)),
        hung_for_s=draw.choice((None, None, None, 60.0)),
    )
    write_ending(folder, ending)
    return ending


@pytest.mark.parametrize("seed", range(30))
def test_the_folder_of_an_attempt_is_judged_as_the_service_judges_it(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 4))
    jobs = JobFolder(tmp_path, "lm-1")
    ending = draw_attempt(draw, jobs.attempt(1), ranks)
    placement = (NodeDevices(node="n0", devices=tuple(range(ranks))),)
    record = job(script_spec(launch="ranks"))
    ended = replace(attempt(), placement=placement, ended_at_s=0.0, launched_at_s=0.0)
    evidence = collect_evidence(record.spec, ended, jobs, ending)
    failure = classify_end(record, ended, evidence)
    if failure is not None:
        failure = add_verdict(record, replace(ended, evidence=evidence), failure, (), ())
    diagnosis = diagnose_training([jobs.attempt(1).path], (), 0)
    if failure is None:
        # the service counts it as a success; only a log that shows an exception is told
        assert diagnosis.kind is None
        return
    assert diagnosis.kind == failure.kind.value
    assert diagnosis.orc_would == work._describe_next_action(failure)
    assert diagnosis.reason == failure.reason


PROJECTS = load_table("orchestrator.service.commands", "projects")
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/{path}", line 480, in main
    forward(batch)
{oom}
"""


@pytest.mark.parametrize("name", PROJECTS)
def test_the_phases_of_a_project_are_those_of_its_job_file(name: str) -> None:
    spec = read_job(JOBS / PROJECTS[name]["job"], to_run=False)
    assert PROJECTS[name]["phases"] == dict(spec.phases)
    assert set(PROJECTS[name]["phases"]) <= set(PROJECTS[name]["levers"])


@pytest.mark.parametrize(
    ("path", "begin", "parts"),
    [
        (
            "parler-tts/training/run_parler_tts_training.py",
            "*** Encode target audio with encodec ***",
            ("Parler-TTS, in its encoding", "--audio_encoder_per_device_batch_size"),
        ),
        (
            "audiocraft/audiocraft/solvers/base.py",
            "Valid | Epoch 1 | 10/100",
            ("MusicGen, in its evaluation", "dataset.valid.batch_size"),
        ),
        ("LatentSync/scripts/train_unet.py", "Steps: 1/9", ("LatentSync, in its training",)),
        ("rvc/train/train.py", "Training epoch: 1", ("RVC, in its training", "-bs")),
        ("someone/else.py", "*** Encode target audio with encodec ***", ("halve the samples",)),
    ],
)
def test_an_out_of_memory_log_of_a_known_project_names_the_phase_and_its_lever(
    path: str, begin: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    log = write(tmp_path / "0.log", f"{begin}\n" + TRACEBACK.format(path=path, oom=OOM))
    diagnosis = diagnose_training([log], [1], 0)
    assert diagnosis.kind == "device_oom"
    assert [part for part in parts if part not in diagnosis.you_can] == [], diagnosis.you_can
