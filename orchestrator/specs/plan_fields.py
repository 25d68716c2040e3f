"""The settings of a plan (settings of one run), each declared at its field. Standard library only.

Training processes read it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from orchestrator.specs.choices import (
    AXES,
    ActivationCheckpointing,
    Degradation,
    Engine,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.frozen import frozen
from orchestrator.specs.mechanics import (
    Fsdp2,
    Mechanics,
    Replicated,
    ScriptFsdp,
    Zero,
    find_mechanics,
)


def _declare_setting(
    degradation: Degradation,
    *,
    short: Callable[[PlanFields], Sequence[str]] | None = None,
    rows: Callable[[PlanFields], dict[str, str]] | None = None,
    hides_default: bool = False,
    cheaper: tuple[Any, ...] = (),
    is_given: bool = True,
    alias: str = "",
    least: int = 1,
) -> dict[str, Any]:
    """Return the `metadata=` of a dataclass field of `PlanFields`: how its setting is degraded,
    shown and parsed.

    `specs.settings.Setting` has a field for each argument.
    """
    declaration = {
        "degradation": degradation,
        "short": short,
        "rows": rows,
        "hides_default": hides_default,
        "cheaper": cheaper,
        "is_given": is_given,
        "alias": alias,
        "least": least,
    }
    return {
        "setting": declaration
    }  # under a key of its own, since pydantic reads keys such as `alias` as its own


def _list_if(text: str, is_included: bool) -> list[str]:
    return [text] if is_included else []


def _format_layout(plan: PlanFields) -> list[str]:
    layout = plan.layout
    parts = [f"{plan.world_size} gpu{'s' if plan.world_size > 1 else ''}", f"dp{layout.dp}"]
    return parts + [
        f"{axis}{getattr(layout, axis)}" for axis in AXES[1:] if getattr(layout, axis) > 1
    ]


def _format_layout_rows(plan: PlanFields) -> dict[str, str]:
    degrees = {axis: getattr(plan.layout, axis) for axis in AXES}
    rows = {axis: str(degree) for axis, degree in degrees.items() if axis != "cp" or degree > 1}
    return {"gpus": str(plan.world_size)} | rows


def _end_in_short(layers: int, end_name: str) -> list[str]:
    return _list_if(f"{layers} layer{'s' if layers > 1 else ''} {end_name}", layers > 0)


def _format_partial(plan: PlanFields) -> list[str]:
    layers = plan.full_checkpointing_layers
    stages = plan.layout.pp * plan.pipeline_stages_per_rank
    text = f"full in {layers} layer{'s' if layers > 1 else ''}{' a stage' if stages > 1 else ''}"
    return _list_if(text, layers > 0)


def _format_sharding(plan: PlanFields) -> list[str]:
    mechanics = plan.mechanics
    match mechanics:
        case Replicated():
            return (
                ["DDP"]
                if mechanics.is_ours and (mechanics.ranks > 1 or plan.world_size == 1)
                else []
            )
        case Fsdp2():
            name = f"HSDP x{mechanics.copies}" if mechanics.copies > 1 else "FSDP2"
        case ScriptFsdp():
            name = "FSDP"
        case Zero():
            return [f"ZeRO-{int(mechanics.stage)}"]
        case _:
            refuse_unknown(mechanics)
    if mechanics.once_a_step:
        return [name, "reduced once a step"]
    return [name, "weights kept gathered"] if mechanics.keeps_gathered else [name]


@frozen
class PlanFields:
    """The settings of a plan, legal or not. `specs.plan.Plan` is always legal.

    Each field's metadata declares its setting. Planning, `orc estimate --set`, records and job files read SETTINGS.
    """

    engine: Engine = field(metadata=_declare_setting(Degradation.EXACT))
    layout: ParallelLayout = field(
        default=ParallelLayout(),
        metadata=_declare_setting(
            Degradation.EXACT,
            short=_format_layout,
            rows=_format_layout_rows,
        ),
    )
    # Copies of the shards: hybrid sharding cuts over dp / dp_replicate ranks.
    dp_replicate: int = field(default=1, metadata=_declare_setting(Degradation.EXACT))
    # So many data-parallel ranks hold other experts of every layer: like `dp_replicate` it adds no
    # ranks.
    expert_parallel: int = field(
        default=1,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _list_if(f"ep{plan.expert_parallel}", plan.expert_parallel > 1),
            hides_default=True,
            alias="ep",
        ),
    )
    # 1: 1F1B; more: interleaved 1F1B (arXiv:2104.04473, section 2.2).
    pipeline_stages_per_rank: int = field(
        default=1,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _list_if(
                f"{plan.pipeline_stages_per_rank} stages a rank", plan.pipeline_stages_per_rank > 1
            ),
        ),
    )
    # Layers of the first and of the last pipeline stage, which have embedding and head beside; 0:
    # an even share.
    first_stage_layers: int = field(
        default=0,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _end_in_short(plan.first_stage_layers, "first"),
            hides_default=True,
            least=0,
        ),
    )
    last_stage_layers: int = field(
        default=0,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _end_in_short(plan.last_stage_layers, "last"),
            hides_default=True,
            least=0,
        ),
    )
    zero_stage: ZeroStage = field(
        default=ZeroStage.NONE,
        metadata=_declare_setting(Degradation.EXACT, short=_format_sharding),
    )
    micro_batch_size: int = field(
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: [
                f"micro {plan.micro_batch_size}x{plan.gradient_accumulation_steps}"
            ],
            alias="micro_batch",
        )
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata=_declare_setting(Degradation.EXACT, alias="gradient_accumulation")
    )
    activation_checkpointing: ActivationCheckpointing = field(
        default=ActivationCheckpointing.NONE,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: {
                ActivationCheckpointing.NONE: [],
                ActivationCheckpointing.SELECTIVE: ["selective checkpointing"],
                ActivationCheckpointing.FULL: ["checkpointing"],
            }[plan.activation_checkpointing],
        ),
    )
    # The first so many layers of every pipeline stage keep their input only: of selective
    # checkpointing, or of a
    # script's layers that keep everything else.
    full_checkpointing_layers: int = field(
        default=0,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=_format_partial,
            hides_default=True,
            least=0,
        ),
    )
    # Whether what full checkpointing keeps, the layers' inputs, waits in host memory.
    activation_offload: bool = field(
        default=False,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _list_if("layers' inputs on host", plan.activation_offload),
            hides_default=True,
        ),
    )
    offload: Offload = field(
        default=Offload.NONE,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _list_if(
                f"{plan.offload} on {'host' if plan.offload_target is OffloadTarget.CPU else 'NVMe'}",
                plan.offload is not Offload.NONE,
            ),
        ),
    )
    offload_target: OffloadTarget = field(
        default=OffloadTarget.CPU, metadata=_declare_setting(Degradation.EXACT)
    )
    precision: Precision = field(
        default=Precision.FP32,
        metadata=_declare_setting(
            Degradation.NUMERIC,
            short=lambda plan: _list_if(plan.precision, plan.precision is not Precision.FP32),
            cheaper=(Precision.BF16, Precision.FP16),
        ),
    )
    optimizer: Optimizer = field(
        default=Optimizer.ADAMW,
        metadata=_declare_setting(
            Degradation.NUMERIC,
            short=lambda plan: _list_if(plan.optimizer, plan.optimizer is not Optimizer.ADAMW),
            cheaper=(Optimizer.ADAMW_8BIT,),
            is_given=False,
        ),
    )
    master_weights: MasterWeights = field(
        default=MasterWeights.FP32,
        metadata=_declare_setting(
            Degradation.NUMERIC,
            short=lambda plan: _list_if(
                "master weights in bf16", plan.master_weights is MasterWeights.BF16
            ),
            hides_default=True,
            cheaper=(MasterWeights.BF16,),
        ),
    )
    # Whether each parameter is updated, and its gradient let go, as soon as that is whole.
    optimizer_in_backward: bool = field(
        default=False,
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: _list_if("optimizer in backward", plan.optimizer_in_backward),
            hides_default=True,
        ),
    )
    # Whether torch.compile compiles each layer: other kernels round otherwise.
    compiled: bool = field(
        default=False,
        metadata=_declare_setting(
            Degradation.NUMERIC,
            short=lambda plan: _list_if("compiled", plan.compiled),
            hides_default=True,
        ),
    )
    # Of a script's ZeRO stages; ours follow from the engine.
    sharding: Sharding = field(
        default=Sharding.DEEPSPEED,
        metadata=_declare_setting(
            Degradation.EXACT,
            hides_default=True,
            is_given=False,
        ),
    )
    # Of a script: (phase, samples) of the phases outside training whose batch size was lowered.
    phase_batch_sizes: tuple[tuple[str, int], ...] = field(
        default=(),
        metadata=_declare_setting(
            Degradation.EXACT,
            short=lambda plan: [f"{phase} {samples}" for phase, samples in plan.phase_batch_sizes],
            rows=lambda plan: {
                f"{phase}_batch_size": str(samples) for phase, samples in plan.phase_batch_sizes
            },
            is_given=False,
        ),
    )
    # Tokens per sample; None where a script keeps its own.
    sequence_length: int | None = field(
        default=None,
        metadata=_declare_setting(
            Degradation.SEMANTIC,
            hides_default=True,
        ),
    )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step. No function may change this number."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.layout.dp

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def mechanics(self) -> Mechanics:
        """How the plan's ranks shard or replicate training state."""
        is_pipelined = self.layout.pp > 1
        return find_mechanics(
            self.engine,
            self.zero_stage,
            self.sharding,
            self.layout.dp_cp,
            self.dp_replicate,
            is_pipelined,
        )
