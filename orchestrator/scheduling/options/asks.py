"""Questions to a person, for a job that no plan fits: which change of the training may it make?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from orchestrator.planning.ways_out import add_batch_knobs
from orchestrator.scheduling.base.node_groups import NodeGroup
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.options.job_options import (
    JobOptions,
    list_job_options,
    make_calibration_for_job,
)
from orchestrator.specs.choices import Degradation
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.sections import LearningRateRule, SmallerBatch
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.pending import Facts
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

BATCHES_MAX = 6  # halvings of the global batch that are tried where the job file names no least one


class Question(NamedTuple):
    """What follows for a job without a fitting plan: a question to a person, or a change that the
    job file already allows.
    """

    text: str  # with the command that allows it; if already allowed, the change that the job makes
    answer: Facts = ()  # what that command allows, as the API takes it
    # job with the change that its own file allows; None: a person must allow it
    allowed: JobSpec | None = None


def find_change_or_question(
    state: State, job: Job, node_groups: Sequence[NodeGroup]
) -> Question | None:
    """Return the change or the question for a job without a fitting plan; None where no change of
    the training helps.

    A change that the job file allows needs no answer. The question is for the mildest class of
    degradation (numeric before semantic) by which a plan may fit. Where none does, it is for half
    the global batch, a quarter and so on, the largest that fits. Only a job that ran out of memory
    asks.
    """
    if job.spec.degrade.keeps_plan:
        return None
    if (
        job.spec.degrade.global_batch_size is not None
        and job.spec.degrade.limit is Degradation.SEMANTIC
    ):
        for spec in iterate_halved_batches(job.spec):
            if _may_any_plan_fit(state, replace(job, spec=spec), node_groups):
                text = f"goes on with {_describe_batch_and_rate(spec)}: no plan of {job.spec.global_batch_size} is left"
                return Question(text, allowed=spec)
    if job.last is None or not ran_out_of_memory(job.last):
        return None
    for spec, name, value, meaning in _list_allowable_changes(job.spec):
        if _may_any_plan_fit(state, replace(job, spec=spec), node_groups):
            command = f"`orc retry {job.id} --{name.replace('_', '-')} {value}`"
            knobs = _describe_missing_knobs(state, job, node_groups)
            return Question(
                f"no plan of the same training is left{knobs}. {command} goes on with {meaning}",
                answer=((name, value),),
            )
    return None


def _describe_missing_knobs(state: State, job: Job, node_groups: Sequence[NodeGroup]) -> str:
    """Return text that names the knobs (flags) for batches with which the script could keep its
    training.

    It is "" where there are none, or where they would not help.
    """
    missing, spec = add_batch_knobs(job.spec)
    if not missing or not _may_any_plan_fit(state, replace(job, spec=spec), node_groups):
        return ""
    names = " and ".join(f"`{name}`" for name in missing)
    return (
        f": with {names} as {'a knob' if len(missing) == 1 else 'knobs'} the same training goes on"
    )


def _may_any_plan_fit(state: State, job: Job, node_groups: Sequence[NodeGroup]) -> bool:
    """Return whether any plan of the job may fit on any of these groups of nodes."""
    for group in node_groups:
        options = list_job_options(
            job, group, make_calibration_for_job(state, job, group.hardware.device.name), 0.0
        )
        if isinstance(options, JobOptions) or options.likeliest is not None:
            return True
    return False


def iterate_halved_batches(spec: JobSpec) -> Iterator[JobSpec]:
    """Yield copies of the job with half its global batch size, a quarter and so on.

    Each has the learning rate that its job file gives for that batch.
    """
    if spec.is_script and spec.knobs.micro_batch_size is None:
        return  # nothing would tell the script
    rule = spec.degrade.global_batch_size
    batch = spec.global_batch_size
    least = max(1, batch >> BATCHES_MAX) if rule is None else rule.least
    while batch % 2 == 0 and batch // 2 >= least:
        batch //= 2
        yield set_global_batch(spec, batch)


def compute_learning_rate_factor(spec: JobSpec, batch_ratio: float) -> float:
    """Return the factor on the learning rate if the global batch shrinks to `batch_ratio` (0 to 1)
    of its size.

    The job file names the rule. Linear: Goyal et al. 2017, arXiv:1706.02677. Square root: Malladi
    et al. 2022, arXiv:2205.10287.
    """
    rule = spec.degrade.global_batch_size
    return {"linear": batch_ratio, "sqrt": math.sqrt(batch_ratio), "same": 1.0}[
        "same" if rule is None else rule.learning_rate
    ]


def set_global_batch(spec: JobSpec, batch_size: int) -> JobSpec:
    """Return the job with this global batch size, and with the learning rate that its rule gives
    for that size.
    """
    changes = dict[str, object](global_batch_size=batch_size)
    factor = compute_learning_rate_factor(spec, batch_size / spec.global_batch_size)
    rate = spec.learning_rate
    knob = spec.knobs.learning_rate
    if rate is not None and knob is not None and spec.is_script:
        smaller = knob.model_copy(update={"default": rate * factor})
        changes["knobs"] = spec.knobs.model_copy(update={"learning_rate": smaller})
    elif rate is not None and not spec.is_script:
        least = spec.training.min_learning_rate * factor
        changes["training"] = replace(
            spec.training, learning_rate=rate * factor, min_learning_rate=least
        )
    return spec.model_copy(update=changes)


def _describe_batch_and_rate(spec: JobSpec) -> str:
    """Return the job's samples per step and its learning rate as text."""
    rule = spec.degrade.global_batch_size
    rate = "" if spec.learning_rate is None else f" {spec.learning_rate:.3g}"
    is_same = rule is None or rule.learning_rate == "same"
    return f"{spec.global_batch_size} samples a step and {'the same' if is_same else 'a smaller'} learning rate{rate}"


def _list_allowable_changes(spec: JobSpec) -> Iterator[tuple[JobSpec, str, str | int, str]]:
    """Yield (changed job, option, its value, what it means) for each change that a person may allow
    by `orc retry`.
    """
    for wider in (Degradation.NUMERIC, Degradation.SEMANTIC):
        if wider > spec.degrade.limit:
            word = wider.name.lower()
            degrade = spec.degrade.model_copy(update={"allow": word})
            allowed = spec.model_copy(update={"degrade": degrade})
            yield allowed, "allow", word, f"{word} changes"
            if wider is Degradation.SEMANTIC and degrade.global_batch_size is not None:
                for smaller in iterate_halved_batches(allowed):
                    yield smaller, "allow", word, _describe_batch_and_rate(smaller)
    if spec.degrade.global_batch_size is None:
        for smaller in iterate_halved_batches(spec):
            batch = smaller.global_batch_size
            meaning = _describe_batch_and_rate(smaller)
            if spec.learning_rate is not None:
                rate = spec.learning_rate * batch / spec.global_batch_size
                meaning += f"; `--learning-rate linear` beside it makes that {rate:.3g}"
            yield smaller, "global_batch_size", batch, meaning


def apply_permissions(
    spec: JobSpec,
    allowed_degradation: str | None,
    global_batch_size: int | None,
    learning_rate_rule: LearningRateRule | None = None,
) -> JobSpec:
    """Return the job with the changes that a person allowed. Raises SpecError for none or
    contradictory ones.

    `allowed_degradation` is a class of degradation: `numeric` or `semantic`. By
    `learning_rate_rule` the learning rate follows a smaller batch; None means the rule of the job
    file, if any.
    """
    if allowed_degradation is None and global_batch_size is None:
        raise SpecError(
            "nothing is allowed",
            path="retry",
            hint="say --allow numeric, --allow semantic or --global-batch-size N",
        )
    changes: dict[str, object] = {}
    if allowed_degradation is not None:
        if Degradation[allowed_degradation.upper()] <= spec.degrade.limit:
            raise SpecError("is allowed already", path="allow", got=allowed_degradation)
        changes["degrade"] = spec.degrade.model_copy(update={"allow": allowed_degradation})
    if global_batch_size is not None:
        if global_batch_size > spec.global_batch_size:
            raise SpecError(
                "a larger batch needs more memory", path="global_batch_size", got=global_batch_size
            )
        if learning_rate_rule is not None:
            spec = _allow_smaller_batch(spec, global_batch_size, learning_rate_rule)
        spec = set_global_batch(spec, global_batch_size)
    elif learning_rate_rule is not None:
        raise SpecError(
            "a learning rate follows a batch",
            path="learning_rate",
            got=learning_rate_rule,
            hint="say --global-batch-size N, too",
        )
    return spec.model_copy(update=changes)


def _allow_smaller_batch(
    spec: JobSpec, least_batch: int, learning_rate_rule: LearningRateRule
) -> JobSpec:
    """Return the job with permission for global batches down to `least_batch`, and the rule for
    their learning rate.

    Raises SpecError where the script takes no learning rate.
    """
    if learning_rate_rule != "same" and spec.learning_rate is None:
        raise SpecError(
            "nothing tells the script another learning rate",
            path="learning_rate",
            got=learning_rate_rule,
            hint="say knobs.learning_rate: {flag: ..., default: NUMBER} in its job file, or same",
        )
    smaller = SmallerBatch(least=least_batch, learning_rate=learning_rate_rule)
    degrade = spec.degrade.model_copy(update={"global_batch_size": smaller})
    return spec.model_copy(update={"degrade": degrade})
