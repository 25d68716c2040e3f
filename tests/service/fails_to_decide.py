"""The program that decides on a first job, with a bug in it."""

from __future__ import annotations

from typing import Any

from orchestrator.service.server import first_decision


def decide(*_: Any) -> dict[str, Any]:
    raise KeyError("x-4")


if __name__ == "__main__":
    first_decision.try_decision = decide
    first_decision.serve_first_decisions()
