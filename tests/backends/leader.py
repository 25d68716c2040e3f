"""A process that opens a journal, and appends to it as long as it owns it.

    python -m tests.backends.leader URL FIRST LEASE_S

Prints each number, from FIRST on, once it was confirmed, appended and confirmed again; exits with what refused it.
"""

from __future__ import annotations

import itertools
import sys
import time

from orchestrator.backends.journal import ownership
from orchestrator.backends.journal.journal import Journal
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import TimerFired


def main(url: str, first: int) -> None:
    journal = Journal(url)
    for number in itertools.count(first):
        journal.confirm_ownership()
        journal.append([(TimerFired(at_s=number), ())])
        journal.confirm_ownership()  # as the controller does before it acts
        print(number, flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    ownership.LEASE_S = float(sys.argv[3])
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except ServiceError as error:
        sys.exit(str(error))
