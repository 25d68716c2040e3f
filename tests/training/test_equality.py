"""The law of the whole project: every plan, and every change of plan, gives the same training.

The matrix is what the planner really emits. A curve is eight losses of a decoder with tied embeddings on ragged text,
with clipping that bites; all are compared with one plain process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning.search import Hardware, plans
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Offload,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.job.model import DataSpec, DecoderSpec, Freeze, LoraSpec, ModelSpec, Schedule, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, TrainingRun, write_json
from orchestrator.specs.settings import in_short
from tests.ranks import start_ranks
from tests.training import gang, tiny_hf
from tests.training.gang import Part

GLOBAL_BATCH = 8
SEQUENCE_LENGTH = 32
DECODER = DecoderSpec(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=8,
    tie_word_embeddings=True,
)
SHALLOW = dataclasses.replace(DECODER, num_hidden_layers=4)  # for all but deep pipelines: half the collectives
TRAINING = TrainingSpec(
    max_steps=8,
    learning_rate=1e-3,
    schedule=Schedule.COSINE,
    warmup_steps=2,
    clip_norm=0.5,
    checkpoint_every_steps=100,
    keep_checkpoints=1,
)
HOPPING = dataclasses.replace(TRAINING, schedule=Schedule.CONSTANT)
STAGED = dataclasses.replace(
    HOPPING,
    max_steps=12,
    freeze=(Freeze(parameters="layers.0.*", until_step=3), Freeze(parameters="*embed_tokens*", until_step=7)),
)
# Every plan leaves its process groups behind, whose threads wake all the time: 400 of them after 100 plans on 4 ranks.
LAUNCHED_TOGETHER = 20
# A moment between two of 256 codes rounds the other way where a sum differs in its last bit: 2.9e-6 on one processor.
QUANTISED = 1e-5
TOLERANCE = {Precision.FP32: 2e-6, Precision.BF16: 2e-3, Precision.FP16: 2e-3}

TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED
SELECTIVE, FULL = ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL


def plan(engine: Engine, stage: int, *, dp: int = 1, tp: int = 1, pp: int = 1, cuts: int = 1, **fields: Any) -> Plan:
    """A plan with the global batch; each rank's share is cut into `cuts` micro-batches."""
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(dp=dp, tp=tp, pp=pp),
        micro_batch_size=GLOBAL_BATCH // dp // cuts,
        gradient_accumulation_steps=cuts,
        sequence_length=SEQUENCE_LENGTH,
        **fields,
    )


ONE_PROCESS = plan(TORCH, 0)

# One of every kind, at two and four ranks; the rest are long.
COVERING = (
    plan(TORCH, 0, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
    plan(TORCH, 1, dp=2, cuts=4),
    plan(TORCH, 1, dp=2, cuts=2, precision=Precision.BF16, activation_checkpointing=SELECTIVE),
    plan(TORCH, 1, dp=2, tp=2, cuts=2),
    plan(TORCH, 2, dp=2, cuts=2),
    plan(TORCH, 3, dp=2, cuts=4, activation_checkpointing=FULL),
    plan(TORCH, 0, tp=2, cuts=2),
    plan(TORCH, 0, pp=2, cuts=4),
    plan(TORCH, 0, pp=2, cuts=4, pipeline_stages_per_rank=2, activation_checkpointing=FULL),
    plan(DEEPSPEED, 1, dp=2, cuts=2),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
    plan(TORCH, 3, dp=2, cuts=2, precision=Precision.BF16),
    plan(TORCH, 0, tp=2, precision=Precision.BF16),
    plan(TORCH, 0, dp=2, precision=Precision.FP16),
    plan(DEEPSPEED, 2, dp=2, precision=Precision.FP16),
    plan(TORCH, 3, dp=4, dp_replicate=2),
    plan(TORCH, 3, dp=2, tp=2),
    plan(TORCH, 2, dp=2, pp=2, cuts=2),
    plan(TORCH, 0, dp=2, pp=2, cuts=4, precision=Precision.BF16),
    plan(TORCH, 0, tp=2, pp=2, cuts=4, activation_checkpointing=FULL),
    plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=3),
    plan(TORCH, 0, pp=2, cuts=4, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
    plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=FULL, activation_offload=True),
    plan(TORCH, 0, pp=2, cuts=4, activation_checkpointing=FULL, activation_offload=True),
    plan(TORCH, 0, tp=2, cuts=2, activation_checkpointing=FULL, activation_offload=True),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=FULL, activation_offload=True),
)


def test_every_kind_of_plan_gives_the_losses_of_one_process(tmp_path: Path) -> None:
    curves = losses(tmp_path, [ONE_PROCESS, *COVERING])
    expected = curves.pop(ONE_PROCESS)
    assert expected[TRAINING.max_steps] < expected[1] - 0.2  # else equal curves would say little
    check(curves, expected)


@pytest.mark.long
@pytest.mark.timeout(10800)  # 327 plans on 8 ranks, 15 s each on two idle cores (2026-11-26)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_plan_that_the_planner_emits_gives_the_losses_of_one_process(tmp_path: Path, ranks: int) -> None:
    emitted = emitted_plans(ranks, Precision.FP32)
    assert len(emitted) > 80
    for precision in (Precision.BF16, Precision.FP16) if ranks <= 2 else (Precision.BF16,):
        emitted += one_of_each_strategy(emitted_plans(ranks, precision))
    for decoder, stages in ((SHALLOW, range(SHALLOW.num_hidden_layers + 1)), (DECODER, range(5, 9))):
        chosen = [each for each in emitted if each.layout.pp * each.pipeline_stages_per_rank in stages]
        if chosen:
            home = tmp_path / f"{decoder.num_hidden_layers}-layers"
            curves = losses(home, [ONE_PROCESS, *chosen], decoder=decoder, timeout_s=3500)
            expected = curves.pop(ONE_PROCESS)
            check(curves, expected)


UNCLIPPED = dataclasses.replace(TRAINING, clip_norm=None)
IN_BACKWARD = (
    plan(TORCH, 0, optimizer_in_backward=True),
    plan(TORCH, 0, optimizer_in_backward=True, activation_checkpointing=SELECTIVE, precision=Precision.BF16),
    plan(TORCH, 0, tp=2, optimizer_in_backward=True),
    plan(TORCH, 2, dp=2, optimizer_in_backward=True),
    plan(TORCH, 3, dp=2, optimizer_in_backward=True, activation_checkpointing=FULL),
    plan(TORCH, 3, dp=2, optimizer_in_backward=True, precision=Precision.BF16),
)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, pytest.param(Optimizer.SGD, marks=pytest.mark.long)])
def test_updates_in_the_backward_pass_give_the_losses_of_one_process(tmp_path: Path, optimizer: Optimizer) -> None:
    training = dataclasses.replace(UNCLIPPED, optimizer=optimizer)
    curves = losses(tmp_path, [ONE_PROCESS, *IN_BACKWARD], training=training)
    expected = curves.pop(ONE_PROCESS)
    assert expected[TRAINING.max_steps] < expected[1] - 0.2
    check(curves, expected)


def test_a_training_hops_in_and_out_of_updates_in_the_backward_pass(tmp_path: Path) -> None:
    legs = (
        plan(TORCH, 3, dp=2, optimizer_in_backward=True),
        plan(DEEPSPEED, 2, dp=2, cuts=2),
        plan(TORCH, 0, tp=2, optimizer_in_backward=True),
        plan(TORCH, 0, dp=2, cuts=2),
        plan(TORCH, 2, dp=2, optimizer_in_backward=True, activation_checkpointing=FULL),
    )
    chain, expected = hop(tmp_path, legs, dataclasses.replace(HOPPING, clip_norm=None))
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


BLOCKS = dataclasses.replace(DECODER, hidden_size=128, intermediate_size=128, num_hidden_layers=4)  # whole ones each
EIGHT_BIT = functools.partial(plan, TORCH, optimizer=Optimizer.ADAMW_8BIT)
OF_THE_SAME_BLOCKS = (
    EIGHT_BIT(0, dp=2, cuts=2),
    EIGHT_BIT(1, dp=2, cuts=2),
    EIGHT_BIT(2, dp=2, activation_checkpointing=FULL),
    EIGHT_BIT(3, dp=2, cuts=2),
    EIGHT_BIT(3, dp=2, optimizer_in_backward=True),
    EIGHT_BIT(0, pp=2, cuts=4),
)
OF_OTHER_BLOCKS = (EIGHT_BIT(0, tp=2), EIGHT_BIT(3, dp=2, tp=2))
IN_BF16 = EIGHT_BIT(0, precision=Precision.BF16), EIGHT_BIT(3, dp=2, precision=Precision.BF16)


def test_moments_in_8_bits_give_the_losses_of_one_process(tmp_path: Path) -> None:
    """To rounding where a rank holds the blocks that one process has; tensor parallelism cuts rows, and so others."""
    plans = [ONE_PROCESS, EIGHT_BIT(0), *OF_THE_SAME_BLOCKS, *OF_OTHER_BLOCKS, *IN_BF16]
    curves = losses(tmp_path, plans, training=UNCLIPPED, decoder=BLOCKS)
    in_32_bits, expected = curves.pop(ONE_PROCESS), curves.pop(EIGHT_BIT(0))
    check({each: curves[each] for each in OF_THE_SAME_BLOCKS}, expected)
    for each in OF_OTHER_BLOCKS:
        assert curves[each] == pytest.approx(expected, abs=2e-3, rel=0), in_short(each)
    alone, sharded = IN_BF16  # autocast casts other values than FSDP2 does
    assert curves[sharded] == pytest.approx(curves[alone], abs=5e-3, rel=0)
    assert expected == pytest.approx(in_32_bits, abs=5e-3, rel=0)
    assert expected != pytest.approx(in_32_bits, abs=2e-5, rel=0), "nothing was quantised"


def test_a_training_hops_in_and_out_of_moments_in_8_bits(tmp_path: Path) -> None:
    """A checkpoint has them in fp32: any plan goes on from any other's."""
    legs = (
        plan(TORCH, 0, dp=2, cuts=2),
        EIGHT_BIT(3, dp=2),
        plan(DEEPSPEED, 2, dp=2, cuts=2),
        EIGHT_BIT(0, tp=2),
        EIGHT_BIT(0, pp=2, cuts=4),
        plan(TORCH, 3, dp=2),
    )
    chain, expected = hop(tmp_path, legs, HOPPING, decoder=BLOCKS)
    assert chain == pytest.approx(expected, abs=2e-3, rel=0)


ROUNDED = functools.partial(EIGHT_BIT, precision=Precision.BF16, master_weights=MasterWeights.BF16)
OF_ROUNDED_WEIGHTS = (
    ROUNDED(0),
    ROUNDED(0, dp=2, cuts=2),
    ROUNDED(1, dp=2, cuts=2),
    ROUNDED(2, dp=2, activation_checkpointing=FULL),
    ROUNDED(3, dp=2, cuts=2),
    ROUNDED(0, pp=2, cuts=4),
    ROUNDED(0, tp=2),
    ROUNDED(3, dp=2, tp=2),
    ROUNDED(2, dp=2, pp=2, cuts=2),
)
AT_THE_END = ROUNDED(0), ROUNDED(3, dp=2)


def test_master_weights_in_bf16_stay_near_the_losses_of_fp32_ones(tmp_path: Path) -> None:
    """And an update is rounded alike within the backward pass and at its end."""
    within = [dataclasses.replace(each, optimizer_in_backward=True) for each in AT_THE_END]
    plans = dict.fromkeys((EIGHT_BIT(0), *OF_ROUNDED_WEIGHTS, *AT_THE_END, *within))
    curves = losses(tmp_path, list(plans), training=UNCLIPPED, decoder=BLOCKS)
    expected = curves[EIGHT_BIT(0)]
    for each in OF_ROUNDED_WEIGHTS:
        assert curves[each] == pytest.approx(expected, abs=5e-3, rel=0), in_short(each)
        assert curves[each] != pytest.approx(expected, abs=2e-5, rel=0), "nothing was rounded"
    for each, same in zip(AT_THE_END, within, strict=True):
        assert curves[same] == pytest.approx(curves[each], abs=TOLERANCE[Precision.FP32], rel=0), in_short(each)


def test_ranks_that_hold_one_weight_in_bf16_round_it_alike(tmp_path: Path) -> None:
    """Data-parallel copies, and an embedding that is the head of the last pipeline stage, too."""
    text = gang.ragged_text(tmp_path)
    paths = []
    for number, each in enumerate((ROUNDED(0, dp=2, cuts=2), ROUNDED(0, pp=2, cuts=4), ROUNDED(0, tp=2))):
        run = _run(tmp_path, f"copies-{number}", each, text, decoder=BLOCKS, training=UNCLIPPED)
        paths.append(str(AttemptFolder(run.attempt_folder).run))
    assert gang.finish(start_ranks("tests.training.copies", paths, 2)) == [0, 0]


def test_a_training_hops_in_and_out_of_master_weights_in_bf16(tmp_path: Path) -> None:
    legs = (
        plan(TORCH, 0, dp=2, cuts=2),
        ROUNDED(3, dp=2),
        ROUNDED(0, pp=2, cuts=4),
        plan(DEEPSPEED, 2, dp=2, cuts=2),
        ROUNDED(0, tp=2),
        plan(TORCH, 3, dp=2),
    )
    chain, expected = hop(tmp_path, legs, HOPPING, decoder=BLOCKS)
    assert chain == pytest.approx(expected, abs=5e-3, rel=0)


DROPPING_OVER_TWO = (
    plan(TORCH, 0, dp=2, cuts=2),
    plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=FULL),
    plan(TORCH, 0, pp=2, cuts=4),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
)
DROPPING_OVER_FOUR = (plan(TORCH, 2, dp=2, pp=2, cuts=2), plan(DEEPSPEED, 2, dp=4))


@pytest.mark.parametrize("dropping", [DROPPING_OVER_TWO, pytest.param(DROPPING_OVER_FOUR, marks=pytest.mark.long)])
def test_dropout_is_the_same_wherever_the_micro_batch_has_the_same_size(
    dropping: tuple[Plan, ...], tmp_path: Path
) -> None:
    reference = plan(TORCH, 0, cuts=4)
    assert {each.micro_batch_size for each in (reference, *dropping)} == {2}
    decoder = dataclasses.replace(DECODER, dropout=0.2)
    curves = losses(tmp_path, [reference, *dropping, ONE_PROCESS], decoder=decoder)
    expected = curves.pop(reference)
    other = curves.pop(ONE_PROCESS)
    check(curves, expected)
    assert other != pytest.approx(expected, abs=1e-4)  # whole batches draw other masks: dropout is really on


# Every strategy, at 1, 2, 4 and 8 ranks; legs at the same number of ranks share a launch.
CHAIN = (
    plan(TORCH, 0),
    plan(DEEPSPEED, 3, offload=Offload.PARAMETERS),
    plan(TORCH, 0, dp=2, cuts=2),
    plan(DEEPSPEED, 0, dp=2),
    plan(DEEPSPEED, 1, dp=2, offload=Offload.OPTIMIZER),
    plan(TORCH, 0, tp=2),
    plan(TORCH, 0, pp=2, cuts=4),
    plan(TORCH, 3, dp=4, dp_replicate=2),
    plan(TORCH, 0, tp=2, pp=2, cuts=4),
    plan(DEEPSPEED, 2, dp=4, cuts=2),
    plan(TORCH, 2, dp=2, pp=2, cuts=4),
    plan(TORCH, 3, dp=2, tp=2),
    plan(TORCH, 2, dp=2, tp=2, pp=2, cuts=2),
    plan(TORCH, 0, pp=4, dp=2, cuts=4),
    plan(DEEPSPEED, 3, dp=8),
    plan(TORCH, 3, dp=4, tp=2, dp_replicate=2),
    plan(DEEPSPEED, 2, dp=4, offload=Offload.OPTIMIZER),
    plan(TORCH, 0, pp=2, tp=2, cuts=8, pipeline_stages_per_rank=4),
    plan(TORCH, 3, dp=2, offload=Offload.PARAMETERS),
    plan(DEEPSPEED, 1, dp=2, cuts=4),
    plan(DEEPSPEED, 3, dp=2),
    plan(TORCH, 0, dp=2),
)
SHORT_CHAIN = (
    plan(TORCH, 0, dp=2, cuts=2),
    plan(DEEPSPEED, 3, dp=2),
    plan(TORCH, 0, tp=2),
    plan(TORCH, 0, pp=2, cuts=4),
    plan(DEEPSPEED, 2, dp=2, cuts=2),
    plan(TORCH, 3, dp=2),
    plan(TORCH, 0, pp=2, cuts=4, pipeline_stages_per_rank=2),
    plan(DEEPSPEED, 1, dp=2),
)


def test_a_training_hops_over_the_engines_of_two_ranks_and_its_curve_stays_the_same(tmp_path: Path) -> None:
    chain, expected = hop(tmp_path, SHORT_CHAIN, HOPPING)
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_training_hops_over_every_strategy_at_1_2_4_and_8_ranks_and_its_curve_stays_the_same(tmp_path: Path) -> None:
    assert {leg.world_size for leg in CHAIN} == {1, 2, 4, 8}
    chain, expected = hop(tmp_path, CHAIN, HOPPING)
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_staged_training_hops_over_every_strategy_and_its_curve_stays_the_same(tmp_path: Path) -> None:
    chain, expected = hop(tmp_path, CHAIN[2:14], STAGED)
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)
    plain = hop(tmp_path / "plain", CHAIN[:1], dataclasses.replace(STAGED, freeze=()))[1]
    assert plain != pytest.approx(expected, abs=1e-3)  # freezing is another training


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_adapters_hop_over_every_strategy_that_takes_them_and_their_curve_stays_the_same(tmp_path: Path) -> None:
    folder = tiny_hf.folder(tmp_path, "llama")
    lora = ModelSpec(hf=str(folder), lora=LoraSpec(rank=4, alpha=8.0))

    def model(run: TrainingRun, seed: int) -> ModelSpec:
        config = {"run": dataclasses.asdict(dataclasses.replace(run, model=lora)), "seed": seed}
        return ModelSpec(factory=f"{Path(__file__).with_name('seeded_lora.py')}:build", config=config)

    legs = [leg for leg in CHAIN if leg.layout.tp == leg.layout.pp == 1]
    assert len(legs) >= 12
    chain, expected = hop(tmp_path, legs, dataclasses.replace(HOPPING, learning_rate=1e-2), model)
    assert expected[len(legs)] < expected[1] - 0.1  # they learn
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


def emitted_plans(ranks: int, precision: Precision) -> list[Plan]:
    """The planner's plans for the decoder on that many devices of one node, or of two, with host offload."""
    device = DeviceSpec(
        name="any",
        kind=DeviceKind.CUDA,
        memory="80GiB",  # type: ignore[arg-type]
        bf16_tflops=1,
        fp32_tflops=1,
        memory_bandwidth="1GB/s",  # type: ignore[arg-type]
        link_bandwidth="1GB/s",  # type: ignore[arg-type]
    )
    spec = JobSpec(
        name="matrix",
        gpus=ranks,  # type: ignore[arg-type]
        global_batch_size=GLOBAL_BATCH,
        precision=precision,
        model=ModelSpec(decoder=DECODER),
        data=DataSpec(text=("text.txt",), sequence_length=SEQUENCE_LENGTH),
        training=TRAINING,
    )
    found: dict[Plan, None] = {}
    for nodes in (1, 2) if ranks > 1 else (1,):
        hardware = Hardware(device=device, devices_per_node=ranks // nodes, nodes=nodes, network_bandwidth=10**9)
        found |= dict.fromkeys(plans(spec, hardware))
    return list(found)


def one_of_each_strategy(emitted: Iterable[Plan]) -> list[Plan]:
    """Plans that differ in more than micro-batch and recomputation, each with other ones of these than the last."""
    groups: dict[Plan, list[Plan]] = {}
    for each in emitted:
        share = GLOBAL_BATCH // each.layout.dp
        micro = dataclasses.replace(each, micro_batch_size=1, gradient_accumulation_steps=share)
        alike = dataclasses.replace(micro, activation_checkpointing=FULL, full_checkpointing_layers=0)
        groups.setdefault(alike, []).append(each)
    return [group[number % len(group)] for number, group in enumerate(groups.values())]


def losses(
    home: Path,
    chosen: Sequence[Plan],
    *,
    decoder: DecoderSpec = DECODER,
    training: TrainingSpec = TRAINING,
    timeout_s: float = gang.LAUNCH_TIMEOUT_S,
) -> dict[Plan, dict[int, float]]:
    """Loss by step of a training under each plan; plans of one world size share a launch."""
    home.mkdir(exist_ok=True)
    text = gang.ragged_text(home)
    runs = {
        each: _run(home, f"plan-{n}", each, text, decoder=decoder, training=training) for n, each in enumerate(chosen)
    }
    for ranks in sorted({each.world_size for each in chosen}):
        parts = [Part(run=run) for each, run in runs.items() if each.world_size == ranks]
        for start in range(0, len(parts), LAUNCHED_TOGETHER):
            gang.launch(parts[start : start + LAUNCHED_TOGETHER], timeout_s)
    return {each: gang.losses(run) for each, run in runs.items()}


def hop(
    home: Path,
    legs: Sequence[Plan],
    training: TrainingSpec,
    model: Callable[[TrainingRun, int], ModelSpec] | None = None,
    *,
    decoder: DecoderSpec = DECODER,
) -> tuple[dict[int, float], dict[int, float]]:
    """Loss by step of one training whose legs, a step each, begin with other weights and load the last checkpoint.

    The last leg runs on to the end. Beside it, the losses of one uninterrupted process. The schedule must not depend
    on where a leg ends. Without a `model(run, seed)` it is our decoder.
    """
    assert training.schedule is Schedule.CONSTANT
    home.mkdir(exist_ok=True)
    text = gang.ragged_text(home)
    last = max(training.max_steps, len(legs))
    stops = [*range(1, len(legs)), last]

    def run(job: str, leg: Plan, stop: int, seed: int) -> TrainingRun:
        settings = dataclasses.replace(training, max_steps=stop)
        return _run(home, job, leg, text, decoder=decoder, training=settings, seed=seed, model=model)

    runs = [run("chain", leg, stop, seed) for seed, (leg, stop) in enumerate(zip(legs, stops, strict=True))]
    reference = run("reference", ONE_PROCESS, last, 0)
    for _, together in itertools.groupby([reference, *runs], key=lambda run: run.plan.world_size):
        gang.launch([Part(run=run) for run in together])
    return {step: loss for run in runs for step, loss in gang.losses(run).items()}, gang.losses(reference)


def check(curves: dict[Plan, dict[int, float]], expected: dict[int, float]) -> None:
    """Every curve is the expected one, within the tolerance of its precision; all that are not are named."""
    off = {}
    for each, curve in curves.items():
        assert curve.keys() == expected.keys(), in_short(each)
        distance = max(abs(curve[step] - expected[step]) for step in expected)
        quantised = QUANTISED if each.optimizer is Optimizer.ADAMW_8BIT else 0.0
        if not distance <= max(TOLERANCE[each.precision], quantised):
            off[f"{each.engine} {in_short(each)}"] = distance
    assert not off, "\n".join(f"{distance:.1e} {name}" for name, distance in off.items())


def _run(
    home: Path,
    job: str,
    chosen: Plan,
    text: tuple[str, ...],
    *,
    decoder: DecoderSpec = DECODER,
    training: TrainingSpec = TRAINING,
    seed: int = 0,
    model: Callable[[TrainingRun, int], ModelSpec] | None = None,
) -> TrainingRun:
    run = gang.training_run(home, job, chosen, text, training=training)
    config = {
        "decoder": dataclasses.asdict(decoder),
        "text": text,
        "sequence_length": SEQUENCE_LENGTH,
        "seed": seed,
    }
    ours = ModelSpec(factory=f"{Path(__file__).with_name('seeded_decoder.py')}:build", config=config)
    run = dataclasses.replace(run, model=model(run, seed) if model else ours)
    write_json(AttemptFolder(run.attempt_folder).run, run)
    return run
