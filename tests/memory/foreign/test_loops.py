"""Laws of loops that people write themselves: what of the model's outputs lives on, and who cuts what under FSDP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.foreign.activations import (
    _working_score,
    kept_bytes,
    saved_bytes,
    transient_bytes,
    working_bytes,
)
from orchestrator.memory.foreign.engines import _all_moments
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training, layer_held
from tests.memory.foreign.parts import but

ROW = {
    "id": "x1",
    "model": "Llama-2 7B",
    "framework": "lightning-thunder benchmark_litgpt",
    "n_gpus": "8",
    "micro_batch": "1",
    "seq_len": "4096",
    "precision": "bf16-true",
    "act_ckpt": "False",
    "optimizer": "AdamW fused",
}

COMPILED = {"framework": "torchtitan FSDP2 (2025-09)", "compile_or_other": "compile"}

MOMENTS = ("backward of last layer", "gradient reduction of last layer")


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


@pytest.mark.parametrize(
    ("sharding", "framework", "stage"),
    [
        ("FSDP FULL_SHARD (zero3)", Framework.FSDP1, 3),
        ("FSDP1 SHARD_GRAD_OP (zero2)", Framework.FSDP1, 2),
        ("FSDP2 zero2", Framework.FSDP2, 2),
        ("ZeRO-2", Framework.DEEPSPEED, 2),
        ("zero3", Framework.DEEPSPEED, 3),
    ],
)
def test_what_fsdp_calls_zero_is_not_deepspeed(sharding: str, framework: Framework, stage: int) -> None:
    training = read(sharding=sharding)
    assert (training.framework, training.zero_stage) == (framework, stage)


@pytest.mark.parametrize(
    ("loss", "bytes_of_a_logit", "held_bytes"),
    [
        (Loss.LABELS, 12, 14),
        (Loss.PLAIN, 12, 16),
        (Loss.UPCAST, 14, 14),
        (Loss.LOW, 6, 8),
        (Loss.COMPILED, 4, 6),
        (Loss.SUMMED, 4, 4),
    ],
)
def test_logits_that_a_loop_holds_are_beside_their_gradients(
    loss: Loss, bytes_of_a_logit: int, held_bytes: int
) -> None:
    training = replace(read(framework="HF Trainer"), loss=loss)
    logits = training.tokens * training.shape.vocab
    held = replace(training, holds_outputs=True)
    beside = head_bytes(training) - bytes_of_a_logit * logits
    assert head_bytes(held) - held_bytes * logits == beside
    assert 0 < beside < logits


def test_torchtitans_loss_over_cut_logits_is_of_elementary_operations() -> None:
    said = {"framework": "torchtitan FSDP2", "sharding": "FULL_SHARD"}
    whole, cut, compiled = (read(**said | more) for more in ({}, {"tp": "2"}, {"tp": "2"} | COMPILED))
    assert (whole.loss, cut.loss, compiled.loss) == (Loss.PLAIN, Loss.SPREAD, Loss.COMPILED)
    logits = cut.target_tokens * cut.shape.vocab // 2
    assert head_bytes(cut) - head_bytes(replace(cut, loss=Loss.PLAIN)) == 4 * logits


@pytest.mark.parametrize("framework", ["nanoGPT train.py", "PyTorch 2.8 (own loop, after nanoGPT)"])
def test_a_compiled_model_that_returns_its_loss_stores_no_wide_logits(framework: str) -> None:
    row = OWN | {"framework": framework, "precision": "bf16 autocast"}
    compiled = read(**row, compile_or_other="torch.compile")
    assert (compiled.loss, compiled.holds_outputs) == (Loss.COMPILED, True)
    assert read(**row).loss is Loss.LABELS
    # the loss of a loop is not in what it compiled
    assert read(**OWN, precision="bf16 autocast", compile_or_other="torch.compile").loss is Loss.LABELS


def test_thunder_trains_the_models_of_litgpt_in_a_loop_of_its_own() -> None:
    thunder, litgpt = read(), read(framework="LitGPT pretrain")
    assert thunder.kernels.joint_projection
    assert litgpt.kernels.joint_projection
    assert (thunder.loss, litgpt.loss) == (Loss.LOW, Loss.LISTED)
    assert thunder.holds_outputs
    assert not litgpt.holds_outputs


def test_a_loop_that_deletes_what_the_model_returned_holds_no_logits() -> None:
    loops = ("PyTorch (own loop)", "Universal LLM trainer (own loop, HF transformers 4.49)")
    assert [read(framework=name).holds_outputs for name in loops] == [True, False]


@pytest.mark.parametrize("said", ["Gemma-2-2b", "google/gemma-2-9b-it", "Gemma 2 27B"])
def test_a_tanh_that_caps_scores_and_logits_keeps_what_it_returned(said: str) -> None:
    capped = read(model=said, framework="HF Trainer", seq_len="512")
    plain = replace(capped, shape=replace(capped.shape, capped=False))
    assert saved_bytes(capped) - saved_bytes(plain) == 2 * capped.tokens * capped.shape.heads * 512
    assert head_bytes(capped) - head_bytes(plain) == 2 * capped.tokens * capped.shape.vocab


OWN = {
    "model": "own",
    "arch": "L12 h768 a12 ffn4x V50257 learned-pos",
    "framework": "PyTorch (own loop)",
    "n_gpus": "1",
}


def test_sgd_without_states_steps_in_place_and_leaves_its_activations_where_they_lay() -> None:
    plain, momentum = (read(**OWN | {"optimizer": name}, seq_len="512") for name in ("SGD", "SGD momentum"))
    assert "optimizer temporaries" in live(momentum, "optimizer step")
    assert "optimizer temporaries" not in {cause for cause, count in live(plain, "optimizer step").items() if count}
    pooled = {name: left for name, _, left in _all_moments(plain)}
    assert pooled["optimizer step"] == 0 < {name: left for name, _, left in _all_moments(momentum)}["optimizer step"]


@pytest.mark.parametrize("said", ["none", "None (gradients only)", "no optimizer", "no step"])
def test_where_nothing_is_stepped_gradients_and_weights_are_all_that_training_adds(said: str) -> None:
    step = live(read(**OWN | {"optimizer": said, "precision": "fp32"}, seq_len="512"), "optimizer step")
    assert {cause for cause, count in step.items() if count} == {"parameters", "gradients"}
    masters = read(framework="DeepSpeed", sharding="ZeRO-2", optimizer=said).optimizer.masters
    assert not masters


def test_no_adapters_are_not_no_optimizer() -> None:
    assert live(read(**OWN | {"optimizer": ""}, peft="none", seq_len="512"), "optimizer step")["optimizer states"]


def test_gradients_held_back_have_the_type_that_the_engine_adds_them_up_in() -> None:
    row = {"sharding": "FULL_SHARD", "framework": "HF Trainer FSDP", "precision": "bf16", "grad_accum": "4"}
    moment = "backward of last layer"
    mixed = read(**row)
    parameters = mixed.shape.parameters
    assert mixed.autocasts
    assert live(mixed, moment)["gradients"] == 2 * parameters
    assert live(but(mixed, "fsdp", reduces_fp32=True), moment)["gradients"] == 2 * parameters
    second = replace(mixed, framework=Framework.FSDP2)
    assert live(second, moment)["gradients"] == 2 * parameters
    assert live(but(second, "fsdp", reduces_fp32=True), moment)["gradients"] == 4 * parameters
    assert live(but(mixed, "fsdp", unsynced=False), moment)["gradients"] == 4 * parameters // 8


@pytest.mark.parametrize("precision", ["bf16 autocast", "bf16 mixed", "fp16 amp"])
def test_a_loop_of_ones_own_autocasts_only_where_it_says_so(precision: str) -> None:
    bare, trainer = read(**OWN, precision="bf16"), read(**OWN | {"framework": "PyTorch"}, precision="bf16")
    casting = read(**OWN, precision=precision)
    assert (bare.autocasts, trainer.autocasts, casting.autocasts) == (False, True, True)
    assert (bare.weight_bytes, casting.weight_bytes) == (2, 4)


def test_logits_are_wide_only_where_something_casts_them() -> None:
    bare, casting = read(**OWN, precision="bf16"), read(**OWN, precision="bf16 autocast")
    assert (bare.loss, casting.loss) == (Loss.LOW, Loss.LABELS)
    summed = read(**OWN | {"framework": "HF transformers"}, compile_or_other="loss is the sum of the logits")
    assert summed.loss is Loss.SUMMED
    theirs = read(**OWN | {"framework": "HF transformers 4.40 (own loop)"}, precision="bf16")
    assert theirs.loss is Loss.PLAIN  # modeling_llama.py: logits.float()


@pytest.mark.parametrize(
    ("framework", "model", "of_a_score"),
    [
        (
            "HF transformers 5.0 (own loop)",
            "Llama-2 7B",
            16,
        ),  # in fp32: result, gradient, their product, what it returns
        ("Megatron-LM", "GPT-3 6.7B", 9),  # in low precision and in place, with a mask and what dropout returns
    ],
)
def test_while_attention_goes_backward_four_of_each_score_are_there_but_in_kernels_that_work_in_place(
    framework: str, model: str, of_a_score: int
) -> None:
    eager = read(framework=framework, model=model, precision="bf16", compile_or_other="eager attention")
    flash = but(eager, "kernels", flash=True)
    scores = eager.tokens * eager.shape.heads * eager.sequence_length // eager.tp
    beside = transient_bytes(flash) - transient_bytes(eager) + _working_score(eager) * scores
    assert saved_bytes(eager) - saved_bytes(flash) + _working_score(eager) * scores == of_a_score * scores
    assert beside > 0  # gradients inside of the feed-forward part are gone by then


@pytest.mark.parametrize(
    ("model", "version", "of_a_score"),
    [
        ("pythia-410m", "4.41", 6),
        ("EleutherAI/gpt-neox-20b", "4.30", 6),
        ("pythia-410m", "4.46", 2),
        ("pythia-410m", "5.0", 2),
        ("EleutherAI/gpt-neo-1.3B", "5.0", 6),
        ("gpt-j-6b", "4.46", 6),
        ("bert-base-uncased", "4.40", 5),
        ("facebook/opt-1.3b", "4.41", 8),
    ],
)
def test_a_score_is_kept_as_the_code_of_its_model_has_it(model: str, version: str, of_a_score: int) -> None:
    row = {"model": model, "framework": f"HF transformers {version} (own loop)", "precision": "fp16"}
    eager, flash = (read(**row, compile_or_other=f"{name} attention") for name in ("eager", "flash"))
    turned = 4 * eager.tokens * eager.shape.hidden if of_a_score == 6 else 0  # q and k, two bytes more each
    scores = eager.tokens * eager.shape.heads * eager.sequence_length
    assert saved_bytes(eager) - saved_bytes(flash) == of_a_score * scores + turned
    assert not flash.kernels.own_score_bytes


def test_opts_softmax_is_wide_in_fp16_alone() -> None:
    row = {"model": "facebook/opt-1.3b", "framework": "HF transformers 4.41 (own loop)"}
    assert [read(**row, precision=said).kernels.own_score_bytes for said in ("fp16", "bf16")] == [8, 4]
    assert not read(**row | {"framework": "Megatron-LM"}, precision="fp16").kernels.own_score_bytes


def live(training: Training, moment: str) -> dict[str, int]:
    return next(dict(causes) for name, causes, _ in _all_moments(training) if name == moment)


@pytest.mark.parametrize(
    ("sharding", "stage"),
    [("ZeroRedundancyOptimizer", 1), ("fairscale OSS", 1), ("sharded_ddp simple", 2), ("ddp_sharded", 2)],
)
def test_sharding_beside_ddp_cuts_states_and_leaves_the_model_whole(sharding: str, stage: int) -> None:
    ddp, sharded = (
        read(framework="PyTorch", n_gpus="4", sharding=name, precision="fp32", seq_len="64")
        for name in ("DDP", sharding)
    )
    assert (sharded.framework, sharded.zero_stage) == (Framework.PLAIN, stage)
    whole, cut = live(ddp, "optimizer step"), live(sharded, "optimizer step")
    assert cut["parameters"] == whole["parameters"]
    assert cut["optimizer states"] == whole["optimizer states"] // 4
    assert cut["gradients"] == whole["gradients"] // (4 if stage == 2 else 1)
    assert (cut["gradient buckets"] < whole["gradient buckets"]) == (stage == 2)


@pytest.mark.parametrize(("framework", "temporaries"), [("PyTorch FSDP", True), ("composer FSDP1", False)])
def test_torchs_adam_has_a_temporary_of_every_shard_and_composers_has_none(framework: str, temporaries: bool) -> None:
    step = live(read(framework=framework, sharding="FULL_SHARD", optimizer="AdamW"), "optimizer step")
    assert (step.get("optimizer temporaries", 0) > 0) is temporaries


def test_fairseq_trains_a_half_model_beside_fp32_copies_and_drops_nothing_out_of_gpt_3() -> None:
    fairseq, composer = (
        read(model="GPT-3 13B", framework=f"{name} FSDP", precision="fp16") for name in ("fairseq", "composer")
    )
    assert (fairseq.autocasts, fairseq.optimizer.masters, fairseq.shape.dropout) == (False, True, False)
    assert (composer.autocasts, composer.optimizer.masters, composer.shape.dropout) == (True, False, True)


def test_lightnings_deepspeed_reduces_200_million_elements_while_it_fills_as_many() -> None:
    bare, lightning = (
        read(framework=f"DeepSpeed{more}", sharding="ZeRO-2", precision="fp16") for more in ("", " (Lightning)")
    )
    assert live(bare, MOMENTS[0])["buckets"] == 2 * 500_000_000
    assert live(lightning, MOMENTS[0])["buckets"] == 2 * 2 * 200_000_000
    told = read(framework="DeepSpeed (Lightning Fabric)", sharding="ZeRO-2", compile_or_other="bucket size 1e8")
    assert told.deepspeed.bucket_elements == 10**8


@pytest.mark.parametrize(("stage", "of_share"), [(1, 16), (2, 8)])
def test_gradients_of_a_share_are_twice_there_before_they_are_cast_and_gone_as_it_is_stepped(
    stage: int, of_share: int
) -> None:
    for framework in ("DeepSpeed", "HF Trainer + DeepSpeed"):  # with and without the temporaries of torch's step
        training = read(framework=framework, sharding=f"ZeRO-{stage}", precision="bf16", optimizer="AdamW")
        step = live(training, "optimizer step")
        share = training.shape.parameters // 8
        assert step["gradients"] + step["optimizer temporaries"] == pytest.approx(of_share * share, rel=1e-3)


@pytest.mark.parametrize(("stage", "released"), [(1, 10**9), (2, 10**9), (3, 0)])
def test_below_stage_3_buckets_are_gone_as_the_optimizer_steps_but_for_their_segment(stage: int, released: int) -> None:
    training = read(framework="DeepSpeed", sharding=f"ZeRO-{stage}", precision="bf16")
    assert live(training, MOMENTS[0])["buckets"] == 10**9
    assert live(training, "optimizer step").get("buckets", 0) == 10**9 - released
    assert {name: pooled for name, _, pooled in _all_moments(training)}["optimizer step"] == released


def test_deepspeed_puts_the_gradients_of_a_share_together_and_asks_for_their_cast() -> None:
    # hiyouga/LLaMA-Factory, issue 1158: Baichuan2-13B on four A800, 77.65 GiB allocated, 12.94 GiB asked for
    row = {"framework": "LLaMA-Factory + DeepSpeed", "model": "Baichuan2-13B", "n_gpus": "4", "sharding": "ZeRO-2"}
    training = read(**row, precision="bf16", seq_len="1536", optimizer="AdamW fused")
    cast = 4 * training.shape.parameters // 4
    assert cast / 2**30 == pytest.approx(12.94, abs=0.01)
    step = live(training, "optimizer step")
    assert (sum(step.values()) - cast) / 2**30 == pytest.approx(77.65, abs=0.01)


def test_deepspeed_without_zero_cuts_nothing() -> None:
    alone, eight = (read(framework="DeepSpeed", sharding="ZeRO-0", precision="fp16", n_gpus=n) for n in ("1", "8"))
    parameters = alone.shape.parameters
    assert live(alone, "optimizer step") == live(eight, "optimizer step")
    assert live(eight, "optimizer step")["optimizer states"] == pytest.approx(12 * parameters, rel=1e-3)


def test_gradients_stay_from_step_to_step_until_torch_2() -> None:
    said = {"framework": "PyTorch Lightning (torch {})", "precision": "fp16 mixed", "sharding": "DDP"}
    before, since = (read(**said | {"framework": said["framework"].format(version)}) for version in ("1.13", "2.0"))
    moment = "backward of head"
    assert live(before, moment)["gradients"] == pytest.approx(4 * before.shape.parameters, rel=1e-3)
    assert live(since, moment).get("gradients", 0) == 0
    assert but(before, "platform", keeps_gradients=False) == since


def test_an_encoder_that_learns_masked_words_has_logits_of_its_vocabulary() -> None:
    said = {"framework": "HF Trainer", "model": "bert-base-uncased", "seq_len": "512", "precision": "fp32"}
    classifies, predicts = read(**said), read(**said, compile_or_other="masked language modelling")
    assert predicts.loss is Loss.LABELS
    more = head_bytes(predicts) - head_bytes(classifies)
    assert more == 12 * predicts.tokens * predicts.shape.vocab
    assert predicts.shape.parameters == classifies.shape.parameters


def test_quantised_training_without_autocast_is_as_wide_as_its_norms() -> None:
    said = {"peft": "QLoRA r16 all linear", "precision": "bf16", "n_gpus": "1"}
    own, trainer, mixed = (
        read(**said | more)
        for more in (
            {"framework": "HF transformers + PEFT (own loop)"},
            {"framework": "HF Trainer"},
            {"framework": "HF transformers + PEFT (own loop)", "precision": "bf16 amp"},
        )
    )
    assert [own.low_precision, trainer.low_precision, mixed.low_precision] == [False, True, True]


def test_fsdp_gathers_what_autocast_would_cast_but_without_a_policy_of_its_own() -> None:
    said = {"precision": "bf16 amp", "act_ckpt": "True", "sharding": "FULL_SHARD"}
    policy, alone = read(**said, framework="PyTorch FSDP"), read(**said, framework="ATorch FSDP (HF transformers)")
    assert (policy.fsdp.gathers_fp32, alone.fsdp.gathers_fp32) == (False, True)
    moment = "backward of head"
    assert live(alone, moment)["gathered parameters"] == 2 * live(policy, moment)["gathered parameters"]
    assert (policy.stream, alone.stream) == (2, 4)
    assert working_bytes(policy) == working_bytes(replace(policy, autocasts=False))
    assert working_bytes(alone) > working_bytes(policy) + 2 * layer_held(policy).trained


def test_what_is_frozen_is_gathered_in_the_type_of_the_policy_too() -> None:
    said = {"peft": "LoRA r8 q v", "act_ckpt": "True", "sharding": "FULL_SHARD", "framework": "PyTorch FSDP"}
    wide, low = read(**said, precision="bf16 mixed (fp32 parameters)"), read(**said, precision="bf16-true")
    assert (wide.weight_bytes, low.weight_bytes) == (4, 2)
    for moment in ("backward of head", "backward of last layer"):
        assert live(wide, moment)["gathered parameters"] == live(low, moment)["gathered parameters"]
    assert live(wide, moment)["parameters"] == pytest.approx(2 * live(low, moment)["parameters"], rel=1e-2)


def test_while_layers_go_backward_fsdp_has_the_gradient_of_the_head_alone() -> None:
    training = read(sharding="FULL_SHARD", framework="PyTorch FSDP")
    whole = live(training, "backward of last layer")["whole gradients"]
    assert whole == 2 * training.shape.table
    assert live(training, "gradient reduction of the root")["whole gradients"] == pytest.approx(2 * whole, rel=1e-3)


@pytest.mark.parametrize(
    ("framework", "other", "bytes_of_a_gradient"),
    [("PyTorch FSDP", "", 4), ("PyTorch FSDP", "reduced in fp32", 6), ("torchtitan FSDP2", "", 6)],
)
def test_a_unit_is_reduced_once_what_its_layer_kept_is_gone(
    framework: str, other: str, bytes_of_a_gradient: int
) -> None:
    training = read(sharding="FULL_SHARD", framework=framework, compile_or_other=other, precision="bf16")
    before, after = (live(training, moment) for moment in MOMENTS)
    assert after["whole gradients"] - before["whole gradients"] == bytes_of_a_gradient * layer_held(training).trained
    assert before["saved activations"] - after["saved activations"] == kept_bytes(training)
    assert "activations at work" not in after


def test_the_loss_is_taken_before_a_second_layer_is_gathered() -> None:
    training = read(sharding="FULL_SHARD", framework="PyTorch FSDP")
    head, layer = (live(training, moment) for moment in ("backward of head", "backward of last layer"))
    unit = 2 * layer_held(training).trained
    assert layer["gathered parameters"] - head["gathered parameters"] == unit
    assert "whole gradients" not in head


def test_what_fsdp_reduces_lies_where_activations_cannot() -> None:
    training = read(sharding="FULL_SHARD", framework="PyTorch FSDP")
    shards = 2 * training.shape.parameters // training.dp
    beside = {name: pooled for name, _, pooled in _all_moments(training)}
    assert beside["backward of head"] == pytest.approx(shards, rel=1e-3)
    assert beside["optimizer step"] == 0
