"""`orc launch` while the training runs: starts what its core planned, passes signals on, and waits.

The core (`orchestrator.service.commands.launch.core`) is a child that ends before the ranks start, and is run again
after an end that is no success. So this process stays small: standard library and pynvml only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.launcher import LauncherStatus
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.local.foreground import Foreground, RedirectedOutput, print_message
from orchestrator.specs.command_line import Env
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import LAUNCH_GRACE_S, AttemptFolder

CORE = "orchestrator.service.commands.launch.core"
OWN_ERROR = 125  # as of `timeout` and `docker run`: the command itself was not the cause
NO_PROGRAM = 127
NO_PERMISSION = 126
FLAGS = ("--dry-run", "--once", "--resume", "--requeue")
LOCK_WAIT_S = 60.0  # another line plans within seconds
TICK_S = 0.25
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGTSTP)
# Variables by which a starter of several processes says how many there are, and which one this is.
STARTERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("WORLD_SIZE", "RANK"),
)


class LaunchRefused(Exception):
    """An error of `orc launch` itself, such as a wrong option, and not of the command that it
    runs.
    """


class Parser(argparse.ArgumentParser):
    """Parser of the options of `orc launch` that precede the command."""

    def error(self, message: str) -> NoReturn:
        """Raise LaunchRefused with the message, instead of exiting with argparse's own exit
        code.
        """
        raise LaunchRefused(message)


def run_launch_command(arguments: Sequence[str]) -> int:
    """Run `orc launch` with these command-line arguments, and return its exit code."""
    parser = Parser(prog="orc launch", add_help=False, allow_abbrev=False)
    for name in FLAGS:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--devices")
    parser.add_argument("--grace", type=float, default=LAUNCH_GRACE_S)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        options = parser.parse_args(arguments)
    except LaunchRefused as error:
        print_message(str(error))
        return OWN_ERROR
    return run_with_options(options)


def run_with_options(options: Namespace) -> int:
    """Run `orc launch` with these parsed options to its end, and return its exit code."""
    if options.command[:1] == ["--"]:
        del options.command[0]
    try:
        if not options.command:
            raise LaunchRefused("nothing to launch: orc launch python train.py --lr 1e-3")
        count, number = find_task_count_and_number(os.environ)
        if count == 1 or options.dry_run:
            return LaunchRun(options).run()
        if number == 0:
            print_message(
                f"{count} processes are started side by side: each runs its command as typed"
            )
        exec_command(options.command)
    except LaunchRefused as error:
        print_message(str(error))
    except Exception:  # the edge: a fault of ours is told apart from the command's
        traceback.print_exc()
    return OWN_ERROR


def find_task_count_and_number(environment: Env) -> tuple[int, int]:
    """Return (number of processes that a starter such as srun runs side by side, this process's
    number).

    (1, 0) where no such starter has set its variables.
    """
    for size, rank in STARTERS:
        count = environment.get(size, "")
        number = environment.get(rank, "")
        if count.isdecimal() and int(count) > 1 and number.isdecimal():
            return int(count), int(number)
    return 1, 0


def exec_command(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command, unchanged. Where that cannot be executed, end this
    process with an error code.
    """
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print_message(f"{command[0]}: {error.strerror}")
        os._exit(NO_PERMISSION if isinstance(error, PermissionError) else NO_PROGRAM)


class LaunchRun:
    """A run of `orc launch`: it gets plans from its planning process, runs attempts and passes
    signals on.
    """

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._launcher: Foreground | None = None
        self._core: subprocess.Popen[str] | None = None
        self._signals: list[int] = []  # that asked for an end
        self._locks: list[BinaryIO] = []  # held as long as this process lives

    def run(self) -> int:
        """Run attempts until the planning process decides to end, and return the exit code. Raises
        LaunchRefused.
        """
        for number in PASSED_ON:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN  # as under nohup
            if not is_ignored and not self._options.dry_run:
                signal.signal(number, self._on_signal)
        with hold_planning_lock():
            plan = self._ask_core({"request": vars(self._options), "cwd": os.getcwd()})
            for lock in plan.get("locks", ()):
                self._hold_lock(**lock)
        while "exit" not in plan:
            self._wait_for_attempt(plan["wait_s"])
            code = self._run_attempt(plan)
            if code is not None:
                return code
            plan |= self._ask_core(
                {"state": plan["state"], "code": self._code, "signals": self._signals}
            )
        return int(plan["exit"])

    def _ask_core(self, question: JsonObject) -> JsonObject:
        """Run the planning process (CORE) with this question, print the lines of its answer, and
        return the answer.

        If that process fails before any attempt, the command runs without it; later, LaunchRefused
        is raised.
        """
        self._core = subprocess.Popen(
            [sys.executable, "-m", CORE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        text, _ = self._core.communicate(json.dumps(question))
        self._core = None
        try:
            answer: JsonObject = json.loads(text)
        except ValueError:
            if self._signals:  # which ended it
                return {"exit": self._choose_exit_code(0)}
            if "request" in question and not self._options.dry_run:
                print_message("its core failed: the command runs as typed, without it")
                exec_command(self._options.command)
            raise LaunchRefused("its core failed, and says why above") from None
        for line in answer["lines"]:
            print_message(line)
        return answer

    def _hold_lock(self, path: str, content: JsonObject, refuses: str) -> None:
        """Hold a lock until this process ends, and write `content` into its file.

        Where another process has the lock, raise LaunchRefused with `refuses`; return without
        the lock if that is "".
        """
        try:
            file = open_lock(path)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if refuses and isinstance(error, BlockingIOError):
                raise LaunchRefused(refuses) from None
            return
        file.truncate()
        file.write(json.dumps({**content, "pid": os.getpid()}).encode())
        file.flush()
        self._locks.append(file)

    def _wait_for_attempt(self, wait_s: float) -> None:
        """Wait `wait_s` seconds before an attempt, or until a signal asks for the end."""
        end_s = time.monotonic() + wait_s
        while not self._signals and time.monotonic() < end_s:
            time.sleep(min(TICK_S, wait_s))

    def _run_attempt(self, plan: JsonObject) -> int | None:
        """Run an attempt. Return the exit code where the planning process need not judge the
        attempt; else store the attempt, and return None.
        """
        if self._signals:
            return self._choose_exit_code(0)
        folder = AttemptFolder(plan["folder"])
        files = RedirectedOutput()
        status = self._run_ranks(plan, folder)
        files.copy_to_log(folder.log(0))
        first, code = find_first_failed_rank_and_code(status)
        ending = {
            "first_ended_rank": first,
            "host_oom_kills": status["host_oom_kills"],
            "disk_full": status.get("disk_full", False),
            "launch_error": status["error"],
            "no_program": status["no_program"],
            "stopped": bool(self._signals),
        }
        write_durably(folder.path / "ending.json", json.dumps(ending))
        if status["error"] and not status["pids"]:
            print_message(status["error"])
            return NO_PROGRAM if status["no_program"] else OWN_ERROR
        self._code = self._choose_exit_code(code)
        is_judged = plan["judges"] or self._signals or has_evidence(folder, code)
        return None if is_judged and not has_lost_reader() else self._code

    def _run_ranks(self, plan: JsonObject, folder: AttemptFolder) -> LauncherStatus:
        """Run the ranks until they end, and return the launcher's last status.

        A single rank gets a pseudo-terminal if the caller has a terminal.
        """
        launcher = Foreground(
            folder, plan["epoch_path"], plan["epoch"], plan["mark"], Watched(**plan["watched"])
        )
        ranks = [(rank, tuple(argv), env) for rank, argv, env in plan["ranks"]]
        if len(ranks) == 1 and os.isatty(1):
            launcher.use_terminal()
        try:
            status = launcher.start(ranks, plan["workdir"], plan["count"])
            self._launcher = launcher
            if launcher.terminal is not None:
                launcher.terminal.start_copying()
            while status["state"] != "ended":  # by the ranks, or by a signal
                status = launcher.wait(status["version"], TICK_S)
        finally:
            self._launcher = None
            if launcher.terminal is not None:
                launcher.terminal.close()
        return status

    def _choose_exit_code(self, script_code: int) -> int:
        """Return the exit code for the script's own code: 143 after SIGTERM, else the script's
        code.

        A script that ended with 0 after another signal gives 128 plus the first signal's number.
        """
        if signal.SIGTERM in self._signals:
            return 128 + signal.SIGTERM
        return script_code or (128 + self._signals[0] if self._signals else 0)

    def _on_signal(self, signal_number: int, _: Any) -> None:
        """Pass a signal on to the ranks. After SIGTERM they have the grace time; a second interrupt
        kills them at once.
        """
        launcher = self._launcher
        is_second = signal_number == signal.SIGINT and signal_number in self._signals
        if signal_number in ENDS:
            self._signals.append(signal_number)
        if signal_number == signal.SIGTSTP:
            self._stop_with_ranks()
        elif launcher is not None:
            if signal_number == signal.SIGWINCH and launcher.terminal is not None:
                launcher.terminal.resize()
            launcher.forward_signal(signal_number)
            if is_second:
                launcher.abort(0.0)
            elif signal_number in (signal.SIGTERM, signal.SIGHUP):
                launcher.abort(self._options.grace)
        elif self._core is not None and signal_number in ENDS:
            self._core.terminate()

    def _stop_with_ranks(self) -> None:
        """Stop the ranks and this process, as Ctrl-Z does in a shell; return once the process is
        continued.
        """
        launcher = self._launcher
        terminal = None if launcher is None else launcher.terminal
        if launcher is not None:
            launcher.forward_signal(signal.SIGSTOP)
        if terminal is not None:
            terminal.restore_caller_terminal()
        os.kill(os.getpid(), signal.SIGSTOP)
        if terminal is not None:
            terminal.take_caller_terminal()
        if launcher is not None:
            launcher.forward_signal(signal.SIGCONT)


def find_first_failed_rank_and_code(status: LauncherStatus) -> tuple[int | None, int]:
    """Return (rank that failed first, its exit code as in a shell); (None, 0) after a success."""
    if status["first_ended"] is None:
        return None, 0
    rank, _ = status["first_ended"]
    code = status["exit_codes"][rank] or 0
    return rank, 128 - code if code < 0 else code


def has_evidence(folder: AttemptFolder, exit_code: int) -> bool:
    """Return whether an attempt left anything to judge.

    After a success that is a caught error, after a failure any report or log line.
    """
    if exit_code == 0:
        return any(folder.path.glob("rank*.caught.json"))
    log = folder.log(0)
    is_killed = exit_code == 128 + signal.SIGKILL
    has_log = log.exists() and log.stat().st_size > 0
    return is_killed or has_log or any(folder.path.glob("rank*.json"))


def has_lost_reader() -> bool:
    """Return whether the reader of standard output has closed it, as `head` does."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextlib.contextmanager
def hold_planning_lock() -> Iterator[None]:
    """Hold a lock of this machine, so that only one `orc launch` at a time plans on the free bytes.
    The wait is bounded.
    """
    folder = find_lock_folder()
    if folder is None:
        yield
        return
    with open_lock(str(folder / "planning")) as file:
        end_s = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < end_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(TICK_S)
        yield


def open_lock(path: str) -> BinaryIO:
    """Open a lock's file, which other users may also lock, and return it. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(descriptor, 0o666)
    return os.fdopen(descriptor, "r+b")


def find_lock_folder() -> Path | None:
    """Return the folder of this machine's locks, which all users share; None where it cannot
    exist.
    """
    folder = Path(tempfile.gettempdir()) / "orc-launch"
    try:
        folder.mkdir(exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            folder.chmod(0o1777)
    except OSError:
        return None
    return folder
