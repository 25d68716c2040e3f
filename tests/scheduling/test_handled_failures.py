"""What ended the process decides: drawn logs in which a failure was handled, quoted or counted before the real one."""

from __future__ import annotations

import random

import pytest

from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.specs.attempt import (
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    Heartbeat,
    OomReport,
    RankEnd,
)
from orchestrator.specs.replace import replace
from tests.scheduling.factories import MIB, attempt, job, script_spec
from tests.scheduling.strangers import failure_of

DRAWS = 300
HANDLED = {
    "device memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "host memory": "MemoryError: Unable to allocate 9.2 GiB for an array with shape (1, 2)",
    "a disk": "OSError: [Errno 28] No space left on device: '/tmp/cache/a.arrow'",
    "a device": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "shared memory": "RuntimeError: unable to write to file </torch_81_2>",
    "a hub": "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable",
    "a killer": "earlyoom[845]: low memory! at or below SIGTERM limits: mem 3.00%",
    "a signal": "Received SIGTERM, saving a checkpoint",
    "other ranks": "ncclRemoteError: A call failed possibly due to a network error",
    "a timeout": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
}
# How a program shows what it handles: as a line of its log, a traceback, a quote, a setting, a row or a count.
SHOWN = {
    "a line": "WARNING {text} (going on without it)",
    "an exception": "{text}",
    "a traceback": 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in try_it\n    f()\n{text}',
    "a quote": 'sample 4: "{text}"',
    "a setting": "  on_failure: {text}",
    "a row": "| 3 | {text} | retried |",
    "steps": "{text}\nstep 4 loss 1.0\nstep 5 loss 0.9\nstep 6 loss 0.8",
}
ENDS = {
    "KeyError: 'labels'": FailureKind.USER_ERROR,
    "TypeError: forward() missing 1 required positional argument: 'mask'": FailureKind.USER_ERROR,
    "AttributeError: 'NoneType' object has no attribute 'fit'": FailureKind.USER_ERROR,
    "FileNotFoundError: [Errno 2] No such file or directory: 'b.json'": FailureKind.STARTUP,
    "RuntimeError: the third table is upside down": FailureKind.STARTUP,
    "lib.errors.StrangeError: 7": FailureKind.STARTUP,
}
PREFIXES = ("", "[rank1]: ")


def with_prefix(prefix: str, text: str) -> str:
    return "\n".join(f"{prefix}{line}" for line in text.split("\n"))


def drawn_log(draw: random.Random, end: str) -> str:
    """A log with one to three handled failures, ordinary lines and the traceback of what ended the program."""
    parts = ["Start training"]
    for _ in range(draw.randint(1, 3)):
        text = draw.choice(list(SHOWN.values())).format(text=draw.choice(list(HANDLED.values())))
        parts += [text, *("all is well",) * draw.randint(0, 4)]
    frames = f'  File "/w/{draw.choice("abc")}.py", line {draw.randint(1, 99)}, in work\n    go()'
    parts.append(f"Traceback (most recent call last):\n{frames}\n{end}")
    return with_prefix(draw.choice(PREFIXES), "\n".join(parts))


def test_a_handled_failure_before_an_exception_decides_nothing() -> None:
    draw = random.Random(56)
    for _ in range(DRAWS):
        end, kind = draw.choice(list(ENDS.items()))
        text = drawn_log(draw, end)
        failure = failure_of({"text": text})
        assert failure is not None
        assert (failure.kind, failure.broken) == (kind, None), text
        assert end.partition(":")[0].rpartition(".")[2] in failure.reason, text


@pytest.mark.parametrize("handled", HANDLED)
def test_the_exception_of_another_rank_is_the_cause_of_complaints(handled: str) -> None:
    bug = 'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    f()\nKeyError: 1'
    complaint = "torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error"
    quiet = f"WARNING {HANDLED[handled]}"
    for logs in ([complaint, bug], [bug, complaint], [quiet, bug, complaint], ["step 3", bug]):
        failure = failure_of({"text": logs, "codes": [1] * len(logs)})
        assert failure is not None
        assert failure.kind is FailureKind.USER_ERROR, logs
        assert failure.rank == logs.index(bug)


CAUGHT = OomReport(
    rank=0,
    step=5,
    steps_done=5,
    phase="forward",
    requested_bytes=MIB,
    live_bytes=MIB,
    capacity_bytes=MIB,
)
BEAT = Heartbeat(
    rank=0,
    step=5,
    steps_done=5,
    step_s=0.1,
    peak_bytes=MIB,
    phase="forward",
    at_s=1.0,
    torch_version="2",
)


def judged(**fields: object) -> Failure | None:
    return classify_end(job(script_spec()), attempt(), Evidence(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("accepts", ["recover", "accept"])
def test_an_exception_after_a_caught_out_of_memory_error_is_what_it_is(accepts: str) -> None:
    report = ErrorReport(
        rank=0, step=5, phase="forward", type="KeyError", traceback="KeyError: 'labels'"
    )
    evidence = Evidence(
        ranks=(RankEnd(rank=0, exit_code=1),),
        caught=(CAUGHT,),
        errors=(report,),
        heartbeats=(BEAT,),
    )
    failure = classify_end(job(script_spec(on_caught_oom=accepts)), attempt(), evidence)
    assert failure is not None
    assert (failure.kind, failure.near_limit) == (FailureKind.UNKNOWN, True)
    assert "KeyError: 'labels'" in failure.reason


def test_a_signal_that_ended_the_rank_comes_before_the_error_that_it_caught() -> None:
    end = RankEnd(rank=0, exit_code=-15)
    failure = judged(ranks=(end,), caught=(CAUGHT,), heartbeats=(BEAT,), first_ended_rank=0)
    assert failure is not None
    assert failure.kind is FailureKind.PREEMPTED


@pytest.mark.parametrize(
    ("steps", "signal", "kind"),
    [
        (None, 15, FailureKind.PREEMPTED),
        (100, 2, FailureKind.PREEMPTED),
        (5, 15, None),
        (100, 0, None),
        (None, 0, None),
    ],
)
def test_an_exit_with_0_after_a_signal_is_the_end_only_of_a_complete_training(
    steps: int | None, signal: int, kind: FailureKind | None
) -> None:
    evidence = Evidence(
        ranks=(RankEnd(rank=0, exit_code=0),), heartbeats=(replace(BEAT, signal=signal),)
    )
    failure = classify_end(job(script_spec(steps=steps)), attempt(), evidence)
    assert (None if failure is None else failure.kind) is kind


@pytest.mark.parametrize(
    "line",
    [
        "systemd[1]: train.service: A process of this unit has been killed by the OOM killer.",
        "Container [pid=41,containerID=c_7] is running beyond physical memory limits. Killing container.",
        "systemd-oomd[9]: Killed /user.slice/train.scope due to memory pressure for /user.slice",
        "earlyoom: sending SIGKILL to process 40231 uid 1000: oom_score 1190, VmRSS 27388 MiB",
        "The node was low on resource: memory. Container train was evicted: out of memory",
        "nohang: memory pressure is too high; killing train.py",
    ],
)
@pytest.mark.parametrize("code", [137, -9, 143, 1])
def test_a_killer_in_user_space_is_host_memory(line: str, code: int) -> None:
    failure = failure_of({"text": f"step 3\n{line}", "exit": code})
    assert failure is not None
    assert failure.kind is FailureKind.HOST_OOM


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: Can't allocate 1048576 bytes on device 0",
        "MyError: cuda execution failed with error 2",
        "RuntimeError: ggml: cudaMalloc failed",
        "ValueError: Not enough memory on CUDA device",
        "lib.Exc: VRAM exhausted while loading block 3",
        "RuntimeError: 显存不足",
        "RuntimeError: Critical error in pipeline:\nsomewhere\nCUDA allocation failed",
        "RuntimeError: NPU memory allocation failed",
        "RuntimeError: hipMalloc returned error 2",
        "tensorflow.ResourceExhaustedError: failed to allocate memory [Op:Cast]",
    ],
)
def test_device_memory_is_read_by_its_meaning(message: str) -> None:
    trace = (
        f'Traceback (most recent call last):\n  File "/w/a.py", line 3, in f\n    f()\n{message}'
    )
    failure = failure_of({"text": trace})
    assert failure is not None
    assert failure.kind is FailureKind.DEVICE_OOM


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: device-side assert triggered",
        "ValueError: unknown memory_format for device cuda:0 failed",
        "RuntimeError: Expected all tensors to be on the same device, cuda:0 and cpu",
        "RuntimeError: CUDA error: misaligned address",
    ],
)
def test_an_error_of_a_device_is_not_one_of_its_memory(message: str) -> None:
    failure = failure_of({"text": message})
    assert failure is not None
    assert failure.kind not in (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)


@pytest.mark.parametrize(
    ("bases", "own", "passes"),
    [
        (("ValueError", "Exception"), True, False),
        (("DecodeError", "KeyError", "LookupError", "Exception"), True, False),
        (("ConnectionError", "OSError", "Exception"), False, True),
        (("RuntimeError", "Exception"), False, False),
        ((), False, False),
    ],
)
def test_a_subclass_is_judged_as_its_bases(bases: tuple[str, ...], own: bool, passes: bool) -> None:
    report = ErrorReport(
        rank=0, step=5, phase="forward", type="lib.Odd", traceback="lib.Odd: it is odd", bases=bases
    )
    failure = judged(ranks=(RankEnd(rank=0, exit_code=1),), errors=(report,), heartbeats=(BEAT,))
    assert failure is not None
    assert failure.ending is not None
    assert (failure.ending.is_own, failure.ending.may_pass) == (own, passes)
