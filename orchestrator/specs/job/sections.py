"""Sections of a job file, and the short forms in which they may be written."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.specs.choices import Degradation
from orchestrator.specs.fields import DEVICES_MAX, Bytes, Seconds
from orchestrator.specs.job.model import BATCH_MAX, LAYERS_MAX, LENGTH_MAX
from orchestrator.specs.spec_model import Command, SpecModel, StringMap

PARAMETERS_MAX = 10**15
FLOPS_MAX = 1e27  # of one sample
LABEL_LENGTH_MAX = 120  # characters of a remedy's label


class GpuRange(SpecModel):
    """Number of devices for the job: `gpus: 4` means exactly 4, `gpus: 1-4` means one to four."""

    min: int = Field(default=1, ge=1, le=DEVICES_MAX)
    max: int = Field(default=1, ge=1, le=DEVICES_MAX)

    @model_validator(mode="after")
    def _check_order(self) -> GpuRange:
        if self.max < self.min:
            raise ValueError(f"gpus.max={self.max} is below gpus.min={self.min}")
        return self


GPU_RANGE = r"^ *([0-9]{1,9}) *- *([0-9]{1,9}) *$"


def _parse_range(gpus: object) -> object:
    """Return `4` or `1-4` as a mapping with `min` and `max`; other values unchanged."""
    if isinstance(gpus, str) and (matched := re.match(GPU_RANGE, gpus)):
        return {"min": int(matched[1]), "max": int(matched[2])}
    return {"min": gpus, "max": gpus} if isinstance(gpus, int) else gpus


Gpus = Annotated[
    GpuRange,
    BeforeValidator(
        _parse_range,
        json_schema_input_type=Annotated[int, Field(ge=1, le=DEVICES_MAX)]
        | Annotated[str, Field(pattern=GPU_RANGE)]
        | GpuRange,
    ),
]


class DeclaredProfile(SpecModel):
    """Memory and cost of a model or script as the user declares them. They replace formulas and traces."""

    parameters: int = Field(ge=0, le=PARAMETERS_MAX)
    layers: int = Field(default=1, ge=1, le=LAYERS_MAX)
    activations_per_sample: Bytes
    checkpointed_per_sample: Bytes | None = None
    selective_per_sample: Bytes | None = None
    tensor_parallel: tuple[Annotated[int, Field(ge=2, le=DEVICES_MAX)], ...] = ()
    pipeline: bool = False
    workspace: Bytes = 0
    forward_flops_per_sample: float | None = Field(default=None, gt=0, le=FLOPS_MAX)


LearningRateRule = Literal["linear", "sqrt", "same"]  # how it follows a smaller batch


class Remedy(SpecModel):
    """A change that a person may make where no plan fits: options for the command, and keys of the
    job.
    """

    label: str = Field(min_length=1, max_length=LABEL_LENGTH_MAX)
    arguments: Command = ()
    set: StringMap = ()
    changes: Literal["exact", "numeric", "semantic"] = "semantic"


class SmallerBatch(SpecModel):
    """How far a restart may reduce the global batch, and how the learning rate then changes."""

    least: int = Field(ge=1, le=BATCH_MAX)
    learning_rate: LearningRateRule


class Degrade(SpecModel):
    """The settings that a restart may change."""

    allow: Literal["none", "exact", "numeric", "semantic"] = "exact"
    sequence_lengths: tuple[Annotated[int, Field(ge=2, le=LENGTH_MAX)], ...] = ()
    global_batch_size: SmallerBatch | None = None

    @property
    def limit(self) -> Degradation:
        """The strongest class of changes that plans of this job may make."""
        return Degradation.EXACT if self.keeps_plan else Degradation[self.allow.upper()]

    @property
    def keeps_plan(self) -> bool:
        """Whether every attempt must use the plan of the first one."""
        return self.allow == "none"


Budget = Annotated[int, Field(ge=0, le=64)]  # restarts


class Retries(SpecModel):
    """How many restarts are allowed for each cause of failure, 0 to 64; the program's errors use
    `on_error`.
    """

    oom: Budget = 8
    node: Budget = 3
    startup: Budget = 2
    hang: Budget = 1
    preemption: Budget = 16
    unknown: Budget = 2
    on_error: Budget = 0
    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(default=(), max_length=64)


class Dependency(SpecModel):
    """Another job that must end before this one starts."""

    job: str
    when: Literal["success", "always"] = "success"


class Member(SpecModel):
    """The position of a job in its array (jobs made from one job file)."""

    number: int = Field(ge=0)  # 0, 1, 2 ...
    of: int = Field(ge=1)
    max_concurrent: int = Field(ge=1)  # of them run at once
    compared: bool = False  # each is one strategy of `orc compare`
    repeats: int = Field(default=1, ge=1)  # of each strategy: they take turns

    @property
    def strategies(self) -> int:
        """Number of strategies that the comparison compares."""
        return self.of // self.repeats

    @property
    def repeat(self) -> int:
        """Number of this repeat of its strategy, counted from 1."""
        return 1 + self.number // self.strategies


def _parse_dependencies(raw: object) -> object:
    """Return `prepare-1` or `[prepare-1, encode-2]` as a list of mappings with `job` and `when`."""
    entries = raw if isinstance(raw, list | tuple) else [raw]
    return tuple({"job": entry} if isinstance(entry, str) else entry for entry in entries)


Dependencies = Annotated[
    tuple[Dependency, ...],
    BeforeValidator(
        _parse_dependencies, json_schema_input_type=str | Dependency | list[str | Dependency]
    ),
]


class Guarantee(SpecModel):
    """A minimum training speed promised to the job: that of `gpus` devices with the requested plan."""

    gpus: int | None = Field(default=None, ge=1, le=DEVICES_MAX)
    step: Seconds | None = Field(default=None, gt=0)


def _parse_guarantee(raw: object) -> object:
    if isinstance(raw, str) and raw != "requested":
        raise ValueError("a guarantee is `requested`, or a mapping of `gpus` and `step`")
    return {} if raw == "requested" else raw


Promise = Annotated[
    Guarantee | None,
    BeforeValidator(_parse_guarantee),
    WithJsonSchema(
        {
            "anyOf": [{"const": "requested"}, Guarantee.model_json_schema(), {"type": "null"}],
            "default": None,
        }
    ),
]
