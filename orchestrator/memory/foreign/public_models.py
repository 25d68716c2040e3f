"""Public transformers by the names that people write: their shapes, and how names are spelled.

Every value of the table stands in the `config.json` that the model was published with (the named repository on the
Hugging Face hub) but where another source is said; nothing here is measured or fitted.
"""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.relatives import shape_name


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: int | bool) -> Architecture:
    return replace(
        Architecture(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv,
            head_dim=hidden // heads,
            ffn=ffn,
            vocab=vocab,
            gated=True,
            tied=False,
        ),
        **more,  # type: ignore[arg-type]
    )


def gpt(layers: int, hidden: int, heads: int, vocab: int, *, positions: int = 0, **more: int | bool) -> Architecture:
    """A decoder of the GPT kind: a feed-forward part four times as wide, one matrix for embedding and head."""
    return replace(
        Architecture(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            ffn=4 * hidden,
            vocab=vocab,
            gated=False,
            tied=True,
            positions=positions,
        ),
        **more,  # type: ignore[arg-type]
    )


# name (normalised: see `known`) -> shape; in the comment, the repository whose config.json says so.
KNOWN: dict[str, Architecture] = {
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 32000),  # huggyllama/llama-7b
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 32000),  # huggyllama/llama-13b
    "llama-30b": _llama(60, 6656, 52, 52, 17920, 32000),  # huggyllama/llama-30b
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 32000),  # huggyllama/llama-65b
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),  # meta-llama/Llama-2-7b-hf
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000),  # meta-llama/Llama-2-13b-hf
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000),  # meta-llama/Llama-2-70b-hf
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),  # meta-llama/Meta-Llama-3-8B
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256),  # meta-llama/Meta-Llama-3-70B
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256),  # meta-llama/Llama-3.1-8B
    "llama-3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256),  # meta-llama/Llama-3.1-70B
    "llama-3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256),  # meta-llama/Llama-3.1-405B
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256, tied=True),  # meta-llama/Llama-3.2-1B
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256, tied=True),  # meta-llama/Llama-3.2-3B
    "llama-3.3-70b": _llama(80, 8192, 64, 8, 28672, 128256),  # meta-llama/Llama-3.3-70B-Instruct
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, 32000),  # TinyLlama/TinyLlama-1.1B-Chat-v1.0
    "codellama-7b": _llama(32, 4096, 32, 32, 11008, 32016),  # codellama/CodeLlama-7b-hf
    "codellama-34b": _llama(48, 8192, 64, 8, 22016, 32016),  # codellama/CodeLlama-34b-hf
    "codellama-13b": _llama(40, 5120, 40, 40, 13824, 32016),  # codellama/CodeLlama-13b-hf
    "codellama-70b": _llama(80, 8192, 64, 8, 28672, 32016),  # codellama/CodeLlama-70b-hf
    "open-llama-3b": _llama(26, 3200, 32, 32, 8640, 32000),  # openlm-research/open_llama_3b
    "open-llama-7b": _llama(32, 4096, 32, 32, 11008, 32000),  # openlm-research/open_llama_7b
    "open-llama-13b": _llama(40, 5120, 40, 40, 13824, 32000),  # openlm-research/open_llama_13b
    "vicuna-7b": _llama(32, 4096, 32, 32, 11008, 32000),  # lmsys/vicuna-7b-v1.5
    "vicuna-13b": _llama(40, 5120, 40, 40, 13824, 32000),  # lmsys/vicuna-13b-v1.5
    "smollm-135m": _llama(30, 576, 9, 3, 1536, 49152, tied=True),  # HuggingFaceTB/SmolLM-*
    "smollm-360m": _llama(32, 960, 15, 5, 2560, 49152, tied=True),
    "smollm-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tied=True),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tied=True),  # HuggingFaceTB/SmolLM2-*
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, 49152, tied=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, 49152, tied=True),
    "smollm3-3b": _llama(36, 2048, 16, 4, 11008, 128256, tied=True),  # HuggingFaceTB/SmolLM3-3B
    "mistral-nemo": _llama(40, 5120, 32, 8, 14336, 131072, head_dim=128),  # mistralai/Mistral-Nemo-Base-2407
    "ministral-8b": _llama(36, 4096, 32, 8, 12288, 131072),  # mistralai/Ministral-8B-Instruct-2410
    "codestral-22b": _llama(56, 6144, 48, 8, 16384, 32768),  # mistralai/Codestral-22B-v0.1
    "mistral-small-24b": _llama(40, 5120, 32, 8, 32768, 131072, head_dim=128),  # mistralai/Mistral-Small-24B-*
    "mistral-large": _llama(88, 12288, 96, 8, 28672, 32768),  # mistralai/Mistral-Large-Instruct-2407
    "solar-10.7b": _llama(48, 4096, 32, 8, 14336, 32000),  # upstage/SOLAR-10.7B-v1.0
    "yi-9b": _llama(48, 4096, 32, 4, 11008, 64000),  # 01-ai/Yi-9B
    "yi-1.5-6b": _llama(32, 4096, 32, 4, 11008, 64000),  # 01-ai/Yi-1.5-*
    "yi-1.5-9b": _llama(48, 4096, 32, 4, 11008, 64000),
    "yi-1.5-34b": _llama(60, 7168, 56, 8, 20480, 64000),
    "baichuan-7b": _llama(32, 4096, 32, 32, 11008, 64000),  # baichuan-inc/Baichuan-7B
    "baichuan-13b": _llama(40, 5120, 40, 40, 13696, 64000, flash=False),  # baichuan-inc/Baichuan-13B-Base: alibi
    "glm-4-9b": _llama(40, 4096, 32, 2, 13696, 151552),  # THUDM/glm-4-9b
    "internlm-20b": _llama(60, 5120, 40, 40, 13824, 103168),  # internlm/internlm-20b
    "internlm2-1.8b": _llama(24, 2048, 16, 8, 8192, 92544),  # internlm/internlm2-*
    "internlm2-20b": _llama(48, 6144, 48, 8, 16384, 92544),
    "internlm2.5-7b": _llama(32, 4096, 32, 8, 14336, 92544),  # internlm/internlm2_5-7b
    "deepseek-67b": _llama(95, 8192, 64, 8, 22016, 102400),  # deepseek-ai/deepseek-llm-67b-base
    "deepseek-coder-1.3b": _llama(24, 2048, 16, 16, 5504, 32256),  # deepseek-ai/deepseek-coder-*
    "deepseek-coder-6.7b": _llama(32, 4096, 32, 32, 11008, 32256),
    "deepseek-coder-33b": _llama(62, 7168, 56, 8, 19200, 32256),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000),  # mistralai/Mistral-7B-v0.1 and v0.2
    "zephyr-7b": _llama(32, 4096, 32, 8, 14336, 32000),  # HuggingFaceH4/zephyr-7b-beta
    "openbuddy-zephyr-7b": _llama(32, 4096, 32, 8, 14336, 36608),  # OpenBuddy/openbuddy-zephyr-7b-v14.1
    "yi-6b": _llama(32, 4096, 32, 4, 11008, 64000),  # 01-ai/Yi-6B
    "yi-34b": _llama(60, 7168, 56, 8, 20480, 64000),  # 01-ai/Yi-34B
    "baichuan2-7b": _llama(32, 4096, 32, 32, 11008, 125696),  # baichuan-inc/Baichuan2-7B-Chat
    "baichuan2-13b": _llama(
        40, 5120, 40, 40, 13696, 125696, flash=False
    ),  # baichuan-inc/Baichuan2-13B-Chat: alibi in a mask
    "chatglm2-6b": _llama(28, 4096, 32, 2, 13696, 65024, flash=False),  # THUDM/chatglm2-6b: attends through a mask
    "chatglm3-6b": _llama(28, 4096, 32, 2, 13696, 65024, flash=False),  # THUDM/chatglm3-6b: attends through a mask
    "internlm-7b": _llama(32, 4096, 32, 32, 11008, 103168),  # internlm/internlm-7b
    "internlm2-7b": _llama(32, 4096, 32, 8, 14336, 92544),  # internlm/internlm2-7b
    "deepseek-7b": _llama(30, 4096, 32, 32, 11008, 102400),  # deepseek-ai/deepseek-llm-7b-base
    # Qwen/Qwen-*: intermediate_size is that of both halves together
    "qwen-1.8b": _llama(24, 2048, 16, 16, 5504, 151936),
    "qwen-7b": _llama(32, 4096, 32, 32, 11008, 151936),
    "qwen-14b": _llama(40, 5120, 40, 40, 13696, 152064),
    "qwen-72b": _llama(80, 8192, 64, 64, 24576, 152064),
    "qwen1.5-0.5b": _llama(24, 1024, 16, 16, 2816, 151936, tied=True),  # Qwen/Qwen1.5-*
    "qwen1.5-1.8b": _llama(24, 2048, 16, 16, 5504, 151936),
    "qwen1.5-4b": _llama(40, 2560, 20, 20, 6912, 151936),
    "qwen1.5-7b": _llama(32, 4096, 32, 32, 11008, 151936),
    "qwen1.5-14b": _llama(40, 5120, 40, 40, 13696, 152064),
    "qwen1.5-32b": _llama(64, 5120, 40, 8, 27392, 152064),
    "qwen1.5-72b": _llama(80, 8192, 64, 64, 24576, 152064),
    "qwen2-0.5b": _llama(24, 896, 14, 2, 4864, 151936, tied=True),  # Qwen/Qwen2-*
    "qwen2-1.5b": _llama(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2-7b": _llama(28, 3584, 28, 4, 18944, 152064),
    "qwen2-72b": _llama(80, 8192, 64, 8, 29568, 152064),
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, 151936, tied=True),  # Qwen/Qwen2.5-*
    "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _llama(36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _llama(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, 151936, tied=True, head_dim=128),  # Qwen/Qwen3-*
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, 151936, tied=True, head_dim=128),
    "qwen3-4b": _llama(36, 2560, 32, 8, 9728, 151936, tied=True, head_dim=128),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "deepseek-r1-distill-qwen-1.5b": _llama(28, 1536, 12, 2, 8960, 151936),  # deepseek-ai
    "gemma-2b": _llama(18, 2048, 8, 1, 16384, 256000, tied=True, head_dim=256),  # google/gemma-2b
    "gemma-7b": _llama(28, 3072, 16, 16, 24576, 256000, tied=True, head_dim=256),  # google/gemma-7b
    # google/gemma-2-*: attn_logit_softcapping, so attention holds its scores, and final_logit_softcapping
    "gemma-2-2b": _llama(26, 2304, 8, 4, 9216, 256000, tied=True, head_dim=256, flash=False, capped=True),
    "gemma-2-9b": _llama(42, 3584, 16, 8, 14336, 256000, tied=True, head_dim=256, flash=False, capped=True),
    "gemma-2-27b": _llama(46, 4608, 32, 16, 36864, 256000, tied=True, head_dim=128, flash=False, capped=True),
    "phi-3-mini": _llama(32, 3072, 32, 32, 8192, 32064),  # microsoft/Phi-3-mini-4k-instruct
    "deepseek-r1-distill-qwen-7b": _llama(28, 3584, 28, 4, 18944, 152064),
    "deepseek-r1-distill-qwen-14b": _llama(48, 5120, 40, 8, 13824, 152064),
    "deepseek-r1-distill-qwen-32b": _llama(64, 5120, 40, 8, 27648, 152064),
    "deepseek-r1-distill-llama-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "deepseek-r1-distill-llama-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "qwq-32b": _llama(64, 5120, 40, 8, 27648, 152064),  # Qwen/QwQ-32B
    "qwen1.5-110b": _llama(80, 8192, 64, 8, 49152, 152064),
    "gemma-3-1b": _llama(26, 1152, 4, 1, 6912, 262144, tied=True, head_dim=256),  # google/gemma-3-1b-pt
    "olmo-1b": _llama(16, 2048, 16, 16, 8192, 50304, tied=True),  # allenai/OLMo-1B-hf
    "olmo-7b": _llama(32, 4096, 32, 32, 11008, 50304),  # allenai/OLMo-7B-hf
    "olmo-2-1b": _llama(16, 2048, 16, 16, 8192, 100352),  # allenai/OLMo-2-0425-1B
    "olmo-2-7b": _llama(32, 4096, 32, 32, 11008, 100352),  # allenai/OLMo-2-1124-7B
    "olmo-2-13b": _llama(40, 5120, 40, 40, 13824, 100352),  # allenai/OLMo-2-1124-13B
    "olmo-2-32b": _llama(64, 5120, 40, 8, 27648, 100352),  # allenai/OLMo-2-0325-32B
    "granite-3.0-2b": _llama(40, 2048, 32, 8, 8192, 49155, tied=True),  # ibm-granite/granite-3.0-*
    "granite-3.0-8b": _llama(40, 4096, 32, 8, 12800, 49155, tied=True),
    "stablelm-2-1.6b": _llama(24, 2048, 32, 32, 5632, 100352),  # stabilityai/stablelm-2-1_6b
    "stablelm-2-12b": _llama(40, 5120, 32, 8, 13824, 100352),  # stabilityai/stablelm-2-12b
    "falcon3-1b": _llama(18, 2048, 8, 4, 8192, 131072, head_dim=256),  # tiiuae/Falcon3-*
    "falcon3-3b": _llama(22, 3072, 12, 4, 9216, 131072, head_dim=256),
    "falcon3-7b": _llama(28, 3072, 12, 4, 23040, 131072, head_dim=256),
    "falcon3-10b": _llama(40, 3072, 12, 4, 23040, 131072, head_dim=256),
    "exaone-3.5-7.8b": _llama(32, 4096, 32, 8, 14336, 102400),  # LGAI-EXAONE/EXAONE-3.5-*
    "exaone-3.5-32b": _llama(64, 5120, 40, 8, 27392, 102400),
    "phi-3.5-mini": _llama(32, 3072, 32, 32, 8192, 32064),  # microsoft/Phi-3.5-mini-instruct
    "phi-3-medium": _llama(40, 5120, 40, 10, 17920, 32064),  # microsoft/Phi-3-medium-4k-instruct
    "phi-4": _llama(40, 5120, 40, 10, 17920, 100352),  # microsoft/phi-4
    "phi-4-mini": _llama(32, 3072, 24, 8, 8192, 200064, tied=True),  # microsoft/Phi-4-mini-instruct
    "gemma-3-4b": _llama(34, 2560, 8, 4, 10240, 262208, tied=True, head_dim=256),  # google/gemma-3-*-pt: text alone
    "gemma-3-12b": _llama(48, 3840, 16, 8, 15360, 262208, tied=True, head_dim=256),
    "gemma-3-27b": _llama(62, 5376, 32, 16, 21504, 262208, tied=True, head_dim=128),
    "stablelm-3b-4e1t": _llama(32, 2560, 32, 32, 6912, 50304),  # stabilityai/stablelm-3b-4e1t
    "stablelm-alpha-3b": gpt(16, 4096, 32, 50688, tied=False),  # stabilityai/stablelm-base-alpha-*
    "stablelm-alpha-7b": gpt(16, 6144, 48, 50432, tied=False),
    "redpajama-incite-3b": gpt(32, 2560, 32, 50432, tied=False),  # togethercomputer/RedPajama-INCITE-*
    "redpajama-incite-7b": gpt(32, 4096, 32, 50432, tied=False),
    "phi-1.5": gpt(24, 2048, 32, 51200, tied=False),  # microsoft/phi-1_5
    "phi-2": gpt(32, 2560, 32, 51200, tied=False),  # microsoft/phi-2
    "falcon-7b": gpt(32, 4544, 71, 65024, kv_heads=1),  # tiiuae/falcon-7b
    "falcon-40b": gpt(60, 8192, 128, 65024, kv_heads=8),  # tiiuae/falcon-40b
    "mpt-7b": gpt(32, 4096, 32, 50432),  # mosaicml/mpt-7b: alibi
    "mpt-30b": gpt(48, 7168, 64, 50432),  # mosaicml/mpt-30b: alibi
    "starcoder": gpt(40, 6144, 48, 49152, positions=8192, kv_heads=1, dropout=True),  # bigcode/starcoder
    "starcoder2-3b": gpt(30, 3072, 24, 49152, kv_heads=2),  # bigcode/starcoder2-*
    "starcoder2-7b": gpt(32, 4608, 36, 49152, kv_heads=4),
    "starcoder2-15b": gpt(40, 6144, 48, 49152, kv_heads=4, tied=False),
    "distilgpt2": gpt(6, 768, 12, 50257, positions=1024, dropout=True),  # distilbert/distilgpt2
    "pythia-70m": gpt(6, 512, 8, 50304, tied=False),  # EleutherAI/pythia-70m
    "pythia-160m": gpt(12, 768, 12, 50304, tied=False),  # EleutherAI/pythia-160m
    "pythia-410m": gpt(24, 1024, 16, 50304, tied=False),  # EleutherAI/pythia-410m
    "cerebras-gpt-111m": gpt(10, 768, 12, 50257, positions=2048),  # cerebras/Cerebras-GPT-*
    "cerebras-gpt-1.3b": gpt(24, 2048, 16, 50257, positions=2048),
    "cerebras-gpt-2.7b": gpt(32, 2560, 32, 50257, positions=2048),
    "cerebras-gpt-6.7b": gpt(32, 4096, 32, 50257, positions=2048),
    "cerebras-gpt-13b": gpt(40, 5120, 40, 50257, positions=2048),
    "dolly-v2-3b": gpt(32, 2560, 32, 50280, tied=False),  # databricks/dolly-v2-*
    "dolly-v2-7b": gpt(32, 4096, 32, 50280, tied=False),
    "dolly-v2-12b": gpt(36, 5120, 40, 50280, tied=False),
    "biogpt": gpt(24, 1024, 16, 42384, positions=1026, dropout=True),  # microsoft/biogpt
    "opt-175b": gpt(96, 12288, 96, 50272, positions=2050, dropout=True),  # arXiv:2205.01068, table 1
    "gpt-3-125m": gpt(12, 768, 12, 51200, positions=2048, dropout=True),  # arXiv:2005.14165, table 2.1
    "gpt-3-350m": gpt(24, 1024, 16, 51200, positions=2048, dropout=True),
    "gpt-3-760m": gpt(24, 1536, 16, 51200, positions=2048, dropout=True),
    "xlm-roberta-base": gpt(12, 768, 12, 250002, positions=514, dropout=True, causal=False),  # FacebookAI/xlm-*
    "xlm-roberta-large": gpt(24, 1024, 16, 250002, positions=514, dropout=True, causal=False),
    "distilbert": gpt(6, 768, 12, 30522, positions=512, dropout=True, causal=False),  # distilbert/distilbert-base
    "gpt2": gpt(12, 768, 12, 50257, positions=1024, dropout=True),  # openai-community/gpt2
    "gpt2-medium": gpt(24, 1024, 16, 50257, positions=1024, dropout=True),  # openai-community/gpt2-medium
    "gpt2-large": gpt(36, 1280, 20, 50257, positions=1024, dropout=True),  # openai-community/gpt2-large
    "gpt2-xl": gpt(48, 1600, 25, 50257, positions=1024, dropout=True),  # openai-community/gpt2-xl
    "gpt-neo-125m": gpt(12, 768, 12, 50257, positions=2048),  # EleutherAI/gpt-neo-125m
    "gpt-neo-1.3b": gpt(24, 2048, 16, 50257, positions=2048),  # EleutherAI/gpt-neo-1.3B
    "gpt-neo-2.7b": gpt(32, 2560, 20, 50257, positions=2048),  # EleutherAI/gpt-neo-2.7B
    "gpt-j-6b": gpt(28, 4096, 16, 50400, tied=False),  # EleutherAI/gpt-j-6b
    "polyglot-ko-5.8b": gpt(28, 4096, 16, 30080, tied=False),  # EleutherAI/polyglot-ko-*
    "polyglot-ko-12.8b": gpt(40, 5120, 40, 30080, tied=False),
    "galactica-1.3b": gpt(24, 2048, 32, 50000, positions=2050, dropout=True),  # facebook/galactica-*
    "galactica-6.7b": gpt(32, 4096, 32, 50000, positions=2050, dropout=True),
    "gpt-neox-20b": gpt(44, 6144, 64, 50432, tied=False),  # EleutherAI/gpt-neox-20b
    "pythia-1b": gpt(16, 2048, 8, 50304, tied=False),  # EleutherAI/pythia-1b
    "pythia-1.4b": gpt(24, 2048, 16, 50304, tied=False),  # EleutherAI/pythia-1.4b
    "pythia-2.8b": gpt(32, 2560, 32, 50304, tied=False),  # EleutherAI/pythia-2.8b
    "pythia-6.9b": gpt(32, 4096, 32, 50432, tied=False),  # EleutherAI/pythia-6.9b
    "pythia-12b": gpt(36, 5120, 40, 50688, tied=False),  # EleutherAI/pythia-12b
    "opt-125m": gpt(12, 768, 12, 50272, positions=2050, dropout=True),  # facebook/opt-125m
    # facebook/opt-350m: word_embed_proj_dim; its two projections (0.3 % of it) are not counted
    "opt-350m": gpt(24, 1024, 16, 50272, table_width=512, positions=2050, dropout=True),
    "opt-1.3b": gpt(24, 2048, 32, 50272, positions=2050, dropout=True),  # facebook/opt-1.3b
    "opt-2.7b": gpt(32, 2560, 32, 50272, positions=2050, dropout=True),  # facebook/opt-2.7b
    "opt-6.7b": gpt(32, 4096, 32, 50272, positions=2050, dropout=True),  # facebook/opt-6.7b
    "opt-13b": gpt(40, 5120, 40, 50272, positions=2050, dropout=True),  # facebook/opt-13b
    "opt-30b": gpt(48, 7168, 56, 50272, positions=2050, dropout=True),  # facebook/opt-30b
    "opt-66b": gpt(64, 9216, 72, 50272, positions=2050, dropout=True),  # facebook/opt-66b
    "bloom-560m": gpt(24, 1024, 16, 250880),  # bigscience/bloom-560m
    "bloom-1b1": gpt(24, 1536, 16, 250880),  # bigscience/bloom-1b1
    "bloom-1b7": gpt(24, 2048, 16, 250880),  # bigscience/bloom-1b7
    "bloom-3b": gpt(30, 2560, 32, 250880),  # bigscience/bloom-3b
    "bloom-7b1": gpt(30, 4096, 32, 250880),  # bigscience/bloom-7b1
    "bloom": gpt(70, 14336, 112, 250880),  # bigscience/bloom
    "gpt-3-1.3b": gpt(24, 2048, 16, 51200, positions=2048, dropout=True),  # arXiv:2005.14165, table 2.1
    "gpt-3-2.7b": gpt(32, 2560, 32, 51200, positions=2048, dropout=True),
    "gpt-3-6.7b": gpt(32, 4096, 32, 51200, positions=2048, dropout=True),
    "gpt-3-13b": gpt(40, 5120, 40, 51200, positions=2048, dropout=True),
    "gpt-3-175b": gpt(96, 12288, 96, 51200, positions=2048, dropout=True),
    "bert-base": gpt(12, 768, 12, 30522, positions=512, dropout=True, causal=False),  # google-bert/bert-base-uncased
    "bert-large": gpt(24, 1024, 16, 30522, positions=512, dropout=True, causal=False),
    "distilroberta": gpt(6, 768, 12, 50265, positions=514, dropout=True, causal=False),  # distilbert/distilroberta-base
    "camembert": gpt(12, 768, 12, 32005, positions=514, dropout=True, causal=False),  # almanach/camembert-base
    # sentence-transformers/all-MiniLM-L6-v2 and -L12-v2, BAAI/bge-small-en-v1.5
    "all-minilm-l6": gpt(6, 384, 12, 30522, positions=512, dropout=True, causal=False),
    "all-minilm-l12": gpt(12, 384, 12, 30522, positions=512, dropout=True, causal=False),
    "roberta-base": gpt(12, 768, 12, 50265, positions=514, dropout=True, causal=False),  # FacebookAI/roberta-base
    "roberta-large": gpt(24, 1024, 16, 50265, positions=514, dropout=True, causal=False),
}

KNOWN |= {
    "apertus-8b": gpt(32, 4096, 32, 131072, kv_heads=8, ffn=21504, tied=False),  # swiss-ai/Apertus-8B-2509: not gated
    "afm-4.5b": gpt(36, 2560, 20, 128004, kv_heads=4, ffn=18432, tied=False),  # arcee-ai/AFM-4.5B: not gated
    "devstral-small": _llama(40, 5120, 32, 8, 32768, 131072, head_dim=128),  # mistralai/Devstral-Small-2507
    "magistral-small": _llama(40, 5120, 32, 8, 32768, 131072, head_dim=128),  # mistralai/Magistral-Small-2506
    "mimo-7b": _llama(36, 4096, 32, 8, 11008, 151680),  # XiaomiMiMo/MiMo-7B-Base
    "olmo-3-7b": _llama(32, 4096, 32, 32, 11008, 100278),  # allenai/Olmo-3-1025-7B
    "olmo-3-32b": _llama(64, 5120, 40, 8, 27648, 100278),  # allenai/Olmo-3-1125-32B
    "seed-oss-36b": _llama(64, 5120, 80, 8, 27648, 155136, head_dim=128),  # ByteDance-Seed/Seed-OSS-36B-Base
    "deepseek-math-7b": _llama(30, 4096, 32, 32, 11008, 102400),  # deepseek-ai/deepseek-math-7b-base
    "deepseek-r1-0528-qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, head_dim=128),  # deepseek-ai
    "minicpm-2b": _llama(40, 2304, 36, 36, 5760, 122753, tied=True),  # openbmb/MiniCPM-2B-sft-bf16
    "orpheus-3b": _llama(28, 3072, 24, 8, 8192, 156940, tied=True),  # canopylabs/orpheus-3b-0.1-*: Llama 3.2 with audio
    "minicpm-1b": _llama(52, 1536, 24, 8, 3840, 73440, tied=True),  # openbmb/MiniCPM-1B-sft-bf16
    "internlm3-8b": _llama(48, 4096, 32, 2, 10240, 128512, head_dim=128),  # internlm/internlm3-8b-instruct
    "vicuna-33b": _llama(60, 6656, 52, 52, 17920, 32000),  # lmsys/vicuna-33b-v1.3
    "alpaca-7b": _llama(32, 4096, 32, 32, 11008, 32001),  # tatsu-lab/stanford_alpaca adds one token
    "sheared-llama-1.3b": _llama(24, 2048, 16, 16, 5504, 32000),  # princeton-nlp/Sheared-LLaMA-*
    "sheared-llama-2.7b": _llama(32, 2560, 20, 20, 6912, 32000),
    "command-r": _llama(40, 8192, 64, 64, 22528, 256000, tied=True),  # CohereForAI/c4ai-command-r-v01
    "command-r-plus": _llama(64, 12288, 96, 8, 33792, 256000, tied=True),  # CohereForAI/c4ai-command-r-plus
    "aya-23-8b": _llama(32, 4096, 32, 8, 14336, 256000, tied=True),  # CohereForAI/aya-23-8B
    "granite-code-3b": _llama(32, 2560, 32, 32, 10240, 49152, tied=True),  # ibm-granite/granite-3b-code-base
    "granite-code-8b": _llama(36, 4096, 32, 8, 14336, 49152, tied=True),  # ibm-granite/granite-8b-code-base
    "mistral-nemo-12b": _llama(40, 5120, 32, 8, 14336, 131072, head_dim=128),
    "gemma-3-270m": _llama(18, 640, 4, 1, 2048, 262144, tied=True, head_dim=256),  # google/gemma-3-270m
    "codegemma-7b": _llama(28, 3072, 16, 16, 24576, 256000, tied=True, head_dim=256),  # google/codegemma-7b
    "nemotron-4-15b": gpt(32, 6144, 48, 256000, kv_heads=8, tied=False),  # arXiv:2402.16819, table 1: squared ReLU
    "nemotron-4-340b": gpt(96, 18432, 96, 256000, kv_heads=8, tied=False),  # nvidia/Nemotron-4-340B-Base
    "falcon-180b": gpt(80, 14848, 232, 65024, kv_heads=8),  # tiiuae/falcon-180B
    "chatglm-6b": gpt(28, 4096, 32, 130528, flash=False),  # THUDM/chatglm-6b: attends through a mask
    "phi-1": gpt(24, 2048, 32, 51200, tied=False),  # microsoft/phi-1
    "santacoder": gpt(24, 2048, 16, 49280, positions=2048, kv_heads=1, dropout=True),  # bigcode/santacoder
    "starcoderbase": gpt(40, 6144, 48, 49152, positions=8192, kv_heads=1, dropout=True),  # bigcode/starcoderbase-*
    "starcoderbase-1b": gpt(24, 2048, 16, 49152, positions=8192, kv_heads=1, dropout=True),
    "starcoderbase-3b": gpt(36, 2816, 22, 49152, positions=8192, kv_heads=1, dropout=True),
    "starcoderbase-7b": gpt(42, 4096, 32, 49152, positions=8192, kv_heads=1, dropout=True),
    "codegen-350m": gpt(20, 1024, 16, 51200, tied=False),  # Salesforce/codegen-*
    "codegen-2b": gpt(32, 2560, 32, 51200, tied=False),
    "codegen-6b": gpt(33, 4096, 16, 51200, tied=False),
    "codegen-16b": gpt(34, 6144, 24, 51200, tied=False),
    # arXiv:2205.05198, table 3, in Megatron-LM's vocabulary
    "gpt-3-22b": gpt(48, 6144, 64, 51200, positions=2048, dropout=True),
    "gpt-3-530b": gpt(105, 20480, 128, 51200, positions=2048, dropout=True),
    "gpt-3-1t": gpt(128, 25600, 160, 51200, positions=2048, dropout=True),
}

# Known by heart, and not read in the named repositories: their counts of parameters are the published ones
# (tests/memory/foreign/test_names.py).
KNOWN |= {
    "mistral-small-22b": _llama(56, 6144, 48, 8, 16384, 32768),  # mistralai/Mistral-Small-Instruct-2409
    "codeqwen1.5-7b": _llama(32, 4096, 32, 4, 13440, 92416),  # Qwen/CodeQwen1.5-7B
    "yi-coder-1.5b": _llama(24, 2048, 16, 16, 5504, 64000),  # 01-ai/Yi-Coder-1.5B
    "glm-4-32b": _llama(61, 6144, 48, 2, 23040, 151552),  # THUDM/GLM-4-32B-0414
    "command-r-08-2024": _llama(40, 8192, 64, 8, 24576, 256000, tied=True),  # CohereForAI/c4ai-command-r-08-2024
    "xgen-7b": _llama(32, 4096, 32, 32, 11008, 51200),  # Salesforce/xgen-7b-8k-base
    "h2o-danube-1.8b": _llama(24, 2560, 32, 8, 6912, 32000),  # h2oai/h2o-danube-1.8b-base
    "exaone-3.5-2.4b": _llama(30, 2560, 32, 8, 7168, 102400, tied=True),  # LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct
    "nemotron-mini-4b": gpt(32, 3072, 24, 256000, kv_heads=8, ffn=9216, tied=False),  # nvidia/Nemotron-Mini-4B-Instruct
    "granite-code-20b": gpt(52, 6144, 48, 49152, positions=8192, kv_heads=1, dropout=True),  # granite-20b-code-base
    "granite-code-34b": gpt(88, 6144, 48, 49152, positions=8192, kv_heads=1, dropout=True),
    "falcon-rw-1b": gpt(24, 2048, 32, 50304),  # tiiuae/falcon-rw-1b: alibi
    "falcon-11b": gpt(60, 4096, 32, 65024, kv_heads=8, tied=False),  # tiiuae/falcon-11B
    "pythia-14m": gpt(6, 128, 4, 50304, tied=False),  # EleutherAI/pythia-14m
    "pythia-31m": gpt(6, 256, 8, 50304, tied=False),
    "bert-base-multilingual-cased": gpt(12, 768, 12, 119547, positions=512, dropout=True, causal=False),
    "bert-base-multilingual-uncased": gpt(12, 768, 12, 105879, positions=512, dropout=True, causal=False),
    "bert-base-chinese": gpt(12, 768, 12, 21128, positions=512, dropout=True, causal=False),
    "electra-base": gpt(12, 768, 12, 30522, positions=512, dropout=True, causal=False),  # google/electra-*
    "electra-large": gpt(24, 1024, 16, 30522, positions=512, dropout=True, causal=False),
}

# Qwen3, Gemma 3 and OLMo 2 and 3 norm queries and keys (transformers, modeling_qwen3.py and its like).
KNOWN |= {
    name: replace(shape, qk_norm=True)
    for name, shape in KNOWN.items()
    if re.match(r"qwen3|gemma-3|olmo-[23]|deepseek-r1-0528", name)
}

# What a name says beside the model: how it was tuned, what the row does with it.
_DECORATION = re.compile(
    r"\((?:.*?)\)|\b(?:instruct|chat|base|hf|uncased|cased|sft|dpo|rl|it|q?lora|full|seq-cls|pre-?train(?:ing)?"
    r"|fine-?tun(?:e|ing)|performance|v\d\.\d|meta)\b"
)
# Embedding models are encoders of public shapes; gte-*-v1.5 has rotary positions and gates, *-zh another vocabulary.
_EMBEDDERS = (
    (re.compile(r"\bmultilingual-e5-"), "xlm-roberta-"),  # intfloat/multilingual-e5-*
    (re.compile(r"\bbge-m3\b"), "xlm-roberta-large"),  # BAAI/bge-m3
    (re.compile(r"\bbge-small-en"), "all-minilm-l12"),
    (re.compile(r"\b(?:bge|e5|gte(?!.*-v1\.5))-(?=(?:base|large)(?!-zh))"), "bert-"),  # BAAI, intfloat, thenlper
)
_SPELLINGS = (
    (re.compile(r"^.*/"), ""),
    (re.compile(r"[\s_]+"), "-"),
    (re.compile(r"(?:-(?:gptq|awq|bnb|fp8|int[48]|[48]-?bit|bf16|fp16|deduped|1m|mt))+$"), ""),  # how it is stored
    (re.compile(r"^code-llama"), "codellama"),
    (re.compile(r"^orpheus(?:-tts)?(?:-3b)?(?:-0\.1.*)?$"), "orpheus-3b"),
    (re.compile(r"^openllama-"), "open-llama-"),
    (re.compile(r"^zephyr-7b-.*$"), "zephyr-7b"),
    (re.compile(r"^.*hermes.*-mistral-7b$"), "mistral-7b"),
    (re.compile(r"^(codegen-\d+[mb])-(?:mono|multi|nl)$"), r"\1"),
    (re.compile(r"^qwen3-embedding-"), "qwen3-"),
    (re.compile(r"^nous-hermes-llama-?2-"), "llama-2-"),
    (re.compile(r"^mistral-small-3\.[12]-"), "mistral-small-"),
    (re.compile(r"^gpt-(?=(?:125m|350m|760m|1\.3b|2\.7b|6\.7b|13b|175b)$)"), "gpt-3-"),
    (re.compile(r"^nano-?gpt$"), "gpt2"),
    (re.compile(r"^(llama|qwen|gemma|gpt|phi|glm)(\d)"), r"\1-\2"),
    (re.compile(r"^(codellama|opt|pythia|falcon|mistral|mpt|vicuna|bloomz?)(\d+(?:\.\d)?[bm]\b)"), r"\1-\2"),
    (re.compile(r"^(llama|qwen|gemma|mistral|olmo)-?v(?=\d-)"), r"\1-"),
    (re.compile(r"^llama-1-"), "llama-"),
    (re.compile(r"^gpt-?(j|neox)-?(?=\d)"), r"gpt-\1-"),
    (re.compile(r"^granite-3\.[1-3]-"), "granite-3.0-"),
    (re.compile(r"^llama-3[23](?:\.5)?b"), "llama-30b"),
    (re.compile(r"^gpt-?2-(?:small|124m)$"), "gpt2"),
    (re.compile(r"^gpt-?2-3[45]5m$"), "gpt2-medium"),
    (re.compile(r"^gpt-?2-7[67][24]m$"), "gpt2-large"),
    (re.compile(r"^gpt-?2-(?:xl-)?(?:1\.5b|1558m)$"), "gpt2-xl"),
    (re.compile(r"^tiny-?llama.*$"), "tinyllama-1.1b"),
    (re.compile(r"^qwen-(1\.5|1half|2|2\.5|3)-"), r"qwen\1-"),
    (re.compile(r"^qwen1half"), "qwen1.5"),
    (re.compile(r"^gpt-2"), "gpt2"),
    (re.compile(r"^bloomz?-(\d)\.(\d)b"), r"bloom-\1b\2"),
    (re.compile(r"^bloomz-(\d)"), r"bloom-\1"),
    (re.compile(r"^(?:bloom-176b|bloomz)$"), "bloom"),
    (re.compile(r"(?:-v\d|-\d+k)+-*$"), ""),  # the release, or the length it was stretched to
    (re.compile(r"^(qwen2(?:\.5)?)-(?:coder|math)-"), r"\1-"),
    (re.compile(r"^internlm2-5-"), "internlm2.5-"),
    (re.compile(r"^deepseek-llm-"), "deepseek-"),
    (re.compile(r"(?<=\D)-(?:0\d|1[0-2])2[3-6]$|-2[3-6](?:0\d|1[0-2])$"), ""),  # the month of a release
    (re.compile(r"^olmo-2-(?:0\d|1[0-2])2[3-6]-"), "olmo-2-"),
    (re.compile(r"-+"), "-"),
)


def known(name: str) -> Architecture | None:
    """The shape of a public model by a name as people write it; None where the table has none such."""
    return KNOWN.get(spelled(name))


def spelled(name: str) -> str:
    """The name of a public model as tables have it, without what people write around it."""
    said = name.strip().lower()
    for pattern, instead in _SPELLINGS[:1]:
        said = pattern.sub(instead, said)
    for pattern, instead in _EMBEDDERS:
        said = pattern.sub(instead, said)
    encoder = re.search(r"\b(bert|(?:xlm[-_ ])?roberta)[-_ ](base|large)", said)
    if encoder:
        language = re.search(r"bert[-_]base([-_](?:multilingual[-_](?:un)?cased|chinese))", said)
        name = f"{encoder[1]}-{encoder[2]}{language[1] if language else ''}"
        return name.replace("_", "-").replace(" ", "-")
    said = re.sub(r"\((\d+(?:\.\d+)?[bm])\)", r"\1", said)  # Llama 3.1 (8B)
    # llama 2 7b is a version and a size; qwen-1_8b is one size, phi-1_5 one version
    said = re.sub(r"(?<=-)(\d)_(\d)(?=b?\b)", r"\1.\2", re.sub(r"^gpt-?3_", "gpt-3-", said))
    said = re.sub(r"(?<=qwen\d)_(?=\d[-_])", ".", said)
    said = _DECORATION.sub(" ", said).strip()
    for pattern, instead in _SPELLINGS[1:]:
        said = pattern.sub(instead, said)
    return shape_name(said.strip("-"))
