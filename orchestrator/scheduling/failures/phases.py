"""The phase (such as startup or training) in which a program failed, by its traceback or its log lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.specs.attempt import Phase
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
class Frame:
    """An entry of a Python traceback."""

    file: str
    function: str
    source: str = ""


# (phase, file, function): the innermost frame that fits a row decides; rows are tried in order.
# Names of torch.optim,
# transformers/trainer.py, lightning's hooks, accelerate/optimizer.py, deepspeed/runtime and the
# five seed trainers.
# `forward` and `encode` decide nothing: they run in encoding, training and evaluation alike.
_FRAMES = tuple(
    (phase, re.compile(file), re.compile(rf"(?:{function})\Z"))
    for phase, file, function in (
        (
            Phase.OPTIMIZER,
            r"[/\\]optim(?:izers?)?[/\\]|optimizer|grad_scaler|zero[/\\]stage",
            r"\w*step|_init_group",
        ),
        (Phase.CHECKPOINTING, r"", r"(?!.*(?:eval|_for_backward))(?:\w+_)?_?save(?:_\w+)?"),
        (Phase.STARTUP, r"torch[/\\]serialization\.py", r"_?load"),
        (
            Phase.STARTUP,
            r"",
            r"from_pretrained|_?load_(?:state_dict|checkpoints?|model)|_load_pretrained_model|restore",
        ),
        (
            Phase.TRAINING,
            r"",
            r"closure|_?train(?:ing)?_step|train_and_evaluate|train_one_epoch|train_epoch|\w*backward",
        ),
        (
            Phase.EVALUATION,
            r"",
            r"_?evaluate|evaluation_(?:loop|step)|eval_(?:loop|step|epoch)|run_evaluation",
        ),
        (
            Phase.EVALUATION,
            r"",
            r"_?validate|(?:run_|log_)?validation(?:_\w+)?|val(?:id)?_(?:step|epoch|one_epoch)",
        ),
        (
            Phase.EVALUATION,
            r"",
            r"predict|predict_step|prediction_(?:loop|step)|test_step|generate_step",
        ),
    )
)
_SOURCES = (  # statements of a script's own loop
    (Phase.OPTIMIZER, re.compile(r"\boptim\w*\.step\(|\bscaler\.step\(")),
    (Phase.TRAINING, re.compile(r"\.backward\(|\.training_step\(")),
    (Phase.CHECKPOINTING, re.compile(r"\btorch\.save\(")),
)


def phase_of_frames(frames: Iterable[Frame]) -> Phase | None:
    """Return the phase named by the innermost recognised frame; None without one."""
    for frame in reversed(tuple(frames)):
        for phase, file, function in _FRAMES:
            if function.match(frame.function) and file.search(frame.file):
                return phase
        for phase, source in _SOURCES:
            if source.search(frame.source):
                return phase
    return None


class Markers:
    """Tracks a program's phase through its log: the last line that matches a pattern sets the phase."""

    def __init__(self, patterns: Mapping[Phase, str]) -> None:
        self._patterns = [(phase, LinePattern(pattern)) for phase, pattern in patterns.items()]
        self.phase: Phase | None = Phase.STARTUP if patterns else None

    def read(self, line: str) -> None:
        """Read one line, and set `phase` where it matches a pattern."""
        for phase, pattern in self._patterns:
            if pattern.matches(line):
                self.phase = phase
