"""A user's training script: its knobs (settings it takes), its launcher, and how its success is
recognised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from orchestrator.specs.choices import ZeroStage
from orchestrator.specs.command_line import Argv
from orchestrator.specs.deepspeed_file import ZERO
from orchestrator.specs.errors import SpecError
from orchestrator.specs.patterns import compile_pattern
from orchestrator.specs.spec_model import Command, Counter, Glob, Pattern, SpecModel, Variable

# Who starts one process per rank: we, the script's own launcher on each node, or the script itself
# (`dora run` and
# scripts that spawn their ranks stay on one node: nothing tells them of another).
LaunchStyle = Literal["ranks", "torchrun", "accelerate", "deepspeed", "dora", "self"]
ON_ONE_NODE: tuple[LaunchStyle, ...] = ("dora", "self")
STARTS_PYTHON: tuple[LaunchStyle, ...] = ("torchrun", "accelerate", "deepspeed")
PHASES = ("startup", "encoding", "training", "optimizer", "evaluation", "checkpointing")
YES_OR_NO = (
    "activation_checkpointing",
    "precision",
    "zero_stage",
    "optimizer_in_backward",
)  # settings that a bare switch can say


def _format_command_word(value: object) -> object:
    """Return `true` and `4` as text for a command line; null unchanged."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _parse_values(values: object) -> object:
    return (
        tuple(
            (_format_command_word(name), _format_command_word(word))
            for name, word in values.items()
        )
        if isinstance(values, dict)
        else values
    )


ValueMap = Annotated[
    tuple[tuple[str, str | None], ...],
    BeforeValidator(_parse_values),
    PlainSerializer(dict, return_type=dict[str, str | None]),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        }
    ),
]


GLOBS_MAX = 64  # of one key

Globs = Annotated[
    tuple[Glob, ...],
    Field(max_length=GLOBS_MAX),
    BeforeValidator(lambda globs: (globs,) if isinstance(globs, str) else globs),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class Knob(SpecModel):
    """How a script takes one setting: exactly one of flag, switch, override, key, env and
    accelerate.
    """

    flag: str | None = None
    switch: str | None = None
    override: str | None = None
    key: str | None = None
    env: Variable | None = None
    accelerate: Literal["fsdp", "deepspeed"] | None = None
    default: int | float | str | None = None
    values: ValueMap = ()
    per: Literal["rank", "node", "global"] = "rank"
    multiplied_by_ranks: bool = False
    separator: str = ","
    relative: bool = False
    phase: Literal["encoding", "evaluation"] | None = None
    also: tuple[Knob, ...] = ()

    @model_validator(mode="after")
    def _check_one_way(self) -> Knob:
        ways = (self.flag, self.switch, self.override, self.key, self.env, self.accelerate)
        if sum(way is not None for way in ways) != 1:
            raise ValueError(
                "a knob is taken in exactly one way: flag, switch, override, key, env or accelerate"
            )
        if self.switch is not None and self.values:
            raise ValueError("a switch is there or not: it takes no `values`; use `flag` or `env`")
        if any(knob.also for knob in self.also):
            raise ValueError("knobs under `also` have no `also` of their own")
        if self.phase is not None and not isinstance(self.default, int):
            raise ValueError(
                "a knob of a phase needs its own `default`: the batch size that it starts from"
            )
        return self

    @property
    def all(self) -> tuple[Knob, ...]:
        """The knob itself, followed by the knobs under `also`."""
        return (self, *self.also)


def _is_positive(value: int | float | str) -> bool:
    """Return whether the text or number is a finite number above 0."""
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


# Knobs without which no short attempt can measure a script: it has a smaller micro-batch, and a
# folder of its own.
PROBED_BY = {
    "micro_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "output_dir": "output folder",
}


class Knobs(SpecModel):
    """Settings that the script takes from a plan. A setting without a knob is the same in every plan."""

    micro_batch_size: Knob | None = None
    gradient_accumulation_steps: Knob | Literal["derived"] | None = None
    global_batch_size: Knob | None = None
    activation_checkpointing: Knob | None = None
    precision: Knob | None = None
    full_checkpointing_layers: Knob | None = None
    optimizer_in_backward: Knob | None = None
    learning_rate: Knob | None = None
    sequence_length: Knob | None = None
    zero_stage: Knob | None = None
    deepspeed_config: Knob | None = None
    devices: Knob | None = None
    ranks: Knob | None = None
    nodes: Knob | None = None
    resume_from: Knob | None = None
    output_dir: Knob | None = None

    def items(self) -> Iterator[tuple[str, Knob]]:
        """Yield (setting, knob) of each declared setting. Knobs under `also` come as `setting.also[0]` and so on."""
        for name in type(self).model_fields:
            knob = getattr(self, name)
            for index, option in enumerate(knob.all if isinstance(knob, Knob) else ()):
                yield (name if index == 0 else f"{name}.also[{index - 1}]"), option

    @model_validator(mode="after")
    def _check_settings(self) -> Knobs:
        for name, knob in self.items():
            setting = name.partition(".")[0]
            if knob.switch is not None and setting not in YES_OR_NO:
                raise ValueError(
                    f"`{name}` takes a value, which a switch cannot say: use `flag` or `env`"
                )
            if knob.relative and name != "output_dir":
                raise SpecError(
                    "only an output folder is told as a relative path", path=f"{name}.relative"
                )
            if knob.accelerate is not None and setting != "zero_stage":
                raise SpecError(
                    "only sharding is said in accelerate's file", path=f"{name}.accelerate"
                )
            batch = setting == "micro_batch_size"
            if (knob.multiplied_by_ranks or knob.phase is not None) and not batch:
                raise SpecError(
                    "only a batch size has phases, and is multiplied by ranks", path=name
                )
            if knob.per != "rank" and setting not in ("micro_batch_size", "ranks"):
                raise SpecError(
                    "only batch sizes and `ranks` are per node or global",
                    path=f"{name}.per",
                    got=knob.per,
                )
        rate = None if self.learning_rate is None else self.learning_rate.default
        if rate is not None and not _is_positive(rate):
            what = "a learning rate is a number"
            raise SpecError(what, path="learning_rate.default", got=rate, allowed="above 0, finite")
        if self.derives_accumulation and self.micro_batch_size is None:
            what = "accumulation is derived from a micro-batch, which the script cannot be told"
            raise SpecError(
                what,
                path="gradient_accumulation_steps",
                got="derived",
                hint="say knobs.micro_batch_size: {flag: ...}, or leave this knob out",
            )
        if self.zero_stage is not None and self.deepspeed_config is not None:
            raise ValueError("a script is sharded in one way: `zero_stage` or `deepspeed_config`")
        return self

    @property
    def derives_accumulation(self) -> bool:
        """Whether the script computes gradient accumulation itself, from global batch, ranks and
        micro-batch.
        """
        return self.gradient_accumulation_steps == "derived"

    @property
    def has_deepspeed_file(self) -> bool:
        """Whether plans of the script may have a DeepSpeed file."""
        by_accelerate = self.zero_stage is not None and self.zero_stage.accelerate == "deepspeed"
        return by_accelerate or self.deepspeed_config is not None

    @property
    def has_stage_in_file(self) -> bool:
        """Whether the ZeRO stage is a key in the script's own DeepSpeed file, which is copied for
        each attempt.
        """
        key = None if self.zero_stage is None else self.zero_stage.key
        return key is not None and f".{key}".endswith(f".{ZERO}.stage")

    @property
    def is_sharded_by_fsdp(self) -> bool:
        """Whether a plan's ZeRO stages mean FSDP for this script, not DeepSpeed."""
        has_deepspeed = self.has_deepspeed_file or self.has_stage_in_file
        return self.zero_stage is not None and not has_deepspeed

    @property
    def offloads_by_fsdp(self) -> bool:
        """Whether a plan can turn on FSDP's offload to the host, which only accelerate's config
        file can.
        """
        return self.zero_stage is not None and self.zero_stage.accelerate == "fsdp"

    @property
    def shards_at_every_rank_count(self) -> bool:
        """Whether every plan with several ranks is sharded, because the ZeRO knob has no value for
        stage 0.
        """
        return (
            self.zero_stage is not None
            and bool(self.zero_stage.values)
            and "0" not in dict(self.zero_stage.values)
        )

    @property
    def zero_stages(self) -> tuple[ZeroStage, ...]:
        """ZeRO stages above 0 that the script accepts."""
        if self.deepspeed_config is not None:
            return (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
        if self.zero_stage is None:
            return ()
        from_two = (ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
        stages = from_two if self.is_sharded_by_fsdp else (ZeroStage.OPTIMIZER, *from_two)
        values = dict(self.zero_stage.values)
        return tuple(stage for stage in stages if not values or str(int(stage)) in values)


class ConfigFile(SpecModel):
    """A YAML or JSON config file of the script with knobs as keys. Each attempt gets a copy with its plan's values.

    Without `flag` the copy takes the file's place, in a working directory that links to everything else in `workdir`.
    """

    file: str = Field(pattern=r"\.(ya?ml|json)$")
    flag: str | None = None


class Success(SpecModel):
    """Signs of success required besides exit code 0."""

    artifacts: Globs = ()
    log: Pattern | None = None
    steps: Literal["all"] | None = None


class Resume(SpecModel):
    """The script's own checkpoints: how a complete checkpoint is recognised, and how a restart uses it."""

    checkpoints: Globs = ("checkpoint*", "step-*")
    on_sigterm: bool = False
    holds: Globs = ()
    step: Counter | None = None
    before: Command | None = None
    loses: tuple[str, ...] = ()


def check_script(
    command: Command | None,
    launch: LaunchStyle,
    knobs: Knobs,
    config: ConfigFile | None,
    phases: tuple[tuple[str, str], ...],
) -> None:
    """Raise SpecError where a script's launcher, knobs, config file and phases contradict each
    other.
    """
    if launch in STARTS_PYTHON and command and not is_python(command[0]):
        raise SpecError(
            f"`launch: {launch}` starts a Python script",
            path="command",
            got=" ".join(command[:3]),
            allowed="python script.py ..., or python -m package.module ...",
            hint=f"leave out {launch}'s own words: they are written from the plan",
        )
    if (
        launch == "dora"
        and command
        and (get_program_name(command[0]), *command[1:2]) != ("dora", "run")
    ):
        raise SpecError(
            "`launch: dora` starts `dora run`", path="command", got=" ".join(command[:3])
        )
    for name, knob in knobs.items():
        _check_knob(name, knob, launch, config, tuple(dict(phases)))
    if knobs.micro_batch_size is not None and knobs.micro_batch_size.phase is not None:
        raise SpecError(
            "the first micro-batch is that of training", path="knobs.micro_batch_size.phase"
        )
    for name, pattern in phases:
        if name not in PHASES:
            raise SpecError(
                "no phase of a training", path=f"phases.{name}", got=name, allowed=", ".join(PHASES)
            )
        try:
            compile_pattern(pattern)
        except ValueError as error:
            raise SpecError(str(error), path=f"phases.{name}", got=pattern) from None


def _check_knob(
    knob_name: str,
    knob: Knob,
    launch: LaunchStyle,
    config: ConfigFile | None,
    phases: tuple[str, ...],
) -> None:
    if knob.key is not None and config is None:
        raise SpecError(
            "a key of a config file, but no file is told",
            path=f"knobs.{knob_name}.key",
            hint="say `config: {file: config.yaml}`, with `flag` where the script is told its path",
        )
    if knob.accelerate is not None and launch != "accelerate":
        raise SpecError(
            "needs `launch: accelerate`", path=f"knobs.{knob_name}.accelerate", got=launch
        )
    if knob.phase is not None and knob.phase not in phases:
        raise SpecError(
            "no log line tells this phase",
            path=f"knobs.{knob_name}.phase",
            got=knob.phase,
            allowed=", ".join(phases) or "the job has no `phases`",
            hint=f"say `phases: {{{knob.phase}: 'a pattern of the line that begins it'}}`",
        )


def replace_interpreter(command: Sequence[str], python: str) -> Argv:
    """Return the command with `python` as its interpreter, or with its program from the same
    folder.
    """
    program, *arguments = command
    if not is_python(program):
        return (f"{python.rpartition('/')[0] or '.'}/{get_program_name(program)}", *arguments)
    return (python, *arguments)


def is_python(program: str) -> bool:
    """Return whether the program (a command's first word) is a Python interpreter."""
    return re.fullmatch(r"python[0-9.]*", get_program_name(program)) is not None


def get_program_name(program: str) -> str:
    """Return the last part of a program's path, such as `python3` of /usr/bin/python3."""
    return program.rpartition("/")[2]
