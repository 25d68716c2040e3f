"""ModelRequest: the part of a job from which the memory and compute cost of its model follow."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.choices import Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.frameworks import is_flag_on
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.job.sections import DeclaredProfile
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.profile import TracedProfile

# those of specs/job/frameworks.py that are transformers' Trainer
TRANSFORMERS_TRAINERS = ("hf", "trl")
# keys of which a request has the values
READ_AS_WRITTEN = (
    "family_name",
    "is_script",
    "known_model",
    "precision",
    "profile",
    "traced",
    "speeds",
)


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A job's model with everything that decides its memory and compute cost."""

    family_name: str
    is_script: bool
    known_model: ModelSpec | None  # that of our engines, or what a script `trains`
    precision: Precision
    profile: DeclaredProfile | None
    traced: tuple[TracedProfile, ...]  # profiles of a model that no closed form knows
    speeds: tuple[tuple[int, float], ...]  # seconds of a step by number of devices
    data_length: int  # tokens of a sample of `data`
    # tokens of a sample as plans state them; None: a script has no knob that says it
    own_length: int | None
    freezes: bool  # part of the model is never trained, and no declared profile accounts for it
    fuses_loss: bool  # the loss comes in chunks and never holds all logits
    is_by_transformers: bool  # transformers' Trainer runs the script

    @property
    def model(self) -> ModelSpec | None:
        """The model that our engines train; None for a script."""
        return None if self.is_script else self.known_model


@frozen
class RankShare:
    """The part of a model that one rank computes, and in which precision."""

    precision: Precision
    sequence_length: int | None = None  # tokens of a sample; None: as the job says
    context_parallel: int = 1  # ranks that split each sample's tokens
    tensor_parallel: int = 1  # ranks that split the matrices
    pipeline_parallel: int = 1
    # ranks that split the experts; one receives up to `uneven` times as many tokens as it sends
    expert_parallel: int = 1
    uneven: float = 1.0
    autocast: bool = False  # see `autocasts`
    cuda: bool = False  # on CUDA dropout masks are narrower


def read_model_request(spec: JobSpec) -> ModelRequest:
    """Return the part of the job on which its model's memory and compute cost depend."""
    return ModelRequest(**make_model_request_values(spec))


def make_model_request_values(spec: JobSpec) -> JsonObject:
    """Return {field name: value} of the job's ModelRequest, for the constructor of a subclass."""
    knob = spec.knobs.sequence_length
    own_length: int | None = spec.data.sequence_length
    if spec.is_script:
        own_length = None if knob is None or knob.default is None else int(knob.default)
    never = any(entry.until_step is None for entry in spec.training.freeze)
    values = {name: getattr(spec, name) for name in READ_AS_WRITTEN}
    return values | {
        "data_length": spec.data.sequence_length,
        "own_length": own_length,
        "freezes": never and spec.model is not None and spec.profile is None,
        "fuses_loss": has_fused_loss(spec),
        "is_by_transformers": spec.trainer in TRANSFORMERS_TRAINERS,
    }


def has_fused_loss(spec: JobSpec) -> bool:
    """Return whether the job's loss is computed in chunks: ours is, and that of Trainer with
    `use_liger_kernel`.
    """
    is_told = is_flag_on(spec.command or (), "--use_liger_kernel")
    return not spec.is_script or (spec.trainer in TRANSFORMERS_TRAINERS and is_told)
