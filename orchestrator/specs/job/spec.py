"""JobSpec: what the user wants. Read from YAML, frozen, and serialised back to the same text."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from orchestrator.specs import units
from orchestrator.specs.clock import Deadline, Window, parse_deadline, parse_window
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.code_source import CodeSource
from orchestrator.specs.job.frameworks import Framework, completed, cut_over_ranks
from orchestrator.specs.job.model import DataSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.pins import Pins, check_pins
from orchestrator.specs.job.sweep import METRICS, Trial, sweep_json_schema
from orchestrator.specs.job.trainer import ConfigFile, Knobs, LaunchStyle, Resume, Success, check
from orchestrator.specs.plan import Degradation, Precision
from orchestrator.specs.profile import MeasuredLine, OwnSettings, TracedProfile
from orchestrator.specs.spec_model import Command, Counter, SpecModel, Words, json_schema_of

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
USER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._@-]{0,62}$"
UserName = Annotated[str, Field(pattern=USER_NAME)]


class GpuRange(SpecModel):
    """Number of devices that the job runs on; `gpus: 4` means exactly 4."""

    min: int = Field(default=1, ge=1, description="Fewest devices that the job runs on.", examples=[1])
    max: int = Field(default=1, ge=1, description="Most devices that the job runs on.", examples=[8])

    @model_validator(mode="after")
    def _ordered(self) -> GpuRange:
        if self.max < self.min:
            raise ValueError(f"gpus.max={self.max} is below gpus.min={self.min}")
        return self


def _exact_count(gpus: object) -> object:
    return {"min": gpus, "max": gpus} if isinstance(gpus, int) else gpus


class DeclaredProfile(SpecModel):
    """Memory and cost of a model or a script as declared; no closed form or trace is used then."""

    parameters: int = Field(ge=0, description="Number of parameters.", examples=[350_000_000])
    layers: int = Field(
        default=1, ge=1, description="Number of layers of equal size; FSDP gathers one at a time.", examples=[24]
    )
    activations_per_sample: Bytes = Field(
        description="Activation memory of one sample between forward and backward pass.", examples=["900MiB"]
    )
    checkpointed_per_sample: Bytes | None = Field(
        default=None,
        description="The same under full activation checkpointing; null: checkpointing saves nothing.",
        examples=["90MiB"],
    )
    selective_per_sample: Bytes | None = Field(
        default=None,
        description="The same under selective activation checkpointing; null: the model does not support it.",
        examples=["300MiB"],
    )
    tensor_parallel: tuple[int, ...] = Field(
        default=(), description="Degrees above 1 of tensor parallelism that the model supports.", examples=[[2, 4]]
    )
    pipeline: bool = Field(
        default=False,
        description="Whether the model can be split into pipeline stages between layers.",
        examples=[True],
    )
    workspace: Bytes = Field(
        default=0,
        description="Memory besides parameters, gradients, optimizer states and activations.",
        examples=["1GiB"],
    )
    forward_flops_per_sample: float | None = Field(
        default=None,
        gt=0,
        description="FLOPs of the forward pass of one sample; null: 2 x `parameters`.",
        examples=[1.4e12],
    )


class Degrade(SpecModel):
    """What a restart may change."""

    allow: Literal["none", "exact", "numeric", "semantic"] = Field(
        default="exact",
        description="Furthest change: none, exact (same mathematics), numeric (precision, moments in 8 bits, "
        "master weights in bf16) or semantic (the training).",
        examples=["numeric"],
    )
    sequence_lengths: tuple[int, ...] = Field(
        default=(),
        description="Sequence lengths in tokens that a restart may use; needs `allow: semantic`.",
        examples=[[1024, 512]],
    )

    @property
    def limit(self) -> Degradation:
        """How far the plans of the job may leave what it asks for."""
        return Degradation.EXACT if self.keeps_plan else Degradation[self.allow.upper()]

    @property
    def keeps_plan(self) -> bool:
        """Whether every attempt has the plan of the first one."""
        return self.allow == "none"


class Retries(SpecModel):
    """Restarts per cause of failure, from 0 to 64. An error of the program itself has none."""

    oom: int = Field(
        default=8, ge=0, le=64, description="Restarts after out-of-memory failures of device or host.", examples=[4]
    )
    node: int = Field(
        default=3, ge=0, le=64, description="Restarts after lost nodes and contended device memory.", examples=[5]
    )
    startup: int = Field(default=2, ge=0, le=64, description="Restarts after failed launches.", examples=[1])
    hang: int = Field(default=1, ge=0, le=64, description="Restarts after hangs.", examples=[2])
    preemption: int = Field(
        default=16, ge=0, le=64, description="Restarts after signals from outside the service.", examples=[32]
    )


class Dependency(SpecModel):
    """Another job that has to end first."""

    job: str = Field(
        description="Id of the other job, or the name of an earlier one in the same submission.", examples=["prepare-1"]
    )
    when: Literal["success", "always"] = Field(
        default="success",
        description="End that satisfies the dependency: success only, or any (Slurm: afterok, afterany).",
        examples=["always"],
    )


class Member(SpecModel):
    """Which job of an array this one is."""

    number: int = Field(ge=0)  # 0, 1, 2 ...
    of: int = Field(ge=1)
    max_concurrent: int = Field(ge=1)  # of them run at once
    compared: bool = False  # each is one strategy of `orc compare`


def _dependencies(said: object) -> object:
    """`prepare-1`, `[prepare-1, encode-2]` and `{job: prepare-1, when: always}` as a list of the last."""
    entries = said if isinstance(said, list | tuple) else [said]
    return tuple({"job": one} if isinstance(one, str) else one for one in entries)


class Guarantee(SpecModel):
    """Speed that the job is promised from its start on, as that of a request."""

    gpus: int | None = Field(
        default=None, ge=1, description="Number of devices requested; null: `gpus.max`.", examples=[4]
    )
    step: Seconds | None = Field(
        default=None,
        gt=0,
        description="Time of an optimizer step on those devices with the requested plan; null: with the fastest plan.",
        examples=["2.1s"],
    )


def _request(said: object) -> object:
    if isinstance(said, str) and said != "requested":
        raise ValueError("a guarantee is `requested`, or a mapping of `gpus` and `step`")
    return {} if said == "requested" else said


class JobSpec(SpecModel):
    """One training job: a `command` with `knobs`, or a `model` with `data`."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name of the job; its id is the name with a number.",
        examples=["my-finetune"],
    )
    family: str | None = Field(
        default=None,
        description="Jobs of one family share the calibration of their memory; null: the name.",
        examples=["llama-8b"],
    )
    priority: Priority = Field(
        default=0,
        description="Higher starts first: a whole number, or high (100), normal (0), low (-100).",
        examples=["high"],
    )
    user: UserName | None = Field(
        default=None, description="User whose share the job is charged to; null: who submits it.", examples=["ada"]
    )
    depends_on: Annotated[
        tuple[Dependency, ...],
        BeforeValidator(_dependencies, json_schema_input_type=str | Dependency | list[str | Dependency]),
    ] = Field(
        default=(),
        description="Jobs that have to end before this one starts.",
        examples=[["prepare-1", {"job": "encode-2", "when": "always"}]],
    )
    member: SkipJsonSchema[Member | None] = None  # of an array, which is expanded where a job file is read
    deadline: DeadlineField | None = Field(
        default=None,
        description="Time at which the job should have ended; without a zone, that of the submitting machine.",
        examples=["2026-11-23T08:00 Europe/Berlin"],
    )
    start_window: Hours | None = Field(
        default=None,
        description="Hours and weekdays within which the job starts; without a zone, that of the submitting machine.",
        examples=["22:00-08:00 Europe/Berlin mon-fri"],
    )
    gpus: Annotated[GpuRange, BeforeValidator(_exact_count, json_schema_input_type=PositiveInt | GpuRange)] = Field(
        default=GpuRange(),
        description="Number of devices: exactly this many, or a range.",
        examples=[{"min": 1, "max": 4}, 2],
    )
    guarantee: Annotated[
        Guarantee | None,
        BeforeValidator(_request),
        WithJsonSchema(
            {"anyOf": [{"const": "requested"}, Guarantee.model_json_schema(), {"type": "null"}], "default": None}
        ),
    ] = Field(
        default=None,
        description="Promises at least the speed of the request from a start told at submission, or refuses the job.",
        examples=["requested"],
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps of a script from beginning to end; a `model` says `training.max_steps`.",
        examples=[5000],
    )
    speeds: Speeds = Field(
        default=(),
        description="Measured time per optimizer step of a script, by number of devices.",
        examples=[{"1": "2.1s", "2": "1.2s"}],
    )
    global_batch_size: int = Field(
        ge=1, description="Samples per optimizer step over all ranks; no plan changes it.", examples=[256]
    )
    precision: Precision = Field(
        default=Precision.FP32,
        description="Arithmetic of the forward and backward pass; master weights are fp32.",
        examples=["bf16"],
    )

    model: ModelSpec | None = Field(
        default=None,
        description="Model that the engines train; excludes `command`.",
        examples=[{"factory": "model.py:build"}],
    )
    data: DataSpec = Field(
        default=DataSpec(),
        description="Files that a `model` is trained on, and the length of a sample.",
        examples=[{"text": ["corpus.txt"], "sequence_length": 512}],
    )
    training: TrainingSpec = Field(
        default=TrainingSpec(),
        description="Optimizer, schedule and length of the training of a `model`.",
        examples=[{"max_steps": 1000, "learning_rate": 2e-4}],
    )

    command: Command | None = Field(
        default=None,
        description="Training script and its arguments, split as a POSIX shell would; no shell runs it.",
        examples=["python train.py --data corpus.txt"],
    )
    trains: ModelSpec | None = Field(
        default=None,
        description="Model that a script trains: its memory is estimated from it; the model is never run.",
        examples=[{"hf": "./model"}],
    )
    trainer: Framework | None = Field(
        default=None,
        description="Framework whose usual launch, knobs, resume, progress and phases fill in what is left out.",
        examples=["hf"],
    )
    launch: LaunchStyle = Field(
        default="ranks",
        description="Who starts the ranks: the service, a launcher on each node, or the script itself.",
        examples=["torchrun"],
    )
    workdir: str | None = Field(
        default=None,
        description="Working directory of the script, relative to the job file; null: the job file's folder.",
        examples=["project"],
    )
    env: Words = Field(
        default=(), description="Environment variables of the script.", examples=[{"OMP_NUM_THREADS": "8"}]
    )
    secrets: tuple[str, ...] = Field(
        default=(),
        description="Environment variables of the service that the script gets; their values are never recorded.",
        examples=[["HF_TOKEN"]],
    )
    knobs: Knobs = Field(
        default=Knobs(),
        description="How the script takes each setting of a plan; a setting without a knob is never changed.",
        examples=[{"micro_batch_size": {"flag": "--batch-size", "default": 8}}],
    )
    config: ConfigFile | None = Field(
        default=None,
        description="YAML or JSON file in which knobs are keys; each attempt gets a copy.",
        examples=[{"file": "train.yaml", "flag": "--config"}],
    )
    success: Success = Field(
        default=Success(),
        description="What a finished script leaves behind, besides exit code 0.",
        examples=[{"artifacts": ["model.pt"]}],
    )
    resume: Resume = Field(
        default=Resume(),
        description="The script's own checkpoints and what a restart needs.",
        examples=[{"checkpoints": "checkpoint-*", "on_sigterm": True}],
    )
    progress: Counter | None = Field(
        default=None,
        description="Regular expression with one group: a number in the log that counts up, step or epoch.",
        examples=[r"step (\d+)"],
    )
    phases: Words = Field(
        default=(),
        description="Regular expression of the log line that begins a phase, such as encoding, training or evaluation.",
        examples=[{"evaluation": "Running evaluation"}],
    )

    profile: DeclaredProfile | None = Field(
        default=None,
        description="Memory and cost of the model as you declare them; overrides closed form and trace.",
        examples=[{"parameters": 350_000_000, "activations_per_sample": "900MiB"}],
    )
    traced: SkipJsonSchema[tuple[TracedProfile, ...]] = ()  # of a model that no closed form knows: added at intake
    probe: Literal["auto", "never"] = Field(
        default="auto",
        description="Whether two short attempts measure a script of unknown memory before it trains.",
        examples=["never"],
    )
    measured: SkipJsonSchema[MeasuredLine | None] = None  # what its family was probed to need: never said in a file
    relative_to: SkipJsonSchema[OwnSettings | None] = None  # of its family, those that outcomes are told by: as above
    source: SkipJsonSchema[CodeSource | None] = None  # of its code: added at intake
    trial: SkipJsonSchema[Trial | None] = None  # of a sweep, of which a file says the first
    plan: Pins = Field(
        default=(),
        description="Settings that every plan of the job has; what is left out is planned.",
        examples=[{"zero_stage": 3, "micro_batch": 2}],
    )
    degrade: Degrade = Field(
        default=Degrade(),
        description="What a restart on a cheaper plan may change.",
        examples=[{"allow": "numeric"}],
    )
    retries: Retries = Field(
        default=Retries(), description="Restarts per cause of failure, each from 0 to 64.", examples=[{"oom": 4}]
    )
    on_caught_oom: Literal["recover", "accept"] = Field(
        default="recover",
        description="What follows where a script catches its out-of-memory errors: a cheaper plan, or nothing.",
        examples=["accept"],
    )
    hang_timeout: Seconds = Field(
        default=600.0,
        description="Time without a training step after which an attempt counts as hung.",
        examples=["20min"],
    )
    startup_timeout: Seconds = Field(
        default=900.0, description="Time within which the first training step has to come.", examples=["1h"]
    )

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
        """From the job's beginning to its end; None where the job does not say."""
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
        cut = cut_over_ranks(self.trainer, self.command or ())
        if cut is not None and not self.speeds:
            raise SpecError(
                "the command cuts the model over ranks, and plans of a script are data parallel only",
                path="command",
                got=" ".join(cut),
                hint="leave it out, or say `speeds`: then each number of devices runs as the script cuts it",
            )
        self._check_guarantee()
        check(self.command, self.launch, self.knobs, self.config, self.phases)
        if self.degrade.sequence_lengths and self.degrade.limit is not Degradation.SEMANTIC:
            raise ValueError("`degrade.sequence_lengths` changes the training: it needs `degrade.allow: semantic`")
        if self.plan:
            self._check_plan()
        if self.trial is not None:
            self._check_metric(self.trial)
        return self

    def _check_metric(self, trial: Trial) -> None:
        """Whether something tells the metric that judges the trial."""
        metric = trial.sweep.metric
        if self.is_script and metric.log is None:
            raise ValueError("`sweep.metric.log` says which line of a script's log has the metric")
        if not self.is_script and (metric.log is not None or metric.name not in METRICS):
            raise ValueError(f"`sweep.metric.name` of a model is one of {', '.join(METRICS)}, without `log`")

    def _check_plan(self) -> None:
        """Raises SpecError for a pinned setting that no plan of the job has."""
        knob = self.knobs.sequence_length
        own = self.data.sequence_length if self.model is not None else knob and knob.default and int(knob.default)
        check_pins(
            self.plan,
            knobs=self.knobs if self.is_script else None,
            precision=self.precision,
            other_precision=self.degrade.limit >= Degradation.NUMERIC,
            lengths=(own or None, *self.degrade.sequence_lengths),
            clip_norm=self.training.clip_norm,
        )

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
    schema = json_schema_of(JobSpec)
    schema["properties"] |= {
        "array": {
            "anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
            "description": "Values of {placeholders}, one job each: all combinations of a mapping, or rows of a list.",
            "examples": [{"lr": ["1e-3", "1e-4"], "seed": [0, 1]}],
        },
        "max_concurrent": {
            "type": "integer",
            "minimum": 1,
            "description": "Most jobs of the array, or trials of the sweep, that run at once; without it, all, or 4.",
            "examples": [2],
        },
        "sweep": {
            "$ref": "#/$defs/Sweep",
            "description": "Trials with other values of {placeholders}, judged by a metric: a grid, or drawn.",
            "examples": [{"method": "grid", "parameters": {"lr": {"values": [0.001, 0.0001]}}}],
        },
    }
    schema["$defs"] |= sweep_json_schema()
    return schema
