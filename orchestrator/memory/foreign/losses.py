"""How other people's trainings turn logits into a loss."""

from __future__ import annotations

import re
from enum import StrEnum

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.row import Row

# Their loss takes logits as they come: modeling_gpt2.py, modeling_opt.py, modeling_bloom.py and modeling_gpt_neox.py of
# transformers until 4.45, modeling_t5.py, modeling_bart.py, modeling_qwen.py of Qwen/Qwen-7B.
CASTS_NO_LOGITS = re.compile(
    r"(?:[\w-]+/)?(?:qwen-(?:\d|vl)|gpt-?2|opt-?\d|bloom|pythia|gpt-neox|(?:m|flan-?)?t5|m?t0|(?:distil|m)?bart|pegasus)"
)
# Encoders with a head over the vocabulary: run_mlm.py of transformers' examples, pretrain_bert.py of Megatron-LM.
MASKED = re.compile(r"masked[ -]?l(?:m\b|anguage)|\bmlm\b|pretrain_bert|bert pre-?training")
# Loops that hold what the model returned while they go backward, as `outputs = model(**batch); outputs.loss.backward()`
# does: method_comparison of huggingface/peft, thunder/benchmarks/benchmark_litgpt.py, benchmarks/huggingface/bench of
# mila-iqia/milabench, train.py of karpathy/nanoGPT. transformers' Trainer lets go of it before (compute_loss), so does
# ljm565/universal-llm-trainer (del_logits_after_forward, on by default).
HOLDS_OUTPUTS = re.compile(r"^(?!.*universal llm).*own loop|thunder|milabench|nano-?gpt")
# What a benchmark of attention alone goes backward from: the tables in pull requests 28802 to 33298 of transformers.
SUMS_LOGITS = re.compile(r"sum of (?:the )?logits|logits\.sum")
# Loops over a model of one's own; karpathy/nanoGPT is one.
OWN_MODEL = re.compile(r"own loop|nano-?gpt")


class Loss(StrEnum):
    """How the logits are turned into a loss."""

    PLAIN = "plain"  # fp32 logits of all tokens
    IN_PLACE = "in place"  # low-precision logits of all tokens, whose gradient takes their place
    CHUNKED = "chunked"  # low-precision logits of all tokens, fp32 of a chunk
    SHIFTED = "shifted"  # fp32 logits, and their copy without the last token, whose gradient takes its place
    COMPILED = "compiled"  # low-precision logits and gradients of all tokens
    SPREAD = "spread"  # of logits that tensor parallelism cuts, in torch's own operations
    LISTED = "listed"  # fp32 logits and log-softmax of all tokens, gradients of a chunk
    FUSED = "fused"  # logits of a chunk
    LABELS = "labels"  # the plain one, but that labels are shifted instead of logits
    UPCAST = "upcast"  # the plain one in a function of its own, whose caller has the logits in low precision beside it
    LOW = "low precision"  # as the plain one, but none of them wide
    SUMMED = "summed"  # logits as they come, whose gradient is one number that a product copies


def loss_of(row: Row, shape: Architecture, framework: Framework, *, autocasts: bool) -> Loss:
    """As the trainer has it; under DeepSpeed nothing casts the logits of models whose own code does not.

    Nor does anything in a loop over a model of one's own: torch.nn.functional.cross_entropy works in the type of the
    logits, and under autocast on an fp32 copy that is its own (aten/src/ATen/autocast_mode.h, its fp32 list).
    """
    if SUMS_LOGITS.search(row.other):
        return Loss.SUMMED
    loss = _loss_of_trainer(row.said, row.other)
    takes_as_they_come = CASTS_NO_LOGITS.match(row["model"].lower()) is not None
    if loss is Loss.UPCAST and (takes_as_they_come or shape.crossed):
        loss = Loss.PLAIN
    if loss is Loss.PLAIN and "titan" in row.said and row.number("tp", 1) > 1:
        return Loss.SPREAD  # pytorch/torchtitan, parallelism.disable_loss_parallel is off
    if loss is Loss.PLAIN and (shape.crossed or MASKED.search(row.said)):
        loss = Loss.LABELS  # labels stand where they are predicted (modeling_t5.py, modeling_bert.py)
    if loss not in (Loss.PLAIN, Loss.UPCAST, Loss.LABELS):
        return loss
    if OWN_MODEL.search(row.said) and not re.search(r"\bhf\b|transformers|peft", row.said):
        return Loss.LABELS if autocasts else Loss.LOW
    low = takes_as_they_come and "megatron" not in row.said
    return Loss.LOW if low and framework is Framework.DEEPSPEED else loss


def _loss_of_trainer(said: str, other: str) -> Loss:
    """By all words of a row and by those on what was switched on."""
    if re.search(r"liger|unsloth|cut[ _-]cross|\bcce\b", said):
        return Loss.FUSED
    if "composer" in said:
        return Loss.IN_PLACE  # mosaicml/llm-foundry, MPTConfig: loss_fn fused_crossentropy
    if re.search("thunder|universal llm", said):
        return Loss.LOW  # takes logits as the model returns them: src/models of ljm565/universal-llm-trainer
    if re.search("lit-?gpt", said):
        return Loss.LISTED
    if "compile" in other and re.search(r"titan.*\b202[5-9]|\b202[5-9].*titan|nano-?gpt", said):
        return Loss.COMPILED  # torchtitan/components/loss.py, since 2025-04; nanoGPT's model returns its loss
    if re.search(r"fused[^;]*cross.?entropy|cross.?entropy.*fusion", other) and "linear" not in other:
        return Loss.SHIFTED
    if "torchtune default config" in said or "chunk" in other:
        return Loss.CHUNKED
    if re.search(r"transformers v?4\.4[678]\b", said):
        return Loss.UPCAST  # transformers/loss/loss_utils.py, ForCausalLMLoss
    # NVIDIA-NeMo/Automodel shifts labels in its data (components/loss/masked_ce.py)
    return Loss.LABELS if re.search(r"automodel|transformers v?(?:4\.(?:49|5\d)|5)\b", said) else Loss.PLAIN
