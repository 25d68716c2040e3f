"""The trace against real engines on real ranks under a virtual device, and the plans that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile, is_memory_known, uses_autocast
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.job.model import Freeze, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Source, TracedProfile
from orchestrator.training.tracing.model_builder import Arithmetic, Request
from orchestrator.training.tracing.trace import trace_arithmetics
from tests.memory.matrix import DEVICE, SEQUENCE_LENGTH, Row, job, table
from tests.memory.measure import Run, measure_peaks, peaks
from tests.memory.models import DECODER, MODELS, WIDE, WITH_LARGE_TABLES

SHARE = RankShare(precision=Precision.FP32, sequence_length=SEQUENCE_LENGTH)

MEAN_ERROR_MAX, WORST_ERROR_MAX = 0.01, 0.03
NONE, SELECTIVE, FULL = ActivationCheckpointing
BF16 = Precision.BF16


def trace_profiles(
    model: ModelSpec, *arithmetics: tuple[Precision, bool], training: TrainingSpec | None = None
) -> dict[tuple[Precision, bool], ModelProfile]:
    """Profiles by precision and whether autocast computes in it."""
    kinds = tuple(
        Arithmetic(precision=precision, autocast=autocast) for precision, autocast in arithmetics
    )
    request = Request(
        model=model,
        training=training or TrainingSpec(),
        family="model",
        sequence_length=SEQUENCE_LENGTH,
        arithmetics=kinds,
    )
    return dict(zip(arithmetics, trace_arithmetics(request), strict=True))


def plan(engine: Engine, stage: int, dp: int, micro: int, turns: int, **fields: object) -> Plan:
    return Plan(
        engine=engine,
        layout=ParallelLayout(dp=dp),
        zero_stage=ZeroStage(stage),
        micro_batch_size=micro,
        gradient_accumulation_steps=turns,
        sequence_length=SEQUENCE_LENGTH,
        **fields,  # type: ignore[arg-type]
    )


def rows(name: str, tried: Sequence[Plan], folder: Path) -> list[Row]:
    """Every plan of the model, predicted and measured."""
    traces = trace_profiles(
        MODELS[name], *dict.fromkeys((plan.precision, uses_autocast(plan)) for plan in tried)
    )
    return [
        Row(
            plan=plan,
            predicted_bytes=estimate(
                traces[plan.precision, uses_autocast(plan)], plan, DEVICE
            ).allocated_bytes,
            measured_bytes=measured,
        )
        for plan, measured in zip(
            tried,
            peaks(MODELS[name], SEQUENCE_LENGTH, tried, folder / f"{name}-{tried[0].world_size}"),
            strict=True,
        )
    ]


def bars_hold(rows: Sequence[Row]) -> bool:
    errors = [abs(row.error) for row in rows]
    return sum(errors) / len(errors) <= MEAN_ERROR_MAX and max(errors) <= WORST_ERROR_MAX


LONE = [
    plan(Engine.TORCH, 0, 1, 1, 1),
    plan(Engine.TORCH, 0, 1, 3, 2),
    plan(Engine.TORCH, 0, 1, 4, 1, activation_checkpointing=FULL),
    plan(Engine.TORCH, 0, 1, 4, 1, activation_checkpointing=SELECTIVE),
]
PAIRS = [
    plan(Engine.TORCH, 0, 2, 1, 1),
    plan(Engine.TORCH, 0, 2, 3, 2),
    plan(Engine.TORCH, 2, 2, 4, 1),
    plan(Engine.TORCH, 3, 2, 1, 1),
    plan(Engine.TORCH, 3, 2, 3, 2),
    plan(Engine.TORCH, 3, 2, 4, 1, activation_checkpointing=FULL),
    plan(Engine.TORCH, 0, 2, 4, 1, precision=BF16),
    plan(Engine.TORCH, 2, 2, 1, 1, precision=BF16),
    plan(Engine.TORCH, 3, 2, 4, 1, precision=BF16),
    plan(Engine.DEEPSPEED, 0, 2, 1, 1),
    plan(Engine.DEEPSPEED, 1, 2, 3, 2, activation_checkpointing=FULL),
    plan(Engine.DEEPSPEED, 2, 2, 3, 2, activation_checkpointing=FULL),
    plan(Engine.DEEPSPEED, 2, 2, 1, 1),
    plan(Engine.DEEPSPEED, 2, 2, 4, 1, precision=BF16),
    plan(Engine.DEEPSPEED, 3, 2, 1, 1),
    plan(Engine.DEEPSPEED, 3, 2, 3, 2, activation_checkpointing=FULL, precision=BF16),
]


@pytest.mark.timeout(600)  # 10 s on an idle core, many times that on a busy one
def test_a_lone_rank_of_a_net_that_skips_layers_needs_what_its_trace_says(tmp_path: Path) -> None:
    results = rows("unet", LONE, tmp_path)
    assert bars_hold(results), table(results)


@pytest.mark.timeout(600)
def test_a_lone_rank_reduces_its_gradients_in_one_piece(tmp_path: Path) -> None:
    tried = plan(
        Engine.DEEPSPEED, 2, 1, 1, 3, activation_checkpointing=SELECTIVE, optimizer=Optimizer.SGD
    )
    results = rows("conv", [tried], tmp_path)
    assert bars_hold(results), table(results)


def ragged_rows(name: str, folder: Path) -> list[Row]:
    return rows(name, LONE, folder) + rows(name, PAIRS, folder)


MOMENT_ERROR_MAX = 0.005
MOMENTS = {
    "a first reduction that is the last": ("conv", plan(Engine.DEEPSPEED, 2, 2, 1, 1)),
    "nothing gathered for the loss of what was returned": (
        "codebooks",
        plan(Engine.TORCH, 3, 2, 4, 1, precision=BF16),
    ),
    "weights of which views are saved": ("codebooks", plan(Engine.DEEPSPEED, 3, 2, 4, 1)),
    "a reduction when a gradient comes": (
        "decoder",
        plan(Engine.DEEPSPEED, 3, 2, 8, 1, activation_checkpointing=FULL),
    ),
    "a layer gathered ahead of the root's backward pass": ("t5", plan(Engine.TORCH, 3, 2, 2, 1)),
    "a shared table's gradient that waits for its other use": (
        "bart",
        plan(Engine.TORCH, 2, 2, 1, 4, activation_checkpointing=FULL, precision=BF16),
    ),
    "a gradient that a reduction still names": (
        "decoder",
        plan(Engine.TORCH, 2, 2, 1, 1, precision=BF16),
    ),
}
SHORT = ("a first reduction that is the last", "a gradient that a reduction still names")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [SHORT, pytest.param([*MOMENTS], marks=pytest.mark.long)])
def test_short_lived_buffers_are_modelled(moments: Sequence[str], tmp_path: Path) -> None:
    chosen = {moment: MOMENTS[moment] for moment in moments}
    models = MODELS | WITH_LARGE_TABLES
    runs = [
        Run(model=models[name], plan=plan, sequence_length=SEQUENCE_LENGTH)
        for name, plan in chosen.values()
    ]
    peaks = dict(zip(chosen, measure_peaks(runs, tmp_path), strict=True))
    for moment, (name, plan) in chosen.items():
        (profile,) = trace_profiles(models[name], (plan.precision, uses_autocast(plan))).values()
        predicted = estimate(profile, plan, DEVICE).allocated_bytes
        assert predicted == pytest.approx(peaks[moment], rel=MOMENT_ERROR_MAX), moment


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_the_bars_hold_over_ranks_stages_and_ragged_micro_batches(
    name: str, tmp_path: Path
) -> None:
    results = ragged_rows(name, tmp_path)
    assert bars_hold(results), table(results)


EXPERTS = {
    "mixtral": {
        **MODELS["mixtral"].hf,
        "hidden_size": 192,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
    },
    "qwen2_moe": {
        **WIDE,
        "model_type": "qwen2_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192,
    },
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXPERTS)
def test_reductions_while_a_leaf_waits_are_modelled(name: str, tmp_path: Path) -> None:
    results = expert_rows(name, tmp_path)
    assert bars_hold(results), table(results)


def expert_rows(name: str, folder: Path) -> list[Row]:
    model, tried = (
        ModelSpec(hf=EXPERTS[name]),
        [plan(Engine.DEEPSPEED, 3, 2, micro, 1) for micro in (1, 3)],
    )
    (profile,) = trace_profiles(model, (Precision.FP32, False)).values()
    measured = peaks(model, SEQUENCE_LENGTH, tried, folder / f"experts-{name}")
    return [
        Row(
            plan=plan,
            predicted_bytes=estimate(profile, plan, DEVICE).allocated_bytes,
            measured_bytes=peak,
        )
        for plan, peak in zip(tried, measured, strict=True)
    ]


FROZEN: dict[str, tuple[str, ...]] = {
    "what comes first": ("model.embed_tokens.*", "model.layers.[01].*"),
    "attention": ("*.self_attn.*",),
    "words": ("lm_head*", "model.embed_tokens.*"),
}
LLAMA = ModelSpec(
    hf={
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)
FROZEN_PAIRS = [
    plan(Engine.TORCH, 0, 2, 1, 2, activation_checkpointing=FULL),
    plan(Engine.TORCH, 3, 2, 4, 1, precision=BF16),
    plan(Engine.DEEPSPEED, 2, 2, 1, 2),
    plan(Engine.DEEPSPEED, 3, 2, 1, 2, activation_checkpointing=FULL),
]


def frozen_rows(names: tuple[str, ...], tried: Sequence[Plan], folder: Path) -> list[Row]:
    training = TrainingSpec(freeze=tuple(Freeze(parameters=name) for name in names))
    traces = trace_profiles(
        LLAMA,
        *dict.fromkeys((plan.precision, uses_autocast(plan)) for plan in tried),
        training=training,
    )
    runs = [
        Run(model=LLAMA, plan=plan, sequence_length=SEQUENCE_LENGTH, frozen=names) for plan in tried
    ]
    return [
        Row(
            plan=plan,
            predicted_bytes=estimate(
                traces[plan.precision, uses_autocast(plan)], plan, DEVICE
            ).allocated_bytes,
            measured_bytes=peak,
        )
        for plan, peak in zip(tried, measure_peaks(runs, folder), strict=True)
    ]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "plans", [FROZEN_PAIRS[::2], pytest.param(FROZEN_PAIRS[1::2], marks=pytest.mark.long)]
)
def test_frozen_parameters_have_no_gradients_states_or_saved_inputs(
    plans: Sequence[Plan], tmp_path: Path
) -> None:
    results = frozen_rows(FROZEN["what comes first"], plans, tmp_path)
    assert bars_hold(results), table(results)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", FROZEN)
def test_the_bars_hold_where_a_model_is_frozen_in_part(which: str, tmp_path: Path) -> None:
    results = frozen_rows(FROZEN[which], PAIRS, tmp_path)
    assert bars_hold(results), table(results)


@pytest.mark.long
def test_zero3_saves_the_inputs_of_frozen_products() -> None:
    training = TrainingSpec(freeze=(Freeze(parameters="*.self_attn.*"),))
    (profile,) = trace_profiles(LLAMA, (Precision.FP32, False), training=training).values()
    most = {
        zero3: max(
            moment.sample_bytes
            for moment in profile.moments
            if (moment.mode, moment.zero3) == (NONE, zero3)
        )
        for zero3 in (False, True)
    }
    assert isinstance(LLAMA.hf, dict)
    # of attention: its result is saved in any case
    normed = 4 * SEQUENCE_LENGTH * LLAMA.hf["hidden_size"]
    assert most[True] - most[False] == LLAMA.hf["num_hidden_layers"] * normed


def full(folder: Path) -> dict[str, list[Row]]:
    """Return the rows that the long tests measure, by family."""
    rows_by_family = {name: ragged_rows(name, folder) for name in MODELS}
    for name in EXPERTS:
        rows_by_family[name] = rows_by_family.get(name, []) + expert_rows(name, folder)
    for which, names in FROZEN.items():
        rows_by_family[f"llama, {which} frozen"] = frozen_rows(names, PAIRS, folder / which)
    return rows_by_family


def test_a_decoder_that_is_frozen_in_part_is_traced_but_where_ranks_hold_parts_of_it() -> None:
    spec = job(LLAMA)
    assert is_memory_known(spec)
    for_some_steps = TrainingSpec(freeze=(Freeze(parameters="model.layers.*", until_step=10),))
    assert is_memory_known(spec.model_copy(update={"training": for_some_steps}))
    frozen = spec.model_copy(
        update={"training": TrainingSpec(freeze=(Freeze(parameters="model.layers.*"),))}
    )
    assert not is_memory_known(frozen)
    closed_form = find_rank_profile(read_model_request(spec), RankShare(precision=Precision.FP32))
    assert closed_form is not None
    less = dataclasses.replace(closed_form, source=Source.TRACED)
    trace = TracedProfile(sequence_length=SEQUENCE_LENGTH, autocast=False, profile=less)
    frozen = frozen.model_copy(update={"traced": (trace,)})
    assert (
        find_rank_profile(read_model_request(frozen), RankShare(precision=Precision.FP32)) == less
    )
    for cut in ({"pipeline_parallel": 2}, {"tensor_parallel": 2}):
        whole = find_rank_profile(
            read_model_request(frozen), RankShare(precision=Precision.FP32, **cut)
        )
        assert whole is not None
        assert whole.source is Source.CLOSED_FORM


@pytest.mark.timeout(600)
def test_the_trace_of_our_decoder_has_the_parameters_and_about_the_peak_of_its_closed_form() -> (
    None
):
    (trace,) = trace_profiles(ModelSpec(decoder=DECODER), (Precision.FP32, False)).values()
    closed = find_rank_profile(
        read_model_request(job(ModelSpec(decoder=DECODER))),
        SHARE,
    )
    assert closed is not None
    assert trace.parameters == closed.parameters
    for plan in (*LONE, *PAIRS):
        traced_bytes, theirs = (
            estimate(profile, plan, DEVICE).allocated_bytes for profile in (trace, closed)
        )
        assert traced_bytes == pytest.approx(theirs, rel=0.05), plan
