"""MusicGen: one small decoder, a small codec and its own two clips, cut into short segments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = "audiocraft"
JOB = "musicgen/musicgen_small.yaml"
PROGRAMS = ("dora",)  # stands beside the interpreter
RESUMED = r"Model hash: \S+|Restoring|epoch=(\d+)"

WORDS = {
    "compression_model_checkpoint=": "{made}/codec.th",
    "optim.epochs=": "2",
    "optim.updates_per_epoch=": "2",
    "transformer_lm.dim=": "256",
    "transformer_lm.num_heads=": "4",
    "transformer_lm.num_layers=": "8",
    "transformer_lm.card=": "400",
    "dataset.segment_duration=": "14",
    "dataset.num_workers=": "0",
    "dataset.valid.num_samples=": "8",
    "dataset.evaluate.num_samples=": "8",
    "dataset.generate.num_samples=": "2",
}
SIZES = {
    "gpus": 2,
    "profile": {
        "parameters": 7_000_000,
        "layers": 8,
        "activations_per_sample": "1MiB",
        "checkpointed_per_sample": "256KiB",
    },
}
CASES = (
    {
        "where": "fake card",
        "note": "segments of 14 s",
        "mib": (1520, 1520),
        "options": WORDS,
        "sizes": SIZES,
        "story": ("device_oom", "finished"),
        "end": "succeeded",
    },
    {
        "where": "fake card",
        "note": "segments of 24 s",
        "mib": (1520, 1520),
        "options": {**WORDS, "dataset.segment_duration=": "24"},
        "sizes": SIZES,
        "story": ("device_oom", "device_oom"),
        "end": r"asks: .*--global-batch-size 4\b.*",
    },
)


def make(cache: Path, codec: Path) -> None:
    """A codec, and a text encoder under the name that the project knows, where its library looks for downloads."""
    import sentencepiece
    import torch
    from audiocraft.models.builders import get_compression_model
    from audiocraft.train import main
    from transformers import T5Config, T5EncoderModel

    revision = "0" * 40
    encoder = cache / "hub/models--t5-base/snapshots" / revision
    sizes = T5Config(vocab_size=64, d_model=768, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    T5EncoderModel(sizes).save_pretrained(encoder)
    (cache / "hub/models--t5-base/refs").mkdir()
    (cache / "hub/models--t5-base/refs/main").write_text(revision)
    text = encoder / "text"
    text.write_text(
        "\n".join(f"a song of the {word} key in {word}" for word in ("first", "second", "third"))
    )
    names = {"input": str(text), "model_prefix": str(encoder / "spiece"), "vocab_size": 24}
    sentencepiece.SentencePieceTrainer.train(**names, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    sizes = (
        "sample_rate=32000",
        "rvq.n_q=4",
        "rvq.bins=400",
        "seanet.ratios=[16,10,8]",
        "seanet.lstm=0",
        "device=cpu",
    )
    config = main.get_xp(["solver=compression/debug", *sizes]).cfg
    model = get_compression_model(config)
    model.quantizer(
        torch.randn(8, config.seanet.dimension, 128), 1
    )  # its vectors are made of the first that it sees
    torch.save({"xp.cfg": config, "best_state": {"model": model.state_dict()}}, codec)


if __name__ == "__main__":
    make(Path(os.environ["HF_HOME"]), Path(sys.argv[1]) / "codec.th")
