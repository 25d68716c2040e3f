"""NotifySpec, `notify:` of the cluster file: who is notified of what. It names environment variables, never secrets."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from orchestrator.specs.clock import Deadline, parse_deadline
from orchestrator.specs.errors import SpecError
from orchestrator.specs.fields import Name
from orchestrator.specs.spec_model import SpecModel

VARIABLE = r"^[A-Z_][A-Z0-9_]{0,127}$"


class NoticeKind(StrEnum):
    """The subject of a notification."""

    FAILED = "failed"  # a job failed for good, was refused, or asks what only a person can allow
    LATE = "late"  # a job is expected to miss its deadline
    NODE_LOST = "node_lost"  # an attempt lost its node
    DRIVER = "driver"  # devices of a node cannot be read by the driver
    UNREADABLE = "unreadable"  # rows of the journal cannot be read and stand aside
    REPORT = "report"  # the morning report


def _check_variable_name(name: object) -> object:
    """Return the name of an environment variable; raise SpecError for other text, without repeating
    it.

    The text may be an address, which is a secret.
    """
    if not isinstance(name, str) or not re.fullmatch(VARIABLE, name):
        raise SpecError(
            "a secret is named, not written",
            allowed="name of an environment variable of the service, such as ORC_NOTIFY_URL",
        )
    return name


Variable = Annotated[
    str,
    BeforeValidator(_check_variable_name),
    WithJsonSchema({"type": "string", "pattern": VARIABLE}),
]


def _parse_hour(text: object) -> object:
    if isinstance(text, Deadline):
        return text
    deadline = parse_deadline(text)
    if deadline.day is not None:
        raise ValueError("expected a time of each day, such as 07:00 Europe/Berlin")
    return deadline


Hour = Annotated[
    Deadline,
    BeforeValidator(_parse_hour),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string"}),
]


class TargetSpec(SpecModel):
    """A receiver of notifications: a signed webhook, or any service that apprise reaches."""

    name: Name
    apprise: Variable | None = None
    webhook: Variable | None = None
    signed_with: Variable | None = None
    kinds: tuple[NoticeKind, ...] = Field(default=tuple(NoticeKind), min_length=1)

    @model_validator(mode="after")
    def _check_one_kind_of_target(self) -> TargetSpec:
        if (self.apprise is None) == (self.webhook is None):
            raise ValueError("a target has one of `apprise` and `webhook`")
        if (self.webhook is None) != (self.signed_with is None):
            raise ValueError("`webhook` and `signed_with` go together")
        return self


class NotifySpec(SpecModel):
    """Receivers of notifications, and the hour of the morning report."""

    targets: tuple[TargetSpec, ...] = ()
    report_at: Hour | None = None
    allow_hosts: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_distinct_names(self) -> NotifySpec:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ValueError("a target is named once")
        if self.report_at is not None and not any(
            NoticeKind.REPORT in target.kinds for target in self.targets
        ):
            raise ValueError("`report_at` needs a target whose `kinds` has `report`")
        return self


UNNOTIFIED = NotifySpec()  # what a cluster file means that says no `notify`
