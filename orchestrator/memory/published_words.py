"""What the words mean in which people publish trainings: kinds of models, ways of tuning, optimizers.

Every entry states what a public tool does under that name (the repository is named where it is not obvious); a word
that is not here is not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from orchestrator.memory.foreign import Rule

CONVOLUTIONS = re.compile(
    r"vgg|resne[sx]?t|xception|mobilenet|efficientnet|inception|convnext|r-?cnn|deeplab|densenet|\br-?(?:50|101)\b"
    r"|\bx-?101|\bu-?net|swin|\bvit\b|vit-|\bdeit|\bbeit|\bmae\b|\bdino|retinanet|\byolo|\bdetr\b|\bfcos|\bssd\d"
    r"|mask2former|segformer|upernet|pspnet|\bhrnet|regnet|slowfast|videomae|pointpillars|\bsam\b|\bclip\b"
    r"|diffusion|\bsd ?\d|sdxl|\bflux\b|cogvideo|hunyuanvideo|\bwan ?2|\bltx|controlnet|\bdit\b|pixart|dreambooth"
    r"|hifi-?gan|\bgan\b",
    re.I,
)
NOT_DECODERS = re.compile(
    r"\b(?:m|flan-|ul)?t5|\bt0_|\bmt0|\bul2\b|xlnet|albert|deberta|electra|bart\b|pegasus|whisper|wav2vec|hubert|mamba|rwkv"
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
OWN_STATES = re.compile(r"galore|apollo|\blisa\b|badam|shampoo|\bsoap\b|\bhift\b|mezo|fira\b", re.I)
LEARNS_ALL = re.compile(r"^(?:full\b|sft\b|fft\b|none\b|no\b|-|false\b|pretrain|all parameters)|\bfull\b", re.I)


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
