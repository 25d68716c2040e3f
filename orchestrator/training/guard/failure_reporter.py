"""How does a guarded process tell of its end? Reports of out-of-memory errors and of the exception that ended it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import runpy
import sys
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.specs.attempt import ErrorReport, OomReport
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.training.guard import oom_report
from orchestrator.training.guard.monitor import write_durably
from orchestrator.training.guard.passes import modules_done

if TYPE_CHECKING:
    from orchestrator.training.guard.monitor import Monitor
    from orchestrator.training.guard.virtual_device import VirtualDevice

GUARD = str(Path(__file__).with_name("guard.py"))


class Guarded:
    """The files of this rank, and the last out-of-memory error that was raised in it."""

    def __init__(self, monitor: Monitor, folder: Any) -> None:
        self.monitor, self.folder, self.pid = monitor, folder, os.getpid()
        self._noted: OomReport | None = None
        self._is_wrapped = False  # the guard itself sees how the process ends
        os.register_at_fork(after_in_child=self._forked)

    def wrap(self, rank: int) -> None:
        """From now on this process is run by the guard, as that rank."""
        self._is_wrapped = True
        self.monitor.be(rank)

    def _forked(self) -> None:
        self._noted = None

    def note(self, error: BaseException, requested_bytes: int | None) -> None:
        """Keep the account of an error as it is raised: the script may catch it, free memory, and end all the same."""
        self.monitor.is_rank = self.monitor.is_behind = True
        count = 1 if self._noted is None else self._noted.count + 1
        self._noted = replace(self._oom_report(error, requested_bytes), count=count)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            write_durably(self.folder.caught(self.monitor.rank), self._noted)

    def watch_errors(self, torch: Any) -> None:
        """Note every out-of-memory error of PyTorch's as it is made.

        The class is PyTorch's own, and mutable: its C++ code makes an instance of it for what its CUDA allocator throws
        (torch/csrc/Exceptions.h) just as a script does, so nothing of CUDA is needed to see one.
        """
        kind = torch.cuda.OutOfMemoryError  # before PyTorch 2.5 its only name
        made = kind.__init__

        @functools.wraps(made)
        def noted(error: BaseException, *args: Any) -> None:
            made(error, *args)
            if oom_report.out_of_memory(error) is error:
                self.note(error, None)

        kind.__init__ = noted

    def exited(self, end: SystemExit) -> None:
        """The script chose its exit code: report the out-of-memory error it gave up on, if it did."""
        if end.code not in (None, 0):
            self._report_oom(end)
        self.monitor.beat()

    def failed(self, error: BaseException) -> None:
        """Report the exception, print it as python would, and end the process where memory ran out."""
        out_of_memory = self._report_oom(error)
        error.__traceback__ = _user_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if not out_of_memory:
            self._report_error(error)
        self.monitor.beat()
        sys.stdout.flush()
        sys.stderr.flush()
        if out_of_memory:
            os._exit(OOM_EXIT_CODE)  # no destructor may wait for ranks that wait for this one

    def watch_children(self) -> None:
        """Report how a process ends that this one starts by `multiprocessing`, where it has turned out to be a rank."""
        process = importlib.import_module("multiprocessing.process").BaseProcess
        run = process.run

        @functools.wraps(run)
        def watched(child: Any) -> None:
            try:
                run(child)
            except BaseException as error:
                self.ends_with(error)
                raise
            if self.monitor.is_rank:
                self.monitor.beat()

        process.run = watched

    def watch_end(self) -> None:
        """Report how this process ends where it is a rank that nobody wraps: spawned, or the script's own."""
        hook = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            if not self._is_wrapped:
                self.ends_with(error)
            hook(kind, error, trace)

        sys.excepthook = excepthook
        atexit.register(self._gives_up)

    def ends_with(self, error: BaseException) -> None:
        """Report the exception that ends this process, if it is a rank."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        if not self._report_oom(error) and self.monitor.is_rank and isinstance(error, Exception):
            self._report_error(error)
        if self.monitor.is_rank:
            self.monitor.beat()

    def _gives_up(self) -> None:
        """A framework that handles every exception itself (hydra, under dora) leaves by an exit code."""
        if os.getpid() != self.pid or self._is_wrapped:
            return
        self._report_oom(SystemExit())
        if self.monitor.is_rank:
            self.monitor.beat()

    def _report_error(self, error: BaseException) -> None:
        report = ErrorReport(
            rank=self.monitor.rank,
            step=self.monitor.step,
            phase=self.monitor.phase,
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            traceback="".join(traceback.format_exception(error)),
        )
        write_durably(self.folder.error(self.monitor.rank), report)

    def _report_oom(self, error: BaseException) -> bool:
        cause = oom_report.out_of_memory(error)
        if self._noted and self._noted.steps_done == self.monitor.steps_done:
            report = self._noted
        elif cause is not None:
            report = self._oom_report(cause, None)
        else:
            return False
        write_durably(self.folder.oom(self.monitor.rank), report)
        return True

    def _oom_report(self, error: BaseException, requested_bytes: int | None) -> OomReport:
        message, monitor = str(error), self.monitor
        live_bytes, capacity_bytes = _device_memory(monitor.device)
        foreign_bytes = 0 if monitor.device else oom_report.foreign_bytes(message)
        room_bytes = None if oom_report.is_capped(message) else monitor.allocator_room_bytes()
        done = monitor.pass_done
        if done is None and monitor.phase == "forward":
            done = modules_done(sys._getframe())
        return OomReport(
            rank=monitor.rank,
            step=monitor.step,
            steps_done=monitor.steps_done,
            phase=monitor.phase,
            pass_done=done,
            requested_bytes=requested_bytes or oom_report.requested_bytes(message),
            live_bytes=live_bytes,
            capacity_bytes=capacity_bytes if monitor.device else oom_report.capacity_bytes(message) or capacity_bytes,
            foreign_bytes=foreign_bytes,
            overhead_bytes=0 if room_bytes is None else max(0, capacity_bytes - room_bytes - foreign_bytes),
            injected=monitor.injected,
            message=message,
        )


def _device_memory(device: VirtualDevice | None) -> tuple[int, int]:
    """Bytes live and bytes in all on this rank's device; zeros where none is in use."""
    if device:
        return device.live_bytes, device.capacity_bytes
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.get_device_properties().total_memory


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first frame that is the target's own."""
    while trace and trace.tb_frame.f_code.co_filename in (GUARD, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
