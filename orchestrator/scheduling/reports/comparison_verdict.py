"""The conclusions of a comparison in short sentences: time, cost, memory and losses of its
strategies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.scheduling.reports.comparison_rows import ComparisonRow, Outcome, is_finished
from orchestrator.specs.plain_text import join_first_words
from orchestrator.specs.units import format_bytes, format_seconds

ALIKE = 1.03  # single step times, costs and peaks that differ by less are called the same
LOSS_ALIKE = 2.0**-7  # of the loss: the distance between neighbouring numbers in bfloat16
NAMED_MAX = 3  # strategies that a sentence names for one reason


def write_verdict(rows: Sequence[ComparisonRow]) -> str:
    """Return the conclusions from the rows of a comparison, in sentences.

    They are the step time of each strategy against the fastest, which strategy costs and needs
    least, whether the losses agree, and which strategies do not fit. No difference is claimed where
    the 95 % interval of a ratio includes 1.
    """
    timed = sorted(
        (row for row in rows if row.step_s and is_finished(row)), key=lambda row: row.step_s or 0.0
    )
    sentences = [*_compare_times(timed), *_compare_memory(timed), *_compare_losses(timed)]
    sentences += _describe_strategies_excluded_by_memory(
        [row for row in rows if row.outcome is Outcome.OUT_OF_MEMORY], "ran out of memory"
    )
    sentences += _describe_strategies_excluded_by_memory(
        [row for row in rows if row.outcome is Outcome.DOES_NOT_FIT], "does not fit", "do not fit"
    )
    pending = sum(row.outcome is Outcome.PENDING for row in rows)
    if pending:
        sentences.append(f"{pending} of {len(rows)} have not ended")
    if not pending and not any(map(is_finished, rows)):
        sentences.insert(0, "No strategy finished")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()


def _compare_times(timed_rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield sentences on the step time of each strategy and on the cheapest one.

    `timed_rows` are the finished strategies, fastest first.
    """
    if len(timed_rows) < 2:
        yield from (f"Only {row.strategy} finished" for row in timed_rows)
        return
    fastest = timed_rows[0]
    yield f"{fastest.strategy} has the shortest step: {format_seconds(fastest.step_s or 0.0)}"
    yield from (
        f"{row.strategy} takes {_describe_relative_time(row, fastest)}" for row in timed_rows[1:]
    )
    cheapest = min(timed_rows, key=compute_step_device_s)
    if compute_step_device_s(cheapest) * ALIKE < compute_step_device_s(fastest) and _is_cheaper(
        cheapest, fastest
    ):
        share = compute_step_device_s(cheapest) / compute_step_device_s(fastest)
        yield f"{cheapest.strategy} costs least: {_format_ratio(share)} the device-seconds of {fastest.strategy} a step"


def _describe_relative_time(row: ComparisonRow, fastest: ComparisonRow) -> str:
    """Return the strategy's step time over the fastest one's as text, with its 95 % interval if
    there were repeats.
    """
    times = 1.0 if row.times_fastest is None else row.times_fastest
    if row.times_within is None:
        return f"{_format_ratio(times)}, about as long" if times < ALIKE else _format_ratio(times)
    low, high = row.times_within
    text = f"{_format_ratio(times)} ({_format_ratio(low)} to {_format_ratio(high)})"
    return (
        text
        if low > 1
        else f"{text}, not told apart by {min(row.repeats, fastest.repeats)} repeats"
    )


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.3g}x"


def _is_cheaper(row: ComparisonRow, fastest: ComparisonRow) -> bool:
    """Return whether a step of this strategy surely costs less than one of the fastest."""
    slowest = row.times_fastest if row.times_within is None else row.times_within[1]
    return (slowest or 1.0) * (row.devices or 1) < (fastest.devices or 1)


def _compare_memory(timed_rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield sentences on which strategy needs least memory, which needs most, and how much more."""
    peaks = sorted(
        ((row.peak_bytes, row.strategy) for row in timed_rows if row.peak_bytes),
        key=lambda peak: peak[0],
    )
    if len(peaks) < 2:
        return
    least, name = peaks[0]
    most, greediest = peaks[-1]
    if most < ALIKE * least:
        yield f"All need about the same memory: {format_bytes(most)}"
    else:
        yield f"{name} needs least memory: {format_bytes(least)}"
        yield f"{greediest} needs most: {format_bytes(most)}, {_format_ratio(most / least)}"


def _compare_losses(timed_rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield sentences on whether losses agree at the same step and seed, up to the rounding of
    bfloat16.
    """
    distances = [(row, row.loss_distance) for row in timed_rows if row.loss_distance is not None]
    if len(distances) < 2:
        return
    most = max(distance for _, distance in distances)
    far = [
        row.strategy for row, distance in distances if distance > LOSS_ALIKE * abs(row.loss or 0.0)
    ]
    if far:
        yield f"The losses of {join_first_words(far, NAMED_MAX)} differ by up to {most:.2g} at the same step"
    else:
        yield f"Losses agree: they differ by at most {most:.1g} at the same step"


def compute_step_device_s(row: ComparisonRow) -> float:
    """Return the device-seconds of one step of this strategy: its step time times its devices."""
    return (row.step_s or 0.0) * (row.devices or 1)


def _describe_strategies_excluded_by_memory(
    rows: Sequence[ComparisonRow], singular_verb: str, plural_verb: str = ""
) -> Iterator[str]:
    """Yield a sentence on these strategies, which did not fit, each with its needed and available
    bytes.

    The verbs (`does not fit`) follow the names; "" as `plural_verb` means the singular one.
    """
    if not rows:
        return
    named = [f"{row.strategy}{_describe_bytes_of_capacity(row)}" for row in rows]
    if len(rows) == 1:
        yield f"{rows[0].strategy} {singular_verb}{_describe_bytes_of_capacity(rows[0], ': {} of {}')}"
    else:
        yield f"{join_first_words(named, NAMED_MAX)} {plural_verb or singular_verb}"


def _describe_bytes_of_capacity(row: ComparisonRow, format_string: str = " ({} of {})") -> str:
    """Return the strategy's needed bytes of the device's bytes as text; "" where unknown."""
    needed = row.needed_bytes if row.outcome is Outcome.DOES_NOT_FIT else row.peak_bytes
    if needed is None or row.capacity_bytes is None:
        return ""
    return format_string.format(format_bytes(needed), format_bytes(row.capacity_bytes))
