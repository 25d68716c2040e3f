"""Hyperparameter sweeps: parameters to try, the metric that ranks trials, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, WithJsonSchema, model_validator

from orchestrator.specs.job.array import INDEX, JOBS_MAX
from orchestrator.specs.job.model import EXACT_MAX, STEPS_MAX
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.spec_model import AS_PAIRS, Number, SpecModel, make_json_schema

REAL_MAX = 1e300
Whole = Annotated[int, Field(ge=-EXACT_MAX, le=EXACT_MAX)]
Real = Annotated[float, Field(ge=-REAL_MAX, le=REAL_MAX)]
Value = bool | Whole | Real | str
TRIALS_AT_ONCE = 4  # where the file has no `max_concurrent`
SWEEP = "sweep-"  # before the id of its first job: the id of a sweep
STOPPED_EARLY = "stopped early"  # the status of such a trial in a report
METRICS = ("loss", "grad_norm", "step_s")  # that our engines write of each step
KEPT = (  # of every trial: whose it is, its files, and what is found out
    *(
        (name,)
        for name in (
            "user",
            "workdir",
            "member",
            "trial",
            "traced",
            "measured",
            "relative_to",
            "source",
        )
    ),
    *(("data", name) for name in ("text", "chat", "tokens", "tokenizer")),
    *((section, name) for section in ("model", "trains") for name in ("hf", "factory")),
    ("resume", "before"),
)


class Metric(SpecModel):
    """The metric that ranks trials by its last value."""

    name: str = Field(default="loss", pattern=r"^[\w./ -]{1,200}$")
    goal: Literal["minimize", "maximize"] = "minimize"
    log: Number | None = None


class Parameter(SpecModel):
    """Values of one swept parameter: a list `values`, one `value`, or a range from `min` to `max`."""

    value: Value | None = None
    values: tuple[Value, ...] = ()
    min: Whole | Real | None = None
    max: Whole | Real | None = None
    distribution: Literal["uniform", "int_uniform", "log_uniform_values"] | None = None

    @model_validator(mode="after")
    def _check_one_kind_of_values(self) -> Parameter:
        has_range = self.min is not None or self.max is not None
        if (self.value is not None) + bool(self.values) + has_range != 1:
            raise ValueError("a parameter says `values`, `value`, or `min` and `max`")
        if not has_range:
            if self.distribution is not None:
                raise ValueError("`distribution` is of a range: it needs `min` and `max`")
            if len(set(map(repr, self.values))) < len(self.values):
                raise ValueError("`values` names each value once")
            return self
        if self.min is None or self.max is None or not self.min < self.max:
            raise ValueError("a range needs `min` below `max`")
        if self.distribution == "log_uniform_values" and self.min <= 0:
            raise ValueError("log_uniform_values needs `min` above 0")
        whole = all(isinstance(end, int) for end in (self.min, self.max))
        if self.distribution == "int_uniform" and not whole:
            raise ValueError("int_uniform needs whole numbers as `min` and `max`")
        return self

    @property
    def choices(self) -> tuple[Value, ...]:
        """The listed values; () for a range."""
        return self.values or (() if self.value is None else (self.value,))

    @property
    def is_whole(self) -> bool:
        """Whether the range contains only integers."""
        return (
            self.distribution != "uniform"
            and isinstance(self.min, int)
            and isinstance(self.max, int)
        )

    @property
    def extremes(self) -> tuple[Value, ...]:
        """All listed values, or the two ends of the range."""
        ends = () if self.min is None or self.max is None else (self.min, self.max)
        return self.choices or (ends if self.is_whole else tuple(map(float, ends)))


class EarlyTerminate(SpecModel):
    """Early stopping: when a trial ends because others were better at the same step."""

    type: Literal["median", "hyperband"]
    min_iter: int = Field(default=1, ge=1, le=STEPS_MAX)
    max_iter: int | None = Field(default=None, ge=1, le=STEPS_MAX)
    eta: int = Field(default=3, ge=2, le=1000)
    startup_trials: int = Field(default=5, ge=1, le=JOBS_MAX)


Parameters = Annotated[
    tuple[tuple[str, Parameter], ...],
    AS_PAIRS,
    PlainSerializer(
        lambda pairs: {
            name: parameter.model_dump(mode="json", exclude_defaults=True)
            for name, parameter in pairs
        },
        return_type=JsonObject,
    ),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "object"}}),
]


class Sweep(SpecModel):
    """A hyperparameter sweep: trials of one job with different parameters, each a job in the queue."""

    method: Literal["grid", "random", "bayes"]
    metric: Metric = Metric()
    parameters: Parameters = Field(min_length=1)
    max_trials: int | None = Field(default=None, ge=1, le=JOBS_MAX)
    early_terminate: EarlyTerminate | None = None
    seed: int = Field(default=0, ge=0, le=2**31)

    @model_validator(mode="after")
    def _check_consistent(self) -> Sweep:
        for name, parameter in self.parameters:
            if name == INDEX or not name.isidentifier():
                raise ValueError(
                    f"{name!r} is no name of a parameter: letters, digits and _, and not `{INDEX}`"
                )
            if self.method == "grid" and not parameter.choices:
                raise ValueError(f"a grid needs `values` of {name}: a range has no end of them")
        if self.method != "grid" and self.max_trials is None:
            raise ValueError(f"`{self.method}` needs `max_trials`")
        if self.method == "grid" and self.trials > JOBS_MAX:
            raise ValueError(
                f"the grid has {self.trials} combinations: at most {JOBS_MAX}, or say `max_trials`"
            )
        return self

    @property
    def trials(self) -> int:
        """The maximum number of trials."""
        combinations = math.prod(len(parameter.choices) for _, parameter in self.parameters)
        if self.method != "grid":
            return self.max_trials or 0
        return combinations if self.max_trials is None else min(combinations, self.max_trials)

    def compute_grid_parameters(self, trial_number: int) -> dict[str, Value]:
        """Return {parameter: value} of this trial of the grid, counted from 0; the last parameter
        varies fastest.
        """
        names = [name for name, _ in self.parameters]
        rows = product(*(parameter.choices for _, parameter in self.parameters))
        return dict(zip(names, next(islice(rows, trial_number, None)), strict=True))

    def list_parameters_to_check(self) -> Iterator[dict[str, Value]]:
        """Yield {parameter: value} of each trial with which a job file is checked.

        The first has the first value of every parameter. Each further one changes a single
        parameter to another of its extreme values.
        """
        first = {name: parameter.extremes[0] for name, parameter in self.parameters}
        yield first
        for name, parameter in self.parameters:
            yield from ({**first, name: value} for value in parameter.extremes[1:])


Values = Annotated[
    tuple[tuple[str, Value], ...],
    AS_PAIRS,
    PlainSerializer(dict, return_type=dict[str, Value]),
]


class Trial(SpecModel):
    """A job's number in its sweep, its parameters, and the template for further trials."""

    sweep: Sweep
    of: str | None = None  # id of the sweep; None: of a sweep that is being submitted
    number: int = Field(default=0, ge=0)  # 0, 1, 2 ...
    parameters: Values = ()
    max_concurrent: int = Field(ge=1, le=JOBS_MAX)
    template: tuple[
        tuple[tuple[str, ...], str], ...
    ]  # (keys, JSON) of each part of the job that says a placeholder

    @model_validator(mode="after")
    def _check_template(self) -> Trial:
        for keys, _ in self.template:
            if not keys or any(keys[: len(prefix)] == prefix for prefix in KEPT):
                raise ValueError(
                    f"every trial has the same `{'.'.join(keys)}`: take the placeholder out of it"
                )
        return self


def list_template_parts(
    data: Mapping[str, Any], is_template: Any, parent_keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (keys, part) of each smallest part of a document for which `is_template(part)` is true;
    `plan` is one part.
    """
    for key, part in data.items():
        if isinstance(part, dict) and (*parent_keys, key) != ("plan",):
            yield from list_template_parts(part, is_template, (*parent_keys, str(key)))
        elif is_template(part):
            yield (*parent_keys, str(key)), part


def make_sweep_json_schema() -> JsonObject:
    """Return the `$defs` of `sweep:` for the JSON Schema of a job file."""
    schema = make_json_schema(Sweep)
    parameter = make_json_schema(Parameter)
    schema["properties"]["parameters"]["additionalProperties"] = {"$ref": "#/$defs/Parameter"}
    definitions = {"Sweep": schema, "Parameter": parameter}
    plain = {
        name: {key: part for key, part in definition.items() if key[0] != "$"}
        for name, definition in definitions.items()
    }
    return {**schema["$defs"], **plain}
