"""Pins: settings of a plan that a user fixes by name, in `plan:` of a job, `--plan` or `orc estimate --set`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, ValidationInfo, WithJsonSchema

from orchestrator.specs.choices import AXES, Engine, Offload, Precision, ZeroStage
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import SpecError, suggest_word
from orchestrator.specs.job.trainer import Knobs
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import SETTINGS, Setting, format_setting_value
from orchestrator.specs.spec_model import HISTORY

GIVEN = {
    key: setting for setting in SETTINGS if setting.is_given for key in setting.keys
}  # settings that people may give
SHORT = {setting.alias: setting.name for setting in SETTINGS if setting.alias}
KNOB_OF = {  # of a script, by the setting that it takes; a pin of another one has to be its default
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "activation_checkpointing": "activation_checkpointing",
    "precision": "precision",
    "sequence_length": "sequence_length",
    "zero_stage": "zero_stage",
    "offload": "deepspeed_config",
    "full_checkpointing_layers": "full_checkpointing_layers",
    "optimizer_in_backward": "optimizer_in_backward",
}


def make_unknown_setting_error(key: str, raw: object, source: str = "") -> SpecError:
    """Return the SpecError for a pinned name that is no setting of a plan."""
    return SpecError(
        "unknown setting of a plan",
        source=source,
        path=key,
        got=raw,
        allowed=", ".join(GIVEN),
        hint=suggest_word(key, (*GIVEN, *SHORT)),
    )


def parse_setting_value(setting: Setting, key: str, raw: object, source: str = "") -> Any:
    """Return the value of a setting in its type, from a text or a number. Raises SpecError."""
    choices = setting.choices
    text = format_setting_value(raw)
    if text in choices:
        return choices[text]
    if choices:
        raise SpecError(
            "not one of the possible values",
            source=source,
            path=key,
            got=raw,
            allowed=", ".join(choices),
            hint=suggest_word(text, choices),
        )
    if not text.isdecimal() or int(text) < setting.least:
        raise SpecError(
            "not a number of things",
            source=source,
            path=key,
            got=raw,
            allowed=f"{setting.least} or more",
        )
    return int(text)


def _read_pins(raw: object, info: ValidationInfo) -> object:
    """Return a mapping as (name, value) pins, in the order of the settings.

    Raises SpecError, except for stored pins, which an older version may have written.
    """
    if isinstance(raw, tuple):
        return raw
    if not isinstance(raw, Mapping):
        raise SpecError(
            "the value is of the wrong kind", got=raw, allowed="a section of `setting: value`"
        )
    if info.context is HISTORY:
        return tuple((key, _parse_stored_value(key, value)) for key, value in raw.items())
    values: dict[str, Any] = {}
    for name, value in raw.items():
        key = SHORT.get(str(name), str(name))
        if key not in GIVEN:
            raise make_unknown_setting_error(key, value)
        if key in values:
            raise SpecError("the setting is given twice", path=str(name), got=value)
        values[key] = parse_setting_value(GIVEN[key], str(name), value)
    return tuple((key, values[key]) for key in GIVEN if key in values)


def _parse_stored_value(key: str, value: Any) -> Any:
    """Return a stored setting's value in its type; unchanged where no setting has this name any
    more.
    """
    setting = GIVEN.get(key)
    return value if setting is None else setting.choices.get(format_setting_value(value), value)


Pins = Annotated[  # settings of a plan with their values
    tuple[tuple[str, Any], ...],
    BeforeValidator(_read_pins),
    PlainSerializer(
        lambda pins: {
            key: value.value if isinstance(value, Enum) else value for key, value in pins
        },
        return_type=dict[str, str | int | bool],
    ),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"enum": [*GIVEN, *SHORT]},
            "additionalProperties": {"type": ["string", "integer", "boolean"]},
        }
    ),
]


def make_pins(plan: Plan, knobs: Knobs | None = None) -> tuple[tuple[str, Any], ...]:
    """Return all settings of a plan as (name, value) pins, so that the plan is the only one of the
    job that has them.

    `knobs` are those of a script, None for a model: a setting without a knob is the same in all
    plans, and no pin.
    """
    values = {key: getattr(plan.layout if key in AXES else plan, key) for key in GIVEN}
    values = {key: value for key, value in values.items() if value is not None}
    if knobs is not None:
        for key in list(_list_settings_without_knob(values, knobs, plan.precision)):
            del values[key]
    return tuple(values.items())


def matches_pins(plan_part: object, pins: Mapping[str, Any]) -> bool:
    """Return whether a plan's layout, or another part of a plan, has the pinned value of each
    setting in it.
    """
    return all(getattr(plan_part, key, value) == value for key, value in pins.items())


def format_pins(pins: tuple[tuple[str, Any], ...]) -> str:
    """Return the pins as text, such as `zero_stage=3, micro_batch_size=2`."""
    return ", ".join(f"{key}={format_setting_value(value)}" for key, value in pins)


def check_pins(
    pins: tuple[tuple[str, Any], ...],
    *,
    knobs: Knobs | None,
    precision: Precision,
    may_change_precision: bool,
    sequence_lengths: tuple[int | None, ...],
    clip_norm: float | None,
) -> None:
    """Raise SpecError for a pin that no hardware can satisfy for the job.

    `knobs` are those of a script, None for a model. `sequence_lengths` are the possible ones of the
    job. `may_change_precision` is whether a plan may change the job's precision.
    """
    values = dict(pins)
    if values.get("optimizer_in_backward"):
        check_update_in_backward(clip_norm, "plan.optimizer_in_backward")
    engines = tuple(
        engine for engine in Engine if get_engine_facts(engine).is_ours is (knobs is None)
    )
    if (engine := values.get("engine", engines[0])) not in engines:
        raise SpecError(
            "the job has another engine",
            path="plan.engine",
            got=engine.value,
            allowed=", ".join(engines),
        )
    if knobs is not None:
        for key in _list_settings_without_knob(values, knobs, precision):
            knob = KNOB_OF.get(key)
            hint = (
                f"declare `knobs.{knob}`, or leave the setting out"
                if knob
                else "leave the setting out"
            )
            raise SpecError(
                "no knob of the script takes this",
                path=f"plan.{key}",
                got=format_setting_value(values[key]),
                hint=hint,
            )
    if values.get("precision", precision) is not precision and not may_change_precision:
        raise SpecError(
            "the job computes in another precision",
            path="plan.precision",
            got=values["precision"].value,
            allowed=precision.value,
            hint=f"say `precision: {values['precision'].value}`, or `degrade: {{allow: numeric}}`",
        )
    if "sequence_length" in values and values["sequence_length"] not in sequence_lengths:
        raise SpecError(
            "the job has another sequence length",
            path="plan.sequence_length",
            got=values["sequence_length"],
            allowed=", ".join(str(length) for length in sequence_lengths if length is not None),
            hint="name it in `degrade.sequence_lengths`, with `degrade.allow: semantic`",
        )


def check_update_in_backward(clip_norm: float | None, path: str) -> None:
    """Raise SpecError where a job that clips gradients updates them in the backward pass.

    The total norm is known only after the backward pass. `path` is the key that the error names.
    """
    if clip_norm is not None:
        raise SpecError(
            "the job clips by the norm of all gradients, which are never there together",
            path=path,
            got=f"true, with clip_norm {clip_norm:g}",
            hint="say `training: {clip_norm: null}`, which is another training",
        )


def _list_settings_without_knob(
    pins: Mapping[str, Any], knobs: Knobs, precision: Precision
) -> Iterator[str]:
    """Yield the names of pinned settings for which the script has no knob."""
    is_sharded_by_deepspeed = bool(knobs.zero_stages) and not knobs.is_sharded_by_fsdp
    for key, value in pins.items():
        usual = precision if key == "precision" else GIVEN[key].usual
        if key in ("engine", "dp", "tp") or value == (1 if key in AXES else usual):
            continue
        if key == "zero_stage":
            is_told = value is ZeroStage.NONE or value in knobs.zero_stages
        elif key == "offload":
            is_told = (is_sharded_by_deepspeed and not knobs.has_stage_in_file) or (
                value is Offload.PARAMETERS and knobs.offloads_by_fsdp
            )
        else:
            is_told = getattr(knobs, KNOB_OF.get(key, ""), None) is not None
        if not is_told:
            yield key
