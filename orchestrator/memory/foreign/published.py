"""One published row (a training as its author wrote it down) as a Training, with what had to be inferred.

The columns are those of the published.csv that `orc estimate ROWS.csv` reads; everything but the training itself
(measured memory, throughput, sources) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.memory.foreign.adapters import adapters_of
from orchestrator.memory.foreign.architectures import GATED, Architecture, described
from orchestrator.memory.foreign.convolutional_rows import check_net, net_of, usual_images
from orchestrator.memory.foreign.crossed import TWO_SIDED, known_crossed, two_sided
from orchestrator.memory.foreign.frameworks import Framework, deepspeed_of, framework_of, zero_stage_of
from orchestrator.memory.foreign.kernels import kernels_of
from orchestrator.memory.foreign.losses import MASKED
from orchestrator.memory.foreign.mixtures import CHOSEN, LATENT, known_mixture
from orchestrator.memory.foreign.platforms import platform_of
from orchestrator.memory.foreign.public_models import known
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.seeing import Seeing, seeing
from orchestrator.memory.foreign.states import with_offload, with_states
from orchestrator.memory.foreign.training import Training
from orchestrator.memory.foreign.vision import vision_transformer
from orchestrator.specs.plan import ActivationCheckpointing

# Kinds of models by their names; a word that is not here is not guessed.
CONVOLUTIONS = re.compile(
    r"vgg|resne[sx]?t|xception|mobilenet|efficientnet|inception|convnext|r-?cnn|deeplab|densenet|\br-?(?:50|101)\b"
    r"|\bx-?101|\bu-?net|swin|\bvit\b|vit-|\bdeit|\bbeit|\bmae\b|\bdino|retinanet|\byolo|\bdetr\b|\bfcos|\bssd\d"
    r"|mask2former|segformer|upernet|pspnet|\bhrnet|regnet|slowfast|videomae|pointpillars|\bsam\b|\bclip\b"
    r"|diffusion|\bsd ?\d|sdxl|\bflux\b|cogvideo|hunyuanvideo|\bwan ?2|\bltx|controlnet|\bdit\b|pixart|dreambooth"
    r"|hifi-?gan|\bgan\b",
    re.I,
)
NOT_DECODERS = re.compile(
    r"umt5|xlnet|albert|deberta|electra-small|mpnet|modernbert|mobilebert|squeezebert|conv-?bert|bigbird|longformer"
    r"|whisper|wav2vec|hubert|mamba|rwkv|jamba|zamba|retnet|hyena|wide-resnet|llava|internvl|-vl\b|vision|omni"
    r"|pixtral|paligemma|multimodal|recurrentgemma|gemma-3n|openelm",
    re.I,
)
EXPERTS = re.compile(
    r"mixtral|\bmoe\b|[- ]a\d+(?:\.\d+)?b\b|\dx\d+b\b|deepseek-?v[23]|gpt-?oss|\bdbrx|\bgrok|olmoe|switch-", re.I
)
# gradient_checkpointing is on unless it is turned off: swift/trainers/arguments.py, llamafactory/model/model_utils/
# checkpointing.py, unsloth/models/_utils.py
CHECKPOINTS = re.compile(r"swift|llama-?factory|unsloth")
PREFERENCES = re.compile(r"\b(?:dpo|ppo|grpo|orpo|simpo|kto|rlhf|rloo|reward model(?:ling|ing)?)\b")
LEAST_TOKENS = 256  # where a row leaves the length open: nobody fine-tunes on less


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A row that could be read."""

    training: Training
    inferred: tuple[str, ...]
    is_lower_bound: bool  # batch or length was not stated: the least was taken


def described_row(columns: Mapping[str, str]) -> Described:
    """The training that a row describes; SpecError, with the reason, where it says too little or something else."""
    row = Row(columns)
    if row["model"].startswith("kernel:"):
        raise row.refused("a kernel by itself, not a training")
    vision = vision_transformer(row["model"], row["seq_len"])
    net = net_of(row)
    if net is None and vision is None and ("conv net" in row["arch"] or CONVOLUTIONS.search(row["model"])):
        raise row.refused("a convolutional net or image model has no closed form: its activations need a trace")
    if PREFERENCES.search(row.said):
        raise row.refused("training on preferences or rewards: models and samples beside each other are not counted")
    if "unpacked" in row.other:
        raise row.refused("samples are not packed and their lengths are not stated")
    sight = seeing(row)
    if sight is None and NOT_DECODERS.search(row["model"]):
        raise row.refused("no closed form for this kind of transformer")
    framework = framework_of(row)
    shape: Architecture
    if net is not None:
        if framework is not Framework.PLAIN:
            raise row.refused(f"no model of a convolutional net under {row['framework']}")
        shape = net
    elif vision is not None:
        shape = vision[0]
    elif EXPERTS.search(row["model"]) or LATENT.search(row["model"]) or re.search(r"\bexperts\d", row["arch"]):
        shape = _mixture_of(row, framework)
    else:
        shape = _shape_of(row, framework, sight)
    if not shape.causal and vision is None and MASKED.search(row.said):
        shape = replace(shape, causal=True)  # a head over the vocabulary, which shares the embedding's matrix
    platform = platform_of(row, framework)
    training = Training(
        shape=shape,
        framework=framework,
        platform=platform,
        micro_batch_size=_micro_batch_of(row),
        sequence_length=1 if net else _tokens_of(row, vision[1]) if vision is not None else _length_of(row),
        target_length=_target_length_of(row, shape),
        lengths_vary=re.match(r"max|up to|<|≤", row["seq_len"].lower()) is not None and "pack" not in row.other,
        checkpointing=_checkpointing_of(row, framework),
        layers_made_again=_layers_made_again(row),
        alternate_products="titan" in row.said,
        kernels=kernels_of(row, shape, framework, is_old=platform.is_old),
    )
    training = replace(_with_layout(row, training), adapters=adapters_of(row, framework))
    if sight is not None:
        training = replace(training, shape=sight.beside(training.shape, training.adapters))
    training = with_offload(row, with_states(row, training))
    if (training.megatron.stage or 0) >= training.pp:
        raise row.refused(f"there is no stage {training.megatron.stage} of a pipeline of {training.pp}: the first is 0")
    if net is not None:
        check_net(row, training)
    return Described(training=training, inferred=tuple(row.inferred), is_lower_bound=row.is_lower_bound)


# ---------------------------------------------------------------------------------------------------------- what


def _shape_of(row: Row, framework: Framework, sight: Seeing | None = None) -> Architecture:
    by_name = known(sight.decoder if sight else row["model"]) or known_crossed(row["model"])
    if by_name is not None and "fairseq" in row.said and re.match("gpt-?3", row["model"].lower()):
        by_name = replace(by_name, dropout=False)  # fairseq/models/transformer_lm.py, base_gpt3_architecture
    found = described(row["arch"]) if row["arch"] else None
    if found is None and by_name is None:
        raise row.refused(
            "the architecture is neither described nor publicly known by this name: write it into the column "
            'arch, like "L32 h4096 a32 kv8 ffn14336 V128256"'
        )
    if found is None:
        assert by_name is not None
        row.infer(f"architecture of {row['model']} from its published configuration")
        # litgpt/scripts/convert_hf_checkpoint.py stores a shared matrix twice
        return replace(by_name, tied=by_name.tied and not row.has_litgpt_model)
    shape, inferred = found
    row.inferred += inferred
    if by_name is not None:
        tied = shape.tied if re.search(r"\b(?:un)?tied\b", row["arch"].lower()) else by_name.tied
        shape = replace(shape, causal=by_name.causal, tied=tied, dropout=by_name.dropout)
    megatron = framework.is_megatron
    if TWO_SIDED.search(row["model"]):
        shape = shape if shape.crossed else two_sided(shape)
        if megatron and not GATED & set(row["arch"].lower().split()):
            shape = replace(shape, gated=False, tied=True)  # megatron/training/arguments.py: --swiglu is off
        if not megatron and (by_name is None or by_name.flash is False):
            shape = replace(shape, flash=False, positions=0, dropout=True)
    if megatron and not shape.gated:
        row.infer("dropout on, as Megatron's defaults")
        shape = replace(shape, dropout=True, positions=shape.positions and row.number("seq_len"))
    return shape


def _mixture_of(row: Row, framework: Framework) -> Architecture:
    by_name = known_mixture(row["model"])
    if LATENT.search(row["model"]):
        raise row.refused("no closed form for latent attention")
    if by_name is not None and described(row["arch"]) is None:
        row.infer(f"architecture of {row['model']} from its published configuration")
        return by_name
    shape = _shape_of(row, framework)
    if not shape.experts and by_name is None:
        raise row.refused(
            "mixture of experts: how many of which width is not stated: write it into the column arch, like "
            "experts8 top2 ffn14336"
        )
    if not shape.experts and by_name is not None:
        shape = replace(shape, experts=by_name.experts, ffn=by_name.ffn, shared_ffn=by_name.shared_ffn)
    if not shape.chosen:
        row.infer(f"{by_name.chosen if by_name else CHOSEN} experts a token")
        shape = replace(shape, chosen=by_name.chosen if by_name else CHOSEN)
    return shape


# ------------------------------------------------------------------------------------------------------ how much


def _micro_batch_of(row: Row) -> int:
    if (found := row.number("micro_batch")) and "global" not in row["micro_batch"].lower():
        return found
    if images := usual_images(row):
        row.infer(f"{images} images a device, as {row['framework']} configures it")
        return images
    row.infer("micro-batch not stated: 1 taken")
    row.is_lower_bound = True
    return 1


def _length_of(row: Row) -> int:
    said = re.sub(r"(?<=\d),(?=\d{3})", "", row["seq_len"].lower())
    if re.search(r"\d+ ?x ?\d+", said):
        raise row.refused("samples are images")
    said = re.sub(
        r"^(?:up to|<=|≤|<) ?",
        "max ",
        re.sub(r"^(?:~|≈|seq(?:[ _]?len)?[=: ]*|length[=: ]*|(?:source|src|encoder)[=: ]*)", "", said),
    )
    ranges = re.match(r"\d+ ?(?:-|–|to|\.\.) ?\d", said)
    if not ranges and (found := re.fullmatch(r"(?:max )?(\d+(?:\.\d+)?)(k?)\b.*", said)):
        if said.startswith("max "):
            row.infer("the longest sample is as long as the limit")
        return max(1, round(float(found[1]) * (1024 if found[2] else 1)))
    if tokens := re.search(r"(\d+) tok\b", said):
        return int(tokens[1])
    if said:
        raise row.refused(f"the length of the samples is not stated ({said!r}): write it into the column seq_len")
    row.infer(f"sequence length not stated: {LEAST_TOKENS} taken")
    row.is_lower_bound = True
    return LEAST_TOKENS


def _tokens_of(row: Row, count: int | None) -> int:
    if count is None:
        raise row.refused("the size of the images is not stated: write it into the column seq_len, like 224x224")
    return count


def _target_length_of(row: Row, shape: Architecture) -> int:
    """Of an encoder-decoder whose row says both lengths, as "512/128" or "source 512, target 128"."""
    found = re.fullmatch(r"\D*\d+\D+(\d+)\D*", row["seq_len"].replace(",", ""))
    return int(found[1]) if found and shape.crossed else 0


def _with_layout(row: Row, training: Training) -> Training:
    other = row["compile_or_other"]
    tp = row.number("tp") or max(1, int((re.search(r"\bTP(\d+)", other) or [0, 1])[1]))
    pp = row.number("pp") or max(1, int((re.search(r"\bPP(\d+)", other) or [0, 1])[1]))
    cp = row.number("cp", 1) or 1
    ep, expert_tp = _spread_of(row, training, tp, pp)
    world = row.number("n_gpus", 1)
    dp = row.number("dp_or_fsdp") or max(1, world // (tp * pp * cp))
    if tp == 1 and re.search(r"\btp\b", row["sharding"].lower()) and not row["tp"]:
        raise row.refused("tensor parallelism of a degree that is not stated: write it into the column tp")
    staged = (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED, Framework.DEVICE_MAP)
    if (tp * cp > 1 and training.framework is Framework.PLAIN) or (pp > 1 and training.framework not in staged):
        raise row.refused(f"no model of tensor, pipeline or context parallelism under {row['framework']}")
    if training.framework is Framework.DEVICE_MAP:
        dp, tp, pp = 1, 1, world
    micro = training.micro_batch_size
    steps = row.number("grad_accum") or max(1, row.number("global_batch", micro * dp) // (micro * dp))
    return replace(
        training,
        dp=dp * cp,  # states are cut over both (megatron/core/parallel_state.py, torchtitan's dp_shard_cp)
        sequence_length=-(-training.sequence_length // cp),
        tp=tp,
        pp=pp,
        ep=ep,
        expert_tp=expert_tp,
        gradient_accumulation_steps=steps,
        sequence_parallel=tp > 1 and re.search(r"bridge|nanotron|\bsequence[ -]parallel|\bsp\b", row.said) is not None,
        zero_stage=zero_stage_of(row, training.framework),
        deepspeed=deepspeed_of(row, training.shape.hidden),
    )


def _spread_of(row: Row, training: Training, tp: int, pp: int) -> tuple[int, int]:
    """Ranks over which experts are spread, and over which each is cut: as all else, unless it is said."""
    other = row["compile_or_other"]
    if not training.shape.experts:
        return 1, tp
    said = re.search(r"\bEP[ =]?(\d+)", other, re.I)
    ep = row.number("ep") or max(1, int((said or [0, 1])[1]))
    megatron = training.framework is Framework.MEGATRON
    if ep > 1 and not megatron:
        raise row.refused(f"no model of expert parallelism under {row['framework']}")
    if megatron and not (row["tp"] or row["pp"] or row["ep"] or said):
        raise row.refused("expert parallelism of a degree that is not stated: write it into the column ep")
    cut = re.search(r"\bETP[ =]?(\d+)", other, re.I)
    whole = "swift" in row.said  # swift/megatron/arguments/megatron_args.py; megatron/training/arguments.py
    expert_tp = max(1, int(cut[1])) if cut else 1 if whole else tp
    if ep * expert_tp * pp > max(row.number("n_gpus"), tp * pp):
        raise row.refused("experts are spread over more devices than are stated")
    if ep > 1:
        row.infer("tokens are spread evenly over the experts")
    return ep, expert_tp


# ----------------------------------------------------------------------------------------------------------- how


def _layers_made_again(row: Row) -> int:
    """As "every 2 layers" or "uniform 4 layers", which is recompute_num_layers of Megatron-LM (arguments.py)."""
    found = re.search(r"(?:every|uniform|groups? of)\D{0,3}(\d+) layers?\b", row["act_ckpt"].lower())
    return max(1, int(found[1])) if found else 1


def _checkpointing_of(row: Row, framework: Framework) -> ActivationCheckpointing:
    said, other = row["act_ckpt"].lower(), row.other
    if "gradient checkpointing=✘" in other or re.match(r"false|no(?!t)|n$|off|disabled|without|0|-|✘|✗", said):
        return ActivationCheckpointing.NONE
    if said.startswith("selective"):
        return ActivationCheckpointing.SELECTIVE
    if re.match(r"n/?a\b|\?|unknown|not stated", said):
        said = ""
    if said.startswith("per config"):
        row.infer("checkpointing on, as the shipped configurations have it")
        return ActivationCheckpointing.FULL
    if said:
        return ActivationCheckpointing.FULL
    if "lora" in row.said and framework is Framework.PLAIN and "4bit" in row.said:
        row.infer("checkpointing on, as peft's preparation for 4-bit training does")
        return ActivationCheckpointing.FULL
    if "activation checkpointing" in other:
        return ActivationCheckpointing.FULL
    if CHECKPOINTS.search(row.said) and not framework.is_megatron:
        row.infer("checkpointing on, as the framework's default")
        return ActivationCheckpointing.FULL
    row.infer("no checkpointing: none is stated")
    return ActivationCheckpointing.NONE
