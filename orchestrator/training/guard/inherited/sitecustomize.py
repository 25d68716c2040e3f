"""Guards every Python process of a script that trains and is not run by guard.py.

Python imports a module of this name at start-up (https://docs.python.org/3/library/site.html). A `sitecustomize` that
this file shadows is run afterwards, under its name.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _guard(settings: str) -> None:
    spec = importlib.util.spec_from_file_location(
        "_orchestrator_guard", os.path.join(HERE, os.pardir, "guard.py")
    )
    if spec is not None and spec.loader is not None:
        guard = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(guard)
        guard.inherit(settings)


def _run_hidden() -> None:
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


if os.environ.get("ORC_GUARD"):
    _guard(os.environ["ORC_GUARD"])  # first: the shadowed module may import torch
_run_hidden()
