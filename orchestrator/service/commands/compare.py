"""`orc compare`: which strategies there are for a job, and one job for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.memory.calibration.calibrate import Calibration, calibration
from orchestrator.planning.explain import nearest
from orchestrator.planning.frontier import fitting
from orchestrator.planning.search import frontier, plans
from orchestrator.scheduling.base.node_groups import Group, groups_of
from orchestrator.scheduling.options.probe import measured_spec
from orchestrator.specs.choices import AXES, Degradation
from orchestrator.specs.cluster import Node
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.pins import SHORT, pins_of
from orchestrator.specs.job.sections import Degrade, Member
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.observation import Observation
from orchestrator.specs.parse import job_from_data, read_document
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace

STRATEGIES_MAX = 32  # of one comparison
STEPS = 30  # of a model, where nobody says
WAYS = "all, frontier, zero=0..3, zero=0,2,3, or a file with a list of pins such as [{zero_stage: 2, dp: 4}]"
NAME_MAX = 63
_STAGES = re.compile(r"zero=([0-3](?:(?:\.\.|,)[0-3])*)")

Pins = tuple[tuple[str, Any], ...]


def strategies(
    spec: JobSpec, asked: str, nodes: Sequence[Node], observations: Sequence[Observation]
) -> tuple[Pins, ...]:
    """Pins of each strategy; whole plans, the fastest that fit, where a plan has them. Raises SpecError.

    `all`: each way to shard and offload on each layout. `frontier`: each plan that no other beats. `zero=`: each of the
    stages. A file: each of its pins.
    """
    group = next((one for one in groups_of(nodes) if one.devices >= spec.gpus.min), None)
    if group is None:
        most = max((one.devices for one in groups_of(nodes)), default=0)
        raise SpecError("too few devices of one kind", path="gpus.min", got=spec.gpus.min, allowed=f"at most {most}")
    calibrated = calibration(observations, device=group.hardware.device.name, family=spec.family_name)
    spec = measured_spec(spec, calibrated)
    if asked == "frontier":
        found = frontier(spec, group.hardware, calibrated.correction, calibrated.overhead).candidates
        wanted = [pins_of(one.plan) for one in found if one.degradation is Degradation.EXACT]
    else:
        partial = _all_ways(spec, group) if asked == "all" else _said(spec, asked)
        wanted = [_whole(spec, pins, group, calibrated) for pins in partial]
    wanted = list(dict.fromkeys(wanted))
    if len(wanted) > STRATEGIES_MAX:
        hint = "name some in a file, or pin a setting with --plan"
        raise SpecError(
            "too many strategies", path="--strategies", got=len(wanted), allowed=f"{STRATEGIES_MAX}", hint=hint
        )
    return tuple(wanted)


def compared(spec: JobSpec, wanted: Sequence[Pins], steps: int | None) -> list[JobSpec]:
    """One job for each strategy, one at a time, so that none slows another down. Raises SpecError.

    All have the job's own seed, data and beginning. An out-of-memory failure ends the job: it is a result.
    """
    if spec.is_script and steps is not None:
        hint = "leave --steps out; shorten the script with its own options, by --set command=..."
        raise SpecError("a script says itself when it ends", path="--steps", got=steps, hint=hint)
    said: dict[str, Any] = {
        "name": f"{spec.name[: NAME_MAX - len('-compare')]}-compare",
        "family": spec.family_name,
        "degrade": Degrade(allow="none"),
        "guarantee": None,
        "deadline": None,
        "start_window": None,
    }
    if not spec.is_script:
        steps = steps or STEPS
        said["training"] = replace(spec.training, max_steps=steps, checkpoint_every_steps=steps)
    return [
        spec.model_copy(
            update={
                **said,
                "plan": pins,
                "member": Member(number=number, of=len(wanted), max_concurrent=1, compared=True),
            }
        )
        for number, pins in enumerate(wanted)
    ]


def _all_ways(spec: JobSpec, group: Group) -> Iterator[Pins]:
    """Each combination of engine, layout, stage and offload that a plan of the job has."""
    names = ("engine", *AXES, "dp_replicate", "expert_parallel", "zero_stage", "offload", "offload_target")
    seen: dict[Pins, None] = {}
    for plan in plans(spec, group.hardware):
        seen.setdefault(tuple(pin for pin in pins_of(plan) if pin[0] in names))
    yield from seen


def _said(spec: JobSpec, asked: str) -> Iterator[Pins]:
    """The job's own pins with those that are asked for. Raises SpecError."""
    stages = _STAGES.fullmatch(asked)
    if stages is not None:
        rows: Any = [{"zero_stage": stage} for stage in _stages(stages[1])]
    elif Path(asked).is_file():
        rows = read_document(f"strategies:\n{_indented(Path(asked).read_text())}", asked).data["strategies"]
    else:
        raise SpecError("no way to choose strategies, and no file", path="--strategies", got=asked, allowed=WAYS)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SpecError("not a list of pins", source=asked, got=rows, allowed="- {zero_stage: 2, micro_batch: 4}")
    own = spec.model_dump(mode="json")
    for row in rows:
        pins = {SHORT.get(key, key): value for key, value in row.items()}
        yield job_from_data({**own, "plan": {**own["plan"], **pins}}, asked if stages is None else "--strategies").plan


def _stages(said: str) -> list[int]:
    """`0..3` and `0,2,3` as numbers."""
    found: list[int] = []
    for part in said.split(","):
        first, *last = map(int, part.split(".."))
        found += range(first, (last or [first])[-1] + 1)
    return list(dict.fromkeys(found))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _whole(spec: JobSpec, pins: Pins, group: Group, calibrated: Calibration) -> Pins:
    """The fastest plan with the pins that fits, else the one that needs least; the pins where no plan has them."""
    pinned, device = spec.model_copy(update={"plan": pins}), group.hardware.device
    try:
        found = frontier(pinned, group.hardware, calibrated.correction, calibrated.overhead)
    except SpecError:
        return pins
    one = next(fitting(found, device.memory, calibrated), None) or nearest(found, calibrated)
    plan: Plan | None = None if one is None else one.plan
    return pins if plan is None else pins_of(plan)
