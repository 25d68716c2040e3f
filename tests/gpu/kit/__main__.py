"""The kit: `pack` on a machine with a network, then `run` on the machine with a GPU. README.md has both commands."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tests.gpu.kit import install, runner

# What was never seen first: arguments of a module, and the seconds that it may take.
STEPS = {
    "install": ("install", 70),
    "ours": ("service ours", 80),
    "launch": ("service launch", 80),
    "busy": ("busy", 150),
    "compiled": ("plans compiled", 150),
}
# What an H200 has shown already: run by name, as on a card of another kind.
SHOWN_BEFORE = {
    "pairs": ("plans pairs", 110),
    "host": ("host", 80),
    "strangers": ("service strangers", 110),
    "sharing": ("sharing", 50),
    "deepspeed": ("plans deepspeed", 15),
    "unmeasured": ("plans unmeasured", 0),
}


def steps(size: str, names: Collection[str] = STEPS) -> list[runner.Step]:
    """Return the steps of these names. The first of all makes the environment of the others."""
    return [
        runner.Step(
            name=name,
            limit_s=limit_s,
            command=(
                sys.executable if name == "install" else str(install.PYTHON),
                "-m",
                *f"tests.gpu.kit.{arguments} {size}".split(),
            ),
        )
        for name, (arguments, limit_s) in (STEPS | SHOWN_BEFORE).items()
        if name in names
    ]


def main() -> int:
    """0 once every step has had its turn, whatever came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__)
    parser.add_argument("what", choices=("pack", "run"))
    parser.add_argument("steps", nargs="*", help="only these; default: what no card has shown")
    parser.add_argument("--tiny", action="store_true", help="models of a rehearsal")
    parser.add_argument("--python", default="3.12", help="Python whose wheels are packed")
    options = parser.parse_args()
    if options.what == "pack":
        from tests.gpu.kit.pack import pack

        return pack(options.python)
    out = Path(os.environ.get("OUT") or install.FOLDER / "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {runner.RESULTS: str(out / "results.jsonl"), "KIT_LOGS": str(out)}
    runner.record(
        {"name": "machine", "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    )
    size = "tiny" if options.tiny else "full"
    runner.run(steps(size, options.steps or STEPS), out / "log.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
