"""The catalogue names the cause of every failure of the corpus, and of no line that only mentions memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

import pytest

from orchestrator.backends.attempts.left_files import LINE_BYTES_MAX
from orchestrator.scheduling.failures.log_scan import (
    CALM_LINES,
    LogScan,
    extract_last_traceback,
    find_log_findings,
)
from orchestrator.scheduling.failures.signatures import (
    NEEDLES,
    RULES,
    TELLING,
    find_cause_in_catalogue,
    find_extent_of_hardware_error,
    may_name_failure,
)
from orchestrator.specs.attempt import Cause, Extent, Finding, Phase
from tests.scheduling.corpus import ORDINARY, REAL_LOGS, REPORTED, names

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
PINNING = '  File "deepspeed/runtime/zero/stage3.py", line 1, in _create_fp32_partitions\n    pin_memory()'
WATCHDOG = "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE"


def scan(lines: Iterable[str], **fields: Any) -> LogScan:
    read = LogScan(**fields)
    for offset, line in enumerate(lines):
        read.read_line(line, offset)
    return read


def find_cause(text: str) -> Finding | None:
    """The decisive finding of a text, where its cause is known."""
    finding = next(iter(find_log_findings(text)), None)
    return None if finding is None or finding.cause is Cause.RAISED else finding


@pytest.mark.parametrize("reported", REPORTED, ids=names())
def test_names_the_cause_of_a_reported_failure(reported: dict[str, Any]) -> None:
    finding = find_cause(reported["text"])
    assert (finding.cause.value if finding else "user_error") == reported["cause"]
    if finding and "rank" in reported:
        assert finding.rank == reported["rank"]


@pytest.mark.parametrize(
    "reported",
    [report for report in REPORTED if "root_rank" in report],
    ids=lambda report: report["from"],
)
def test_takes_rank_and_exit_code_from_torchruns_summary(reported: dict[str, Any]) -> None:
    read = scan(reported["text"].splitlines())
    assert (read.root_rank, read.root_exit_code) == (
        reported["root_rank"],
        reported["root_exit_code"],
    )


@pytest.mark.parametrize("ordinary", ORDINARY, ids=lambda report: report["text"][:60])
def test_ordinary_lines_name_nothing(ordinary: dict[str, str]) -> None:
    assert find_cause(ordinary["text"]) is None


def test_ordinary_lines_before_a_bug_name_nothing() -> None:
    assert (
        find_cause("\n".join(report["text"] for report in ORDINARY) + "\nKeyError: 'labels'")
        is None
    )


def test_the_corpus_is_large_and_cites_its_sources() -> None:
    assert sum("#" in report["from"] for report in REPORTED) >= 60
    assert len(ORDINARY) >= 40
    assert {report["cause"] for report in REPORTED} == {"user_error", *Cause} - {Cause.RAISED}
    source = re.compile(
        r"[\w.-]+/[\w.-]+#\d+|[^,#]+, .+|reproduced( with .+)?|seen on our cluster|made up"
    )
    assert [report["from"] for report in REPORTED if not source.fullmatch(report["from"])] == []


def test_every_rule_was_seen_at_work() -> None:
    lines = [line for report in REPORTED for line in report["text"].splitlines()]
    unseen = {
        pattern.pattern for _, pattern in RULES if not any(pattern.search(line) for line in lines)
    }
    assert not unseen


def test_no_line_with_a_cause_is_dismissed_unread() -> None:
    lines = [line for report in REPORTED for line in report["text"].splitlines()]
    for needle, (_, rule) in zip(NEEDLES, RULES, strict=True):
        assert any(telling in needle for telling in TELLING), needle
        assert all(
            needle in line and may_name_failure(line) for line in lines if rule.search(line)
        ), needle


def test_no_rule_takes_long_for_any_line_that_is_read() -> None:
    """Each rule reads lines that begin its match repeatedly: no time may grow with the square of the line."""
    length = 8 * LINE_BYTES_MAX
    began_s = time.process_time()
    for needle, (_, rule) in zip(NEEDLES, RULES, strict=True):
        for word in (needle, f"{needle.split()[0]} ", "error ", "alloc ", "cuda ", "a."):
            rule.search((word * length)[:length])
    assert time.process_time() - began_s < 8, "about 1 s where all are linear"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("RuntimeError: CUDA error: out of memory", Cause.DEVICE_OOM),
        (f"{PINNING}\nRuntimeError: CUDA error: out of memory", Cause.HOST_OOM),
        (f"RuntimeError: CUDA error: out of memory\n{PINNING}", Cause.HOST_OOM),
        (f"{PINNING}\n{OOM}", Cause.DEVICE_OOM),
    ],
)
def test_pinned_memory_is_the_hosts_and_pytorchs_allocator_is_the_devices(
    text: str, cause: Cause
) -> None:
    finding = find_cause(text)
    assert finding is not None
    assert finding.cause is cause


@pytest.mark.parametrize(
    ("line", "extent"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Extent.DEVICE),
        ("slurmstepd: error: NVML: Failed to get usage(15): GPU is lost", Extent.DEVICE),
        ("Failed to initialize NVML: Driver/library version mismatch", Extent.NODE),
        ("Error 802: system not yet initialized", Extent.NODE),
    ],
)
def test_a_driver_serves_its_whole_node(line: str, extent: Extent) -> None:
    assert find_cause_in_catalogue(line) is Cause.HARDWARE
    assert find_extent_of_hardware_error(line) is extent


@pytest.mark.skipif(
    not REAL_LOGS.is_dir(), reason="the corpus of real failure logs is not beside this checkout"
)
def test_names_the_cause_of_every_real_log() -> None:
    wrong = []
    for path in sorted(REAL_LOGS.glob("*.log")):
        expected = path.name.split("--")[0]
        finding = find_cause(path.read_text(errors="replace"))
        named = finding.cause.value if finding else "user_error"
        if named != expected:
            wrong.append(f"{path.name}: {named} ({finding.line if finding else ''})")
    assert not wrong


def test_the_earliest_cause_wins_over_louder_ones() -> None:
    later = ["[rank0]: RuntimeError: CUDA error: out of memory"] * 50
    finding = scan(
        [WATCHDOG, "[rank1]: " + "OSError: [Errno 28] No space left on device", *later]
    ).findings[0]
    assert (finding.cause, finding.rank, finding.offset) == (Cause.DISK_FULL, 1, 1)


def test_the_rank_that_torchrun_saw_fail_first_wins_over_an_earlier_line() -> None:
    summary = [
        "Root Cause (first observed failure):",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 7)",
    ]
    finding = scan(["[rank0]: MemoryError: no", f"[rank1]: {OOM}", *summary]).findings[0]
    assert (finding.cause, finding.rank) == (Cause.DEVICE_OOM, 1)


def test_a_cause_outweighs_a_suspicion_and_a_suspicion_outweighs_survivors() -> None:
    suspicion = "RuntimeError: DataLoader worker (pid(s) 26136) exited unexpectedly"
    assert scan([WATCHDOG, suspicion]).findings[0].cause is Cause.HOST_OOM_SUSPECT
    assert scan([WATCHDOG, suspicion, OOM]).findings[0].cause is Cause.DEVICE_OOM


def test_an_exception_that_followed_a_caught_one_is_the_cause() -> None:
    lines = [f"WARNING: {OOM}; skipping batch", "AttributeError: 'NoneType' has no 'data'"]
    assert scan(lines).findings[0].cause is Cause.RAISED


def test_a_complaint_that_the_program_outlived_is_history() -> None:
    steps = [f"step {number}" for number in range(CALM_LINES + 1)]
    assert scan([OOM, *steps]).findings == ()
    assert scan([OOM, *steps, "KeyError: 'labels'"]).findings[0].cause is Cause.RAISED
    assert scan([OOM, *steps, "MemoryError"]).findings[0].cause is Cause.HOST_OOM


def test_tracebacks_however_long_are_no_calm() -> None:
    frames = [
        line for _ in range(CALM_LINES) for line in ('  File "a.py", line 1, in f', "    f()")
    ]
    assert (
        scan([OOM, *frames, "SecondaryError: ncclRemoteError"]).findings[0].cause
        is Cause.DEVICE_OOM
    )


def test_ranks_that_write_into_one_log_keep_their_tracebacks_apart() -> None:
    lines = [
        '[rank0]:   File ".../torch/optim/adamw.py", line 220, in step',
        '[rank1]:   File ".../transformers/trainer.py", line 2515, in evaluation_loop',
        "[rank0]:     adamw(",
        f"[rank1]: {OOM}",
        f"[rank0]: {OOM}",
    ]
    assert {finding.rank: finding.phase for finding in scan(lines).findings} == {
        0: Phase.OPTIMIZER,
        1: Phase.EVALUATION,
    }


def test_memory_stays_bounded_however_many_complain() -> None:
    read = scan(f"[rank{number % 500}]: {OOM}" for number in range(5000))
    assert len(read.findings) <= 8
    assert sum(len(stack.remarks) + len(stack.chain) for stack in read._stacks.values()) <= 1024
    assert len(read._stacks) <= 256


def test_source_quoted_by_a_traceback_names_nothing() -> None:
    log = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    except torch.cuda.OutOfMemoryError: pass
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^
KeyError: 'labels'
"""
    assert find_cause(log) is None


def test_source_quoted_in_a_box_names_nothing() -> None:
    boxed = "│ ❱ 290 │   │   raise MemoryError: no   # OutOfMemoryError: CUDA out of memory. Tried to allocate  │"
    assert find_cause(f"{boxed}\nKeyError: 'labels'") is None


def test_shows_the_traceback_of_the_cause() -> None:
    log = f'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    x = y @ z\n{OOM}\nKeyError: 1'
    finding = find_cause(log)
    assert finding is not None
    assert finding.excerpt == f'  File "train.py", line 3, in f\n    x = y @ z\n{OOM}'


def test_shows_the_last_traceback_only() -> None:
    head = "Traceback (most recent call last):\n"
    assert (
        extract_last_traceback(f"{head}  first\nKeyError: 1\nretrying\n{head}  second\nE: 2")
        == f"{head}  second\nE: 2"
    )
