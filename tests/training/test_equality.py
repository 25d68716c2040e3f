"""The law of the whole project: every plan, and every change of plan, gives the same training.

One of every kind stands here, and in `make test-long` what the planner really emits. A curve is that of a decoder with
tied embeddings on ragged text, with clipping that bites; all are compared with one plain process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import Hardware, list_plans
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Offload,
    Optimizer,
    Precision,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.model import DataSpec, Freeze, LoraSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, TrainingRun
from orchestrator.specs.settings import format_plan
from tests.ranks import start_ranks
from tests.training import gang, tiny_hf
from tests.training.curves import (
    DECODER,
    HOPPING,
    ONE_PROCESS,
    SHALLOW,
    SHORT,
    TOLERANCE,
    TRAINING,
    check,
    decoder_run,
    hop,
    losses,
    plan,
)
from tests.training.gang import GLOBAL_BATCH, SEQUENCE_LENGTH

TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED
SELECTIVE, FULL = ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL
BF16, FP16 = Precision.BF16, Precision.FP16
STAGED = dataclasses.replace(
    HOPPING,
    max_steps=12,
    freeze=(
        Freeze(parameters="layers.0.*", until_step=3),
        Freeze(parameters="*embed_tokens*", until_step=7),
    ),
)

# What the hops below do not have; one of every other kind is long.
COVERING = (
    plan(TORCH, 1, dp=2, cuts=2, precision=BF16, activation_checkpointing=SELECTIVE),
    plan(TORCH, 3, dp=2, cuts=4, activation_checkpointing=FULL, activation_offload=True),
    plan(TORCH, 0, tp=2, cuts=2, activation_checkpointing=SELECTIVE),
    plan(DEEPSPEED, 2, dp=2, precision=FP16),
)
ALSO_COVERING = (
    plan(TORCH, 0, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
    plan(TORCH, 0, dp=2, precision=FP16),
    plan(TORCH, 2, dp=2, cuts=2),
    plan(TORCH, 3, dp=2, cuts=2, precision=BF16),
    plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=3),
    plan(TORCH, 0, tp=2, precision=BF16),
    plan(TORCH, 0, pp=2, cuts=4, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
    plan(TORCH, 0, pp=2, cuts=4, first_stage_layers=3, last_stage_layers=1),
    plan(TORCH, 0, pp=2, cuts=4, pipeline_stages_per_rank=2, activation_checkpointing=FULL),
    plan(TORCH, 3, cp=2, cuts=2, activation_checkpointing=SELECTIVE),
    plan(DEEPSPEED, 1, dp=2, cuts=2),
    plan(DEEPSPEED, 3, dp=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=FULL, activation_offload=True),
    plan(TORCH, 3, dp=4, dp_replicate=2),
    plan(TORCH, 2, dp=2, pp=2, cuts=2),
    plan(TORCH, 0, dp=2, pp=2, cuts=4, precision=BF16),
    plan(TORCH, 0, tp=2, pp=2, cuts=4, activation_checkpointing=FULL),
    plan(TORCH, 3, cp=2, tp=2, cuts=4),
)
# Kinds that the planner emits for long sequences, few devices or by hand only.
RARE = {
    2: (
        plan(TORCH, 0, pp=2, cuts=4, activation_checkpointing=FULL, activation_offload=True),
        plan(TORCH, 0, tp=2, cuts=2, activation_checkpointing=FULL, activation_offload=True),
        plan(TORCH, 3, tp=2, cuts=4, activation_checkpointing=FULL, precision=FP16),
        plan(TORCH, 2, pp=2, cuts=4, activation_checkpointing=FULL, precision=BF16),
        plan(TORCH, 2, tp=2, cuts=4, activation_checkpointing=SELECTIVE),
        plan(TORCH, 2, pp=2, cuts=4, precision=FP16),
        plan(TORCH, 0, cp=2, cuts=4, activation_checkpointing=FULL),
        plan(
            TORCH, 2, cp=2, cuts=4, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1
        ),
        plan(TORCH, 3, cp=2, cuts=8, precision=BF16),
        plan(TORCH, 0, cp=2, cuts=4, precision=BF16, activation_checkpointing=SELECTIVE),
        plan(TORCH, 2, cp=2, cuts=8, precision=FP16),
    ),
    4: (
        plan(TORCH, 2, tp=2, pp=2, cuts=4),
        plan(TORCH, 2, cp=2, pp=2, cuts=4),
        plan(TORCH, 0, cp=4, activation_checkpointing=FULL),
        plan(TORCH, 3, dp=2, tp=2),
        plan(TORCH, 1, dp=2, tp=2, cuts=2),
        plan(TORCH, 0, dp=2, pp=2, cuts=4, pipeline_stages_per_rank=2),
        plan(TORCH, 0, pp=4, cuts=4, last_stage_layers=1),
        plan(TORCH, 2, dp=2, pp=2, cuts=2, first_stage_layers=5, last_stage_layers=3),
        plan(
            TORCH,
            0,
            dp=2,
            pp=2,
            cuts=2,
            pipeline_stages_per_rank=2,
            first_stage_layers=3,
            last_stage_layers=1,
        ),
        plan(
            TORCH,
            2,
            dp=2,
            pp=2,
            cuts=2,
            pipeline_stages_per_rank=2,
            activation_checkpointing=SELECTIVE,
        ),
        plan(TORCH, 0, tp=2, pp=2, cuts=2, pipeline_stages_per_rank=2),
        plan(TORCH, 3, dp=2, cp=2, cuts=2),
        plan(TORCH, 0, dp=2, cp=2, cuts=2, activation_checkpointing=FULL),
        plan(TORCH, 0, cp=2, pp=2, cuts=8, activation_checkpointing=SELECTIVE),
        plan(TORCH, 2, cp=2, pp=2, cuts=8, pipeline_stages_per_rank=2),
    ),
    8: (
        plan(TORCH, 3, dp=4, tp=2, dp_replicate=2),
        plan(TORCH, 2, dp=4, pp=2, cuts=2, dp_replicate=2),
        plan(TORCH, 2, dp=2, tp=2, pp=2, cuts=4, pipeline_stages_per_rank=2, precision=BF16),
        plan(TORCH, 3, dp=4, cp=2, cuts=2, dp_replicate=2),
        plan(TORCH, 2, dp=2, cp=2, tp=2, cuts=4, activation_checkpointing=SELECTIVE),
        plan(TORCH, 2, cp=2, tp=2, pp=2, cuts=8, precision=BF16),
    ),
}


@pytest.mark.parametrize("kinds", [COVERING, pytest.param(ALSO_COVERING, marks=pytest.mark.long)])
def test_every_kind_of_plan_gives_the_losses_of_one_process(
    tmp_path: Path, kinds: tuple[Plan, ...]
) -> None:
    curves = losses(tmp_path, [ONE_PROCESS, *kinds])
    expected = curves.pop(ONE_PROCESS)
    assert expected[SHORT.max_steps] < expected[1] - 0.2  # else equal curves would say little
    check(curves, expected)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", RARE)
def test_rare_kinds_of_plans_give_the_losses_of_one_process(tmp_path: Path, ranks: int) -> None:
    decoder = dataclasses.replace(SHALLOW, num_hidden_layers=8)
    curves = losses(
        tmp_path, [ONE_PROCESS, *RARE[ranks]], decoder=decoder, training=TRAINING, timeout_s=3000
    )
    expected = curves.pop(ONE_PROCESS)
    check(curves, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [{"tp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.long)]
)
def test_tokens_that_ranks_cannot_share_evenly_give_the_losses_of_one_process(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    text, odd = gang.ragged_text(tmp_path), SEQUENCE_LENGTH - 1
    runs = [
        decoder_run(
            tmp_path,
            name,
            dataclasses.replace(case, sequence_length=odd),
            text,
            sequence_length=odd,
        )
        for name, case in (
            ("one", plan(TORCH, 0, cuts=8)),
            ("several", plan(TORCH, 0, cuts=8, **layout)),
        )
    ]
    for run in runs:
        gang.launch([gang.Part(run=run)])
    single, several = map(gang.losses, runs)
    assert len(single) == SHORT.max_steps
    assert several == pytest.approx(single, abs=TOLERANCE[Precision.FP32], rel=0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_give_the_losses_of_layers_that_are_not(tmp_path: Path) -> None:
    layouts = (
        plan(TORCH, 0, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
        plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=FULL, precision=BF16),
        plan(TORCH, 0, tp=2, cuts=4),
        plan(TORCH, 3, tp=2, cuts=4, activation_checkpointing=SELECTIVE),
        plan(TORCH, 2, pp=2, cuts=4),
    )
    expected = losses(tmp_path / "one", [ONE_PROCESS], training=TRAINING)[ONE_PROCESS]
    compiled = [dataclasses.replace(layout, compiled=True) for layout in layouts]
    check(losses(tmp_path / "compiled", compiled, training=TRAINING, timeout_s=800), expected)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "freeze",
    [
        (
            Freeze(parameters="embed*", until_step=3),
            Freeze(parameters="layers.[01].*", until_step=5),
        ),
        tuple(Freeze(parameters=name) for name in ("layers.[23].*", "norm*", "lm_head*")),
    ],
)
def test_stages_that_train_nothing_at_first_or_at_all_change_nothing(
    tmp_path: Path, freeze: tuple[Freeze, ...]
) -> None:
    decoder = dataclasses.replace(SHALLOW, tie_word_embeddings=False)
    layouts = [plan(TORCH, stage, dp=2, pp=2, cuts=2) for stage in (0, 2)]
    layouts += [plan(TORCH, 0, pp=4, cuts=4), plan(TORCH, 0, tp=2, pp=2, cuts=4)]
    training = dataclasses.replace(TRAINING, freeze=freeze)
    curves = losses(tmp_path, [ONE_PROCESS, *layouts], decoder=decoder, training=training)
    expected = curves.pop(ONE_PROCESS)
    check(curves, expected)


@pytest.mark.long
@pytest.mark.timeout(10800)  # 327 plans on 8 ranks, 15 s each on two idle cores (2026-11-26)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_plan_that_the_planner_emits_gives_the_losses_of_one_process(
    tmp_path: Path, ranks: int
) -> None:
    emitted = emitted_plans(ranks, Precision.FP32)
    assert len(emitted) > 80
    for precision in (BF16, FP16) if ranks <= 2 else (BF16,):
        emitted += one_of_each_strategy(emitted_plans(ranks, precision))
    for layers, stages in ((4, range(5)), (8, range(5, 9))):
        chosen = [
            option
            for option in emitted
            if option.layout.pp * option.pipeline_stages_per_rank in stages
        ]
        if chosen:
            decoder = dataclasses.replace(DECODER, num_hidden_layers=layers)
            home, every = tmp_path / f"{layers}-layers", [ONE_PROCESS, *chosen]
            curves = losses(home, every, decoder=decoder, training=TRAINING, timeout_s=3500)
            expected = curves.pop(ONE_PROCESS)
            check(curves, expected)


IN_BACKWARD = (
    plan(TORCH, 0, optimizer_in_backward=True, activation_checkpointing=SELECTIVE, precision=BF16),
    plan(TORCH, 0, tp=2, optimizer_in_backward=True),
    plan(TORCH, 2, dp=2, optimizer_in_backward=True),
    plan(TORCH, 3, dp=2, optimizer_in_backward=True, activation_checkpointing=FULL),
)
ALSO_IN_BACKWARD = (
    plan(TORCH, 0, optimizer_in_backward=True),
    plan(TORCH, 3, dp=2, optimizer_in_backward=True, precision=BF16),
)


@pytest.mark.parametrize(
    ("optimizer", "inside"),
    [
        (Optimizer.ADAMW, IN_BACKWARD),
        pytest.param(Optimizer.ADAMW, ALSO_IN_BACKWARD, marks=pytest.mark.long),
        pytest.param(Optimizer.SGD, (*IN_BACKWARD, *ALSO_IN_BACKWARD), marks=pytest.mark.long),
    ],
)
def test_updates_in_the_backward_pass_give_the_losses_of_one_process(
    tmp_path: Path, optimizer: Optimizer, inside: tuple[Plan, ...]
) -> None:
    training = dataclasses.replace(
        TRAINING if inside != IN_BACKWARD else SHORT, clip_norm=None, optimizer=optimizer
    )
    curves = losses(tmp_path, [ONE_PROCESS, *inside], training=training)
    expected = curves.pop(ONE_PROCESS)
    assert expected[training.max_steps] < expected[1] - 0.2
    check(curves, expected)


UNCLIPPED = dataclasses.replace(SHORT, clip_norm=None, learning_rate=TRAINING.learning_rate)
BLOCKS = dataclasses.replace(
    DECODER, hidden_size=128, intermediate_size=128, num_hidden_layers=2
)  # whole ones each
EIGHT_BIT = functools.partial(plan, TORCH, optimizer=Optimizer.ADAMW_8BIT)
ROUNDED = functools.partial(EIGHT_BIT, precision=BF16, master_weights=MasterWeights.BF16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InBlocks:
    """Plans with moments in 8 bits, by what they are compared with."""

    same: tuple[Plan, ...]  # a rank holds the blocks that one process has
    other: tuple[Plan, ...]  # tensor parallelism cuts rows, and so other blocks
    sharded: tuple[Plan, ...]  # in bf16, beside one process
    rounded: tuple[Plan, ...]  # with weights in bf16
    at_the_end: tuple[Plan, ...]  # beside the same updated within the backward pass

    @property
    def within(self) -> list[Plan]:
        return [
            dataclasses.replace(late_plan, optimizer_in_backward=True)
            for late_plan in self.at_the_end
        ]

    @property
    def all(self) -> list[Plan]:
        alone = (ONE_PROCESS, EIGHT_BIT(0), EIGHT_BIT(0, precision=BF16))
        every = (
            *alone,
            *self.same,
            *self.other,
            *self.sharded,
            *self.rounded,
            *self.at_the_end,
            *self.within,
        )
        return list(dict.fromkeys(every))


FEW = InBlocks(
    same=(EIGHT_BIT(3, dp=2, optimizer_in_backward=True), EIGHT_BIT(0, pp=2, cuts=4)),
    other=(EIGHT_BIT(0, tp=2),),
    sharded=(),
    rounded=(ROUNDED(0, dp=2, cuts=2), ROUNDED(3, dp=2)),
    at_the_end=(ROUNDED(3, dp=2),),
)
MORE = InBlocks(
    same=(
        *(EIGHT_BIT(stage, dp=2, cuts=2) for stage in (0, 1, 3)),
        EIGHT_BIT(2, dp=2, activation_checkpointing=FULL),
    ),
    other=(EIGHT_BIT(3, dp=2, tp=2),),
    sharded=(EIGHT_BIT(3, dp=2, precision=BF16),),
    rounded=(
        ROUNDED(0),
        ROUNDED(0, pp=2, cuts=4),
        ROUNDED(0, tp=2),
        *(ROUNDED(stage, dp=2, cuts=2) for stage in (1, 3)),
        ROUNDED(2, dp=2, activation_checkpointing=FULL),
        ROUNDED(3, dp=2, tp=2),
        ROUNDED(2, dp=2, pp=2, cuts=2),
    ),
    at_the_end=(ROUNDED(0),),
)


@pytest.mark.long
@pytest.mark.parametrize("plans", [FEW, pytest.param(MORE, marks=pytest.mark.long)])
def test_moments_in_8_bits_and_weights_in_bf16_give_the_losses_of_one_process(
    tmp_path: Path, plans: InBlocks
) -> None:
    """Losses are equal to rounding where blocks are equal. An update is rounded alike within the backward pass."""
    curves = losses(tmp_path, plans.all, training=UNCLIPPED, decoder=BLOCKS)
    in_32_bits, expected, in_bf16 = (
        curves[ONE_PROCESS],
        curves[EIGHT_BIT(0)],
        curves[EIGHT_BIT(0, precision=BF16)],
    )
    check({same_plan: curves[same_plan] for same_plan in plans.same}, expected)
    for case in plans.other:
        assert curves[case] == pytest.approx(expected, abs=2e-3, rel=0), format_plan(case)
    for case in plans.sharded:  # autocast casts other values than FSDP2 does
        assert curves[case] == pytest.approx(in_bf16, abs=5e-3, rel=0), format_plan(case)
    assert expected == pytest.approx(in_32_bits, abs=5e-3, rel=0)
    assert expected != pytest.approx(in_32_bits, abs=2e-5, rel=0), "nothing was quantised"
    for case in plans.rounded:
        assert curves[case] == pytest.approx(expected, abs=5e-3, rel=0), format_plan(case)
        assert curves[case] != pytest.approx(expected, abs=2e-5, rel=0), "nothing was rounded"
    for case, same in zip(plans.at_the_end, plans.within, strict=True):
        assert curves[same] == pytest.approx(curves[case], abs=TOLERANCE[Precision.FP32], rel=0), (
            format_plan(case)
        )


@pytest.mark.long
def test_ranks_that_hold_one_weight_in_bf16_round_it_alike(tmp_path: Path) -> None:
    """Data-parallel copies, and an embedding that is the head of the last pipeline stage, too."""
    text = gang.ragged_text(tmp_path)
    paths = []
    for number, copied_plan in enumerate(
        (ROUNDED(0, dp=2, cuts=2), ROUNDED(0, pp=2, cuts=4), ROUNDED(0, tp=2))
    ):
        run = decoder_run(
            tmp_path, f"copies-{number}", copied_plan, text, decoder=BLOCKS, training=UNCLIPPED
        )
        paths.append(str(AttemptFolder(run.attempt_folder).run))
    assert gang.finish(start_ranks("tests.training.copies", paths, 2)) == [0, 0]


DROPPING_OVER_TWO = (
    plan(TORCH, 3, dp=2, cuts=2, activation_checkpointing=FULL),
    plan(TORCH, 0, pp=2, cuts=4),
    plan(DEEPSPEED, 3, dp=2, cuts=2, activation_checkpointing=SELECTIVE),
)
DROPPING_OVER_FOUR = (
    plan(TORCH, 2, dp=2, pp=2, cuts=2),
    plan(DEEPSPEED, 2, dp=4),
    plan(TORCH, 3, dp=4, dp_replicate=2),
    plan(TORCH, 0, dp=2, pp=2, cuts=2, pipeline_stages_per_rank=2),
)


@pytest.mark.parametrize(
    "dropping", [DROPPING_OVER_TWO, pytest.param(DROPPING_OVER_FOUR, marks=pytest.mark.long)]
)
def test_dropout_is_the_same_wherever_the_micro_batch_has_the_same_size(
    dropping: tuple[Plan, ...], tmp_path: Path
) -> None:
    reference = plan(TORCH, 0, cuts=4)
    assert {dropped_plan.micro_batch_size for dropped_plan in (reference, *dropping)} == {2}
    decoder = dataclasses.replace(SHALLOW, dropout=0.2)
    curves = losses(tmp_path, [reference, *dropping, ONE_PROCESS], decoder=decoder)
    expected = curves.pop(reference)
    other = curves.pop(ONE_PROCESS)
    check(curves, expected)
    assert other != pytest.approx(
        expected, abs=1e-4
    )  # whole batches draw other masks: dropout is really on


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
    plan(TORCH, 0, tp=2, optimizer_in_backward=True),
    plan(TORCH, 0, pp=2, cuts=4, first_stage_layers=3, last_stage_layers=1),
    plan(DEEPSPEED, 2, dp=2, cuts=2),
    plan(TORCH, 3, dp=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
    plan(TORCH, 0, pp=2, cuts=4, pipeline_stages_per_rank=2),
    plan(TORCH, 3, dp=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=2),
    plan(TORCH, 3, cp=2),
    plan(DEEPSPEED, 1, dp=2),
    plan(TORCH, 2, dp=2, optimizer_in_backward=True, activation_checkpointing=FULL),
    plan(TORCH, 0, dp=2),
)
QUANTISED_CHAIN = (
    plan(TORCH, 0, dp=2, cuts=2),
    EIGHT_BIT(3, dp=2),
    plan(DEEPSPEED, 2, dp=2, cuts=2),
    EIGHT_BIT(0, tp=2),
    EIGHT_BIT(0, pp=2, cuts=4),
    plan(TORCH, 3, dp=2),
)
ROUNDED_CHAIN = (
    plan(TORCH, 0, dp=2, cuts=2),
    ROUNDED(3, dp=2),
    ROUNDED(0, pp=2, cuts=4),
    plan(DEEPSPEED, 2, dp=2, cuts=2),
    ROUNDED(0, tp=2),
    plan(TORCH, 3, dp=2),
)


def test_a_training_hops_over_the_engines_of_two_ranks_and_its_curve_stays_the_same(
    tmp_path: Path,
) -> None:
    """Plans also change to and from updates in the backward pass, which cannot clip, and to other layers in stages."""
    chain, expected = hop(tmp_path, SHORT_CHAIN, dataclasses.replace(HOPPING, clip_norm=None))
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("legs", "tolerance"),
    [(QUANTISED_CHAIN, 2e-3), pytest.param(ROUNDED_CHAIN, 5e-3, marks=pytest.mark.long)],
)
def test_a_training_hops_in_and_out_of_moments_in_8_bits_and_weights_in_bf16(
    tmp_path: Path, legs: tuple[Plan, ...], tolerance: float
) -> None:
    """A checkpoint has them in fp32: any plan goes on from any other's."""
    training = dataclasses.replace(HOPPING, max_steps=len(legs))
    chain, expected = hop(tmp_path, legs, training, decoder=BLOCKS)
    assert chain == pytest.approx(expected, abs=tolerance, rel=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_training_hops_over_every_strategy_at_1_2_4_and_8_ranks_and_its_curve_stays_the_same(
    tmp_path: Path,
) -> None:
    assert {leg.world_size for leg in CHAIN} == {1, 2, 4, 8}
    chain, expected = hop(tmp_path, CHAIN, HOPPING, decoder=DECODER)
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_staged_training_hops_over_every_strategy_and_its_curve_stays_the_same(
    tmp_path: Path,
) -> None:
    chain, expected = hop(tmp_path, CHAIN[2:14], STAGED, decoder=DECODER)
    assert chain == pytest.approx(expected, abs=TOLERANCE[Precision.FP32], rel=0)
    plain = hop(
        tmp_path / "plain", CHAIN[:1], dataclasses.replace(STAGED, freeze=()), decoder=DECODER
    )[1]
    assert plain != pytest.approx(expected, abs=1e-3)  # freezing is another training


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_adapters_hop_over_every_strategy_that_takes_them_and_their_curve_stays_the_same(
    tmp_path: Path,
) -> None:
    folder = tiny_hf.folder(tmp_path, "llama")
    lora = ModelSpec(hf=str(folder), lora=LoraSpec(rank=4, alpha=8.0))

    def model(run: TrainingRun, seed: int) -> ModelSpec:
        config = {"run": dataclasses.asdict(dataclasses.replace(run, model=lora)), "seed": seed}
        return ModelSpec(
            factory=f"{Path(__file__).with_name('seeded_lora.py')}:build", config=config
        )

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
    emitted: dict[Plan, None] = {}
    for nodes in (1, 2) if ranks > 1 else (1,):
        hardware = Hardware(
            device=device, devices_per_node=ranks // nodes, nodes=nodes, network_bandwidth=10**9
        )
        emitted |= dict.fromkeys(list_plans(read_plan_request(spec), hardware))
    return list(emitted)


def one_of_each_strategy(emitted: Iterable[Plan]) -> list[Plan]:
    """Plans that differ in more than micro-batch and recomputation, each with other ones of these than the last."""
    groups: dict[Plan, list[Plan]] = {}
    for option in emitted:
        share = GLOBAL_BATCH // option.layout.dp
        micro = dataclasses.replace(option, micro_batch_size=1, gradient_accumulation_steps=share)
        alike = dataclasses.replace(
            micro, activation_checkpointing=FULL, full_checkpointing_layers=0
        )
        groups.setdefault(alike, []).append(option)
    return [group[number % len(group)] for number, group in enumerate(groups.values())]
