"""Response types of the API, only for /openapi.json: views build the responses, and nothing validates them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, NotRequired, get_type_hints

from fastapi import Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from typing_extensions import (  # pydantic reads the standard library's from Python 3.12 on
    TypedDict,
    is_typeddict,
)

from orchestrator.backends.journal.accounts import AuditRow, Token, User
from orchestrator.backends.journal.set_aside import UnreadableRow
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.server.members import MachineProperties
from orchestrator.service.views.expected import ExpectedJob
from orchestrator.service.views.records import JobView, NodeView
from orchestrator.service.views.teams import TeamView
from orchestrator.specs.json_object import JsonObject


class ErrorAnswer(TypedDict):
    """The reason for which a request was refused, as text for people."""

    error: str


class EmptyAnswer(TypedDict):
    """An answer without content."""


class StatusAnswer(TypedDict):
    """The state of the service, for probes."""

    status: str


class ReadyAnswer(TypedDict):
    """The service accepts jobs. `problems` are what is wrong with it all the same, one sentence
    each.
    """

    status: str
    problems: list[str]


class NotReadyAnswer(ErrorAnswer):
    """The service accepts no jobs now: the reason, and everything that is wrong."""

    problems: NotRequired[list[str]]


class LinkAnswer(TypedDict):
    """A link that signs a browser in, once."""

    path: str


class ForecastAnswer(TypedDict):
    """Every live job with its expected start and end."""

    jobs: list[ExpectedJob]


class WhoAnswer(TypedDict):
    """The user and role of the sender."""

    user: str
    role: str


class SubmittedAnswer(TypedDict):
    """The id of a submitted job; `late` has a sentence if it is expected to miss its deadline."""

    id: str
    late: dict[str, str]  # by id: why the deadline is expected to be missed


class JobsAnswer(TypedDict):
    """Live and ended jobs."""

    jobs: list[JobView]
    next: str | None  # where the next page of live jobs begins


class JobAnswer(TypedDict):
    """A job, and the version of the service's state in which it was read."""

    job: JobView
    version: int


class CancelledAnswer(TypedDict):
    """The ids of the jobs that are being cancelled."""

    cancelled: list[str]


class ChangedAnswer(TypedDict):
    """Ids of the jobs that the request changed."""

    changed: list[str]


class RetriedAnswer(TypedDict):
    """The id of the job that continues, the checkpoint from which it does, and why."""

    id: str  # of the new job; of the same one where it asked
    continues_from: str | None  # the job with whose newest checkpoint it begins
    why: str  # how it goes on, in words


class MissingAnswer(TypedDict):
    """The SHA-256 digests of archives that the service lacks."""

    missing: list[str]


class ClusterAnswer(TypedDict):
    """The live cluster."""

    name: str
    trackers: dict[str, str]
    problems: list[str]  # what is wrong around the service now, in one sentence each
    nodes: list[NodeView]
    drained: Sequence[str]
    observations: list[JsonObject]


class GoingAnswer(TypedDict):
    """A part of an ended job's folder that is removed, and the rule that demands it."""

    job: str
    part: str
    kind: str
    bytes: int
    ended_at_s: float
    why: str


class StayingAnswer(TypedDict):
    """How many parts of job folders or jobs are kept for one reason, and their bytes."""

    reason: str
    count: int
    bytes: int


class PurgeAnswer(TypedDict):
    """The parts of job folders that are removed, that are kept, and that could not be removed.

    `more` parts follow with the next purge.
    """

    dry_run: bool
    goes: list[GoingAnswer]
    stays: list[StayingAnswer]
    failed: dict[str, str]
    home_bytes: int
    beyond_bytes: int  # above the budget after all that may go
    more: int


class JoinAnswer(TypedDict):
    """The address of Ray for a joining machine, and the properties that the machine must share."""

    ray_address: str
    machine: MachineProperties


class SweepsAnswer(TypedDict):
    """The newest sweeps."""

    sweeps: Sequence[SweepReport]


class TeamsAnswer(TypedDict):
    """Teams of a shared cluster."""

    teams: list[TeamView]


class KeptAnswer(TypedDict):
    """How many of the sent observations were new to the service."""

    count: int


class ShutdownAnswer(TypedDict):
    """The ids of the jobs that ran when the service shut down."""

    running: list[str]


class TriedAnswer(TypedDict):
    """Why each notification target could not be reached, by the target's name; null for success."""

    problems: dict[str, str | None]


class UsersAnswer(TypedDict):
    """Every user."""

    users: Sequence[User]


class TokensAnswer(TypedDict):
    """Every token."""

    tokens: Sequence[Token]


class NewTokenAnswer(TypedDict):
    """A new token with its secret, which no other response contains."""

    secret: str
    token: Token


class UnreadableAnswer(TypedDict):
    """The rows of the journal that cannot be read."""

    rows: Sequence[UnreadableRow]


class AuditAnswer(TypedDict):
    """Rows of the audit log, newest first."""

    rows: Sequence[AuditRow]


Responses = dict[int | str, JsonObject]

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
    """A route that makes the JSON of its answer directly, in the endpoint's own thread, since views
    build plain data.

    FastAPI would first copy each part of the answer, in the thread of the event loop. The type that
    an endpoint returns is documented, and not validated.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        self.answers = endpoint  # the function itself, which returns the content
        model = get_type_hints(endpoint)["return"]
        if is_typeddict(model) or is_dataclass(model):
            settings["responses"] = {**settings["responses"], 200: {"model": model}}
        settings["response_model"] = None
        super().__init__(path, _wrap_endpoint(endpoint), **settings)


def _wrap_endpoint(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return the endpoint wrapped so that the dict which it returns is sent as JSON."""
    if iscoroutinefunction(endpoint):

        @wraps(endpoint)
        async def answer_json_later(*args: Any, **keywords: Any) -> Response:
            return _make_response(await endpoint(*args, **keywords))

        return answer_json_later

    @wraps(endpoint)
    def answer_json(*args: Any, **keywords: Any) -> Response:
        return _make_response(endpoint(*args, **keywords))

    return answer_json


def _make_response(content: Any) -> Response:
    return content if isinstance(content, Response) else _JsonAnswer(content)


class _JsonAnswer(JSONResponse):
    """JSON of plain data, in which dataclasses are mappings."""

    def render(self, content: Any) -> bytes:
        """Return the content as JSON text in UTF-8, as JSONResponse does."""
        text = json.dumps(
            content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=asdict
        )
        return text.encode()


def document_answer(model: type) -> JsonObject:
    """Return the keyword arguments for a route that answers 200 with this model; it is documented
    but not validated.
    """
    return {"response_model": None, "responses": {200: {"model": model}}}


def document_bytes(*header_names: str) -> JsonObject:
    """Return the keyword arguments for a route that answers 200 with bytes and with these headers,
    which are integers.
    """
    header_schemas = {
        name: {"schema": {"type": "integer"}, "required": True} for name in header_names
    }
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "response_model": None,
        "response_class": Response,
        "responses": {200: {"content": content, "headers": header_schemas}},
    }
