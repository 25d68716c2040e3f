"""What the words mean in which people publish trainings: kinds of models, ways of tuning, optimizers, trainers.

Every entry states what a public tool does under that name (the repository is named where it is not obvious); a word
that is not here is not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.foreign.training import BUCKET_ELEMENTS, Loss, Rule

CONVOLUTIONS = re.compile(
    r"vgg|resne[sx]?t|xception|mobilenet|efficientnet|inception|convnext|r-?cnn|deeplab|densenet|\br-?(?:50|101)\b"
    r"|\bx-?101|\bu-?net|swin|\bvit\b|vit-|\bdeit|\bbeit|\bmae\b|\bdino|retinanet|\byolo|\bdetr\b|\bfcos|\bssd\d"
    r"|mask2former|segformer|upernet|pspnet|\bhrnet|regnet|slowfast|videomae|pointpillars|\bsam\b|\bclip\b"
    r"|diffusion|\bsd ?\d|sdxl|\bflux\b|cogvideo|hunyuanvideo|\bwan ?2|\bltx|controlnet|\bdit\b|pixart|dreambooth"
    r"|hifi-?gan|\bgan\b",
    re.I,
)
NOT_DECODERS = re.compile(
    r"\bul2\b|umt5|xlnet|albert|deberta|electra|mbart|pegasus|whisper|wav2vec|hubert|mamba|rwkv"
    r"|jamba|retnet|hyena|wide-resnet|llava|internvl|-vl\b|vision|omni",
    re.I,
)
EXPERTS = re.compile(
    r"mixtral|\bmoe\b|-a\d+(?:\.\d+)?b\b|\dx\d+b\b|deepseek-?v[23]|gpt-?oss|\bdbrx|\bgrok|olmoe|switch-", re.I
)
# The methods of peft (huggingface/peft src/peft/tuners) beside LoRA that train little and leave all else as it is.
SMALL = re.compile(
    r"\b(?:ia3|vera|pvera|vblora|ln[_ -]?tuning|prompt[_ -]?tuning|prefix[_ -]?tuning|p-?tuning|oft|boft|hra|loha|lokr"
    r"|fourierft|waveft|shira|road|miss|bone|c3a|randlora|adaption[_ -]?prompt|llama-adapter|adapters?|bitfit)\b",
    re.I,
)
LORA = re.compile(r"lora|dora\b|pissa|loftq|olora|corda|\beva\b", re.I)
OWN_STATES = re.compile(
    r"adamw?[ _-]?4-?bit|4-?bit[ _-]adam|galore|apollo|\blisa\b|badam|shampoo|\bsoap\b|\bhift\b|mezo|fira\b", re.I
)
LEARNS_ALL = re.compile(
    r"^(?:n$|n/?a$|✘|✗|full\b|sft\b|fft\b|none\b|no\b|-|false\b|pretrain|all parameters)|\bfull\b", re.I
)

# How public trainers work, where their rows do not say so: bitsandbytes kept what goes into a 4-bit product until
# 0.43.3 (pull 1270 of 2024-07); Fabric and Accelerate add up gradients under FSDP's no_sync, Accelerate unless it is
# told sync_each_batch; of dropout before adapters, the defaults of each.
KEEPS_QUANTISED_INPUTS = re.compile(r"lit-?gpt|swift 2\.|fsdp_qlora|bitsandbytes 0\.(?:3\d|4[0-2])\b")
UNSYNCED = re.compile(r"lit-?gpt|fabric|accelerate|hf trainer|transformers")
DROPS_OUT = re.compile(r"swift 2\.|lit-?gpt|fsdp_qlora|llama-recipes|\bqwen finetune|lora dropout|lora_dropout")
# Loops that hold what the model returned while they go backward, as `outputs = model(**batch); outputs.loss.backward()`
# does: method_comparison of huggingface/peft, thunder/benchmarks/benchmark_litgpt.py, benchmarks/huggingface/bench of
# mila-iqia/milabench, train.py of karpathy/nanoGPT. transformers' Trainer lets go of it before (compute_loss).
HOLDS_OUTPUTS = re.compile(r"own loop|thunder|milabench|nano-?gpt")
# Trainers whose FSDP has no mixed-precision policy under autocast, and that put flash attention into the models they
# are given: atorch/auto/opt_lib of intelligent-machine-learning/atorch, amp_optimization.py and
# module_replace_optimization.py.
AUTOCAST_ALONE = re.compile(r"\batorch\b")
FLASHES = re.compile(r"\bfa[234]\b|flash|\batorch\b")
# Sharded gradients travel in fp32: training.mixed_precision_reduce of pytorch/torchtitan has it so, as has composer's
# mixed_precision: DEFAULT (mosaicml/composer, trainer/mosaic_fsdp_utils.py).
REDUCES_FP32 = re.compile(r"mixed=default|titan|reduc\w+ in fp32|fp32 reduc|reduce_dtype[ =:]*(?:fp32|float32)")
# "ZeRO-3", "ZeRO Stage 2", "stage3", "z3"; a pipeline's stage is not one of ZeRO's
ZERO_STAGE = re.compile(r"(?:zero[ _-]*(?:stage[ _-]*)?|(?<!pipeline )\bstage[ _-]*|\bz)([0-3])\b")
ENGINES_WITHOUT_MODEL = re.compile(
    r"jax|maxtext|easylm|levanter|\btpu|tensorflow|keras|paddle|mindspore|mindspeed|internevo|oneflow|libai|patrickstar"
)
# Kernels that write gradients over activations, and adapters that are one kernel with their base: unsloth/kernels/
# fast_lora.py, axolotl's lora_mlp_kernel; Liger's, but where a row names its loss or its norms alone.
FUSES_ADAPTERS = re.compile(r"unsloth|fused lora|lora[ _](?:mlp|qkv|o)[ _]kernel|lora kernels")
# nemo_automodel/_transformers/auto_model.py of NVIDIA-NeMo/Automodel has Liger's by default, but for its loss.
LIGER = re.compile(r"liger|automodel")
IN_PLACE = re.compile(rf"{FUSES_ADAPTERS.pattern}|automodel|liger(?![ _-](?:fused|flce|cross|loss|rms))")
# gradient_checkpointing is on unless it is turned off: swift/trainers/arguments.py, llamafactory/model/model_utils/
# checkpointing.py, unsloth/models/_utils.py
CHECKPOINTS = re.compile(r"swift|llama-?factory|unsloth")
# Their loss takes logits as they come: modeling_gpt2.py, modeling_opt.py, modeling_bloom.py and modeling_gpt_neox.py of
# transformers until 4.45, modeling_t5.py, modeling_bart.py, modeling_qwen.py of Qwen/Qwen-7B.
CASTS_NO_LOGITS = re.compile(r"(?:[\w-]+/)?(?:qwen-\d|gpt-?2|opt-?\d|bloom|pythia|gpt-neox|(?:m|flan-?)?t5|m?t0|bart)")
# hidden_act is gelu_new in their config.json; microsoft/phi-*, Salesforce/codegen-* and karpathy/minGPT likewise.
COMPOSES_GELU = re.compile(r"(?:[\w-]+/)?(?:distil-?)?(?:gpt-?2|gpt-?neo-|gpt-?j|codegen-|phi-?[12]\b|min-?gpt)", re.I)
# Encoders with a head over the vocabulary: run_mlm.py of transformers' examples, pretrain_bert.py of Megatron-LM.
MASKED = re.compile(r"masked[ -]?l(?:m\b|anguage)|\bmlm\b|pretrain_bert|bert pre-?training")
AUTO_BUCKETS = re.compile(r"\bhf\b(?! accelerate)|swift|llama-?factory|axolotl|zero-3 \(old branch\)")
PREFERENCES = re.compile(r"\b(?:dpo|ppo|grpo|orpo|simpo|kto|rlhf|rloo|reward model(?:ling|ing)?)\b")

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
class Tuning:
    """What of a model is trained."""

    adapts: bool  # not all of it
    small: bool = False  # less than LoRA of rank 1 has
    keeps_outputs: bool = False  # what adapted projections return is kept to be scaled
    unknown: bool = False


def tuning_of(said: str) -> Tuning:
    """What a row's column on parameter-efficient tuning says; `unknown` where it names nothing that is known here.

    DoRA (peft/tuners/lora/dora.py) scales the sum of base and adapter by a trained magnitude, for which it keeps both.
    """
    if LORA.search(said):
        return Tuning(adapts=True, keeps_outputs=re.search(r"\bdora\b|use_dora", said, re.I) is not None)
    if not said or LEARNS_ALL.search(said) or re.search(r"adamw?|opt[- ]in[- ]bwd", said, re.I):
        return Tuning(adapts=False)
    if SMALL.search(said):
        return Tuning(adapts=True, small=True)
    return Tuning(adapts=False, unknown=True)


def rule_of(said: str) -> Rule | None:
    """Which states an optimizer keeps, by the words of a row in lower case; None where they follow another rule.

    Lion (arXiv:2302.06675), Muon (KellerJordan/Muon) and Adagrad have one state, as SGD with momentum has; LOMO
    (OpenLMLab/LOMO) none. GaLore, BAdam, LISA and others keep states of a part that their rows seldom state.
    """
    if OWN_STATES.search(said):
        return None
    if "8bit" in said.replace("-", "").replace("_", "") and "adam" in said:
        return Rule.ADAM_8BIT
    if "adafactor" in said or "adalomo" in said or "came" in said.split():
        return Rule.ADAFACTOR
    if re.search(r"\blion|\bmuon|\badagrad|\brmsprop|\bsignum|adam-?mini", said):
        return Rule.MOMENTUM
    if re.search(r"\bsgd|\blomo", said):
        return Rule.MOMENTUM if "momentum" in said else Rule.SGD
    return Rule.ADAM


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


def bucket_elements_of(said: str, hidden: int) -> int:
    """Elements that ZeRO reduces at a time: the square of the width where configurations say "auto".

    So in transformers/integrations/deepspeed.py, whose integration the others use, and in the scripts of bigscience's
    experiments/gpt2-meg-ds-zero.
    """
    if found := re.search(r"\bbucket(?:[ _]size)?[ =]*(\d+(?:\.\d+)?(?:e\d+)?)", said):
        return round(float(found[1]))
    if "colossalai" in said:
        return 12 * 2**20  # LowLevelZeroPlugin, reduce_bucket_size_in_m
    return hidden * hidden if AUTO_BUCKETS.search(said) else BUCKET_ELEMENTS


def loss_of(said: str, other: str) -> Loss:
    """How a trainer turns logits into a loss, by all words of its row and by those on what was switched on."""
    if re.search(r"liger|unsloth|cut[ _-]cross|\bcce\b", said):
        return Loss.FUSED
    if "composer" in said:
        return Loss.IN_PLACE  # mosaicml/llm-foundry, MPTConfig: loss_fn fused_crossentropy
    if re.search("thunder|universal llm", said):
        return Loss.LOW  # takes logits as the model returns them: src/models of ljm565/universal-llm-trainer
    if re.search("lit-?gpt", said):
        return Loss.LISTED
    if "titan" in said and "compile" in other and re.search(r"\b202[5-9]", said):
        return Loss.COMPILED  # torchtitan/components/loss.py, since 2025-04
    if re.search(r"fused[^;]*cross.?entropy|cross.?entropy.*fusion", other) and "linear" not in other:
        return Loss.SHIFTED
    if "torchtune default config" in said or "chunk" in other:
        return Loss.CHUNKED
    # NVIDIA-NeMo/Automodel shifts labels in its data (components/loss/masked_ce.py)
    return Loss.LABELS if re.search(r"automodel|transformers v?(?:4\.(?:49|5\d)|5)\b", said) else Loss.PLAIN
