"""Names of public models that have another's shape: tuned from its weights, or sold under a size beside the name."""

from __future__ import annotations

import re

# What is left of a name once spelling and decoration are gone -> the name of the shape, each applied to what the last
# one left. Where a name does not say whose shape it is, the config.json of the repository of that name does.
_SHAPES = tuple(
    (re.compile(name), shape)
    for name, shape in (
        (r"-unsloth$|-pt$|-thinking$|-preview$", ""),  # how it is stored, or which of several tunings it is
        (r"^(?:nous-)?(?:hermes|dolphin)-[\d.]+-(?=llama|yi)", ""),
        (r"^llama(?=\d)", "llama-"),
        (r"^llama-?3([123])-(?=\d)", r"llama-3.\1-"),
        (r"^llama-3-405b$", "llama-3.1-405b"),  # there is no other
        (r"^qwen-?25-", "qwen2.5-"),
        (r"^olmo2-", "olmo-2-"),
        (r"^olmo-7b-0[47]24$", "olmo-7b"),  # allenai/OLMo-7B-0424-hf, OLMo-7B-0724-hf
        (r"^baichuan-2-", "baichuan2-"),
        (r"^gemma-1\.1-", "gemma-"),
        (r"^internlm2\.5-(?=1\.8b|20b)", "internlm2-"),
        (r"^(phi-[1-4](?:\.5)?(?:-mini|-medium)?)(?:-\d+(?:\.\d)?b|-reasoning(?:-plus)?)$", r"\1"),
        (r"^(starcoder)-15(?:\.5)?b$", r"\1"),
        (r"^gpt-bigcode-santacoder$", "santacoder"),
        (r"^(codellama-\d+b)-python$", r"\1"),
        (r"^gptneo-", "gpt-neo-"),
        (r"^gpt-?j$", "gpt-j-6b"),
        (r"^mpt-7b-storywriter$", "mpt-7b"),
        (r"^stablelm-tuned-alpha-", "stablelm-alpha-"),
        (r"^(?:stablelm-zephyr|stable-code)-3b$", "stablelm-3b-4e1t"),
        (r"^stablelm-2-zephyr-", "stablelm-2-"),
        (r"^granite-(\d+b)-code$", r"granite-code-\1"),
        (r"^granite-7b$", "llama-2-7b"),  # ibm-granite/granite-7b-base
        (r"^(?:glm-(?:4|z1)-9b)-0414$", "glm-4-9b"),
        (r"^glm-(?:4|z1)-32b-0414$", "glm-4-32b"),
        (r"^exaone-3\.0-", "exaone-3.5-"),
        (r"^c4ai-command-", "command-"),
        (r"^command-r-v01$", "command-r"),
        (r"^command-r\+$", "command-r-plus"),
        (r"^command-r7b(?:-12-2024)?$|^aya-expanse-8b$", "aya-23-8b"),
        (r"^command-r-35b$|^aya-23-35b$", "command-r"),
        (r"^aya-expanse-32b$", "command-r-08-2024"),
        (r"^mistral-small$", "mistral-small-22b"),  # mistralai/Mistral-Small-Instruct-2409
        (r"^mistral-small-3-", "mistral-small-"),
        (r"^mistral-large-123b$", "mistral-large"),
        (r"^mathstral-7b$", "mistral-7b"),
        (r"^(?:neural-7b(?:-v3(?:-\d)?)?|openchat-3\.[56](?:-\d+)?|starling-lm-7b-(?:alpha|beta))$", "mistral-7b"),
        (r"^(?:wizardlm|orca-2|stablebeluga|tulu-2)-(?=(?:7|13)b$)", "llama-2-"),
        (r"^amber$", "llama-7b"),  # LLM360/Amber
        (r"^llama-guard-3-8b$|^llama-3\.1-tulu-3-8b$", "llama-3.1-8b"),
        (r"^llama-3\.1-nemotron-70b$|^llama-3\.1-tulu-3-70b$", "llama-3.1-70b"),
        (r"^deepseek-coder-7b$", "deepseek-7b"),  # deepseek-ai/deepseek-coder-7b-base-v1.5 goes on from the LLM's
        (r"^yi-coder-9b$", "yi-9b"),
        (r"^dialogpt-small$", "gpt2"),  # microsoft/DialoGPT-*
        (r"^dialogpt-(?=medium|large)", "gpt2-"),
        (r"^codebert$", "roberta-base"),  # microsoft/codebert-base
        (r"^xlm-r(?:-base)?$", "xlm-roberta-base"),
        (r"^xlm-r-large$", "xlm-roberta-large"),
        (r"^electra(?:-discriminator)?$", "electra-base"),  # "base" says nothing elsewhere
        (r"^electra-large-discriminator$", "electra-large"),
    )
)


def shape_name(said: str) -> str:
    """The name of the shape that a public model of this name has: its own where it is nobody's relative."""
    for pattern, instead in _SHAPES:
        said = pattern.sub(instead, said)
    return said
