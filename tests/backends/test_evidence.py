"""Evidence from the files of an attempt: whole logs, worker logs, and what their lines say in bytes."""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts.evidence import Ending, collect_evidence, scan_log
from orchestrator.backends.attempts.left_files import CHUNK_BYTES, read_reports
from orchestrator.backends.redaction import mask_evidence
from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.out_of_memory import (
    compute_oom_needed_bytes,
    list_best_oom_reports,
)
from orchestrator.scheduling.options.job_options import count_steps_left
from orchestrator.specs.attempt import (
    Cause,
    ErrorReport,
    Evidence,
    FailureKind,
    Heartbeat,
    Phase,
    RankEnd,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.run import JobFolder, write_json
from orchestrator.training.guard import oom_report
from tests.scheduling.corpus import REPORTED
from tests.scheduling.factories import MIB, attempt, job, script_spec

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of"
    " which 1.00 GiB is free. Process 12 has 20.00 GiB memory in use. Including non-PyTorch memory, this process has"
    " 2.64 GiB memory in use. Of the allocated memory 2.00 GiB is allocated by PyTorch, and 140.00 MiB is reserved by"
    " PyTorch but unallocated."
)
UNITS = {"B": 1, "bytes": 1, "MiB": 2**20, "GiB": 2**30}


def in_bytes(text: str) -> int:
    amount, unit = text.split()
    return round(float(amount) * UNITS[unit])


def left_behind(home: Path, log: str, spec: JobSpec | None = None) -> Evidence:
    jobs = JobFolder(home, "lm-1")
    folder = jobs.attempt(1)
    folder.path.mkdir(parents=True)
    folder.log(0).write_text(log)
    folder.exit_code(0).write_text("1")
    return collect_evidence(spec or script_spec(), attempt(), jobs, Ending())


def test_a_cause_far_from_the_end_of_a_log_is_found(tmp_path: Path) -> None:
    # 360 KB of one traceback: the tail holds nothing else
    frames = '  File "a.py", line 1, in f\n    f()\n' * 10_000
    evidence = left_behind(tmp_path, f"step 1\n{OOM}\n{frames}step failed\n")
    finding = evidence.ranks[0].findings[0]
    assert (finding.cause, finding.log, finding.offset) == (
        Cause.DEVICE_OOM,
        "rank0.log",
        len("step 1\n"),
    )
    assert OOM not in evidence.ranks[0].log_tail


def test_offsets_hold_over_progress_bars_and_endless_lines(tmp_path: Path) -> None:
    before = b"\r1%|#\r" * 1000 + b"x" * (3 * CHUNK_BYTES) + "\n⠋\n".encode() + b"\xff\n"
    (tmp_path / "log").write_bytes(before + OOM.encode() + b"\r\n")
    assert scan_log(script_spec(), tmp_path / "log").findings[0].offset == len(before)


def test_a_log_of_any_size_is_read_in_bounded_memory(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        for number in range(4_000):
            log.write(f"[rank{number % 8}]: step {number} loss {'1.23 ' * 2000}\r")  # 40 MB in all
        log.write(OOM)
    tracemalloc.start()
    findings = scan_log(script_spec(), tmp_path / "log").findings
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert findings[0].cause is Cause.DEVICE_OOM
    assert peak < 8 * CHUNK_BYTES


def test_a_missing_log_names_nothing(tmp_path: Path) -> None:
    assert scan_log(script_spec(), tmp_path / "none").findings == ()


def test_the_programs_own_words_tell_the_phase(tmp_path: Path) -> None:
    spec = script_spec(
        phases={"encoding": r"\*\*\* Encode target audio", "training": "Running training"}
    )
    evidence = left_behind(tmp_path, f"*** Encode target audio with encodec ***\n{OOM}\n", spec)
    assert evidence.ranks[0].findings[0].phase is Phase.ENCODING


def test_trap_5_ranks_of_musicgen_that_write_elsewhere_are_heard(tmp_path: Path) -> None:
    workers = JobFolder(tmp_path, "lm-1").output / "xps" / "2addf911"
    workers.mkdir(parents=True)
    (workers / "worker_1.log").write_text("MemoryError\n")
    (workers / "worker_3.log").write_text(f"{OOM}\n")
    executor = "Executor: Worker 3 died, killing all workers\n"
    evidence = left_behind(
        tmp_path, executor, script_spec(launch="dora", command="dora run -d solver=musicgen")
    )
    first = evidence.ranks[0].findings[0]
    assert (first.cause, first.rank, first.log) == (Cause.DEVICE_OOM, 3, "worker_3.log")
    assert not any(
        rank.log.startswith("worker")
        for rank in left_behind(tmp_path / "2", executor).ranks[0].findings
    )


@pytest.mark.parametrize(
    "reported",
    [report for report in REPORTED if "requested" in report],
    ids=lambda report: f"{report['from']}-{report['requested']}",
)
def test_a_message_is_understood_in_bytes(reported: dict[str, Any]) -> None:
    readers = {
        "requested": oom_report.parse_requested_bytes,
        "capacity": oom_report.parse_capacity_bytes,
        "free": oom_report.parse_free_bytes,
        "allocated": oom_report.parse_allocated_bytes,
        "unallocated": oom_report.parse_unallocated_bytes,
        "foreign": oom_report.parse_foreign_bytes,
    }
    for name, read in readers.items():
        if name in reported:
            count = read(reported["text"])
            assert count == pytest.approx(in_bytes(reported[name]), abs=MIB), name


def test_a_child_without_a_guard_still_calibrates(tmp_path: Path) -> None:
    """The message becomes the attempt's account, as the guard would have reported it."""
    evidence = left_behind(tmp_path, OOM)
    (report,) = list_best_oom_reports(evidence)
    assert (report.requested_bytes, report.live_bytes) == (2 * 2**30, 2 * 2**30)
    assert report.capacity_bytes == in_bytes("23.64 GiB")
    assert compute_oom_needed_bytes(report) == 4 * 2**30


def test_what_a_script_goes_on_from_is_no_longer_left_to_do(tmp_path: Path) -> None:
    spec = script_spec(
        steps=10, resume={"checkpoints": ["checkpoint-*"], "step": r"checkpoint-(\d+)"}
    )
    for step, written in (
        (4, "whole"),
        (6, ""),
        (10, "of the last step, from which nothing goes on"),
    ):
        folder = JobFolder(tmp_path, "lm-1").output / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.bin").write_text(written)
    evidence = left_behind(tmp_path, "killed", spec)
    assert evidence.checkpoint_step == 4
    assert (
        count_steps_left(replace(job(spec), attempts=(replace(attempt(), evidence=evidence),))) == 6
    )
    jobs = JobFolder(tmp_path, "lm-1")
    assert (
        collect_evidence(spec, replace(attempt(), probe=True), jobs, Ending()).checkpoint_step
        is None
    ), "it trains nothing"


def test_evidence_says_whether_the_script_was_given_a_checkpoint(
    tmp_path: Path,
) -> None:
    jobs = JobFolder(tmp_path, "lm-1")
    assert not left_behind(tmp_path, "killed").resumed
    for checkpoint, expected in (
        (str(jobs.output / "checkpoint-12"), True),
        (None, False),
        (12, False),
    ):
        jobs.attempt(1).resume.write_text(json.dumps({"checkpoint": checkpoint}))
        evidence = collect_evidence(script_spec(), attempt(), jobs, Ending())
        assert evidence.resumed == expected


@pytest.mark.parametrize(
    ("saved_s", "hung_for_s", "missing"),
    [(60.0, 600.0, ()), (40.0, 600.0, ("model.pt",)), (40.0, None, ())],
)
def test_a_file_saved_before_the_last_step_is_none_of_what_then_stood_still(
    tmp_path: Path, saved_s: float, hung_for_s: float | None, missing: tuple[str, ...]
) -> None:
    """The model may be that of an epoch before: a program may stand still in its last save."""
    spec = script_spec(steps=10, success={"artifacts": ["model.pt"]})
    jobs = JobFolder(tmp_path, "lm-1")
    jobs.output.mkdir(parents=True)
    (jobs.output / "model.pt").touch()
    os.utime(jobs.output / "model.pt", (saved_s, saved_s))
    beat = Heartbeat(
        rank=0,
        step=10,
        steps_done=10,
        step_s=1.0,
        peak_bytes=0,
        phase="forward",
        at_s=55.0,
        step_at_s=50.0,
    )
    jobs.attempt(1).path.mkdir(parents=True)
    write_json(jobs.attempt(1).heartbeat(0), beat)
    evidence = collect_evidence(spec, attempt(), jobs, Ending(hung_for_s=hung_for_s))
    assert evidence.missing_artifacts == missing


def test_the_newest_files_of_an_output_without_a_checkpoint_are_named(tmp_path: Path) -> None:
    output = JobFolder(tmp_path, "lm-1").output
    output.mkdir(parents=True)
    assert left_behind(tmp_path, "killed").unmatched == ()
    for number in (5, 10, 20, 30, 40):
        (output / f"ckpt_{number}.pt").touch()
        os.utime(output / f"ckpt_{number}.pt", (number, number))
    (output / "line\nfeed").touch()
    (output / ("long" * 50)).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "private.txt").touch()
    (output / "link").symlink_to(tmp_path / "elsewhere")
    jobs = JobFolder(tmp_path, "lm-1")
    names = ("ckpt_10.pt", "ckpt_20.pt", "ckpt_30.pt", "ckpt_40.pt")
    assert collect_evidence(script_spec(), attempt(), jobs, Ending()).unmatched == names
    for changes in ({"resume": {"checkpoints": "ckpt_*"}}, {"workdir": str(tmp_path)}):
        assert (
            collect_evidence(script_spec(**changes), attempt(), jobs, Ending()).unmatched == ()
        ), changes


def test_memory_that_others_hold_is_told_by_text_alone(tmp_path: Path) -> None:
    evidence = left_behind(tmp_path, OOM)
    for predicted, kind in (
        (5 * 2**30, FailureKind.MEMORY_CONTENTION),
        (3 * 2**30, FailureKind.DEVICE_OOM),
    ):
        failure = classify_end(job(script_spec()), attempt(allocated_bytes=predicted), evidence)
        assert failure is not None
        assert failure.kind is kind
        assert "2.00 GiB" in failure.reason


def test_evidence_names_a_secret_that_the_program_printed_and_keeps_all_else() -> None:
    error = ErrorReport(
        rank=0, step=1, phase="training", type="ValueError", traceback="ValueError: hunter2 of cuda"
    )
    ranks = (RankEnd(rank=0, exit_code=1, log_tail="token hunter2\nCUDA out of memory"),)
    evidence = Evidence(ranks=ranks, errors=(error,), launch_error=None, nodes_lost=("node-1",))
    spec = JobSpec(
        name="a", global_batch_size=1, command="x", secrets=("KEY",), env={"DEVICE": "cuda"}
    )
    hidden = mask_evidence(evidence, spec, {"KEY": "hunter2"})
    assert hidden.errors[0].traceback == "ValueError: [KEY] of cuda"
    assert hidden.ranks[0].log_tail == "token [KEY]\nCUDA out of memory", "a variable stays"
    assert mask_evidence(evidence, spec, {}) == evidence


def test_the_types_of_an_exception_are_read_and_bounded(tmp_path: Path) -> None:
    report = {
        "rank": 0, "step": 1, "phase": "forward", "type": "lib.Odd", "traceback": "lib.Odd: odd",
        "bases": ["ValueError", "x" * 10_000, *["E"] * 100],
    }  # fmt: skip
    path = tmp_path / "rank0.error.json"
    path.write_text(json.dumps(report))
    reports = read_reports(ErrorReport, lambda _: path, [0])
    assert reports.problems == ()
    bases = reports.reports[0].bases
    assert (bases[0], len(bases), len(bases[1]) <= 200) == ("ValueError", 16, True)
    path.write_text(json.dumps(report | {"bases": [7]}))
    assert read_reports(ErrorReport, lambda _: path, [0]).reports[0].bases == ()
