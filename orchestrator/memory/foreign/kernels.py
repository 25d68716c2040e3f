"""What other people's trainings compute in one go, and so do not keep."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.mixtures import ONE_TENSOR
from orchestrator.memory.foreign.row import Row

# Trainers that put flash attention into the models they are given: atorch/auto/opt_lib of
# intelligent-machine-learning/atorch, module_replace_optimization.py.
FLASHES = re.compile(r"\bfa[234]\b|flash|\batorch\b")
# Kernels that write gradients over activations, and adapters that are one kernel with their base: unsloth/kernels/
# fast_lora.py, axolotl's lora_mlp_kernel; Liger's, but where a row names its loss or its norms alone.
FUSES_ADAPTERS = re.compile(r"unsloth|fused lora|lora[ _](?:mlp|qkv|o)[ _]kernel|lora kernels")
# nemo_automodel/_transformers/auto_model.py of NVIDIA-NeMo/Automodel has Liger's by default, but for its loss.
LIGER = re.compile(r"liger|automodel")
IN_PLACE = re.compile(rf"{FUSES_ADAPTERS.pattern}|automodel|liger(?![ _-](?:fused|flce|cross|loss|rms))")
# hidden_act is gelu_new in their config.json; microsoft/phi-*, Salesforce/codegen-* and karpathy/minGPT likewise.
COMPOSES_GELU = re.compile(r"(?:[\w-]+/)?(?:distil-?)?(?:gpt-?2|gpt-?neo-|gpt-?j|codegen-|phi-?[12]\b|min-?gpt)", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which operations are one kernel, or several."""

    flash: bool = True
    fused: bool = False  # torch.compile, Liger or Transformer Engine: elementwise intermediates are not kept
    in_place: bool = False  # the gradients of what an activation takes in are written over it
    fuses_adapters: bool = False  # adapters share their input with the base, and the feed-forward product is made again
    joint_projection: bool = False  # q, k and v are cut out of one product
    composed_gelu: bool = False  # of elementary operations, each of which keeps what it multiplies


def kernels_of(row: Row, shape: Architecture, framework: Framework, *, is_old: bool) -> Kernels:
    """The kernels that a row names, or that its trainer has."""
    compiled = "compile" in row.other.replace("compile=false", "")
    megatron = framework.is_megatron and "nanotron" not in row.said
    fused = compiled or LIGER.search(row.said) is not None or megatron
    return Kernels(
        flash=_is_flash(row, shape, framework, is_old=is_old),
        fused=fused,
        in_place=IN_PLACE.search(row.said) is not None,
        fuses_adapters=FUSES_ADAPTERS.search(row.said) is not None,
        joint_projection=row.has_litgpt_model,
        composed_gelu=not fused and not shape.gated and _composes_gelu(row),
    )


def _is_flash(row: Row, shape: Architecture, framework: Framework, *, is_old: bool) -> bool:
    if "use flash attn=✘" in row.said:
        return False
    if ONE_TENSOR.search(row["model"]) and re.search(r"\bfa3\b|flash|flex|unsloth|megatron", row.said):
        return True  # kernels that know a sink
    if shape.flash is False or re.search(r"eager attention|(?:without|no) flash|\bunfused\b", row.said):
        return False
    if shape.flash or FLASHES.search(row.said):
        return True
    if re.search(r"transformers v?4\.(?:[0-2]?\d|3[0-5])\b", row.said):
        return False  # its models had no attention but their own before 4.36 (huggingface/transformers v4.36.0)
    if framework is Framework.MEGATRON and re.search(r"\blocal\b", row.other):
        return False  # megatron/core/transformer/dot_product_attention.py, without Transformer Engine
    if is_old or framework is Framework.MEGATRON_DEEPSPEED:
        row.infer("attention holds its scores: before flash attention, or on a device without it")
        return False
    return True


def _composes_gelu(row: Row) -> bool:
    """Whether the code of transformers or minGPT ran, as far as the row says."""
    theirs = re.search(r"\bhf\b|transformers|trainer|accelerate|min-?gpt", row.said) is not None
    other = row.has_litgpt_model or "megatron" in row.said
    return COMPOSES_GELU.match(row["model"]) is not None and theirs and not other
