"""In which types a published row's training holds parameters, gradients and states, and what of them on the host."""

from __future__ import annotations

import re
from dataclasses import replace

from orchestrator.memory.foreign.frameworks import Framework, fsdp_of, megatron_of
from orchestrator.memory.foreign.losses import HOLDS_OUTPUTS, loss_of
from orchestrator.memory.foreign.optimizers import optimizer_of
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.plan import ActivationCheckpointing

# Trainers that load weights in low precision; transformers 5 in the type they were saved in (MIGRATION_GUIDE_V5.md, on
# dtype), torchrun_main.py of jiaweizzhao/GaLore and run_pretrain.py of VITA-Group/Q-GaLore in that of --dtype.
PURE = re.compile(
    r"torchtune|swift|fsdp_qlora|llama-factory|unsloth|automodel|fairseq|torchrun_main|run_pretrain|transformers v?5\b"
)


def with_states(row: Row, training: Training) -> Training:
    """The training with the row's precision, optimizer and loss; its adapters are known already."""
    framework, adapters = training.framework, training.adapters
    full, said = not adapters.rank, row["precision"].lower()
    low = _is_low(row, training, said)
    pure = (
        (re.search(r"\bpure\b|\btrue\b", said) is not None and "amp" not in said)
        or PURE.search(row.said) is not None
        or _is_bare(row, said)
    )
    whole = full or (adapters.base_bytes is None and re.search(r"\bmixed\b|\bamp\b", said) is not None)
    casts = framework.is_fsdp or framework in (Framework.PLAIN, Framework.DEVICE_MAP)
    autocasts = low and whole and casts and not pure
    if autocasts:
        row.infer("weights stay fp32 and are cast where they are used")
    return replace(
        training,
        low_precision=low,
        autocasts=autocasts,
        optimizer=optimizer_of(
            row,
            framework,
            # fairseq/optim/fp16_optimizer.py: the model is half, a flat fp32 copy beside it is stepped
            masters=low
            and full
            and (framework.is_megatron or framework is Framework.DEEPSPEED or "fairseq" in row.said),
            narrow=low and not autocasts and (full or not adapters.fp32),
            is_old=training.platform.is_old,
        ),
        megatron=megatron_of(row, framework, low=low),
        fsdp=fsdp_of(
            row,
            framework,
            autocasts=autocasts,
            adapts=not full,
            checkpoints=training.checkpointing is ActivationCheckpointing.FULL,
        ),
        loss=loss_of(row, training.shape, framework, autocasts=autocasts),
        loss_chunks=max(1, training.sequence_length // 128) if row.is_litgpt else training.loss_chunks,
        holds_outputs=HOLDS_OUTPUTS.search(row.said) is not None,
    )


def _is_low(row: Row, training: Training, said: str) -> bool:
    """Whether products are in low precision, by what a row says of it."""
    low = re.search(r"16|8|mixed|amp|half", said) is not None or "32" not in said
    pure = re.search(r"\b(?:pure|true)\b", said) is not None
    if training.adapters.norms_fp32 and (pure or _is_bare(row, said)):
        # bitsandbytes/nn/modules.py, Linear4bit: a product returns the type of its input, that of fp32 norms
        row.infer("all is fp32 but the quantised matrices: nothing casts what the norms return")
        low = False
    if not said:
        row.infer("bf16: the precision is not stated")
    if said.startswith("fp8") and training.framework is not Framework.MEGATRON:
        row.infer("counted as bf16: neither 8-bit copies of inputs nor of weights")
    return low


def _is_bare(row: Row, said: str) -> bool:
    """Whether nothing autocasts: trainers do so behind a word such as bf16, a loop of one's own only if it says so."""
    return "own loop" in row.said and not re.search(r"\bmixed\b|\bamp\b|autocast", said)


def with_offload(row: Row, training: Training) -> Training:
    """The training with what its row says to be on the host."""
    said = row["offload"].lower()
    if not said and "offload" in row["sharding"].lower():
        said = "cpu" if training.zero_stage == 3 else "optimizer"
    optimizer = " ".join((row["optimizer"] or row["peft"], row.other)).lower()
    steps_on_host = re.search(r"cpu[ _-]?adam", optimizer) is not None  # deepspeed/ops/adam/cpu_adam.py
    only_optimizer = bool(re.match(r"(cpu )?optim", said)) or "opt=y" in said or (steps_on_host and not said)
    everything = not only_optimizer and "cpu" in re.sub(r"act_cpu=\w+", "", said)
    return replace(
        training,
        offload_parameters=(everything and training.zero_stage not in (1, 2)) or "param=y" in said,
        offload_optimizer=everything or only_optimizer,
        offload_activations="activation" in said
        or "unsloth" in row["act_ckpt"].lower()  # unsloth_zoo/gradient_checkpointing.py
        or "activation offload" in row.other
        or _is_old_zero_3(row),
    )


def _is_old_zero_3(row: Row) -> bool:
    """DeepSpeedExamples/Megatron-LM-v1.1.5-ZeRO3 ran with --partition-activations --checkpoint-in-cpu."""
    old = "zero-3 (old branch)" in row.said
    if old:
        row.infer("checkpoints of activations on the host, as this branch's example scripts have them")
    return old
