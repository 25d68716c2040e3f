"""A transformers model as a Recipe: its own module and parameter names, our loss.

Decoders are built by AutoModelForCausalLM, encoder-decoders by AutoModelForSeq2SeqLM. The module is built on the meta
device. Its weights are read by name, so that a sharding engine needs one layer at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from orchestrator.specs.errors import SpecError, find_closest_word
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from orchestrator.training.contract.precision import LOW_PRECISION
from orchestrator.training.contract.recipe import IGNORED_LABEL, Batch, Dataset, Recipe
from orchestrator.training.data.tensors import TensorFiles
from orchestrator.training.data.tokenised import load_dataset
from orchestrator.training.models.cross_entropy import linear_cross_entropy
from orchestrator.training.models.hf_adapters import add_adapters, load_quantised
from orchestrator.training.models.hf_heads import (
    FACTORY,
    AnySamples,
    SyntheticBatch,
    compute_own_loss,
    find_head_in_architectures,
    takes_images_or_sounds,
)
from orchestrator.training.models.hf_parallel import (
    find_context_parallel_switch,
    find_expert_mixtures,
    find_stages,
    get_tensor_parallel_plan,
    get_tensor_parallel_sizes,
    limit_t5_bias_heads,
    make_position_arguments,
)
from orchestrator.training.models.hf_weights import (
    InitialisationRecorder,
    Weights,
    make_weight_reader,
    recording_initialisation,
    replay_initialisation,
    untie_parameter,
)

# Parameters of a model that is built to compute some of its first values; larger ones need a
# folder. 4 GiB in fp32.
COMPUTED_MAX = 2**30
# Settings that models read but that are not among a configuration's values, or that Qwen's classes of
# models with experts lack.
UNLISTED = ("attn_implementation", "decoder_start_token_id", "head_dim", "num_labels")


@frozen
class BuiltModule:
    """A module with meta-device parameters (except 4-bit ones), and the function that initialises
    them by name.
    """

    module: PreTrainedModel
    initialise: Callable[[str, Tensor], None]
    stored_dtype: torch.dtype  # of the source's weights; fp32 for random ones
    # the head is no language model on tokens: it takes tensors by name, and its loss is its own
    own_loss: bool


def make_hf_recipe(
    run: TrainingRun,
    dataset: Dataset | AnySamples | None = None,
    config: PreTrainedConfig | None = None,
    *,
    holds_all_logits: bool = False,
) -> Recipe:
    """Return the recipe (model, loss, data) of a run with a transformers model, on `dataset` or
    else the run's data.

    `config` replaces the run's configuration where it was already read. `holds_all_logits`: the
    loss of a language model holds the logits of all tokens, as transformers' own does. Raises
    SpecError if it cannot be built.
    """
    built = build_module(run, config, has_head_samples=isinstance(dataset, AnySamples))
    module: Any = built.module
    loss_sum: Callable[[nn.Module, Batch], Tensor] = _sum_loss_of_recipe
    samples: Any = dataset
    if built.own_loss:
        samples = _find_head_samples(run, module, dataset)
        loss_sum = functools.partial(_sum_loss_of_model, samples)
    else:
        if isinstance(dataset, AnySamples):
            samples = dataset.tokens
        elif dataset is None:
            samples = load_dataset(
                run,
                vocab_size=module.get_input_embeddings().num_embeddings,
                padding_token=_find_padding_token(module),
            )
        _set_loss(module, holds_all_logits=holds_all_logits)
    limit_t5_bias_heads(module, run.plan.layout.tp)
    adapted = run.model.lora is not None or built.own_loss
    return Recipe(
        module=module,
        loss_sum=loss_sum,
        dataset=samples,
        layers=tuple(list_repeated_blocks(module)),
        initialise=built.initialise,
        tensor_parallel={} if adapted else get_tensor_parallel_plan(module),
        tensor_parallel_sizes=get_tensor_parallel_sizes(module),
        stages=None if adapted else find_stages(module),
        context_parallel=None if adapted else find_context_parallel_switch(module),
        experts=None if adapted else find_expert_mixtures(module),
    )


def build_module(
    run: TrainingRun, config: PreTrainedConfig | None = None, *, has_head_samples: bool = False
) -> BuiltModule:
    """Return the module of a run, with its adapters. Raises SpecError if it cannot be built.

    `has_head_samples`: the samples have the tensors that the head takes, as those of
    `data.tensors`.
    """
    spec = run.model
    plan = run.plan
    assert spec.hf is not None, "a job with a transformers model"
    config = _set_causal_mask(config or read_config(spec.hf))
    stored_dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if spec.lora is not None:
        _check_layout_is_supported(plan)
    noted = InitialisationRecorder()
    stored: Weights | None = None
    head = _find_head_with_own_loss(
        config, has_head_samples=has_head_samples or bool(run.data.tensors)
    )
    of_config = head._from_config if head else _choose_auto_class(config).from_config
    if spec.lora is not None and spec.lora.quantise_base:
        module = load_quantised(run, head or _choose_auto_class(config))
    else:
        with recording_initialisation(noted):
            module = of_config(config, dtype=torch.float32)
        module.tie_weights()
        if isinstance(spec.hf, str):
            stored = make_weight_reader(spec.hf, module)
        elif (
            spec.hf.get("tie_word_embeddings") is False
            and (tied := _find_tied_head_name(module)) is not None
        ):
            noted.record_copy(*untie_parameter(module, tied))
        _fill_buffers(module, stored)
    base_names = {parameter: name for name, parameter in module.named_parameters()}
    if spec.lora is not None:
        with recording_initialisation(noted):
            module = add_adapters(module, spec.lora)
    drawn = noted.list_operations_by_name(module)
    came_as = {name: base_names.get(parameter) for name, parameter in module.named_parameters()}
    if spec.lora is not None and not spec.lora.quantise_base:
        _cast_frozen_matrices(plan, module)
    seed = run.training.seed

    @functools.cache
    def computed() -> Mapping[str, Tensor]:
        """Return tensors of a real model for parameters that are computed from others, such as norms."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            real = of_config(config, dtype=torch.float32)
        return {name: values for name, values in real.named_parameters() if name not in drawn}

    size = sum(parameter.numel() for parameter in module.parameters())

    def initialise(name: str, values: Tensor) -> None:
        base_name = came_as[name]
        if stored is not None and base_name is not None:
            values.copy_(stored(base_name))
        elif name in drawn:
            replay_initialisation(values, drawn[name], seed=seed, name=name)
        elif size <= COMPUTED_MAX and base_name is not None and base_name in computed():
            values.copy_(computed()[base_name])
        else:
            raise SpecError(
                "transformers does not initialise it", path="model.hf", got=name, allowed="a folder"
            )

    dtype = stored_dtype if stored else torch.float32
    return BuiltModule(
        module=module, initialise=initialise, stored_dtype=dtype, own_loss=head is not None
    )


def read_config(folder_name_or_config: str | JsonObject) -> PreTrainedConfig:
    """Return the configuration from a folder, the hub, or the job itself. Raises SpecError if there is none."""
    if isinstance(folder_name_or_config, dict):
        return _make_config(folder_name_or_config)
    folder = Path(folder_name_or_config).is_dir()
    hint = "give a folder with config.json, or a name on the hub or in its local cache"
    try:
        return AutoConfig.from_pretrained(
            folder_name_or_config, local_files_only=folder, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SpecError(
            f"no such transformers model: {reason}",
            path="model.hf",
            got=folder_name_or_config,
            hint=hint,
        ) from None


def make_published_config(published_config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a published config.json as a transformers configuration; keys that its class does not
    know are allowed.

    Raises SpecError where no family of the installed version has its `model_type`, or where it
    cannot be read.
    """
    model_type = str(published_config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise SpecError(
            "no such family in transformers",
            path="model.config.model_type",
            got=model_type,
            hint="install a transformers that has it, or give a `factory`",
        )
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(dict(published_config))
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"not a configuration of {model_type}: {error}", path="model.config"
        ) from None
    return config


def _make_config(raw: JsonObject) -> PreTrainedConfig:
    values = dict(raw)
    model_type = values.pop("model_type", None)
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError:
        raise SpecError(
            "no such family in transformers", path="model.hf.model_type", got=model_type
        ) from None
    settings = {*default.to_dict(), *default.attribute_map, *UNLISTED}
    for key in values:
        if key not in settings:
            allowed = find_closest_word(key, settings) or f"what {type(default).__name__} takes"
            raise SpecError(
                "the family has no such setting", path=f"model.hf.{key}", got=key, allowed=allowed
            )
    try:
        return AutoConfig.for_model(model_type, **values)
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"not a configuration of {model_type}: {error}", path="model.hf", got=raw
        ) from None


def _find_head_with_own_loss(config: PreTrainedConfig, *, has_head_samples: bool) -> Any:
    """Return the class that `architectures` names if the job trains it by its own loss; None
    otherwise.

    A language model that also takes images or sounds has its own loss where samples may hold them.
    """
    named = find_head_in_architectures(config)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    language = auto._model_mapping.get(type(config), ())
    is_language = named in (language if isinstance(language, (tuple, list)) else (language,))
    return (
        None
        if named is None
        or (is_language and not (has_head_samples and takes_images_or_sounds(named)))
        else named
    )


def _find_head_samples(run: TrainingRun, module: Any, dataset: Dataset | AnySamples | None) -> Any:
    """Return the run's samples as named tensors, or made-up ones for a trace. Raises SpecError for
    other data.
    """
    if isinstance(dataset, AnySamples):
        return SyntheticBatch(type(module), module.config, dataset)
    if not run.data.tensors:
        raise SpecError(
            "the head takes no running text",
            path="data",
            got=f"{type(module).__name__}, with its own loss",
            allowed="data.tensors",
            hint=f"give its arguments by name in safetensors files, or {FACTORY}",
        )
    return TensorFiles(run.data.tensors)


def _choose_auto_class(config: PreTrainedConfig) -> Any:
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        got = ", ".join(getattr(config, "architectures", None) or ()) or config.model_type
        raise SpecError(
            "transformers has no language model of this family, and no head with a loss is named",
            path="model.hf",
            got=got,
            hint=f"name a head with a loss in `architectures` of its configuration, or {FACTORY}",
        )
    is_encoder = (
        auto is AutoModelForCausalLM and type(config) in AutoModelForMaskedLM._model_mapping
    )
    if (
        is_encoder
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "causal", False)
    ):
        raise SpecError(
            "an encoder sees the tokens that it would have to predict",
            path="model.hf",
            got=config.model_type,
            hint="train it on masked tokens by a `factory`, or set `is_decoder: true` or name its causal head there",
        )
    return auto


def _set_causal_mask(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration; for an encoder that is trained as a causal language model, a copy
    that hides later tokens.

    A configuration of transformers has `is_decoder` false. Without the switch, the loss could be
    read off the input.
    """
    named = find_head_in_architectures(config)
    kind = type(config)
    is_encoder = not config.is_encoder_decoder and kind in AutoModelForMaskedLM._model_mapping
    if (
        not is_encoder
        or getattr(config, "is_decoder", True)
        or kind not in AutoModelForCausalLM._model_mapping
    ):
        return config
    language: Any = AutoModelForCausalLM._model_mapping[kind]
    if named is not language:
        return config
    causal = copy.deepcopy(config)
    causal.is_decoder = True
    return causal


def _find_tied_head_name(module: PreTrainedModel) -> str | None:
    """Return the name of the head's weight if it is the embedding's weight; else None.

    The families of T5 tie both whatever the configuration says, and part them by what a file of
    weights holds.
    """
    head: Any = module.get_output_embeddings()
    names = (
        [name for name in module.all_tied_weights_keys if module.get_parameter(name) is head.weight]
        if head
        else []
    )
    return next(
        (name for name in names if module.get_submodule(name.rpartition(".")[0]) is head), None
    )


def _check_layout_is_supported(plan: Plan) -> None:
    if plan.world_size > plan.layout.dp:
        raise SpecError(
            "adapters are trained data parallel only",
            path="model.lora",
            got=plan.layout,
            allowed="cp=tp=pp=1",
        )


def _fill_buffers(module: nn.Module, stored: Weights | None) -> None:
    """Fill the buffers that the model's source stores; the others were initialised at construction."""
    for name, buffer in module.named_buffers():
        try:
            values = stored(name) if stored is not None else None
        except KeyError:
            values = None
        if values is not None:
            buffer.copy_(values)


def _cast_frozen_matrices(plan: Plan, module: nn.Module) -> None:
    """Cast frozen matrices to the plan's precision: autocast would cast them at every use, to the same values."""
    low = LOW_PRECISION.get(plan.precision)
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    for part in module.modules() if low else ():
        weight = part._parameters.get("weight")
        if weight is None or weight.requires_grad or weight.dim() < 2 or weight in embeddings:
            continue
        part._parameters["weight"] = nn.Parameter(weight.to(low), requires_grad=False)


def list_repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a transformers model in order: the members of its outermost lists of
    equal modules.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len({type(block) for block in child}) == 1:
            yield from child
        else:
            yield from list_repeated_blocks(child)


def _sum_loss_of_model(samples: Any, module: nn.Module, batch: Batch) -> Tensor:
    return compute_own_loss(module, dict(zip(samples.names, batch, strict=True)))


def _sum_loss_of_recipe(module: nn.Module, batch: Batch) -> Tensor:
    return module(*batch)


def _find_padding_token(module: PreTrainedModel) -> int | None:
    """Return the padding token of an encoder-decoder's input; None for a decoder, which pads only
    its last sample.
    """
    if not module.config.is_encoder_decoder:
        return None
    if module.config.pad_token_id is None:
        raise SpecError(
            "an encoder-decoder needs a padding token", path="model.hf", allowed="pad_token_id"
        )
    return module.config.pad_token_id


def _set_loss(module: Any, *, holds_all_logits: bool) -> None:
    """Make the module's call take tokens and labels [B, T] and return the summed loss, in place.

    A decoder's labels are the next tokens; an encoder-decoder's are the target itself. With a plain
    head (`has_plain_head`) the logits of all tokens never exist at once, unless `holds_all_logits`.
    """
    if module.config.is_encoder_decoder:
        module.forward = functools.partial(_compute_seq2seq_loss, module, type(module).forward)
    elif has_plain_head(module) and not holds_all_logits:
        head = module.get_output_embeddings()
        head.forward = functools.partial(_compute_head_loss, head)
        module.forward = functools.partial(_compute_causal_loss, module)
    else:
        module.forward = functools.partial(_compute_loss_of_logits, module, type(module).forward)


def _compute_causal_loss(module: Any, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
    where = make_position_arguments(module, tokens_BT)
    hidden_BTD = module.base_model(input_ids=tokens_BT, use_cache=False, **where).last_hidden_state
    return module.get_output_embeddings()(hidden_BTD, labels_BT)


def _compute_head_loss(head: nn.Linear, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    return linear_cross_entropy(hidden_BTD.flatten(0, 1), head.weight, labels_BT.flatten())


def _compute_loss_of_logits(
    module: Any, forward: Callable[..., Any], tokens_BT: Tensor, labels_BT: Tensor
) -> Tensor:
    where = make_position_arguments(module, tokens_BT)
    return _cross_entropy(
        forward(module, input_ids=tokens_BT, use_cache=False, **where).logits, labels_BT
    )


def _compute_seq2seq_loss(
    module: Any, forward: Callable[..., Any], tokens_BT: Tensor, labels_BT: Tensor
) -> Tensor:
    out = forward(
        module,
        input_ids=tokens_BT,
        attention_mask=tokens_BT != module.config.pad_token_id,
        decoder_input_ids=_make_decoder_inputs(module, labels_BT),
        use_cache=False,
    )
    return _cross_entropy(out.logits, labels_BT)


def _make_decoder_inputs(module: Any, labels_BT: Tensor) -> Tensor:
    """Return the labels shifted right, behind the decoder's first token.

    Some models, as Blenderbot, have no method for it.
    """
    prepare = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        shifted: Tensor = prepare(labels=labels_BT)
        return shifted
    config = module.config
    first = functional.pad(labels_BT[:, :-1], (1, 0), value=config.decoder_start_token_id)
    return first.masked_fill(first == IGNORED_LABEL, config.pad_token_id)


def _cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    flat = logits_BTV.float().flatten(0, 1)
    return functional.cross_entropy(
        flat, labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


class _Hidden:
    """A stub for a base model's output: it has hidden states, and every other attribute is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, _name: str) -> None:
        return None


def has_plain_head(module: Any) -> bool:
    """Return whether the logits are exactly the head's product with the base model's last hidden states.

    The model's own code is run with a stub base and a stub head, whose values must pass unchanged. Some families scale
    hidden states or logits, or soft-cap the logits.
    """
    base = module.base_model
    head = module.get_output_embeddings()
    if base is module or type(head) is not nn.Linear or head.bias is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(1, 2, head.in_features, generator=generator)
    logits_BTV = torch.randn(1, 2, head.out_features, generator=generator)
    inputs: list[Tensor] = []

    def answer(hidden: Tensor) -> Tensor:
        inputs.append(hidden)
        return logits_BTV

    base.forward = lambda *_, **__: _Hidden(hidden_BTD)
    head.forward = answer
    try:
        out = module(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    finally:
        del base.forward, head.forward
    if len(inputs) != 1 or inputs[0].is_meta:  # some families bypass their base model
        return False
    return torch.equal(inputs[0], hidden_BTD) and torch.equal(out, logits_BTV)
