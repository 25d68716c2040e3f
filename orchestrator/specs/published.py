"""Sizes of published models that people fine-tune, for machines that cannot reach the hub; written 2026-11-28.

Each row has the sizes of a repository's `config.json`, and its number of parameters on the hub. Tests build each model
and count. A fine-tuned model has the sizes of its base model: name that one, or write `config:`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

WRITTEN = "2026-11-28"


class PublishedModel(NamedTuple):
    """The configuration of a hub repository, and its number of parameters."""

    config: Mapping[str, Any]
    parameters: int


Sizes = tuple[
    int, int, int, int, int
]  # hidden, intermediate, layers, heads, heads of keys and values
SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def _decoder(
    family: str, head: str, parameters: int, vocab_size: int, sizes: Sizes, **more: Any
) -> PublishedModel:
    config = {
        "model_type": family,
        "architectures": [head],
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }
    return PublishedModel(
        MappingProxyType(config | dict(zip(SIZE_KEYS, sizes, strict=True)) | more), parameters
    )


_llama = partial(_decoder, "llama", "LlamaForCausalLM")
_mistral = partial(_decoder, "mistral", "MistralForCausalLM")
_qwen2 = partial(_decoder, "qwen2", "Qwen2ForCausalLM")
_qwen3 = partial(_decoder, "qwen3", "Qwen3ForCausalLM", head_dim=128)
_gemma2 = partial(_decoder, "gemma2", "Gemma2ForCausalLM", tie_word_embeddings=True)
_TIED = {"tie_word_embeddings": True}


def _gpt2(parameters: int, width: int, layers: int, heads: int) -> PublishedModel:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return PublishedModel(
        MappingProxyType({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}),
        parameters,
    )


def _flan_t5(parameters: int, width: int, inner: int, layers: int, heads: int) -> PublishedModel:
    sizes = {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    kind = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": 32128}
    head = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    return PublishedModel(MappingProxyType({**head, **sizes, **kind}), parameters)


PUBLISHED: Final[Mapping[str, PublishedModel]] = MappingProxyType(
    {
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(1_100_048_384, 32000, (2048, 5632, 22, 32, 4)),
        "HuggingFaceTB/SmolLM2-135M": _llama(134_515_008, 49152, (576, 1536, 30, 9, 3), **_TIED),
        "HuggingFaceTB/SmolLM2-360M": _llama(361_821_120, 49152, (960, 2560, 32, 15, 5), **_TIED),
        "HuggingFaceTB/SmolLM2-1.7B": _llama(
            1_711_376_384, 49152, (2048, 8192, 24, 32, 32), **_TIED
        ),
        "meta-llama/Llama-2-7b-hf": _llama(6_738_415_616, 32000, (4096, 11008, 32, 32, 32)),
        "meta-llama/Llama-2-13b-hf": _llama(13_015_864_320, 32000, (5120, 13824, 40, 40, 40)),
        "meta-llama/Llama-2-70b-hf": _llama(68_976_648_192, 32000, (8192, 28672, 80, 64, 8)),
        "meta-llama/Llama-3.1-8B": _llama(8_030_261_248, 128256, (4096, 14336, 32, 32, 8)),
        "meta-llama/Llama-3.1-70B": _llama(70_553_706_496, 128256, (8192, 28672, 80, 64, 8)),
        "meta-llama/Llama-3.2-1B": _llama(
            1_235_814_400, 128256, (2048, 8192, 16, 32, 8), head_dim=64, **_TIED
        ),
        "meta-llama/Llama-3.2-3B": _llama(
            3_212_749_824, 128256, (3072, 8192, 28, 24, 8), head_dim=128, **_TIED
        ),
        "Qwen/Qwen2.5-0.5B": _qwen2(494_032_768, 151936, (896, 4864, 24, 14, 2), **_TIED),
        "Qwen/Qwen2.5-1.5B": _qwen2(1_543_714_304, 151936, (1536, 8960, 28, 12, 2), **_TIED),
        "Qwen/Qwen2.5-3B": _qwen2(3_085_938_688, 151936, (2048, 11008, 36, 16, 2), **_TIED),
        "Qwen/Qwen2.5-7B": _qwen2(7_615_616_512, 152064, (3584, 18944, 28, 28, 4)),
        "Qwen/Qwen2.5-14B": _qwen2(14_770_033_664, 152064, (5120, 13824, 48, 40, 8)),
        "Qwen/Qwen2.5-32B": _qwen2(32_763_876_352, 152064, (5120, 27648, 64, 40, 8)),
        "Qwen/Qwen2.5-72B": _qwen2(72_706_203_648, 152064, (8192, 29568, 80, 64, 8)),
        "Qwen/Qwen3-0.6B": _qwen3(596_049_920, 151936, (1024, 3072, 28, 16, 8), **_TIED),
        "Qwen/Qwen3-1.7B": _qwen3(1_720_574_976, 151936, (2048, 6144, 28, 16, 8), **_TIED),
        "Qwen/Qwen3-4B": _qwen3(4_022_468_096, 151936, (2560, 9728, 36, 32, 8), **_TIED),
        "Qwen/Qwen3-8B": _qwen3(8_190_735_360, 151936, (4096, 12288, 36, 32, 8)),
        "Qwen/Qwen3-14B": _qwen3(14_768_307_200, 151936, (5120, 17408, 40, 40, 8)),
        "Qwen/Qwen3-32B": _qwen3(32_762_123_264, 151936, (5120, 25600, 64, 64, 8)),
        "mistralai/Mistral-7B-v0.1": _mistral(
            7_241_732_096, 32000, (4096, 14336, 32, 32, 8), sliding_window=4096
        ),
        "mistralai/Mistral-7B-v0.3": _mistral(
            7_248_023_552, 32768, (4096, 14336, 32, 32, 8), sliding_window=None
        ),
        "mistralai/Mistral-Nemo-Base-2407": _mistral(
            12_247_782_400, 131072, (5120, 14336, 40, 32, 8), head_dim=128, sliding_window=None
        ),
        "google/gemma-2-2b": _gemma2(2_614_341_888, 256000, (2304, 9216, 26, 8, 4), head_dim=256),
        "google/gemma-2-9b": _gemma2(9_241_705_984, 256000, (3584, 14336, 42, 16, 8), head_dim=256),
        "google/gemma-2-27b": _gemma2(
            27_227_128_320, 256000, (4608, 36864, 46, 32, 16), head_dim=128
        ),
        "openai-community/gpt2": _gpt2(124_439_808, 768, 12, 12),
        "openai-community/gpt2-medium": _gpt2(354_823_168, 1024, 24, 16),
        "openai-community/gpt2-large": _gpt2(774_030_080, 1280, 36, 20),
        "openai-community/gpt2-xl": _gpt2(1_557_611_200, 1600, 48, 25),
        "google/flan-t5-small": _flan_t5(76_961_152, 512, 1024, 8, 6),
        "google/flan-t5-base": _flan_t5(247_577_856, 768, 2048, 12, 12),
        "google/flan-t5-large": _flan_t5(783_150_080, 1024, 2816, 24, 16),
        "google/flan-t5-xl": _flan_t5(2_849_757_184, 2048, 5120, 24, 32),
        "canopylabs/orpheus-3b-0.1-pretrained": _llama(
            3_300_867_072, 156940, (3072, 8192, 28, 24, 8), head_dim=128, **_TIED
        ),
    }
)


# Jobs of the repository for projects whose trainers are their own, by what names of their models
# and commands have.
PROJECT_JOBS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "musicgen": "jobs/musicgen/musicgen_small.yaml",
        "parler": "jobs/parler_tts/parler_tts_mini.yaml",
        "orpheus": "jobs/orpheus_tts/finetune_3b.yaml",
        "latentsync": "jobs/latentsync/stage2.yaml",
        "rvc": "jobs/rvc/rvc_v2_48k.yaml",
    }
)


def project_job(text: str) -> str | None:
    """Return the repository's job file of the project that a model or a command names; None where there is none."""
    return next((path for word, path in PROJECT_JOBS.items() if word in text.lower()), None)


def nearest_models(name: str, count: int = 3) -> list[str]:
    """Return so many models of the table, those with the most similar names first."""
    likeness = {
        entry: SequenceMatcher(None, _plain(name), _plain(entry)).ratio() for entry in PUBLISHED
    }
    return sorted(PUBLISHED, key=lambda entry: -likeness[entry])[:count]


def published_sizes(name: str) -> dict[str, Any]:
    """Return the stored configuration of a hub repository; {} where the table has none.

    The lookup ignores case and the endings -Instruct, -it and -hf.
    """
    plain = {_plain(entry): model for entry, model in PUBLISHED.items()}
    model = plain.get(_plain(name))
    return {} if model is None else dict(model.config)


def smaller_siblings(name: str) -> list[str]:
    """Return the names of smaller models of the same model line, largest first."""
    line = _line(name)
    parameters = next(
        (model.parameters for entry, model in PUBLISHED.items() if _plain(entry) == _plain(name)), 0
    )
    siblings = {
        entry: model.parameters for entry, model in PUBLISHED.items() if _line(entry) == line
    }
    smaller = [entry for entry, count in siblings.items() if count < parameters]
    return sorted(smaller, key=lambda entry: -siblings[entry])


def _line(name: str) -> str:
    """The name without its size, such as google/gemma-2."""
    return re.sub(r"-[0-9.]+[bm]$|-(small|base|medium|large|xl)$", "", _plain(name))


def _plain(name: str) -> str:
    text = name.lower()
    for ending in ("-instruct", "-it", "-hf"):
        text = text.removesuffix(ending)
    return text
