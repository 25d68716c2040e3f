"""The model that is trained is the model that was named: parameters, ties, values and logits of `from_pretrained`.

Architectures are drawn from the list of the installed transformers, with sizes that a test can hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from orchestrator.specs.choices import ParallelLayout
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import ModelSpec
from orchestrator.training.models.hf_model import build_module, make_published_config
from orchestrator.training.models.hf_weights import untie_parameter
from tests.training import gang

CASES, CASES_LONG, SEED = 6, 60, 20261127
PARAMETERS_MAX = 20_000_000
# Names of sizes over all families, and what they become.
SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("num_decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"),
        64,
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1),
    "vocab_size": 99,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
FAMILIES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
)
ENCODERS = sorted(
    {*modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    & {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    - {*modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
)
OWN_HEADS = ("t5", "mt5", "umt5", "llama")  # published with a head beside the table, and without


def tiny_config(family: str) -> PreTrainedConfig:
    default = AutoConfig.for_model(family)
    names = {*default.to_dict(), *default.attribute_map}
    return AutoConfig.for_model(
        family, **{name: size for name, size in SIZES.items() if name in names}
    )


def model_of(config: PreTrainedConfig) -> PreTrainedModel | None:
    """Return a model with random values; None of one that is no language model, or too large for a test."""
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        return None
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if count > PARAMETERS_MAX:
        return None
    module: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    for layer in module.modules():
        if (
            isinstance(layer, nn.Embedding) and layer.padding_idx is not None
        ):  # some families zero it when they load
            nn.init.zeros_(layer.weight.data[layer.padding_idx])
    return module


def save(module: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Save the model; return what transformers reads from there."""
    module.save_pretrained(folder)
    auto: Any = AutoModelForSeq2SeqLM if module.config.is_encoder_decoder else AutoModelForCausalLM
    theirs: PreTrainedModel = auto.from_pretrained(folder, dtype=torch.float32)
    return theirs.eval()


def drawn_models(home: Path, count: int) -> Iterator[tuple[Path, PreTrainedModel]]:
    """Yield saved models of families that the installed library builds from small sizes, saves and reads."""
    draw, families = random.Random(SEED), list(FAMILIES)
    draw.shuffle(families)
    for family in families:
        try:
            config = tiny_config(family)
            if family in ENCODERS:
                config.is_decoder = True
            module = model_of(config)
            theirs = None if module is None else save(module, home / family)
        except Exception:
            continue
        if theirs is not None:
            yield home / family, theirs
            count -= 1
        if not count:
            return


def load_ours(folder: Path) -> nn.Module:
    """Return our model of a folder, with its values."""
    plan = gang.torch_plan(layout=ParallelLayout())
    built = build_module(
        gang.training_run(folder, "named", plan, (), model=ModelSpec(hf=str(folder)))
    )
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in list(built.module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in parameters:
            parameters[id(parameter)] = nn.Parameter(torch.empty(parameter.shape))
            built.initialise(name, parameters[id(parameter)].data)
        path, _, leaf = name.rpartition(".")
        built.module.get_submodule(path)._parameters[leaf] = parameters[id(parameter)]
    return built.module.eval()


def differences(folder: Path, theirs: PreTrainedModel) -> str:
    """Return in what our model of a folder differs from transformers' own; "" where in nothing."""
    family, module = theirs.config.model_type, load_ours(folder)
    expected, filled_weights = dict(theirs.named_parameters()), dict(module.named_parameters())
    if expected.keys() != filled_weights.keys():
        return f"{family}: parameters {sorted(expected.keys() ^ filled_weights.keys())[:4]}"
    values = [
        name
        for name, parameter in expected.items()
        if not torch.equal(parameter, filled_weights[name])
    ]
    if values:
        return f"{family}: values of {values[:4]}"
    tokens = torch.arange(1, 9)[None]
    inputs = {"input_ids": tokens, "use_cache": False}
    inputs |= {"decoder_input_ids": tokens} if theirs.config.is_encoder_decoder else {}
    try:
        with torch.no_grad():
            logits = theirs(**inputs).logits
    except (RuntimeError, ValueError):  # sizes with which the family itself cannot run
        return ""
    with torch.no_grad():
        apart = float((module(**inputs).logits - logits).abs().max())
    return f"{family}: logits {apart}" if apart > 1e-5 else ""


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("family", OWN_HEADS)
def test_a_model_has_the_head_that_its_folder_holds(
    tmp_path: Path, family: str, own_head: bool
) -> None:
    config = tiny_config(family)
    if family == "llama":
        config.tie_word_embeddings = not own_head
    module = model_of(config)
    assert module is not None
    if own_head and family != "llama":
        _, head = untie_parameter(module, "lm_head.weight")
        nn.init.normal_(head, std=0.05)
    assert differences(tmp_path, save(module, tmp_path)) == ""
    assert ("lm_head.weight" in dict(load_ours(tmp_path).named_parameters())) == own_head


@pytest.mark.parametrize("count", [CASES, pytest.param(CASES_LONG, marks=pytest.mark.long)])
def test_models_of_drawn_architectures_are_those_of_transformers(
    tmp_path: Path, count: int
) -> None:
    apart = [differences(folder, theirs) for folder, theirs in drawn_models(tmp_path, count)]
    assert len(apart) == count
    assert not [text for text in apart if text]


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_is_no_causal_model_unless_its_configuration_makes_it_one(family: str) -> None:
    config: Any = tiny_config(family)
    plan = gang.torch_plan(layout=ParallelLayout())
    values = {
        name: size
        for name, size in SIZES.items()
        if name in {*config.to_dict(), *config.attribute_map}
    }
    encoder, decoder = (
        {"model_type": family, **values},
        {"model_type": family, **values, "is_decoder": True},
    )
    with pytest.raises(SpecError, match="sees the tokens that it would have to predict") as refused:
        build_module(gang.training_run(Path("/"), "encoder", plan, (), model=ModelSpec(hf=encoder)))
    assert "is_decoder: true" in refused.value.hint
    if family != "reformer" and hasattr(config, "is_decoder"):  # whose positions need other sizes
        build_module(gang.training_run(Path("/"), "decoder", plan, (), model=ModelSpec(hf=decoder)))


@pytest.mark.parametrize(
    "family",
    [
        family
        for family in ENCODERS
        if family not in ("reformer", "xmod") and hasattr(tiny_config(family), "is_decoder")
    ],
)
def test_an_encoder_that_names_its_causal_head_sees_no_later_tokens(
    tmp_path: Path, family: str
) -> None:
    config = tiny_config(family)
    head: Any = AutoModelForCausalLM._model_mapping[type(config)]
    settings = {"model_type": family, "architectures": [head.__name__]}
    settings |= {
        name: size
        for name, size in SIZES.items()
        if name in {*config.to_dict(), *config.attribute_map}
    }
    plan = gang.torch_plan(layout=ParallelLayout())
    built = build_module(
        gang.training_run(tmp_path, "head", plan, (), model=ModelSpec(hf=settings))
    )
    assert not built.own_loss
    module = head._from_config(built.module.config).eval()
    with torch.no_grad():
        first = [
            module(torch.tensor([[7, *later]])).logits[:, 0] for later in ([8, 9, 10], [11, 12, 13])
        ]
    torch.testing.assert_close(*first)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "mixtral", "opt"])
def test_a_published_configuration_is_read_as_transformers_reads_it(family: str) -> None:
    published = tiny_config(family).to_dict() | {
        "n_ctx": 1024,
        "architectures": ["A"],
        "of_some_later_version": [1],
    }
    assert (
        make_published_config(published).to_dict()
        == type(tiny_config(family)).from_dict(published).to_dict()
    )
    with pytest.raises(SpecError, match=r"model\.config\.model_type"):
        make_published_config(published | {"model_type": "of_some_later_version"})
