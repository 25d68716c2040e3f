"""`make demo-audio`: five families' native recipes through the real service, Ray, MLflow and two virtual devices.

Exit code 0 only if all five reach their last step, with at least three recoveries from real out-of-memory failures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jobs.audio import orpheus
from orchestrator.service.demo.promises import Promise, has_fitted, has_recovered
from orchestrator.service.demo.run import run_and_check_jobs
from orchestrator.service.terminal.output import make_console

FOLDER = Path(__file__).parent
CLUSTER = FOLDER.parents[1] / "clusters" / "two-virtual-devices.yaml"
HOME = Path(os.environ.get("ORC_HOME") or ".demo").resolve()
LEAST_RECOVERIES = 3


PROMISES: dict[str, Promise] = {
    "orpheus.yaml": (
        "does not fit on one device: is planned over both, and fits at once",
        has_fitted,
    ),
    "musicgen.yaml": (
        "was measured at shorter pieces: runs out of memory, finishes with a cheaper plan",
        has_recovered,
    ),
    "latentsync.yaml": (
        "was measured at a third of the resolution: runs out of memory, finishes",
        has_recovered,
    ),
    "rvc.yaml": (
        "was measured without its discriminators: runs out of memory, finishes",
        has_recovered,
    ),
    "parler.yaml": (
        "meets a long clip after short ones: runs out of memory, finishes",
        has_recovered,
    ),
}


def main() -> int:
    orpheus.write(FOLDER / "cache")
    promises = {FOLDER / name: promise for name, promise in PROMISES.items()}
    jobs, broken = run_and_check_jobs(promises, HOME, CLUSTER, make_console(sys.stdout))
    print(
        f"The service is still up: `{Path(sys.executable).parent / 'orc'} down --home {HOME}` ends it."
    )
    return 1 if broken or sum(map(has_recovered, jobs)) < LEAST_RECOVERIES else 0


if __name__ == "__main__":
    sys.exit(main())
