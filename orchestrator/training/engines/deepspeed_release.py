"""Frees the memory of a DeepSpeed engine before its process ends; private attributes of DeepSpeed 0.19."""

from __future__ import annotations

import weakref
from typing import Any


def dismantle_after(engine_owner: object, engine: Any, optimizer: Any) -> None:
    """Register that the DeepSpeed engine and its optimizer are dismantled when `engine_owner`,
    their only user, is collected.

    They reference each other through C++ hooks that Python's collector does not see. Masters,
    moments and weights of ZeRO 1 to 3 would never be freed (measured 2026-11 on CPU), and add to
    those of the next engine.
    """
    weakref.finalize(engine_owner, _dismantle, engine, optimizer).atexit = False


def _dismantle(engine: Any, optimizer: Any) -> None:
    zero = engine.optimizer
    parameters = list(engine.module.parameters())
    engine.destroy()
    for parameter in parameters:
        vars(parameter).clear()
    optimizer.state.clear()
    optimizer.param_groups.clear()
    if zero is not None and zero is not optimizer:
        vars(zero).clear()
