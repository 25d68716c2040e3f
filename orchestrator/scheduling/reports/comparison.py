"""Comparisons of strategies (ways to run one training): a table of costs and results, conclusions
and a chart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.scheduling.reports.comparison_rows import (
    ComparisonRow,
    LossCurve,
    Outcome,
    find_largest_known,
    is_finished,
    make_comparison_row,
    merge_rows_of_repeats,
)
from orchestrator.scheduling.reports.comparison_verdict import write_verdict
from orchestrator.scheduling.reports.intervals import compute_geometric_mean_ratio_interval
from orchestrator.scheduling.reports.provenance import describe_shared_provenance, name_model
from orchestrator.specs.attempt import VERSIONS
from orchestrator.specs.choices import AXES
from orchestrator.specs.frozen import frozen
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

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
DERIVED = (
    "gradient_accumulation_steps",
    "first_stage_layers",
    "last_stage_layers",
)  # they follow from the others

MEASURED_MARKS = {Outcome.FINISHED: Mark.MEASURED, Outcome.OUT_OF_MEMORY: Mark.REFUTED}


@frozen
class SharedSetup:
    """The settings that all strategies of a comparison share; "" and None stand for unknown ones."""

    model: str  # or the script
    device: str  # as its driver names it, else as the cluster file does
    global_batch_size: int
    sequence_length: int | None
    steps: int | None
    versions: Mapping[str, str]  # of torch, Python, CUDA and the driver
    provenance: Mapping[str, str]  # what the figures rest on, by name


@frozen
class Comparison:
    """The strategies of one comparison, in the order in which they were requested."""

    name: str
    setup: SharedSetup
    rows: tuple[ComparisonRow, ...]
    verdict: str
    notes: tuple[str, ...]  # other differences, and unknowns
    picture: Picture | None  # None where no strategy has a prediction

    @property
    def is_complete(self) -> bool:
        """Whether all jobs of the comparison have ended."""
        return all(row.outcome is not Outcome.PENDING for row in self.rows)


def list_compared_job_ids(job: Job) -> list[str]:
    """Return the ids of all jobs of the job's comparison, which were submitted together."""
    member = job.spec.member
    assert member is not None, job.id
    first = job.order - member.number
    return [f"{job.spec.name}-{first + number}" for number in range(member.of)]


def make_comparison(
    state: State, jobs: Sequence[Job], curves: Mapping[str, LossCurve]
) -> Comparison:
    """Return the comparison of these jobs; `curves` are their loss curves by job id.

    Jobs with equal pins repeat one strategy and share a row.
    """
    rows = [make_comparison_row(state, job, curves.get(job.id)) for job in jobs]
    groups = group_values(
        ((job.spec.plan, row.learning_rate) if job.spec.plan else job.id, row)
        for job, row in zip(jobs, rows, strict=True)
    )
    # losses of the first strategy that has any, of each repeat and learning rate
    firsts: dict[tuple[int, float | None], Mapping[int, float]] = {}
    repeated = []
    for group in groups.values():
        distances = []
        for repeat, row in enumerate(group):
            curve = curves.get(row.job_id)
            if curve is not None and curve.losses:
                firsts.setdefault((repeat, row.learning_rate), curve.losses)
            distances.append(
                _find_largest_loss_difference(firsts.get((repeat, row.learning_rate), {}), curve)
            )
        repeated.append(
            replace(merge_rows_of_repeats(group), loss_distance=find_largest_known(distances))
        )
    rows = _add_time_ratios(_with_distinct_names(repeated))
    return Comparison(
        name=jobs[0].array or jobs[0].id,
        setup=find_shared_setup(jobs, rows),
        rows=tuple(rows),
        verdict=write_verdict(rows),
        notes=tuple(_list_notes(rows)),
        picture=make_comparison_chart(rows),
    )


def find_shared_setup(jobs: Sequence[Job], rows: Sequence[ComparisonRow]) -> SharedSetup:
    """Return the settings that all strategies share; differing versions of a program are all
    listed.
    """
    spec = jobs[0].spec
    attempts = [job.last for job in jobs if job.last is not None]
    texts = {
        name: dict.fromkeys(attempt.versions.get(name, "") for attempt in attempts)
        for name in VERSIONS
    }
    versions = {
        name: ", ".join(filter(None, values)) for name, values in texts.items() if any(values)
    }
    device = versions.pop("device_model", "") or ", ".join(
        dict.fromkeys(row.device for row in rows if row.device)
    )
    own_length = None if spec.data is None else spec.data.sequence_length
    planned = next(
        (int(row.settings["sequence_length"]) for row in rows if "sequence_length" in row.settings),
        None,
    )
    return SharedSetup(
        model=name_model(spec),
        device=device,
        global_batch_size=spec.global_batch_size,
        sequence_length=planned or own_length,
        steps=spec.optimizer_steps,
        versions=versions,
        provenance=describe_shared_provenance(job.spec for job in jobs),
    )


def _add_time_ratios(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with each step time divided by that of the fastest strategy."""
    timed = [row for row in rows if row.step_s and is_finished(row)]
    fastest = min(timed, key=lambda row: row.step_s or 0.0, default=None)
    if fastest is None or not fastest.step_s:
        return [*rows]
    return [
        replace(
            row,
            times_fastest=(row.step_s or 0.0) / fastest.step_s,
            times_within=None
            if row is fastest
            else compute_geometric_mean_ratio_interval(row.steps_s, fastest.steps_s),
        )
        if row in timed
        else row
        for row in rows
    ]


def _list_notes(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield sentences on other differences between the strategies, and on the accuracy of their
    times.
    """
    timed = [row for row in rows if row.step_s and is_finished(row)]
    names = dict.fromkeys(
        name for row in timed for name in row.settings if name not in (*WAYS, *DERIVED)
    )
    values = {
        name: list(dict.fromkeys(row.settings.get(name, "-") for row in timed)) for name in names
    }
    differing = [
        f"{name} ({', '.join(choices)})" for name, choices in values.items() if len(choices) > 1
    ]
    if differing:
        yield f"They differ in more than their strategies: {'; '.join(differing)}. `--plan` pins a setting of all."
    least = min((row.repeats for row in timed), default=REPEATS_MIN)
    if least < REPEATS_MIN and len(timed) > 1:
        times = "once: differences may be noise" if least == 1 else "twice: the intervals are wide"
        yield f"Measured {times}. `--repeats {REPEATS_MIN}` tells more strategies apart."


def make_comparison_chart(rows: Sequence[ComparisonRow]) -> Picture | None:
    """Return a chart of device memory against step time, predicted and measured; None without data.

    Points are labelled by the rows' numbers, from 1.
    """
    first = next((row for row in rows if row.capacity_bytes), None)
    if first is None:
        return None
    points = []
    for number, row in enumerate(rows, 1):
        if row.device != first.device or not row.predicted_device_bytes or not row.predicted_step_s:
            continue
        mark = Mark.TOO_BIG if row.outcome is Outcome.DOES_NOT_FIT else Mark.PREDICTED
        measured = _find_measured_device_bytes(row)
        ended = MEASURED_MARKS.get(row.outcome)
        is_measured = measured is not None and ended is not None
        label = "" if is_measured else str(number)
        points.append(
            Point(
                step_s=row.predicted_step_s,
                needed_bytes=row.predicted_device_bytes,
                mark=mark,
                label=label,
                name=row.strategy,
            )
        )
        if measured is not None and ended is not None:
            step_s = row.step_s or row.predicted_step_s
            points.append(
                Point(
                    step_s=step_s,
                    needed_bytes=measured,
                    mark=ended,
                    label=str(number),
                    name=row.strategy,
                    within_s=row.step_within_s if row.step_s else None,
                )
            )
    assert first.capacity_bytes is not None, first
    if not points:
        return None
    return Picture(
        device=first.device or "", capacity_bytes=first.capacity_bytes, points=tuple(points)
    )


def _find_largest_loss_difference(
    first: Mapping[int, float], curve: LossCurve | None
) -> float | None:
    """Return the largest difference between two loss curves at the same step; None without a common
    step.
    """
    shared = [] if curve is None else [step for step in curve.losses if step in first]
    if curve is None or not shared:
        return None
    return max(abs(curve.losses[step] - first[step]) for step in shared)


def _with_distinct_names(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with a different name for each strategy.

    If learning rates differ, each name has its own. If names are still equal, they get the batch
    split.
    """
    if len({row.learning_rate for row in rows}) > 1:
        rows = [
            replace(row, strategy=f"{row.strategy}, learning rate {row.learning_rate:g}")
            for row in rows
        ]
    if len({row.strategy for row in rows}) == len(rows):
        return [*rows]
    cuts = [
        next((part for part in row.plan.split(" · ") if part.startswith("micro ")), "")
        for row in rows
    ]
    return [
        replace(row, strategy=f"{row.strategy} ({cut})") if cut else row
        for row, cut in zip(rows, cuts, strict=True)
    ]


def _find_measured_device_bytes(row: ComparisonRow) -> int | None:
    """Return the measured peak plus the predicted bytes outside the allocator; None where either is
    unknown.
    """
    if (
        row.peak_bytes is None
        or row.predicted_device_bytes is None
        or row.predicted_peak_bytes is None
    ):
        return None
    return row.peak_bytes + row.predicted_device_bytes - row.predicted_peak_bytes
