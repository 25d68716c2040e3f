"""Ways in which a foreign trainer misleads about its end, and the correct verdict on each.

The numbers are those of the five seed trainers' known traps: RVC, torchrun and accelerate, MusicGen, LatentSync,
Parler-TTS and Orpheus-TTS.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.log_scan import LogScan
from orchestrator.scheduling.reports.advice import advise_after_failure
from orchestrator.specs.attempt import (
    Attempt,
    Evidence,
    Failure,
    FailureKind,
    OomReport,
    Phase,
    RankEnd,
)
from orchestrator.specs.job_record import Job
from tests.scheduling.factories import MIB, attempt, job, script_spec

GIB = 2**30
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
ECHO = """Traceback (most recent call last):
  File ".../accelerate/commands/launch.py", line 637, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py', '--note', '{note}']' {end}."""
NOTE = "CUDA out of memory. Tried to allocate"


def read(
    text: str, *, command: tuple[str, ...] = (), markers: dict[Phase, str] | None = None
) -> LogScan:
    scan = LogScan(command=command, pattern_by_phase=markers)
    for offset, line in enumerate(text.splitlines()):
        scan.read_line(line, offset)
    return scan


def end_of(text: str, exit_code: int | None = 1, rank: int = 0, **fields: object) -> RankEnd:
    scan = read(text, **fields)  # type: ignore[arg-type]
    return RankEnd(
        rank=rank,
        exit_code=exit_code,
        log_tail=text,
        findings=scan.findings,
        root_rank=scan.root_rank,
        root_exit_code=scan.root_exit_code,
    )


def judged(
    *ends: RankEnd, job_: Job | None = None, attempt_: Attempt | None = None, **fields: object
) -> Failure:
    evidence = Evidence(ranks=ends, **fields)  # type: ignore[arg-type]
    failure = classify_end(
        job_ or job(script_spec()), attempt_ or attempt(), evidence, device_bytes=24 * GIB
    )
    assert failure is not None
    return failure


def torchrun_said(rank: int, exit_code: int) -> str:
    return (
        f"Root Cause (first observed failure):\n[0]:\n  rank      : {rank} (local_rank: {rank})\n"
        + (f"  exitcode  : {exit_code} (pid: 7)\n")
    )


def test_trap_1_rvc_exits_0_after_its_child_ran_out_of_memory() -> None:
    frame = '  File "train.py", line 456, in train_and_evaluate\n    scaler.scale(loss_gen_all).backward()'
    log = f"Process Process-1:\nTraceback (most recent call last):\n{frame}\n{OOM}"
    failure = judged(end_of(log, exit_code=0), missing_artifacts=("assets/weights/NAME.pth",))
    assert (failure.kind, failure.phase) == (FailureKind.DEVICE_OOM, Phase.TRAINING)


@pytest.mark.parametrize(
    ("exit_code", "kills", "kind"),
    [(-9, 1, FailureKind.HOST_OOM), (-9, 0, FailureKind.PREEMPTED), (-7, 0, FailureKind.HOST_OOM)],
)
def test_trap_2_torchruns_own_exit_code_is_1_whatever_happened(
    exit_code: int, kills: int, kind: FailureKind
) -> None:
    failure = judged(end_of(torchrun_said(3, exit_code)), host_oom_kills=kills)
    assert failure.kind is kind
    assert failure.rank in (3, 0)


def test_trap_2_a_crash_under_torchrun_names_rank_and_signal() -> None:
    failure = judged(end_of(torchrun_said(3, -11)))
    assert failure.kind is FailureKind.STARTUP
    assert failure.reason == "rank 3 crashed by SIGSEGV"


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:43189"
ELASTIC = "E1130 08:54:29.6 7 torch/distributed/elastic/multiprocessing/api.py:1002] failed"


@pytest.mark.parametrize(
    ("root", "exit_code", "kind", "reason"),
    [
        (1, 3, FailureKind.STARTUP, "rank 1 exited with code 3: the labels are empty"),
        (1, 1, FailureKind.STARTUP, "rank 1 exited with code 1: the labels are empty"),
        (1, -11, FailureKind.STARTUP, "rank 1 crashed by SIGSEGV"),
        (0, 1, FailureKind.NODE_LOST, "its ranks only complain"),
    ],
)
def test_trap_2_a_rank_that_left_no_error_comes_before_complaints_about_it(
    root: int, exit_code: int, kind: FailureKind, reason: str
) -> None:
    complaint = f"[rank0]: Traceback (most recent call last):\n[rank0]: {GLOO}"
    log = f"the labels are empty\n{complaint}\n{ELASTIC}\n{torchrun_said(root, exit_code)}"
    failure = judged(end_of(log))
    assert failure.kind is kind
    assert failure.reason.startswith(reason)


def test_trap_2_what_torchrun_ended_is_no_cause_beside_the_rank_that_crashed() -> None:
    ended = "  traceback : Signal 15 (SIGTERM) received by PID 29797"
    failure = judged(end_of(f"{ELASTIC}\nFailures:\n[1]:\n{ended}\n{torchrun_said(1, -11)}"))
    assert failure.kind is FailureKind.STARTUP
    assert failure.reason == "rank 1 crashed by SIGSEGV"


def test_trap_2_accelerate_repeats_the_whole_command() -> None:
    echo = ECHO.format(note=NOTE, end="returned non-zero exit status 1")
    command = ("train.py", "--note", NOTE)
    script_job = job(script_spec(command=command))
    for log in (f"KeyError: 'labels'\n{echo}", f"note={NOTE} 1 GiB\nKeyError: 'labels'"):
        assert judged(end_of(log, command=command), job_=script_job).kind is FailureKind.USER_ERROR
    killed = ECHO.format(note=NOTE, end="died with <Signals.SIGKILL: 9>")
    assert (
        judged(end_of(killed, command=command), job_=script_job, host_oom_kills=1).kind
        is FailureKind.HOST_OOM
    )


@pytest.mark.parametrize(
    "line",
    [
        "EOFError: EOF when reading a line",  # input()
        "termios.error: (25, 'Inappropriate ioctl for device')",
        "ClickException: the input device is not a TTY",
    ],
)
def test_a_program_that_asks_a_person_is_not_started_again(line: str) -> None:
    failure = judged(end_of(f"Traceback (most recent call last):\n{line}"))
    assert failure.kind is FailureKind.USER_ERROR or (failure.ending and failure.ending.is_own)


@pytest.mark.parametrize("name", ["SIGTERM: 15", "SIGKILL: 9", "SIGINT: 2"])
def test_trap_2_accelerate_names_the_signal_that_ended_its_rank(name: str) -> None:
    log = f"step 12/20\n{ECHO.format(note=NOTE, end=f'died with <Signals.{name}>')}"
    command = ("train.py", "--note", NOTE)
    failure = judged(end_of(log, command=command), job_=job(script_spec(command=command)))
    assert failure.kind is FailureKind.PREEMPTED


def test_trap_2_deepspeed_repeats_arguments_that_no_job_file_has() -> None:
    arguments = [
        "/usr/bin/python3",
        "-u",
        "train.py",
        "--local_rank=0",
        f"--note={NOTE} 1 GiB",
        "MemoryError: x",
    ]
    echo = f"[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] {arguments} exits with return code ="
    assert judged(end_of(f"{echo} 1")).kind is FailureKind.STARTUP
    assert judged(end_of(f"{echo} -9"), host_oom_kills=1).kind is FailureKind.HOST_OOM
    assert judged(end_of(f"{echo} -9")).kind is FailureKind.PREEMPTED


def test_trap_2_survivors_of_a_gang_name_nobody() -> None:
    survivor = end_of("Signal 15 (SIGTERM) received by PID 28438", exit_code=-15)
    assert judged(survivor, end_of("MemoryError", rank=1)).kind is FailureKind.HOST_OOM


def crowded() -> OomReport:
    return OomReport(
        rank=0,
        step=0,
        phase="",
        requested_bytes=MIB,
        live_bytes=MIB,
        capacity_bytes=24 * GIB,
        foreign_bytes=22 * GIB,
    )


def test_trap_3_memory_that_others_hold_is_no_fault_of_the_plan() -> None:
    finding = replace(read(OOM).findings[0], oom=crowded())
    end = RankEnd(rank=0, exit_code=1, findings=(finding,))
    assert (
        judged(end, attempt_=attempt(allocated_bytes=100 * MIB)).kind
        is FailureKind.MEMORY_CONTENTION
    )
    assert judged(end, attempt_=attempt(allocated_bytes=MIB)).kind is FailureKind.DEVICE_OOM


def test_trap_3_ranks_out_of_step_ask_for_an_exabyte() -> None:
    exabyte = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
    watchdog = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)"
    assert judged(end_of(f"{watchdog}\n{exabyte}")).kind is FailureKind.HUNG
    assert judged(end_of(exabyte)).kind is FailureKind.USER_ERROR


def test_trap_4_audiocrafts_deadlock_detector_kills_itself() -> None:
    log = "Deadlock detector timed out, last stage was train"
    assert judged(end_of(log, exit_code=-9), host_oom_kills=1).kind is FailureKind.HUNG


def test_trap_5_musicgens_ranks_fail_in_files_of_their_own() -> None:
    executor = read("Executor: Worker 3 died, killing all workers").findings
    worker = replace(read(OOM).findings[0], rank=3, log="worker_3.log")
    failure = judged(RankEnd(rank=0, exit_code=1, findings=(worker, *executor)))
    assert (failure.kind, failure.rank) == (FailureKind.DEVICE_OOM, 3)
    assert judged(RankEnd(rank=0, exit_code=1, findings=executor)).kind is FailureKind.NODE_LOST


def test_trap_6_latentsync_swallows_out_of_memory_and_hangs() -> None:
    swallowed = end_of(f"12/24/2025 - INFO - __main__ - {OOM}\nSteps:  3%", exit_code=-9)
    waiting = end_of("Steps:  3%", exit_code=-9, rank=1)
    failure = judged(waiting, swallowed, hung_for_s=600.0)
    assert failure.kind is FailureKind.DEVICE_OOM
    assert "then no training step for 10 min" in failure.reason
    assert judged(waiting, hung_for_s=600.0).kind is FailureKind.HUNG


def test_trap_6_a_hang_long_after_a_batch_was_skipped_is_a_hang() -> None:
    steps = "\n".join(f"step {number}" for number in range(1000))
    assert (
        judged(end_of(f"INFO {OOM}\n{steps}", exit_code=-9), hung_for_s=600.0).kind
        is FailureKind.HUNG
    )


@pytest.mark.parametrize(
    "message",
    [
        # 7
        "ValueError: Output directory (../out) already exists and is not empty. Use --overwrite_output_dir",
        "_pickle.UnpicklingError: Weights only load failed.",  # 12
    ],
)
def test_traps_7_and_12_a_restart_that_its_script_refuses_is_no_memory_failure(
    message: str,
) -> None:
    assert judged(end_of(message)).kind in (FailureKind.USER_ERROR, FailureKind.STARTUP)


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        (["*** Encode target audio with encodec ***"], Phase.ENCODING),
        (
            ["*** Encode target audio with encodec ***", "***** Running training *****"],
            Phase.TRAINING,
        ),
        (["***** Running training *****", "Evaluating - Inference ...: 10%"], Phase.EVALUATION),
    ],
)
def test_trap_15_parler_runs_out_in_three_phases(lines: list[str], phase: Phase) -> None:
    markers = {
        Phase.ENCODING: r"\*\*\* Encode target audio",
        Phase.TRAINING: "Running training",
        Phase.EVALUATION: "Evaluating - ",
    }
    failure = judged(end_of("\n".join((*lines, OOM)), markers=markers))
    assert (failure.kind, failure.phase) == (FailureKind.DEVICE_OOM, phase)


def test_trap_15_the_guard_sees_no_training_in_an_encoding_phase() -> None:
    """The guard calls all before the first step start-up; the program's own marker is better."""
    end = end_of(f"*** Encode target audio\n{OOM}", markers={Phase.ENCODING: "Encode target audio"})
    report = replace(crowded(), phase="startup", foreign_bytes=0)
    assert judged(end, ooms=(report,)).phase is Phase.ENCODING
    assert judged(end, ooms=(replace(report, phase="optimizer"),)).phase is Phase.OPTIMIZER


def test_trap_16_orpheus_runs_out_in_the_optimizer_step() -> None:
    log = f'  File ".../accelerate/optimizer.py", line 178, in step\n    self.optimizer.step(closure)\n{OOM}'
    failure = judged(end_of(log))
    assert (failure.kind, failure.phase) == (FailureKind.DEVICE_OOM, Phase.OPTIMIZER)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (
            "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--old', '6']",
            "'--old', '6'",
        ),
        (
            "omegaconf.errors.ConfigAttributeError: Key 'old' is not in struct\n    full_key: lm.old",
            "full_key: lm.old",
        ),
        (
            "hydra.errors.MissingConfigException: In 'config': Could not find 'solver/old'",
            "'solver/old'",
        ),
    ],
)
def test_an_argument_that_a_program_refuses_is_named_with_what_to_write(
    message: str, name: str
) -> None:
    traceback = (
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{message}'
    )
    failure = judged(end_of(traceback))
    assert name in failure.reason
    assert "write the argument that it names" in advise_after_failure(failure)


def test_choices_that_a_message_lists_stand_in_the_reason() -> None:
    traceback = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
        "ValueError: optimizer must be one of ['adam', 'sgd'], not 'old'"
    )
    assert "one of ['adam', 'sgd']" in judged(end_of(traceback)).reason
