"""Trainer presets that users write: files with part of a job file, named by `trainer` of other job
files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from orchestrator.specs.errors import SpecError, find_closest_word
from orchestrator.specs.job.frameworks import Framework, merge_preset
from orchestrator.specs.replace import replace
from orchestrator.specs.yaml_text import Document, read_document

SUFFIXES = (".yaml", ".yml")
KEYS = (
    "extends",
    "launch",
    "precision",
    "knobs",
    "config",
    "resume",
    "success",
    "progress",
    "phases",
)


def merge_preset_file(document: Document, read_text: Callable[[str], str] | None) -> Document:
    """Return the job's document merged with the preset file that its `trainer` names. `extends` becomes its trainer.

    `read_text` reads a file that a job file names; None where no file can be read. Raises SpecError for a preset that
    cannot be read or has unknown keys.
    """
    trainer = document.data.get("trainer")
    if not isinstance(trainer, str) or not trainer.endswith(SUFFIXES):
        return document
    if read_text is None:
        hint = "`orc submit FILE` does; or write its keys here"
        raise SpecError(
            "a preset file is read where the job file lies",
            source=document.source,
            path="trainer",
            got=trainer,
            hint=hint,
        )
    text = read_text(trainer)
    preset = read_document(text, trainer).data
    for key in preset:
        if key not in KEYS:
            nearest = find_closest_word(key, KEYS)
            hint = f"did you mean `{nearest}`?" if nearest else "say it in the job file"
            raise SpecError(
                "unknown key of a preset",
                source=trainer,
                path=key,
                allowed=", ".join(KEYS),
                hint=hint,
            )
    base = preset.pop("extends", None)
    if base is not None and base not in get_args(Framework):
        raise SpecError(
            "a preset extends a framework",
            source=trainer,
            path="extends",
            got=base,
            allowed=", ".join(get_args(Framework)),
        )
    data = {key: value for key, value in document.data.items() if key != "trainer"}
    return replace(document, data=merge_preset({**data, "trainer": base}, preset))
