"""The catalogue names the cause of real logs and of public one-line samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.scheduling.signatures import Cause, last_traceback, read_log

REAL_LOGS = Path(__file__).parents[3] / "shared" / "reference" / "failures"

SAMPLES = [
    (Cause.DEVICE_OOM, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total"),
    (
        Cause.DEVICE_OOM,
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 24.00 GiB",
    ),
    (Cause.DEVICE_OOM, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (Cause.DEVICE_OOM, "RuntimeError: CUDA error: out of memory"),
    (Cause.DEVICE_OOM, "torch.OutOfMemoryError: Allocation on device "),
    (Cause.DEVICE_OOM, "RuntimeError: HIP out of memory. Tried to allocate 2.00 GiB"),
    (Cause.DEVICE_OOM, "torch.distributed.DistBackendError: NCCL error: Cuda failure 2 'out of memory'"),
    (Cause.DEVICE_OOM_SUSPECT, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    (Cause.SHARED_MEMORY, "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible"),
    (Cause.SHARED_MEMORY, "ERROR: Unexpected bus error encountered in worker. insufficient shared memory (shm)."),
    (Cause.HOST_OOM, "terminate called after throwing an instance of 'std::bad_alloc'"),
    (Cause.HOST_OOM, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 512. GiB for an array"),
    (Cause.HOST_OOM, "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    (Cause.HOST_OOM_SUSPECT, "CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>."),
    (Cause.NOT_OOM, "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."),
    (Cause.HANG, "Deadlock detector timed out, last stage was init"),
    (Cause.SECONDARY, "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE"),
    (Cause.DISK_FULL, "OSError: [Errno 28] No space left on device"),
    (None, "ValueError: Output directory (x) already exists and is not empty."),
    (None, "# limit batch size to avoid CUDA OOM"),
    (None, "peak memory 12.3 GiB, out of 24 GiB"),
]


@pytest.mark.parametrize(("cause", "line"), SAMPLES, ids=[line[:40] for _, line in SAMPLES])
def test_names_the_cause_of_a_line(cause: Cause | None, line: str) -> None:
    match = read_log(line)
    assert (match.cause if match else None) == cause


@pytest.mark.skipif(not REAL_LOGS.is_dir(), reason="the corpus of real failure logs is not beside this checkout")
def test_names_the_cause_of_every_real_log() -> None:
    wrong = []
    for path in sorted(REAL_LOGS.glob("*.log")):
        expected = path.name.split("--")[0]
        match = read_log(path.read_text(errors="replace"))
        found = match.cause.value if match else "user_error"
        if found != expected:
            wrong.append(f"{path.name}: {found} ({match.line if match else ''})")
    assert not wrong


def test_source_quoted_by_a_traceback_names_nothing() -> None:
    log = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    except torch.cuda.OutOfMemoryError:
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^
KeyError: 'labels'
"""
    assert read_log(log) is None


def test_an_echoed_command_names_nothing() -> None:
    command = ("python", "train.py", "--note", "CUDA out of memory. Tried to allocate")
    assert read_log(f"running {' '.join(command)}\nValueError: no\n", command) is None


def test_shows_the_last_traceback_only() -> None:
    head = "Traceback (most recent call last):\n"
    assert last_traceback(f"{head}  first\nKeyError: 1\nretrying\n{head}  second\nE: 2") == f"{head}  second\nE: 2"
