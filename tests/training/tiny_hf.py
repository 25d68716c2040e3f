"""Tiny transformers models and a tokenizer, made offline, as folders that a job can name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 320
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "mistral": {**LLAMA_LIKE, "sliding_window": 16},
    "qwen2": {**LLAMA_LIKE, "tie_word_embeddings": True},
    "qwen3": {**LLAMA_LIKE, "head_dim": 16},
    "gemma": {**LLAMA_LIKE, "head_dim": 16},
    "gemma2": {**LLAMA_LIKE, "head_dim": 16},  # caps its logits
    "phi3": LLAMA_LIKE,
    "phi": LLAMA_LIKE,  # its head has a bias
    "gpt_neox": LLAMA_LIKE,
    "mixtral": {
        **LLAMA_LIKE,
        "num_local_experts": 2,
    },  # its files are converted while they are loaded
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_ff": 64,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "pad_token_id": 2,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
    },
    "bart": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "dropout": 0.0,
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 1,
        "max_position_embeddings": 64,
        "forced_eos_token_id": None,
    },
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALKS = [
    [("user", "what is two and two"), ("assistant", "four")],
    [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", " hello to you "),
        ("user", "bye"),
        ("assistant", "bye"),
    ],
    [
        ("user", "spell cat"),
        ("assistant", "c a t"),
        ("user", "spell assistant"),
        ("assistant", "assistant"),
    ],
]


def model(family: str, **changes: Any) -> Any:
    """A model with random weights, the same at every call."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return auto.from_config(config)


def folder(home: Path, family: str, *, template: str | None = None, **changes: Any) -> Path:
    """A folder with config.json, weights in several files, and a tokenizer."""
    path = home / family
    model(family, **changes).save_pretrained(path, max_shard_size="40KB")
    tokenizer(template).save_pretrained(path)
    return path


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE with <s>, </s> and <pad>."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text() for _ in range(2)], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = template
    return fast


def text(lines: int = 60) -> str:
    """Distinct lines of words."""
    vocabulary = ("alpha", "beta", "gamma", "delta", "two", "four", "cat", "hello", "bye")
    return (
        "\n".join(
            " ".join(vocabulary[(n * n + k) % 9] for k in range(1 + n % 7)) for n in range(lines)
        )
        + "\n"
    )


def chat_file(path: Path, copies: int = 8) -> Path:
    """JSON lines: the conversations, repeated."""
    lines = (
        json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]})
        for talk in TALKS * copies
    )
    path.write_text("\n".join(lines) + "\n")
    return path
