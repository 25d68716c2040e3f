"""Parler-TTS: a decoder of some MB, a codec, and clips of noise; run by the project's interpreter to make them."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = "parler-tts"
JOB = "parler_tts/parler_tts_mini.yaml"
RESUMED = r"Continuing training from global step (\d+)"
CLIPS, RATE, SEED = 72, 16_000, 42  # SEED: transformers' TrainingArguments
LONG_AT = 40  # place in the script's order of one long clip: in the fourth of its six steps of 12

WORDS = {
    **dict.fromkeys(("--model_name_or_path", "--feature_extractor_name"), "{made}/model"),
    **dict.fromkeys(("--description_tokenizer_name", "--prompt_tokenizer_name"), "{made}/model"),
    **dict.fromkeys(("--train_dataset_name", "--eval_dataset_name"), "{made}/clips"),
    **dict.fromkeys(
        ("--train_metadata_dataset_name", "--eval_metadata_dataset_name"), "{made}/tagged"
    ),
    "--max_duration_in_seconds": "5",
    "--preprocessing_num_workers": "1",
    "--max_steps": "6",
    "--save_steps": "2",
}
SIZES = {
    "steps": 6,
    "gpus": {"min": 1, "max": 1},
    "global_batch_size": 12,
    "knobs.micro_batch_size.default": 12,
    "knobs.gradient_accumulation_steps.default": 1,
    "knobs.micro_batch_size.also": [
        {"flag": "--per_device_eval_batch_size", "phase": "evaluation", "default": 12},
        {"flag": "--audio_encoder_per_device_batch_size", "phase": "encoding", "default": 6},
        {
            "flag": "--temporary_save_to_disk",
            "phase": "encoding",
            "default": 6,
            "values": {size: f"codes-{size}" for size in (6, 3, 2, 1)},
        },
    ],
    "profile": {
        "parameters": 4_500_000,
        "layers": 4,
        "activations_per_sample": "1MiB",
        "checkpointed_per_sample": "256KiB",
    },
}
CASES = (
    {
        "where": "virtual",
        "mib": (120,),
        "options": WORDS,
        "sizes": SIZES,
        "story": ("device_oom", "finished"),
        "end": "succeeded",
        "resumed": "2",
    },
    {
        "where": "fake card",
        "mib": (1000,),
        "options": WORDS,
        "sizes": SIZES,
        "story": ("finished",),
        "end": "succeeded",
    },
    {
        "where": "fake card",
        "note": "an out-of-memory failure rehearsed before step 4",
        "mib": (1100,),
        "options": WORDS,
        "sizes": SIZES,
        "fails_at": 4,
        "story": ("device_oom",),
        "end": r"job failed: no plan fits .*would fit: a smaller global batch .*",
    },
)


def make(folder: Path) -> None:
    """The model with its tokenizer and codec, and a data set with its descriptions."""
    import numpy as np
    from datasets import Audio, Dataset
    from parler_tts import (
        ParlerTTSConfig,
        ParlerTTSDecoderConfig,
        ParlerTTSForConditionalGeneration,
    )
    from parler_tts.dac_wrapper import DACConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import EncodecFeatureExtractor, PreTrainedTokenizerFast, T5Config

    tokens = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    kinds = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    codec = DACConfig(
        num_codebooks=4, codebook_size=64, latent_dim=64, frame_rate=RATE // 512, sampling_rate=RATE
    )
    text = T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4)
    decoder = ParlerTTSDecoderConfig(
        vocab_size=64 + 3,
        num_hidden_layers=4,
        ffn_dim=1024,
        num_attention_heads=4,
        hidden_size=256,
        num_codebooks=4,
        max_position_embeddings=512,
        pad_token_id=64,
        eos_token_id=64,
        bos_token_id=65,
    )
    config = ParlerTTSConfig.from_sub_models_config(text, codec, decoder, vocab_size=64)
    config.update({"pad_token_id": 64, "decoder_start_token_id": 65})
    model = ParlerTTSForConditionalGeneration(config)
    model.generation_config.decoder_start_token_id, model.generation_config.max_length = 65, 64
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kinds).save_pretrained(folder / "model")
    EncodecFeatureExtractor(sampling_rate=RATE).save_pretrained(folder / "model")

    noise = np.random.default_rng(0)
    long = int(np.random.default_rng(SEED).permutation(CLIPS)[LONG_AT])  # as Dataset.shuffle does
    samples = [4 * RATE if index == long else RATE // 2 for index in range(CLIPS)]
    clips = [
        {"array": noise.normal(size=size).astype("float32") / 8, "sampling_rate": RATE}
        for size in samples
    ]
    audio = Dataset.from_dict({"audio": clips, "text": ["abc def"] * CLIPS}).cast_column(
        "audio", Audio(RATE)
    )
    for name, rows in {
        "clips": audio,
        "tagged": Dataset.from_dict({"text_description": ["a voice"] * CLIPS}),
    }.items():
        (folder / name).mkdir()
        rows.to_parquet(str(folder / name / "train.parquet"))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
