"""LoRA adapters on the frozen layers of a transformers model, through peft; with a 4-bit base on CUDA."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import BitsAndBytesConfig, PreTrainedModel

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import LoraSpec
from orchestrator.specs.mechanics import Replicated
from orchestrator.specs.run import TrainingRun
from orchestrator.training.contract.precision import LOW_PRECISION

# Bytes of a weight in NF4 with double quantisation: 4 bits and 0.127 (arXiv:2305.14314, section 3).
NF4_BYTES = (4 + 0.127) / 8
ALL_LINEAR = "all-linear"  # peft's name for every linear layer except the head


def make_lora_config(
    lora: LoraSpec, *, is_encoder_decoder: bool, base_model_name: str | None = None
) -> LoraConfig:
    """Return peft's configuration of the adapters; `base_model_name` is stored in it."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules) or ALL_LINEAR,
        task_type="SEQ_2_SEQ_LM" if is_encoder_decoder else "CAUSAL_LM",
        base_model_name_or_path=base_model_name,
    )


def add_adapters(module: PreTrainedModel, lora: LoraSpec) -> PreTrainedModel:
    """Add adapters to the module, in place, and return it. Only they are trained; other parameters
    stay as objects.

    Raises SpecError if a name in `target_modules` matches no layer.
    """
    config = make_lora_config(lora, is_encoder_decoder=module.config.is_encoder_decoder)
    try:
        return inject_adapter_in_model(config, module)
    except ValueError as error:
        linear = sorted(
            {
                name.rpartition(".")[2]
                for name, layer in module.named_modules()
                if hasattr(layer, "weight")
            }
        )
        raise SpecError(
            f"no layer takes adapters: {error}",
            path="model.lora.target_modules",
            got=lora.target_modules,
            allowed=", ".join(linear),
        ) from None


def list_four_bit_weights(module: Any) -> frozenset[str]:
    """Return the names of the frozen weights that `load_quantised` would hold in 4 bits.

    Only linear layers are quantised (transformers/integrations/bitsandbytes.py, 5.23). Experts in
    one tensor are not.
    """
    head = module.get_output_embeddings()
    return frozenset(
        f"{name}.weight"
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and layer is not head
        and not layer.weight.requires_grad
    )


def cast_frozen_tables(module: Any, low_dtype: torch.dtype) -> None:
    """Convert frozen embeddings and the head to `low_dtype`, in place, as most models are published
    in it.

    An embedding returns fp32 as before, so that only its values are rounded. Autocast rounds the
    head's weight at every use.
    """
    tables: dict[int, torch.nn.Parameter] = {}
    head = module.get_output_embeddings()
    for layer in module.modules():
        if (
            layer is not head and not isinstance(layer, torch.nn.Embedding)
        ) or layer.weight.requires_grad:
            continue
        table = torch.nn.Parameter(layer.weight.to(low_dtype), requires_grad=False)
        layer.weight = tables.setdefault(id(layer.weight), table)
        if layer is not head:
            layer.register_forward_hook(lambda _layer, _inputs, rows: rows.float())


def load_quantised(run: TrainingRun, auto_class: Any) -> PreTrainedModel:
    """Return the stored model with 4-bit linear layers (NF4, arXiv:2305.14314, section 3), whole, on this device.

    Raises SpecError if the device, the plan or the model does not support it.
    """
    plan = run.plan
    path = "model.lora.quantise_base"
    hf = run.model.hf
    if run.device != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
        raise SpecError("4-bit layers need CUDA and bitsandbytes", path=path, got=run.device)
    if not isinstance(plan.mechanics, Replicated):
        raise SpecError(
            "4-bit layers cannot be sharded",
            path=path,
            got=f"engine={plan.engine}, zero_stage={int(plan.zero_stage)}",
            allowed="engine=torch with zero_stage=0",
        )
    if not isinstance(hf, str):
        raise SpecError(
            "random weights are not quantised",
            path="model.hf",
            got=hf,
            allowed="a folder or a name",
        )
    low = LOW_PRECISION.get(plan.precision)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=low or torch.float32,
    )
    try:
        module = auto_class.from_pretrained(
            hf,
            quantization_config=settings,
            device_map={"": int(os.environ["LOCAL_RANK"])},
            dtype=torch.float32,
        )
    except (OSError, ValueError) as error:
        raise SpecError(f"the model cannot be loaded: {error}", path="model.hf", got=hf) from None
    if low is not None:
        cast_frozen_tables(module, low)
    return module.train()
