"""Settings of a plan as everything outside of memory and cost formulas knows them, and as people read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, get_type_hints

from orchestrator.specs.choices import AXES, Degradation, ParallelLayout
from orchestrator.specs.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a Plan, as everything outside of memory and cost formulas knows it."""

    name: str
    kind: Any  # its type
    usual: Any  # its default; MISSING where every plan says it
    degradation: Degradation  # what a change of it touches
    short: Callable[[Plan], Sequence[str]] | None  # its words in a line; None: it has none of its own
    rows: Callable[[Plan], dict[str, str]] | None  # its rows in a table; None: its name and value
    cheaper: tuple[Any, ...]  # values that `degrade: numeric` may take instead of the usual one, the best first
    is_given: bool  # whether people may give it (`plan:`, `orc estimate --set`); else it follows from the job
    alias: str  # what `--set` takes for its name as well
    least: int  # of a number

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names under which `--set` takes it."""
        return AXES if self.kind is ParallelLayout else (self.name,)

    @cached_property
    def choices(self) -> dict[str, Any]:
        """Its values by their text; empty where it is a number."""
        if self.kind is bool:
            return {text_of(value): value for value in (False, True)}
        return {text_of(value): value for value in self.kind} if _is_enum(self.kind) else {}

    def from_json(self, value: Any) -> Any:
        """The value that `dataclasses.asdict` and JSON made of one."""
        if self.kind is ParallelLayout:
            return ParallelLayout(**value)
        if _is_enum(self.kind):
            return self.kind(value)
        return tuple((phase, samples) for phase, samples in value) if isinstance(value, list) else value


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _of_plan() -> tuple[Setting, ...]:
    kinds = get_type_hints(Plan)
    return tuple(
        Setting(name=one.name, kind=kinds[one.name], usual=one.default, **one.metadata["setting"])
        for one in fields(Plan)
    )


SETTINGS = _of_plan()  # in the order in which people read them


def plan_from_json(data: dict[str, Any]) -> Plan:
    """The plan that `dataclasses.asdict` wrote. Raises IllegalPlan where it names an illegal one."""
    return Plan(**{one.name: one.from_json(data[one.name]) for one in SETTINGS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that differs between two plans, as people read it."""

    setting: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.setting} {self.before} -> {self.after}"


def settings(plan: Plan) -> dict[str, str]:
    """The plan flattened to `setting: value` text, in the order in which people read it."""
    flat: dict[str, str] = {}
    for one in SETTINGS:
        flat |= {one.name: text_of(getattr(plan, one.name))} if one.rows is None else one.rows(plan)
    return flat | {"global_batch_size": str(plan.global_batch_size)}


def text_of(value: Any) -> str:
    """A setting's value in one word."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, int) else str(value)


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Every setting in which two plans differ; empty where they are equal."""
    old, new = settings(before), settings(after)
    return tuple(
        Change(setting=name, before=old.get(name, "-"), after=new.get(name, "-"))
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    )


def degradation(asked: Mapping[str, Any], plan: Plan) -> Degradation:
    """The worst class among the settings that are not as `asked` (values by name); EXACT where all are."""
    changed = (one for one in SETTINGS if one.name in asked and asked[one.name] != getattr(plan, one.name))
    return max((one.degradation for one in changed), default=Degradation.EXACT)


def in_short(plan: Plan) -> str:
    """The plan in a line: `2 gpus · dp2 · ZeRO-3 · micro 4x2 · checkpointing`."""
    return " · ".join(words for one in SETTINGS if one.short is not None for words in one.short(plan))
