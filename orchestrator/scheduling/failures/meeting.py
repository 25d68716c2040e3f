"""Checks whether an attempt's ranks joined one process group, and whether it has the planned size."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.specs.attempt import Attempt, Heartbeat

ALONE_STEPS = 2  # of a rank: a script may warm up by a step before it joins the others


def count_unconnected_ranks(heartbeats: Sequence[Heartbeat]) -> int:
    """Return how many ranks trained without a process group; 0 where fewer than two did, or where
    that is uncertain.

    It is uncertain where a rank joined a process group, or imported a library that makes its own.
    """
    trained = sum(beat.steps_done >= ALONE_STEPS for beat in heartbeats)
    return trained if trained > 1 and all(beat.group_size == 0 for beat in heartbeats) else 0


def describe_unconnected_ranks(rank_count: int) -> str:
    """Return the sentence that `rank_count` ranks trained without each other, and how the job file
    can prevent it.
    """
    return (
        f"{rank_count} ranks trained without meeting: the script called no init_process_group before "
        f"its steps, so that its global batch is {rank_count} times too large; say `gpus: 1`, or name by "
        "`launch` the launcher that joins its ranks"
    )


def describe_unplanned_group_size(attempt: Attempt) -> str:
    """Return a sentence if the ranks joined a process group of another size than the plan's; else
    "".
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
