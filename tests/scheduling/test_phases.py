"""The phase of a program, from the frames of real tracebacks or from its own output."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.scheduling.failures.log_scan import LogScan, find_log_findings
from orchestrator.scheduling.failures.phases import (
    PhaseMarkers,
    TracebackFrame,
    find_phase_of_frames,
)
from orchestrator.specs.attempt import Phase
from tests.scheduling.corpus import REPORTED

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRACED = [report for report in REPORTED if "phase" in report]
PARLER = {  # huggingface/parler-tts training/run_parler_tts_training.py
    Phase.ENCODING: r"\*\*\* Encode target audio with encodec",
    Phase.TRAINING: r"\*\*\*\*\* Running training",
    Phase.EVALUATION: r"Evaluating - ",
}


@pytest.mark.parametrize("reported", TRACED, ids=[report["from"] for report in TRACED])
def test_tells_the_phase_of_a_reported_traceback(reported: dict[str, Any]) -> None:
    text = reported["text"]
    if reported["cause"] == "user_error":  # reported without its last line
        last = text.splitlines()[-1]
        text += f"\n{last[: last.index(']') + 3] if last.startswith('[rank') else ''}{OOM}"
    assert find_log_findings(text)[0].phase == reported["phase"]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (
            [
                ("train.py", "main"),
                ("transformers/trainer.py", "train"),
                ("transformers/trainer.py", "training_step"),
            ],
            "t",
        ),
        (
            [
                ("trainer.py", "training_step"),
                ("torch/utils/checkpoint.py", "checkpoint"),
                ("m.py", "forward"),
            ],
            "t",
        ),
        (
            [
                ("lightning/core/optimizer.py", "step"),
                ("torch/optim/adam.py", "step"),
                ("l.py", "training_step"),
            ],
            "t",
        ),
        (
            [("deepspeed/runtime/engine.py", "step"), ("deepspeed/runtime/zero/stage3.py", "step")],
            "o",
        ),
        (
            [
                ("trainer.py", "_maybe_log_save_evaluate"),
                ("trainer.py", "evaluate"),
                ("m.py", "forward"),
            ],
            "e",
        ),
        (
            [
                ("trainer.py", "_maybe_log_save_evaluate"),
                ("trainer.py", "_save_checkpoint"),
                ("m.py", "state_dict"),
            ],
            "c",
        ),
        (
            [
                ("train.py", "main"),
                ("transformers/modeling_utils.py", "from_pretrained"),
                ("m.py", "to"),
            ],
            "s",
        ),
        ([("train.py", "main"), ("model.py", "forward")], None),
    ],
)
def test_the_innermost_telling_frame_decides(
    frames: list[tuple[str, str]], phase: str | None
) -> None:
    letters = {
        "t": Phase.TRAINING,
        "o": Phase.OPTIMIZER,
        "e": Phase.EVALUATION,
        "c": Phase.CHECKPOINTING,
        "s": "startup",
    }
    assert find_phase_of_frames(TracebackFrame(file, function) for file, function in frames) == (
        letters[phase] if phase else None
    )


def test_a_programs_own_words_tell_its_phase() -> None:
    lines = [
        "loading",
        "*** Encode target audio with encodec ***",
        "***** Running training *****",
        "Evaluating - x",
    ]
    markers, silent = PhaseMarkers(PARLER), PhaseMarkers({})
    phases = []
    for line in lines:
        markers.read_line(line)
        silent.read_line(line)
        phases.append(markers.phase)
    assert phases == [Phase.STARTUP, Phase.ENCODING, Phase.TRAINING, Phase.EVALUATION]
    assert silent.phase is None


def test_frames_know_more_than_the_programs_words() -> None:
    scan = LogScan(pattern_by_phase=PARLER)
    for line in (
        "***** Running training *****",
        '  File ".../torch/optim/adamw.py", line 1, in step',
        "    f(",
        OOM,
    ):
        scan.read_line(line)
    assert scan.findings[0].phase is Phase.OPTIMIZER
