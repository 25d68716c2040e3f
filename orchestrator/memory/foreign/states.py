"""What of every parameter a published row holds: adapters, types, gradients, optimizer states, offload, its loss."""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.mixtures import ONE_TENSOR
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.training import Framework, Loss, Rule, Training, base_bytes_of
from orchestrator.memory.foreign.words import (
    AUTOCAST_ALONE,
    CASTS_NO_LOGITS,
    DROPS_OUT,
    HOLDS_OUTPUTS,
    KEEPS_QUANTISED_INPUTS,
    MASKED,
    REDUCES_FP32,
    bits_of,
    loss_of,
    rule_of,
    targets_of,
    tuning_of,
)
from orchestrator.specs.plan import ActivationCheckpointing


def with_adapters(row: Row, training: Training) -> Training:
    """What of the model is trained, and over which base; SpecError where the way of tuning is not known."""
    said = " ".join((row["peft"], row["model"], row["compile_or_other"])).lower()
    quantised = bits_of(said)
    tuning = tuning_of(row["peft"] or said if "lora" in said else row["peft"])
    if tuning.unknown:
        raise row.refused(f"the way of tuning {row['peft']!r} is not known")
    if not tuning.adapts:
        return training
    rank = re.search(r"(?:\b|_)r(?:ank)?[=: ]{0,2}(\d+)\b", said)
    if tuning.small:
        chosen = 1
        row.infer(f"{row['peft']} counted as LoRA of rank 1 on q and v")
    elif rank is None:
        chosen = 64 if "fsdp_qlora" in row.said else 16 if "4bit" in said else 8
        row.infer(f"LoRA rank not stated: {chosen} taken, as the framework's default")
    else:
        chosen = int(rank[1])
    usual: tuple[str, ...] = ("q", "v") if tuning.small else ("q", "k", "v")
    everywhere = re.search(r"\ball\b", said) is not None or "fsdp_qlora" in row.said
    if ONE_TENSOR.search(row["model"]) and not re.search("unsloth|expert|target_parameters", row.said):
        everywhere, usual = False, ("q", "k", "v", "o")
    # peft/utils/other.py, prepare_model_for_kbit_training: all but what GPTQ holds is cast up
    prepared = training.framework in (Framework.PLAIN, Framework.DEVICE_MAP) and not re.search(
        # axolotl/loaders/model.py casts embeddings and norms back where attention is flash; llamafactory/model/
        # model_utils/checkpointing.py casts norms if it is told so
        "torchtune|unsloth|axolotl|lit-?gpt|llama-?factory|no preparation",
        row.said,
    )
    ends_fp32 = bool(quantised) and prepared and "gptq" not in said and "fsdp_qlora" not in row.said
    if ends_fp32:
        row.infer("embedding, head and norms cast to fp32 by peft's preparation for quantised training")
    return replace(
        training,
        lora_rank=chosen,
        lora_targets=() if everywhere else targets_of(row["peft"].lower()) or usual,
        keeps_adapted_outputs=tuning.keeps_outputs,
        lora_fp32=re.search("torchtune|fsdp_qlora|lit-?gpt", row.said) is None,
        lora_dropout=DROPS_OUT.search(row.said) is not None,
        trains_ends=re.search(r"modules_to_save|\(emb\)|embedding.*head", row["peft"]) is not None,
        base_bytes=base_bytes_of(quantised, double="nf4" not in said or "dq" in said) if quantised else None,
        keeps_quantised_inputs=quantised == 4 and KEEPS_QUANTISED_INPUTS.search(row.said) is not None,
        quantises_head=row.is_litgpt,  # lightning/fabric/plugins/precision/bitsandbytes.py: every nn.Linear
        frozen_gradients=training.framework is Framework.FSDP1 and row.is_litgpt,
        holds_boundaries=_is_hf_fsdp(row, training.framework)
        and training.checkpointing is ActivationCheckpointing.FULL
        and "non-reentrant" not in row.said,
        ends_fp32=ends_fp32,
    )


def with_states(row: Row, training: Training) -> Training:
    """Precision and optimizer: what there is of every parameter."""
    framework = training.framework
    precision, optimizer = (
        row["precision"].lower(),
        " ".join((row["optimizer"] or row["peft"], row.other)).lower(),
    )
    low = re.search(r"16|8|mixed|amp|half", precision) is not None or "32" not in precision
    if training.ends_fp32 and (
        re.search(r"\b(?:pure|true)\b", precision)
        or ("own loop" in row.said and not re.search(r"\bmixed\b|\bamp\b|autocast", precision))
    ):
        # bitsandbytes/nn/modules.py, Linear4bit: a product returns the type of its input, that of fp32 norms
        row.infer("all is fp32 but the quantised matrices: nothing casts what the norms return")
        low = False
    if not precision:
        row.infer("bf16: the precision is not stated")
    if precision.startswith("fp8") and not training.fp8:
        row.infer("counted as bf16: neither 8-bit copies of inputs nor of weights")
    megatron = framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)
    # transformers 5 loads weights in the type they were saved in (MIGRATION_GUIDE_V5.md, on dtype)
    pure = (re.search(r"\bpure\b|\btrue\b", precision) and "amp" not in precision) or re.search(
        r"torchtune|swift|fsdp_qlora|llama-factory|unsloth|automodel|transformers v?5\b", row.said
    )
    full = not training.lora_rank
    whole = full or (training.base_bytes is None and re.search(r"\bmixed\b|\bamp\b", precision) is not None)
    mixed = low and whole and framework in (Framework.PLAIN, Framework.FSDP1, Framework.FSDP2, Framework.DEVICE_MAP)
    autocasts = mixed and not pure
    rule = rule_of(optimizer)
    if rule is None:
        raise row.refused(f"no model of the optimizer's states ({row['optimizer'] or row['peft']})")
    if autocasts:
        row.infer("weights stay fp32 and are cast where they are used")
    masters = low and full and (megatron or framework is Framework.DEEPSPEED)
    offload = row["offload"].lower()
    if not offload and "offload" in row["sharding"].lower():
        offload = "cpu" if training.zero_stage == 3 else "optimizer"
    only_optimizer = bool(re.match(r"(cpu )?optim", offload)) or "opt=y" in offload
    steps_on_host = re.search(r"cpu[ _-]?adam", optimizer) is not None  # deepspeed/ops/adam/cpu_adam.py
    only_optimizer |= steps_on_host and not offload
    everything = not only_optimizer and "cpu" in re.sub(r"act_cpu=\w+", "", offload)
    return replace(
        training,
        low_precision=low,
        autocasts=autocasts,
        masters=masters,
        fp32_gradients=megatron and low and _adds_in_fp32(row, framework, precision),
        ends_apart="torchtune" in row.said,
        reduces_fp32=REDUCES_FP32.search(row.said) is not None,
        gathers_fp32=autocasts and AUTOCAST_ALONE.search(row.said) is not None,
        rule=rule,
        low_states=low
        and not autocasts
        and (full or not training.lora_fp32)
        # beside fp32 masters they are fp32, but for --use-precision-aware-optimizer with --exp-avg-dtype bf16 of
        # megatron/core/optimizer
        and (not masters or "bf16 states" in optimizer),
        step_in_backward=re.search("opt[- ]in[- ]bwd|lomo", optimizer) is not None,
        paged="paged" in optimizer,
        foreach=(framework in (Framework.PLAIN, Framework.DEVICE_MAP) or _has_torch_step(row, framework))
        and rule not in (Rule.ADAM_8BIT, Rule.ADAFACTOR)
        and not training.is_old  # torch/optim/adamw.py, since 1.13
        and not re.search(r"fused adam|fused optim", optimizer)
        and "fused" not in row["optimizer"].lower()
        and "torchtune" not in row.said,  # whose configurations say fused=True
        loss=_loss_of(row, training),
        holds_outputs=HOLDS_OUTPUTS.search(row.said) is not None,
        loss_chunks=max(1, training.sequence_length // 128) if row.is_litgpt else training.loss_chunks,
        offload_parameters=(everything and training.zero_stage not in (1, 2)) or "param=y" in offload,
        offload_optimizer=everything or only_optimizer,
        offload_activations="activation" in offload
        or "unsloth" in row["act_ckpt"].lower()  # unsloth_zoo/gradient_checkpointing.py
        or "activation offload" in row.other
        or _is_old_zero_3(row),
    )


def _has_torch_step(row: Row, framework: Framework) -> bool:
    """torch.optim steps over shards: under FSDP, and where DeepSpeed's configuration names no optimizer.

    So in examples/deepspeed of hiyouga/LLaMA-Factory, xtuner/configs/deepspeed of InternLM/xtuner and
    swift/config of modelscope/ms-swift.
    """
    bare = framework is Framework.DEEPSPEED and re.search("llama-?factory|xtuner|swift", row.said) is not None
    return bare or _is_hf_fsdp(row, framework)


def _is_hf_fsdp(row: Row, framework: Framework) -> bool:
    """transformers' Trainer: torch.optim steps over FSDP's shards, reentrant checkpointing wraps FSDP's units."""
    return framework is Framework.FSDP1 and re.search("hf trainer|transformers", row.said) is not None


def _loss_of(row: Row, training: Training) -> Loss:
    """As the trainer has it; under DeepSpeed nothing casts the logits of models whose own code does not."""
    loss = loss_of(row.said, row.other)
    if loss is Loss.PLAIN and (training.shape.crossed or MASKED.search(row.said)):
        loss = Loss.LABELS  # labels stand where they are predicted (modeling_t5.py, modeling_bert.py)
    low = CASTS_NO_LOGITS.match(row["model"].lower()) and "megatron" not in row.said
    plain = loss in (Loss.PLAIN, Loss.LABELS)
    return Loss.LOW if low and plain and training.framework is Framework.DEEPSPEED else loss


def _is_old_zero_3(row: Row) -> bool:
    """DeepSpeedExamples/Megatron-LM-v1.1.5-ZeRO3 ran with --partition-activations --checkpoint-in-cpu."""
    old = "zero-3 (old branch)" in row.said
    if old:
        row.infer("checkpoints of activations on the host, as this branch's example scripts have them")
    return old


def _adds_in_fp32(row: Row, framework: Framework, precision: str) -> bool:
    """Megatron-LM turns it on with bf16 (megatron/training/arguments.py); its DeepSpeed fork has to say so."""
    if "fp32 grad" in precision:
        return True
    if row.is_bridge:
        row.infer("gradients are reduced in bf16, as Megatron-Bridge's performance recipes have it")
        return False
    if framework is Framework.MEGATRON and precision.startswith(("bf16", "fp8")):
        row.infer("gradients are added up in fp32, as Megatron-LM does with bf16")
        return True
    return False
