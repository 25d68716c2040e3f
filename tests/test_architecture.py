"""Which imports are allowed, and what a pure package may do: read from the syntax tree of every module."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = (
    "specs",
    "memory",
    "planning",
    "scheduling",
    "training",
    "backends",
    "service",
)  # downwards
OWN_IMPORTS = {  # which of our packages each may import, besides itself
    "specs": (),
    "memory": ("specs",),
    "planning": ("specs", "memory"),
    "scheduling": ("specs", "memory", "planning"),
    "training": ("specs",),
    "backends": LAYERS[: LAYERS.index("backends")],
    "service": LAYERS[: LAYERS.index("service")],
}
FOREIGN_IMPORTS = {  # which distributions; packages that are not here may import any
    "specs": {"pydantic", "re2"},
    "memory": set(),
    "planning": set(),
    "scheduling": set(),
    "training": {
        "torch",
        "deepspeed",
        "numpy",
        "transformers",
        "peft",
        "accelerate",
        "safetensors",
        "torchao",
    },
}
# distribution -> the folder that alone may import it: a seam stands between it and the rest
ONE_ROOM_ONLY = {
    "ray": "orchestrator/backends/ray",
    "mlflow": "orchestrator/backends/mlflow",
    "sqlalchemy": "orchestrator/backends/journal",
    "alembic": "orchestrator/backends/journal",
    "apprise": "orchestrator/backends/notify",
    "authlib": "orchestrator/backends/oidc",
    "joserfc": "orchestrator/backends/oidc",
    "pynvml": "orchestrator/backends/devices",
}
# folder of ours -> the files outside it that may import it: those that put the service together
BEHIND_A_SEAM = {
    "orchestrator/backends/ray": {
        "orchestrator/service/server/daemon.py",
        "orchestrator/service/client/lifecycle.py",
        "orchestrator/service/commands/join.py",
    },
}
PURE = ("specs", "memory", "planning", "scheduling")
# A list of what is allowed, since nobody can list all that reads a clock, a file or the
# environment.
PURE_STANDARD_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "decimal", "difflib", "enum",
    "fnmatch", "fractions", "functools", "graphlib", "hashlib", "heapq", "itertools", "json", "math", "operator", "re",
    "shlex", "statistics", "string", "textwrap", "types", "typing",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
MUTABLE_TYPES = {
    "list",
    "dict",
    "set",
    "defaultdict",
    "Counter",
    "deque",
    "OrderedDict",
    "bytearray",
    "ChainMap",
}
MUTATORS = {
    "append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "sort", "reverse", "subtract", "update",
}  # fmt: skip
# A cache with a bound changes no answer of a pure function. These have none, since their arguments
# are few.
UNBOUNDED_CACHES = {
    "orchestrator/specs/replace.py": {"_find_slots"},  # one entry for each class of this program
    "orchestrator/memory/calibration/calibrate.py": {
        "_compute_student_quantile"
    },  # degrees of freedom: at most the window
}
# what a training process reads, on machines that have nothing of ours installed
STANDARD_LIBRARY_ONLY = {
    "orchestrator/__init__.py",
    "orchestrator/specs/__init__.py",
    *(
        f"orchestrator/specs/{name}.py"
        for name in (
            "choices",
            "engines",
            "mechanics",
            "plan",
            "plan_fields",
            "settings",
            "attempt",
            "job/__init__",
            "job/model",
            "run",
            "command_line",
            "errors",
            "from_json",
            "frozen",
            "group_values",
            "json_object",
            "profile",
            "replace",
            "stages",
            "str_enum",
        )
    ),
}
COPY_NOUNS = {
    "orchestrator/specs/replace.py",
    # runs by path, beside a program of other people
    "orchestrator/training/guard/failure_reporter.py",
}
EXCEPTIONS = {  # file -> modules that it alone may import
    "orchestrator/specs/run.py": {"os", "pathlib"},  # defines the files of an attempt's folder
    "orchestrator/specs/clock.py": {
        "datetime",
        "zoneinfo",
    },  # calendars; what time it is it never asks
    "orchestrator/specs/yaml_text.py": {"yaml"},  # text to plain data; it reads no file
    "orchestrator/specs/packaged.py": {"importlib"},  # tables, which are data of the package
    "orchestrator/specs/written.py": {"yaml"},  # plain data to text
    "orchestrator/scheduling/failures/exit_codes.py": {"signal"},  # names of signals
}


BROAD = re.compile(r"\s*except(?: \(?(?:Base)?Exception\b[^#]*)?:\s*$")


def findings(path: str, source: str) -> list[str]:
    """Return each import or call in the module at `path` (relative to the repository) that breaks a rule."""
    parts = Path(path).parts
    package = parts[1] if len(parts) > 2 else None
    tree = ast.parse(source)
    breaches = [
        breach
        for name, line in imports(tree, path)
        for breach in _import_findings(path, package, name, line)
    ]
    if path not in COPY_NOUNS:
        breaches += [
            f"{path}:{line} copies a noun by dataclasses.replace" for line in _copies(tree)
        ]
    if package in PURE:
        breaches += [
            f"{path}:{call.lineno} calls {call.func.id}"
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in IMPURE_CALLS
        ]
        breaches += [f"{path}:{line} {breach}" for breach, line in _kept_findings(path, tree)]
    lines = enumerate(source.splitlines(), 1)
    breaches += [
        f"{path}:{number} catches everything and gives no reason"
        for number, line in lines
        if BROAD.match(line)
    ]
    return breaches


def _copies(tree: ast.Module) -> Iterator[int]:
    """Lines that name dataclasses.replace."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses":
            yield from (node.lineno for alias in node.names if alias.name == "replace")
        elif isinstance(node, ast.Attribute) and node.attr == "replace":
            yield from (
                node.lineno for name in (node.value,) if getattr(name, "id", "") == "dataclasses"
            )


def _kept_findings(path: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield state that a pure module could keep between calls: a mutable object, a name that is set, a cache."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield "sets a global name", node.lineno
        yield from (
            (f"changes the constant {name}", node.lineno)
            for name in _changed(node)
            if _is_constant(name)
        )
    for body in (
        tree.body,
        *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
    ):
        for node in body:
            yield from (
                (f"caches {name} without a bound", node.lineno) for name in _unbounded(node, path)
            )
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            names = [
                name.id
                for target in targets
                for name in ast.walk(target or node)
                if isinstance(name, ast.Name)
            ]
            if isinstance(node, ast.Assign | ast.AnnAssign) and _is_mutable(node.value):
                yield from (
                    (f"keeps {name}", node.lineno) for name in names[:1] if not _is_constant(name)
                )


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Subscript):  # list[int] in list[int]()
        value = value.value
    if isinstance(value, ast.Call):
        called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return getattr(called, "attr", getattr(called, "id", "")) in MUTABLE_TYPES
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def _is_constant(name: str) -> bool:
    return name.isupper() or name == "__all__"


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield the names of objects that a statement or call changes in place."""
    changed: list[ast.expr] = []
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATORS
    ):
        changed = [node.func.value]
    elif isinstance(node, ast.Assign | ast.Delete):
        changed = [target.value for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.AugAssign):
        changed = [node.target.value if isinstance(node.target, ast.Subscript) else node.target]
    for target in changed:
        while isinstance(target, ast.Subscript):  # a row of a table
            target = target.value
        yield getattr(target, "attr", getattr(target, "id", ""))


def _unbounded(node: ast.AST, path: str) -> Iterator[str]:
    """Yield the function's name where it has a cache that may grow for ever."""
    if not isinstance(node, ast.FunctionDef) or node.name in UNBOUNDED_CACHES.get(path, ()):
        return
    for decorator in node.decorator_list:
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        is_endless = any(
            isinstance(word.value, ast.Constant) and word.value.value is None for word in keywords
        )
        if getattr(called, "attr", getattr(called, "id", "")) == (
            "lru_cache" if is_endless else "cache"
        ):
            yield node.name


def _import_findings(path: str, package: str | None, name: str, line: int) -> Iterator[str]:
    top = name.split(".")[0]
    if top in EXCEPTIONS.get(path, ()):
        return
    prefix = f"{path}:{line} imports {name}"
    if top == "orchestrator":
        yield from _own_findings(path, package, name, prefix)
    elif top in sys.stdlib_module_names:
        if package in PURE and top not in PURE_STANDARD_LIBRARY:
            yield f"{prefix}: {package} is pure"
    elif path in STANDARD_LIBRARY_ONLY:
        yield f"{prefix}: standard library only"
    elif package in FOREIGN_IMPORTS and top not in FOREIGN_IMPORTS[package]:
        yield f"{prefix}: {package} may not"
    elif top in ONE_ROOM_ONLY and not path.startswith(f"{ONE_ROOM_ONLY[top]}/"):
        yield f"{prefix}: only {ONE_ROOM_ONLY[top]} may"


def _own_findings(path: str, package: str | None, name: str, prefix: str) -> Iterator[str]:
    imported = ".".join(name.split(".")[1:2])
    if path in STANDARD_LIBRARY_ONLY and module_path(name) not in STANDARD_LIBRARY_ONLY:
        yield f"{prefix}: standard library only"
    if (
        package == "training"
        and imported == "specs"
        and module_path(name) not in STANDARD_LIBRARY_ONLY
    ):
        yield f"{prefix}: training reads only what needs the standard library alone"
    if package is not None and imported not in (package, *OWN_IMPORTS[package]):
        yield f"{prefix}: {package} stands above it"
    for room, allowed in BEHIND_A_SEAM.items():
        if (
            f"{module_path(name)}/".startswith(f"{room}/")
            and not path.startswith(f"{room}/")
            and path not in allowed
        ):
            yield f"{prefix}: backends/ports.py stands between"


@cache
def module_path(name: str) -> str:
    """File of a dotted name; a name inside a module is found by dropping it."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = Path(*parts[:length])
        if (ROOT / stem).is_dir():
            return (stem / "__init__.py").as_posix()
        if (ROOT / stem.with_suffix(".py")).is_file():
            return stem.with_suffix(".py").as_posix()
    return name


def imports(tree: ast.AST, path: str) -> Iterator[tuple[str, int]]:
    """Every imported name with its line; `from a import b` is `a.b`, which may be a module or a thing in one."""
    folder = Path(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for path in (ROOT / "orchestrator").rglob("*.py")
    )


def test_every_module_keeps_the_rules() -> None:
    breaches = [
        breach for path in modules() for breach in findings(path, (ROOT / path).read_text())
    ]
    assert breaches == []


@cache
def import_graph() -> dict[str, set[str]]:
    """The modules that each module imports, for types too; packages themselves are left out."""
    paths = {path for path in modules() if not path.endswith("__init__.py")}
    graph = {}
    for path in paths:  # one tree is in memory at a time: all of them cost twice the time
        tree = ast.parse((ROOT / path).read_text())
        graph[path] = {module_path(name) for name, _ in imports(tree, path)} & paths - {path}
    return graph


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes of a circle, the first again at the end; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folder_graph(graph: Mapping[str, Iterable[str]], package: str) -> dict[str, set[str]]:
    """Return the imports among the folders and files directly in a package."""
    rooms_of: dict[str, set[str]] = {}
    for path, imported in graph.items():
        rooms = [
            Path(module).parts[2]
            for module in (path, *imported)
            if Path(module).parts[1] == package
        ]
        if Path(path).parts[1] == package:
            rooms_of.setdefault(rooms[0], set()).update(
                room for room in rooms[1:] if room != rooms[0]
            )
    return rooms_of


def test_no_import_goes_in_a_circle() -> None:
    assert circle(import_graph()) == []


def test_planning_reads_a_job_in_one_place_and_changes_it_in_another() -> None:
    spec = "orchestrator/specs/job/spec.py"
    readers = {
        path
        for path, imported in import_graph().items()
        if path.startswith("orchestrator/planning/") and spec in imported
    }
    assert readers == {"orchestrator/planning/request.py", "orchestrator/planning/ways_out.py"}


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_goes_in_a_circle_over_folders(package: str) -> None:
    assert circle(folder_graph(import_graph(), package)) == []


def test_circles_are_found() -> None:
    graph = {
        "orchestrator/p/a/x.py": {"orchestrator/p/b/y.py"},
        "orchestrator/p/b/z.py": {"orchestrator/p/a/w.py"},
    }
    assert circle(graph) == []
    assert circle(folder_graph(graph, "p")) in (["a", "b", "a"], ["b", "a", "b"])
    assert circle({"a": {"b"}, "b": {"a"}}) != []


def test_every_package_and_every_exception_exists() -> None:
    """A renamed package or file may not leave its rule behind."""
    packages = {Path(path).parts[1] for path in modules() if len(Path(path).parts) > 2}
    assert packages == set(LAYERS)
    assert STANDARD_LIBRARY_ONLY | set(EXCEPTIONS) | set(UNBOUNDED_CACHES) | set().union(
        *BEHIND_A_SEAM.values()
    ) <= set(modules())
    assert all((ROOT / room).is_dir() for room in (*ONE_ROOM_ONLY.values(), *BEHIND_A_SEAM))


PLANTED = {
    "upwards": (
        "specs/new.py",
        "from orchestrator.memory.estimate import estimate",
        "specs stands above it",
    ),
    "upwards by package": (
        "memory/new.py",
        "from orchestrator import planning",
        "memory stands above it",
    ),
    "upwards by relative import": (
        "planning/new.py",
        "from ..scheduling import step",
        "planning stands above it",
    ),
    "sideways": (
        "training/new.py",
        "from orchestrator.planning.frontier import fits",
        "training stands above it",
    ),
    "inside a function": (
        "scheduling/new.py",
        "def f():\n    import orchestrator.backends.journal.journal",
        "stands above",
    ),
    "for types only": (
        "backends/new.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from orchestrator.service import controller",
        "backends stands above it",
    ),
    "clock": ("scheduling/new.py", "import time", "scheduling is pure"),
    "clock in a function": (
        "planning/new.py",
        "def f():\n    from datetime import datetime",
        "planning is pure",
    ),
    "randomness": ("memory/new.py", "import random", "memory is pure"),
    "environment": ("specs/new.py", "from os import environ", "specs is pure"),
    "files": ("planning/new.py", "from pathlib import Path", "planning is pure"),
    "files without an import": ("scheduling/new.py", "text = open('x').read()", "calls open"),
    "logging": ("scheduling/new.py", "import logging", "scheduling is pure"),
    "network": ("specs/new.py", "import urllib.request", "specs is pure"),
    "threads": ("memory/new.py", "import threading", "memory is pure"),
    "hidden import": ("memory/new.py", "torch = __import__('torch')", "calls __import__"),
    "hidden import by library": ("memory/new.py", "import importlib", "memory is pure"),
    "torch in a pure package": ("memory/estimate.py", "import torch", "memory may not"),
    "yaml elsewhere": ("specs/job/spec.py", "import yaml", "specs may not"),
    "exception of another file": ("specs/plan.py", "import os", "specs is pure"),
    "a list that is kept": ("scheduling/new.py", "_indices: list[int] = []", "keeps _indices"),
    "a counter that is kept": (
        "memory/new.py",
        "from collections import Counter\nseen = Counter()",
        "keeps seen",
    ),
    "a typed list that is kept": ("specs/new.py", "seen = list[int]()", "keeps seen"),
    "a comprehension that is kept": (
        "planning/new.py",
        "sizes = {n: n for n in (1, 2)}",
        "keeps sizes",
    ),
    "a set of a class": ("specs/new.py", "class A:\n    seen = set()", "keeps seen"),
    "a constant that changes": (
        "planning/new.py",
        "X = []\ndef f(): X.append(1)",
        "changes the constant X",
    ),
    "a constant with a new key": (
        "memory/new.py",
        "X = {}\ndef f(): X[1] = 2",
        "changes the constant X",
    ),
    "a constant with a key less": (
        "memory/new.py",
        "X = {}\ndef f(): del X[1]",
        "changes the constant X",
    ),
    "a constant cut": (
        "scheduling/new.py",
        "_X = []\ndef f(): _X[:] = [1]",
        "changes the constant _X",
    ),
    "a constant added to": ("memory/new.py", "X = []\nX += [1]", "changes the constant X"),
    "a row of a constant": (
        "memory/new.py",
        "X = {1: []}\ndef f(): X[1].append(2)",
        "changes the constant X",
    ),
    "a constant of another module": (
        "specs/new.py",
        "import a\ndef f(): a.X.clear()",
        "changes the constant X",
    ),
    "a global": ("specs/new.py", "x = 1\ndef f():\n    global x\n    x = 2", "sets a global name"),
    "another way to copy a noun": (
        "service/new.py",
        "from dataclasses import replace",
        "copies a noun",
    ),
    "a copy by the module's name": (
        "specs/new.py",
        "import dataclasses\nx = dataclasses.replace(x, a=1)",
        "copies a",
    ),
    "an unbounded cache": (
        "memory/new.py",
        "@cache\ndef f(x): return x",
        "caches f without a bound",
    ),
    "another unbounded cache": (
        "memory/new.py",
        "@lru_cache(maxsize=None)\ndef f(x): return x",
        "caches f",
    ),
    "a broad except": (
        "service/new.py",
        "try: pass\nexcept Exception as error:\n    pass",
        "gives no reason",
    ),
    "a bare except": ("training/new.py", "try: pass\nexcept:\n    raise", "gives no reason"),
    "ray in training": ("training/new.py", "import ray", "training may not"),
    "mlflow in training": (
        "training/new.py",
        "def f():\n    from mlflow import log_metric",
        "training may not",
    ),
    "ray beside its room": (
        "backends/attempts/new.py",
        "from ray.exceptions import RayError",
        "only orchestrator/back",
    ),
    "ray in a function": (
        "service/server/new.py",
        "def f():\n    import ray",
        "only orchestrator/backends/ray may",
    ),
    "ray for types only": (
        "backends/new.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ray.actor import ActorHandle",
        "only orchestrator/backends/ray may",
    ),
    "ray in the commands": ("cli.py", "import ray", "only orchestrator/backends/ray may"),
    "ray in a folder of that beginning": (
        "backends/ray_tools/new.py",
        "import ray",
        "only orchestrator/backends/ray",
    ),
    "mlflow in another tracker": (
        "backends/jsonl/new.py",
        "import mlflow",
        "only orchestrator/backends/mlflow may",
    ),
    "nvml beside its room": (
        "service/new.py",
        "def f():\n    import pynvml",
        "only orchestrator/backends/devices may",
    ),
    "sqlalchemy in the relay": (
        "backends/new.py",
        "import sqlalchemy as sa",
        "only orchestrator/backends/journal may",
    ),
    "alembic in the service": (
        "service/new.py",
        "def f():\n    from alembic import op",
        "only orchestrator/backends/j",
    ),
    "the room of ray": (
        "backends/attempts/watch.py",
        "def f():\n    from orchestrator.backends.ray.launchers import RayLaunchers",
        "ports.py stands between",
    ),
    "the room of ray by package": (
        "service/new.py",
        "from orchestrator.backends import ray",
        "ports.py stands between",
    ),
    "the room of ray by relative import": (
        "backends/attempts/new.py",
        "from ..ray import nodes",
        "stands between",
    ),
    "pydantic in training": (
        "training/new.py",
        "from pydantic import BaseModel",
        "training may not",
    ),
    "pydantic through specs": (
        "training/new.py",
        "from orchestrator.specs.job.spec import JobSpec",
        "standard library",
    ),
    "pydantic in plans": ("specs/plan.py", "import pydantic", "standard library only"),
    "pydantic through plans": (
        "specs/attempt.py",
        "from orchestrator.specs.job.spec import JobSpec",
        "standard library",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_breaches_are_found(name: str) -> None:
    path, source, breach = PLANTED[name]
    assert any(breach in finding for finding in findings(f"orchestrator/{path}", source))


ALLOWED = {
    "downwards": ("scheduling/new.py", "from orchestrator.planning.frontier import fits"),
    "itself": (
        "scheduling/new.py",
        "from orchestrator.scheduling.failures.classify import classify",
    ),
    "relative": ("scheduling/new.py", "from .classify import classify"),
    "plans in training": (
        "training/new.py",
        "import torch\nfrom orchestrator.specs.plan import Plan",
    ),
    "a constant": (
        "specs/new.py",
        "X = {1: 2}\n__all__ = ['X']\ny = (1, 2)\ndef f():\n    z = []\n    z.append(X[1])",
    ),
    "a cache of one call": ("memory/new.py", "def f():\n    @cache\n    def g(x): return x"),
    "a bounded cache": ("memory/new.py", "@lru_cache(maxsize=64)\ndef f(x): return x"),
    "an exception": ("scheduling/failures/exit_codes.py", "import signal"),
    "world": ("backends/new.py", "import time, os\nfrom orchestrator.scheduling.step import step"),
    "ray in its room": (
        "backends/ray/new.py",
        "import ray\nfrom orchestrator.backends.ray.nodes import RayNodes",
    ),
    "mlflow in its room": (
        "backends/mlflow/new.py",
        "def f():\n    from mlflow import MlflowClient",
    ),
    "the journal's room at every depth": (
        "backends/journal/migrations/versions/new.py",
        "import sqlalchemy, alembic",
    ),
    "who puts the service together": (
        "service/server/daemon.py",
        "from orchestrator.backends.ray.backend import RayBackend",
    ),
    "commands": (
        "cli.py",
        "import typer\nfrom orchestrator.service.server.controller import Controller",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_imports_are_silent(name: str) -> None:
    path, source = ALLOWED[name]
    assert findings(f"orchestrator/{path}", source) == []
