"""Tuning constants of the queue's order, prices and migrations, each with the values that were swept.

Swept on ten shaken inputs of traces/plans/base.csv (8 x 8 devices, 260 s launches; mean completion where jobs can be
moved, and where none can), and on cluster05 of traces/deadlines on 12 nodes. `python -m benchmarks sweep` plays the
first again, for every number.
"""

from __future__ import annotations

from orchestrator.specs.frozen import frozen
from orchestrator.specs.policy import Objective
from orchestrator.specs.replace import replace


@frozen
class Tuning:
    """Tuning constants of the scheduler. Numbers without a unit are ratios."""

    # A job is due when the cluster could have done it this many times over. No later job goes
    # before a due
    # one, so that no job starves; until then the short go before the long. Between its time (the
    # wide would go too
    # early) and its device-seconds (too late) stands their geometric mean: 1,564 s on average over
    # six inputs, against
    # 1,743 s by device-seconds and 1,834 s by time. 3, 12, 16, 20, 24, 48: 1,757, 1,094, 1,098,
    # 1,089, 1,089, 1,095 s;
    # the longest wait grows with it.
    aging_factor: float = 12.0
    # The same of a job that its deadline put first from the start, counted from its deadline on. 1,
    # 2, 4 on cluster05:
    # 0.755, 0.757, 0.760 of the deadlines met, mean completion 9,652, 9,670, 9,690 s (slack of 12).
    aging_late: float = 2.0
    # A deadline puts a job first once it leaves it no more slack than this many of its lengths. 4,
    # 16, 32, 100 on
    # cluster05: 0.755, 0.794, 0.806, 0.809 of the deadlines met.
    slack: float = 32.0
    # Who may end last: a job of so much of the device-seconds of all that waits, and those of so
    # much of its own.
    # Larger ones go first, so that they end together (longest first is within a third of the
    # shortest makespan: Graham
    # 1969, SIAM Journal on Applied Mathematics 17:416). Makespan 61,249 s with it, 63,159 s
    # without; a fifth to a
    # third, and 0.4 to 0.6 of the largest, alike.
    large: float = 0.25
    as_large: float = 0.5
    # Seconds that a job would wait to save a device-second, for each other job per device of the
    # cluster. At 1 a job
    # would count what it delays all that are there now; as many come while it runs. 0.5 to 4: 1,078
    # to 1,156 s, 8:
    # 1,172 s; 0 lets the first jobs take everything.
    price: float = 2.0
    price_idle: float = 0.002  # where no job waits: a job that grows can make way again
    # of a device-second of a job that is alone: for devices that hardly help
    price_alone: float = 0.1
    # Launches that an attempt trains for before it is moved: at most one move in rest + 1 launches,
    # so that they take
    # no more than a fifth of a job's time. 1, 2, 4: 1,070, 1,077, 1,089 s (aging 20), with more
    # moves.
    rest: float = 4.0
    # Of what the one that makes way has left: only shorter jobs have it stopped. Half and all
    # differ by less than 1 %.
    shorter: float = 0.25
    # times what a job loses by making way: what others gain; they may end sooner than they wait for
    worth: float = 2.0
    # Of a job's length: jobs shorter than that find room beside it, and what else is held for so
    # long counts as held
    # beside it. 0.1, 0.25 where no job can be moved: 1,424, 1,603 s; no effect where all can.
    short: float = 0.1
    memory_s: float = 6 * 3600.0  # what was asked for counts exp(-age / memory_s)
    least_s: float = 3600.0  # over which a first burst is taken to spread


TUNING = Tuning()  # for the mean completion


# Ten shaken inputs, makespan and mean completion: 61,326 and 1,094 s as TUNING, 61,142 and
# 1,718 s with aging 3, 59,812 and 1,588 s with both. Around it, 60,529 and 1,522 s (aging 3.5),
# 60,807 and 1,670 s (2.5); on five inputs 58,940 and 3,717 s (aging 1), 60,638 and 1,668 s
# (price 4), 61,085 and 1,441 s (price 16). Tried on top and left out, as the gain is less than
# what neighbouring numbers differ by: a job goes first, and is not stopped, once it alone takes
# as long as 1 / factor of what the cluster needs for all that is left. Factors 1, 1.25, 1.5,
# 1.75: 60,291, 59,786, 59,356, 60,852 s at 1,562 to 2,323 s; 59,145 and 1,754 s with 1.5 and
# price 4. What limits it: two jobs of 32 devices hold the last 10,000 s, and a quarter of the
# devices is idle while they wait for 32 at once. Where no job can be moved both are worse:
# 66,266 and 2,154 s (TUNING: 62,563 and 1,424 s). The price does it: who starts narrow cannot
# grow. It is 59,344 and 2,060 s with aging 3 alone, 66,362 and 1,521 s with price 8 alone.
def select_tuning(objective: Objective) -> Tuning:
    """Return the scheduler's tuning constants for this objective of the queue.

    For the shortest makespan a device-second has a higher price, so that each job takes the devices
    that waste least. Long jobs do not wait until the end: they are overdue after three times their
    duration. The comment above has the measurements.
    """
    return (
        TUNING
        if objective is Objective.COMPLETION
        else replace(TUNING, aging_factor=3.0, price=8.0)
    )
