"""Published traces of job submissions: every file format becomes one Trace."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from math import isfinite, lcm
from pathlib import Path

from pydantic import ValidationError

from benchmarks.measured import Arrival, Shape
from orchestrator.backends.simulated.traces import Trace, make_trace
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.sections import Guarantee
from orchestrator.specs.job.spec import JobSpec

Row = Mapping[str, str]

# Seconds per step of n devices are n ** -SCALING of those of one where a trace tells one number
# only: the median over
# the six models of AlibabaPAI/reconfigurable-dl-scheduler that were measured on one and on eight
# devices of a node
# (0.52 to 0.92; tests/benchmarks/test_trace_files.py computes it from the tables).
SCALING = 0.71
DEVICES_MAX = 64  # of the numbers that SCALING offers a job


def read_trace(path: Path) -> Trace:
    """Return the trace in a published file, whose format is recognised by its columns.

    Raises SpecError for unknown columns or an impossible row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            columns = set(rows.fieldnames or ())
            read = next((read for wanted, read in FORMATS if wanted <= columns), None)
            if read is None:
                allowed = "; ".join(", ".join(sorted(wanted)) for wanted, _ in FORMATS)
                raise SpecError(
                    "no known trace has these columns",
                    source=str(path),
                    got=", ".join(sorted(columns)),
                    allowed=allowed,
                )
            return make_trace(path.stem, list(read(path, _number_rows(path, rows))))
    except FileNotFoundError:
        raise SpecError("the file does not exist", source=str(path)) from None
    except UnicodeDecodeError:
        raise SpecError("the file is not UTF-8 text", source=str(path)) from None
    except csv.Error as error:
        raise SpecError(f"not readable as CSV: {error}", source=str(path)) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SpecError(f"a row describes no job: {first['msg']}", source=str(path)) from None


# ------------------------------------------------------------------------------------------------------------ formats


def _plans(path: Path, rows: Iterator[tuple[str, Row]]) -> Iterator[Arrival]:
    """AlibabaPAI/reconfigurable-dl-scheduler: steps of an application whose speeds were measured for every plan.

    The best plan of each number of devices is told; what it takes on another placement is true where it was measured.
    A job with `is_sla` never runs slower than its `exec_plan` on as many devices as it asks for (arXiv:2408.08586,
    section 5): it is promised that speed.
    """
    measured = cache(
        lambda application: _read_speeds(path.parent.parent / "throughput" / f"{application}.csv")
    )
    for where, row in rows:
        speeds, devices = measured(row["application"]), _whole(where, row, "num_gpus")
        shapes: dict[Shape, float] = {}  # of the fastest plan on each
        best: dict[int, float] = {}
        for (_, shape), step_s in speeds.items():
            shapes[shape] = min(step_s, shapes.get(shape, step_s))
            best[sum(shape)] = min(step_s, best.get(sum(shape), step_s))
        submitted_step_s = _submitted_step_s(speeds, row.get("exec_plan") or "", devices)
        spec = job_spec_from_trace(
            row["name"], best, _whole(where, row, "steps"), family=row["application"]
        )
        if _flag(where, row, "is_sla"):
            spec = spec.model_copy(update={"guarantee": request_of(devices, submitted_step_s)})
        yield Arrival(
            at_s=_number(where, row, "submission_time"),
            spec=spec,
            rigid_devices=devices,
            submitted_step_s=submitted_step_s,
            shapes=tuple(shapes.items()),
        )


def _submitted_step_s(
    speeds: Mapping[tuple[str, Shape], float], plan: str, devices: int
) -> float | None:
    """Return seconds per step of this plan on so many devices, on the fewest nodes measured; None without any."""
    measured = [
        (len(shape), step_s)
        for (name, shape), step_s in speeds.items()
        if name == plan and sum(shape) == devices
    ]
    return min(measured)[1] if measured else None


def _read_speeds(path: Path) -> dict[tuple[str, Shape], float]:
    """Seconds per step of each plan on each placement (its digits are devices per node)."""
    fastest: dict[tuple[str, Shape], float] = {}
    for where, row in _rows(path):
        key = (
            row["exec_plan"],
            tuple(sorted((int(digit) for digit in row["placement"]), reverse=True)),
        )
        step_s = _number(where, row, "iter_time")
        if step_s > 0:  # 0: it did not run
            fastest[key] = min(step_s, fastest.get(key, step_s))
    return fastest


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):  # ValueError: no name that a file can have
        raise SpecError(
            "there are no measurements of this application", source=repr(str(path))
        ) from None
    return _number_rows(path, csv.DictReader(text.splitlines()))


def _deadlines(_: Path, rows: Iterator[tuple[str, Row]]) -> Iterator[Arrival]:
    """microsoft/elasticflow-traces: steps, what they took on the devices asked for, and when they have to be done."""
    for where, row in rows:
        devices, steps = _whole(where, row, "num_gpu"), _whole(where, row, "num_iteration")
        yield Arrival(
            at_s=_number(where, row, "submission_time"),
            spec=job_spec_from_trace(
                row["model_name"],
                _scale_speeds(devices, _number(where, row, "duration") / steps),
                steps,
            ),
            deadline_s=_number(where, row, "deadline"),
            rigid_devices=devices,
        )


def _elasticflow(path: Path, rows: Iterator[tuple[str, Row]]) -> Iterator[Arrival]:
    """pkusys/ElasticFlow, figure 8a: steps and deadlines; what a step takes on T4s is in a table of every model."""
    speeds = cache(
        lambda model, batch: _table(
            path.parent.parent / "scheduler/throughputs_T4" / f"{model}.csv", batch
        )
    )
    for where, row in rows:
        yield Arrival(
            at_s=_number(where, row, "submit_time"),
            spec=job_spec_from_trace(
                row["model_name"],
                speeds(row["model_name"], row["batch_size"]),
                _whole(where, row, "iteration"),
            ),
            deadline_s=_number(where, row, "ddl"),
            rigid_devices=_whole(where, row, "num_gpu"),
        )


def _table(path: Path, batch: str) -> dict[int, float]:
    """Seconds per step of every number of devices, of which the table tells steps per second; "nan": it did not run."""
    for where, row in _rows(path):
        if row["global_batch_size"] == batch:
            measured = {
                int(name): row[name] for name in row if name.isdecimal() and row[name] != "nan"
            }
            return {count: 1 / _number(where, row, str(count)) for count in measured}
    raise SpecError(
        "there are no measurements of this batch size",
        source=str(path),
        path="global_batch_size",
        got=batch,
    )


def _scale_speeds(devices: int, step_s: float) -> dict[int, float]:
    """Seconds per step of every power of two, and of the number asked for."""
    counts = {2**power for power in range(DEVICES_MAX.bit_length())} | {devices}
    return {
        count: step_s * (devices / count) ** SCALING
        for count in counts
        if count <= max(devices, DEVICES_MAX)
    }


def _philly(_: Path, rows: Iterator[tuple[str, Row]]) -> Iterator[Arrival]:
    """msr-fiddle/philly-traces: what a job took on the one number of devices that is known; steps of a second."""
    for where, row in rows:
        devices = _whole(where, row, "num_gpus")
        steps = max(1, round(_number(where, row, "duration")))
        try:
            start = datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC)
        except ValueError:
            raise SpecError(
                "not a time", source=where, path="timestamp", got=row["timestamp"]
            ) from None
        yield Arrival(
            at_s=start.timestamp(), spec=_like(_second_steps(devices), steps), rigid_devices=devices
        )


@cache
def _second_steps(devices: int) -> JobSpec:
    return job_spec_from_trace("philly", {devices: 1.0}, 1)


def _like(spec: JobSpec, steps: int) -> JobSpec:
    return spec.model_copy(update={"steps": steps})  # tens of thousands of them: not read again


FORMATS: Sequence[
    tuple[set[str], Callable[[Path, Iterator[tuple[str, Row]]], Iterator[Arrival]]]
] = (
    ({"name", "submission_time", "application", "num_gpus", "steps"}, _plans),
    (
        {"submission_time", "num_iteration", "model_name", "deadline", "num_gpu", "duration"},
        _deadlines,
    ),
    ({"submit_time", "iteration", "model_name", "ddl", "batch_size", "num_gpu"}, _elasticflow),
    ({"timestamp", "duration", "num_gpus"}, _philly),
)


# -------------------------------------------------------------------------------------------------------------- parts


def job_spec_from_trace(
    name: str, step_s: Mapping[int, float], steps: int, family: str | None = None
) -> JobSpec:
    """Return a script job with stated speeds; its global batch fits every number of devices."""
    return JobSpec.model_validate(
        {
            "name": re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-")[:40] or "job",
            "family": family,
            "command": ("python", "train.py"),
            "global_batch_size": lcm(*step_s),
            "steps": steps,
            "knobs": {"resume_from": {"flag": "--resume"}},
            "resume": {"on_sigterm": True},
            "speeds": {str(count): _in_words(seconds) for count, seconds in step_s.items()},
        }
    )


def request_of(gpus: int, step_s: float | None) -> Guarantee:
    """Return a guarantee of the speed of `gpus` devices at this step time; None: at that of the fastest plan."""
    return Guarantee.model_validate(
        {"gpus": gpus, "step": None if step_s is None else _in_words(step_s)}
    )


def _in_words(seconds: float) -> str:
    return f"{Decimal(repr(seconds)):f}s"


def _number_rows(path: Path, rows: csv.DictReader[str]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        yield f"{path}:{rows.line_num}", row


def _number(where: str, row: Row, column: str) -> float:
    try:
        number = float(row[column])
    except (TypeError, ValueError):
        number = float("nan")
    if not isfinite(number) or number < 0:
        raise SpecError(
            "not a number of seconds",
            source=where,
            path=column,
            got=row[column],
            allowed="0 or more",
        )
    return number


def _flag(where: str, row: Row, column: str) -> bool:
    text = (row.get(column) or "0").strip()
    if text not in ("0", "1"):
        raise SpecError("neither yes nor no", source=where, path=column, got=text, allowed="0 or 1")
    return text == "1"


def _whole(where: str, row: Row, column: str) -> int:
    text = (row[column] or "").strip()
    if not text.isdecimal() or int(text) < 1:
        raise SpecError(
            "not a number of things",
            source=where,
            path=column,
            got=row[column],
            allowed="1 or more",
        )
    return int(text)
