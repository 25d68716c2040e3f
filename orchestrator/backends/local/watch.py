"""`orc launch` while the training runs: starts what its core planned, passes signals on, and waits.

The core (`orchestrator.service.commands.launch.core`) is a child that ends before the ranks start, and is run again
after an end that is no success. So this process stays small: standard library and pynvml only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.local.foreground import Foreground, OutputFiles, say
from orchestrator.specs.run import AttemptFolder

CORE = "orchestrator.service.commands.launch.core"
OWN_ERROR = 125  # as of `timeout` and `docker run`: the command itself was not the cause
NO_PROGRAM, NO_PERMISSION = 127, 126
FLAGS = ("--dry-run", "--once", "--resume", "--requeue")
GRACE_S = 30.0  # KillWait of Slurm (slurm.conf)
REQUEUES_MAX = 64  # of one job of Slurm
REQUEUE_TIMEOUT_S = 30.0
LOCK_WAIT_S = 60.0  # another line plans within seconds
PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGTSTP,
)
# Variables by which a starter of several processes says how many there are, and which one this is.
STARTERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("WORLD_SIZE", "RANK"),
)


@dataclass(slots=True)
class Options:
    """What stands before the command."""

    command: list[str] = field(default_factory=list)
    devices: str | None = None
    grace_s: float = GRACE_S
    dry_run: bool = False
    once: bool = False
    resume: bool = False
    requeue: bool = False


class Refusal(Exception):
    """An error of ours, or of what stands before the command."""


def main(words: Sequence[str]) -> int:
    """Run `orc launch` with these words, and return its exit code."""
    try:
        options = read_options(words)
    except Refusal as error:
        say(str(error))
        return OWN_ERROR
    return run_line(options)


def run_line(options: Options) -> int:
    """Run a line to its end, and return its exit code."""
    try:
        return launch(options)
    except Refusal as error:
        say(str(error))
    except Exception:  # the edge: a fault of ours is told apart from the command's
        traceback.print_exc()
    return OWN_ERROR


def read_options(words: Sequence[str]) -> Options:
    """Return the options and the command after them. Raises Refusal."""
    options, rest = Options(), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name == "--":
            break
        if name in FLAGS and not equals:
            setattr(options, name[2:].replace("-", "_"), True)
            continue
        if name not in ("--devices", "--grace"):
            raise Refusal(f"{name} is no option: --devices, --grace, {', '.join(FLAGS)}")
        if not equals:
            value = rest.pop(0) if rest else ""
        if name == "--devices":
            options.devices = value
            continue
        number = value.removesuffix("s")
        if not number.isdecimal():
            raise Refusal(f"--grace takes seconds, such as 60: got {value!r}")
        options.grace_s = float(number)
    options.command = rest
    if not rest:
        raise Refusal("nothing to launch: orc launch python train.py --lr 1e-3")
    return options


def launch(options: Options) -> int:
    """Run the command to its end, and return its exit code. Raises Refusal."""
    count, number = tasks(os.environ)
    if count > 1 and not options.dry_run:
        if number == 0:
            say(f"{count} processes are started side by side: each runs its command as typed")
        become(options.command)
    return Watch(options).run()


def tasks(environment: Any) -> tuple[int, int]:
    """Return how many processes a starter runs side by side, and the number of this one; (1, 0) without one."""
    for size, rank in STARTERS:
        count, number = environment.get(size, ""), environment.get(rank, "")
        if count.isdecimal() and int(count) > 1 and number.isdecimal():
            return int(count), int(number)
    return 1, 0


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by the command as typed."""
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        os._exit(NO_PERMISSION if isinstance(error, PermissionError) else NO_PROGRAM)


class Watch:
    """One run of `orc launch`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._launcher: Foreground | None = None
        self._core: subprocess.Popen[str] | None = None
        self._signals: list[int] = []  # that asked for an end
        self._locks: list[BinaryIO] = []  # held as long as this process lives

    def run(self) -> int:
        """Return the exit code after the last attempt. Raises Refusal."""
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._on_signal)
        with planning_turn():
            plan = self._ask({"request": asdict(self._options), "cwd": os.getcwd()})
            for lock in plan.get("locks", ()):
                self._lock(**lock)
        while "exit" not in plan:
            if not self._wait(plan["wait_s"]):
                return self._end_code(0)
            code, left = self._attempt(plan)
            if left is None:
                return code
            answer = self._ask({"state": plan["state"], "code": code, **left})
            plan = {**plan, **answer}
        return int(plan["exit"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the core's answer, whose lines are printed; without one before any attempt the command runs bare.

        Raises Refusal.
        """
        self._core = subprocess.Popen(
            [sys.executable, "-m", CORE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        text, _ = self._core.communicate(json.dumps(question))
        if self._signals and not text:
            sys.exit(self._end_code(0))
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            if "request" in question and not self._options.dry_run:
                say("its core failed: the command runs as typed, without it")
                become(self._options.command)
            raise Refusal("its core failed, and says why above") from None
        for line in answer.get("lines", ()):
            say(line)
        return answer

    def _lock(self, path: str, content: dict[str, Any], refuses: str) -> None:
        """Hold a lock to the end of this process; `refuses` is the error where another one has it, "" for none."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            file = os.fdopen(descriptor, "r+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if refuses and isinstance(error, BlockingIOError):
                raise Refusal(refuses) from None
            return
        file.truncate()
        file.write(json.dumps({**content, "pid": os.getpid()}).encode())
        file.flush()
        self._locks.append(file)

    def _wait(self, wait_s: float) -> bool:
        """Wait before an attempt; return whether nothing asked for an end."""
        end_s = time.monotonic() + wait_s
        while not self._signals and time.monotonic() < end_s:
            time.sleep(min(0.2, wait_s))
        return not self._signals

    def _attempt(self, plan: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        """Run an attempt; return its exit code, and what the core is told of its end, None where it need not judge."""
        folder = AttemptFolder(plan["folder"])
        launcher = Foreground(
            folder, plan["epoch_path"], plan["epoch"], plan["mark"], Watched(**plan["watched"])
        )
        ranks = [(rank, tuple(argv), env) for rank, argv, env in plan["ranks"]]
        if len(ranks) == 1 and os.isatty(1):
            launcher.use_terminal()
        files = OutputFiles()
        with in_turn(launcher.terminal):
            status = launcher.start(ranks, plan["workdir"], plan["count"])
            self._launcher = launcher
            if launcher.terminal is not None:
                launcher.terminal.begin()
            while status["state"] != "ended":  # the ranks', or a signal's
                status = launcher.wait(status["version"], 0.25)
        self._launcher = None
        files.keep(folder.log(0))
        first = status["first_ended"]
        ending = {
            "first_ended_rank": None if first is None else first[0],
            "host_oom_kills": status["host_oom_kills"],
            "launch_error": status["error"],
            "no_program": status["no_program"],
            "stopped": bool(self._signals),
        }
        write_durably(folder.path / "ending.json", json.dumps(ending))
        if status["error"] and not status["pids"]:
            say(status["error"])
            return (NO_PROGRAM if status["no_program"] else OWN_ERROR), None
        code = 0 if first is None else status["exit_codes"][first[0]] or 0
        code = 128 - code if code < 0 else code
        if not plan["judges"] and not self._signals and not has_evidence(folder, code):
            return code, None
        return self._end_code(code), {"signals": self._signals, "requeue": self._options.requeue}

    def _end_code(self, code: int) -> int:
        """Return the exit code after the script's own: after our SIGTERM 143, unless the core says that it is done."""
        if signal.SIGTERM in self._signals:
            return 128 + signal.SIGTERM
        return code or (128 + self._signals[0] if self._signals else 0)

    def _on_signal(self, number: int, _: Any) -> None:
        """Pass a signal on; an end has its grace, and a second interrupt kills."""
        launcher = self._launcher
        terminal = None if launcher is None else launcher.terminal
        if number == signal.SIGWINCH:
            if terminal is not None:
                terminal.resize()
            return
        if number == signal.SIGTSTP:
            self._stop_with_ranks(launcher)
            return
        is_end = number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        is_second = number == signal.SIGINT and number in self._signals
        if is_end:
            self._signals.append(number)
        if launcher is None:
            if self._core is not None and is_end:
                self._core.terminate()
            return
        if is_second:
            launcher.kill(0.0)
            return
        launcher.signal(number)
        if number in (signal.SIGTERM, signal.SIGHUP):
            launcher.kill(self._options.grace_s)

    def _stop_with_ranks(self, launcher: Foreground | None) -> None:
        """Stop the ranks and this process, as a shell's Ctrl-Z does, until it is continued."""
        if launcher is not None:
            launcher.signal(signal.SIGSTOP)
            if launcher.terminal is not None:
                launcher.terminal.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        if launcher is not None:
            if launcher.terminal is not None:
                launcher.terminal.take_over()
            launcher.signal(signal.SIGCONT)


def has_evidence(folder: AttemptFolder, code: int) -> bool:
    """Return whether an attempt left anything to judge: a success only what it caught, a failure any trace."""
    if code == 0:
        return any(folder.path.glob("rank*.caught.json"))
    log = folder.log(0)
    is_killed = code == 128 + signal.SIGKILL
    return (
        is_killed
        or any(folder.path.glob("rank*.json"))
        or (log.exists() and log.stat().st_size > 0)
    )


@contextlib.contextmanager
def in_turn(terminal: Any) -> Iterator[None]:
    """Close the rank's terminal at the end, whatever happens."""
    try:
        yield
    finally:
        if terminal is not None:
            terminal.close()


@contextlib.contextmanager
def planning_turn() -> Iterator[None]:
    """Let one line of this machine plan at a time, so that no two count on the same free bytes; bounded."""
    folder = lock_folder()
    if folder is None:
        yield
        return
    with open(
        os.open(folder / "planning", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b"
    ) as file:
        end_s = time.monotonic() + LOCK_WAIT_S
        while time.monotonic() < end_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        yield


def lock_folder() -> Path | None:
    """Return the folder of this machine's locks, which all users share; None where there can be none."""
    folder = Path(tempfile.gettempdir()) / "orc-launch"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user's
            folder.chmod(0o1777)
        return folder
    return None
