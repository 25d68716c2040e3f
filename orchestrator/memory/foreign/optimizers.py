"""What optimizers keep and how they step, in other people's trainings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.updates import ADAM_8BIT_BYTES

OWN_STATES = re.compile(
    r"adamw?[ _-]?4-?bit|4-?bit[ _-]adam|q-?galore|apollo|\blisa\b|badam|shampoo|\bsoap\b|\bhift\b|mezo|fira\b", re.I
)
# Its rank is 128 where nobody chose one: torchrun_main.py of jiaweizzhao/GaLore and src/transformers/trainer.py; 16 in
# llamafactory/hparams/finetuning_args.py.
GALORE = re.compile(r"galore")
# Measurements of the forward and backward pass alone.
NO_STEP = re.compile(r"none\b|no (?:optimi[sz]er|step)\b")


class Rule(StrEnum):
    """What the optimizer keeps of a trained parameter."""

    ADAM = "Adam"
    ADAM_8BIT = "8-bit Adam"
    SGD = "SGD"
    MOMENTUM = "SGD with momentum"
    ADAFACTOR = "Adafactor"
    NONE = "none"  # nothing is stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What there is of every trained parameter beside itself, and what a step works with."""

    rule: Rule = Rule.ADAM
    masters: bool = False  # an fp32 copy of low-precision weights
    low_states: bool = False  # states have the width of low-precision weights
    foreach: bool = False  # torch.optim's default on CUDA: a temporary of everything that is trained
    adds_apart: bool = False  # and another, its sum with epsilon: torch/optim/adamw.py of 2.0; in place since 2.1
    step_in_backward: bool = False  # gradients are used up as they come
    paged: bool = False  # states may live on the host
    projected_rank: int = 0  # of gradients whose states have this rank (GaLore); 0: states are as large as gradients

    @property
    def temporaries(self) -> int:
        """How often there is everything that is trained beside itself as torch.optim steps."""
        return self.foreach * (1 + self.adds_apart)

    @property
    def state_bytes(self) -> float:
        """Bytes of the states per trained parameter, masters aside."""
        width = 2 if self.low_states else 4
        return {
            Rule.ADAM: 2 * width,
            Rule.ADAM_8BIT: ADAM_8BIT_BYTES,
            Rule.MOMENTUM: width,
            Rule.SGD: 0,
            Rule.ADAFACTOR: 0.01,
            Rule.NONE: 0,
        }[self.rule]


def optimizer_of(row: Row, framework: Framework, *, masters: bool, narrow: bool, is_old: bool) -> Optimizer:
    """The optimizer that a row names; `narrow`: what is trained has low precision. SpecError for states of a part."""
    said = " ".join((row["optimizer"] or row["peft"], row.other)).lower()
    projects = GALORE.search(f"{said} {row['peft']}".lower()) is not None
    rule = Rule.NONE if NO_STEP.match(row["optimizer"].lower()) else rule_of(said)
    if rule is None:
        raise row.refused(f"no model of the optimizer's states ({row['optimizer'] or row['peft']})")
    if projects and framework not in (Framework.PLAIN, Framework.DEVICE_MAP):
        raise row.refused("GaLore projects whole gradients, which this engine cuts")
    foreach = (
        _has_torch_step(row, framework)
        # torch/optim/sgd.py, _multi_tensor_sgd, works in place where nothing decays
        and rule not in (Rule.ADAM_8BIT, Rule.ADAFACTOR, Rule.SGD, Rule.NONE)
        and not projects  # galore_torch/adamw.py goes from parameter to parameter
        and not is_old  # torch/optim/adamw.py, since 1.13
        and not re.search(r"fused adam|fused optim", said)
        and "fused" not in row["optimizer"].lower()
        and "torchtune" not in row.said  # whose configurations say fused=True
    )
    return Optimizer(
        rule=rule,
        masters=masters and rule is not Rule.NONE,
        # beside fp32 masters they are fp32, but for --use-precision-aware-optimizer with --exp-avg-dtype bf16 of
        # megatron/core/optimizer
        low_states=narrow and (not masters or "bf16 states" in said),
        foreach=foreach,
        adds_apart=foreach and rule is Rule.ADAM and re.search(r"torch 2\.0\b", row.said) is not None,
        step_in_backward=re.search("opt[- ]in[- ]bwd|lomo", said) is not None
        or (projects and re.search("(?:per|by)[- _]?layer|layer-?wise", said) is not None),
        paged="paged" in said,
        projected_rank=_projected_rank(row, f"{said} {row['peft']}".lower()) if projects else 0,
    )


def rule_of(said: str) -> Rule | None:
    """Which states an optimizer keeps, by the words of a row in lower case; None where they follow another rule.

    Lion (arXiv:2302.06675), Muon (KellerJordan/Muon) and Adagrad have one state, as SGD with momentum has; LOMO
    (OpenLMLab/LOMO) none. BAdam, LISA and others keep states of a part that their rows seldom state.
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


def _projected_rank(row: Row, said: str) -> int:
    if rank := re.search(r"\br(?:ank)?[=: ]{0,2}(\d+)\b", said):
        return int(rank[1])
    usual = 16 if "llama-factory" in row.said else 128
    row.infer(f"GaLore's rank not stated: {usual} taken, as the framework's default")
    return usual


def _has_torch_step(row: Row, framework: Framework) -> bool:
    """torch.optim steps: where nothing is cut, over FSDP's shards, and where DeepSpeed's configuration names no
    optimizer.

    So in examples/deepspeed of hiyouga/LLaMA-Factory, xtuner/configs/deepspeed of InternLM/xtuner and
    swift/config of modelscope/ms-swift. composer/optim/decoupled_weight_decay.py of mosaicml/composer and
    policies/anyprecision_optimizer.py of llama-recipes go from parameter to parameter.
    """
    if framework is Framework.DEEPSPEED:
        return re.search("llama-?factory|xtuner|swift", row.said) is not None
    return not framework.is_megatron and re.search("composer|titan|fairseq|any-?precision", row.said) is None
