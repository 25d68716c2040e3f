"""Request bodies of the API. An unknown key is an error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.specs.access import Role
from orchestrator.specs.fault import FaultKind
from orchestrator.specs.fields import DEVICES_MAX, UserName
from orchestrator.specs.job.model import BATCH_MAX, STEPS_MAX
from orchestrator.specs.job.sections import LearningRateRule
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import check_storable
from orchestrator.specs.plain_text import join_first_words

JOBS_MAX = 10_000  # of one request
UNKNOWN_SHOWN_MAX = 20
UNKNOWN_CHARACTERS_MAX = 80
SETTINGS_MAX = 100  # of one request
LIFETIME_S_MAX = 100 * 365 * 86400.0  # of a token


JobId = Annotated[str, Field(max_length=200)]


class Request(BaseModel):
    """The body of a request with these keys alone. Unknown keys are one error, which names the
    first of them.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            unknown = [
                str(key)[:UNKNOWN_CHARACTERS_MAX] for key in data if key not in cls.model_fields
            ]
            if unknown:
                shown = join_first_words(unknown, UNKNOWN_SHOWN_MAX)
                allowed = ", ".join(cls.model_fields)
                raise ValueError(f"unknown keys: {shown}; allowed: {allowed}")
        return data


class FaultRequest(Request):
    """The fault that `orc rehearse` injects: its kind, its rank, and the step before whose end it
    happens.
    """

    kind: FaultKind
    rank: int = Field(ge=0, le=DEVICES_MAX)
    step: int = Field(ge=0, le=STEPS_MAX)


class PlainRequest(Request):
    """The body of a request whose values go to the journal unchanged, so that each must be one that
    the journal can store.
    """

    @model_validator(mode="before")
    @classmethod
    def _is_plain(cls, data: Any) -> Any:
        check_storable(data, "the request")
        return data


class SubmitRequest(Request):
    """A job, as the output of `JobSpec.model_dump(mode="json")`."""

    spec: JsonObject
    fault: FaultRequest | None = None


class CancelRequest(PlainRequest):
    """The jobs to cancel; with `whole_arrays`, all jobs of their arrays."""

    jobs: list[JobId] = Field(min_length=1, max_length=JOBS_MAX)
    whole_arrays: bool = False


class JobsRequest(PlainRequest):
    """Jobs to hold, release, suspend or resume."""

    jobs: list[JobId] = Field(min_length=1, max_length=JOBS_MAX)


class UpdateRequest(PlainRequest):
    """New values of a job's keys, by dotted path, as YAML like that of `--set`."""

    settings: dict[str, str] = Field(max_length=SETTINGS_MAX)


class RetryRequest(PlainRequest):
    """The answer to a job's question, or the changed settings with which an ended job is submitted
    again.
    """

    settings: dict[str, str] = Field(default={}, max_length=SETTINGS_MAX)
    allow: Literal["numeric", "semantic"] | None = None
    global_batch_size: int | None = Field(default=None, ge=1, le=BATCH_MAX)
    learning_rate: LearningRateRule | None = None


class BatchRequest(Request):
    """Jobs to submit atomically."""

    jobs: list[SubmitRequest] = Field(min_length=1, max_length=JOBS_MAX)


class DigestsRequest(PlainRequest):
    """SHA-256 digests of archives that the client may have to upload."""

    digests: list[Annotated[str, Field(max_length=128)]] = Field(max_length=1000)


class ObserveRequest(PlainRequest):
    """Observations, as the output of `views.make_observations_view`."""

    observations: list[JsonObject] = Field(max_length=JOBS_MAX)


class DrainRequest(PlainRequest):
    """A drain of a node (it takes no new attempts); with `undo`, the end of that drain."""

    undo: bool = False


class NodeRequest(PlainRequest):
    """A joining machine: its node as `NodeSpec.model_dump(mode="json")` writes it, and its address."""

    node: JsonObject
    address: str = Field(max_length=255)


class UserRequest(PlainRequest):
    """The role of a new or existing user."""

    role: Role


class TokenRequest(PlainRequest):
    """A request of a token for a user."""

    user: UserName
    lifetime_s: float | None = Field(default=None, gt=0, le=LIFETIME_S_MAX, allow_inf_nan=False)


class TryRequest(PlainRequest):
    """The names of notification targets to test; all targets if there are none."""

    targets: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=100)


class PurgeRequest(PlainRequest):
    """A purge; with `dry_run`, nothing is removed."""

    dry_run: bool


class ShutdownRequest(PlainRequest):
    """A shutdown; with `force`, even while jobs run."""

    force: bool = False
