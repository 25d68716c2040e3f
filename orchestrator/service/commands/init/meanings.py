"""Meanings of settings by name: one table for flags, overrides, file keys, variables and constants.

A setting whose name is not in the table stays where it was typed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.specs.choices import Precision

Way = Literal["flag", "switch", "override", "key", "env", "constant"]
# what a batch size counts; plain: its name does not say
Count = Literal["rank", "plain", "global", "tokens"]

PRECISIONS = {
    Precision.FP32: ("fp32", "float32", "32", "no", "32-true"),
    Precision.BF16: ("bf16", "bfloat16", "bf16-mixed", "bf16-true"),
    Precision.FP16: ("fp16", "float16", "half", "16-mixed", "16"),
}
# Words of the name of a batch size: all of them have to be here, with one of BATCH.
_BATCH_SIZE = VOCABULARY["batch_size"]
BATCH = set(_BATCH_SIZE["batch"])
PER_RANK = set(_BATCH_SIZE["per_rank"])
# a batch size beside one of these counts all devices; beside a micro-batch it may be one rank's
DEVICE_WORDS = PER_RANK - {"micro", "mbs", "microbatch"}
IN_ALL = set(_BATCH_SIZE["in_all"])
BATCH_WORDS = BATCH | PER_RANK | IN_ALL | set(_BATCH_SIZE["other"])
ACCUMULATION_WORDS = set(VOCABULARY["accumulation"])
EVALUATION = set(VOCABULARY["evaluation"])
FOLDERS_OF_ANYTHING = set(VOCABULARY["folders_of_anything"])
# Names of the number of optimizer steps: a unit, after words that count or train. Any further word,
# as in save_steps,
# steps_per_epoch or inference_steps, is another setting; so is n_step, an episode's in
# reinforcement learning.
_COUNTS = "max|maximum|num|number_of|nb|n|total|overall"
_TRAINS = "train|training|trainer|optimizer|optimiser|optim|optimization|opt|finetune|finetuning|pretrain|pretraining"
STEPS = re.compile(
    rf"((({_COUNTS}|{_TRAINS})_?)*)(steps|iters|iterations|updates)"
    rf"|(({_TRAINS})_)*(max|maximum|num|total)_?(({_TRAINS})_)*(step|iter|iteration|update)|n_?iter"
)
STEPS_SECTIONS = {*_TRAINS.split("|"), *VOCABULARY["sections_of_steps"]}
_MEANINGS: dict[str, str] = {
    spelling: meaning
    for meaning, spellings in VOCABULARY["spellings"].items()
    for spelling in spellings
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A place in a command, file or script where a quantity (such as the batch size) has a value,
    or could have one.
    """

    meaning: str  # name of a knob, or steps, model
    name: str  # as written: --batch-size, train.batch_size, BATCH
    way: Way
    value: str | None = None  # as written; None: the place has none yet
    where: str = ""  # file and line, in words; empty: typed
    # 0: typed, 1: in a named file, 2: default of the parser, 3: of the framework, 4: a constant
    rank: int = 0
    counts: Count = "plain"
    file: str | None = None  # of a key, as typed

    @property
    def number(self) -> int | None:
        """The value as a positive integer; None where it is no such number."""
        text = (self.value or "").strip("'\"")
        return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None

    @property
    def description(self) -> str:
        """The setting with its value and its file, as text for a comment."""
        value = (
            ""
            if self.value is None or self.way == "switch"
            else f"={self.value}"
            if self.way == "override"
            else f" {self.value}"
        )
        return f"{self.name}{value}" + (f" in {self.where}" if self.where else "")


def make_snake_case_word(setting_name: str) -> str:
    """Return the last part of a setting's name in snake case: `batch_size` for --data.batch-size,
    batchSize and DATA.BATCH_SIZE.
    """
    last = re.split(r"[./]", setting_name.lstrip("-+~"))[-1]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", last).replace("-", "_").lower()


def find_quantity_and_count(setting_name: str) -> tuple[str, Count] | None:
    """Return (quantity, what a batch size counts) for a setting's name, such as
    `per_device_batch_size`; None if unknown.
    """
    *sections, _ = re.split(r"[./]", setting_name.lstrip("-+~").lower())
    word = make_snake_case_word(setting_name)
    parts = set(word.split("_"))
    if parts & EVALUATION or EVALUATION & {
        part for section in sections for part in section.split("_")
    }:
        return None
    if word == "enabled" and sections and sections[-1] in ("bf16", "fp16"):
        return "precision", "plain"
    if any(part.startswith("accum") for part in parts):
        other_parts = {part for part in parts if not part.startswith("accum")}
        return (
            ("gradient_accumulation_steps", "plain") if other_parts <= ACCUMULATION_WORDS else None
        )
    if (
        parts & BATCH
        and parts <= BATCH_WORDS
        and not parts <= {"samples", "n", "data", "train", "images", "imgs"}
    ):
        counts: Count = "global" if parts & IN_ALL or word == "ims_per_batch" else "plain"
        return "micro_batch_size", "rank" if parts & PER_RANK else counts
    steps = STEPS.fullmatch(word)
    if (
        steps is not None
    ):  # `steps` alone in a section of something else, such as logging.steps, is that thing's
        is_trainings = (
            steps[1] != "" or not sections or set(sections[-1].split("_")) <= STEPS_SECTIONS
        )
        return ("steps", "plain") if is_trainings else None
    meaning = _MEANINGS.get(word)
    return None if meaning is None else (meaning, "plain")


def find_precision(setting_name: str, value: str | None) -> str | None:
    """Return the precision that a setting asks for; None where its name and value do not tell, as
    for --amp.
    """
    text = (value or "").lower()
    named = next(
        (precision for precision in ("bf16", "fp16") if precision in setting_name.lower()), None
    )
    if named is not None and text in ("true", "1", "yes", "full", "", "auto"):
        return named
    return next(
        (precision.value for precision, spellings in PRECISIONS.items() if text in spellings), None
    )
