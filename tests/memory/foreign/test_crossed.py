"""Laws of encoder-decoders in other people's trainings: the shapes of their publishers, and two lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from orchestrator.memory.foreign.activations import saved_bytes
from orchestrator.memory.foreign.crossed import KNOWN, known_crossed, t5_layer_bytes
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.training.cuda_autocast import as_on_cuda
from orchestrator.training.virtual_device import VirtualDevice

ROW = {
    "id": "x1",
    "model": "t5-large",
    "framework": "HF Trainer",
    "n_gpus": "1",
    "micro_batch": "4",
    "seq_len": "512",
    "precision": "fp32",
    "act_ckpt": "False",
    "optimizer": "AdamW",
}


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


@pytest.mark.parametrize(
    ("written", "parameters"),
    [  # as the models' own pages count them, MusicGen's decoder as its trainer prints it
        ("google-t5/t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-3b", 2_851_598_336),
        ("google/flan-t5-base", 247_577_856),
        ("bigscience/T0_3B", 2_849_757_184),
        ("google/mt5-small", 300_176_768),
        ("bigscience/mt0-xxl", 12_921_057_280),
        ("facebook/bart-large", 406_290_432),
        ("facebook/musicgen-small", 420_370_000),
    ],
)
def test_a_public_encoder_decoder_has_the_parameters_that_its_publisher_counts(written: str, parameters: int) -> None:
    shape = known_crossed(written)
    assert shape is not None
    assert shape.parameters == pytest.approx(parameters, rel=3e-3)


def test_every_model_of_the_table_is_found_by_its_own_name() -> None:
    assert all(known_crossed(name) is shape for name, shape in KNOWN.items())
    assert known_crossed("gpt2") is None


def test_a_short_target_costs_less_and_is_read_however_it_is_written() -> None:
    same, short = read(), read(seq_len="512/128")
    assert (same.target_length, short.target_length) == (0, 128)
    assert read(seq_len="source 512, target 128").target_length == 128
    assert read(model="Llama-2-7b", seq_len="512/128").target_length == 0
    found = [estimate_foreign(one).allocated_bytes for one in (short, replace(same, target_length=256), same)]
    assert found == sorted(found)
    assert found[0] < found[1] < found[2]


@pytest.mark.parametrize("low", [False, True])
def test_a_target_as_long_as_its_source_is_what_the_closed_form_counts_for_both(low: bool) -> None:
    shape = KNOWN["t5-large"]
    once = t5_layer_bytes(shape, (256, 256), low=low, autocasts=low)
    below, above = (t5_layer_bytes(shape, (256, target), low=low, autocasts=low) for target in (255, 257))
    assert above - once == pytest.approx(once - below, rel=0.01)


@pytest.mark.parametrize(("low", "score"), [(False, 9), (True, 7)])
def test_a_score_keeps_what_cudas_dropout_and_an_fp32_softmax_keep(low: bool, score: int) -> None:
    """Softmax in fp32, a mask of bytes, and the product's input: the second difference of lengths is that of scores."""
    shape = KNOWN["t5-large"]
    one, two, three = (t5_layer_bytes(shape, (s, s), low=low, autocasts=low) for s in (256, 512, 768))
    attentions = 1.5  # of an encoder's layer one, of a decoder's two
    assert (three - two) - (two - one) == pytest.approx(2 * 256**2 * shape.heads * attentions * score, rel=1e-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("autocasts", [False, True])
def test_a_layer_keeps_what_transformers_own_does_when_it_makes_its_scores(gated: bool, autocasts: bool) -> None:
    """With the fused dropout of CUDA; where weights are bf16, transformers 5 no longer takes the softmax in fp32."""
    hidden, heads, width, ffn, length = 96, 3, 24, 160, 64

    def live_bytes(layers: int, samples: int) -> int:
        said = AutoConfig.for_model(
            "t5",
            vocab_size=100,
            d_model=hidden,
            d_kv=width,
            d_ff=ffn,
            num_layers=layers,
            num_heads=heads,
            feed_forward_proj="gated-gelu" if gated else "relu",
            attn_implementation="eager",
        )
        model = AutoModelForSeq2SeqLM.from_config(said).train()
        tokens = torch.zeros(samples, length, dtype=torch.int64)
        with VirtualDevice(2**40) as device, as_on_cuda(), torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            held = model(input_ids=tokens, decoder_input_ids=tokens, use_cache=False).logits
            assert held.requires_grad
            return device.live_bytes

    of_one, of_two = (live_bytes(3, samples) - live_bytes(2, samples) for samples in (1, 2))
    shape = replace(
        KNOWN["t5-v1.1-small" if gated else "t5-small"],
        layers=2,
        crossed=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=width,
        ffn=ffn,
    )
    assert 2 * t5_layer_bytes(shape, (length, length), low=autocasts, autocasts=autocasts) == of_two - of_one


def test_megatrons_encoder_decoder_has_positions_and_two_matrices() -> None:
    """NVIDIA/Megatron-LM tests/functional_tests/test_cases/t5/t5_11b_mcore_tp4_pp1: 42,906 MiB of the last rank."""
    training = read(
        model="T5",
        arch="L24 h4096 a64 ffn10240 d64 V29184",
        framework="Megatron-LM (mcore)",
        n_gpus="8",
        tp="4",
        pp="1",
        seq_len="512/128",
        precision="bf16",
        act_ckpt="",
        global_batch="8",
        compile_or_other="transformer engine",
    )
    assert training.framework is Framework.MEGATRON
    assert (training.shape.layers, training.shape.crossed, training.shape.gated) == (48, 24, False)
    assert estimate_foreign(training).allocated_bytes == pytest.approx(42905.7 * 2**20, rel=0.02)


def test_a_layer_that_attends_to_another_sequence_keeps_more() -> None:
    crossed = read(model="facebook/bart-large")
    alone = replace(crossed, shape=replace(crossed.shape, crossed=0))
    assert saved_bytes(crossed) > saved_bytes(alone)
    text = read(model="facebook/musicgen-small")  # keys and values of a text are few
    assert saved_bytes(text) > saved_bytes(replace(text, shape=replace(text.shape, crossed=0)))
