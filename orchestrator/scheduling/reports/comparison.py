"""Comparisons of strategies (ways to run one training): a table of costs and results, a verdict and a chart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.scheduling.reports.comparison_rows import (
    Curve,
    Outcome,
    Row,
    is_finished,
    largest,
    merge_repeats,
    row_of,
)
from orchestrator.specs.choices import AXES
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes

ALIKE = 1.03  # step times and costs that differ by less are called the same
REPEATS_MIN = 3  # of a strategy, from which on its interval tells something
# What a strategy is; plans that differ in anything else differ in more than their strategies.
WAYS = (
    *AXES,
    "gpus",
    "engine",
    "dp_replicate",
    "expert_parallel",
    "zero_stage",
    "offload",
    "offload_target",
    "sharding",
)
DERIVED = ("gradient_accumulation_steps", "first_stage_layers", "last_stage_layers")  # they follow from the others
NAMED_MAX = 3  # strategies that a verdict names for one reason


MEASURED_MARKS = {Outcome.FINISHED: Mark.MEASURED, Outcome.OUT_OF_MEMORY: Mark.REFUTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The strategies of one comparison, in the order of the request."""

    name: str
    rows: tuple[Row, ...]
    verdict: str
    notes: tuple[str, ...]  # other differences, and unknowns
    picture: Picture | None  # None where no strategy has a prediction

    @property
    def is_complete(self) -> bool:
        """Whether every job has ended."""
        return all(row.outcome is not Outcome.PENDING for row in self.rows)


def compared_ids(job: Job) -> list[str]:
    """Return the ids of all jobs in the job's comparison, which were submitted in one transaction."""
    member = job.spec.member
    assert member is not None, job.id
    first = job.order - member.number
    return [f"{job.spec.name}-{first + number}" for number in range(member.of)]


def comparison(state: State, jobs: Sequence[Job], curves: Mapping[str, Curve]) -> Comparison:
    """Return the comparison of these jobs; `curves` are by job id. Jobs with equal pins repeat one strategy."""
    rows = [row_of(state, job, curves.get(job.id)) for job in jobs]
    groups: dict[object, list[Row]] = {}
    for job, row in zip(jobs, rows, strict=True):
        groups.setdefault(job.spec.plan or job.id, []).append(row)
    firsts: dict[int, Mapping[int, float]] = {}  # losses of the first strategy that has any, of each repeat
    repeated = []
    for group in groups.values():
        distances = []
        for repeat, row in enumerate(group):
            curve = curves.get(row.job_id)
            if curve is not None and curve.losses:
                firsts.setdefault(repeat, curve.losses)
            distances.append(_distance(firsts.get(repeat, {}), curve))
        repeated.append(replace(merge_repeats(group), loss_distance=largest(distances)))
    rows = _with_distinct_names(repeated)
    name = jobs[0].array or jobs[0].id
    return Comparison(
        name=name, rows=tuple(rows), verdict=verdict(rows), notes=tuple(_notes(rows)), picture=picture_of_rows(rows)
    )


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence: the fastest strategy, its lead and cost, and which strategies do not fit in memory.

    No difference is claimed within 95 % intervals.
    """
    parts = []
    timed = sorted((row for row in rows if row.step_s and is_finished(row)), key=lambda row: row.step_s or 0.0)
    if len(timed) > 1:
        fastest = timed[0]
        cheapest = min(timed, key=_step_cost)
        other = cheapest if _step_cost(cheapest) * ALIKE < _step_cost(fastest) else timed[1]
        times = (other.step_s or 0.0) / (fastest.step_s or 1.0)
        overlap = _overlap(fastest, other)
        faster = "about as fast as" if times < ALIKE or overlap else f"{times:.2f}x faster than"
        cost = _step_cost(fastest) / _step_cost(other)
        is_same_cost = max(cost, 1 / cost) < ALIKE or (overlap and fastest.devices == other.devices)
        cost_text = "" if is_same_cost else f" at {cost:.2g}x the cost"
        sure = " (95 % intervals overlap)" if overlap else ""
        parts.append(f"{fastest.strategy} is {faster} {other.strategy}{cost_text}{sure}")
    elif timed:
        parts.append(f"Only {timed[0].strategy} finished")
    parts += _excluded([row for row in rows if row.outcome is Outcome.OUT_OF_MEMORY], "ran out of memory")
    parts += _excluded([row for row in rows if row.outcome is Outcome.DOES_NOT_FIT], "does not fit", "do not fit")
    pending = sum(row.outcome is Outcome.PENDING for row in rows)
    parts += [f"{pending} of {len(rows)} have not ended"] if pending else []
    return f"{'; '.join(parts) or 'No strategy finished'}."


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what differs beside the strategies, and how sure their times are."""
    timed = [row for row in rows if row.step_s and is_finished(row)]
    names = dict.fromkeys(name for row in timed for name in row.settings if name not in (*WAYS, *DERIVED))
    values = {name: list(dict.fromkeys(row.settings.get(name, "-") for row in timed)) for name in names}
    differing = [f"{name} ({', '.join(choices)})" for name, choices in values.items() if len(choices) > 1]
    if differing:
        yield f"They differ in more than their strategies: {'; '.join(differing)}. `--plan` pins a setting of all."
    least = min((row.repeats for row in timed), default=REPEATS_MIN)
    if least < REPEATS_MIN and len(timed) > 1:
        times = "once" if least == 1 else "twice"
        yield f"Measured {times}: differences may be noise. `--repeats {REPEATS_MIN}` gives 95 % intervals."


def _overlap(row: Row, other: Row) -> bool:
    """Return whether both rows have intervals that overlap."""
    if row.step_within_s is None or other.step_within_s is None:
        return False
    return row.step_within_s[1] >= other.step_within_s[0] and other.step_within_s[1] >= row.step_within_s[0]


def picture_of_rows(rows: Sequence[Row]) -> Picture | None:
    """Return a chart of device memory against step time, predicted and measured; None without data.

    Labels are the rows' numbers, from 1.
    """
    first = next((row for row in rows if row.capacity_bytes), None)
    if first is None:
        return None
    points = []
    for number, row in enumerate(rows, 1):
        if row.device != first.device or not row.predicted_device_bytes or not row.predicted_step_s:
            continue
        mark = Mark.TOO_BIG if row.outcome is Outcome.DOES_NOT_FIT else Mark.PREDICTED
        measured, ended = _measured_device_bytes(row), MEASURED_MARKS.get(row.outcome)
        is_measured = measured is not None and ended is not None
        label = "" if is_measured else str(number)
        points.append(
            Point(step_s=row.predicted_step_s, needed_bytes=row.predicted_device_bytes, mark=mark, label=label)
        )
        if measured is not None and ended is not None:
            step_s = row.step_s or row.predicted_step_s
            points.append(Point(step_s=step_s, needed_bytes=measured, mark=ended, label=str(number)))
    assert first.capacity_bytes is not None, first
    if not points:
        return None
    return Picture(device=first.device or "", capacity_bytes=first.capacity_bytes, points=tuple(points))


def _distance(first: Mapping[int, float], curve: Curve | None) -> float | None:
    """Return the largest difference of two losses at the same step; None without a common step."""
    shared = [] if curve is None else [step for step in curve.losses if step in first]
    if curve is None or not shared:
        return None
    return max(abs(curve.losses[step] - first[step]) for step in shared)


def _with_distinct_names(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, with the cut of the batch beside names that occur twice."""
    counts = Counter(row.strategy for row in rows)
    named = []
    for row in rows:
        cut = next((part for part in row.plan.split(" · ") if part.startswith("micro ")), "")
        named.append(replace(row, strategy=f"{row.strategy} ({cut})") if counts[row.strategy] > 1 and cut else row)
    return named


def _step_cost(row: Row) -> float:
    """Return the device-seconds of a step."""
    return (row.step_s or 0.0) * (row.devices or 1)


def _measured_device_bytes(row: Row) -> int | None:
    """Return the measured peak with what the device is predicted to hold around it; None where either is unknown."""
    if row.peak_bytes is None or row.predicted_device_bytes is None or row.predicted_peak_bytes is None:
        return None
    return row.peak_bytes + row.predicted_device_bytes - row.predicted_peak_bytes


def _excluded(rows: Sequence[Row], singular: str, several: str = "") -> Iterator[str]:
    """Yield the strategies that memory excludes, each with the bytes that it needs and those that there are."""
    if not rows:
        return
    named = [f"{row.strategy}{_of_capacity(row)}" for row in rows[:NAMED_MAX]]
    rest = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    if len(rows) == 1:
        yield f"{rows[0].strategy} {singular}{_of_capacity(rows[0], ': {} of {}')}"
    else:
        yield f"{', '.join(named)}{rest} {several or singular}"


def _of_capacity(row: Row, form: str = " ({} of {})") -> str:
    needed = row.needed_bytes if row.outcome is Outcome.DOES_NOT_FIT else row.peak_bytes
    if needed is None or row.capacity_bytes is None:
        return ""
    return form.format(format_bytes(needed), format_bytes(row.capacity_bytes))
