"""What other people's trainings compute in one go, and so do not keep."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.mixtures import ONE_TENSOR
from orchestrator.memory.foreign.row import Row

# Of transformers 4, from which minor version on a model's code has torch's attention: all that are not named here since
# 36 (release notes of v4.36.0), and not yet in 5.23 those of the first line; pull requests 33298 and 33724 of 2024-10,
# 30510 of 2024-08, 31031 and 31172 of 2024-06, 28802 of 2024-04.
LAST_MINOR = 57
SDPA_SINCE = tuple(
    (re.compile(names, re.I), minor)
    for names, minor in (
        (r"bloom|gpt-?neo-(?!x)|gpt-?j|codegen", LAST_MINOR + 1),
        (r"distil-?bert|opt-?\d", 46),
        (r"(?:xlm-)?roberta|camembert", 45),
        (r"gpt-?2|pythia|gpt-neox", 42),
        (r"bert", 41),
    )
)
THEIRS = re.compile(r"\bhf\b|transformers|\bpeft\b|accelerate")
# Trainers that put flash attention into the models they are given: atorch/auto/opt_lib of
# intelligent-machine-learning/atorch, module_replace_optimization.py.
FLASHES = re.compile(r"\bfa[234]\b|flash|\batorch\b")
# Kernels that write gradients over activations, and adapters that are one kernel with their base: unsloth/kernels/
# fast_lora.py, axolotl's lora_mlp_kernel; Liger's, but where a row names its loss or its norms alone.
FUSES_ADAPTERS = re.compile(r"unsloth|fused lora|lora[ _](?:mlp|qkv|o)[ _]kernel|lora kernels")
# nemo_automodel/_transformers/auto_model.py of NVIDIA-NeMo/Automodel has Liger's by default, but for its loss.
LIGER = r"automodel|liger(?![ _-](?:fused|flce|cross|loss{}))"
IN_PLACE = re.compile(rf"{FUSES_ADAPTERS.pattern}|{LIGER.format('|rms')}")
# A norm as one kernel: liger_kernel/ops/rms_norm.py, unsloth/kernels/rms_layernorm.py.
FUSES_NORMS = re.compile(rf"unsloth|fused[^;]* rms-?norm|{LIGER.format('')}")
# hidden_act is gelu_new in their config.json; microsoft/phi-*, Salesforce/codegen-* and karpathy/minGPT likewise.
COMPOSES_GELU = re.compile(r"(?:[\w-]+/)?(?:distil-?)?(?:gpt-?2|gpt-?neo-|gpt-?j|codegen-|phi-?[12]\b|min-?gpt)", re.I)
# Their code multiplies queries and keys in fp32: modeling_gpt_neo.py, modeling_gptj.py and modeling_codegen.py cast
# them, modeling_gpt_neox.py turned them by tables of fp32 until it took Llama's in 4.46.
WIDE_QUERIES = re.compile(r"(?:[\w-]+/)?(?:gpt-?neo(?P<x>x)?|gpt-?j|codegen|(?P<pythia>pythia))", re.I)
TURNS_NARROW = 46
# modeling_opt.py and modeling_xglm.py take the greater of a score and the least number, which keeps the score, cast
# fp16 up for the softmax, and drop nothing out of it.
CLAMPS_SCORES = re.compile(r"(?:[\w-]+/)?(?:opt-?\d|xglm)", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which operations are one kernel, or several."""

    flash: bool = True
    copies_groups: bool = False  # keys and values of groups are copied for every head, though scores are not held
    fused: bool = False  # torch.compile, Liger or Transformer Engine: what an activation returns is not kept
    fuses_norms: bool = False  # of a norm its input alone is kept
    in_place: bool = False  # the gradients of what an activation takes in are written over it
    fuses_adapters: bool = False  # adapters share their input with the base, and the feed-forward product is made again
    joint_projection: bool = False  # q, k and v are cut out of one product
    wide_queries: bool = False  # queries and keys are fp32 before their product
    own_score_bytes: int = 0  # kept of a score in low precision by a model's own code; 0: as others keep it
    composed_gelu: bool = False  # of elementary operations, each of which keeps what it multiplies


def kernels_of(row: Row, shape: Architecture, framework: Framework, *, is_old: bool) -> Kernels:
    """The kernels that a row names, or that its trainer has."""
    compiled = "compile" in row.other.replace("compile=false", "")
    megatron = framework.is_megatron and "nanotron" not in row.said
    in_place = IN_PLACE.search(row.said) is not None
    fused = compiled or in_place or megatron
    flash = _is_flash(row, shape, framework, is_old=is_old)
    return Kernels(
        flash=flash,
        # unsloth/utils/attention_dispatch.py, where flash attention is not to be had: before Ampere
        copies_groups="unsloth" in row.said and re.search(r"\b(?:T4|V100)\b", row["gpu"]) is not None,
        fused=fused,
        fuses_norms=compiled or megatron or FUSES_NORMS.search(row.said) is not None,
        in_place=in_place,
        fuses_adapters=FUSES_ADAPTERS.search(row.said) is not None,
        joint_projection=row.has_litgpt_model,
        wide_queries=not flash and _widens_queries(row),
        own_score_bytes=0 if flash else _own_score_bytes(row),
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
    if _holds_scores_in_transformers(row):
        return False
    if framework is Framework.MEGATRON and re.search(r"\blocal\b", row.other):
        return False  # megatron/core/transformer/dot_product_attention.py, without Transformer Engine
    if is_old or framework is Framework.MEGATRON_DEEPSPEED:
        row.infer("attention holds its scores: before flash attention, or on a device without it")
        return False
    return True


def _holds_scores_in_transformers(row: Row) -> bool:
    """Whether a model of transformers runs whose code had no attention but its own, as far as the row says.

    Where no version is stated, torch or Lightning of 2023 is beside one from before 4.36 of that December, but not in
    a run that is dated later.
    """
    if not THEIRS.search(row.said):
        return False
    since = next((minor for names, minor in SDPA_SINCE if names.match(row["model"].split("/")[-1])), 36)
    if found := re.search(r"transformers v?4\.(\d+)", row.said):
        return int(found[1]) < since
    early = re.search(r"(?:torch|lightning|fabric) 2\.[01]\b", row.said) and not re.search(r"\b202[4-9]\b", row.said)
    return since > LAST_MINOR or bool(early)


def _own_score_bytes(row: Row) -> int:
    """Of the code of transformers: what the softmax returns in fp32, and as it is cast; of those that clamp, the score
    before it."""
    if _widens_queries(row):
        return 4 + 2
    clamps = CLAMPS_SCORES.match(row["model"]) and THEIRS.search(row.said)
    return 0 if not clamps else 2 + 4 + 2 if "fp16" in row["precision"].lower() else 2 + 2


def _widens_queries(row: Row) -> bool:
    """Whether the code of transformers ran that multiplies in fp32, as far as the row says."""
    found = WIDE_QUERIES.match(row["model"])
    if found is None or not THEIRS.search(row.said):
        return False
    if not (found["x"] or found["pythia"]):
        return True
    said = re.search(r"transformers v?(?:4\.(\d+)|[5-9]\b)", row.said)
    return said is None or (said[1] is not None and int(said[1]) < TURNS_NARROW)


def _composes_gelu(row: Row) -> bool:
    """Whether the code of transformers or minGPT ran, as far as the row says."""
    theirs = re.search(r"\bhf\b|transformers|trainer|accelerate|min-?gpt", row.said) is not None
    other = row.has_litgpt_model or "megatron" in row.said
    return COMPOSES_GELU.match(row["model"]) is not None and theirs and not other
