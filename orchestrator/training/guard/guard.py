"""The guard of a rank's process: `guard.py GUARD_JSON -- script.py args...` or `... -- -m package.module args...`

DeepSpeed's launcher inserts `--local_rank=N` before these arguments; it is passed on to the target.

The target runs unmodified as `__main__`, as under plain python. The guard adds the virtual device, heartbeats, injected
faults, and a report of the exception that ended it. It runs by path in any interpreter and imports this package without
adding its folder to `sys.path`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import mmap
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.training.guard.failure_reporter import FailureReporter
    from orchestrator.training.guard.virtual_device import VirtualDevice

USAGE = "usage: guard.py GUARD_JSON -- script.py args... | guard.py GUARD_JSON -- -m package.module args..."

# Packages whose native libraries do nothing at the end that a program could miss.
QUIET = ("torch", "numpy", "numpy.libs", "nvidia", "triton")
SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def main(arguments: list[str]) -> None:
    """Run the program in `arguments` under the guard. Returns on success; otherwise the process
    ends as the program did.
    """
    target = _split_target(arguments)
    if not getattr(
        sys.flags, "safe_path", False
    ):  # since Python 3.11; before the first import from this folder
        sys.path[0] = (
            os.getcwd() if target[0] == "-m" else os.path.dirname(os.path.realpath(target[0]))
        )
    _make_package_importable()
    from orchestrator.specs.run import GUARDED_RANK, AttemptFolder, GuardSettings
    from orchestrator.training.guard.failure_reporter import FailureReporter
    from orchestrator.training.guard.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(arguments[0]).read_text()))
    _map_settings_file(arguments[0])
    rank = int(os.environ.get(GUARDED_RANK) or os.environ.get("RANK", "0"))
    inherited = _withdraw_inherited()
    reporter = inherited or FailureReporter(
        Monitor(settings, rank), AttemptFolder(settings.attempt_folder)
    )
    monitor = reporter.monitor
    if inherited:
        reporter.record_guarded_rank(rank)
    else:
        _call_when_imported("torch", functools.partial(_install_monitor, reporter))
    if settings.virtual_capacity_bytes is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a launcher in between may have set some
        with contextlib.suppress(
            Exception
        ):  # the script will fail too, or finds torch elsewhere (python -S)
            importlib.import_module("torch")  # in this thread: it is the one that the device counts
    _buffer_lines()
    reporter.watch_signals()
    monitor.write_heartbeat()
    try:
        _run_target(target)
    except SystemExit as end:
        if os.getpid() != reporter.pid:  # a child that the script forked
            reporter.report_rank_end(end)
            raise
        reporter.on_exit(end)
        _end_process(end.code)
        raise
    except KeyboardInterrupt:
        monitor.write_heartbeat()
        raise
    except BaseException as error:  # whatever ends a user's program is evidence
        if os.getpid() != reporter.pid:  # a child that the script forked
            reporter.report_rank_end(error)
            raise
        reporter.on_exception(error)
        _end_process(1)
        sys.exit(1)
    if os.getpid() == reporter.pid or monitor.is_rank:
        monitor.write_heartbeat()
    _end_process(None)


def _split_target(arguments: list[str]) -> list[str]:
    """Return the program and its arguments, and leave in `arguments` the settings' path alone; exit
    2 without a program.
    """
    local_rank = (
        [arguments.pop(0)] if arguments and arguments[0].startswith("--local_rank=") else []
    )
    if len(arguments) < 3 or arguments[1] != "--" or arguments[2:] == ["-m"]:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    program = 2 if arguments[2] == "-m" else 1
    return [*arguments[2 : 2 + program], *local_rank, *arguments[2 + program :]]


def _buffer_lines() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def inherit(settings_path: str) -> None:
    """Make this process guarded once it imports torch. It becomes a rank when it trains, and writes
    nothing before.

    Called in every Python process that guard.py does not run (inherited/sitecustomize.py): ranks
    that a script starts.
    """
    _map_settings_file(settings_path)
    _call_when_imported("torch", functools.partial(_guard_from_now, settings_path))


def _guard_from_now(settings_path: str, torch: Any) -> None:
    try:
        _inherit_now(settings_path, torch)
    except Exception as error:  # its interpreter or torch is too old: the script continues
        _note_unwatched(settings_path, f"{type(error).__name__}: {error}")


def _inherit_now(settings_path: str, torch: Any) -> None:
    _make_package_importable()
    from orchestrator.specs.run import AttemptFolder, GuardSettings
    from orchestrator.training.guard.failure_reporter import FailureReporter
    from orchestrator.training.guard.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(settings_path).read_text()))
    monitor = Monitor(settings, None)
    reporter = FailureReporter(monitor, AttemptFolder(settings.attempt_folder))
    _install_monitor(reporter, torch)
    reporter.watch_spawned_rank()
    reporter.watch_signals()
    _inherited.append(reporter)


def _install_monitor(reporter: FailureReporter, torch: Any) -> None:
    """Install the monitor, the hooks for child processes, and the virtual device or else the
    out-of-memory hook.
    """
    from orchestrator.training.guard import build_locks

    build_locks.install_build_locks()
    reporter.monitor.attach(torch)
    reporter.watch_child_processes()
    reporter.watch_immediate_exit()
    device = reporter.monitor.device
    if device is None:
        reporter.watch_errors(torch)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # scripts that select devices set it
        device.on_out_of_memory = reporter.note_oom
        device.__enter__()
        _exclude_loader_workers(device)
        _include_forked_ranks(device)


def _exclude_loader_workers(device: VirtualDevice) -> None:
    """Install a hook by which data loader workers leave the virtual device, since they use host
    memory.

    Spawned workers unpickle the hook by its name.
    """
    workers: Any = importlib.import_module("torch.utils.data._utils.worker")
    loop = workers._worker_loop

    @functools.wraps(loop)
    def outside(*args: Any, **kwargs: Any) -> Any:
        device.leave()
        return loop(*args, **kwargs)

    workers._worker_loop = outside


def _include_forked_ranks(device: VirtualDevice) -> None:
    """Install a hook by which a forked child uses the virtual device again once it joins a process
    group; before, it uses none.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return
    join = distributed.init_process_group

    @functools.wraps(join)
    def joined(*args: Any, **kwargs: Any) -> Any:
        device.rejoin()
        return join(*args, **kwargs)

    distributed.init_process_group = joined


def _end_process(code: object) -> None:
    """End this process as Python does, but without unloading native libraries.

    gloo's threads sometimes abort there (7 of 12 two-rank runs under load, torch 2.13.0+cpu,
    2026-11). A finished training would then count as crashed. One rank alone saves 0.3 s of
    processor time, and leaves only where its interpreter would do nothing more for the program.
    """
    if "torch" not in sys.modules:
        return
    threading._shutdown()  # type: ignore[attr-defined]  # joins the script's threads, then runs their exit callbacks
    atexit._run_exitfuncs()
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_alone and (_has_foreign_library() or _has_object_with_finaliser()):
        return
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _has_foreign_library() -> bool:
    """Return whether an unknown native library is loaded, which may have exit handlers."""
    site = Path(sys.modules["torch"].__file__ or "").parents[1]
    quiet = tuple(f"{site}/{name}/" for name in QUIET)
    system = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", f"{sys.base_prefix}/lib/")
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5] for line in maps if ".so" in line}
    for path in paths:
        is_system = path.startswith(system) and "-packages/" not in path
        if not (is_system or path.startswith(quiet)):
            return True
    return False


def _has_object_with_finaliser() -> bool:
    """Return whether any object exists whose end may have an effect: an open file, a generator, a
    `__del__`.
    """
    streams = set[int]()
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        layers = stream, getattr(stream, "buffer", None)
        streams |= {id(layer) for layer in (*layers, getattr(layers[1], "raw", None))}
    ends: dict[type, bool] = dict.fromkeys(SUSPENDED, True)
    gc.unfreeze()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in ends:
            finalised = [base for base in kind.__mro__ if "__del__" in vars(base)]
            # the kernel closes sockets
            ends[kind] = any(base.__module__ != "_socket" for base in finalised)
        if ends[kind] and id(thing) not in streams:
            is_closed = kind.__module__ == "_io" and thing.closed
            if not is_closed:
                return True
    return False


def _run_target(target: Sequence[str]) -> None:
    """Run `script.py args...` or `-m module args...` as python does."""
    if target[0] == "-m":
        sys.argv = list(target[1:])
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(target)
    path = os.path.abspath(target[0])
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _make_package_importable() -> None:
    """Make `import orchestrator` find this package, without a `sys.path` entry that would expose
    others.
    """
    if "orchestrator" in sys.modules:
        return
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "orchestrator", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None, folder
    assert spec.loader is not None, folder
    sys.modules["orchestrator"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["orchestrator"])


_inherited: list[FailureReporter] = []
_shown: list[mmap.mmap] = []


def _map_settings_file(settings_path: str) -> None:
    """Map the settings file into this process's memory: so the launcher recognises guarded
    processes and their forks.
    """
    with open(settings_path, "rb") as settings:
        _shown.append(mmap.mmap(settings.fileno(), 0, access=mmap.ACCESS_READ))


def _note_unwatched(settings_path: str, reason: str) -> None:
    """Report on stderr, and in the file `unwatched`, that this process trains without the guard,
    with the reason.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    line = f"{' '.join(sys.orig_argv)!r} under Python {version}: {reason}"
    print(f"guard: not watched: {line}", file=sys.stderr)
    with (
        contextlib.suppress(OSError),
        open(Path(settings_path).with_name("unwatched"), "a") as file,
    ):
        file.write(f"{line}\n".replace("\n", " ")[:1000] + "\n")


def _withdraw_inherited() -> FailureReporter | None:
    """Undo `inherit` in this process; return its reporter if torch was imported already, else None.

    `inherit` ran in another module object of this file (inherited/sitecustomize.py).
    """
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if type(finder).__name__ != _ImportHook.__name__
    ]
    return next(iter(getattr(sys.modules.get("_orchestrator_guard"), "_inherited", ())), None)


def _call_when_imported(module_name: str, callback: Callable[[Any], None]) -> None:
    """Register that `callback(module)` is called when the module is imported; call it at once if
    that has happened.
    """
    if module_name in sys.modules:
        callback(sys.modules[module_name])
    else:
        sys.meta_path.insert(0, _ImportHook(module_name, callback))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Import hook that calls a callback once, after the named module has been executed.

    Programs look a module up without importing it (`importlib.util.find_spec`), import it late
    (LazyLoader), or retry a failed import. So every spec's loader is wrapped, and the hook stays
    until one has executed the module.
    """

    def __init__(self, module_name: str, callback: Callable[[Any], None]) -> None:
        self._name = module_name
        self._then = callback

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap_loader(spec)
                return spec
        return None

    def _wrap_loader(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        run = loader.exec_module

        def run_then(module: types.ModuleType) -> None:
            run(module)
            if module.__name__ == self._name and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then(module)

        loader.exec_module = run_then  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
