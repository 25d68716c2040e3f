"""Failure reports of a rank: files for out-of-memory errors and for the exception that ended the process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from orchestrator.specs.attempt import ErrorReport, OomReport
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.training.guard import oom_report
from orchestrator.training.guard.monitor import write_durably
from orchestrator.training.guard.pass_progress import compute_fraction_of_modules_done

if TYPE_CHECKING:
    from orchestrator.training.guard.monitor import Monitor
    from orchestrator.training.guard.virtual_device import VirtualDevice

BASES_MAX = 16  # of an exception's types that are reported
GUARD = str(Path(__file__).with_name("guard.py"))


class FailureReporter:
    """Writes this rank's failure reports, and remembers the last out-of-memory error that was
    raised.
    """

    def __init__(self, monitor: Monitor, folder: Any) -> None:
        self.monitor = monitor
        self.folder = folder
        self.pid = os.getpid()
        self._noted: OomReport | None = None
        self._is_wrapped = False  # guard.py runs the script and sees how it ends
        os.register_at_fork(after_in_child=self._after_fork)

    def record_guarded_rank(self, rank: int) -> None:
        """Record that guard.py runs the program of rank `rank` in this process."""
        self._is_wrapped = True
        self.monitor.set_rank(rank)

    def _after_fork(self) -> None:
        self._noted = None

    def note_oom(self, error: BaseException, requested_bytes: int | None) -> None:
        """Record an out-of-memory error when it is raised: the script may catch it and still fail later."""
        self.monitor.is_rank = self.monitor.beat_after_next_step = True
        count = 1 if self._noted is None else self._noted.count + 1
        self._noted = replace(self._oom_report(error, requested_bytes), count=count)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            write_durably(self.folder.caught(self.monitor.rank), self._noted)

    def watch_errors(self, torch: Any) -> None:
        """Replace the constructor of `torch.cuda.OutOfMemoryError`, so that every such error is
        recorded.

        The class is mutable. PyTorch's C++ code constructs it for errors of the CUDA allocator
        (torch/csrc/Exceptions.h), as Python code does. So the hook needs no CUDA call.
        """
        kind = torch.cuda.OutOfMemoryError  # its only name before PyTorch 2.5
        made = kind.__init__

        @functools.wraps(made)
        def noted(error: BaseException, *args: Any) -> None:
            made(error, *args)
            if oom_report.find_oom_exception(error) is error:
                self.note_oom(error, None)

        kind.__init__ = noted

    def on_exit(self, system_exit: SystemExit) -> None:
        """After a SystemExit with a non-zero exit code, report the last out-of-memory error."""
        if system_exit.code not in (None, 0):
            self._report_oom(system_exit)
        self.monitor.write_heartbeat()

    def on_exception(self, error: BaseException) -> None:
        """Report and print the exception; exit with OOM_EXIT_CODE if it is an out-of-memory error."""
        out_of_memory = self._report_oom(error)
        error.__traceback__ = _skip_guard_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if not out_of_memory:
            self._report_error(error)
        self.monitor.write_heartbeat()
        sys.stdout.flush()
        sys.stderr.flush()
        if out_of_memory:
            os._exit(OOM_EXIT_CODE)  # a destructor could deadlock with ranks that wait for this one

    def watch_signals(self) -> None:
        """Replace `signal.signal`, so that SIGTERM and SIGINT are recorded before the program's own
        handler runs.

        That handler may save and exit with 0. The program sees its own handlers. Without a handler
        a signal ends the process, and its exit code tells.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # only there may a handler be set
        register = signal.signal
        current = signal.getsignal

        def watched(number: int, handler: Any) -> Any:
            if number not in (signal.SIGTERM, signal.SIGINT) or not callable(handler):
                return _unwrap_handler(register(number, handler))

            @functools.wraps(handler)
            def noted(number: int, frame: types.FrameType | None) -> Any:
                self.monitor.note_signal(number)
                return handler(number, frame)

            noted.orc_handler = handler  # type: ignore[attr-defined]
            return _unwrap_handler(register(number, noted))

        signal.signal = watched  # type: ignore[assignment]
        signal.getsignal = lambda number: _unwrap_handler(current(number))  # type: ignore[assignment]
        for number in (signal.SIGTERM, signal.SIGINT):
            watched(number, current(number))

    def watch_child_processes(self) -> None:
        """Make `multiprocessing` children that turn out to be ranks report their end."""
        process = importlib.import_module("multiprocessing.process").BaseProcess
        run = process.run

        @functools.wraps(run)
        def watched(child: Any) -> None:
            try:
                run(child)
            except BaseException as error:  # whatever ends a user's program is evidence
                self.report_rank_end(error)
                raise
            if self.monitor.is_rank:
                self.monitor.write_heartbeat()

        process.run = watched

    def watch_immediate_exit(self) -> None:
        """Replace `os._exit`, so that a last heartbeat is written before: it runs no hook and ends
        many trainings.
        """
        leave = os._exit

        @functools.wraps(leave)
        def leave_at_once(status: int) -> NoReturn:
            if os.getpid() == self.pid and self.monitor.is_rank:
                self.monitor.write_heartbeat()
            leave(status)

        os._exit = leave_at_once

    def watch_spawned_rank(self) -> None:
        """Install hooks that report the end of this process, if it is a rank that the script
        spawned, outside guard.py.
        """
        hook = sys.excepthook

        def excepthook(
            kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
        ) -> None:
            if not self._is_wrapped:
                self.report_rank_end(error)
            hook(kind, error, trace)

        sys.excepthook = excepthook
        atexit.register(self._at_exit)

    def report_rank_end(self, error: BaseException) -> None:
        """Report the exception that ends this process, if it is a rank."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        if not self._report_oom(error) and self.monitor.is_rank and isinstance(error, Exception):
            self._report_error(error)
        if self.monitor.is_rank:
            self.monitor.write_heartbeat()

    def _at_exit(self) -> None:
        """Report the last out-of-memory error at exit, since some frameworks turn every exception
        into an exit code.

        hydra does so under dora.
        """
        if os.getpid() != self.pid or self._is_wrapped:
            return
        self._report_oom(SystemExit())
        if self.monitor.is_rank:
            self.monitor.write_heartbeat()

    def _report_error(self, error: BaseException) -> None:
        report = ErrorReport(
            rank=self.monitor.rank,
            step=self.monitor.step,
            phase=self.monitor.phase,
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            traceback="".join(traceback.format_exception(error)),
            bases=tuple(kind.__name__ for kind in type(error).__mro__[1:-1])[:BASES_MAX],
        )
        write_durably(self.folder.error(self.monitor.rank), report)

    def _report_oom(self, error: BaseException) -> bool:
        cause = oom_report.find_oom_exception(error)
        # an exception of another cause ends the program although memory ran out before it in this step
        is_open = cause is not None or isinstance(error, SystemExit)
        if is_open and self._noted and self._noted.steps_done == self.monitor.steps_done:
            report = self._noted
        elif cause is not None:
            report = self._oom_report(cause, None)
        else:
            return False
        write_durably(self.folder.oom(self.monitor.rank), report)
        return True

    def _oom_report(self, error: BaseException, requested_bytes: int | None) -> OomReport:
        message = str(error)
        monitor = self.monitor
        live_bytes, capacity_bytes = _get_live_and_capacity_bytes(monitor.device)
        foreign_bytes = 0 if monitor.device else oom_report.parse_foreign_bytes(message)
        room_bytes = (
            None if oom_report.has_process_cap(message) else monitor.read_allocator_room_bytes()
        )
        done = monitor.pass_done
        if done is None and monitor.phase == "forward":
            done = compute_fraction_of_modules_done(sys._getframe())
        stated_bytes = oom_report.parse_capacity_bytes(message)
        return OomReport(
            rank=monitor.rank,
            step=monitor.step,
            steps_done=monitor.steps_done,
            phase=monitor.phase,
            pass_done=done,
            requested_bytes=oom_report.parse_requested_bytes(message)
            if requested_bytes is None
            else requested_bytes,
            live_bytes=live_bytes,
            capacity_bytes=capacity_bytes
            if monitor.device or stated_bytes is None
            else stated_bytes,
            foreign_bytes=foreign_bytes,
            overhead_bytes=0
            if room_bytes is None
            else max(0, capacity_bytes - room_bytes - foreign_bytes),
            injected=monitor.injected,
            message=message,
        )


def _unwrap_handler(handler: Any) -> Any:
    """Return the program's own signal handler, from inside ours."""
    return getattr(handler, "orc_handler", handler)


def _get_live_and_capacity_bytes(device: VirtualDevice | None) -> tuple[int, int]:
    """Return (live bytes, capacity in bytes) of this rank's virtual device; zeros if none is in
    use.
    """
    if device:
        return device.live_bytes, device.capacity_bytes
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.get_device_properties().total_memory


def _skip_guard_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without the guard's frames at its start."""
    while trace and trace.tb_frame.f_code.co_filename in (GUARD, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
