"""Sections of a job file, and the short forms in which they may be written."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.specs.choices import Degradation
from orchestrator.specs.fields import DEVICES_MAX, Bytes, Seconds
from orchestrator.specs.job.model import BATCH_MAX, LAYERS_MAX, LENGTH_MAX
from orchestrator.specs.spec_model import SpecModel

PARAMETERS_MAX = 10**15
FLOPS_MAX = 1e27  # of one sample


class GpuRange(SpecModel):
    """Number of devices for the job: `gpus: 4` means exactly 4, `gpus: 1-4` means one to four."""

    min: int = Field(
        default=1,
        ge=1,
        le=DEVICES_MAX,
        description="Fewest devices that the job runs on.",
    )
    max: int = Field(
        default=1,
        ge=1,
        le=DEVICES_MAX,
        description="Most devices that the job runs on.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> GpuRange:
        if self.max < self.min:
            raise ValueError(f"gpus.max={self.max} is below gpus.min={self.min}")
        return self


GPU_RANGE = r"^ *([0-9]{1,9}) *- *([0-9]{1,9}) *$"


def _parse_range(gpus: object) -> object:
    """Return `4` and `1-4` as a range."""
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

    parameters: int = Field(
        ge=0,
        le=PARAMETERS_MAX,
        description="Number of trained parameters, in fp32.",
    )
    layers: int = Field(
        default=1,
        ge=1,
        le=LAYERS_MAX,
        description="Number of layers of equal size; FSDP gathers one at a time.",
    )
    activations_per_sample: Bytes = Field(
        description="Activation memory of one sample between forward and backward pass, in the job's `precision`.",
    )
    checkpointed_per_sample: Bytes | None = Field(
        default=None,
        description="The same under full activation checkpointing; null: checkpointing saves nothing.",
    )
    selective_per_sample: Bytes | None = Field(
        default=None,
        description="The same under selective activation checkpointing; null: the model does not support it.",
    )
    tensor_parallel: tuple[Annotated[int, Field(ge=2, le=DEVICES_MAX)], ...] = Field(
        default=(),
        description="Degrees above 1 of tensor parallelism that the model supports.",
    )
    pipeline: bool = Field(
        default=False,
        description="Whether the model can be split into pipeline stages between layers.",
    )
    workspace: Bytes = Field(
        default=0,
        description="Memory besides parameters, gradients, optimizer states and activations.",
    )
    forward_flops_per_sample: float | None = Field(
        default=None,
        gt=0,
        le=FLOPS_MAX,
        description="FLOPs of the forward pass of one sample; null: 2 x `parameters`, of a script not known.",
    )


class SmallerBatch(SpecModel):
    """How far a restart may reduce the global batch, and how it then scales the learning rate."""

    least: int = Field(ge=1, le=BATCH_MAX, description="Fewest samples per optimizer step.")
    learning_rate: Literal["linear", "sqrt", "same"] = Field(
        description="Learning rate of a smaller batch: cut as much, by the square root of that, or kept.",
    )


class Degrade(SpecModel):
    """The settings that a restart may change."""

    allow: Literal["none", "exact", "numeric", "semantic"] = Field(
        default="exact",
        description="Furthest change: none, exact (same mathematics), numeric (precision, moments in 8 bits, "
        "master weights in bf16) or semantic (the training).",
    )
    sequence_lengths: tuple[Annotated[int, Field(ge=2, le=LENGTH_MAX)], ...] = Field(
        default=(),
        description="Sequence lengths in tokens that a restart may use; needs `allow: semantic`.",
    )
    global_batch_size: SmallerBatch | None = Field(
        default=None,
        description="Smaller global batches for a restart that has no other plan; without `allow: semantic` it asks.",
    )

    @property
    def limit(self) -> Degradation:
        """The strongest change of settings that plans of this job may make."""
        return Degradation.EXACT if self.keeps_plan else Degradation[self.allow.upper()]

    @property
    def keeps_plan(self) -> bool:
        """Whether every attempt must keep the first attempt's plan."""
        return self.allow == "none"


class Retries(SpecModel):
    """Restarts allowed per cause of failure, from 0 to 64. Errors of the program use `on_error`."""

    oom: int = Field(
        default=8,
        ge=0,
        le=64,
        description="Restarts after out-of-memory failures of device or host.",
    )
    node: int = Field(
        default=3,
        ge=0,
        le=64,
        description="Restarts after lost nodes and contended device memory.",
    )
    startup: int = Field(default=2, ge=0, le=64, description="Restarts after failed launches.")
    hang: int = Field(default=1, ge=0, le=64, description="Restarts after hangs.")
    preemption: int = Field(
        default=16,
        ge=0,
        le=64,
        description="Restarts after signals from outside the service.",
    )
    unknown: int = Field(
        default=2,
        ge=0,
        le=64,
        description="Restarts after ends that nothing explains, once training steps were made.",
    )
    on_error: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Restarts after any error of the program, or those that `exit_codes` names.",
    )
    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        default=(),
        max_length=64,
        description="Exit codes to which `on_error` is limited; empty: all.",
    )


class Dependency(SpecModel):
    """Another job that must end before this one starts."""

    job: str = Field(
        description="Id of the other job, or the name of an earlier one in the same submission.",
    )
    when: Literal["success", "always"] = Field(
        default="success",
        description="End that satisfies the dependency: success only, or any (Slurm: afterok, afterany).",
    )


class Member(SpecModel):
    """The position of a job in its array."""

    number: int = Field(ge=0)  # 0, 1, 2 ...
    of: int = Field(ge=1)
    max_concurrent: int = Field(ge=1)  # of them run at once
    compared: bool = False  # each is one strategy of `orc compare`
    repeats: int = Field(default=1, ge=1)  # of each strategy: they take turns

    @property
    def strategies(self) -> int:
        """Strategies that are compared."""
        return self.of // self.repeats

    @property
    def repeat(self) -> int:
        """Number of this repeat of its strategy, from 1."""
        return 1 + self.number // self.strategies


def _parse_dependencies(raw: object) -> object:
    """Return `prepare-1`, `[prepare-1, encode-2]` or `{job: prepare-1, when: always}` as mappings of the last kind."""
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

    gpus: int | None = Field(
        default=None,
        ge=1,
        le=DEVICES_MAX,
        description="Number of devices requested; null: `gpus.max`.",
    )
    step: Seconds | None = Field(
        default=None,
        gt=0,
        description="Time of an optimizer step on those devices with the requested plan; null: with the fastest plan.",
    )


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
