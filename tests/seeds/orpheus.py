"""Orpheus-TTS: a Llama of some MB and token lists; the script's flash attention is PyTorch's own (`site`)."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

CHECKOUT = "Orpheus-TTS"
JOB = "orpheus_tts/finetune_3b.yaml"
RESUMED = r"Continuing training from global step (\d+)"  # it never resumes
ROWS, TOKENS, VOCABULARY = 16, 768, 512

SIZES = {
    "gpus": 2,
    "global_batch_size": 4,
    "data": {"sequence_length": 64},  # of 768: so the first plan is too large
    "trains.hf": {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}
# accelerate's FSDP needs a GPU: "There are currently no available devices found"
CASES = (
    {
        "where": "fake card",
        "mib": (2300, 2300),
        "options": {},
        "sizes": SIZES,
        "story": ("finished",),
        "end": "succeeded",
    },
    {
        "where": "fake card",
        "mib": (1960, 1960),
        "options": {},
        "sizes": SIZES,
        "story": ("device_oom",),
        "end": r"asks: .*--global-batch-size 2\b.*",
    },
)


def make(folder: Path, checkout: Path) -> None:
    """The model with a tokenizer, its rows, and their paths in the checkout's own config.yaml."""
    import numpy as np
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = SIZES["trains.hf"]
    assert isinstance(sizes, dict)
    model = LlamaForCausalLM(
        LlamaConfig(**{name: size for name, size in sizes.items() if name != "model_type"})
    )
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        folder / "model"
    )
    tokens = np.random.default_rng(0).integers(2, VOCABULARY, (ROWS, TOKENS)).tolist()
    rows = {"input_ids": tokens, "labels": tokens, "attention_mask": [[1] * TOKENS] * ROWS}
    (folder / "rows").mkdir()
    Dataset.from_dict(rows).to_parquet(str(folder / "rows/train.parquet"))
    path = checkout / "finetune/config.yaml"
    config = yaml.safe_load(path.read_text())
    config |= {
        "TTS_dataset": str(folder / "rows"),
        "model_name": str(folder / "model"),
        "save_steps": 2,
    }
    path.write_text(yaml.safe_dump(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
