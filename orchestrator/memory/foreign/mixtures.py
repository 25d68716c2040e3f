"""Mixtures of experts in other people's trainings: shapes by name, and what a layer of one keeps of a token.

Where all experts of a layer lie on one device, every token goes through as many as it takes, whichever those are.
Every value of the table stands in the `config.json` of the named repository.
"""

from __future__ import annotations

import re

from orchestrator.memory.experts import Experts, with_experts
from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.public_models import spelled
from orchestrator.specs.profile import ModelProfile, Segment

# Attention that goes through a narrow latent (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) has no closed form here.
LATENT = re.compile(r"deepseek[- ]?(?:v[23]|r1(?!-(?:distill|0528-qwen)))|moonlight|kimi", re.I)
# Experts that transformers has in one tensor: adapters of them are asked for by name (modeling_gpt_oss.py).
ONE_TENSOR = re.compile(r"gpt-?oss", re.I)
CHOSEN = 2  # megatron/training/arguments.py, --moe-router-topk


def _mixture(
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    experts: tuple[int, int, int],
    vocab: int,
    *,
    shared: int = 0,
    qk_norm: bool = False,
    flash: bool | None = None,
) -> Architecture:
    """`heads`: of queries, of keys, and their width; `experts`: how many, how many a token takes, and their width."""
    return Architecture(
        layers=layers,
        hidden=hidden,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        experts=experts[0],
        chosen=experts[1],
        ffn=experts[2],
        shared_ffn=shared,
        vocab=vocab,
        gated=True,
        tied=False,
        qk_norm=qk_norm,
        flash=flash,
    )


KNOWN = {
    "mixtral-8x7b": _mixture(32, 4096, (32, 8, 128), (8, 2, 14336), 32000),  # mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x22b": _mixture(56, 6144, (48, 8, 128), (8, 2, 16384), 32000),  # mistralai/Mixtral-8x22B-v0.1
    "qwen1.5-moe-a2.7b": _mixture(24, 2048, (16, 16, 128), (60, 4, 1408), 151936, shared=5632),  # Qwen/Qwen1.5-MoE-*
    "qwen2-57b-a14b": _mixture(28, 3584, (28, 4, 128), (64, 8, 2560), 151936, shared=20480),  # Qwen/Qwen2-57B-A14B
    "qwen3-30b-a3b": _mixture(48, 2048, (32, 4, 128), (128, 8, 768), 151936, qk_norm=True),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": _mixture(94, 4096, (64, 4, 128), (128, 8, 1536), 151936, qk_norm=True),  # Qwen/Qwen3-235B-A22B
    "olmoe-1b-7b": _mixture(16, 2048, (16, 16, 128), (64, 8, 1024), 50304, qk_norm=True),  # allenai/OLMoE-1B-7B-0924
    "phi-3.5-moe": _mixture(32, 4096, (32, 8, 128), (16, 2, 6400), 32064),  # microsoft/Phi-3.5-MoE-instruct
    # openai/gpt-oss-*: a sink beside the scores, which transformers' own attention holds
    "gpt-oss-20b": _mixture(24, 2880, (64, 8, 64), (32, 4, 2880), 201088, flash=False),
    "gpt-oss-120b": _mixture(36, 2880, (64, 8, 64), (128, 4, 2880), 201088, flash=False),
}

_SPELLINGS = (
    (re.compile(r"^qwen3-coder-"), "qwen3-"),
    (re.compile(r"^qwen3-moe-"), "qwen3-"),
    (re.compile(r"^mixtral-?(\d)"), r"mixtral-\1"),
    (re.compile(r"^gptoss-?"), "gpt-oss-"),
    (re.compile(r"-(?:thinking|unsloth).*$"), ""),
    (re.compile(r"^olmoe(?:-1b-7b.*)?$"), "olmoe-1b-7b"),
)


def known_mixture(name: str) -> Architecture | None:
    """The shape of a public mixture of experts by a name as people write it; None where the table has none such."""
    said = spelled(name)
    for pattern, instead in _SPELLINGS:
        said = pattern.sub(instead, said)
    return KNOWN.get(said)


def mixture_layer(profile: ModelProfile, shape: Architecture) -> Segment:
    """A layer of `profile`, which has no feed-forward part and one token a sample, with the experts of the shape.

    They are taken to compute as the attention does: until transformers 5 they were linear layers, which autocast casts.
    """
    experts = Experts(count=shape.experts, chosen=shape.chosen, width=shape.ffn, shared_width=shape.shared_ffn)
    return with_experts(profile, experts, shape.hidden, 1, autocast=False).segments[1]
