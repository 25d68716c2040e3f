"""`orc compare`: the strategies (ways to run) of a job, and one job for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from orchestrator.memory.calibration.calibrate import Calibration, calibrate
from orchestrator.planning.explain import find_fastest_fitting_or_lightest
from orchestrator.planning.frontier import Candidate, list_fitting
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.scheduling.base.node_groups import NodeGroup, group_equal_nodes
from orchestrator.scheduling.options.probe import set_measured_memory
from orchestrator.scheduling.reports.intervals import REPEATS_MAX
from orchestrator.specs.choices import AXES, Degradation, MicroBatchChoice
from orchestrator.specs.cluster import Node
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.pins import SHORT, make_pins
from orchestrator.specs.job.sections import Degrade, Member
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.observation import Observation
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from orchestrator.specs.yaml_text import read_document

STRATEGIES_MAX = 32  # of one comparison
STEPS = 30  # of a model at most, where nobody says
WAYS = "all, frontier, zero=0..3, zero=0,2,3, or a file with a list of pins such as [{zero_stage: 2, dp: 4}]"
NAME_MAX = 63
JOBS_MAX = 96  # of one comparison with its repeats
MICRO_BATCH = "micro_batch_size"
_STAGES = re.compile(r"zero=([0-3](?:(?:\.\.|,)[0-3])*)")

Pins = tuple[tuple[str, Any], ...]


def choose_strategies(
    spec: JobSpec,
    strategies_option: str,
    nodes: Sequence[Node],
    observations: Sequence[Observation],
    micro_batch_choice: MicroBatchChoice = MicroBatchChoice.COMMON,
) -> tuple[Pins, ...]:
    """Return the pins (fixed plan settings) of each strategy that `--strategies` names, as complete
    plans where one fits.

    `all`: each way to shard and offload on each layout. `frontier`: each plan that no other beats.
    `zero=`: each of the ZeRO stages. A file: each of its pins. Open micro-batches get one common
    size, the largest with which all strategies fit that fit at all. Where there is none, or with
    BEST, each strategy has its own best size. Raises SpecError.
    """
    group = next(
        (candidate for candidate in group_equal_nodes(nodes) if candidate.devices >= spec.gpus.min),
        None,
    )
    if group is None:
        most = max((kind.devices for kind in group_equal_nodes(nodes)), default=0)
        raise SpecError(
            "too few devices of one kind",
            path="gpus.min",
            got=spec.gpus.min,
            allowed=f"at most {most}",
        )
    calibrated = calibrate(observations, device=group.hardware.device.name, family=spec.family_name)
    spec = set_measured_memory(spec, calibrated)
    if strategies_option == "frontier":
        candidates = find_frontier(read_plan_request(spec), group.hardware, calibrated).candidates
        exact = [
            candidate for candidate in candidates if candidate.degradation is Degradation.EXACT
        ]
        best = [
            candidate
            for candidate in exact
            if not any(_is_better_plan(other, candidate) for other in exact)
        ]
        pins_of_strategies = [_list_plan_pins(spec, candidate.plan) for candidate in best]
    else:
        partial = (
            _iterate_strategies(spec, group)
            if strategies_option == "all"
            else _read_strategies(spec, strategies_option)
        )
        ways = list(dict.fromkeys(partial))
        _check_strategy_count(len(ways))
        common = (
            _find_common_micro_batch(spec, ways, group, calibrated)
            if micro_batch_choice is MicroBatchChoice.COMMON
            else None
        )
        pins_of_strategies = [
            _complete_pins(spec, pins, common, group, calibrated) for pins in ways
        ]
    pins_of_strategies = list(dict.fromkeys(pins_of_strategies))
    _check_strategy_count(len(pins_of_strategies))
    return tuple(pins_of_strategies)


def _check_strategy_count(strategy_count: int) -> None:
    if strategy_count > STRATEGIES_MAX:
        hint = "name some in a file, or pin a setting with --plan"
        raise SpecError(
            "too many strategies",
            path="--strategies",
            got=strategy_count,
            allowed=f"{STRATEGIES_MAX}",
            hint=hint,
        )


def make_comparison_jobs(
    spec: JobSpec,
    strategies: Sequence[Pins],
    steps: int | None,
    repeats: int = 1,
    learning_rates: Sequence[float] = (),
) -> list[JobSpec]:
    """Return one job per strategy, learning rate and repeat. They run one at a time, so that none
    slows another.

    Without learning rates, all have the job's own. Strategies alternate, so that changes on the
    machine affect all of them. They share the job's data, start and seed; repeats of a model have
    the next seeds. An out-of-memory failure ends the job, as a result. Raises SpecError.
    """
    knob = spec.knobs.learning_rate
    if spec.is_script and learning_rates and knob is None:
        hint = "say knobs.learning_rate: {flag: --lr, default: 0.001}"
        raise SpecError("nothing tells the script its rate", path="--learning-rate", hint=hint)
    for rate in learning_rates:
        if not 0 < rate < inf:
            allowed = "a number above 0"
            raise SpecError("no learning rate", path="--learning-rate", got=rate, allowed=allowed)
    rates: tuple[float | None, ...] = tuple(dict.fromkeys(learning_rates))
    rates = rates or (spec.learning_rate,)
    ways = list(product(strategies, rates))
    if not 1 <= repeats <= REPEATS_MAX or repeats * len(ways) > JOBS_MAX:
        most = min(REPEATS_MAX, JOBS_MAX // len(ways))
        raise SpecError("too many repeats", path="--repeats", got=repeats, allowed=f"1 to {most}")
    if spec.is_script and steps is not None:
        hint = "leave --steps out; shorten the script with its own options, by --set command=..."
        raise SpecError("a script says itself when it ends", path="--steps", got=steps, hint=hint)
    if spec.is_script and repeats * len(ways) == 1:
        raise SpecError(
            "the script has one strategy only, so there is nothing to compare",
            path="--strategies",
            hint="say what it can be told: `knobs: {deepspeed_config: {flag: --deepspeed}}`, `zero_stage`, or"
            " `gpus: {min: 1, max: 2}`; or let our engines train its model: `model: {factory: model.py:build}`, `data`",
        )
    changes: JsonObject = {
        "name": f"{spec.name[: NAME_MAX - len('-compare')]}-compare",
        "family": spec.family_name,
        "degrade": Degrade(allow="none"),
        "guarantee": None,
        "deadline": None,
        "start_window": None,
    }
    if not spec.is_script:
        steps = min(STEPS, spec.training.max_steps) if steps is None else steps
        changes["training"] = replace(spec.training, max_steps=steps, checkpoint_every_steps=steps)
    jobs = []
    for number, (repeat, (pins, learning_rate)) in enumerate(product(range(repeats), ways)):
        place = Member(
            number=number,
            of=repeats * len(ways),
            max_concurrent=1,
            compared=True,
            repeats=repeats,
        )
        changes |= {"plan": pins, "member": place}
        job = spec.model_copy(update=changes)
        if not spec.is_script:
            assert learning_rate is not None, "a model's training has a learning rate"
            seed = job.training.seed + repeat
            training = replace(job.training, seed=seed, learning_rate=learning_rate)
            job = job.model_copy(update={"training": training})
        elif knob is not None:
            rated = knob.model_copy(update={"default": learning_rate})
            job = job.model_copy(
                update={"knobs": spec.knobs.model_copy(update={"learning_rate": rated})}
            )
        jobs.append(job)
    return jobs


def _list_plan_pins(spec: JobSpec, plan: Plan) -> Pins:
    return make_pins(plan, spec.knobs if spec.is_script else None)


def _is_better_plan(candidate: Candidate, other: Candidate) -> bool:
    """Return whether `candidate` is no worse than `other` in step time, bytes and devices, and
    better in any of these.
    """
    costs, rival_costs = (
        (candidate.step_s, candidate.estimate.device_bytes, candidate.plan.world_size)
        for candidate in (candidate, other)
    )
    return costs != rival_costs and all(a <= b for a, b in zip(costs, rival_costs, strict=True))


def _find_common_micro_batch(
    spec: JobSpec, strategies: Sequence[Pins], device_group: NodeGroup, calibration: Calibration
) -> int | None:
    """Return the largest micro-batch size with which all strategies fit; None if there is none.

    Strategies that pin their size, or fit with no size, are left out.
    """
    sizes: set[int] | None = None
    for pins in strategies:
        if any(name == MICRO_BATCH for name, _ in pins):
            continue
        pinned = spec.model_copy(update={"plan": pins})
        try:
            legal = {
                plan.micro_batch_size
                for plan in list_plans(read_plan_request(pinned), device_group.hardware)
            }
        except SpecError:
            continue
        fitting_sizes = {
            size
            for size in legal
            if _fits_empty_device(spec, _pin_micro_batch(pins, size), device_group, calibration)
        }
        if fitting_sizes:
            sizes = fitting_sizes if sizes is None else sizes & fitting_sizes
    return max(sizes, default=None) if sizes is not None else None


def _fits_empty_device(
    spec: JobSpec, pins: Pins, device_group: NodeGroup, calibration: Calibration
) -> bool:
    """Return whether a plan with these pins (fixed settings) fits an empty device."""
    pinned = spec.model_copy(update={"plan": pins})
    try:
        candidates = find_frontier(read_plan_request(pinned), device_group.hardware, calibration)
    except SpecError:
        return False
    return (
        next(list_fitting(candidates, device_group.hardware.device.memory, calibration), None)
        is not None
    )


def _pin_micro_batch(pins: Pins, micro_batch_size: int | None) -> Pins:
    """Return the pins (fixed settings) with this micro-batch size added, unless they have one or
    `micro_batch_size` is None.
    """
    if micro_batch_size is None or any(name == MICRO_BATCH for name, _ in pins):
        return pins
    return (*pins, (MICRO_BATCH, micro_batch_size))


def _iterate_strategies(spec: JobSpec, device_group: NodeGroup) -> Iterator[Pins]:
    """Yield the engine, layout, ZeRO stage and offload of each possible plan of the job, as pins
    (fixed settings).
    """
    names = (
        "engine",
        *AXES,
        "dp_replicate",
        "expert_parallel",
        "zero_stage",
        "offload",
        "offload_target",
    )
    for plan in list_plans(read_plan_request(spec), device_group.hardware):
        yield tuple(pin for pin in _list_plan_pins(spec, plan) if pin[0] in names)


def _read_strategies(spec: JobSpec, strategies_option: str) -> Iterator[Pins]:
    """Yield the pins (fixed settings) of the job for each strategy that `strategies_option` names: ZeRO
    stages, or a file. Raises SpecError.
    """
    stages = _STAGES.fullmatch(strategies_option)
    if stages is not None:
        rows: Any = [{"zero_stage": stage} for stage in _parse_stages(stages[1])]
    elif Path(strategies_option).is_file():
        rows = read_document(
            f"strategies:\n{_indent_lines(Path(strategies_option).read_text())}", strategies_option
        ).data["strategies"]
    else:
        raise SpecError(
            "no way to choose strategies, and no file",
            path="--strategies",
            got=strategies_option,
            allowed=WAYS,
        )
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SpecError(
            "not a list of pins",
            source=strategies_option,
            got=rows,
            allowed="- {zero_stage: 2, micro_batch: 4}",
        )
    job = spec.model_dump(mode="json")
    for row in rows:
        pins = {SHORT.get(key, key): value for key, value in row.items()}
        yield parse_job_data(
            {**job, "plan": {**job["plan"], **pins}},
            strategies_option if stages is None else "--strategies",
        ).plan


def _parse_stages(text: str) -> list[int]:
    """Return the ZeRO stages in a text such as `0..3` or `0,2,3`. Raises SpecError for another
    text.
    """
    stages: list[int] = []
    for part in text.split(","):
        first, *last = map(int, part.split(".."))
        stages += range(first, (last or [first])[-1] + 1)
    return list(dict.fromkeys(stages))


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _complete_pins(
    spec: JobSpec,
    pins: Pins,
    micro_batch: int | None,
    device_group: NodeGroup,
    calibration: Calibration,
) -> Pins:
    """Return all settings of the fastest fitting plan with these pins (fixed settings), as pins.

    Where none fits, it is the plan with these pins that needs the least memory. The pins are
    unchanged where no plan has them.
    """
    pinned = spec.model_copy(update={"plan": _pin_micro_batch(pins, micro_batch)})
    try:
        candidates = find_frontier(read_plan_request(pinned), device_group.hardware, calibration)
    except SpecError:
        return (
            pins
            if micro_batch is None
            else _complete_pins(spec, pins, None, device_group, calibration)
        )
    candidate = find_fastest_fitting_or_lightest(
        candidates, device_group.hardware.device.memory, calibration
    )
    return pins if candidate is None else _list_plan_pins(spec, candidate.plan)
