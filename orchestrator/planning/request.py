"""PlanRequest: the part of a job on which its plans depend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from orchestrator.memory.model_request import ModelRequest, make_model_request_values
from orchestrator.memory.models.hf import DecoderShape, find_model_shape
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DecoderSpec, TrainingSpec
from orchestrator.specs.job.sections import Degrade, GpuRange, Retries
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import ON_ONE_NODE, ConfigFile, Knobs
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.profile import MeasuredLine, OwnSettings

# What a job says that no plan depends on: jobs that differ in nothing else are judged together.
UNPLANNED = {
    "name": "job",
    "family": None,
    "priority": 0,
    "depends_on": (),
    "start_window": None,
    "deadline": None,
    "member": None,
    "user": None,
    "steps": None,
    "retries": Retries(),
    "env": (),
    "secrets": (),
    "trial": None,
    "source": None,
    "guarantee": None,
    "objective": "trusted",
    "time_limit": None,
}
# keys of which a request has the values
READ_AS_WRITTEN = (
    "gpus",
    "global_batch_size",
    "training",
    "plan",
    "degrade",
    "knobs",
    "deepspeed",
    "measured",
    "relative_to",
)
# keys of `training` on which plans depend
PLANNED_TRAINING = (
    "optimizer",
    "clip_norm",
    "freeze",
    "compile",
    "batch_norm_samples",
    "sync_batch_norm",
)
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "1")  # in a job's env: its host waits for every kernel


@dataclass(frozen=True, kw_only=True)
class PlanRequest(ModelRequest):
    """Everything on which the plans of a job depend. Equal requests have equal plans."""

    gpus: GpuRange
    global_batch_size: int
    training: TrainingSpec  # as PLANNED_TRAINING says; the rest has its defaults
    plan: tuple[tuple[str, Any], ...]  # pinned settings
    degrade: Degrade
    knobs: Knobs
    deepspeed: str | None  # the job's own keys of the DeepSpeed file, as JSON
    is_on_one_node: bool  # its launcher knows no other
    launches_block: bool
    measured: MeasuredLine | None
    relative_to: OwnSettings | None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        model = (self.known_model, self.profile, self.traced, self.training, self.measured)
        return hash((model, self.gpus, self.global_batch_size, self.plan, self.knobs, self.speeds))

    @cached_property
    def pins(self) -> dict[str, Any]:
        """{setting: value} of the settings that the job pins."""
        return dict(self.plan)

    @cached_property
    def shape(self) -> DecoderSpec | DecoderShape | None:
        """The sizes of a model that our engines can split; None for other models, and with
        adapters.
        """
        model = self.model
        if model is None or model.lora is not None:
            return None
        return find_model_shape(model, self.data_length)

    @property
    def dense_shape(self) -> DecoderSpec | DecoderShape | None:
        """The sizes of `shape`; None for a mixture of experts as well."""
        is_mixture = isinstance(self.shape, DecoderShape) and self.shape.experts is not None
        return None if is_mixture else self.shape

    @property
    def is_quantised(self) -> bool:
        """Whether adapters are trained beside a base model in 4 bits."""
        lora = self.model.lora if self.model is not None else None
        return lora is not None and lora.quantise_base

    @property
    def takes_turns(self) -> bool:
        """Whether several recipes of a traced model (as a GAN's networks) are trained in turn."""
        return any(entry.profile.turns for entry in self.traced)

    @property
    def has_batch_norm(self) -> bool:
        """Whether a traced model of the job contains BatchNorm."""
        return any(entry.profile.has_batch_norm for entry in self.traced)


def read_plan_request(spec: JobSpec) -> PlanRequest:
    """Return the part of the job on which its plans depend.

    Raises SpecError for a job that could not be submitted today: an older journal is read without
    checks, and its jobs are checked here. Jobs of the same shape are checked once.
    """
    training = {name: getattr(spec.training, name) for name in PLANNED_TRAINING}
    planned = spec.model_copy(update={**UNPLANNED, "training": TrainingSpec(**training)})
    request = _check_and_read_request(planned, BLOCKING in spec.env)
    if isinstance(request, SpecError):
        raise request.with_traceback(None)
    return request


@lru_cache(maxsize=512)
def _check_and_read_request(spec: JobSpec, cuda_launch_blocks: bool) -> PlanRequest | SpecError:
    """Return the plan request of a job, or the SpecError of an illegal job; both are cached."""
    try:
        # Pins are the search's own, where a job keeps its plan.
        parse_job_data(spec.model_copy(update={"plan": ()}).model_dump(mode="json"), "")
    except SpecError as error:
        return error
    return PlanRequest(
        **make_model_request_values(spec),
        **{name: getattr(spec, name) for name in READ_AS_WRITTEN},
        is_on_one_node=spec.launch in ON_ONE_NODE,
        launches_block=cuda_launch_blocks,
    )


class ScriptRequest(NamedTuple):
    """The parts of a script's job from which a plan is rendered as its command."""

    command: tuple[str, ...]
    knobs: Knobs
    config: ConfigFile | None
    deepspeed: str | None  # its own keys of the DeepSpeed file, as JSON
    global_batch_size: int
    learning_rate: float | None


def read_script_request(spec: JobSpec) -> ScriptRequest:
    """Return the parts of the script's job (command, knobs and others) from which a plan is
    rendered as its command.
    """
    assert spec.command is not None, "only a script has a command"
    return ScriptRequest(
        spec.command,
        spec.knobs,
        spec.config,
        spec.deepspeed,
        spec.global_batch_size,
        spec.learning_rate,
    )
