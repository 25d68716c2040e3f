"""Checks that an attempt's ranks joined one process group of the planned size."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.specs.attempt import Attempt, Heartbeat

ALONE_STEPS = 2  # of a rank: a script may warm up by a step before it joins the others


def lone_ranks(beats: Sequence[Heartbeat]) -> int:
    """Return the number of ranks that trained alone; 0 where fewer than two did, or where it is uncertain.

    It is uncertain where a rank joined a process group, or imported a library that makes its own.
    """
    trained = sum(beat.steps_done >= ALONE_STEPS for beat in beats)
    return trained if trained > 1 and all(beat.group_size == 0 for beat in beats) else 0


def lone_ranks_in_words(count: int) -> str:
    """Return why an attempt with `count` lone ranks has failed, and what to write instead, as text."""
    return (
        f"{count} ranks trained without meeting: the script called no init_process_group before its steps, so that its "
        f"global batch is {count} times too large; say `gpus: 1`, or name by `launch` the launcher that joins its ranks"
    )


def other_size_in_words(attempt: Attempt) -> str:
    """Return text that a process group has another size than planned; "" where none is known to have."""
    sizes = {beat.group_size for beat in attempt.heartbeats if beat.group_size}
    sizes -= {attempt.plan.world_size}
    if not sizes:
        return ""
    joined = " and ".join(str(size) for size in sorted(sizes))
    return (
        f"its ranks joined a process group of {joined}, where the plan has {attempt.plan.world_size}: "
        "its global batch is not the plan's"
    )
