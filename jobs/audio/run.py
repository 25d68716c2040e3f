"""`make demo-audio`: five families' native recipes through the real service, Ray, MLflow and two virtual devices.

Exit code 0 only if all five reach their last step, with at least three recoveries from real out-of-memory failures.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jobs.audio import orpheus
from jobs.demo.run import Promise, fitted, night, recovered

FOLDER = Path(__file__).parent
LEAST_RECOVERIES = 3


EXPECTED: dict[str, Promise] = {
    "orpheus.yaml": ("does not fit on one device: is planned over both, and fits at once", fitted),
    "musicgen.yaml": ("was measured at shorter pieces: runs out of memory, finishes with a cheaper plan", recovered),
    "latentsync.yaml": ("was measured at a third of the resolution: runs out of memory, finishes", recovered),
    "rvc.yaml": ("was measured without its discriminators: runs out of memory, finishes", recovered),
    "parler.yaml": ("meets a long clip after short ones: runs out of memory, finishes", recovered),
}


def main() -> int:
    orpheus.write(FOLDER / "cache")
    jobs, wrong = night({FOLDER / name: promised for name, promised in EXPECTED.items()})
    return 1 if wrong or sum(map(recovered, jobs)) < LEAST_RECOVERIES else 0


if __name__ == "__main__":
    sys.exit(main())
