"""Types of the routes' answers, for /openapi.json alone: views build the answers, and nothing validates them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NotRequired

from fastapi import Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from typing_extensions import TypedDict  # pydantic reads the standard library's from Python 3.12 on

from orchestrator.service.server.forecasts import ExpectedJob
from orchestrator.service.server.members import Machine
from orchestrator.service.views.records import JobView, NodeView, PromiseView
from orchestrator.service.views.sweeps import SweepView
from orchestrator.service.views.teams import TeamView


class ErrorAnswer(TypedDict):
    """Why a request was refused: one message for people."""

    error: str


class EmptyAnswer(TypedDict):
    """An answer without content."""


class StatusAnswer(TypedDict):
    """The state of the service, for probes."""

    status: str


class ReadyAnswer(TypedDict):
    """The service takes jobs; what is wrong around it, in one sentence each."""

    status: str
    problems: list[str]


class NotReadyAnswer(ErrorAnswer):
    """The service takes no jobs, and why; with everything that is wrong around it."""

    problems: NotRequired[list[str]]


class LinkAnswer(TypedDict):
    """A link that signs a browser in, once."""

    path: str


class ForecastAnswer(TypedDict):
    """Every live job with its expected start and end."""

    jobs: list[ExpectedJob]


class WhoAnswer(TypedDict):
    """Who the service takes the sender for."""

    user: str
    role: str


class SubmittedAnswer(TypedDict):
    """A submitted job."""

    id: str
    late: dict[str, str]  # by id: why the deadline is expected to be missed


class BatchAnswer(TypedDict):
    """Jobs that were submitted together, in their order."""

    ids: list[str]
    late: dict[str, str]
    promises: dict[str, PromiseView]
    refused: dict[str, str]  # why, by id, of jobs that nothing here can hold


class JobsAnswer(TypedDict):
    """Live and ended jobs."""

    jobs: list[JobView]
    next: str | None  # where the next page of live jobs begins


class JobAnswer(TypedDict):
    """A job, and the version of the state that it was read from."""

    job: JobView
    version: int


class CancelledAnswer(TypedDict):
    """Ids of jobs that are being cancelled."""

    cancelled: list[str]


class ChangedAnswer(TypedDict):
    """Ids of jobs that are different now; the others were so already."""

    changed: list[str]


class RetriedAnswer(TypedDict):
    """The job that goes on, and how."""

    id: str  # of the new job; of the same one where it asked
    continues_from: str | None  # the job with whose newest checkpoint it begins
    why: str  # how it goes on, in words


class MissingAnswer(TypedDict):
    """SHA-256 of archives that the service lacks."""

    missing: list[str]


class ClusterAnswer(TypedDict):
    """The live cluster."""

    name: str
    trackers: dict[str, str]
    problems: list[str]  # what is wrong around the service now, in one sentence each
    nodes: list[NodeView]
    drained: list[str]
    observations: list[dict[str, Any]]


class GoingAnswer(TypedDict):
    """A part of an ended job's folder that is removed, and by which setting."""

    job: str
    part: str
    kind: str
    bytes: int
    ended_at_s: float
    why: str


class StayingAnswer(TypedDict):
    """How many parts or jobs stay for one reason."""

    reason: str
    count: int
    bytes: int


class PurgeAnswer(TypedDict):
    """What is removed, what stays, and what could not be removed; `more` parts are removed the next time."""

    dry_run: bool
    goes: list[GoingAnswer]
    stays: list[StayingAnswer]
    failed: dict[str, str]
    home_bytes: int
    beyond_bytes: int  # above the budget after all that may go
    more: int


class JoinAnswer(TypedDict):
    """What a machine needs to join: the address of Ray, and what must be the same on it."""

    ray_address: str
    machine: Machine


class SweepsAnswer(TypedDict):
    """The newest sweeps."""

    sweeps: list[SweepView]


class TeamsAnswer(TypedDict):
    """Teams of a shared cluster."""

    teams: list[TeamView]


class KeptAnswer(TypedDict):
    """How many observations were new."""

    kept: int


class ShutdownAnswer(TypedDict):
    """Ids of jobs that ran when the service was told to end."""

    running: list[str]


class UserAnswer(TypedDict):
    """A user."""

    name: str
    role: str
    created_at_s: float


class TriedAnswer(TypedDict):
    """Why targets of notifications could not be reached, by name; null for those that were."""

    problems: dict[str, str | None]


class UsersAnswer(TypedDict):
    """Every user."""

    users: list[UserAnswer]


class TokenAnswer(TypedDict):
    """What is known of a token."""

    id: int
    user: str
    shown: str
    created_at_s: float
    expires_at_s: float | None
    revoked_at_s: float | None
    used_at_s: float | None


class TokensAnswer(TypedDict):
    """Every token."""

    tokens: list[TokenAnswer]


class NewTokenAnswer(TypedDict):
    """A token, and its secret, which no other answer has."""

    secret: str
    token: TokenAnswer


class UnreadableRowAnswer(TypedDict):
    """A row of the journal that cannot be read, with its bytes, and why."""

    table: str
    row: str
    body: str
    reason: str
    at_s: float


class UnreadableAnswer(TypedDict):
    """The rows of the journal that cannot be read."""

    rows: list[UnreadableRowAnswer]


class AuditRowAnswer(TypedDict):
    """A row of the audit log."""

    number: int
    at_s: float
    user: str
    role: str
    request_id: str
    action: str
    status: int


class AuditAnswer(TypedDict):
    """Rows of the audit log, newest first."""

    rows: list[AuditRowAnswer]


Responses = dict[int | str, dict[str, Any]]

REFUSALS: Responses = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in {
        400: "The body is no JSON.",
        401: "There is no token, or a wrong one.",
        403: "The Host is not allowed, or the role or the team of the sender.",
        404: "There is no such thing.",
        405: "The route has no such method.",
        409: "The service refuses it in its present state.",
        411: "The body has no length.",
        413: "The body is too long.",
        422: "The input is wrong.",
        429: "Too many requests.",
        503: "The journal cannot be written now.",
    }.items()
}


class PlainRoute(APIRoute):
    """A route whose dict is written as it is, in the route's own thread: views build it of what JSON knows.

    FastAPI would first copy each part of it, in the thread that serves everybody.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        self.answers = endpoint  # the function itself, which returns a dict
        super().__init__(path, _with_json_answer(endpoint), **settings)


def _with_json_answer(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return the endpoint as one that answers its dict as JSON."""
    if iscoroutinefunction(endpoint):

        @wraps(endpoint)
        async def answer_json_later(*args: Any, **keywords: Any) -> Response:
            return _as_response(await endpoint(*args, **keywords))

        return answer_json_later

    @wraps(endpoint)
    def answer_json(*args: Any, **keywords: Any) -> Response:
        return _as_response(endpoint(*args, **keywords))

    return answer_json


def _as_response(content: Response | Mapping[str, Any]) -> Response:
    return content if isinstance(content, Response) else JSONResponse(content)


def answers(model: type) -> dict[str, Any]:
    """Arguments of a route that answers 200 with this model, described and not validated."""
    return {"response_model": None, "responses": {200: {"model": model}}}


def answers_bytes(*headers: str) -> dict[str, Any]:
    """Arguments of a route that answers 200 with bytes and these headers, each a whole number."""
    header_schemas = {name: {"schema": {"type": "integer"}, "required": True} for name in headers}
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "response_model": None,
        "response_class": Response,
        "responses": {200: {"content": content, "headers": header_schemas}},
    }
