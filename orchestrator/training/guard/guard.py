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
    from orchestrator.training.guard.guarded import Guarded
    from orchestrator.training.guard.virtual_device import VirtualDevice

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
    from orchestrator.training.guard.guarded import Guarded
    from orchestrator.training.guard.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(argv[0]).read_text()))
    _show(argv[0])
    rank, inherited = int(os.environ.get("RANK", "0")), _withdraw_inherited()
    guarded = inherited or Guarded(Monitor(settings, rank), AttemptFolder(settings.attempt_folder))
    monitor = guarded.monitor
    if inherited:
        guarded.wrap(rank)
    else:
        _when_imported("torch", functools.partial(_attach, guarded))
    if settings.virtual_capacity_bytes is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a launcher between us and the ranks may have named some
        with contextlib.suppress(Exception):  # the script will see it too, or knows where torch is (python -S)
            importlib.import_module("torch")  # by this thread, which is the one that the device counts
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    monitor.beat()
    try:
        _run_target(target)
    except SystemExit as end:
        if os.getpid() != guarded.pid:  # a child that the script forked
            guarded.ends_with(end)
            raise
        guarded.exited(end)
        _leave(end.code)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if os.getpid() != guarded.pid:  # a child that the script forked
            guarded.ends_with(error)
            raise
        guarded.failed(error)
        _leave(1)
        sys.exit(1)
    if os.getpid() == guarded.pid or monitor.is_rank:
        monitor.beat()
    _leave(None)


def inherit(settings_path: str) -> None:
    """Guard this process from when it imports torch; it is a rank as soon as it trains, and until then writes nothing.

    For every Python process that is not wrapped (inherited/sitecustomize.py): ranks that a script starts itself.
    """
    _show(settings_path)
    _when_imported("torch", functools.partial(_guard_from_now, settings_path))


def _guard_from_now(settings_path: str, torch: Any) -> None:
    try:
        _inherit_now(settings_path, torch)
    except Exception as error:  # its interpreter or its torch is too old: the script goes on
        _unwatched(settings_path, f"{type(error).__name__}: {error}")


def _inherit_now(settings_path: str, torch: Any) -> None:
    _bring_package()
    from orchestrator.specs.run import AttemptFolder, GuardSettings
    from orchestrator.training.guard.guarded import Guarded
    from orchestrator.training.guard.monitor import Monitor

    settings = GuardSettings(**json.loads(Path(settings_path).read_text()))
    monitor = Monitor(settings, None)
    guarded = Guarded(monitor, AttemptFolder(settings.attempt_folder))
    _attach(guarded, torch)
    guarded.watch_end()
    _inherited.append(guarded)


def _attach(guarded: Guarded, torch: Any) -> None:
    """Watch what this process does with torch, on its virtual device where it has one."""
    guarded.monitor.attach(torch)
    guarded.watch_children()
    device = guarded.monitor.device
    if device is None:
        guarded.watch_errors(torch)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # scripts that choose devices themselves have set it
        device.on_out_of_memory = guarded.note
        device.__enter__()
        _keep_out_loader_workers(device)
        _take_in_forked_ranks(device)


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


def _bring_package() -> None:
    """Make `import orchestrator` mean this one; a folder on `sys.path` would bring our neighbours along."""
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


_inherited: list[Guarded] = []
_shown: list[mmap.mmap] = []


def _show(settings_path: str) -> None:
    """Let the launcher see that the guard is in this process, and in those that it forks: it maps the settings."""
    with open(settings_path, "rb") as settings:
        _shown.append(mmap.mmap(settings.fileno(), 0, access=mmap.ACCESS_READ))


def _unwatched(settings_path: str, why: str) -> None:
    """Say that this process trains without the guard."""
    version = ".".join(map(str, sys.version_info[:3]))
    said = f"{' '.join(sys.orig_argv)!r} under Python {version}: {why}"
    print(f"guard: nobody watches {said}", file=sys.stderr)
    with contextlib.suppress(OSError), open(Path(settings_path).with_name("unwatched"), "a") as file:
        file.write(f"{said}\n".replace("\n", " ")[:1000] + "\n")


def _withdraw_inherited() -> Guarded | None:
    """Take back what `inherit` has prepared in this process; what it guards already, where torch came before us.

    It was called in another module made of this file (inherited/sitecustomize.py).
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != _ImportHook.__name__]
    return next(iter(getattr(sys.modules.get("_orchestrator_guard"), "_inherited", ())), None)


def _when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then(module)` once the module is imported; at once where it is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, then))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls a function of ours once a module has been executed, however often it was looked up before.

    Others look a module up without importing it (`importlib.util.find_spec`), import it late (LazyLoader), or fail to
    and try again. So the loader of every spec calls it, and the hook stays until one has.
    """

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._tell_end_of(spec)
                return spec
        return None

    def _tell_end_of(self, spec: importlib.machinery.ModuleSpec) -> None:
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
