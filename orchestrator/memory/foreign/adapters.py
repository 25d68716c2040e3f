"""Adapters over a frozen base, in other people's trainings: what is trained of them, and what of the base is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.mixtures import ONE_TENSOR
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.hf_profiles import NF4_BYTES

LORA = re.compile(r"lora|dora\b|pissa|loftq|olora|corda|\beva\b", re.I)
# The methods of peft (huggingface/peft src/peft/tuners) beside LoRA that train little and leave all else as it is.
SMALL = re.compile(
    r"\b(?:ia3|vera|pvera|vblora|ln[_ -]?tuning|prompt[_ -]?tuning|prefix[_ -]?tuning|p-?tuning|oft|boft|hra|loha|lokr"
    r"|fourierft|waveft|shira|road|miss|bone|c3a|randlora|adaption[_ -]?prompt|llama-adapter|adapters?|bitfit)\b",
    re.I,
)
LEARNS_ALL = re.compile(
    r"^(?:n$|n/?a$|✘|✗|full\b|sft\b|fft\b|none\b|no\b|-|false\b|pretrain|all parameters)|\bfull\b", re.I
)
# How public trainers work, where their rows do not say so: bitsandbytes kept what goes into a 4-bit product until
# 0.43.3 (pull 1270 of 2024-07); of dropout before adapters, the defaults of each.
KEEPS_QUANTISED_INPUTS = re.compile(r"lit-?gpt|swift 2\.|fsdp_qlora|bitsandbytes 0\.(?:3\d|4[0-2])\b")
# It kept it as an attribute (bitsandbytes/autograd/_functions.py, MatMul4Bit), which hooks on saved tensors do not see:
# checkpointing that is not reentrant frees nothing of it (AnswerDotAI/fsdp_qlora README.md on reentrant_checkpointing).
# swift/llm/utils/model.py has it so (fix_gradient_checkpointing_warning).
NOT_REENTRANT = re.compile(r"swift 2\.|non-?reentrant|not reentrant")
DROPS_OUT = re.compile(r"swift 2\.|lit-?gpt|fsdp_qlora|llama-recipes|\bqwen finetune|lora dropout|lora_dropout")

# What model code calls its projections: modeling_gpt2.py, modeling_bloom.py, modeling_opt.py and modeling_phi3.py of
# transformers, modeling_qwen.py of Qwen/Qwen-7B, modeling_internlm2.py of internlm/internlm2-7b, modeling_baichuan.py
# of baichuan-inc/Baichuan-7B. A name without its module, such as c_proj, is found in both blocks: peft compares the end
# of a name (peft/tuners/tuners_utils.py, check_target_module_exists).
PROJECTIONS = {"mlp": ("up", "gate", "down"), "attention": ("q", "k", "v", "o")}
PROJECTIONS |= dict.fromkeys(("c_attn", "qkv", "query_key_value", "wqkv", "w_pack"), ("q", "k", "v"))
PROJECTIONS |= {"c_proj": ("o", "down"), "attn.c_proj": ("o",), "mlp.c_proj": ("down",), "gate_up": ("gate", "up")}
PROJECTIONS |= dict.fromkeys(("wo", "out"), ("o",)) | dict.fromkeys(("c_fc", "fc1", "dense_h_to_4h"), ("up",))
PROJECTIONS |= dict.fromkeys(("fc2", "dense_4h_to_h"), ("down",))
_NAMES = sorted({*PROJECTIONS, "q", "k", "v", "o", "gate", "up", "down", "w1", "w2", "w3"} - {"out"}, key=len)
_TARGET = re.compile(rf"(?<![\w.])(out(?=_proj)|{'|'.join(re.escape(name) for name in _NAMES)})(?:_proj)?\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What stands beside frozen matrices, and how these are held."""

    rank: int = 0  # 0: all is trained
    targets: tuple[str, ...] = ()  # () with a rank: all projections
    fp32: bool = True
    dropout: bool = False
    keeps_outputs: bool = False  # DoRA: what base and adapter return, before it is scaled
    trains_ends: bool = False  # beside adapters, copies of embedding and head (peft: modules_to_save)
    base_bytes: float | None = None  # per element of the frozen matrices; None: as wide as the weights
    keeps_quantised_inputs: bool = False  # a product with a quantised matrix keeps its input
    hides_quantised_inputs: bool = False  # and checkpointing does not know of it
    quantises_head: bool = False  # as the other matrices
    norms_fp32: bool = False  # frozen norms were cast up, so that what a layer hands on is fp32
    ends_fp32: bool = False  # and the frozen embedding and head


def adapters_of(row: Row, framework: Framework) -> Adapters:
    """What of the model is trained, and over which base; SpecError where the way of tuning is not known."""
    peft = row["peft"]
    said = " ".join((peft, row["model"], row["compile_or_other"])).lower()
    way = peft or said if "lora" in said else peft
    is_lora = LORA.search(way) is not None
    if not is_lora and (not way or LEARNS_ALL.search(way) or re.search(r"adamw?|galore|opt[- ]in[- ]bwd", way, re.I)):
        return Adapters()
    if not is_lora and not SMALL.search(way):
        raise row.refused(f"the way of tuning {peft!r} is not known")
    quantised = bits_of(said)
    casts_up = quantised > 0 and _casts_up(row, framework, said)
    keeps_inputs = quantised == 4 and "gptq" not in said and KEEPS_QUANTISED_INPUTS.search(row.said) is not None
    everywhere = re.search(r"\ball\b", said) is not None or "fsdp_qlora" in row.said
    usual: tuple[str, ...] = ("q", "k", "v") if is_lora else ("q", "v")
    if ONE_TENSOR.search(row["model"]) and not re.search("unsloth|expert|target_parameters", row.said):
        everywhere, usual = False, ("q", "k", "v", "o")
    return Adapters(
        rank=_rank_of(row, said, is_lora=is_lora),
        targets=() if everywhere else targets_of(peft.lower()) or usual,
        fp32=re.search("torchtune|fsdp_qlora|lit-?gpt", row.said) is None,
        dropout=DROPS_OUT.search(row.said) is not None,
        # peft/tuners/lora/dora.py scales the sum of base and adapter by a trained magnitude, for which it keeps both
        keeps_outputs=is_lora and re.search(r"\bdora\b|use_dora", way, re.I) is not None,
        trains_ends=re.search(r"modules_to_save|\(emb\)|embedding.*head", peft) is not None,
        base_bytes=base_bytes_of(quantised, double="nf4" not in said or "dq" in said) if quantised else None,
        keeps_quantised_inputs=keeps_inputs,
        hides_quantised_inputs=keeps_inputs and NOT_REENTRANT.search(row.said) is not None,
        quantises_head=row.is_litgpt,  # lightning/fabric/plugins/precision/bitsandbytes.py: every nn.Linear
        norms_fp32=casts_up,
        ends_fp32=casts_up and not (quantised == 4 and _casts_ends_back(row)),
    )


def _rank_of(row: Row, said: str, *, is_lora: bool) -> int:
    if not is_lora:
        row.infer(f"{row['peft']} counted as LoRA of rank 1 on q and v")
        return 1
    if rank := re.search(r"(?:\b|_)r(?:ank)?[=: ]{0,2}(\d+)\b", said):
        return int(rank[1])
    usual = 64 if "fsdp_qlora" in row.said else 16 if "4bit" in said else 8
    row.infer(f"LoRA rank not stated: {usual} taken, as the framework's default")
    return usual


def _casts_up(row: Row, framework: Framework, said: str) -> bool:
    """Whether peft prepared the model (peft/utils/other.py, prepare_model_for_kbit_training), which casts up all but
    what GPTQ holds.

    axolotl/loaders/model.py casts embeddings and norms back where attention is flash; llamafactory/model/model_utils/
    checkpointing.py casts norms if it is told so; swift/llm/tuner.py of modelscope/ms-swift prepares nothing. Until 0.3
    of 2023-05 peft cast only norms that are called layer_norm, which Llama has none of; transformers was at 4.28.
    """
    others = (
        r"torchtune|unsloth|axolotl|lit-?gpt|llama-?factory|no preparation|fsdp_qlora|swift|transformers 4\.2[0-8]\b"
    )
    casts = framework in (Framework.PLAIN, Framework.DEVICE_MAP) and not re.search(others, row.said)
    if not casts or "gptq" in said:
        return False
    row.infer("embedding, head and norms cast to fp32 by peft's preparation for quantised training")
    return True


def _casts_ends_back(row: Row) -> bool:
    """Whether TRL made embedding and head bf16 again, behind peft's preparation of a 4-bit base, and left the norms.

    trl/trainer/utils.py, peft_module_casting_to_bf16, since 0.7.5 of 2023-12.
    """
    casts = re.search(r"\btrl\b", row.said) is not None and "bf16" in row["precision"].lower()
    if casts:
        row.infer("embedding and head are bf16 again, as TRL casts them")
    return casts


def targets_of(said: str) -> tuple[str, ...]:
    """The projections that a row names to adapt, in lower case; () where it names none.

    Behind c_attn, w1 and w2 are what Qwen multiplies with each other; else w1, w2 and w3 are Llama's.
    """
    words = _TARGET.findall(said)
    names = {"w1": ("gate",), "w2": ("up",) if "c_attn" in words else ("down",), "w3": ("up",)} | PROJECTIONS
    return tuple(dict.fromkeys(name for word in words for name in names.get(word, (word,))))


def bits_of(said: str) -> int:
    """Bits of an element of a quantised base, by the words of a row in lower case; 0: it is not quantised."""
    said = re.sub(r"(?<=[48])[-_ ]bit\b", "bit", said)
    if re.search(r"int8|8bit base|(?:lora|load in|load_in_)[^;,]*\b8bit|\b8bit lora", said):
        return 8
    return 4 if "qlora" in said or "int4" in said or "4bit" in said or "nf4" in said else 0


def base_bytes_of(bits: int, *, double: bool = True) -> float:
    """Bytes per element of a frozen matrix: int8 with a scale per row, or NF4, with fp32 scales of 64 if not double."""
    if bits == 8:
        return 1.0
    return NF4_BYTES if double else 0.5 + 4 / 64
