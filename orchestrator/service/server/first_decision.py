"""Tries the first decision on a job of a new shape in a child process with limits, so that a hang ends only the child.

The service decides under a lock that everybody waits for. So a shape that was never planned is tried here before its
job is in the journal. Jobs of a shape that passed are not tried again.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from typing import IO

from orchestrator.backends.environment import select_inherited
from orchestrator.backends.journal.history import Codec
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.work import TooManyPlans
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

CPU_S = 20.0  # of one decision; a 405B model on 4,096 devices takes 3 s (two Xeon cores, 2026-11)
MEMORY_BYTES = 4 * 2**30  # of address space
ANSWER_S = 120.0  # of the clock, on a busy machine
IDLE_S = 60.0  # after which a child without work ends
END_S = 10.0  # from the end of a child's output to its exit, on a busy machine
WHAT_MAX = 300  # characters of an exception in an answer
SHAPES_MAX = 4096  # that are remembered
PROGRAM = "orchestrator.service.server.first_decision"

log = logging.getLogger(__name__)


class FirstDecisions:
    """Tries the first decision on a job of a new shape in a child process, so that it cannot block
    the service.

    One job is tried at a time. Every method is thread-safe.
    """

    def __init__(
        self, cpu_s: float = CPU_S, program: str = PROGRAM, answer_s: float = ANSWER_S
    ) -> None:
        """Limit each decision to `cpu_s` seconds of a processor, and to `answer_s` seconds of the
        clock.

        `program` is the child's Python module.
        """
        self._cpu_s = cpu_s
        self._program = program
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[object, None] = OrderedDict()
        self._state, self._event = Codec(State), Codec(Submitted)

    def check_job(self, state: State, spec: JobSpec) -> None:
        """Raise SpecError if a decision on the job exceeds a limit or has more than PLANS_MAX
        plans.

        Before any live node is reported, the nodes of the cluster file count.
        """
        state = replace(state, nodes=state.nodes or state.declared)
        shape = (
            read_plan_request(spec),
            tuple(group.hardware for group in group_equal_nodes(state.nodes)),
        )
        with self._lock:
            if shape in self._passed:
                return
            self._raise_refusal(self._ask_child(state, spec), spec)
            self._passed[shape] = None
            if len(self._passed) > SHAPES_MAX:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end_child()

    def _ask_child(self, state: State, spec: JobSpec) -> JsonObject | None:
        """Return the child's answer about the job; None where the child ended instead.

        The child knows no other jobs: it makes the decision that follows once all dependencies have
        ended.
        """
        spec = spec.model_copy(update={"depends_on": ()})
        event = Submitted(
            job_id=f"{spec.name}-1", order=state.submitted + 1, spec=spec, at_s=state.at_s
        )
        request = json.dumps(
            {"state": self._state.write(state, exclude={"jobs"}), "event": self._event.write(event)}
        )
        for child in (self._child, None):  # one that was idle may just have ended
            child = child or self._start_child()
            try:
                assert child.stdin is not None, "a pipe"
                assert child.stdout is not None, "a pipe"
                child.stdin.write(request + "\n")
                child.stdin.flush()
                reply = _read_line(child.stdout, self._answer_s)
            except OSError:
                reply = ""
            if reply:
                return dict(json.loads(reply))
            # an idle child closes its output first, and ends a while later
            was_idle = reply is not None and _wait_for_exit_code(child) == 0
            self._end_child()
            if not was_idle:
                return None
        return None

    def _start_child(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", self._program, str(self._cpu_s)]
        try:
            self._child = subprocess.Popen(
                command,
                env=select_inherited(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise ServiceError(
                f"no process can be started to plan the job: {error.strerror}. Submit again"
            ) from None
        return self._child

    def _end_child(self) -> None:
        child = self._child
        self._child = None
        if child is not None:
            child.kill()
            child.communicate()

    def _raise_refusal(self, reply: JsonObject | None, spec: JobSpec) -> None:
        """Raise SpecError if the child's reply refuses the job, or if it ended without one (None)."""
        if reply is None:
            log.error("the first decision on job %s did not end within its limits", spec.name)
            raise SpecError(
                "planning this job exceeds the limits of a decision",
                source=spec.name,
                path="plan",
                allowed=f"{self._cpu_s:g} s of a processor, {MEMORY_BYTES // 2**30} GiB, "
                f"{self._answer_s:g} s of the clock",
                hint="pin settings with `plan:`, or allow fewer numbers of devices with `gpus`",
            )
        if reply:
            log.warning("the first decision on job %s: %s", spec.name, reply["what"])
            raise SpecError(source=spec.name, **reply)


def _read_line(stream: IO[str], timeout_s: float) -> str | None:
    """Return the next line of the stream; "" at its end, and None where no line comes within
    `timeout_s`.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(timeout_s) else None


def _wait_for_exit_code(process: subprocess.Popen[str]) -> int | None:
    """Return the exit code of a process that has closed its output; None where it still runs after
    END_S seconds.
    """
    try:
        return process.wait(timeout=END_S)
    except subprocess.TimeoutExpired:
        return None


def serve_first_decisions() -> None:
    """Run the child process: read jobs from standard input, let a scheduler decide on each, and
    print what came of it.

    It ends when the input ends.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    cpu_s = float(sys.argv[1])
    state_codec = Codec(State)
    event_codec = Codec(Submitted)
    while line := _read_line(sys.stdin, IDLE_S):
        signal.setitimer(
            signal.ITIMER_PROF, cpu_s
        )  # its signal ends the process; a limit is whole seconds
        request = json.loads(line)
        try:
            reply = try_decision(
                state_codec.read(request["state"]), event_codec.read(request["event"])
            )
        except MemoryError:  # a limit, and the end of this child
            raise
        except Exception as error:  # the same decision would stop the service
            what = f"planning this job failed: {type(error).__name__}: {error}"
            reply = {
                "what": what[:WHAT_MAX],
                "path": "plan",
                "hint": "report this: it is a fault of the service",
            }
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(reply), flush=True)


def try_decision(state: State, event: Submitted) -> JsonObject:
    """Let a new scheduler decide on the job; return the fields of a SpecError if it has too many
    plans, else {}.
    """
    for group in group_equal_nodes(state.nodes):
        try:
            find_frontier(read_plan_request(event.spec), group.hardware)
        except TooManyPlans as error:
            return {"what": error.what, "path": error.path, "got": error.got} | {
                "allowed": error.allowed,
                "hint": error.hint,
            }
        except SpecError:  # the decision says it to whoever asks for the job
            continue
    Scheduler(state).step(event)
    return {}


if __name__ == "__main__":
    serve_first_decisions()
