"""Settings of a plan as metadata: names, types, defaults, and how people read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, get_type_hints

from orchestrator.specs.choices import AXES, Degradation, ParallelLayout
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Metadata of one field of a Plan: name, type, default, allowed values, and text forms."""

    name: str
    kind: Any  # its type
    usual: Any  # its default; MISSING where every plan sets it
    degradation: Degradation  # how much a change of it may alter the training
    short: Callable[[Plan], Sequence[str]] | None  # its part of a plan in one line; None: no part
    rows: Callable[[Plan], dict[str, str]] | None  # its rows in a table; None: its name and value
    hides_default: bool  # whether its default has no such row
    cheaper: tuple[
        Any, ...
    ]  # values that `degrade: numeric` may use instead of the default, best first
    # whether users may set it (`plan:`, `orc estimate --set`); else it follows from the job
    is_given: bool
    alias: str  # second name for `--set`
    least: int  # smallest value of a number

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names that `--set` accepts for the setting."""
        return AXES if self.kind is ParallelLayout else (self.name,)

    @cached_property
    def choices(self) -> JsonObject:
        """Allowed values by their text; {} where the setting is a number."""
        if self.kind is bool:
            return {format_setting_value(value): value for value in (False, True)}
        return (
            {format_setting_value(value): value for value in self.kind}
            if _is_enum(self.kind)
            else {}
        )


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _plan_settings() -> tuple[Setting, ...]:
    kinds = get_type_hints(Plan)
    return tuple(
        Setting(
            name=field.name,
            kind=kinds[field.name],
            usual=field.default,
            **field.metadata["setting"],
        )
        for field in fields(Plan)
    )


SETTINGS = _plan_settings()  # in the order in which people read them


@frozen
class Change:
    """A setting that differs between two plans, with both values as text."""

    setting: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.setting} {self.before} -> {self.after}"


def format_settings(plan: Plan) -> dict[str, str]:
    """Return {name: value as text} of the plan's settings, in display order."""
    flat: dict[str, str] = {}
    for setting in SETTINGS:
        value = getattr(plan, setting.name)
        if setting.rows is not None:
            flat |= setting.rows(plan)
        elif not (setting.hides_default and value == setting.usual):
            flat[setting.name] = format_setting_value(value)
    return flat | {"global_batch_size": str(plan.global_batch_size)}


def format_setting_value(value: Any) -> str:
    """Return a setting's value as one word of text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def list_changed_settings(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return each setting in which two plans differ, with both values; () for equal plans."""
    old = format_settings(before)
    new = format_settings(after)
    return tuple(
        Change(setting=name, before=old.get(name, "-"), after=new.get(name, "-"))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    )


def find_strongest_degradation(requested_values: Mapping[str, Any], plan: Plan) -> Degradation:
    """Return the strongest class of changes of the plan against the requested `{setting: value}`;
    EXACT for none.
    """
    changed = (
        setting
        for setting in SETTINGS
        if setting.name in requested_values
        and requested_values[setting.name] != getattr(plan, setting.name)
    )
    return max((setting.degradation for setting in changed), default=Degradation.EXACT)


def format_plan(plan: Plan) -> str:
    """Return the plan as one line of text: `2 gpus · dp2 · ZeRO-3 · micro 4x2 · checkpointing`."""
    return " · ".join(
        text for setting in SETTINGS if setting.short is not None for text in setting.short(plan)
    )
