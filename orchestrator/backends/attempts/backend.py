"""Runs attempts (one launch of a job each) as processes: a `Backend` over any `NodeSource` and `Launchers`.

All nodes share the home folder. Each node has the same Python environment under the same path.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.nodes import NodeWatch
from orchestrator.backends.attempts.ports import ClusterAway, Launchers, NodeSource
from orchestrator.backends.attempts.watch import (
    AttemptWatch,
    Ownership,
    WatchContext,
    make_set_event,
)
from orchestrator.backends.threads import start_loop
from orchestrator.specs.actions import Launch, Stop
from orchestrator.specs.attempt import Attempt, make_attempt_name
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.events import Event, NodesSeen
from orchestrator.specs.job_record import Job

REFRESH_EVERY_S = 1.0
AWAY_S = 10.0  # without an answer of the cluster before nothing more is started on its nodes
EVENTS_MAX = 256  # handed out at once
CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class ProcessBackend:
    """Backend that watches each attempt in one thread, and all nodes in another."""

    def __init__(
        self,
        home: Path,
        cluster: ClusterSpec,
        nodes: NodeSource,
        launchers: Launchers,
        ownership: Ownership,
        clock: Callable[[], float] = time.time,
        serving: threading.Event | None = None,
    ) -> None:
        """Make the backend, and start the thread that refreshes the nodes.

        A cluster that does not answer now is asked again later. Attempts are watched once the event
        `serving` is set; with None, at once.
        """
        # None: somebody else wants the loop that reads events to go round
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._world = WatchContext(
            home=home.resolve(),
            python=sys.executable,
            nodes=NodeWatch(cluster, nodes),
            launchers=launchers,
            clock=clock,
            emit=self._events.put,
            closing=threading.Event(),
            serving=serving or make_set_event(),
            ownership=ownership,
            fence=_store_fence(home, ownership),
            inherit_env=cluster.inherit_env,
            users=cluster.users,
        )
        self._watches: dict[str, tuple[AttemptWatch, threading.Thread]] = {}
        self._declared = make_idle_nodes(cluster)
        self._policy = cluster.policy
        self._told: tuple[object, ...] | None = None
        # by the monotonic clock: nothing is decided on nodes of an earlier service
        self._answered_s = -AWAY_S
        self._refresh_nodes()
        self._refresher = start_loop("nodes", self._keep_refreshing, self._world.closing)

    def launch(self, action: Launch) -> None:
        """Start an attempt, or resume watching it where it already runs."""
        self.adopt(action.job, action.attempt)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Resume an attempt by its name after a service restart: watch its running processes, and
        start missing ones.

        `launch` does the same work, since an earlier launch may have been cut short anywhere. An
        attempt whose end is in the journal only releases its devices.
        """
        if attempt.released or self._is_watched(attempt.name):
            return
        self._watches = {
            name: watched for name, watched in self._watches.items() if watched[1].is_alive()
        }
        watch = AttemptWatch(job, attempt, self._world)
        thread = threading.Thread(target=watch.run, name=attempt.name, daemon=True)
        self._watches[attempt.name] = (watch, thread)
        thread.start()

    def stop(self, action: Stop) -> None:
        """End an attempt: SIGTERM, then SIGKILL after `grace_s` seconds. Unknown and ended attempts are no error."""
        name = make_attempt_name(action.job_id, action.number)
        if self._is_watched(name):
            self._watches[name][0].stop(action.grace_s)

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call, () without one; wait at most `timeout_s` seconds
        for the first event.
        """
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return ()
        while len(events) < EVENTS_MAX and not self._events.empty():
            events.append(self._events.get())
        return [event for event in events if event is not None]

    def wake(self) -> None:
        """Make a waiting `await_events` call of another thread return at once."""
        self._events.put(None)

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Replace the cluster description, from the next refresh of nodes on. Running attempts
        continue.
        """
        self._world.nodes.set_cluster(cluster)
        self._declared = make_idle_nodes(cluster)
        self._policy = cluster.policy

    def get_address_by_node(self) -> dict[str, str]:
        """Return {node name: address} of the nodes that were alive when the cluster last answered."""
        return {
            name: node.launch.address
            for name, node in self._world.nodes.list_last_known_nodes().items()
        }

    def close(self) -> None:
        """Stop the backend's threads; running attempts continue."""
        self._world.closing.set()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (self._refresher, *(thread for _, thread in self._watches.values())):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _is_watched(self, attempt_name: str) -> bool:
        return attempt_name in self._watches and self._watches[attempt_name][1].is_alive()

    def _keep_refreshing(self) -> None:
        while not self._world.closing.wait(REFRESH_EVERY_S):
            try:
                self._refresh_nodes()
            except Exception:  # the thread's edge: no news of nodes is no event
                log.exception("the nodes cannot be read")

    def _refresh_nodes(self) -> None:
        try:
            nodes = self._world.nodes.refresh()
            self._answered_s = time.monotonic()
        except ClusterAway:
            if (
                time.monotonic() - self._answered_s < AWAY_S
            ):  # its nodes are there, for all that is known
                return
            nodes = ()
        declared = self._declared
        policy = self._policy
        if (nodes, declared, policy) != self._told:
            self._told = (nodes, declared, policy)
            self._events.put(
                NodesSeen(nodes=nodes, declared=declared, policy=policy, at_s=self._world.clock())
            )


def _store_fence(home: Path, ownership: Ownership) -> Fence | None:
    """Store the fencing number of this service, and return its fence; None where the journal is a
    file.

    Launchers then ignore requests of earlier services.
    """
    if ownership.fence is None:
        return None
    fence = Fence(folder=str(home.resolve() / "fence"), number=ownership.fence)
    try:
        fence.store_number()
    except OSError:  # a full disk: an earlier service is kept off by its lease alone
        log.exception("the fence of this service cannot be written")
    return fence
