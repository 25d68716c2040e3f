"""Samples the use of a node and an attempt's devices into a file, named as MLflow's own monitor does."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.backends.attempts.durable import open_to_append, read_json
from orchestrator.backends.attempts.left_files import read_log_tail
from orchestrator.backends.devices.nvml import NvmlDevice
from orchestrator.backends.devices.readers import read_devices
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.frozen import frozen
from orchestrator.specs.metric_row import is_bounded_number, parse_metric_row
from orchestrator.specs.run import AttemptFolder

# until the second sample; then twice as long each time, so that short attempts have some
FIRST_S = 1.0
# Between samples later on: MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL is 10 by default (mlflow 3.17)
EVERY_S = 10.0
PREFIX = "system/"
OF_DEVICE = re.compile(r"/gpu_\d+_utilization_percentage\Z")
SAMPLES_BYTES = 2**21  # of a node's file that are read at an attempt's end: 19 hours of samples
MEGABYTE = 1e6  # as MLflow counts (mlflow/system_metrics/metrics/gpu_monitor.py, 3.17)


@frozen
class Watched:
    """The node, and the attempt's devices on the node, whose use is sampled."""

    node: str
    devices: tuple[int, ...]
    is_alone: bool = True  # the attempt has one node; else the names contain the node
    driver: str = "nvml"  # that reads the devices; "" on virtual ones
    device_ids: tuple[
        DeviceId, ...
    ] = ()  # of all devices of the node, as the driver counts; (): all


class Sampler:
    """Appends samples of processor, memory and device use to `system.<node>.jsonl` in the attempt's
    folder.
    """

    def __init__(self, folder: AttemptFolder, watched: Watched) -> None:
        """Make the sampler; nothing is read before `run`."""
        self._folder = folder
        self._watched = watched
        self._prefix = PREFIX if watched.is_alone else f"{PREFIX}{watched.node}/"
        self._cpu = _read_busy_and_total_ticks()

    def run(self, ranks: Sequence[int], ended: threading.Event) -> None:
        """Take a sample at intervals until the event `ended` is set.

        `ranks` are those of the node, in the order of its devices.
        """
        capacity_bytes = self._read_virtual_capacity_bytes()
        pause_s = FIRST_S
        while not ended.wait(pause_s):
            with suppress(OSError):  # a full disk ends the ranks, not their records
                self.take_sample(ranks, capacity_bytes)
            pause_s = min(2 * pause_s, EVERY_S)

    def take_sample(self, ranks: Sequence[int], virtual_capacity_bytes: int | None) -> None:
        """Append one sample; `virtual_capacity_bytes` is the memory of a virtual device, None on real
        ones.
        """
        numbers = {
            **self._sample_node(),
            **dict(self._iterate_device_samples(ranks, virtual_capacity_bytes)),
        }
        line = {
            "at_s": time.time(),
            **{f"{self._prefix}{name}": round(value, 1) for name, value in numbers.items()},
        }
        with open_to_append(self._folder.system(self._watched.node)) as file:
            file.write(f"{json.dumps(line)}\n".encode())

    def _sample_node(self) -> dict[str, float]:
        before = self._cpu
        self._cpu = _read_busy_and_total_ticks()
        busy, total = (now - then for now, then in zip(self._cpu, before, strict=True))
        total_bytes, available_bytes = read_total_and_available_bytes()
        used_bytes = total_bytes - available_bytes
        return {
            "cpu_utilization_percentage": 100 * busy / max(1, total),
            "system_memory_usage_megabytes": used_bytes / MEGABYTE,
            "system_memory_usage_percentage": 100 * used_bytes / total_bytes,
        }

    def _iterate_device_samples(
        self, ranks: Sequence[int], virtual_capacity_bytes: int | None
    ) -> Iterator[tuple[str, float]]:
        if virtual_capacity_bytes is not None:
            for index, rank in zip(self._watched.devices, ranks, strict=False):
                live_bytes = _read_live_bytes(self._folder.heartbeat(rank))
                if live_bytes is not None:
                    yield f"gpu_{index}_memory_usage_megabytes", live_bytes / MEGABYTE
                    yield (
                        f"gpu_{index}_memory_usage_percentage",
                        100 * live_bytes / virtual_capacity_bytes,
                    )
            return
        for device in read_devices(self._watched.driver, self._watched.device_ids).devices:
            if (
                device.index in self._watched.devices
                and device.error is None
                and device.total_bytes
            ):
                yield from _iterate_device_metrics(device)

    def _read_virtual_capacity_bytes(self) -> int | None:
        try:
            capacity_bytes = read_json(self._folder.guard).get("virtual_capacity_bytes")
        except (OSError, ValueError):
            return None
        return capacity_bytes if isinstance(capacity_bytes, int) and capacity_bytes > 0 else None


def compute_mean_busy_percent(folder: AttemptFolder) -> float | None:
    """Return the percentage of time (0 to 100) in which the attempt's devices ran a kernel, as
    their driver reports.

    The time begins with the first kernel, and each sample counts for the seconds since the one
    before it. None where no sample has this value: virtual devices, MIG, or a training that ended
    within a second. Several processes on one card make it too high (docs/concepts/memory-model.md).
    """
    seconds = busy_s = 0.0
    for path in folder.systems():
        before_s = 0.0
        for line in read_log_tail(path, SAMPLES_BYTES).splitlines():
            row = parse_metric_row(line)
            shares = [row[name] for name in row if OF_DEVICE.search(name)]
            at_s = row.get("at_s", 0.0)
            if at_s <= before_s or not (any(shares) or (shares and before_s)):
                continue
            # Nothing says since when the first sample holds. No later one lasts longer than its pause.
            lasted_s = min(at_s - before_s, 2 * EVERY_S) if before_s else FIRST_S
            before_s = at_s
            seconds += lasted_s * len(shares)
            busy_s += lasted_s * sum(min(max(0.0, share), 100.0) for share in shares)
    if not seconds:
        return None
    return round(busy_s / seconds, 1)


def _iterate_device_metrics(device: NvmlDevice) -> Iterator[tuple[str, float]]:
    name = f"gpu_{device.index}"
    yield f"{name}_memory_usage_megabytes", device.used_bytes / MEGABYTE
    yield f"{name}_memory_usage_percentage", 100 * device.used_bytes / device.total_bytes
    if device.busy_percent is not None:
        yield f"{name}_utilization_percentage", device.busy_percent
    if device.power_w is not None:
        yield f"{name}_power_usage_watts", device.power_w
        if device.power_limit_w:
            yield f"{name}_power_usage_percentage", 100 * device.power_w / device.power_limit_w


def _read_live_bytes(heartbeat: Path) -> int | None:
    try:
        live_bytes = read_json(heartbeat).get("live_bytes")
    except (OSError, ValueError):  # not begun yet
        return None
    return (
        live_bytes
        if isinstance(live_bytes, int) and is_bounded_number("live_bytes", live_bytes)
        else None
    )


def _read_busy_and_total_ticks() -> tuple[int, int]:
    """Return (busy, total) clock ticks of all processors since boot.

    /proc/stat has them as user, nice, system, idle, iowait and others (man 5 proc).
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def read_total_and_available_bytes() -> tuple[int, int]:
    """Return (total, available) bytes of this machine's memory."""
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            sizes[name] = 1024 * int(amount.split()[0])
    return sizes["MemTotal"], sizes["MemAvailable"]
