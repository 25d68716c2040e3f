"""Take the peaks of `measured/h100-80gb.json` apart again, on the first device of this machine.

    python -m tests.gpu.peaks [NUMBER ...]

Each training is a process of its own. A line of JSON tells its bytes of live tensors at the peak, and those of the
blocks that they are in. Then come the largest allocations, each with the place in the code that asked for it. Needs
torch and transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from orchestrator.training.build import build_recipe
from tests.gpu.configurations import H100, measured_at
from tests.gpu.measure import data_of
from tests.gpu.runs import run_of, train

PLACES = 3  # of the code that are shown for an allocation, the innermost first
LARGEST = 40
EVENTS_MAX = 2_000_000
TIMEOUT_S = 300


def live_at_peak(events: Sequence[Mapping[str, Any]]) -> tuple[int, list[Mapping[str, Any]]]:
    """The most bytes that were asked for and not yet freed, and the allocations that were live then."""
    total = peak = end = 0
    for number, event in enumerate(events):
        total += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        if total > peak:
            peak, end = total, number
    live: dict[int, Mapping[str, Any]] = {}
    for event in events[: end + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return peak, list(live.values())


def take_apart(number: int) -> dict[str, Any]:
    """Run a training in this process; return the parts of its peak."""
    peak = H100["peaks"][number]
    case, device = measured_at(peak), torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = torch.distributed.FileStore(str(folder / "store"), 1)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device
        )
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=EVENTS_MAX
        )
        run = run_of(
            folder,
            device,
            case.plan,
            model=case.model,
            data=data_of(case, folder),
            training=case.training,
        )
        train(run, device, replace(build_recipe(run), initialise=lambda _, values: values.zero_()))
    live_bytes, live = live_at_peak(torch.cuda.memory._snapshot()["device_traces"][0])
    by_place: Counter[str] = Counter()
    for event in live:
        frames = [
            f"{Path(frame['filename']).name}:{frame['line']}"
            for frame in event.get("frames", ())[:PLACES]
        ]
        by_place[" < ".join(frames)] += event["size"]
    totals = {"live_bytes": live_bytes, "blocks_bytes": torch.cuda.max_memory_allocated()}
    return {**peak, **totals, "torch": torch.__version__, "largest": by_place.most_common(LARGEST)}


def main(arguments: Sequence[str]) -> int:
    """0 where every training ended, 2 without a device."""
    if not torch.cuda.is_available():
        print("no CUDA device is here", file=sys.stderr)
        return 2
    if arguments[:1] == ["--one"]:
        print(json.dumps(take_apart(int(arguments[1]))))
        return 0
    wanted = [int(argument) for argument in arguments] or range(len(H100["peaks"]))
    command = [sys.executable, "-m", "tests.gpu.peaks", "--one"]
    ends = [
        subprocess.run([*command, str(number)], timeout=TIMEOUT_S, check=False).returncode
        for number in wanted
    ]
    return max(ends)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
