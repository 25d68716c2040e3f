"""Who may import what, and which packages are pure: read from the syntax tree of every module, at every depth."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("specs", "memory", "planning", "scheduling", "training", "backends", "service")  # downwards
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
    "specs": {"pydantic"},
    "memory": set(),
    "planning": set(),
    "scheduling": set(),
    "training": {"torch", "deepspeed", "numpy", "transformers", "peft", "accelerate", "safetensors", "bitsandbytes"},
}
PURE = ("specs", "memory", "planning", "scheduling")
# A list of what is allowed, since nobody can list all that reads a clock, a file or the environment.
PURE_STANDARD_LIBRARY = {
    "__future__", "abc", "bisect", "collections", "dataclasses", "decimal", "difflib", "enum", "fractions", "functools",
    "graphlib", "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "shlex", "statistics", "string",
    "textwrap", "types", "typing",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
STANDARD_LIBRARY_ONLY = {  # what a training process reads, on machines that have nothing of ours installed
    "orchestrator/__init__.py",
    "orchestrator/specs/__init__.py",
    *(
        f"orchestrator/specs/{name}.py"
        for name in ("plan", "attempt", "job/__init__", "job/model", "run", "errors", "profile", "str_enum")
    ),
}
EXCEPTIONS = {  # file -> modules that it alone may import
    "orchestrator/specs/run.py": {"os", "pathlib"},  # defines the files of an attempt's folder
    "orchestrator/specs/clock.py": {"datetime", "zoneinfo"},  # calendars; what time it is it never asks
    "orchestrator/specs/parse.py": {"yaml"},  # text to nouns; it reads no file
    "orchestrator/scheduling/failures/classify.py": {"signal"},  # names of signals
}


def findings(path: str, source: str) -> list[str]:
    """Each import or call in the module at `path` (relative to the repository) that breaks a rule."""
    parts = Path(path).parts
    package = parts[1] if len(parts) > 2 else None
    tree = ast.parse(source)
    found = [said for name, line in imports(tree, path) for said in _import_findings(path, package, name, line)]
    if package in PURE:
        found += [
            f"{path}:{call.lineno} calls {call.func.id}"
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in IMPURE_CALLS
        ]
    return found


def _import_findings(path: str, package: str | None, name: str, line: int) -> Iterator[str]:
    top = name.split(".")[0]
    if top in EXCEPTIONS.get(path, ()):
        return
    said = f"{path}:{line} imports {name}"
    if top == "orchestrator":
        yield from _own_findings(path, package, name, said)
    elif top in sys.stdlib_module_names:
        if package in PURE and top not in PURE_STANDARD_LIBRARY:
            yield f"{said}: {package} is pure"
    elif path in STANDARD_LIBRARY_ONLY:
        yield f"{said}: standard library only"
    elif package in FOREIGN_IMPORTS and top not in FOREIGN_IMPORTS[package]:
        yield f"{said}: {package} may not"


def _own_findings(path: str, package: str | None, name: str, said: str) -> Iterator[str]:
    imported = ".".join(name.split(".")[1:2])
    if path in STANDARD_LIBRARY_ONLY and module_path(name) not in STANDARD_LIBRARY_ONLY:
        yield f"{said}: standard library only"
    if package == "training" and imported == "specs" and module_path(name) not in STANDARD_LIBRARY_ONLY:
        yield f"{said}: training reads only what needs the standard library alone"
    if package is not None and imported not in (package, *OWN_IMPORTS[package]):
        yield f"{said}: {package} stands above it"


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
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "orchestrator").rglob("*.py"))


def test_every_module_keeps_the_rules() -> None:
    found = [said for path in modules() for said in findings(path, (ROOT / path).read_text())]
    assert found == []


def test_every_package_and_every_exception_exists() -> None:
    """A renamed package or file may not leave its rule behind."""
    packages = {Path(path).parts[1] for path in modules() if len(Path(path).parts) > 2}
    assert packages == set(LAYERS)
    assert STANDARD_LIBRARY_ONLY | set(EXCEPTIONS) <= set(modules())


PLANTED = {
    "upwards": ("specs/new.py", "from orchestrator.memory.estimate import estimate", "specs stands above it"),
    "upwards by package": ("memory/new.py", "from orchestrator import planning", "memory stands above it"),
    "upwards by relative import": ("planning/new.py", "from ..scheduling import step", "planning stands above it"),
    "sideways": ("training/new.py", "from orchestrator.planning.frontier import fits", "training stands above it"),
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
    "clock in a function": ("planning/new.py", "def f():\n    from datetime import datetime", "planning is pure"),
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
    "ray in training": ("training/new.py", "import ray", "training may not"),
    "mlflow in training": ("training/new.py", "def f():\n    from mlflow import log_metric", "training may not"),
    "pydantic in training": ("training/new.py", "from pydantic import BaseModel", "training may not"),
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
    path, source, said = PLANTED[name]
    assert any(said in finding for finding in findings(f"orchestrator/{path}", source))


ALLOWED = {
    "downwards": ("scheduling/new.py", "from orchestrator.planning.frontier import fits"),
    "itself": ("scheduling/new.py", "from orchestrator.scheduling.failures.classify import classify"),
    "relative": ("scheduling/new.py", "from .classify import classify"),
    "plans in training": ("training/new.py", "import torch\nfrom orchestrator.specs.plan import Plan"),
    "an exception": ("scheduling/failures/classify.py", "import signal"),
    "world": ("backends/new.py", "import time, os, ray\nfrom orchestrator.scheduling.step import step"),
    "commands": ("cli.py", "import typer\nfrom orchestrator.service.server.controller import Controller"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_imports_are_silent(name: str) -> None:
    path, source = ALLOWED[name]
    assert findings(f"orchestrator/{path}", source) == []
