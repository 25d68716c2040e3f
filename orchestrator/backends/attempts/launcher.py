"""The launcher of an attempt on one node: it starts the ranks, reports exit codes, and leaves no process behind.

Runs in a detached Ray actor, one at a time: it outlives the service. Standard library and pynvml only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, TypedDict

from orchestrator.backends.attempts.durable import (
    DISK_AWAY,
    DISK_FULL,
    Fence,
    open_to_append,
    read_attempt_number,
    write_durably,
)
from orchestrator.backends.attempts.forks import (
    HOOKS,
    ForkedRank,
    fork_rank_or_explain,
    restore_signals,
)
from orchestrator.backends.attempts.interface import make_gloo_interface_variables
from orchestrator.backends.attempts.leftovers import end_leftover_processes
from orchestrator.backends.attempts.process_census import MARK, Census
from orchestrator.backends.attempts.program import EXEC_ERRORS, find_start_problem
from orchestrator.backends.attempts.system_metrics import Sampler, Watched
from orchestrator.backends.environment import make_base_variables
from orchestrator.specs.command_line import Argv, Env
from orchestrator.specs.run import AttemptFolder

POLL_S = 0.05
GRACE_AFTER_OOM_S = 0.3  # the report is there: other ranks only wait in a collective
GRACE_AFTER_FAILURE_S = 1.0  # other ranks may know the cause: time for their own reports
# its exception is reported: it should end by itself, but may wait for its peers
GRACE_AFTER_ERROR_S = 15.0
BEFORE_TIMEOUT_S = 900.0
FORK_TIMEOUT_S = 20.0  # of all ranks of a node: torch is imported in 1 to 9 s
FENCE_EVERY_S = 0.5
WRITE_TRIES_MAX = 5  # where more room would not help: something of a rank lies in the way
WRITE_AGAIN_S = 1.0
PORTS = range(
    20000, 32000
)  # below Linux's ephemeral ports (32768): no outgoing connection takes one meanwhile
PR_SET_PDEATHSIG = 1
CENSUS_EVERY_S = 0.5  # importing PyTorch takes a second and more
RUN_AS = "ORC_RUN_AS"  # uid:gid of a rank's process; it does not inherit this


RankStart = tuple[int, Argv, dict[str, str]]  # number, argv, environment


class LauncherStatus(TypedDict):
    """Status of one launcher and its ranks. `version` grows with each change of the other
    fields.
    """

    version: int  # grows with each change
    state: str  # idle -> starting -> running -> ended
    pids: dict[int, int]
    exit_codes: dict[int, int | None]
    ending: bool  # the launcher is ending its ranks
    oom: bool  # a rank has reported that it ran out of memory
    first_ended: tuple[int, int] | None  # (rank, time in ns) of the first that failed
    host_oom_kills: int
    disk_full: NotRequired[bool]  # when a rank ended; a launcher of 0.1.0 does not tell
    cpu_s: float
    stale: bool  # a newer attempt exists
    error: str | None  # why ranks did not start
    no_program: bool  # and would fail again


class Identity(TypedDict, total=False):
    """Keyword arguments of Popen that set the process's user."""

    user: int
    group: int
    extra_groups: list[int]


class NoProgram(Exception):
    """The program can never start here: it or its folder is missing, or it is no executable for this machine."""


@dataclass(slots=True, kw_only=True)
class Rank:
    """A rank's process, with its exit code after it ended."""

    number: int
    process: subprocess.Popen[bytes] | ForkedRank
    exit_code: int | None = None  # set after it stands in the .rc file, or could not be written


class Launcher:
    """Starts and watches the ranks of one attempt on one node."""

    def __init__(
        self,
        attempt_folder: str,
        attempt_number_path: str,
        attempt_number: int,
        process_mark: str,
        watched: Watched,
    ) -> None:
        self._folder = AttemptFolder(attempt_folder)
        self._epoch_path = Path(attempt_number_path)
        self._epoch = attempt_number
        self._mark = process_mark
        self._changed = threading.Condition()
        self._version = 0
        self._ranks: dict[int, Rank] = {}
        self._ranks_each = 1  # ranks that a process of ours stands for
        self._state = "idle"  # idle -> starting -> running -> ended
        self._error: str | None = None
        self._no_program = False
        self._stale = False
        self._first_ended: tuple[int, int] | None = None  # (rank, time in ns)
        self._next_fence_s = self._next_census_s = 0.0  # by the monotonic clock
        self._kills_before = count_oom_kills()
        self._disk_full = False
        self._kill_at_s: float | None = None  # monotonic; when the ranks that still live are killed
        self._fork_until_s = 0.0  # by the monotonic clock
        self._ended = threading.Event()
        self._sampler = Sampler(self._folder, watched)
        self._census = Census(process_mark, self._folder.guard, self._folder.unwatched)

    def free_port(self) -> int:
        """Return a free TCP port of this node."""
        return find_free_port()

    def start(
        self,
        ranks: Sequence[RankStart],
        workdir: str,
        ranks_per_process: int = 1,
        fence: Fence | None = None,
    ) -> LauncherStatus:
        """Start the processes from (rank, argv, env), and return the status. A second call changes
        nothing.

        A call whose `fence` is outdated also changes nothing: another service owns the journal now.
        Each process may start `ranks_per_process` ranks itself; its `rank` is the first of them.
        """
        with self._changed:
            if self._state == "idle" and not (fence is not None and fence.is_superseded):
                self._state = "starting"
                self._ranks_each = ranks_per_process
                # PR_SET_PDEATHSIG is bound to the forking thread: this one lives as long as the
                # ranks do.
                threading.Thread(
                    target=self._run_ranks, args=(list(ranks), workdir), daemon=True
                ).start()
            self._changed.wait_for(lambda: self._state != "starting", timeout=30)
            return self._make_status()

    def run_before(self, argv: Sequence[str], env: Env, workdir: str) -> int:
        """Run the command that precedes the ranks, and return its exit code. Raises TimeoutExpired after 15 minutes."""
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with open_to_append(self._folder.before) as log:
            env = {
                **make_base_variables(),
                **env,
                "ORC_GUARD": "",
                MARK: self._mark,
            }  # no rank: a process of the host
            return subprocess.run(
                argv,
                cwd=workdir,
                **make_popen_user_arguments(env.pop(RUN_AS, None)),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=BEFORE_TIMEOUT_S,
                check=False,
            ).returncode

    def status(self) -> LauncherStatus:
        """Return the state, exit codes and other facts of this launcher's ranks as they are now."""
        with self._changed:
            return self._make_status()

    def wait(self, known_version: int, timeout_s: float) -> LauncherStatus:
        """Return the status once its version is greater than `known_version`, or after `timeout_s`
        seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version > known_version, timeout=timeout_s)
            return self._make_status()

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to every rank's process group, then SIGKILL after `grace_s` seconds."""
        with self._changed:
            if self._state in ("idle", "ended"):
                self._state = "ended"
                self._announce_change()
                return
            if grace_s > 0:
                self._signal_ranks(signal.SIGTERM)
            self._kill_within(grace_s)

    def abort(self, grace_s: float) -> None:
        """Send SIGKILL to all ranks after `grace_s` seconds. The caller does so when other ranks
        failed or the attempt hangs.
        """
        self._kill_within(grace_s)

    def _make_status(self) -> LauncherStatus:
        return {
            "version": self._version,
            "state": self._state,
            "pids": {rank.number: rank.process.pid for rank in self._ranks.values()},
            "exit_codes": {rank.number: rank.exit_code for rank in self._ranks.values()},
            "ending": self._kill_at_s is not None,
            "oom": any(self._has_report(self._folder.oom, number) for number in self._ranks),
            "first_ended": self._first_ended,
            "host_oom_kills": max(0, count_oom_kills() - self._kills_before),
            "disk_full": self._disk_full,
            "cpu_s": self._census.cpu_s,
            "stale": self._stale,
            "error": self._error,
            "no_program": self._no_program,
        }

    def _run_ranks(self, ranks: list[RankStart], workdir: str) -> None:
        try:
            if self._is_superseded():
                self._error = f"a newer attempt than {self._epoch} exists"
            else:
                self._start_ranks(ranks, workdir)
        except OSError as error:  # no more processes, no room for a log
            self._error = f"{type(error).__name__}: {error}"
            self._kill_within(0)
        except NoProgram as error:
            self._error = str(error)
            self._no_program = True
            self._kill_within(0)
        with self._changed:
            self._state = "running" if self._ranks else "ended"
            self._announce_change()
        numbers: list[int] = []
        for number in self._ranks:
            numbers.extend(range(number, number + self._ranks_each))
        threading.Thread(target=self._sampler.run, args=(numbers, self._ended), daemon=True).start()
        # ends: the watchdog stops hung ranks
        while any(rank.exit_code is None for rank in self._ranks.values()):
            with self._changed:
                self._changed.wait(POLL_S)
            try:
                self._check_ranks()
            except Exception:  # the edge of a thread: a file of a rank must not hide its end
                traceback.print_exc()
        self._ended.set()
        try:
            end_leftover_processes(
                self._mark,
                str(self._folder.path),
                [rank.process.pid for rank in self._ranks.values()],
            )
        finally:
            with self._changed:
                self._state = "ended"
                self._announce_change()

    def _check_ranks(self) -> None:
        """Measure the processes, notice failed ranks, and send the signals that are due."""
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            self._signal_ranks(signal.SIGKILL)
        if time.monotonic() >= self._next_census_s:
            self._next_census_s = time.monotonic() + CENSUS_EVERY_S
            self._census.take_census({rank.process.pid for rank in self._ranks.values()})
        self._notice_failure()
        if time.monotonic() >= self._next_fence_s:
            self._next_fence_s = time.monotonic() + FENCE_EVERY_S
            if self._is_superseded():
                self._kill_within(0)

    def _start_ranks(self, ranks: list[RankStart], workdir: str) -> None:
        base = self._inherited_variables()
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._fork_until_s = time.monotonic() + FORK_TIMEOUT_S
        for number, argv, env in ranks:
            env = {**base, **env}
            process = self._start_process(
                number,
                argv,
                {**make_gloo_interface_variables(env), **env, MARK: self._mark},
                workdir,
            )
            self._ranks[number] = rank = Rank(number=number, process=process)
            threading.Thread(target=self._collect_exit_code, args=(rank,), daemon=True).start()

    def _start_process(
        self, rank_number: int, argv: Argv, env: dict[str, str], workdir: str
    ) -> subprocess.Popen[bytes] | ForkedRank:
        """Start and return a rank's process. Raises NoProgram where the program can never be
        executed here, OSError otherwise.
        """
        user = make_popen_user_arguments(env.pop(RUN_AS, None))
        with open_to_append(self._folder.log(rank_number)) as log:
            rank = (
                "it runs as another user"
                if user
                else self._fork_rank_or_explain(argv, env, workdir, log)
            )
            with contextlib.suppress(OSError), open_to_append(self._folder.starts) as starts:
                starts.write(f"rank {rank_number}: {rank}\n".encode())
            if isinstance(rank, ForkedRank):
                return rank
            try:
                return subprocess.Popen(
                    argv,
                    cwd=workdir,
                    **user,
                    env=_add_guard_folder(env),
                    **self._stream_arguments(log),
                    start_new_session=True,
                    preexec_fn=self._preexec_hook(),
                )
            except OSError as error:
                if error.errno not in EXEC_ERRORS:
                    raise
                why = (
                    find_start_problem(argv[0], workdir, env)
                    or f"{error.strerror}: {error.filename}"
                )
                raise NoProgram(f"{why} (on {socket.gethostname()})") from error

    def _fork_rank_or_explain(
        self, argv: Argv, env: Env, workdir: str, log: BinaryIO
    ) -> ForkedRank | str:
        """Return the rank's process, forked by the fork server, or the reason (text) why it must be
        a new interpreter instead.
        """
        return fork_rank_or_explain(argv, _add_guard_folder(env), workdir, log, self._fork_until_s)

    def _inherited_variables(self) -> dict[str, str]:
        """Return the variables that a rank's process has in addition to its own."""
        return make_base_variables()

    def _stream_arguments(self, log: BinaryIO) -> dict[str, Any]:
        """Return Popen's arguments for the standard streams of a rank, such as {"stdout": log}."""
        return {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}

    def _preexec_hook(self) -> Callable[[], None]:
        """Return the function that a rank's process calls before it executes its program (Popen's
        `preexec_fn`).
        """
        return make_rank_preexec_hook()

    def _collect_exit_code(self, rank: Rank) -> None:
        code = rank.process.wait()
        ended_ns = time.time_ns()
        tries = 0
        # on a full disk until there is room: an end that nobody can read is not reported
        while tries < WRITE_TRIES_MAX:
            try:
                self._folder.path.mkdir(parents=True, exist_ok=True)  # which a program may remove
                write_durably(self._folder.exit_code(rank.number), str(code))
                break
            except OSError as error:
                tries += error.errno not in DISK_AWAY
                # the rank could not write its last words either
                self._disk_full = self._disk_full or error.errno in DISK_FULL
                time.sleep(WRITE_AGAIN_S)
        with self._changed:
            if code != 0 and (self._first_ended is None or ended_ns < self._first_ended[1]):
                self._first_ended = (rank.number, ended_ns)
            rank.exit_code = code
            self._announce_change()

    def _notice_failure(self) -> None:
        """Schedule SIGKILL for all ranks once a rank has failed: soon, but after time for the
        others' reports.
        """
        for rank in self._ranks.values():
            if self._has_report(self._folder.oom, rank.number):
                self._kill_within(GRACE_AFTER_OOM_S)
            elif rank.exit_code:
                self._kill_within(GRACE_AFTER_FAILURE_S)
            elif self._has_report(self._folder.error, rank.number):
                self._kill_within(GRACE_AFTER_ERROR_S)

    def _has_report(self, report_path: Callable[[int], Path], first_rank: int) -> bool:
        """Return whether any rank of the process that starts at rank `first_rank` has written this
        report.
        """
        return any(
            report_path(rank).exists() for rank in range(first_rank, first_rank + self._ranks_each)
        )

    def _kill_within(self, grace_s: float) -> None:
        """Schedule SIGKILL for all ranks after `grace_s` seconds, unless it is already due
        earlier.
        """
        at_s = time.monotonic() + grace_s
        with self._changed:
            if self._kill_at_s is None:
                self._announce_change()
            self._kill_at_s = at_s if self._kill_at_s is None else min(self._kill_at_s, at_s)

    def _signal_ranks(self, signal_number: signal.Signals) -> None:
        for rank in self._ranks.values():
            if rank.exit_code is None and rank.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal_number)

    def _is_superseded(self) -> bool:
        self._stale = self._stale or read_attempt_number(self._epoch_path) > self._epoch
        return self._stale

    def _announce_change(self) -> None:
        self._version += 1
        self._changed.notify_all()


def make_popen_user_arguments(uid_gid: str | None) -> Identity:
    """Return Popen arguments that run a process as the user and group in `uid_gid` ("uid:gid");
    None means the current user.

    The process gets no other groups. The child changes its user before `preexec_fn` runs, since
    that change clears the signal for a parent's death (prctl(2)).
    """
    if uid_gid is None:
        return {}
    uid, _, gid = uid_gid.partition(":")
    return {"user": int(uid), "group": int(gid), "extra_groups": []}


def _add_guard_folder(env: Env) -> Env:
    """Return the variables with the guard's folder first in PYTHONPATH if ORC_GUARD is set; else
    unchanged.

    The folder makes every Python process that trains run under the guard.
    """
    if not env.get("ORC_GUARD"):
        return env
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(filter(None, [HOOKS, env.get("PYTHONPATH")])),
    }


def make_rank_preexec_hook() -> Callable[[], None]:
    """Return a `preexec_fn` for a rank: it restores SIGINT, and makes the kernel kill the rank with
    the forking thread.
    """
    tie_to_parent = make_die_with_parent_hook()

    def hook() -> None:
        restore_signals()
        tie_to_parent()

    return hook


def make_die_with_parent_hook() -> Callable[[], None]:
    """Return a `preexec_fn` after which the kernel SIGKILLs the child when the forking thread ends."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def hook() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return hook


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot; 0 where it
    does not count them.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def find_free_port() -> int:
    """Return a TCP port that is free now. Raises OSError after 100 tries."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free TCP port in {PORTS}")
