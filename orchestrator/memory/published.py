"""One published row (a training as its author wrote it down) as a Training, with what had to be inferred.

The columns are those of the published.csv that `orc estimate ROWS.csv` reads; everything but the training itself
(measured memory, throughput, sources) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.memory.architectures import GATED, Architecture, described
from orchestrator.memory.crossed import TWO_SIDED, known_crossed, two_sided
from orchestrator.memory.foreign import Framework, Loss, Rule, Training, base_bytes_of
from orchestrator.memory.mixtures import CHOSEN, LATENT, ONE_TENSOR, known_mixture
from orchestrator.memory.public_models import known
from orchestrator.memory.published_words import (
    CASTS_NO_LOGITS,
    CHECKPOINTS,
    COMPOSES_GELU,
    CONVOLUTIONS,
    DROPS_OUT,
    EXPERTS,
    FUSES_ADAPTERS,
    IN_PLACE,
    KEEPS_QUANTISED_INPUTS,
    NOT_DECODERS,
    PREFERENCES,
    UNSYNCED,
    bits_of,
    bucket_elements_of,
    loss_of,
    rule_of,
    targets_of,
    tuning_of,
)
from orchestrator.memory.vision import vision_transformer
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import ActivationCheckpointing

COLUMNS = (
    "id", "model", "arch", "gpu", "n_gpus", "framework", "dp_or_fsdp", "tp", "pp", "cp", "ep", "sharding",
    "micro_batch", "grad_accum", "global_batch", "seq_len", "precision", "act_ckpt", "optimizer", "peft", "offload",
    "compile_or_other", "note",
)  # fmt: skip
# What a method of torchtune's README table has on top of the one before (pytorch/torchtune README.md, "Optimization
# flags"), in its order.
CUMULATIVE = ("baseline", "packed", "compile", "chunked ce", "activation checkpointing", "opt in bwd",
              "activation offload", "8-bit adamw")  # fmt: skip
LEAST_TOKENS = 256  # where a row leaves the length open: nobody fine-tunes on less


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A row that could be read."""

    training: Training
    inferred: tuple[str, ...]
    is_lower_bound: bool  # batch or length was not stated: the least was taken


def described_row(row: Mapping[str, str]) -> Described:
    """The training that a row describes; SpecError, with the reason, where it says too little or something else."""
    return _Reader({name: (row.get(name) or "").strip() for name in COLUMNS}).read()


def _no(reason: str, row: Mapping[str, str]) -> SpecError:
    return SpecError(reason, path=row["id"])


class _Reader:
    """Reads one row, column by column, and notes what it infers."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.inferred: list[str] = []
        self.is_lower_bound = False
        self.said = " ".join(value for name, value in row.items() if name != "note").lower()
        self.other = self._other()
        self.is_litgpt = re.search("lit-?gpt", self.said) is not None
        # src/megatron/bridge/perf_recipes of NVIDIA-NeMo/Megatron-Bridge: what its summaries are measured with. A row
        # that departs from their allocator is not taken to follow them elsewhere.
        self.is_bridge = "bridge" in self.said and "default allocator" not in self.said

    def read(self) -> Described:
        row = self.row
        if row["model"].startswith("kernel:"):
            raise _no("a kernel by itself, not a training", row)
        vision = vision_transformer(row["model"], row["seq_len"])
        if vision is None and ("conv net" in row["arch"] or CONVOLUTIONS.search(row["model"])):
            raise _no("a convolutional net or image model has no closed form: its activations need a trace", row)
        if PREFERENCES.search(self.said):
            raise _no("training on preferences or rewards: models and samples beside each other are not counted", row)
        if "unpacked" in self.other:
            raise _no("samples are not packed and their lengths are not stated", row)
        if NOT_DECODERS.search(row["model"]):
            raise _no("no closed form for this kind of transformer", row)
        framework = self.framework()
        if vision is not None:
            shape = vision[0]
        elif EXPERTS.search(row["model"]) or re.search(r"\bexperts\d", row["arch"]):
            shape = self.mixture(framework)
        else:
            shape = self.shape(framework)
        training = Training(
            shape=shape,
            framework=framework,
            micro_batch_size=self.micro_batch(),
            sequence_length=self.tokens(vision[1]) if vision is not None else self.length(),
            target_length=self.target_length(shape),
            checkpointing=self.checkpointing(framework),
            flash=self.flash(shape, framework),
            fused=self.fused(framework),
            composed_gelu=self.composes_gelu(shape, framework),
            in_place=IN_PLACE.search(self.said) is not None,
            fuses_adapters=FUSES_ADAPTERS.search(self.said) is not None,
            is_old=self.is_old(framework),
            on_volta="V100" in row["gpu"],
            on_hopper=re.search(r"\bG?[HB][12]00|\bH20\b|\bG?B300", row["gpu"]) is not None,
            expandable_segments=re.search("expandable|titan", self.said) is not None or self.is_bridge,
            fp8=framework is Framework.MEGATRON and row["precision"].lower().startswith("fp8"),
            alternate_products="titan" in self.said,
            joint_projection=self.is_litgpt,
            stage=self.stage(),
            lengths_vary=re.match(r"max|up to|<|≤", row["seq_len"].lower()) is not None and "pack" not in self.other,
            first_step=bool(re.search(r"after iteration 1\b", row["note"])),
        )
        training = self.layout(training)
        training = self.states(self.adapters(training))
        return Described(training=training, inferred=tuple(self.inferred), is_lower_bound=self.is_lower_bound)

    # ------------------------------------------------------------------------------------------------------- what

    def shape(self, framework: Framework) -> Architecture:
        row, by_name = self.row, known(self.row["model"]) or known_crossed(self.row["model"])
        found = described(row["arch"]) if row["arch"] else None
        if found is None and by_name is None:
            raise _no(
                "the architecture is neither described nor publicly known by this name: write it into the column "
                'arch, like "L32 h4096 a32 kv8 ffn14336 V128256"',
                row,
            )
        if found is None:
            assert by_name is not None
            self.inferred.append(f"architecture of {row['model']} from its published configuration")
            # litgpt/scripts/convert_hf_checkpoint.py stores a shared matrix twice
            return replace(by_name, tied=by_name.tied and not self.is_litgpt)
        shape, inferred = found
        self.inferred += inferred
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
            self.inferred.append("dropout on, as Megatron's defaults")
            shape = replace(shape, dropout=True, positions=shape.positions and self._number("seq_len"))
        return shape

    def mixture(self, framework: Framework) -> Architecture:
        row, by_name = self.row, known_mixture(self.row["model"])
        if LATENT.search(row["model"]):
            raise _no("no closed form for latent attention", row)
        if by_name is not None and described(row["arch"]) is None:
            self.inferred.append(f"architecture of {row['model']} from its published configuration")
            return by_name
        shape = self.shape(framework)
        if not shape.experts and by_name is None:
            raise _no("mixture of experts: how many of which width is not stated, as in experts8 top2 ffn14336", row)
        if not shape.experts and by_name is not None:
            shape = replace(shape, experts=by_name.experts, ffn=by_name.ffn, shared_ffn=by_name.shared_ffn)
        if not shape.chosen:
            self.inferred.append(f"{by_name.chosen if by_name else CHOSEN} experts a token")
            shape = replace(shape, chosen=by_name.chosen if by_name else CHOSEN)
        return shape

    def framework(self) -> Framework:
        said = self.row["framework"].lower()
        sharding = self.row["sharding"].lower()
        if "megatron" in said and re.search("zero-?[23]", sharding):
            return Framework.DEEPSPEED
        if re.search(r"jax|maxtext|easylm|levanter|\btpu|tensorflow|keras|paddle|mindspore", said):
            raise _no(f"no model of the engine {self.row['framework']}", self.row)
        if "neox" in said:
            return Framework.MEGATRON_DEEPSPEED
        if re.search("megatron|nemo|nanotron|picotron", said) and "automodel" not in said:
            deepspeed = "deepspeed" in said and "deepspeed off" not in said and "3d=n" not in said
            return Framework.MEGATRON_DEEPSPEED if deepspeed else Framework.MEGATRON
        if "device_map" in sharding:
            return Framework.DEVICE_MAP
        if "aceso" in said or "alpa" in said:
            raise _no("the searched configuration is not printed", self.row)
        if "colossalai" in said and "ddp" not in said and ("gemini" in said or "zero" not in said + sharding):
            raise _no(f"no model of the engine {self.row['framework']}", self.row)
        if "deepspeed" in said or "zero" in sharding:
            return Framework.DEEPSPEED
        if sharding == "ddp":
            return Framework.PLAIN
        if "fsdp2" in said or (("torchtune" in said or "titan" in said) and self._number("n_gpus", 1) > 1):
            return Framework.FSDP2
        if "fsdp" in said + sharding or "composer" in said or "shard" in sharding:
            return Framework.FSDP1
        return Framework.PLAIN

    def is_old(self, framework: Framework) -> bool:
        """Whether the run is from before CUDA 11.7's lazy loading, as far as the row says."""
        old = "2022" in self.said or "2021" in self.said or "V100" in self.row["gpu"]
        return old or (framework is Framework.MEGATRON_DEEPSPEED and "bloom" in self.said)

    def stage(self) -> int | None:
        found = re.search(r"\bstage (\d+)\b", self.row["model"])
        if found is None and re.search(r"\blast (?:rank|stage|pipeline stage)\b", self.row["note"]):
            return max(1, self._number("pp", 1)) - 1
        return int(found[1]) if found else None

    # ------------------------------------------------------------------------------------------------- how much

    def _number(self, name: str, default: int = 0) -> int:
        said = self.row[name].replace(",", "")
        if name == "n_gpus" and (nodes := re.search(r"(\d+) ?(?:nodes?)? ?[x×*] ?(\d+)", said)):
            return int(nodes[1]) * int(nodes[2])
        found = re.search(r"\d+", said)
        return int(found[0]) if found else default

    def micro_batch(self) -> int:
        if found := self._number("micro_batch"):
            return found
        self.inferred.append("micro-batch not stated: 1 taken")
        self.is_lower_bound = True
        return 1

    def length(self) -> int:
        said = re.sub(r"(?<=\d),(?=\d{3})", "", self.row["seq_len"].lower())
        if re.search(r"\d+ ?x ?\d+", said):
            raise _no("samples are images", self.row)
        said = re.sub(
            r"^(?:up to|<=|≤|<) ?",
            "max ",
            re.sub(r"^(?:~|≈|seq(?:[ _]?len)?[=: ]*|length[=: ]*|(?:source|src|encoder)[=: ]*)", "", said),
        )
        if found := re.fullmatch(r"(?:max )?(\d+)(k?)\b.*", said):
            if said.startswith("max "):
                self.inferred.append("the longest sample is as long as the limit")
            return int(found[1]) * (1024 if found[2] else 1)
        if tokens := re.search(r"(\d+) tok\b", said):
            return int(tokens[1])
        if said:
            raise _no(f"the length of the samples is not stated ({said!r})", self.row)
        self.inferred.append(f"sequence length not stated: {LEAST_TOKENS} taken")
        self.is_lower_bound = True
        return LEAST_TOKENS

    def tokens(self, count: int | None) -> int:
        if count is None:
            raise _no("the size of the images is not stated", self.row)
        return count

    def target_length(self, shape: Architecture) -> int:
        """Of an encoder-decoder whose row says both lengths, as "512/128" or "source 512, target 128"."""
        found = re.fullmatch(r"\D*\d+\D+(\d+)\D*", self.row["seq_len"].replace(",", ""))
        return int(found[1]) if found and shape.crossed else 0

    def layout(self, training: Training) -> Training:
        row, other = self.row, self.row["compile_or_other"]
        tp = self._number("tp") or max(1, int((re.search(r"\bTP(\d+)", other) or [0, 1])[1]))
        pp = self._number("pp") or max(1, int((re.search(r"\bPP(\d+)", other) or [0, 1])[1]))
        cp = self._number("cp", 1) or 1
        ep, expert_tp = self.spread(training, tp, pp)
        world = self._number("n_gpus", 1)
        dp = self._number("dp_or_fsdp") or max(1, world // (tp * pp * cp))
        if tp == 1 and re.search(r"\btp\b", row["sharding"].lower()) and not row["tp"]:
            raise _no("tensor parallelism of a degree that is not stated", row)
        staged = (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED, Framework.DEVICE_MAP)
        if (tp * cp > 1 and training.framework is Framework.PLAIN) or (pp > 1 and training.framework not in staged):
            raise _no(f"no model of tensor, pipeline or context parallelism under {row['framework']}", row)
        if training.framework is Framework.DEVICE_MAP:
            dp, tp, pp = 1, 1, world
        micro = training.micro_batch_size
        steps = self._number("grad_accum") or max(1, self._number("global_batch", micro * dp) // (micro * dp))
        return replace(
            training,
            dp=dp * cp,  # states are cut over both (megatron/core/parallel_state.py, torchtitan's dp_shard_cp)
            sequence_length=-(-training.sequence_length // cp),
            tp=tp,
            pp=pp,
            ep=ep,
            expert_tp=expert_tp,
            gradient_accumulation_steps=steps,
            unsynced=UNSYNCED.search(self.said) is not None and "own loop" not in self.said,
            virtual_stages=int((re.search(r"\bVPP?=(\d+)", other) or [0, 1])[1]),
            sequence_parallel=tp > 1
            and re.search(r"bridge|nanotron|\bsequence[ -]parallel|\bsp\b", self.said) is not None,
            # nanotron/parallel/tensor_parallel/functional.py, tp_recompute_allgather: an option since 2024-07-17
            keeps_gathered=tp > 1 and "nanotron" in self.said and "recompute_allgather" not in self.other,
            zero_stage=self._zero_stage(training.framework, row["sharding"].lower()),
            bucket_elements=bucket_elements_of(self.said, training.shape.hidden),
            overlaps="overlap_comm" in self.said,
            holds_gradients="colossalai" in self.said,
        )

    def spread(self, training: Training, tp: int, pp: int) -> tuple[int, int]:
        """Ranks over which experts are spread, and over which each is cut: as all else, unless it is said."""
        row, other = self.row, self.row["compile_or_other"]
        if not training.shape.experts:
            return 1, tp
        said = re.search(r"\bEP[ =]?(\d+)", other, re.I)
        ep = self._number("ep") or max(1, int((said or [0, 1])[1]))
        megatron = training.framework is Framework.MEGATRON
        if ep > 1 and not megatron:
            raise _no(f"no model of expert parallelism under {row['framework']}", row)
        if megatron and not (row["tp"] or row["pp"] or row["ep"] or said):
            raise _no("expert parallelism of a degree that is not stated", row)
        cut = re.search(r"\bETP[ =]?(\d+)", other, re.I)
        whole = "swift" in self.said  # swift/megatron/arguments/megatron_args.py; megatron/training/arguments.py
        expert_tp = max(1, int(cut[1])) if cut else 1 if whole else tp
        if ep * expert_tp * pp > max(self._number("n_gpus"), tp * pp):
            raise _no("experts are spread over more devices than are stated", row)
        if ep > 1:
            self.inferred.append("tokens are spread evenly over the experts")
        return ep, expert_tp

    def _zero_stage(self, framework: Framework, said: str) -> int:
        if found := re.search(r"zero-?(\d)", said + " " + self.row["framework"].lower()):
            return int(found[1])
        if framework is Framework.MEGATRON and "fsdp" in said:
            return 3
        if "distributed optimizer" in said or "low_level_zero" in self.said:
            return 1
        if "grad_op" in said:
            return 2
        if framework in (Framework.FSDP1, Framework.FSDP2):
            return 3
        for trainer in ("Megatron-Bridge", "ms-swift"):  # swift/megatron/arguments/megatron_args.py
            if framework is Framework.MEGATRON and trainer.split("-")[1].lower() in self.said:
                self.inferred.append(f"distributed optimizer on, as {trainer} has it")
                return 1
        return 0

    # ----------------------------------------------------------------------------------------------------- how

    def _other(self) -> str:
        """What was switched on beside the columns, in lower case; of a cumulative table, all that came before too."""
        said = self.row["compile_or_other"].lower()
        if said.startswith("cumulative:"):
            last = next((at for at, step in enumerate(CUMULATIVE) if step in said), None)
            if last == 0:
                return said
            if last is not None and "+" in said:
                return " ".join(CUMULATIVE[1 : last + 1])
            if "lora" in said:
                self.inferred.append("all optimisations of the table but the optimizer's")
                return " ".join(CUMULATIVE[1:5]) + " activation offload " + said
        return said

    def checkpointing(self, framework: Framework) -> ActivationCheckpointing:
        said, other = self.row["act_ckpt"].lower(), self.other
        if "gradient checkpointing=✘" in other or re.match(r"false|no(?!t)|off|0|-|✘|✗", said):
            return ActivationCheckpointing.NONE
        if said.startswith("selective"):
            return ActivationCheckpointing.SELECTIVE
        if re.match(r"n/?a\b|\?|unknown|not stated", said):
            said = ""
        if said.startswith("per config"):
            self.inferred.append("checkpointing on, as the shipped configurations have it")
            return ActivationCheckpointing.FULL
        if said:
            return ActivationCheckpointing.FULL
        if "lora" in self.said and framework is Framework.PLAIN and "4bit" in self.said:
            self.inferred.append("checkpointing on, as peft's preparation for 4-bit training does")
            return ActivationCheckpointing.FULL
        if "activation checkpointing" in other:
            return ActivationCheckpointing.FULL
        if CHECKPOINTS.search(self.said) and framework not in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
            self.inferred.append("checkpointing on, as the framework's default")
            return ActivationCheckpointing.FULL
        self.inferred.append("no checkpointing: none is stated")
        return ActivationCheckpointing.NONE

    def flash(self, shape: Architecture, framework: Framework) -> bool:
        if "use flash attn=✘" in self.said:
            return False
        if ONE_TENSOR.search(self.row["model"]) and re.search(r"\bfa3\b|flash|flex|unsloth|megatron", self.said):
            return True  # kernels that know a sink
        if shape.flash is False or re.search(r"eager attention|(?:without|no) flash|\bunfused\b", self.said):
            return False
        if shape.flash or re.search(r"\bfa[234]\b|flash", self.said):
            return True
        if re.search(r"transformers v?4\.(?:[0-2]?\d|3[0-5])\b", self.said):
            return False  # its models had no attention but their own before 4.36 (huggingface/transformers v4.36.0)
        if framework is Framework.MEGATRON and re.search(r"\blocal\b", self.other):
            return False  # megatron/core/transformer/dot_product_attention.py, without Transformer Engine
        if self.is_old(framework) or framework is Framework.MEGATRON_DEEPSPEED:
            self.inferred.append("attention holds its scores: before flash attention, or on a device without it")
            return False
        return True

    def fused(self, framework: Framework) -> bool:
        compiled = "compile" in self.other.replace("compile=false", "")
        megatron = framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)
        return compiled or "liger" in self.said or (megatron and "nanotron" not in self.said)

    def composes_gelu(self, shape: Architecture, framework: Framework) -> bool:
        """Whether the code of transformers or minGPT ran, as far as the row says, and nothing fused its GELU."""
        theirs = re.search(r"\bhf\b|transformers|trainer|accelerate|min-?gpt", self.said) is not None
        gelu = COMPOSES_GELU.match(self.row["model"]) is not None and not shape.gated
        return gelu and theirs and not (self.is_litgpt or "megatron" in self.said or self.fused(framework))

    def adapters(self, training: Training) -> Training:
        said = " ".join((self.row["peft"], self.row["model"], self.row["compile_or_other"])).lower()
        quantised = bits_of(said)
        tuning = tuning_of(self.row["peft"] or said if "lora" in said else self.row["peft"])
        if tuning.unknown:
            raise _no(f"the way of tuning {self.row['peft']!r} is not known", self.row)
        if not tuning.adapts:
            return training
        rank = re.search(r"(?:\b|_)r(?:ank)?[=: ]{0,2}(\d+)\b", said)
        if tuning.small:
            chosen = 1
            self.inferred.append(f"{self.row['peft']} counted as LoRA of rank 1 on q and v")
        elif rank is None:
            chosen = 64 if "fsdp_qlora" in self.said else 16 if "4bit" in said else 8
            self.inferred.append(f"LoRA rank not stated: {chosen} taken, as the framework's default")
        else:
            chosen = int(rank[1])
        usual: tuple[str, ...] = ("q", "v") if tuning.small else ("q", "k", "v")
        everywhere = re.search(r"\ball\b", said) is not None or "fsdp_qlora" in self.said
        if ONE_TENSOR.search(self.row["model"]) and not re.search("unsloth|expert|target_parameters", self.said):
            everywhere, usual = False, ("q", "k", "v", "o")
        # peft/utils/other.py, prepare_model_for_kbit_training: all but what GPTQ holds is cast up
        prepared = training.framework in (Framework.PLAIN, Framework.DEVICE_MAP) and not re.search(
            # axolotl/loaders/model.py casts embeddings and norms back where attention is flash; llamafactory/model/
            # model_utils/checkpointing.py casts norms if it is told so
            "torchtune|unsloth|axolotl|lit-?gpt|llama-?factory|no preparation",
            self.said,
        )
        ends_fp32 = bool(quantised) and prepared and "gptq" not in said and "fsdp_qlora" not in self.said
        if ends_fp32:
            self.inferred.append("embedding, head and norms cast to fp32 by peft's preparation for quantised training")
        return replace(
            training,
            lora_rank=chosen,
            lora_targets=() if everywhere else targets_of(self.row["peft"].lower()) or usual,
            keeps_adapted_outputs=tuning.keeps_outputs,
            lora_fp32=re.search("torchtune|fsdp_qlora|lit-?gpt", self.said) is None,
            lora_dropout=DROPS_OUT.search(self.said) is not None,
            trains_ends=re.search(r"modules_to_save|\(emb\)|embedding.*head", self.row["peft"]) is not None,
            base_bytes=base_bytes_of(quantised, double="nf4" not in said or "dq" in said) if quantised else None,
            keeps_quantised_inputs=quantised == 4 and KEEPS_QUANTISED_INPUTS.search(self.said) is not None,
            quantises_head=self.is_litgpt,  # lightning/fabric/plugins/precision/bitsandbytes.py: every nn.Linear
            frozen_gradients=training.framework is Framework.FSDP1 and self.is_litgpt,
            holds_boundaries=self._is_hf_fsdp(training.framework)
            and training.checkpointing is ActivationCheckpointing.FULL
            and "non-reentrant" not in self.said,
            ends_fp32=ends_fp32,
        )

    def states(self, training: Training) -> Training:
        """Precision and optimizer: what there is of every parameter."""
        row, framework = self.row, training.framework
        precision, optimizer = (
            row["precision"].lower(),
            " ".join((row["optimizer"] or row["peft"], self.other)).lower(),
        )
        low = re.search(r"16|8|mixed|amp|half", precision) is not None or "32" not in precision
        if training.ends_fp32 and re.search(r"\b(?:pure|true)\b", precision):
            # bitsandbytes/nn/modules.py, Linear4bit: a product returns the type of its input, that of fp32 norms
            self.inferred.append("all is fp32 but the quantised matrices: nothing casts what the norms return")
            low = False
        if not precision:
            self.inferred.append("bf16: the precision is not stated")
        if precision.startswith("fp8") and not training.fp8:
            self.inferred.append("counted as bf16: neither 8-bit copies of inputs nor of weights")
        megatron = framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED)
        # transformers 5 loads weights in the type they were saved in (MIGRATION_GUIDE_V5.md, on dtype)
        pure = (re.search(r"\bpure\b|\btrue\b", precision) and "amp" not in precision) or re.search(
            r"torchtune|swift|fsdp_qlora|llama-factory|unsloth|transformers v?5\b", self.said
        )
        full = not training.lora_rank
        whole = full or (training.base_bytes is None and re.search(r"\bmixed\b|\bamp\b", precision) is not None)
        mixed = low and whole and framework in (Framework.PLAIN, Framework.FSDP1, Framework.FSDP2, Framework.DEVICE_MAP)
        autocasts = mixed and not pure
        rule = rule_of(optimizer)
        if rule is None:
            raise _no(f"no model of the optimizer's states ({row['optimizer'] or row['peft']})", row)
        if autocasts:
            self.inferred.append("weights stay fp32 and are cast where they are used")
        masters = low and full and (megatron or framework is Framework.DEEPSPEED)
        offload = row["offload"].lower()
        if not offload and "offload" in row["sharding"].lower():
            offload = "cpu" if training.zero_stage == 3 else "optimizer"
        only_optimizer = bool(re.match(r"(cpu )?optim", offload)) or "opt=y" in offload
        everything = not only_optimizer and "cpu" in re.sub(r"act_cpu=\w+", "", offload)
        return replace(
            training,
            low_precision=low,
            autocasts=autocasts,
            masters=masters,
            fp32_gradients=megatron and low and self._adds_in_fp32(framework, precision),
            ends_apart="torchtune" in self.said,
            reduces_fp32="mixed=default" in precision,
            rule=rule,
            low_states=low
            and not autocasts
            and (full or not training.lora_fp32)
            # beside fp32 masters they are fp32, but for --use-precision-aware-optimizer with --exp-avg-dtype bf16 of
            # megatron/core/optimizer
            and (not masters or "bf16 states" in optimizer),
            step_in_backward=re.search("opt[- ]in[- ]bwd|lomo", optimizer) is not None,
            paged="paged" in optimizer,
            foreach=(framework in (Framework.PLAIN, Framework.DEVICE_MAP) or self._has_torch_step(framework))
            and rule not in (Rule.ADAM_8BIT, Rule.ADAFACTOR)
            and not training.is_old  # torch/optim/adamw.py, since 1.13
            and not re.search(r"fused adam|fused optim", optimizer)
            and "fused" not in row["optimizer"].lower()
            and "torchtune" not in self.said,  # whose configurations say fused=True
            loss=self._loss(framework),
            loss_chunks=max(1, training.sequence_length // 128) if self.is_litgpt else training.loss_chunks,
            offload_parameters=(everything and training.zero_stage not in (1, 2)) or "param=y" in offload,
            offload_optimizer=everything or only_optimizer,
            offload_activations="activation" in offload
            or "unsloth" in row["act_ckpt"].lower()  # unsloth_zoo/gradient_checkpointing.py
            or "activation offload" in self.other
            or self._old_zero_3(),
        )

    def _has_torch_step(self, framework: Framework) -> bool:
        """torch.optim steps over shards: under FSDP, and where DeepSpeed's configuration names no optimizer.

        So in examples/deepspeed of hiyouga/LLaMA-Factory, xtuner/configs/deepspeed of InternLM/xtuner and
        swift/config of modelscope/ms-swift.
        """
        bare = framework is Framework.DEEPSPEED and re.search("llama-?factory|xtuner|swift", self.said) is not None
        return bare or self._is_hf_fsdp(framework)

    def _is_hf_fsdp(self, framework: Framework) -> bool:
        """transformers' Trainer: torch.optim steps over FSDP's shards, reentrant checkpointing wraps FSDP's units."""
        return framework is Framework.FSDP1 and re.search("hf trainer|transformers", self.said) is not None

    def _loss(self, framework: Framework) -> Loss:
        """As the trainer has it; under DeepSpeed nothing casts the logits of models whose own code does not."""
        loss = loss_of(self.said, self.other)
        low = CASTS_NO_LOGITS.match(self.row["model"].lower()) and "megatron" not in self.said
        return Loss.LOW if low and loss is Loss.PLAIN and framework is Framework.DEEPSPEED else loss

    def _old_zero_3(self) -> bool:
        """DeepSpeedExamples/Megatron-LM-v1.1.5-ZeRO3 ran with --partition-activations --checkpoint-in-cpu."""
        old = "zero-3 (old branch)" in self.said
        if old:
            self.inferred.append("checkpoints of activations on the host, as this branch's example scripts have them")
        return old

    def _adds_in_fp32(self, framework: Framework, precision: str) -> bool:
        """Megatron-LM turns it on with bf16 (megatron/training/arguments.py); its DeepSpeed fork has to say so."""
        if "fp32 grad" in precision:
            return True
        if self.is_bridge:
            self.inferred.append("gradients are reduced in bf16, as Megatron-Bridge's performance recipes have it")
            return False
        if framework is Framework.MEGATRON and precision.startswith(("bf16", "fp8")):
            self.inferred.append("gradients are added up in fp32, as Megatron-LM does with bf16")
            return True
        return False
