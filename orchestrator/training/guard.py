"""What does a rank's process run in? `guard.py GUARD_JSON -- script.py args...` or `... -- -m package.module args...`

DeepSpeed's launcher puts `--local_rank=N` before all that; the target gets it.

The target runs as `__main__` as python itself would run it, and knows nothing of us. Around it: the virtual device,
heartbeats, faults on request, and a report of the exception that ended it. Runs by path in any interpreter; it brings
this package along without putting its folder on `sys.path`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from orchestrator.specs.attempt import OomReport
    from orchestrator.training.monitor import Monitor
    from orchestrator.training.virtual_device import VirtualDevice

USAGE = "usage: guard.py GUARD_JSON -- script.py args... | guard.py GUARD_JSON -- -m package.module args..."


def main(argv: list[str]) -> None:
    """Run the target under guard; returns where it ended well, and ends the process as it did where not."""
    local_rank = [argv.pop(0)] if argv and argv[0].startswith("--local_rank=") else []
    if len(argv) < 3 or argv[1] != "--" or argv[2:] == ["-m"]:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    program = 2 if argv[2] == "-m" else 1
    target = [*argv[2 : 2 + program], *local_rank, *argv[2 + program :]]
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11; before anything beside this file is imported
        sys.path[0] = os.getcwd() if target[0] == "-m" else os.path.dirname(os.path.realpath(target[0]))
    _bring_package()
    from orchestrator.specs.run import AttemptFolder, GuardSettings
    from orchestrator.training.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(argv[0]).read_text()))
    device = _virtual_device(settings.virtual_capacity_bytes)
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a launcher between us and the ranks may have named some
    monitor = Monitor(settings, int(os.environ.get("RANK", "0")), device)
    guarded = _Guarded(monitor, AttemptFolder(settings.attempt_folder))
    if device:
        device.on_out_of_memory = guarded.note
    _when_imported("torch", monitor.attach)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    monitor.beat()
    try:
        with device or contextlib.nullcontext():
            _run_target(target)
    except SystemExit as end:
        if os.getpid() != guarded.pid:  # a child that the script forked
            raise
        guarded.exited(end)
        _leave(end.code)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() != guarded.pid:  # a child that the script forked
            raise
        guarded.failed(error)
    monitor.beat()
    _leave(None)


def inherit(settings_path: str) -> None:
    """Guard this process from when it imports torch; it is a rank as soon as it trains, and until then writes nothing.

    For scripts that start their ranks themselves: all of their Python processes come here (inherited/sitecustomize.py).
    """
    _when_imported("torch", functools.partial(_guard_from_now, settings_path))


def _guard_from_now(settings_path: str, torch: Any) -> None:
    _bring_package()
    from orchestrator.specs.run import AttemptFolder, GuardSettings
    from orchestrator.training.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(settings_path).read_text()))
    device = _virtual_device(settings.virtual_capacity_bytes)
    monitor = Monitor(settings, None, device)
    guarded = _Guarded(monitor, AttemptFolder(settings.attempt_folder))
    monitor.attach(torch)
    if device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # scripts that choose devices themselves have set it
        device.on_out_of_memory = guarded.note
        device.__enter__()
        _keep_out_loader_workers(device)
        _take_in_forked_ranks(device)
    guarded.watch_end()


def _keep_out_loader_workers(device: VirtualDevice) -> None:
    """Workers that a rank spawns are host processes; pickled by its name, the function is this one there too."""
    workers: Any = importlib.import_module("torch.utils.data._utils.worker")
    loop = workers._worker_loop

    @functools.wraps(loop)
    def outside(*args: Any, **kwargs: Any) -> Any:
        device.leave()
        return loop(*args, **kwargs)

    workers._worker_loop = outside


def _take_in_forked_ranks(device: VirtualDevice) -> None:
    """A child that a script forks is a host process, unless it joins a process group."""
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return
    join = distributed.init_process_group

    @functools.wraps(join)
    def joined(*args: Any, **kwargs: Any) -> Any:
        device.rejoin()
        return join(*args, **kwargs)

    distributed.init_process_group = joined


def _leave(code: object) -> None:
    """In a gang, end the process as Python would, but without unloading native libraries.

    gloo's threads now and then abort there (7 of 12 two-rank runs under load, torch 2.13.0+cpu, 2026-11): a training
    that has done everything would count as crashed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "torch" not in sys.modules:
        return
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, then what it registered
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run_target(target: Sequence[str]) -> None:
    """Run `script.py args...` or `-m module args...` as `python script.py` and `python -m module` do."""
    if target[0] == "-m":
        sys.argv = list(target[1:])
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        return
    sys.argv, path = list(target), os.path.abspath(target[0])
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


class _Guarded:
    """The files of this rank, and the last out-of-memory error that the virtual device raised."""

    def __init__(self, monitor: Monitor, folder: Any) -> None:
        self.monitor, self.folder, self.pid = monitor, folder, os.getpid()
        self._noted: tuple[OomReport, int] | None = None

    def note(self, error: BaseException, requested_bytes: int) -> None:
        """Keep the account of an error as it is raised: the script may catch it, free memory, and end all the same."""
        from orchestrator.training.monitor import write_durably

        report = self._oom_report(error, requested_bytes)
        self._noted = (report, self.monitor.steps_done)
        write_durably(self.folder.caught(self.monitor.rank), report)

    def exited(self, end: SystemExit) -> None:
        """The script chose its exit code: report the out-of-memory error it gave up on, if it did."""
        if end.code not in (None, 0):
            self._report_oom(end)
        self.monitor.beat()

    def failed(self, error: BaseException) -> NoReturn:
        """Report the exception, print it as python would, and end the process."""
        from orchestrator.specs.run import OOM_EXIT_CODE

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
        _leave(1)
        sys.exit(1)

    def watch_end(self) -> None:
        """Report how this process ends where it is a rank that nobody wraps: spawned, or the script's own."""
        process = importlib.import_module("multiprocessing.process").BaseProcess
        run, hook = process.run, sys.excepthook

        def watched(child: Any) -> None:
            try:
                run(child)
            except BaseException as error:
                self._ends_with(error)
                raise
            if self.monitor.is_rank:
                self.monitor.beat()

        def excepthook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
            self._ends_with(error)
            hook(kind, error, trace)

        process.run, sys.excepthook = watched, excepthook
        atexit.register(self._gives_up)

    def _ends_with(self, error: BaseException) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        if not self._report_oom(error) and self.monitor.is_rank and isinstance(error, Exception):
            self._report_error(error)
        if self.monitor.is_rank:
            self.monitor.beat()

    def _gives_up(self) -> None:
        """A framework that handles every exception itself (hydra, under dora) leaves by an exit code."""
        if os.getpid() != self.pid:
            return
        self._report_oom(SystemExit())
        if self.monitor.is_rank:
            self.monitor.beat()

    def _report_error(self, error: BaseException) -> None:
        from orchestrator.specs.attempt import ErrorReport
        from orchestrator.training.monitor import write_durably

        report = ErrorReport(
            rank=self.monitor.rank,
            step=self.monitor.step,
            phase=self.monitor.phase,
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
            traceback="".join(traceback.format_exception(error)),
        )
        write_durably(self.folder.error(self.monitor.rank), report)

    def _report_oom(self, error: BaseException) -> bool:
        from orchestrator.training.monitor import write_durably
        from orchestrator.training.oom_report import out_of_memory

        cause = out_of_memory(error)
        if self._noted and self._noted[1] == self.monitor.steps_done:
            report = self._noted[0]
        elif cause is not None:
            report = self._oom_report(cause, None)
        else:
            return False
        write_durably(self.folder.oom(self.monitor.rank), report)
        return True

    def _oom_report(self, error: BaseException, requested_bytes: int | None) -> OomReport:
        from orchestrator.specs.attempt import OomReport
        from orchestrator.training import oom_report

        message, monitor = str(error), self.monitor
        live_bytes, capacity_bytes = _device_memory(monitor.device)
        return OomReport(
            rank=monitor.rank,
            step=monitor.step,
            phase=monitor.phase,
            requested_bytes=requested_bytes or oom_report.requested_bytes(message),
            live_bytes=live_bytes,
            capacity_bytes=capacity_bytes if monitor.device else oom_report.capacity_bytes(message) or capacity_bytes,
            foreign_bytes=0 if monitor.device else oom_report.foreign_bytes(message),
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


def _virtual_device(capacity_bytes: int | None) -> VirtualDevice | None:
    if capacity_bytes is None:
        return None
    from orchestrator.training.virtual_device import VirtualDevice

    return VirtualDevice(capacity_bytes)


def _user_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the first frame that is the target's own."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _bring_package() -> None:
    """Make `import orchestrator` mean this one; a folder on `sys.path` would bring our neighbours along."""
    if "orchestrator" in sys.modules:
        return
    folder = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "orchestrator", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None, folder
    assert spec.loader is not None, folder
    sys.modules["orchestrator"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["orchestrator"])


def _when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` once the module is imported; at once where it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, then))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Runs the ordinary import of one module, then a function of ours. Used once."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            run = spec.loader.exec_module

            def run_then(module: types.ModuleType) -> None:
                run(module)
                self._then(module)

            spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    main(sys.argv[1:])
