"""JobSpec: what the user wants. Read from YAML, frozen, and serialised back to the same text."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from orchestrator.specs import units
from orchestrator.specs.clock import Deadline, Window, parse_deadline, parse_window
from orchestrator.specs.job.frameworks import Framework, completed
from orchestrator.specs.job.model import DataSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.trainer import ConfigFile, Knobs, LaunchStyle, Resume, Success, check
from orchestrator.specs.plan import Degradation, Precision
from orchestrator.specs.profile import MeasuredLine, OwnSettings, TracedProfile
from orchestrator.specs.spec_model import Command, Counter, SpecModel, Words

Bytes = Annotated[
    int,
    BeforeValidator(units.parse_bytes),
    PlainSerializer(lambda count: f"{count}B", return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.SIZE_PATTERN, "examples": ["1.5GiB"]}),
]
Bandwidth = Annotated[
    int,
    BeforeValidator(units.parse_bandwidth),
    PlainSerializer(lambda count: f"{count}B/s", return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.BANDWIDTH_PATTERN, "examples": ["450GB/s"]}),
]


def _digits(number: float) -> str:
    """All of a float's digits, without an exponent."""
    shortest = repr(number)
    return f"{Decimal(shortest):f}" if "e" in shortest else shortest


Seconds = Annotated[
    float,
    BeforeValidator(units.parse_seconds),
    # every digit, and never an exponent: what is read back is the same float
    PlainSerializer(lambda seconds: _digits(seconds).removesuffix(".0") + "s", return_type=str),
    WithJsonSchema({"type": "string", "pattern": units.DURATION_PATTERN, "examples": ["10min"]}),
]


def _pairs(speeds: object) -> object:
    return tuple((int(str(count)), each) for count, each in speeds.items()) if isinstance(speeds, dict) else speeds


Speeds = Annotated[  # seconds per optimizer step by number of devices, fewest devices first
    tuple[tuple[Annotated[int, Field(ge=1)], Seconds], ...],
    BeforeValidator(_pairs),
    AfterValidator(lambda speeds: tuple(sorted(speeds))),
    PlainSerializer(
        lambda speeds: {str(count): f"{_digits(each)}s" for count, each in speeds}, return_type=dict[str, str]
    ),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}, "examples": [{"1": "2.1s"}]}),
]

Hours = Annotated[
    Window,
    BeforeValidator(lambda said: said if isinstance(said, Window) else parse_window(said)),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["22:00-08:00 Europe/Berlin mon-fri"]}),
]

DeadlineField = Annotated[
    Deadline,
    BeforeValidator(lambda said: said if isinstance(said, Deadline) else parse_deadline(said)),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["08:00", "2026-11-23T08:00 Europe/Berlin"]}),
]


# Classes of priority by name; between them there is room for numbers.
PRIORITIES = {"high": 100, "normal": 0, "low": -100}


def _rank(said: object) -> object:
    if isinstance(said, str) and said.lstrip("+-").isdecimal():
        return int(said)
    if isinstance(said, str) and said not in PRIORITIES:
        raise ValueError(f"a priority is {', '.join(PRIORITIES)} or a whole number")
    return PRIORITIES[said] if isinstance(said, str) else said


Priority = Annotated[  # higher first
    int,
    BeforeValidator(_rank),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"enum": list(PRIORITIES)}], "default": 0}),
]
UserName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._@-]{0,62}$")]


class GpuRange(SpecModel):
    """How many devices the job may take."""

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> GpuRange:
        if self.max < self.min:
            raise ValueError(f"gpus.max={self.max} is below gpus.min={self.min}")
        return self


def _exact_count(gpus: object) -> object:
    return {"min": gpus, "max": gpus} if isinstance(gpus, int) else gpus


class DeclaredProfile(SpecModel):
    """What the user says a model or a script costs; it stands against what a closed form or a trace would say."""

    parameters: int = Field(ge=0)
    layers: int = Field(default=1, ge=1)
    activations_per_sample: Bytes
    checkpointed_per_sample: Bytes | None = None  # None: checkpointing would save nothing
    selective_per_sample: Bytes | None = None  # kept under selective checkpointing; None: the model cannot
    tensor_parallel: tuple[int, ...] = ()  # degrees above 1 by which the model's own plan can cut it
    pipeline: bool = False  # whether the model can be cut between its layers
    workspace: Bytes = 0  # held besides parameters, gradients, optimizer states and activations
    forward_flops_per_sample: float | None = Field(default=None, gt=0)  # None: 2 x parameters


class Degrade(SpecModel):
    """What a restart may touch. `exact` is always allowed; `semantic` names its alternatives."""

    allow: Literal["exact", "numeric", "semantic"] = "exact"
    sequence_lengths: tuple[int, ...] = ()

    @property
    def limit(self) -> Degradation:
        return Degradation[self.allow.upper()]


class Retries(SpecModel):
    """Separate, bounded budgets. A bug in the user's code has none."""

    oom: int = Field(default=8, ge=0, le=64)
    node: int = Field(default=3, ge=0, le=64)
    startup: int = Field(default=2, ge=0, le=64)
    hang: int = Field(default=1, ge=0, le=64)
    preemption: int = Field(default=16, ge=0, le=64)


class Dependency(SpecModel):
    """Another job, which has to end first: with success, or in whatever way."""

    job: str  # its id; in a submission of several also the name of one that stands before
    when: Literal["success", "always"] = "success"


class Member(SpecModel):
    """Which job of an array this one is."""

    number: int = Field(ge=0)  # 0, 1, 2 ...
    of: int = Field(ge=1)
    max_concurrent: int = Field(ge=1)  # of them run at once


def _dependencies(said: object) -> object:
    """`prepare-1`, `[prepare-1, encode-2]` and `{job: prepare-1, when: always}` as a list of the last."""
    entries = said if isinstance(said, list | tuple) else [said]
    return tuple({"job": one} if isinstance(one, str) else one for one in entries)


class Guarantee(SpecModel):
    """The speed that a job is promised from its start on: that of its request."""

    gpus: int | None = Field(
        default=None, ge=1, description="devices of the request; without it the most that the job may take"
    )
    step: Seconds | None = Field(
        default=None,
        gt=0,
        description="what an optimizer step takes on them with the requested plan; without it the fastest plan counts",
    )


def _request(said: object) -> object:
    if isinstance(said, str) and said != "requested":
        raise ValueError("a guarantee is `requested`, or a mapping of `gpus` and `step`")
    return {} if said == "requested" else said


class JobSpec(SpecModel):
    """One training job: a `command` with `knobs`, or a `model` with `data`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    family: str | None = None  # jobs of one family share their calibration; None: the name
    priority: Priority = 0
    user: UserName | None = None  # whose turn it takes on a shared cluster; None: who submits it
    depends_on: Annotated[tuple[Dependency, ...], BeforeValidator(_dependencies)] = ()
    member: SkipJsonSchema[Member | None] = None  # of an array, which is expanded where a job file is read
    deadline: DeadlineField | None = None  # when it should be done; without a zone: that of the machine that reads it
    start_window: Hours | None = None  # hours within which it starts; without a zone: that of the machine that reads it
    gpus: Annotated[GpuRange, BeforeValidator(_exact_count)] = GpuRange()
    guarantee: Annotated[
        Guarantee | None,
        BeforeValidator(_request),
        Field(
            description="`requested` promises at least the speed of the request, from a time on that is told at "
            "submission; a job that cannot be promised it is refused. Without it the job gets what is left."
        ),
        WithJsonSchema(
            {"anyOf": [{"const": "requested"}, Guarantee.model_json_schema(), {"type": "null"}], "default": None}
        ),
    ] = None
    steps: int | None = Field(default=None, ge=1)  # optimizer steps of a script; a model says training.max_steps
    speeds: Speeds = ()  # seconds per optimizer step that a script was measured at, by number of devices
    global_batch_size: int = Field(ge=1)
    precision: Precision = Precision.FP32

    model: ModelSpec | None = None
    data: DataSpec = DataSpec()
    training: TrainingSpec = TrainingSpec()

    command: Command | None = None
    trains: ModelSpec | None = None  # what a script trains, of `data.sequence_length`: known by it, and never run
    trainer: Framework | None = None  # says launch, knobs, resume, progress and phases, as far as the job does not
    launch: LaunchStyle = "ranks"
    workdir: str | None = None  # relative to the job file; None: the job file's folder
    env: Words = ()
    secrets: tuple[str, ...] = ()  # names of environment variables of the service, passed on and never shown
    knobs: Knobs = Knobs()
    config: ConfigFile | None = None
    success: Success = Success()
    resume: Resume = Resume()
    progress: Counter | None = None  # a number in its log that counts up: step or epoch
    phases: Words = ()  # phase -> pattern of the line with which it begins: encoding, training, evaluation

    profile: DeclaredProfile | None = None
    traced: SkipJsonSchema[tuple[TracedProfile, ...]] = ()  # of a model that no closed form knows: added at intake
    probe: Literal["auto", "never"] = "auto"  # short attempts first, where nobody knows what a script needs
    measured: SkipJsonSchema[MeasuredLine | None] = None  # what its family was probed to need: never said in a file
    relative_to: SkipJsonSchema[OwnSettings | None] = None  # of its family, those that outcomes are told by: as above
    degrade: Degrade = Degrade()
    retries: Retries = Retries()
    on_caught_oom: Literal["recover", "accept"] = "recover"  # a script that catches it: restart cheaper, or let it be
    hang_timeout: Seconds = 600.0  # no training step for this long means hung
    startup_timeout: Seconds = 900.0  # the first training step must come within this time

    @property
    def family_name(self) -> str:
        return self.family or self.name

    @property
    def is_script(self) -> bool:
        return self.command is not None

    @property
    def known_model(self) -> ModelSpec | None:
        """The model whose costs are those of the job: its own, or the one that its script trains."""
        return self.model or self.trains

    @property
    def guaranteed_gpus(self) -> int:
        """Devices whose speed the job is promised; 0 where it is promised none."""
        return 0 if self.guarantee is None else self.guarantee.gpus or self.gpus.max

    @property
    def optimizer_steps(self) -> int | None:
        """From the job's beginning to its end; None where nobody says."""
        return self.steps if self.is_script else self.training.max_steps

    @model_validator(mode="before")
    @classmethod
    def _range_of_speeds(cls, said: object) -> object:
        """A job that tells its speeds may take any number of devices that they name, unless it says `gpus`."""
        if not isinstance(said, dict) or not isinstance(said.get("speeds"), dict) or "gpus" in said:
            return said
        counts = [int(count) for count in map(str, said["speeds"]) if count.isdecimal()]
        return {**said, "gpus": {"min": min(counts), "max": max(counts)}} if counts else said

    @model_validator(mode="before")
    @classmethod
    def _as_its_trainer_has_it(cls, said: object) -> object:
        return completed(said) if isinstance(said, dict) and said.get("trainer") is not None else said

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if (self.command is None) == (self.model is None):
            raise ValueError("a job says either `command` (a script) or `model` (and `data`)")
        if self.command is not None and not self.command:
            raise ValueError("`command` is empty")
        if self.known_model is not None:
            ways = (self.known_model.decoder, self.known_model.hf, self.known_model.factory)
            if sum(way is not None for way in ways) != 1:
                word = "model" if self.model is not None else "trains"
                raise ValueError(f"`{word}` says exactly one of `decoder`, `hf` and `factory`")
        if self.model is not None and self.model.weights is not None:
            raise ValueError("`model.weights` is said of what a script `trains`: ours keep fp32 masters")
        if self.trains is not None and self.trains.weights not in (None, Precision.FP32, self.precision):
            raise ValueError("`trains.weights` is fp32 or the job's `precision`")
        if self.trains is not None and self.command is None:
            raise ValueError("`trains` says which model somebody's script trains: it needs a `command`")
        if self.model is not None:
            if self.model.decoder is not None and not self.data.text:
                raise ValueError("a decoder job needs `data.text`: the files it is trained on")
            if self.model.hf is not None and not self.data.files:
                raise ValueError("a transformers model needs `data.text`, `data.chat` or `data.tokens`")
        if self.model is not None and (self.steps is not None or self.speeds):
            raise ValueError("`steps` and `speeds` are a script's: a model says `training.max_steps`, and is costed")
        counts = [count for count, _ in self.speeds]
        if len(set(counts)) < len(counts) or any(each <= 0 for _, each in self.speeds):
            raise ValueError("`speeds` names each number of devices once, with more than 0 seconds")
        if counts and not any(self.gpus.min <= count <= self.gpus.max for count in counts):
            raise ValueError(f"`speeds` knows none of {self.gpus.min} to {self.gpus.max} devices, which `gpus` allows")
        if self.trainer is not None and self.command is None:
            raise ValueError("`trainer` says how somebody's script is driven: it needs a `command`")
        self._check_guarantee()
        check(self.command, self.launch, self.knobs, self.config, self.phases)
        if self.degrade.sequence_lengths and self.degrade.limit is not Degradation.SEMANTIC:
            raise ValueError("`degrade.sequence_lengths` changes the training: it needs `degrade.allow: semantic`")
        return self

    def _check_guarantee(self) -> None:
        """What is promised starts at a time that can be told, and ends at one."""
        if self.guarantee is None:
            return
        if not self.gpus.min <= self.guaranteed_gpus <= self.gpus.max:
            raise ValueError(
                f"`guarantee.gpus` is {self.guaranteed_gpus}: `gpus` allows {self.gpus.min} to {self.gpus.max}"
            )
        if self.optimizer_steps is None:
            raise ValueError("`guarantee` needs `steps`: what comes next is promised devices from the end of this on")
        if self.depends_on or self.start_window is not None:
            raise ValueError("`guarantee` is given at submission: it goes with neither `depends_on` nor `start_window`")
        if self.member is not None and self.member.max_concurrent < self.member.of:
            raise ValueError(
                "`guarantee` promises each job of an array its start: it does not go with `max_concurrent`"
            )


def job_json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a job file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | JobSpec.model_json_schema()
    schema["properties"] |= {
        "array": {
            "anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
            "examples": [{"lr": ["1e-3", "1e-4"], "seed": [0, 1]}],
        },
        "max_concurrent": {"type": "integer", "minimum": 1},
    }
    return schema
