"""Tracks an attempt's progress: steps in heartbeats and logs, checkpoints, and the time since the last of these."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.attempts.durable import open_untrusted
from orchestrator.backends.attempts.left_files import read_heartbeats
from orchestrator.backends.attempts.script_output import OWN_ACCESS, FileAccess, find_last_saved_s
from orchestrator.scheduling.failures.meeting import count_unconnected_ranks
from orchestrator.specs.attempt import LEARNED_STEPS, PROBE_STEPS, Heartbeat, Pace
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.patterns import LinePattern, parse_count
from orchestrator.specs.run import AttemptFolder

READ_BYTES_MAX = 4 * 2**20  # of a log at a time: what a rank writes in a tick is less
PACE_STEPS = 10  # before a pace is believed: the first steps compile, warm up and fill caches
ANOTHER_PACE = 1.1  # times as fast or as slow as before: reported, so that ends are expected anew
PROBE_S_MAX = 600.0  # of a probe that shows no step: a real attempt is waiting
LINE_BYTES_MAX = 64 * 1024  # of a line that has not ended
LINE_CHARACTERS_MAX = 16 * 1024  # of a line that are searched for a number
# Of one core, over the limit, before a program without visible steps counts as at work. Training
# keeps a thread
# busy that launches kernels or waits for them; Python that waits for a lock, a socket or a child
# takes below 1 %.
CPU_SHARE = 0.05


@dataclass(slots=True)
class LogCounter:
    """The first and the last number that a pattern has matched in growing logs, such as training
    steps.
    """

    pattern: LinePattern
    first: int | None = None
    last: int | None = None
    _read: dict[Path, tuple[int, bytes]] = field(
        default_factory=dict
    )  # log -> bytes read, and its unended line

    def read_new_lines(self, logs: Sequence[Path]) -> None:
        """Read what was added to each log since the last call, and update the first and last
        number.
        """
        for path in logs:
            offset, rest = self._read.get(path, (0, b""))
            try:
                with open_untrusted(path) as log:
                    log.seek(offset)
                    new = log.read(READ_BYTES_MAX)
            except OSError:
                continue
            *lines, rest = re.split(rb"[\r\n]", rest + new)  # progress bars end their lines by \r
            self._read[path] = (offset + len(new), rest[-LINE_BYTES_MAX:])
            for line in lines:
                text = line[:LINE_CHARACTERS_MAX].decode("utf-8", errors="replace")
                numbers = map(parse_count, self.pattern.list_groups(text))
                for number in numbers:
                    if number is not None:
                        self.last = number
                    if self.first is None:
                        self.first = self.last

    @property
    def first_and_last_number(self) -> tuple[int, int] | None:
        """(first, last) number that the pattern matched; None before the first match."""
        return None if self.first is None or self.last is None else (self.first, self.last)


class Progress:
    """Watchdog of an attempt: detects hangs by the job's time limits, and measures the training speed."""

    def __init__(
        self,
        spec: JobSpec,
        folder: AttemptFolder,
        world_size: int,
        started_ranks: Sequence[int],
        output_path: Path,
        *,
        includes_peak: bool = False,
        file_access: FileAccess = OWN_ACCESS,
    ) -> None:
        """Make the watchdog of an attempt. With `includes_peak`, `find_changed_pace` includes the
        peak memory once, after LEARNED_STEPS.

        `started_ranks` are the ranks whose processes the orchestrator starts itself; `output_path`
        is the script's output folder.
        """
        self._access = file_access
        self._spec = spec
        self._folder = folder
        self._world_size = world_size
        self._output = output_path
        self._logs = [folder.log(rank) for rank in started_ranks]
        self._counter = None if spec.progress is None else LogCounter(LinePattern(spec.progress))
        self._seen: tuple[object, ...] = ()
        self._beats: Sequence[Heartbeat] = ()
        self._sign_cpu_s = 0.0  # processor time at the last sign of life
        self._tells_peak = includes_peak
        self._began_s = self._since_s = time.monotonic()

    @property
    def first_and_last_step(self) -> tuple[int, int] | None:
        """(first, last) number that the job's `progress` pattern matched in the log; None without a match."""
        if self._counter is None:
            return None
        self._counter.read_new_lines(self._logs)
        return self._counter.first_and_last_number

    def find_changed_pace(self, known_step_s: float, at_s: float) -> Pace | None:
        """Return the slowest rank's training speed at the last hang check, if it differs much from
        `known_step_s`.

        None where it differs little, or too few steps are timed. After LEARNED_STEPS of all ranks
        the peak memory is included, unless a rank caught an out-of-memory error.
        """
        timed = [(beat.step_s, beat.steps_done) for beat in self._beats if beat.step_s]
        step_s = max((step_s for step_s, _ in timed), default=0.0)
        steps = min((done for _, done in timed), default=0)
        learns = self._tells_peak and steps >= LEARNED_STEPS and len(timed) == self._world_size
        is_as_before = 1 / ANOTHER_PACE < step_s / max(known_step_s, 1e-9) < ANOTHER_PACE
        if steps < PACE_STEPS or (is_as_before and not learns):
            return None
        peak_bytes = None
        if learns:
            self._tells_peak = False
            caught = any(self._folder.caught(rank).exists() for rank in range(self._world_size))
            peak_bytes = None if caught else max(beat.peak_bytes for beat in self._beats)
        return Pace(steps_done=steps, step_s=step_s, at_s=at_s, peak_bytes=peak_bytes)

    def is_probed(self) -> bool:
        """Return whether every rank of a probe (a short measuring run) has measured its step, or
        the time for the probe is over.
        """
        beats = read_heartbeats(self._folder, self._world_size).reports
        trained = len(beats) == self._world_size and all(
            beat.steps_done >= PROBE_STEPS for beat in beats
        )
        return trained or time.monotonic() - self._began_s > PROBE_S_MAX

    def has_lone_ranks(self) -> bool:
        """Return whether ranks trained without a process group at the last hang check."""
        return count_unconnected_ranks(self._beats) > 0

    def find_hung_for_s(self, devices_idle_s: float, cpu_s: float) -> float | None:
        """Return the seconds without a training step or a checkpoint if they exceed the job's
        limit; None otherwise.

        Steps come from the guard or the log's counter; before the first step, a backward pass
        counts.

        Without a guard and without counted steps, progress is a growing log or processor time
        (`cpu_s`). A device that was idle as long (`devices_idle_s`) overrules both: a loop may
        catch and log every exception. A busy device proves nothing: a rank that waits in a
        collective keeps its device at 100 % (NVIDIA/nccl, src/device: the kernels poll). That rank
        also uses processor time. So this kind of hang is found in guarded programs only; an
        unguarded program that trains must not be ended.
        """
        beats = read_heartbeats(self._folder, self._world_size).reports
        counts = self.first_and_last_step
        self._beats = beats
        steps = sum(beat.steps_done for beat in beats)
        is_watched = (
            any(beat.torch_version for beat in beats) and not self._folder.unwatched.exists()
        )
        is_unseen = counts is None and not steps and not is_watched
        signs: tuple[object, ...]
        if not is_unseen:
            signs = (steps, counts, self._count_backward_passes())
            trains = steps > 0 or counts is not None
        else:
            size = sum(map(_size_bytes, self._logs))
            signs = (size,)
            trains = size > 0
        limit_s = self._spec.hang_timeout if trains else self._spec.startup_timeout
        now_s = time.monotonic()
        at_work = is_unseen and cpu_s - self._sign_cpu_s > CPU_SHARE * limit_s
        if signs != self._seen or at_work:
            self._seen = signs
            self._since_s = now_s
            self._sign_cpu_s = cpu_s
        still_s = max(now_s - self._since_s, devices_idle_s if is_unseen else 0.0)
        if still_s > limit_s:  # only now: looking for a checkpoint is not for every tick
            saved_s = find_last_saved_s(self._spec, self._output, self._access)
            if saved_s is not None:
                still_s = min(still_s, max(0.0, time.time() - saved_s))
        return still_s if still_s > limit_s else None

    def _count_backward_passes(self) -> int:
        """Return how many backward passes the guard saw; 0 after an out-of-memory error.

        After such an error a loop may repeat the same pass for ever.
        """
        if any(self._folder.caught(rank).exists() for rank in range(self._world_size)):
            return 0
        return sum(beat.backwards for beat in self._beats)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not begun, or removed
        return 0
