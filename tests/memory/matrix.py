"""The closed form beside what real ranks needed, plan by plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from orchestrator.memory.estimate import estimate
from orchestrator.memory.profiles import autocasts, profile_of
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.job import JobSpec
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.plan import ActivationCheckpointing, Engine, ParallelLayout, Plan, Precision, ZeroStage
from tests.memory.measure import peaks

SEQUENCE_LENGTH = 64
GLOBAL_BATCH = 16
RANKS = 2
# In the first the layers weigh, in the second the logits.
DEEP = DecoderSpec(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
)
WIDE = DecoderSpec(vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4)
STAGES = {
    Engine.TORCH: (ZeroStage.NONE, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS),
    Engine.DEEPSPEED: tuple(ZeroStage),
}
DEVICE = DeviceSpec(
    name="virtual",
    kind=DeviceKind.VIRTUAL,
    memory="1GiB",
    bf16_tflops=0.05,
    fp32_tflops=0.05,
    memory_bandwidth="8GB/s",
    link_bandwidth="1GB/s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: what was predicted, and what the worst rank really allocated at its peak."""

    plan: Plan
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def job(decoder: DecoderSpec) -> JobSpec:
    """A job of that decoder, as the matrix runs it."""
    return JobSpec(
        name="matrix",
        gpus=RANKS,
        global_batch_size=GLOBAL_BATCH,
        model=ModelSpec(decoder=decoder),
        data=DataSpec(text=("text.txt",), sequence_length=SEQUENCE_LENGTH),
    )


def plans(engine: Engine, micro_batch_sizes: Sequence[int], precision: Precision, ranks: int = RANKS) -> list[Plan]:
    """Every ZeRO stage of the engine x micro-batch x checkpointing that is legal."""
    found = []
    for stage, micro, recompute in product(STAGES[engine], micro_batch_sizes, ActivationCheckpointing):
        try:
            plan = Plan(
                engine=engine,
                layout=ParallelLayout(dp=ranks),
                zero_stage=stage,
                micro_batch_size=micro,
                gradient_accumulation_steps=GLOBAL_BATCH // ranks // micro,
                activation_checkpointing=recompute,
                precision=precision,
                sequence_length=SEQUENCE_LENGTH,
            )
        except IllegalPlan:
            continue
        found.append(plan)
    return found


def rows(decoder: DecoderSpec, tried: Sequence[Plan], folder: Path) -> list[Row]:
    """Every plan measured, in one launch."""
    spec = job(decoder)
    return [
        Row(plan=plan, predicted_bytes=_predicted(spec, plan), measured_bytes=measured)
        for plan, measured in zip(tried, peaks(decoder, SEQUENCE_LENGTH, tried, folder), strict=True)
    ]


def _predicted(spec: JobSpec, plan: Plan) -> int:
    profile = profile_of(
        spec,
        precision=plan.precision,
        sequence_length=plan.sequence_length,
        tensor_parallel=plan.layout.tp,
        autocast=autocasts(plan),
    )
    assert profile is not None
    return estimate(profile, plan, DEVICE).allocated_bytes


def full(folder: Path) -> list[Row]:
    """The whole matrix: both decoders, both precisions, every engine, stage, micro-batch and checkpointing."""
    found: list[Row] = []
    for (name, decoder), engine in product((("deep", DEEP), ("wide", WIDE)), STAGES):
        tried = [plan for precision in Precision for plan in plans(engine, (1, 4, 8), precision)]
        found += rows(decoder, tried, folder / f"{name}-{engine}")
    return found


def table(found: Sequence[Row]) -> str:
    """The rows as text, for a failing test and for people."""
    lines = [
        f"{row.plan.engine:9} ZeRO-{int(row.plan.zero_stage)} micro {row.plan.micro_batch_size} x "
        f"{row.plan.gradient_accumulation_steps} {row.plan.activation_checkpointing:9} {row.plan.precision}: "
        f"predicted {row.predicted_bytes / 2**20:7.2f} MiB, measured {row.measured_bytes / 2**20:7.2f} MiB, "
        f"{100 * row.error:+5.1f} %"
        for row in found
    ]
    return "\n".join(lines)
