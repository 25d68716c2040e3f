"""The service's process: starts and stops journal, trackers, Ray, controller and HTTP.

It may be killed at any time: the journal has every event, training continues in Ray, and the next start resumes running
attempts.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any

import pydantic.v1.fields  # noqa: F401  Ray and FastAPI import it late in two threads, which fails if simultaneous
import uvicorn
from fastapi import FastAPI

from orchestrator.backends.attempts.identity import open_home
from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.notify.targets import Target, make_targets
from orchestrator.backends.oidc import make_provider
from orchestrator.backends.outbox_relay import OutboxRelay
from orchestrator.backends.ports import Lookups, Tracker
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.backends.ray.address import LOOPBACK as LOOPBACK_ADDRESS
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.threads import FAULTS, start_loop
from orchestrator.backends.trackers import TRACKERS
from orchestrator.service.client.client import get_user_name
from orchestrator.service.client.endpoint import LOOPBACK, Endpoint, load_endpoint, parse_endpoint
from orchestrator.service.client.lifecycle import find_journal_url, prepare_home, write_service_file
from orchestrator.service.intake.cluster_file import (
    add_joined_nodes,
    load_cluster,
    load_cluster_file,
    load_joined_nodes,
    select_nodes_of_this_machine,
)
from orchestrator.service.intake.detection import make_local_node_name
from orchestrator.service.intake.rates import add_cached_rates, add_measured_rates
from orchestrator.service.server.connections import (
    BoundedConnection,
    Listener,
    raise_limit_of_open_files,
)
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.first_decision import FirstDecisions
from orchestrator.service.server.forecasts import Forecasts
from orchestrator.service.server.health import Health
from orchestrator.service.server.home_watch import HomeWatch
from orchestrator.service.server.logs import VARIABLE, LogFormat, configure_logging
from orchestrator.service.server.members import Members
from orchestrator.service.server.notifier import Notifier
from orchestrator.service.server.purger import Purger
from orchestrator.service.server.reasons import Reasons
from orchestrator.service.server.routes.api import create_app
from orchestrator.service.server.routes.dependencies import Pages, Service
from orchestrator.service.server.routes.waiting import make_standby_app
from orchestrator.service.server.sweeps.sweeper import Sweeper
from orchestrator.specs.access import Role
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import OrchestratorError, ServiceError, SpecError

NOTIFY_TIMEOUT_S = 5.0  # how long the trackers' notifier takes to see that the service stops
HOME_CHECK_S = 5.0
HEALTH_S = 1.0
PORT_FILE, PORT_DIGITS = "port", 5  # in the home: of its last service on the loopback
STOP_TIMEOUT_S = 5.0
GRACE_S = 8.0  # from SIGTERM to the end, whatever the service does
# that a page's stream of events, which has no end, may hold up the end of the service
STREAMS_S = 2

log = logging.getLogger(__name__)


def run_daemon(pages: Pages) -> None:
    """Serve the home folder that the command line names, until SIGTERM (training continues) or `orc
    down` (it stops).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument(
        "--standby", action="store_true", help="wait for a lease that another service holds"
    )
    parser.add_argument(
        "--endpoint", default="", help="where it listens, as JSON; default: what the home keeps"
    )
    arguments = parser.parse_args()
    home: Path = arguments.home.resolve()
    try:
        configure_logging(os.environ.get(VARIABLE, LogFormat.TEXT))
    except SpecError as error:
        sys.exit(f"{error}")
    raise_limit_of_open_files()
    stop = threading.Event()
    down = threading.Event()
    ending = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        if (
            not ending.is_set()
        ):  # the kernel's thread: where a decision hangs, this is as kill -9, with a traceback
            ending.set()
            faulthandler.dump_traceback_later(GRACE_S, exit=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        run_service(
            home, pages, stop, down, parse_endpoint(arguments.endpoint), standby=arguments.standby
        )
    except OrchestratorError as error:
        log.critical("%s", error)
        sys.exit(1)
    log.info("ended")


def run_service(
    home: Path,
    pages: Pages,
    stop: threading.Event,
    stop_everything: threading.Event,
    endpoint: Endpoint | None,
    *,
    standby: bool,
) -> None:
    """Run the service until `stop` is set, at `endpoint` or the home's default. Raises
    OrchestratorError.

    If `stop_everything` is also set, Ray and the trackers' processes stop too. A failed start stops
    them as well, unless Ray ran before: jobs may run there. A standby waits for the lease of
    another service; the home is read only after that.
    """
    prepare_home(home)
    endpoint = endpoint or load_endpoint(home)
    is_serving = threading.Event()
    with ExitStack() as stack:
        background = stack.enter_context(ThreadPoolExecutor(1))
        background.submit(
            add_measured_rates, load_cluster(home)
        )  # kept by then: a standby takes over in seconds
        waiting = stack.enter_context(ExitStack())
        if standby:
            waiting.enter_context(_serve_if_endpoint(make_standby_app(), endpoint))
        journal = _open_journal(home, stop, standby=standby)
        if journal is None:
            return
        stack.enter_context(closing(journal))
        declared = load_cluster_file(home)
        cluster = add_joined_nodes(declared, load_joined_nodes(home))
        accounts = Accounts(journal.database.transaction, time.time)
        refuse_user = _separate_users_and_make_check(home, declared, endpoint, accounts)
        earlier_ray = embedded_ray.find_local_address(home)

        def must_end() -> bool:
            return stop_everything.is_set() or (earlier_ray is None and not is_serving.is_set())

        rates = background.submit(add_measured_rates, cluster)
        targets = make_targets(
            cluster.notify, cluster.name, os.environ
        )  # before anything inherits their secrets
        provider = make_provider(cluster.oidc, os.environ)
        journal.outbox.register_receivers(cluster.trackers)
        journal.notices.register_receivers(targets)
        lookups = Lookups(
            state=lambda: controller.state,
            job=lambda job_id: controller.find_job(job_id),
            sweep=lambda sweep_id: sweeper.make_report(sweep_id),
        )
        trackers = _start_trackers(home, cluster, lookups, stack, must_end)
        named_ray = _read_ray_address(home)
        own_ray = None if named_ray else _make_own_ray(home, declared, endpoint)
        if own_ray is not None:
            stack.callback(_end_if_needed, own_ray.stop, must_end)
        locate = own_ray.start_and_get_address if own_ray is not None else lambda: named_ray
        backend = stack.enter_context(
            closing(RayBackend(home, rates.result(), locate, journal, serving=is_serving))
        )
        controller = _make_controller(home, journal, backend, stack, stop)
        sweeper = Sweeper(controller, journal.sweeps, home)
        controller.run_once(0.0)  # nothing starts on nodes of an earlier service that are not there
        notifier = None
        if targets:
            notifier = Notifier(
                cluster.notify,
                targets,
                journal.notices,
                controller,
                time.time,
                sweeper.make_reports,
            )
        relays = stack.enter_context(_run_relays(journal, trackers, targets))
        purger = Purger(home, declared.keep, declared.trackers, controller, journal, accounts)
        for source in (purger, *targets.values()):
            controller.health.register_source(
                partial(getattr, source, "problem"), delays_jobs=False
            )
        _start_thread(_wake_relays, controller, relays, stop)

        def shut_down() -> None:
            stop_everything.set()
            stop.set()

        token = (home / "token").read_text()
        _start_thread(_shut_down_once_home_is_gone, home, token, shut_down, stop)
        service = Service(
            controller=controller,
            accounts=accounts,
            users=declared.users,
            refuse_user=refuse_user,
            home=home,
            token=token,
            cluster=cluster.name,
            trackers={name: tracker.address for name, tracker in trackers.items()},
            shut_down=shut_down,
            hosts=endpoint.list_allowed_host_names() if endpoint else LOOPBACK,
            members=_make_members(home, declared, own_ray, backend),
            pages=pages,
            notifier=notifier,
            provider=provider,
            sweeper=sweeper,
            reasons=Reasons(lambda: controller.state),
            forecasts=Forecasts(lambda: controller.state),
            purger=purger,
            set_aside=journal.set_aside,
        )
        _serve_requests(service, endpoint, waiting, is_serving, stop)


def _start_trackers(
    home: Path,
    cluster: ClusterSpec,
    lookups: Lookups,
    exit_stack: ExitStack,
    must_end: Callable[[], bool],
) -> dict[str, Tracker]:
    """Start the cluster's trackers, which record jobs elsewhere, and return {name: tracker}.

    `exit_stack` shuts down the processes of a tracker if `must_end` then returns true.
    """
    trackers: dict[str, Tracker] = {}
    for name in cluster.trackers:
        trackers[name] = TRACKERS[name](home, lookups)
        exit_stack.callback(_end_if_needed, trackers[name].shut_down, must_end)
    return trackers


def _make_controller(
    home: Path, journal: Journal, backend: RayBackend, exit_stack: ExitStack, stop: threading.Event
) -> Controller:
    """Return the controller; also start threads that watch its decisions, the backend and the
    home's disk.
    """
    first = FirstDecisions()
    exit_stack.callback(first.close)
    controller = Controller(journal, backend, time.time, check_job=first.check_job)
    controller.health.register_source(lambda: backend.problem)
    controller.health.register_source(FAULTS.describe_faults)
    _run_disk_watch(home, controller.health, stop)
    _start_thread(
        _log_problem_changes,
        partial(controller.describe_standstill, name_job=True),
        "decisions end again",
        stop,
    )
    return controller


def _serve_requests(
    service: Service,
    endpoint: Endpoint | None,
    waiting_app: ExitStack,
    is_serving: threading.Event,
    stop: threading.Event,
) -> None:
    """Serve requests in place of the waiting application, and run the controller until `stop` is
    set.
    """
    application = create_app(service)
    waiting_app.close()
    earlier_port = _read_earlier_port(service.home)
    with (
        serve_http(application, port=earlier_port) as port,
        _serve_if_endpoint(application, endpoint),
    ):
        write_service_file(service.home, port)
        with suppress(OSError):  # a full disk: the next start takes another port
            (service.home / PORT_FILE).write_text(str(port))
        is_serving.set()
        for follower in (service.notifier, service.sweeper, service.purger):
            if follower is not None:
                _start_thread(follower.run, stop)
        gc.collect()
        # what is loaded now stays: a full collection amid a batch of jobs would walk all of it
        gc.freeze()
        log.info("serving home=%s port=%d cluster=%s", service.home, port, service.cluster)
        service.controller.run(stop)
        if _is_home_unchanged(service.home, service.token):
            with suppress(OSError):  # a read-only disk: the note names a process that has ended
                (service.home / "service.json").unlink(missing_ok=True)


def _start_thread(target: Callable[..., None], *arguments: Any) -> None:
    """Start a thread that calls `target` with these arguments, of which the last is the event that
    ends the thread.

    It ends with the service at the latest.
    """
    start_loop(target.__qualname__.strip("_"), partial(target, *arguments), arguments[-1])


@contextmanager
def _run_relays(
    journal: Journal, trackers: Mapping[str, Tracker], targets: Mapping[str, Target]
) -> Iterator[list[OutboxRelay[Any]]]:
    """Run threads that send records to trackers and notices to targets until the context ends;
    yield them.

    A relay takes what it sends from the journal's outbox, in order.
    """
    relays: list[OutboxRelay[Any]] = [
        *(OutboxRelay(name, tracker, journal.outbox) for name, tracker in trackers.items()),
        *(OutboxRelay(name, target, journal.notices) for name, target in targets.items()),
    ]
    with ExitStack() as stack:
        for relay in relays:
            relay.start()
            stack.callback(relay.stop)
        yield relays


def _run_disk_watch(home: Path, health: Health, stop: threading.Event) -> None:
    """Watch the home folder's disk until `stop` is set; report its problems to `health` and the
    log.
    """
    disk = HomeWatch(home)
    health.register_source(lambda: disk.problem, is_fatal=True)
    _start_thread(disk.run, stop)
    _start_thread(
        _log_problem_changes, lambda: disk.problem, "the home folder is written again", stop
    )


def _separate_users_and_make_check(
    home: Path, cluster: ClusterSpec, endpoint: Endpoint | None, accounts: Accounts
) -> Callable[[str], None]:
    """Set the home's permissions for the user ids of the cluster file; return a check that a user
    has a user id.

    Jobs of a user without an id would run as this process's user. The check raises ServiceError,
    and so does this function for users that exist already, or where this process may not run jobs
    as others.
    """
    if cluster.users:
        if os.geteuid() != 0:
            raise ServiceError(
                "`users` of the cluster file has user ids, and only root may run jobs as others"
            )
        open_home(home)

    def refuse(name: str) -> None:
        if endpoint is None or endpoint.trusts_users or cluster.users or name == get_user_name():
            return
        raise ServiceError(
            f"jobs of {name} would run as {get_user_name()}, who can read and change this home and "
            "everybody's files: give each user a user id by `users` of the cluster file, "
            "or say `orc up --listen HOST:PORT --trust-users`"
        )

    for user in accounts.list_users():
        if user.role.includes(Role.MEMBER):
            refuse(user.name)
    if cluster.oidc is not None:
        refuse("whom the OpenID provider signs in")
    return refuse


def _read_ray_address(home: Path) -> str:
    """Return the address of the Ray that `orc up --ray` named; "" where the service has its own
    Ray.
    """
    path = home / "ray_address"
    return path.read_text() if path.exists() else ""


def _open_journal(home: Path, stop: threading.Event, *, standby: bool) -> Journal | None:
    """Return the opened journal; a standby first waits for it. None where the standby was stopped.
    Raises ServiceError.
    """
    try:
        return Journal(find_journal_url(home), stop=stop if standby else None)
    except ServiceError:
        if stop.is_set():
            return None
        raise


def _make_own_ray(
    home: Path, cluster: ClusterSpec, endpoint: Endpoint | None
) -> embedded_ray.OwnRay:
    """Return the object that starts the service's own Ray on this machine; no process is started
    yet.
    """
    here = select_nodes_of_this_machine(cluster, load_joined_nodes(home), make_local_node_name())
    return embedded_ray.OwnRay(home, here, endpoint.address if endpoint else LOOPBACK_ADDRESS)


def _make_members(
    home: Path,
    declared_cluster: ClusterSpec,
    own_ray: embedded_ray.OwnRay | None,
    backend: RayBackend,
) -> Members | None:
    """Return the registry of machines that join the service's own Ray; None where it has none.

    The backend is told each changed cluster, with measured rates.
    """
    if own_ray is None:
        return None
    return Members(
        home,
        declared_cluster,
        own_ray.get_known_address,
        backend.get_address_by_node,
        lambda cluster: backend.set_cluster(add_cached_rates(cluster)),
    )


def _end_if_needed(end: Callable[[], None], must_end: Callable[[], bool]) -> None:
    """Call `end` if `must_end` returns true."""
    if must_end():
        end()


def _is_home_unchanged(home: Path, token: str) -> bool:
    """Return whether the home folder still contains this service's token; another service may have
    replaced the folder.
    """
    try:
        return (home / "token").read_text() == token
    except FileNotFoundError:
        return False


def _shut_down_once_home_is_gone(
    home: Path, token: str, shut_down: Callable[[], None], stop: threading.Event
) -> None:
    """Call `shut_down` once the home folder is removed or replaced, since clients can no longer
    find this service.
    """
    while not stop.wait(HOME_CHECK_S):
        if not _is_home_unchanged(home, token):
            log.error(
                "the home folder %s was removed or replaced: stopping everything started for it",
                home,
            )
            shut_down()


def _log_problem_changes(
    find_problem: Callable[[], str | None], cured_message: str, stop: threading.Event
) -> None:
    """Log each time when `find_problem` begins to return a problem, and when it returns None again,
    until `stop` is set.
    """
    before: str | None = None
    while not stop.wait(HEALTH_S):
        now = find_problem()
        if now is not None and before is None:
            log.error("%s", now)
        elif now is None and before is not None:
            log.info("%s", cured_message)
        before = now


def _wake_relays(
    controller: Controller, relays: Sequence[OutboxRelay[Any]], stop: threading.Event
) -> None:
    """Wake the threads that send the journal's records to trackers and targets, each time the
    scheduler's state changes.

    It returns once `stop` is set.
    """
    version = -1
    while not stop.is_set():
        newest = controller.wait_for_change(version, NOTIFY_TIMEOUT_S)
        if newest != version:
            version = newest
            for relay in relays:
                relay.wake()


def _serve_if_endpoint(
    app: FastAPI, endpoint: Endpoint | None
) -> AbstractContextManager[int | None]:
    """Return a context that serves the application at the endpoint; one that does nothing where
    there is none.
    """
    return nullcontext() if endpoint is None else serve_http(app, endpoint)


def _read_earlier_port(home: Path) -> int:
    """Return the port of the home's last service, which open pages and links still use; 0 without
    one.
    """
    try:
        port = int((home / PORT_FILE).read_text()[:PORT_DIGITS])
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 2**16 else 0


@contextmanager
def serve_http(app: FastAPI, endpoint: Endpoint | None = None, port: int = 0) -> Iterator[int]:
    """Run the application in a thread, and yield its port: on the loopback, or by TLS at an
    endpoint.

    On the loopback the port is `port`, or a free one where that is taken or 0. Raises ServiceError
    where the address cannot be bound.
    """
    host = "127.0.0.1"
    if endpoint is not None:
        host = endpoint.host
        port = endpoint.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        if endpoint is None and port:
            with suppress(OSError):  # somebody else has it now
                listener.bind((host, port))
        if not listener.getsockname()[1]:
            listener.bind((host, 0 if endpoint is None else port))
    except OSError as error:
        listener.close()
        raise ServiceError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    # before its port is told: a client that connects then waits, and is not refused
    listener.listen()
    tls = {"ssl_certfile": endpoint.certificate, "ssl_keyfile": endpoint.key} if endpoint else {}
    config = uvicorn.Config(
        app,
        http=partial(BoundedConnection, listener),  # type: ignore[arg-type]
        ws="none",
        backlog=listener.accepted_at_once,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STREAMS_S,
        **tls,  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True
    )
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
