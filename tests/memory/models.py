"""Small models of many families, for tests that trace them and run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.specs.job.model import DecoderSpec, LoraSpec, ModelSpec
from tests.training.tiny_hf import FAMILIES

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
HERE = Path(__file__).parent
DECODER = DecoderSpec(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
)
WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
}
CONV = {"width": 64, "depth": 4, "size": 32, "samples": 2000}
MODELS = {
    "conv": ModelSpec(factory=f"{EXAMPLES}/conv_classifier.py:build", config=CONV),
    "batch norm": ModelSpec(
        factory=f"{EXAMPLES}/conv_classifier.py:build", config={**CONV, "norm": "batch"}
    ),
    "unet": ModelSpec(
        factory=f"{EXAMPLES}/diffusion_unet.py:build",
        config={"width": 32, "levels": 3, "size": 32, "samples": 2000},
    ),
    "unet3d": ModelSpec(
        factory=f"{HERE}/unet3d.py:build",
        config={"width": 16, "levels": 3, "size": 16, "samples": 2000},
    ),
    "gan": ModelSpec(
        factory=f"{EXAMPLES}/vocoder_gan.py:build",
        config={"width": 64, "frames": 64, "samples": 2000, "discriminator_learning_rate": 1e-3},
    ),
    "codebooks": ModelSpec(
        factory=f"{HERE}/codebooks.py:build",
        config={
            "codebooks": 4,
            "words": 256,
            "width": 128,
            "layers": 3,
            "frames": 60,
            "samples": 512,
        },
    ),
    "decoder": ModelSpec(decoder=DECODER),
    "gpt2": ModelSpec(
        hf={
            "model_type": "gpt2",
            **FAMILIES["gpt2"],
            "n_embd": 128,
            "vocab_size": 512,
            "n_layer": 4,
        }
    ),
    "phi3": ModelSpec(hf={"model_type": "phi3", **FAMILIES["phi3"], **WIDE}),
    "gemma2": ModelSpec(hf={"model_type": "gemma2", **FAMILIES["gemma2"], **WIDE}),
    "mixtral": ModelSpec(hf={"model_type": "mixtral", **FAMILIES["mixtral"], **WIDE}),
    "adapters": ModelSpec(
        hf={"model_type": "phi3", **FAMILIES["phi3"], **WIDE}, lora=LoraSpec(rank=8)
    ),
}
# Their table is half of their parameters, beyond any that is published: under ZeRO-2 the trace is
# up to 8 % above.
WITH_LARGE_TABLES = {
    "t5": ModelSpec(
        hf={
            **FAMILIES["t5"],
            "model_type": "t5",
            "vocab_size": 3072,
            "d_model": 128,
            "d_ff": 512,
            "dropout_rate": 0.1,
        }
    ),
    "bart": ModelSpec(
        hf={**FAMILIES["bart"], "model_type": "bart", "vocab_size": 2048, "d_model": 128}
    ),
}
