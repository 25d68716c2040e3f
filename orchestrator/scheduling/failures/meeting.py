"""Checks whether an attempt's ranks joined one process group, and whether it has the planned size."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.specs.attempt import Attempt, Heartbeat

ALONE_STEPS = 2  # of a rank: a script may warm up by a step before it joins the others


def count_lone_ranks(beats: Sequence[Heartbeat]) -> int:
    """Return how many ranks trained without a process group; 0 where fewer than two did, or it is
    uncertain.

    It is uncertain where a rank joined a process group, or imported a library that makes its own.
    """
    trained = sum(beat.steps_done >= ALONE_STEPS for beat in beats)
    return trained if trained > 1 and all(beat.group_size == 0 for beat in beats) else 0


def describe_lone_ranks(count: int) -> str:
    """Return the sentence that `count` ranks trained without each other, and what the job file
    should say instead.
    """
    return (
        f"{count} ranks trained without meeting: the script called no init_process_group before its steps, so that its "
        f"global batch is {count} times too large; say `gpus: 1`, or name by `launch` the launcher that joins its ranks"
    )


def describe_unplanned_group_size(attempt: Attempt) -> str:
    """Return a sentence if a process group has another size than the plan; "" if none is known to
    have.
    """
    sizes = {beat.group_size for beat in attempt.heartbeats if beat.group_size}
    sizes -= {attempt.plan.world_size}
    if not sizes:
        return ""
    joined = " and ".join(str(size) for size in sorted(sizes))
    return (
        f"its ranks joined a process group of {joined}, where the plan has {attempt.plan.world_size}: "
        "its global batch is not the plan's"
    )
