"""Writes a folder that a job can fine-tune, offline: a tiny llama with random weights, and a byte-level tokenizer.

`python -m jobs.finetune.tiny_model FOLDER`
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    words = {
        word: number
        for number, word in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    bytes_only = Tokenizer(models.BPE(vocab=words, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=words[SPECIAL[0]],
        eos_token_id=words[SPECIAL[1]],
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
