"""Measure trainings on the first device of this machine, beside what the planner says of them: `make bench-gpu`.

    python -m tests.gpu.measure FILE [--cpu] [--seconds N]

Each training is a process of its own under the guard, as the service starts it, and leaves a line of JSON in FILE; what
FILE holds already is not measured again, so that a run that was cut off goes on. At the end it prints how far the
predictions were off and writes `.bench/gpu.json`. Needs torch, transformers, pydantic and nvidia-smi (LoRA: peft; 8 and
4 bits: bitsandbytes). With `--cpu`: a few small ones on a virtual device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, at_most, informs, say
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.model import DataSpec
from orchestrator.specs.run import OOM_EXIT_CODE, GuardSettings, TrainingRun, write_json
from orchestrator.specs.settings import format_plan
from orchestrator.training.guard import guard
from tests.gpu.configurations import Measurement, on_cpu, on_cuda

ROOT = Path(__file__).parents[2]
TRAINING_TIMEOUT_S = 300  # of one training, its imports and weights
FIGURES = Path(".bench/gpu.json")
RAN, RAN_OUT = OUTCOMES = ("ran", "out of memory")
Line = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """0 where it measured all that there is, 1 where time ran out first, 2 without a device."""
    parser = argparse.ArgumentParser(description="Measure trainings beside their predictions.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no training later than that"
    )
    options = parser.parse_args(arguments)
    kind = DeviceKind.VIRTUAL if options.cpu else DeviceKind.CUDA
    device = device_facts(kind)
    if device is None:
        print("no CUDA device is here: `nvidia-smi` names none", file=sys.stderr)
        return 2
    end_s = time.monotonic() + options.seconds
    todo = [
        case
        for case in (on_cpu() if options.cpu else on_cuda())
        if case.capacity_bytes <= device["total_bytes"]
    ]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    measured_ids = {line["id"] for line in read(options.file)}
    for case in todo:
        if name_of(case) not in measured_ids and time.monotonic() < end_s:
            line = measure_training(case, kind, device)
            say(f"{line['id']}: {line['outcome']}")
            if line["outcome"] in OUTCOMES:
                with options.file.open("a") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
    lines = read(options.file)
    report([*figures(lines), informs("not measured", len(todo) - len(lines), "")])
    return 0 if len(lines) == len(todo) else 1


def name_of(case: Measurement) -> str:
    """Return the name that tells the training from all others."""
    return (
        f"{case.name} {case.sequence_length} {case.capacity_bytes / 2**30:g} GiB "
        f"{format_plan(case.plan)}"
    )


def read(file: Path) -> list[Line]:
    """Return the lines that were measured before."""
    return [json.loads(text) for text in file.read_text().splitlines()] if file.exists() else []


def device_facts(kind: DeviceKind) -> Line | None:
    """Name, bytes and software of the device that is measured; None where there is none."""
    import torch

    versions = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if kind is DeviceKind.VIRTUAL:
        return {"device": "virtual", "total_bytes": 2**50, **versions}
    facts = _smi("name,memory.total,driver_version")
    if facts is None:
        return None
    name, total_mib, driver = facts
    return {"device": name, "total_bytes": int(total_mib) * 2**20, "driver": driver, **versions}


def _smi(fields: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return [field.strip() for field in ended.stdout.split(",")]


def measure_training(
    case: Measurement, kind: DeviceKind, device: Line, timeout_s: float = TRAINING_TIMEOUT_S
) -> Line:
    """Train it in a process of its own: what was predicted, and what it took, so far where time ran out."""
    estimate = case.predict(kind)
    free_mib = _smi("memory.free") if kind is DeviceKind.CUDA else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code, message = _train(case, kind, folder, timeout_s)
        beat, oom = (_read_report(folder / f"rank0.{what}.json") for what in ("heartbeat", "oom"))
    room_bytes = beat.get("allocator_room_bytes")
    overhead = (
        None if room_bytes is None or free_mib is None else int(free_mib[0]) * 2**20 - room_bytes
    )
    outcome = {0: RAN, OOM_EXIT_CODE: RAN_OUT}.get(code, message)
    return {
        "id": name_of(case),
        **device,
        "plan": format_plan(case.plan),
        "optimizer": case.plan.optimizer,
        "precision": case.plan.precision,
        "capacity_bytes": case.capacity_bytes,
        "fits": case.fits(kind),
        "predicted": {
            "allocated_bytes": estimate.allocated_bytes,
            "reserved_bytes": estimate.reserved_bytes,
            "overhead_bytes": estimate.device_bytes - estimate.reserved_bytes,
            "moment": estimate.moment,
        },
        "outcome": outcome,
        "measured": {
            "allocated_bytes": beat.get("peak_bytes"),
            "reserved_bytes": beat.get("reserved_bytes"),
            "overhead_bytes": overhead,
            "step_s": beat.get("step_s"),
        },
        "asked_bytes": oom.get("requested_bytes"),
    }


def data_of(case: Measurement, folder: Path) -> DataSpec:
    """Samples of full length for all its steps. A decoder reads bytes."""
    import numpy as np

    tokens = (
        97
        + np.arange(
            case.plan.global_batch_size * case.steps * case.sequence_length + 1, dtype=np.uint16
        )
        % 23
    )
    if case.model.decoder is not None:
        tokens.astype(np.uint8).tofile(folder / "text.txt")
        return DataSpec(text=(str(folder / "text.txt"),), sequence_length=case.sequence_length)
    np.save(folder / "tokens.npy", tokens)
    return DataSpec(tokens=(str(folder / "tokens.npy"),), sequence_length=case.sequence_length)


def _train(case: Measurement, kind: DeviceKind, folder: Path, timeout_s: float) -> tuple[int, str]:
    run = TrainingRun(
        model=case.model,
        data=data_of(case, folder),
        training=case.training,
        plan=case.plan,
        job_folder=str(folder),
        attempt_folder=str(folder),
        epoch=1,
        device="cuda" if kind is DeviceKind.CUDA else "cpu",
    )
    write_json(folder / "run.json", run)
    cap_bytes = case.allocator_bytes(kind) if kind is DeviceKind.VIRTUAL else None
    settings = GuardSettings(
        attempt_folder=str(folder), virtual_capacity_bytes=cap_bytes, heartbeat_interval_s=0.1
    )
    write_json(folder / "guard.json", settings)
    target = ["-m", "tests.gpu.measured_rank", str(folder), str(case.allocator_bytes(kind))]
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "PYTHONPATH": path,
    }
    try:
        ended = subprocess.run(
            [sys.executable, guard.__file__, str(folder / "guard.json"), "--", *target],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not done after {timeout_s:.0f} s"
    return ended.returncode, next(reversed(ended.stderr.strip().splitlines()), "nothing was said")


def _read_report(path: Path) -> Line:
    return json.loads(path.read_text()) if path.exists() else {}


def figures(lines: Sequence[Line]) -> list[Figure]:
    """Return the errors of the predictions, and how often a training that should fit did not."""
    ran = [line for line in lines if line["outcome"] == RAN]
    summary = [informs("trainings that ran", len(ran), "")]
    for what in ("allocated", "reserved", "overhead"):
        off = list(_errors(ran, f"{what}_bytes"))
        if off:
            summary += [
                informs(f"{what}: mean error", statistics.mean(map(abs, off)), "%"),
                informs(f"{what}: furthest below", min(off), "%"),
                informs(f"{what}: furthest above", max(off), "%"),
            ]
    burst = sum(line["fits"] for line in lines if line["outcome"] == RAN_OUT)
    refused = sum(not line["fits"] for line in ran)
    summary.append(at_most("said to fit, ran out of memory", burst, "", 0))
    summary.append(informs("said not to fit, ran", refused, ""))
    return summary


def _errors(ran: Iterable[Line], what: str) -> Iterator[float]:
    """Percent by which the prediction is above what was measured."""
    for line in ran:
        measured_bytes, predicted = line["measured"][what], line["predicted"][what]
        if measured_bytes and predicted:
            yield 100 * (predicted / measured_bytes - 1)


def report(rows: list[Figure]) -> None:
    """Print the figures and write them to FIGURES."""
    for row in rows:
        print(
            f"{row['figure']:40} {row['value']:9.2f} {row['unit']:3} {row['bar']}{'' if row['holds'] else '  NO'}"
        )
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
