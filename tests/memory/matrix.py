"""The closed form beside what real ranks needed, plan by plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile, uses_autocast
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.job.model import DataSpec, DecoderSpec, LoraSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_plan
from tests.memory.measure import peaks

SEQUENCE_LENGTH = 64
GLOBAL_BATCH = 16
# the first, one between and the last: further ones need byte for byte what the second needs
TURNS_MAX = 3
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
WIDE = DecoderSpec(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=4,
)
# Little is trained of it, so that what is gathered weighs.
ADAPTED = ModelSpec(
    hf={
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    lora=LoraSpec(rank=8),
)
# Its layers are experts for the most part.
MIXED = ModelSpec(
    hf={
        "model_type": "mixtral",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    },
)
# Every token goes to all experts, so that as many copies come to a rank as it sends.
EVEN = ModelSpec(hf={**MIXED.hf, "num_local_experts": 4, "num_experts_per_tok": 4})
FEW = ModelSpec(
    hf={**MIXED.hf, "num_local_experts": 2, "num_experts_per_tok": 2}
)  # of four ranks two share one
NARROW = ModelSpec(
    hf={
        "model_type": "qwen2_moe",
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 96,
        "pad_token_id": None,
    },
)
STAGES = {
    Engine.TORCH: (ZeroStage.NONE, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS),
    Engine.DEEPSPEED: tuple(ZeroStage),
}
# Ranks -> (stage, layout, what else) of the torch engine.
PARALLEL: dict[int, tuple[tuple[int, dict[str, int], dict[str, int]], ...]] = {
    2: ((0, {"tp": 2}, {}), (0, {"pp": 2}, {}), (0, {"pp": 2}, {"pipeline_stages_per_rank": 2})),
    4: (
        (2, {"dp": 2, "tp": 2}, {}),
        (3, {"dp": 2, "tp": 2}, {}),
        (2, {"dp": 4}, {"dp_replicate": 2}),
        (3, {"dp": 4}, {"dp_replicate": 2}),
        (0, {"dp": 2, "pp": 2}, {}),
        (2, {"dp": 2, "pp": 2}, {}),
        (0, {"tp": 2, "pp": 2}, {}),
        (0, {"pp": 4}, {}),
    ),
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
    """A plan with its predicted bytes and the bytes that the worst rank allocated at its peak."""

    plan: Plan
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def job(model: ModelSpec) -> JobSpec:
    """A job of that model, as the matrix runs it."""
    return JobSpec(
        name="matrix",
        gpus=RANKS,
        global_batch_size=GLOBAL_BATCH,
        model=model,
        data=DataSpec(text=("text.txt",), sequence_length=SEQUENCE_LENGTH),
    )


def plan(engine: Engine, stage: int, micro: int, *, layout: dict[str, int], **fields: Any) -> Plan:
    """A plan of the matrix' global batch, or of the part of it that shows its peak; raises IllegalPlan."""
    turns = GLOBAL_BATCH // layout.get("dp", 1) // micro
    return Plan(
        engine=engine,
        layout=ParallelLayout(**layout),
        zero_stage=ZeroStage(stage),
        micro_batch_size=micro,
        gradient_accumulation_steps=turns if layout.get("pp", 1) > 1 else min(turns, TURNS_MAX),
        sequence_length=SEQUENCE_LENGTH,
        **fields,
    )


def plans(
    engine: Engine,
    micro_batch_sizes: Sequence[int],
    precision: Precision,
    ranks: int = RANKS,
    modes: Sequence[ActivationCheckpointing] = tuple(ActivationCheckpointing),
) -> list[Plan]:
    """Every ZeRO stage of the engine x micro-batch x checkpointing that is legal."""
    return _legal(
        (
            engine,
            stage,
            micro,
            {"dp": ranks},
            {"activation_checkpointing": mode, "precision": precision},
        )
        for stage, micro, mode in product(STAGES[engine], micro_batch_sizes, modes)
    )


def parallel_plans(
    ranks: int,
    micro_batch_sizes: Sequence[int],
    precision: Precision,
    modes: Sequence[ActivationCheckpointing],
) -> list[Plan]:
    """Tensor and pipeline parallel, their products with what is shared over dp, and hybrid sharding."""
    return _legal(
        (
            Engine.TORCH,
            stage,
            micro,
            layout,
            {**more, "activation_checkpointing": mode, "precision": precision},
        )
        for (stage, layout, more), micro, mode in product(PARALLEL[ranks], micro_batch_sizes, modes)
    )


def context_plans(ranks: int, modes: Sequence[ActivationCheckpointing]) -> list[Plan]:
    """Ranks that share each sample's tokens, alone and in products, for few tokens and many."""
    ways: dict[int, tuple[tuple[int, dict[str, int]], ...]] = {
        2: ((0, {"cp": 2}), (2, {"cp": 2}), (3, {"cp": 2})),
        4: (
            (0, {"cp": 4}),
            (2, {"dp": 2, "cp": 2}),
            (3, {"cp": 2, "tp": 2}),
            (0, {"cp": 2, "pp": 2}),
        ),
    }
    return _legal(
        (
            Engine.TORCH,
            stage,
            micro,
            layout,
            {"activation_checkpointing": mode, "precision": precision},
        )
        for (stage, layout), precision, micro, mode in product(
            ways[ranks], (Precision.FP32, Precision.BF16), (1, 4), modes
        )
    )


def once_plans(ranks: int) -> list[Plan]:
    """ZeRO-1 by FSDP2, which reduces once a step: two micro-batches and three, few samples and many."""
    layouts: dict[int, tuple[dict[str, int], ...]] = {
        2: ({"dp": 2},),
        4: ({"dp": 2, "tp": 2}, {"dp": 4}),
    }
    return [
        Plan(
            engine=Engine.TORCH,
            layout=ParallelLayout(**layout),
            zero_stage=ZeroStage.OPTIMIZER,
            micro_batch_size=micro,
            gradient_accumulation_steps=turns,
            activation_checkpointing=mode,
            precision=precision,
            sequence_length=SEQUENCE_LENGTH,
        )
        for layout, precision, (micro, turns), mode in product(
            layouts[ranks],
            (Precision.FP32, Precision.BF16),
            ((1, 3), (1, 2), (8, 2)),
            ActivationCheckpointing,
        )
    ]


def on_host_plans(ranks: int) -> list[Plan]:
    """Plans whose layers' inputs wait in host memory, for few samples and many."""
    ways: dict[int, tuple[tuple[Engine, int, dict[str, int]], ...]] = {
        1: ((Engine.TORCH, 0, {}),),
        2: (
            *((Engine.TORCH, stage, {"dp": 2}) for stage in (0, 2, 3)),
            *((Engine.TORCH, 0, {axis: 2}) for axis in ("tp", "cp", "pp")),
            *((Engine.DEEPSPEED, stage, {"dp": 2}) for stage in ZeroStage),
        ),
    }
    fields = {"activation_checkpointing": ActivationCheckpointing.FULL, "activation_offload": True}
    return _legal(
        (engine, stage, micro, layout, fields | {"precision": precision})
        for (engine, stage, layout), precision, micro in product(
            ways[ranks], (Precision.FP32, Precision.BF16), (1, 8)
        )
    )


def cut_plans(ranks: int) -> list[Plan]:
    """Pipelines whose ends have other numbers of layers than the stages between, and few micro-batches for them."""
    none, low = ActivationCheckpointing.NONE, {"precision": Precision.BF16}
    selective = {"activation_checkpointing": ActivationCheckpointing.SELECTIVE}
    full = {"activation_checkpointing": ActivationCheckpointing.FULL}
    of_two = (
        (0, 2, 4, {"first_stage_layers": 5, "last_stage_layers": 3}),
        (0, 4, 4, {"first_stage_layers": 3, "last_stage_layers": 5, **selective, **low}),
        (
            0,
            4,
            4,
            {
                "pipeline_stages_per_rank": 2,
                "first_stage_layers": 1,
                "last_stage_layers": 1,
                **full,
            },
        ),
        (
            0,
            4,
            4,
            {
                "first_stage_layers": 5,
                "last_stage_layers": 3,
                "full_checkpointing_layers": 4,
                **selective,
            },
        ),
        (0, 4, 2, {"pipeline_stages_per_rank": 2}),
        (0, 4, 3, {"pipeline_stages_per_rank": 4, **selective}),
    )
    of_four = (
        (0, 4, 8, {"last_stage_layers": 1, **selective}),
        (0, 4, 4, {"first_stage_layers": 1, "last_stage_layers": 1}),
        (0, 4, 4, {"pipeline_stages_per_rank": 2}),
        (0, 4, 6, {"pipeline_stages_per_rank": 2, **selective}),
        (2, 4, 4, {"first_stage_layers": 5, "last_stage_layers": 3}),
        (2, 4, 2, {"pipeline_stages_per_rank": 2, "last_stage_layers": 1, **selective}),
    )
    return [
        Plan(
            engine=Engine.TORCH,
            layout=ParallelLayout(dp=2, pp=2) if stage else ParallelLayout(pp=ranks),
            zero_stage=ZeroStage(stage),
            micro_batch_size=micro,
            gradient_accumulation_steps=turns,
            sequence_length=SEQUENCE_LENGTH,
            **{"activation_checkpointing": none, **fields},
        )
        for stage, micro, turns, fields in (of_two if ranks == 2 else of_four)
    ]


def partial_plans(ranks: int) -> list[Plan]:
    """Return plans whose first layers of a stage keep their input only: few and most layers, few and many samples."""
    low = Precision.BF16
    of_two = (
        (Engine.TORCH, 0, 8, {"dp": 2}, {"full_checkpointing_layers": 2}),
        (Engine.TORCH, 2, 8, {"dp": 2}, {"full_checkpointing_layers": 1, "precision": low}),
        (Engine.TORCH, 3, 1, {"dp": 2}, {"full_checkpointing_layers": 1}),
        (Engine.TORCH, 3, 8, {"dp": 2}, {"full_checkpointing_layers": 3}),
        (Engine.TORCH, 3, 8, {"dp": 2}, {"full_checkpointing_layers": 2, "precision": low}),
        (Engine.TORCH, 0, 8, {"tp": 2}, {"full_checkpointing_layers": 2}),
        (Engine.TORCH, 0, 2, {"pp": 2}, {"full_checkpointing_layers": 1}),
        (Engine.DEEPSPEED, 1, 8, {"dp": 2}, {"full_checkpointing_layers": 2}),
        (Engine.DEEPSPEED, 2, 8, {"dp": 2}, {"full_checkpointing_layers": 3, "precision": low}),
        (Engine.DEEPSPEED, 3, 8, {"dp": 2}, {"full_checkpointing_layers": 3}),
    )
    of_four = (
        (Engine.TORCH, 3, 8, {"dp": 2, "tp": 2}, {"full_checkpointing_layers": 3}),
        (Engine.TORCH, 2, 2, {"dp": 2, "pp": 2}, {"full_checkpointing_layers": 1}),
        (Engine.TORCH, 3, 4, {"dp": 4}, {"full_checkpointing_layers": 2, "dp_replicate": 2}),
    )
    selective = {"activation_checkpointing": ActivationCheckpointing.SELECTIVE}
    return _legal((*how, selective | more) for *how, more in (of_two if ranks == 2 else of_four))


def in_backward_plans(
    ranks: int, micro_batch_sizes: Sequence[int], precision: Precision
) -> list[Plan]:
    """Return plans that update a parameter once its gradient is whole: alone, under FSDP2, in tensor parallel."""
    ways: dict[int, tuple[tuple[int, dict[str, int]], ...]] = {
        1: ((0, {}),),
        2: ((2, {"dp": 2}), (3, {"dp": 2}), (0, {"tp": 2})),
        4: ((2, {"dp": 2, "tp": 2}), (3, {"dp": 2, "tp": 2})),
    }
    return [
        Plan(
            engine=Engine.TORCH,
            layout=ParallelLayout(**layout),
            zero_stage=ZeroStage(stage),
            micro_batch_size=micro,
            activation_checkpointing=mode,
            precision=precision,
            optimizer_in_backward=True,
            sequence_length=SEQUENCE_LENGTH,
        )
        for (stage, layout), micro, mode in product(
            ways[ranks], micro_batch_sizes, ActivationCheckpointing
        )
    ]


def adapted_plans() -> list[Plan]:
    """Return plans that show what adapters gather, recompute and return."""
    none, selective, whole = ActivationCheckpointing
    low = Precision.BF16
    return _legal(
        (
            engine,
            stage,
            micro,
            {"dp": RANKS},
            {"activation_checkpointing": mode, "precision": precision},
        )
        for engine, stage, micro, mode, precision in (
            (Engine.TORCH, 2, 1, whole, Precision.FP32),
            (Engine.TORCH, 3, 1, whole, Precision.FP32),
            (Engine.TORCH, 2, 8, selective, Precision.FP32),
            (Engine.TORCH, 2, 1, whole, low),
            (Engine.TORCH, 0, 4, none, low),
            (Engine.DEEPSPEED, 3, 1, whole, Precision.FP32),
            (Engine.DEEPSPEED, 3, 1, whole, low),
        )
    )


def mixed_plans(
    modes: Sequence[ActivationCheckpointing] = tuple(ActivationCheckpointing),
) -> list[Plan]:
    """Return plans of experts: both precisions, few and many tokens, whole gradients and cut ones."""
    low = Precision.BF16
    return _legal(
        (
            engine,
            stage,
            micro,
            {"dp": RANKS},
            {"activation_checkpointing": mode, "precision": precision},
        )
        for engine, stage, micro, precision in (
            (Engine.TORCH, 0, 1, Precision.FP32),
            (Engine.TORCH, 0, 8, low),
            (Engine.TORCH, 2, 8, low),
            (Engine.TORCH, 3, 1, low),
            (Engine.TORCH, 3, 8, Precision.FP32),
            (Engine.DEEPSPEED, 1, 8, Precision.FP32),
            (Engine.DEEPSPEED, 2, 1, low),
            (Engine.DEEPSPEED, 3, 8, low),
        )
        for mode in modes
    )


def expert_plans(
    ranks: int, modes: Sequence[ActivationCheckpointing], experts: int = 4
) -> list[Plan]:
    """Return plans with experts over all ranks and over some: both stages and precisions, few tokens and many."""
    degrees = (2,) if min(ranks, experts) == 2 else (2, 4)
    return [
        plan(
            *(Engine.TORCH, stage, micro),
            layout={"dp": ranks},
            expert_parallel=degree,
            activation_checkpointing=mode,
            precision=precision,
        )
        for degree, stage, micro, precision, mode in product(
            degrees, (2, 3), (1, 4), (Precision.FP32, Precision.BF16), modes
        )
    ]


def optimizer_plans() -> list[Plan]:
    """Every update rule that runs on a virtual device, where its states show."""
    return _legal(
        (engine, stage, 1, {"dp": RANKS}, {"optimizer": optimizer})
        for engine, optimizer in product(STAGES, (Optimizer.SGD, Optimizer.ADAFACTOR))
        for stage in (0, 3)
    )


def eight_bit_plans(ranks: int) -> list[Plan]:
    """Moments in 8 bits under every sharding of the torch engine, updated at the end and within the backward pass.

    Beside fp32 weights, and beside weights in bf16.
    """
    of_two = (
        ({"dp": 2}, 0),
        ({"dp": 2}, 1),
        ({"dp": 2}, 2),
        ({"dp": 2}, 3),
        ({"tp": 2}, 0),
        ({"pp": 2}, 0),
    )
    of_four = (
        ({"dp": 2, "tp": 2}, 2),
        ({"dp": 2, "tp": 2}, 3),
        ({"dp": 2, "pp": 2}, 2),
        ({"tp": 2, "pp": 2}, 0),
    )
    ways = {1: (({"dp": 1}, 0),), 2: of_two, 4: of_four}[ranks]
    modes = ActivationCheckpointing.NONE, ActivationCheckpointing.FULL
    precisions = Precision.FP32, Precision.BF16
    at_the_end = _legal(
        (
            Engine.TORCH,
            stage,
            micro,
            layout,
            {"activation_checkpointing": mode, "precision": precision},
        )
        for (layout, stage), micro, mode, precision in product(ways, (1, 4), modes, precisions)
    )
    within = [
        plan for precision in precisions for plan in in_backward_plans(ranks, (1, 4), precision)
    ]
    eight_bit = [replace(plan, optimizer=Optimizer.ADAMW_8BIT) for plan in (*at_the_end, *within)]
    rounded = [plan for plan in eight_bit if plan.precision is Precision.BF16]
    return [*eight_bit, *(replace(plan, master_weights=MasterWeights.BF16) for plan in rounded)]


def _legal(
    settings: Iterable[tuple[Engine, int, int, dict[str, int], dict[str, Any]]],
) -> list[Plan]:
    legal = []
    for engine, stage, micro, layout, fields in settings:
        with contextlib.suppress(IllegalPlan):
            legal.append(plan(engine, stage, micro, layout=layout, **fields))
    return legal


def rows(model: DecoderSpec | ModelSpec, tried: Sequence[Plan], folder: Path) -> list[Row]:
    """Every plan measured, in one launch."""
    model = ModelSpec(decoder=model) if isinstance(model, DecoderSpec) else model
    spec = job(model)
    return [
        Row(plan=plan, predicted_bytes=predict_bytes(spec, plan), measured_bytes=measured)
        for plan, measured in zip(tried, peaks(model, SEQUENCE_LENGTH, tried, folder), strict=True)
    ]


def predict_bytes(spec: JobSpec, plan: Plan, uneven: float = 1.0) -> int:
    """Allocated bytes of the plan, by the closed form."""
    profile = find_rank_profile(
        read_model_request(spec),
        RankShare(
            precision=plan.precision,
            sequence_length=plan.sequence_length,
            context_parallel=plan.layout.cp,
            tensor_parallel=plan.layout.tp,
            expert_parallel=plan.expert_parallel,
            uneven=uneven,
            autocast=uses_autocast(plan),
        ),
    )
    assert profile is not None
    return estimate(profile, plan, DEVICE).allocated_bytes


def full(folder: Path) -> dict[str, list[Row]]:
    """The whole matrix, by family: all precisions, every engine, layout, stage, micro-batch and checkpointing."""
    decoders = {"deep decoder": DEEP, "wide decoder": WIDE}
    by_family: dict[str, list[Row]] = {name: [] for name in decoders}
    modes = (ActivationCheckpointing.NONE, ActivationCheckpointing.FULL)
    for (name, decoder), engine in product(decoders.items(), STAGES):
        tried = [
            plan
            for precision in (Precision.FP32, Precision.BF16)
            for plan in plans(engine, (1, 4, 8), precision)
        ]
        by_family[name] += rows(
            decoder, [*tried, *plans(engine, (4,), Precision.FP16)], folder / f"{name}-{engine}"
        )
    for (name, decoder), ranks in product(decoders.items(), PARALLEL):
        tried = [
            plan
            for precision in (Precision.FP32, Precision.BF16)
            for plan in parallel_plans(ranks, (1, 4), precision, modes)
            if plan.layout.pp * plan.pipeline_stages_per_rank <= decoder.num_hidden_layers
        ]
        by_family[name] += rows(decoder, tried, folder / f"{name}-{ranks}")
    more = {
        "optimizers": optimizer_plans(),
        "once": once_plans(RANKS),
        "on host": on_host_plans(RANKS),
    }
    for name, tried in (more | {"8 bits": eight_bit_plans(RANKS)}).items():
        by_family["deep decoder"] += rows(DEEP, tried, folder / name)
    by_family["wide decoder"] += rows(WIDE, context_plans(RANKS, modes), folder / "context")
    by_family["llama with adapters"] = rows(ADAPTED, adapted_plans(), folder / "adapted")
    by_family["llama"] = rows(replace(ADAPTED, lora=None), adapted_plans(), folder / "unadapted")
    by_family["mixtral"] = rows(MIXED, mixed_plans(), folder / "mixed")
    dropping = [plan for engine in STAGES for plan in plans(engine, (4,), Precision.FP32)]
    by_family["decoder with dropout"] = rows(
        replace(DEEP, dropout=0.1), dropping, folder / "dropout"
    )
    return by_family


def table(rows: Sequence[Row]) -> str:
    """The rows as text, for a failing test and for people."""
    lines = [
        f"{100 * row.error:+5.1f} %: predicted {row.predicted_bytes / 2**20:7.2f} MiB, "
        f"measured {row.measured_bytes / 2**20:7.2f} MiB  {row.plan.engine} {format_plan(row.plan)}"
        for row in rows
    ]
    return "\n".join(lines)
