"""Which framework trains, and what only one of them asks: Megatron, FSDP, DeepSpeed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.memory.foreign.row import Row

# DeepSpeed: reduce_bucket_size and allgather_bucket_size, in elements (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000

ENGINES_WITHOUT_MODEL = re.compile(
    r"jax|maxtext|easylm|levanter|\btpu|tensorflow|keras|paddle|mindspore|mindspeed|internevo|oneflow|libai|patrickstar"
)
# "ZeRO-3", "ZeRO Stage 2", "stage3", "z3"; a pipeline's stage is not one of ZeRO's
ZERO_STAGE = re.compile(r"(?:zero[ _-]*(?:stage[ _-]*)?|(?<!pipeline )\bstage[ _-]*|\bz)([0-3])\b")
# Beside DistributedDataParallel every rank steps a share of the parameters: torch/distributed/optim/
# zero_redundancy_optimizer.py, fairscale/optim/oss.py; and holds their gradients alone: fairscale/nn/data_parallel/
# sharded_ddp.py, which is transformers' --sharded_ddp simple and Lightning's ddp_sharded.
SHARDS_STATES = re.compile(
    r"zero.?redundancy|\boss\b|optimi[sz]er(?: states?)? sharded|sharded optimi[sz]er"
    r"|(?P<gradients>sharded.?ddp|ddp.?sharded)"
)
# Fabric and Accelerate add up gradients under FSDP's no_sync, Accelerate unless it is told sync_each_batch.
UNSYNCED = re.compile(r"lit-?gpt|fabric|accelerate|hf trainer|transformers")
# Models of transformers in a loop of its own, without no_sync, under checkpointing that is not reentrant: meta-llama/
# llama-cookbook, src/llama_recipes/utils/train_utils.py, policies/activation_checkpointing_functions.py.
LLAMA_RECIPES = re.compile(r"llama-(?:recipes|cookbook)")
# A trainer whose FSDP has no mixed-precision policy under autocast: atorch/auto/opt_lib of
# intelligent-machine-learning/atorch, amp_optimization.py.
AUTOCAST_ALONE = re.compile(r"\batorch\b")
# Sharded gradients travel in fp32: training.mixed_precision_reduce of pytorch/torchtitan has it so, as has composer's
# mixed_precision: DEFAULT (mosaicml/composer, trainer/mosaic_fsdp_utils.py).
REDUCES_FP32 = re.compile(r"mixed=default|titan|reduc\w+ in fp32|fp32 reduc|reduce_dtype[ =:]*(?:fp32|float32)")
# lightning/fabric/strategies/deepspeed.py: DeepSpeedStrategy has buckets of its own size, and overlap_comm on.
LIGHTNING = re.compile(r"lightning(?!-)|\bfabric\b")
LIGHTNING_BUCKET_ELEMENTS = 200_000_000
AUTO_BUCKETS = re.compile(r"\bhf\b(?! accelerate)|swift|llama-?factory|axolotl|zero-3 \(old branch\)")

# Up to stage 2 configurations that trainers come with say more: examples/deepspeed/ds_z2_config.json of
# hiyouga/LLaMA-Factory (overlap_comm in 2024, not in 2025), swift/config/zero2.json of modelscope/ms-swift (the same,
# until 2025-03), deepspeed_configs/zero1.json and zero2.json of axolotl-ai-cloud/axolotl (overlap_comm alone).
STATED_BUCKETS = ((re.compile("llama-?factory|axolotl"), BUCKET_ELEMENTS), (re.compile("swift"), 200_000_000))
OVERLAPS = re.compile(r"overlap_comm|axolotl|llama-?factory v?0\.[0-8]\b|swift v?2\.")


class Framework(StrEnum):
    """What cuts, gathers and reduces."""

    MEGATRON = "Megatron-LM"
    MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"
    DEEPSPEED = "DeepSpeed"
    DEVICE_MAP = "device_map"  # layers over devices, one after the other
    PLAIN = "plain"  # one device, or DistributedDataParallel

    @property
    def is_megatron(self) -> bool:
        return self in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)

    @property
    def is_fsdp(self) -> bool:
        return self in (Framework.FSDP1, Framework.FSDP2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """What Megatron-LM and what stands on it ask beside the rest."""

    stage: int | None = None  # the pipeline stage that was measured; None: the worst
    virtual_stages: int = 1
    keeps_gathered: bool = False  # what sequence parallelism gathers before a product stays for the backward pass
    fp32_gradients: bool = False  # gradients are added up in fp32 beside those of the backward pass
    fp8: bool = False  # products of Transformer Engine in 8 bits
    first_step: bool = False  # measured after the first step: what one leaves for the next is not there yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """What FSDP asks beside the rest."""

    reduces_fp32: bool = False  # gradients travel in fp32
    gathers_fp32: bool = False  # there is no policy: autocast casts what was gathered as it is stored
    unsynced: bool = False  # gradients are whole until the last micro-batch of a step
    ends_apart: bool = False  # embedding and head are units of their own
    frozen_gradients: bool = False  # adapters share units with frozen weights, whose gradients exist with theirs
    holds_boundaries: bool = False  # FSDP1: frozen units hold what went into them, and its gradient, to the end
    replicates: bool = False  # NO_SHARD: nothing is cut, and gradients are reduced where they lie


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeed:
    """What DeepSpeed's ZeRO asks beside the rest, and ColossalAI's."""

    bucket_elements: int = BUCKET_ELEMENTS  # of a reduction
    overlaps: bool = False  # stages 1 and 2: one bucket fills while another is reduced
    holds_gradients: bool = False  # on the device, though the optimizer's states are on the host


def framework_of(row: Row) -> Framework:
    """The framework that a row names; SpecError where there is no model of it."""
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
    if re.search(r"\b(?:aceso|alpa)\b", said):
        raise row.refused("the searched configuration is not printed")
    if "colossalai" in said and "ddp" not in said and ("gemini" in said or "zero" not in said + sharding):
        raise row.refused(f"no model of the engine {row['framework']}")
    if SHARDS_STATES.search(f"{said} {sharding}"):
        return Framework.PLAIN
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


def is_hf_fsdp(row: Row, framework: Framework) -> bool:
    """transformers' Trainer: torch.optim steps over FSDP's shards, reentrant checkpointing wraps FSDP's units."""
    trains = re.search("hf trainer|transformers", row.said) is not None and not LLAMA_RECIPES.search(row.said)
    return framework is Framework.FSDP1 and trains


def zero_stage_of(row: Row, framework: Framework) -> int:
    """The stage of ZeRO, or of what is called so, by a row's words and what its framework does without any."""
    sharding = row["sharding"].lower()
    said = f"{sharding} {row['framework'].lower()}"
    if found := SHARDS_STATES.search(said):
        return 2 if found["gradients"] else 1
    if found := ZERO_STAGE.search(said):
        return int(found[1])
    if re.search(r"zero[- ]?(?:infinity|\+\+)", said):
        return 3  # arXiv:2104.07857 and arXiv:2306.10209 go on from stage 3
    if framework is Framework.MEGATRON and "fsdp" in sharding:
        return 3
    if "distributed optimizer" in sharding or "low_level_zero" in row.said:
        return 1
    if "grad_op" in sharding:
        return 2
    if framework.is_fsdp:
        return 3
    for trainer in ("Megatron-Bridge", "ms-swift"):  # swift/megatron/arguments/megatron_args.py
        if framework is Framework.MEGATRON and trainer.split("-")[1].lower() in row.said:
            row.infer(f"distributed optimizer on, as {trainer} has it")
            return 1
    if framework is Framework.DEEPSPEED and row.number("n_gpus", 1) > 1:
        raise row.refused("which stage of ZeRO is not stated: write it into the column sharding, like ZeRO-2")
    return 0


def megatron_of(row: Row, framework: Framework, *, low: bool) -> Megatron:
    """What a row says of Megatron; `low`: products are in low precision."""
    stage = re.search(r"\bstage (\d+)\b", row["model"])
    is_last = stage is None and re.search(r"\blast (?:rank|stage|pipeline stage)\b", row["note"]) is not None
    precision = row["precision"].lower()
    return Megatron(
        stage=max(1, row.number("pp", 1)) - 1 if is_last else int(stage[1]) if stage else None,
        virtual_stages=int((re.search(r"\bVPP?=(\d+)", row["compile_or_other"]) or [0, 1])[1]),
        # nanotron/parallel/tensor_parallel/functional.py, tp_recompute_allgather: an option since 2024-07-17
        keeps_gathered="nanotron" in row.said and "recompute_allgather" not in row.other,
        fp32_gradients=framework.is_megatron and low and _adds_in_fp32(row, framework, precision),
        fp8=framework is Framework.MEGATRON and precision.startswith("fp8"),
        first_step=bool(re.search(r"after iteration 1\b", row["note"])),
    )


def _adds_in_fp32(row: Row, framework: Framework, precision: str) -> bool:
    """Megatron-LM turns it on with bf16 (megatron/training/arguments.py); its DeepSpeed fork has to say so."""
    if "fp32 grad" in precision:
        return True
    if row.is_bridge:
        row.infer("gradients are reduced in bf16, as Megatron-Bridge's performance recipes have it")
        return False
    if re.search(r"nemo 2\S* performance scripts", row.said):
        # NVIDIA/NeMo, scripts/performance/llm, performance_mode; helpers.py, set_precision_configs
        row.infer("gradients are reduced in bf16, as NeMo 2's performance scripts have it")
        return False
    if framework is Framework.MEGATRON and precision.startswith(("bf16", "fp8")):
        row.infer("gradients are added up in fp32, as Megatron-LM does with bf16")
        return True
    return False


def fsdp_of(row: Row, framework: Framework, *, autocasts: bool, adapts: bool, checkpoints: bool) -> Fsdp:
    """What a row says of FSDP; `adapts`: all but adapters is frozen."""
    syncs = "own loop" in row.said or LLAMA_RECIPES.search(row.said) is not None
    return Fsdp(
        reduces_fp32=REDUCES_FP32.search(row.said) is not None,
        gathers_fp32=autocasts and AUTOCAST_ALONE.search(row.said) is not None,
        unsynced=UNSYNCED.search(row.said) is not None and not syncs,
        ends_apart="torchtune" in row.said,
        frozen_gradients=adapts and framework is Framework.FSDP1 and row.is_litgpt,
        holds_boundaries=adapts and checkpoints and is_hf_fsdp(row, framework) and "non-reentrant" not in row.said,
        # torch/distributed/fsdp/_runtime_utils.py, _reduce_grad_no_shard
        replicates=row["sharding"].lower() == "no_shard",
    )


def deepspeed_of(row: Row, hidden: int) -> DeepSpeed:
    """What a row says of ZeRO's buffers, of a model of that width."""
    stage = ZERO_STAGE.search(f"{row['sharding']} {row['framework']}".lower())
    return DeepSpeed(
        bucket_elements=_bucket_elements_of(row.said, hidden, cuts_parameters=stage is not None and stage[1] == "3"),
        overlaps=OVERLAPS.search(row.said) is not None or LIGHTNING.search(row.said) is not None,
        holds_gradients="colossalai" in row.said,
    )


def _bucket_elements_of(said: str, hidden: int, *, cuts_parameters: bool) -> int:
    """Elements that ZeRO reduces at a time: the square of the width where configurations say "auto".

    So in transformers/integrations/deepspeed.py, whose integration the others use, and in the scripts of bigscience's
    experiments/gpt2-meg-ds-zero.
    """
    if found := re.search(r"\bbucket(?:[ _]size)?[ =]*(\d+(?:\.\d+)?(?:e\d+)?)", said):
        return round(float(found[1]))
    if "colossalai" in said:
        return 12 * 2**20  # LowLevelZeroPlugin, reduce_bucket_size_in_m
    if LIGHTNING.search(said):
        return LIGHTNING_BUCKET_ELEMENTS
    stated = next((size for names, size in STATED_BUCKETS if names.search(said)), None)
    if stated and not cuts_parameters:
        return stated
    return hidden * hidden if AUTO_BUCKETS.search(said) else BUCKET_ELEMENTS
