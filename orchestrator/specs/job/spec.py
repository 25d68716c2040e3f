"""JobSpec, a parsed job file. It is immutable and serialises back to the same text."""

from __future__ import annotations

import json
import shlex
from typing import Literal, get_args

from pydantic import (
    Field,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from orchestrator.specs.choices import Degradation, Precision
from orchestrator.specs.deepspeed_file import DeepSpeedKeys, list_leaf_keys
from orchestrator.specs.errors import SpecError
from orchestrator.specs.fields import (
    DeadlineField,
    Hours,
    Name,
    Priority,
    Seconds,
    Speeds,
    UserName,
)
from orchestrator.specs.job.array import JOBS_MAX
from orchestrator.specs.job.code_source import CodeSource
from orchestrator.specs.job.frameworks import (
    Framework,
    fill_defaults,
    find_parallelism_option,
    split_command,
)
from orchestrator.specs.job.model import BATCH_MAX, STEPS_MAX, DataSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.pins import Pins, check_pins
from orchestrator.specs.job.sections import (
    DeclaredProfile,
    Degrade,
    Dependencies,
    GpuRange,
    Gpus,
    Member,
    Promise,
    Remedy,
    Retries,
)
from orchestrator.specs.job.sweep import METRICS, Trial, make_sweep_json_schema
from orchestrator.specs.job.trainer import (
    ConfigFile,
    Knobs,
    LaunchStyle,
    Resume,
    Success,
    check_script,
    replace_interpreter,
)
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.profile import MeasuredLine, OwnSettings, TracedProfile
from orchestrator.specs.spec_model import (
    Command,
    Counter,
    Environment,
    SpecModel,
    StringMap,
    Variable,
    make_json_schema,
)

FAMILY_LENGTH_MAX = 200  # characters
REMEDIES_MAX = 16
# what intake and scheduling add
IN_NO_FILE = ("member", "traced", "measured", "relative_to", "source", "trial")


class JobSpec(SpecModel):
    """A training job: a `command` with `knobs`, or a `model` with `data`."""

    name: Name
    family: str | None = Field(default=None, max_length=FAMILY_LENGTH_MAX)
    priority: Priority = 0
    user: UserName | None = None
    depends_on: Dependencies = ()
    # of an array, which is expanded where a job file is read
    member: SkipJsonSchema[Member | None] = None
    deadline: DeadlineField | None = None
    start_window: Hours | None = None
    stays: bool = False
    gpus: Gpus = Field(default=GpuRange(), examples=[{"min": 1, "max": 4}, 2])
    guarantee: Promise = None
    objective: Literal["trusted", "fastest"] = "trusted"
    steps: int | None = Field(default=None, ge=1, le=STEPS_MAX)
    speeds: Speeds = ()
    global_batch_size: int = Field(ge=1, le=BATCH_MAX)
    precision: Precision = Precision.FP32

    model: ModelSpec | None = None
    data: DataSpec = DataSpec()
    training: TrainingSpec = TrainingSpec()

    command: Command | None = None
    python: str | None = Field(default=None, min_length=1)
    trains: ModelSpec | None = None
    trainer: Framework | None = Field(
        default=None,
        json_schema_extra={
            "anyOf": [
                {"enum": list(get_args(Framework))},
                {"pattern": r"\.ya?ml$"},
                {"type": "null"},
            ]
        },
    )
    launch: LaunchStyle = "ranks"
    workdir: str | None = None
    env: Environment = ()
    secrets: tuple[Variable, ...] = ()
    knobs: Knobs = Knobs()
    config: ConfigFile | None = None
    deepspeed: DeepSpeedKeys | None = None
    success: Success = Success()
    resume: Resume = Resume()
    progress: Counter | None = None
    phases: StringMap = ()

    profile: DeclaredProfile | None = None
    traced: SkipJsonSchema[
        tuple[TracedProfile, ...]
    ] = ()  # of a model that no closed form knows: added at intake
    probe: Literal["auto", "never"] = "auto"
    # what its family was probed to need: never said in a file
    measured: SkipJsonSchema[MeasuredLine | None] = None
    # of its family, those that outcomes are told by: as above
    relative_to: SkipJsonSchema[OwnSettings | None] = None
    source: SkipJsonSchema[CodeSource | None] = None  # of its code: added at intake
    trial: SkipJsonSchema[Trial | None] = None  # of a sweep, of which a file says the first
    plan: Pins = ()
    degrade: Degrade = Degrade()
    remedies: tuple[Remedy, ...] = Field(default=(), max_length=REMEDIES_MAX)
    retries: Retries = Retries()
    on_caught_oom: Literal["recover", "accept"] = "recover"
    hang_timeout: Seconds = 600.0
    startup_timeout: Seconds = 900.0
    time_limit: Seconds | None = Field(default=None, gt=0)

    def as_job_file(self) -> JsonObject:
        """Return the content of a job file from which this job would be read; keys that no file can
        have are left out.
        """
        content = self.model_dump(mode="json", exclude_defaults=True, exclude=set(IN_NO_FILE))
        if self.command is not None:
            content["command"] = shlex.join(self.command)
        return content

    @property
    def family_name(self) -> str:
        return self.family or self.name

    @property
    def is_script(self) -> bool:
        return self.command is not None

    @property
    def is_precision_known(self) -> bool:
        """Whether the job trains in the precision of its plans. A script computes in its own, unless
        a knob tells it one; a file's fp32 is the default, and no statement.
        """
        return (
            not self.is_script
            or self.knobs.precision is not None
            or self.precision is not Precision.FP32
        )

    @property
    def known_model(self) -> ModelSpec | None:
        """The model from which the job's costs follow: its own, or that declared of its script;
        None if unknown.
        """
        return self.model or self.trains

    @property
    def is_compared(self) -> bool:
        """Whether the job runs one strategy of a comparison."""
        return self.member is not None and self.member.compared

    @property
    def guaranteed_gpus(self) -> int:
        """Number of devices whose training speed is guaranteed to the job; 0 without a guarantee."""
        return 0 if self.guarantee is None else self.guarantee.gpus or self.gpus.max

    @property
    def optimizer_steps(self) -> int | None:
        """Total optimizer steps of the job; None where the job file does not give them."""
        return self.steps if self.is_script else self.training.max_steps

    @model_validator(mode="before")
    @classmethod
    def _fill_gpus_from_speeds(cls, raw: object) -> object:
        """Return the job data with `gpus` filled in from the numbers of devices in `speeds`, if it
        is missing.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("speeds"), dict) or "gpus" in raw:
            return raw
        counts = [int(count) for count in map(str, raw["speeds"]) if count.isdecimal()]
        return {**raw, "gpus": {"min": min(counts), "max": max(counts)}} if counts else raw

    @model_validator(mode="before")
    @classmethod
    def _fill_trainer_defaults(cls, raw: object) -> object:
        return (
            fill_defaults(raw) if isinstance(raw, dict) and raw.get("trainer") is not None else raw
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_interpreter(cls, raw: object) -> object:
        """Return the job data with the command's program replaced by the `python` that the job
        names.
        """
        if not isinstance(raw, dict) or not isinstance(raw.get("python"), str):
            return raw
        argv = split_command(raw.get("command"))
        return {**raw, "command": replace_interpreter(argv, raw["python"])} if argv else raw

    @model_validator(mode="after")
    def _check_job(self) -> JobSpec:
        """Raise ValueError or SpecError at the first contradiction between keys of the job."""
        self._check_model()
        self._check_data()
        self._check_speeds()
        self._check_trainer()
        self._check_deepspeed()
        self._check_guarantee()
        check_script(self.command, self.launch, self.knobs, self.config, self.phases)
        self._check_degrade()
        if self.plan:
            self._check_plan()
        if self.trial is not None:
            self._check_metric(self.trial)
        return self

    def _check_model(self) -> None:
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
            raise ValueError(
                "`model.weights` is said of what a script `trains`: ours keep fp32 masters"
            )
        if self.trains is not None and self.trains.weights not in (
            None,
            Precision.FP32,
            self.precision,
        ):
            raise ValueError("`trains.weights` is fp32 or the job's `precision`")
        if self.trains is not None and self.command is None:
            raise ValueError(
                "`trains` says which model somebody's script trains: it needs a `command`"
            )

    def _check_data(self) -> None:
        if self.model is None:
            return
        if self.model.decoder is not None and not self.data.text:
            raise ValueError("a decoder job needs `data.text`: the files it is trained on")
        if self.model.hf is not None and not self.data.files:
            raise ValueError(
                "a transformers model needs `data.text`, `data.chat`, `data.tokens` or `data.tensors`"
            )
        if self.steps is not None or self.speeds:
            raise ValueError(
                "`steps` and `speeds` are a script's: a model says `training.max_steps`, and is costed"
            )

    def _check_speeds(self) -> None:
        counts = [count for count, _ in self.speeds]
        if len(set(counts)) < len(counts) or any(step_s <= 0 for _, step_s in self.speeds):
            raise ValueError("`speeds` names each number of devices once, with more than 0 seconds")
        if counts and not any(self.gpus.min <= count <= self.gpus.max for count in counts):
            raise ValueError(
                f"`speeds` knows none of {self.gpus.min} to {self.gpus.max} devices, which `gpus` allows"
            )

    def _check_trainer(self) -> None:
        if self.python is not None and self.command is None:
            raise ValueError(
                "`python` is the interpreter of somebody's script: it needs a `command`"
            )
        if self.trainer is not None and self.command is None:
            raise ValueError("`trainer` says how somebody's script is driven: it needs a `command`")
        cut = find_parallelism_option(self.trainer, self.command or ())
        if cut is not None and not self.speeds:
            raise SpecError(
                "the command cuts the model over ranks, and plans of a script are data parallel only",
                path="command",
                got=" ".join(cut),
                hint="leave it out, or say `speeds`: then each number of devices runs as the script cuts it",
            )

    def _check_deepspeed(self) -> None:
        if self.deepspeed is None:
            return
        if not (self.knobs.has_deepspeed_file or self.knobs.has_stage_in_file):
            raise SpecError(
                "the job writes no DeepSpeed file to which these keys could go",
                path="deepspeed",
                hint="say knobs.deepspeed_config: {flag: --deepspeed}, zero_stage: {accelerate: deepspeed}, or with "
                "`config` zero_stage: {key: zero_optimization.stage}",
            )
        if self.knobs.has_stage_in_file:
            for name, value in list_leaf_keys(json.loads(self.deepspeed)):
                if isinstance(value, list):
                    raise SpecError(
                        "a list cannot be set in a copy of the script's own file",
                        path=f"deepspeed.{name}",
                        got=value,
                        hint="leave it in the file of `config`",
                    )

    def _check_degrade(self) -> None:
        if self.degrade.sequence_lengths and self.degrade.limit is not Degradation.SEMANTIC:
            raise ValueError(
                "`degrade.sequence_lengths` changes the training: it needs `degrade.allow: semantic`"
            )
        rule = self.degrade.global_batch_size
        if (
            self.is_script
            and rule is not None
            and rule.learning_rate != "same"
            and self.learning_rate is None
        ):
            raise SpecError(
                "nothing tells the script another learning rate",
                path="degrade.global_batch_size.learning_rate",
                got=rule.learning_rate,
                hint="say knobs.learning_rate: {flag: ..., default: NUMBER}, or learning_rate: same",
            )

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the training; None for a script to which none is passed."""
        if not self.is_script:
            return self.training.learning_rate
        knob = self.knobs.learning_rate
        return None if knob is None or knob.default is None else float(knob.default)

    def _check_metric(self, trial: Trial) -> None:
        """Raise ValueError where the trial's metric cannot be read from the job."""
        metric = trial.sweep.metric
        if self.is_script and metric.log is None:
            raise ValueError("`sweep.metric.log` says which line of a script's log has the metric")
        if not self.is_script and (metric.log is not None or metric.name not in METRICS):
            raise ValueError(
                f"`sweep.metric.name` of a model is one of {', '.join(METRICS)}, without `log`"
            )

    def _check_plan(self) -> None:
        """Raise SpecError for a pinned setting that no plan of the job can have."""
        knob = self.knobs.sequence_length
        length = (
            self.data.sequence_length
            if self.model is not None
            else knob and knob.default and int(knob.default)
        )
        check_pins(
            self.plan,
            knobs=self.knobs if self.is_script else None,
            precision=self.precision,
            may_change_precision=self.degrade.limit >= Degradation.NUMERIC,
            sequence_lengths=(length or None, *self.degrade.sequence_lengths),
            clip_norm=self.training.clip_norm,
        )

    def _check_guarantee(self) -> None:
        """Raise ValueError where the start or end of a guaranteed job cannot be predicted at
        submission.
        """
        if self.guarantee is None:
            return
        if not self.gpus.min <= self.guaranteed_gpus <= self.gpus.max:
            raise ValueError(
                f"`guarantee.gpus` is {self.guaranteed_gpus}: `gpus` allows {self.gpus.min} to {self.gpus.max}"
            )
        if self.optimizer_steps is None:
            raise ValueError(
                "`guarantee` needs `steps`: what comes next is promised devices from the end of this on"
            )
        if self.depends_on or self.start_window is not None:
            raise ValueError(
                "`guarantee` is given at submission: it goes with neither `depends_on` nor `start_window`"
            )
        if self.member is not None and self.member.max_concurrent < self.member.of:
            raise ValueError(
                "`guarantee` promises each job of an array its start: it does not go with `max_concurrent`"
            )


def make_job_json_schema() -> JsonObject:
    """Return the JSON Schema (2020-12) of a job file, for editors."""
    schema = make_json_schema(JobSpec)
    schema["properties"] |= {
        "array": {
            "anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}],
            "description": "Values of {placeholders}, one job each: all combinations of a mapping, or rows of a list.",
            "examples": [{"lr": ["1e-3", "1e-4"], "seed": [0, 1]}],
        },
        "max_concurrent": {
            "type": "integer",
            "minimum": 1,
            "maximum": JOBS_MAX,
            "description": "Most jobs of the array, or trials of the sweep, that run at once; without it, all, or 4.",
            "examples": [2],
        },
        "sweep": {
            "$ref": "#/$defs/Sweep",
            "description": "Trials with other values of {placeholders}, judged by a metric: a grid, or drawn.",
            "examples": [{"method": "grid", "parameters": {"lr": {"values": [0.001, 0.0001]}}}],
        },
    }
    schema["$defs"] |= make_sweep_json_schema()
    return schema
