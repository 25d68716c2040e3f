"""The phase (such as startup or training) in which a program failed, by its traceback or its log lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.specs.attempt import Phase
from orchestrator.specs.packaged import load_table
from orchestrator.specs.patterns import LinePattern

OUTSIDE_TRAINING = (
    Phase.ENCODING,
    Phase.EVALUATION,
)  # what they need says nothing of what a training step needs
GUARD_PHASES = {
    "backward": Phase.TRAINING,
    "optimizer": Phase.OPTIMIZER,
}  # "startup" and "forward" may be anything


@dataclass(frozen=True, slots=True)
class TracebackFrame:
    """A frame of a Python traceback: file, function, and source line."""

    file: str
    function: str
    source: str = ""


# (phase, file, function): the innermost frame that fits a row decides
_FRAMES = tuple(
    (Phase(row["phase"]), re.compile(row["file"]), re.compile(rf"(?:{row['function']})\Z"))
    for row in load_table(__package__, "phases")["frames"]
)
_SOURCES = (  # statements of a script's own loop
    (Phase.OPTIMIZER, re.compile(r"\boptim\w*\.step\(|\bscaler\.step\(")),
    (Phase.TRAINING, re.compile(r"\.backward\(|\.training_step\(")),
    (Phase.CHECKPOINTING, re.compile(r"\btorch\.save\(")),
)


def find_phase_of_frames(frames: Iterable[TracebackFrame]) -> Phase | None:
    """Return the phase (such as training) that the innermost recognised frame shows; None without
    one.
    """
    for frame in reversed(tuple(frames)):
        for phase, file, function in _FRAMES:
            if function.match(frame.function) and file.search(frame.file):
                return phase
        for phase, source in _SOURCES:
            if source.search(frame.source):
                return phase
    return None


class PhaseMarkers:
    """Follows a program's phase through its log: a line that matches a phase's pattern makes it the
    current `phase`.
    """

    def __init__(self, pattern_by_phase: Mapping[Phase, str]) -> None:
        """Start in the startup phase; without any pattern `phase` stays None."""
        self._patterns = [
            (phase, LinePattern(pattern)) for phase, pattern in pattern_by_phase.items()
        ]
        self.phase: Phase | None = Phase.STARTUP if pattern_by_phase else None

    def read_line(self, line: str) -> None:
        """Change `phase` if the line matches the pattern of a phase."""
        for phase, pattern in self._patterns:
            if pattern.matches(line):
                self.phase = phase
