"""Heads with a loss that the installed transformers has, drawn at random, with configurations that a test can hold."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from orchestrator.training.models.hf_heads import has_loss

PARAMETERS_MAX = 30_000_000
VOCABULARY, LAYERS = 256, 2
# What sizes become, by words in their names: the first row with a word that the name holds.
SIZES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vocab_size", "num_embeddings", "codebook_size"), VOCABULARY),
    (("experts_per_tok", "num_key_value_heads", "moe_topk", "moe_k", "num_kv_heads"), 2),
    (("num_experts", "num_local_experts", "n_routed_experts"), 4),
    (("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "coordinate_size"), 8),
    (("head_dim", "d_head", "d_kv", "lora_rank", "attention_head_size", "shape_size"), 16),
    (("layers", "n_layer", "num_blocks", "num_hidden_groups", "depth"), LAYERS),
    (("attention_heads", "n_head", "num_heads", "attn_heads"), 4),
    (("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dim_feedforward", "dim_ff"), 128),
    (
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_proj_dim",
            "hidden_dim",
            "embed_dim",
            "emb_dim",
            "projection_dim",
            "projection_size",
        ),
        64,
    ),
    (("num_queries",), 8),
)
LAYER_ROWS = SIZES[5:6]
KERNELS = ("feat_extract", "depthwise")  # no sizes, though their names hold words of them
LISTS = {"depths": 1, "num_heads": 1, "num_attention_heads": 1, "conv_dim": 32, "tdnn_dim": 32}


def shrunk(config: PreTrainedConfig, rows: Sequence[tuple[tuple[str, ...], int]]) -> dict[str, Any]:
    """Return the settings of a configuration with small sizes; those of its parts too."""
    small: dict[str, Any] = {}
    taken = inspect.signature(type(config).__init__).parameters
    values = config.to_dict()
    layers = {value for name, value in values.items() if "layers" in name and type(value) is int}
    for name, value in values.items():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            small[name] = {"model_type": part.model_type, **shrunk(part, rows)}
        elif name not in taken:
            continue
        elif (
            name.endswith(("token_id", "token_index"))
            and type(value) is int
            and value >= VOCABULARY
        ):
            small[name] = (
                VOCABULARY - 1 - sum(key.endswith(("token_id", "token_index")) for key in small)
            )
        elif name == "pad_token_id" and value is None:
            small[name] = 0
        elif name.endswith("token_id") and type(value) is list:
            small[name] = 1
        elif type(value) in (list, tuple) and name in LISTS:
            small[name] = [LISTS[name]] * len(value)
        elif type(value) in (list, tuple) and "layer" in name and len(value) in layers:
            small[name] = [*value[: LAYERS - 1], value[-1]]
        elif (
            name in ("rope_parameters", "rope_scaling")
            and type(value) is dict
            and "mrope_section" in value
        ):
            small[name] = {**value, "mrope_section": [2, 3, 3]}
        elif type(value) is int and value > 1 and not any(word in name for word in KERNELS):
            size = next(
                (size for parts, size in rows if any(word in name for word in parts)), value
            )
            small[name] = min(size, value)
    return small


def heads() -> list[tuple[str, str]]:
    """Return (model type, class) of every head with a loss in the auto mappings, in their order by name."""
    pairs = set()
    for name in dir(modeling_auto):
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for model_type, classes in getattr(modeling_auto, name).items():
                for class_name in (classes,) if isinstance(classes, str) else classes:
                    if model_type in CONFIG_MAPPING and has_loss(
                        getattr(transformers, class_name, None)
                    ):
                        pairs.add((model_type, class_name))
    return sorted(pairs)


def settings_of(model_type: str, head: str) -> dict[str, Any] | None:
    """Return a small configuration of the head as a job's file says one; None where the library builds none.

    Where small sizes contradict each other, fewer of them are small.
    """
    for rows in (SIZES, (*SIZES[:1], *SIZES[2:]), SIZES[:1] + LAYER_ROWS, LAYER_ROWS):
        try:
            default = CONFIG_MAPPING[model_type]()
            settings = {"model_type": model_type, "architectures": [head], **shrunk(default, rows)}
            with torch.device("meta"):
                module = getattr(transformers, head)(type(default).from_dict(dict(settings)))
        except ImportError:
            return None
        except Exception:
            continue
        if sum(parameter.numel() for parameter in module.parameters()) <= PARAMETERS_MAX:
            return settings
    return None


def drawn(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield heads with their settings in a random order."""
    every = heads()
    random.Random(seed).shuffle(every)
    yield from with_settings(every)


def with_settings(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each of these (model type, head) that the library builds, with its settings."""
    for model_type, head in pairs:
        settings = settings_of(model_type, head)
        if settings is not None:
            yield head, settings
