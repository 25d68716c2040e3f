"""Dependencies of the API's routes: the service, the sender, and error responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, Request, Response

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.mlflow.server import ADDRESS as MLFLOW
from orchestrator.service.client.endpoint import LOOPBACK
from orchestrator.service.server.access.gate import Gate
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.forecasts import Forecasts
from orchestrator.service.server.members import Members
from orchestrator.service.server.notifier import Notifier
from orchestrator.service.server.purger import Purger
from orchestrator.service.server.reasons import Reasons
from orchestrator.service.server.sweeps.sweeper import Sweeper
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.errors import ServiceError, UnknownError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job

if TYPE_CHECKING:
    from orchestrator.backends.oidc.provider import Provider

NEVER_SEEN = -1  # a version that no state has
NUMBER_MAX = 2**63 - 1  # of a row in SQL, and of an offset in a file


@frozen
class Pages:
    """The web pages beside the API: `add` adds their routes, and `roles` has the role that each
    route needs.
    """

    roles: Mapping[tuple[str, str], Role]
    headers: Mapping[str, str]  # of each page
    refused: Callable[[Request, int, str], Response]  # the page of a refusal
    add: Callable[[FastAPI, Service, Gate], None]


@frozen
class Service:
    """The objects that routes use: the controller, the accounts, the home folder with its token,
    and others.
    """

    controller: Controller
    accounts: Accounts
    home: Path
    token: str  # of the home folder: its holder is an admin
    cluster: str  # name of the cluster
    trackers: Mapping[str, str]  # name -> address
    shut_down: Callable[[], None]
    sweeper: Sweeper
    reasons: Reasons
    forecasts: Forecasts
    purger: Purger
    set_aside: SetAside  # rows of the journal that cannot be read
    users: Mapping[str, UserSpec] = field(
        default_factory=dict
    )  # with a user id; empty: jobs run as the service
    refuse_user: Callable[[str], None] = lambda name: None  # noqa: ARG005  raises ServiceError where its jobs would be ours
    hosts: frozenset[str] = LOOPBACK  # that a Host header may name
    members: Members | None = None  # machines that join; None: the Ray is not the service's own
    pages: Pages | None = None  # that people look at; None: the API alone
    notifier: Notifier | None = None  # None: the cluster file names no target
    provider: Provider | None = None  # that signs people in at the pages; None: tokens alone


def _find_sender(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def _make_audit_recorder(request: Request) -> Callable[[Iterable[str]], None]:
    """Return a function that adds ids and names of objects to the request's row of the audit log.

    Without a call of it the row only has the ids in the request's path.
    """

    def name_objects(names: Iterable[str]) -> None:
        request.state.objects = tuple(names)

    return name_objects


Sender = Annotated[Principal, Depends(_find_sender)]
NameObjects = Annotated[Callable[[Iterable[str]], None], Depends(_make_audit_recorder)]


def make_address_for_sender(request: Request, tracker_address: str) -> str:
    """Return a URL by which the request's sender reaches the tracker: the home's own MLflow is a
    path on this service.
    """
    is_here = tracker_address == MLFLOW or tracker_address.startswith(f"{MLFLOW}/#/")
    return f"{str(request.base_url).rstrip('/')}{tracker_address}" if is_here else tracker_address


class Forbidden(ServiceError):
    """The sender's role does not permit the request."""


LIKE_MAX, LOOKED_AT_MAX = 3, 1000  # ids that an error names, and ended jobs among which it looks


def _suggest_similar_ids(controller: Controller, unknown_id: str) -> str:
    """Return a phrase with the newest ids of jobs of this name; without any, with the id that is
    spelled most alike.
    """
    jobs = (*controller.state.jobs.values(), *controller.list_ended_jobs(LOOKED_AT_MAX))
    newest = sorted({job.id: job for job in jobs}.values(), key=lambda job: -job.order)
    named = [job.id for job in newest if job.spec.name == unknown_id]
    near = named[:LIKE_MAX] or get_close_matches(
        unknown_id, [job.id for job in newest[:LOOKED_AT_MAX]], LIKE_MAX, 0.7
    )
    return f": did you mean {', '.join(near)}?" if near else "."


def find_job(controller: Controller, job_id: str) -> Job:
    """Return the job with this id. Raises UnknownError (404), with similar ids, where there is
    none.
    """
    job = controller.find_job(job_id)
    if job is None:
        raise UnknownError(
            f"there is no job {job_id!r}{_suggest_similar_ids(controller, job_id)} `orc queue` lists them"
        )
    return job
