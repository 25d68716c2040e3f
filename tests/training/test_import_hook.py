"""The guard's hook is called once a module has been executed, however a program imports it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.training.guard import guard

SLOW = "import time\nready = False\ntime.sleep(0.05)\nready = True\n"


@pytest.fixture
def hook_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[types.ModuleType]]:
    """The modules with which the hook was called, for a module `engine` on the path."""
    (tmp_path / "engine.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    modules: list[types.ModuleType] = []
    guard._call_when_imported("engine", modules.append)
    yield modules
    sys.modules.pop("engine", None)


def by_statement() -> Any:
    return __import__("engine")


def by_import_module() -> Any:
    return importlib.import_module("engine")


def after_looking_it_up() -> Any:
    """Import as transformers does while it is imported (utils/import_utils.py)."""
    for _ in range(3):
        assert importlib.util.find_spec("engine") is not None
    return importlib.import_module("engine")


def lazily() -> Any:
    """The recipe of importlib's documentation; diffusers and transformers have lazy modules of their own."""
    spec = importlib.util.find_spec("engine")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine"] = module
    spec.loader.exec_module(module)
    return module


def from_a_spec_of_its_own_lookup() -> Any:
    spec = importlib.util.find_spec("engine")
    assert spec is not None
    assert spec.loader is not None
    importlib.util.find_spec("engine")  # another finder looks it up in between
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def past_another_hook() -> Any:
    """A finder that delegates to the others, as wandb's does for modules that it hooks."""

    class Other(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
            if name != "engine":
                return None
            sys.meta_path.remove(self)
            return importlib.util.find_spec(name)

    sys.meta_path.insert(0, Other())
    return importlib.import_module("engine")


def with_a_path_cache_dropped() -> Any:
    importlib.util.find_spec("engine")
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    return importlib.import_module("engine")


def twice() -> Any:
    return importlib.reload(importlib.import_module("engine"))


WAYS = [
    by_statement,
    by_import_module,
    after_looking_it_up,
    lazily,
    from_a_spec_of_its_own_lookup,
    past_another_hook,
    with_a_path_cache_dropped,
    twice,
]


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_the_hook_is_called_once_with_the_executed_module(
    way: Callable[[], Any], hook_modules: list[types.ModuleType]
) -> None:
    assert way().ready
    assert [module.ready for module in hook_modules] == [True]
    assert not any(isinstance(finder, guard._ImportHook) for finder in sys.meta_path)


def test_a_lazy_module_triggers_the_hook_when_it_is_used(
    hook_modules: list[types.ModuleType],
) -> None:
    module = lazily()
    assert hook_modules == []
    assert module.ready
    assert len(hook_modules) == 1


def test_a_lookup_alone_does_not_trigger_the_hook(hook_modules: list[types.ModuleType]) -> None:
    importlib.util.find_spec("engine")
    assert hook_modules == []


def test_a_failed_import_does_not_trigger_the_hook_and_the_next_one_does(
    hook_modules: list[types.ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "engine.py").write_text("raise ImportError('no library')\n")
    with pytest.raises(ImportError, match="no library"):
        importlib.import_module("engine")
    assert hook_modules == []
    (tmp_path / "engine.py").write_text("ready = True  # the library is there now\n")
    importlib.invalidate_caches()
    assert importlib.import_module("engine").ready
    assert len(hook_modules) == 1


def test_a_missing_module_stays_missing(
    hook_modules: list[types.ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "engine.py").unlink()
    importlib.invalidate_caches()
    assert importlib.util.find_spec("engine") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("engine")
    assert hook_modules == []


def test_concurrent_imports_trigger_the_hook_once(
    hook_modules: list[types.ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "engine.py").write_text(SLOW)
    threads = [threading.Thread(target=by_import_module) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [module.ready for module in hook_modules] == [True]


def test_the_program_sees_the_same_loader_and_source_as_without_the_hook(
    hook_modules: list[types.ModuleType],
) -> None:
    module = by_import_module()
    assert type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    assert module.__spec__.loader.get_source("engine") == "ready = True\n"
    assert hook_modules
