"""The bodies of the API's requests. An unknown key is an error."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.specs.access import Role
from orchestrator.specs.fault import FaultKind
from orchestrator.specs.fields import UserName

LIFETIME_S_MAX = 100 * 365 * 86400.0  # of a token


class FaultRequest(BaseModel):
    """`orc rehearse`: the fault, its rank, and the step before whose completion it happens."""

    model_config = ConfigDict(extra="forbid")
    kind: FaultKind
    rank: int = Field(ge=0)
    step: int = Field(ge=0)


class SubmitRequest(BaseModel):
    """A job as `JobSpec.model_dump(mode="json")` writes it."""

    model_config = ConfigDict(extra="forbid")
    spec: dict[str, Any]
    fault: FaultRequest | None = None


class CancelRequest(BaseModel):
    """Jobs to cancel, or the arrays that they belong to."""

    model_config = ConfigDict(extra="forbid")
    jobs: list[str] = Field(min_length=1)
    whole_arrays: bool = False


class BatchRequest(BaseModel):
    """Jobs that are submitted atomically."""

    model_config = ConfigDict(extra="forbid")
    jobs: list[SubmitRequest] = Field(min_length=1)


class DigestsRequest(BaseModel):
    """SHA-256 of archives that a client may have to upload."""

    model_config = ConfigDict(extra="forbid")
    digests: list[str] = Field(max_length=1000)


class ObserveRequest(BaseModel):
    """Outcomes as `views.observations_view` writes them."""

    model_config = ConfigDict(extra="forbid")
    observations: list[dict[str, Any]]


class DrainRequest(BaseModel):
    """`undo`: the node accepts new attempts again."""

    model_config = ConfigDict(extra="forbid")
    undo: bool = False


class NodeRequest(BaseModel):
    """A machine that joins: its node as `NodeSpec.model_dump(mode="json")` writes it, and its address."""

    model_config = ConfigDict(extra="forbid")
    node: dict[str, Any]
    address: str


class UserRequest(BaseModel):
    """A user that is added, or gets another role."""

    model_config = ConfigDict(extra="forbid")
    role: Role


class TokenRequest(BaseModel):
    """A token for a user."""

    model_config = ConfigDict(extra="forbid")
    user: UserName
    lifetime_s: float | None = Field(default=None, gt=0, le=LIFETIME_S_MAX, allow_inf_nan=False)


class TryRequest(BaseModel):
    """Targets of notifications to try; none: all."""

    model_config = ConfigDict(extra="forbid")
    targets: list[str] = Field(default=[], max_length=100)


class ShutdownRequest(BaseModel):
    """`force` ends the service even while jobs run."""

    model_config = ConfigDict(extra="forbid")
    force: bool = False
