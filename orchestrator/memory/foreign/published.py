"""One published row (a training as its author wrote it down) as a Training, with what had to be inferred.

The columns are those of the published.csv that `orc estimate ROWS.csv` reads; everything but the training itself
(measured memory, throughput, sources) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.memory.foreign.architectures import GATED, Architecture, described
from orchestrator.memory.foreign.convolutional_rows import check_net, net_of, transposes
from orchestrator.memory.foreign.crossed import TWO_SIDED, known_crossed, two_sided
from orchestrator.memory.foreign.mixtures import CHOSEN, LATENT, ONE_TENSOR, known_mixture
from orchestrator.memory.foreign.public_models import known
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.states import with_adapters, with_states
from orchestrator.memory.foreign.training import Framework, Training
from orchestrator.memory.foreign.vision import vision_transformer
from orchestrator.memory.foreign.words import (
    CHECKPOINTS,
    COMPOSES_GELU,
    CONVOLUTIONS,
    ENGINES_WITHOUT_MODEL,
    EXPERTS,
    FLASHES,
    FUSES_ADAPTERS,
    IN_PLACE,
    LIGER,
    MASKED,
    NOT_DECODERS,
    PREFERENCES,
    UNSYNCED,
    ZERO_STAGE,
    bucket_elements_of,
)
from orchestrator.specs.plan import ActivationCheckpointing

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
    if NOT_DECODERS.search(row["model"]):
        raise row.refused("no closed form for this kind of transformer")
    framework = _framework_of(row)
    shape: Architecture
    if net is not None:
        if framework is not Framework.PLAIN:
            raise row.refused(f"no model of a convolutional net under {row['framework']}")
        shape = net
    elif vision is not None:
        shape = vision[0]
    elif EXPERTS.search(row["model"]) or re.search(r"\bexperts\d", row["arch"]):
        shape = _mixture_of(row, framework)
    else:
        shape = _shape_of(row, framework)
    if not shape.causal and vision is None and MASKED.search(row.said):
        shape = replace(shape, causal=True)  # a head over the vocabulary, which shares the embedding's matrix
    training = Training(
        shape=shape,
        framework=framework,
        micro_batch_size=_micro_batch_of(row),
        sequence_length=1 if net else _tokens_of(row, vision[1]) if vision is not None else _length_of(row),
        target_length=_target_length_of(row, shape),
        checkpointing=_checkpointing_of(row, framework),
        flash=net is not None or _is_flash(row, shape, framework),
        fused=_is_fused(row, framework),
        composed_gelu=_composes_gelu(row, shape, framework),
        in_place=IN_PLACE.search(row.said) is not None,
        fuses_adapters=FUSES_ADAPTERS.search(row.said) is not None,
        transposes=transposes(row),
        is_old=_is_old(row, framework),
        # torch/optim/optimizer.py and torch/nn/modules/module.py, zero_grad: set_to_none since 2.0
        keeps_gradients=re.search(r"torch ?1\.\d|lightning 1\.\d|\b202[0-2]\b", row.said) is not None,
        on_volta="V100" in row["gpu"],
        on_hopper=re.search(r"\bG?[HB][12]00|\bH20\b|\bG?B300", row["gpu"]) is not None,
        expandable_segments=re.search("expandable|titan", row.said) is not None or row.is_bridge,
        fp8=framework is Framework.MEGATRON and row["precision"].lower().startswith("fp8"),
        alternate_products="titan" in row.said,
        joint_projection=row.has_litgpt_model,
        stage=_stage_of(row),
        lengths_vary=re.match(r"max|up to|<|≤", row["seq_len"].lower()) is not None and "pack" not in row.other,
        first_step=bool(re.search(r"after iteration 1\b", row["note"])),
    )
    training = _with_layout(row, training)
    training = with_states(row, with_adapters(row, training))
    if net is not None:
        check_net(row, training)
    return Described(training=training, inferred=tuple(row.inferred), is_lower_bound=row.is_lower_bound)


# ---------------------------------------------------------------------------------------------------------- what


def _shape_of(row: Row, framework: Framework) -> Architecture:
    by_name = known(row["model"]) or known_crossed(row["model"])
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
        shape = replace(shape, causal=by_name.causal, tied=by_name.tied, dropout=by_name.dropout)
    megatron = framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)
    if TWO_SIDED.search(row["model"]):
        shape = two_sided(shape)
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
        raise row.refused("mixture of experts: how many of which width is not stated, as in experts8 top2 ffn14336")
    if not shape.experts and by_name is not None:
        shape = replace(shape, experts=by_name.experts, ffn=by_name.ffn, shared_ffn=by_name.shared_ffn)
    if not shape.chosen:
        row.infer(f"{by_name.chosen if by_name else CHOSEN} experts a token")
        shape = replace(shape, chosen=by_name.chosen if by_name else CHOSEN)
    return shape


def _framework_of(row: Row) -> Framework:
    said = row["framework"].lower()
    sharding = row["sharding"].lower()
    if "megatron" in said and re.search("zero-?[23]", sharding):
        return Framework.DEEPSPEED
    if ENGINES_WITHOUT_MODEL.search(said):
        raise row.refused(f"no model of the engine {row['framework']}")
    if "neox" in said:
        return Framework.MEGATRON_DEEPSPEED
    if re.search("megatron|nemo|nanotron|picotron", said) and "automodel" not in said:
        deepspeed = "deepspeed" in said and "deepspeed off" not in said and "3d=n" not in said
        return Framework.MEGATRON_DEEPSPEED if deepspeed else Framework.MEGATRON
    if "device_map" in sharding:
        return Framework.DEVICE_MAP
    if "aceso" in said or "alpa" in said:
        raise row.refused("the searched configuration is not printed")
    if "colossalai" in said and "ddp" not in said and ("gemini" in said or "zero" not in said + sharding):
        raise row.refused(f"no model of the engine {row['framework']}")
    # FSDP's strategies are called ZeRO-2 and ZeRO-3 as well
    if "deepspeed" in said or ("zero" in sharding and not re.search("fsdp|shard", said + sharding)):
        return Framework.DEEPSPEED
    if sharding in ("ddp", "no_shard"):
        return Framework.PLAIN
    if "fsdp2" in said + sharding or (("torchtune" in said or "titan" in said) and row.number("n_gpus", 1) > 1):
        return Framework.FSDP2
    # litgpt's scripts shard over what devices they have (litgpt/finetune, litgpt/pretrain.py: FSDPStrategy)
    spreads = row.is_litgpt and row.number("n_gpus", 1) > 1
    if spreads or "fsdp" in said + sharding or "composer" in said or "shard" in sharding:
        return Framework.FSDP1
    return Framework.PLAIN


def _is_old(row: Row, framework: Framework) -> bool:
    """Whether the run is from before CUDA 11.7's lazy loading, as far as the row says."""
    old = "2022" in row.said or "2021" in row.said or "V100" in row["gpu"]
    return old or (framework is Framework.MEGATRON_DEEPSPEED and "bloom" in row.said)


def _stage_of(row: Row) -> int | None:
    found = re.search(r"\bstage (\d+)\b", row["model"])
    if found is None and re.search(r"\blast (?:rank|stage|pipeline stage)\b", row["note"]):
        return max(1, row.number("pp", 1)) - 1
    return int(found[1]) if found else None


# ------------------------------------------------------------------------------------------------------ how much


def _micro_batch_of(row: Row) -> int:
    if (found := row.number("micro_batch")) and "global" not in row["micro_batch"].lower():
        return found
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
        raise row.refused(f"the length of the samples is not stated ({said!r})")
    row.infer(f"sequence length not stated: {LEAST_TOKENS} taken")
    row.is_lower_bound = True
    return LEAST_TOKENS


def _tokens_of(row: Row, count: int | None) -> int:
    if count is None:
        raise row.refused("the size of the images is not stated")
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
        raise row.refused("tensor parallelism of a degree that is not stated")
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
        unsynced=UNSYNCED.search(row.said) is not None and "own loop" not in row.said,
        virtual_stages=int((re.search(r"\bVPP?=(\d+)", other) or [0, 1])[1]),
        sequence_parallel=tp > 1 and re.search(r"bridge|nanotron|\bsequence[ -]parallel|\bsp\b", row.said) is not None,
        # nanotron/parallel/tensor_parallel/functional.py, tp_recompute_allgather: an option since 2024-07-17
        keeps_gathered=tp > 1 and "nanotron" in row.said and "recompute_allgather" not in row.other,
        zero_stage=_zero_stage_of(row, training.framework, row["sharding"].lower()),
        bucket_elements=bucket_elements_of(row.said, training.shape.hidden),
        overlaps="overlap_comm" in row.said,
        holds_gradients="colossalai" in row.said,
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
        raise row.refused("expert parallelism of a degree that is not stated")
    cut = re.search(r"\bETP[ =]?(\d+)", other, re.I)
    whole = "swift" in row.said  # swift/megatron/arguments/megatron_args.py; megatron/training/arguments.py
    expert_tp = max(1, int(cut[1])) if cut else 1 if whole else tp
    if ep * expert_tp * pp > max(row.number("n_gpus"), tp * pp):
        raise row.refused("experts are spread over more devices than are stated")
    if ep > 1:
        row.infer("tokens are spread evenly over the experts")
    return ep, expert_tp


def _zero_stage_of(row: Row, framework: Framework, said: str) -> int:
    if found := ZERO_STAGE.search(said + " " + row["framework"].lower()):
        return int(found[1])
    if re.search(r"zero[- ]?(?:infinity|\+\+)", said + " " + row["framework"].lower()):
        return 3  # arXiv:2104.07857 and arXiv:2306.10209 go on from stage 3
    if framework is Framework.MEGATRON and "fsdp" in said:
        return 3
    if "distributed optimizer" in said or "low_level_zero" in row.said:
        return 1
    if "grad_op" in said:
        return 2
    if framework in (Framework.FSDP1, Framework.FSDP2):
        return 3
    for trainer in ("Megatron-Bridge", "ms-swift"):  # swift/megatron/arguments/megatron_args.py
        if framework is Framework.MEGATRON and trainer.split("-")[1].lower() in row.said:
            row.infer(f"distributed optimizer on, as {trainer} has it")
            return 1
    if framework is Framework.DEEPSPEED and row.number("n_gpus", 1) > 1:
        raise row.refused("which stage of ZeRO is not stated: write it into the column sharding, like ZeRO-2")
    return 0


# ----------------------------------------------------------------------------------------------------------- how


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
    if CHECKPOINTS.search(row.said) and framework not in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
        row.infer("checkpointing on, as the framework's default")
        return ActivationCheckpointing.FULL
    row.infer("no checkpointing: none is stated")
    return ActivationCheckpointing.NONE


def _is_flash(row: Row, shape: Architecture, framework: Framework) -> bool:
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
    if _is_old(row, framework) or framework is Framework.MEGATRON_DEEPSPEED:
        row.infer("attention holds its scores: before flash attention, or on a device without it")
        return False
    return True


def _is_fused(row: Row, framework: Framework) -> bool:
    compiled = "compile" in row.other.replace("compile=false", "")
    megatron = framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)
    return compiled or LIGER.search(row.said) is not None or (megatron and "nanotron" not in row.said)


def _composes_gelu(row: Row, shape: Architecture, framework: Framework) -> bool:
    """Whether the code of transformers or minGPT ran, as far as the row says, and nothing fused its GELU."""
    theirs = re.search(r"\bhf\b|transformers|trainer|accelerate|min-?gpt", row.said) is not None
    gelu = COMPOSES_GELU.match(row["model"]) is not None and not shape.gated
    return gelu and theirs and not (row.has_litgpt_model or "megatron" in row.said or _is_fused(row, framework))
