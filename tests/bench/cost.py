"""How well is a plan's step time predicted? Against published iteration times of GPT models on A100 and H100 nodes,
and against CPU ranks of this machine (tests/bench/cpu_ranks.py).

Plans are compared within a group: the same model, GPUs and global batch on the same machines. Nothing is fitted to a
row: devices are those of the catalogue, efficiencies those of planning/kernels.py and planning/collectives.py.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.planning.cost import Hardware, step_s
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.plan import ActivationCheckpointing, Engine, ParallelLayout, Plan, Precision, ZeroStage
from orchestrator.specs.profile import ModelProfile, Segment, Source
from tests.bench import cpu_ranks
from tests.bench.figure import Figure, at_least, at_most, informs

DATA = Path(__file__).parents[3] / "shared" / "ground_truth"
COMPARED_MIN = 3  # plans of a group whose order says something
LOSS_BYTES_PER_LOGIT = 12  # logits in 16 bits, their fp32 copy, its gradient, and the gradient in 16 bits
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # how far apart residuals are shown
RECOMPUTED = {"True": ActivationCheckpointing.FULL, "False": ActivationCheckpointing.NONE}
# Of the A100 nodes of Jean Zay, with four links of 100 Gbit/s: all 32 devices of four of them reduced 4 GB in 1.53 s, a
# bus bandwidth of 40.5 Gbit/s (bigscience-workshop/bigscience experiments/bandwidth/all_reduce_bench-a100-n4.txt,
# 2022-01; its README: NCCL does not use all that Omni-Path has). Said as the nominal bandwidth of which LINK_EFFICIENCY
# is that.
JEAN_ZAY_NETWORK = "6.5GB/s"
SHARDED = {"FULL_SHARD": ZeroStage.PARAMETERS, "SHARD_GRAD_OP": ZeroStage.GRADIENTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPlan(Plan):
    """A plan of Megatron's: layouts that no engine of ours combines so."""

    def _why_illegal(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a GPT with a feed-forward of four hidden sizes."""

    hidden: int
    layers: int
    heads: int
    tokens: int
    vocabulary: int
    flash: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A published run: what we predict of it, and what it took."""

    group: tuple[object, ...]
    plan: Plan
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s


def figures() -> list[Figure]:
    """Order, choice and time of the plans of every source, and time on CPU ranks that are measured here."""
    if not DATA.is_dir():
        Console().print(f"nothing published to compare with: {DATA.name} is not here")
        return cpu_ranks.figures()
    found, regrets, consistent, least = [], [], [], []
    for name, rows in sources().items():
        print_residuals(name, rows)
        groups = grouped(rows).values()
        ranked = [group for group in groups if len(group) >= COMPARED_MIN]
        if ranked:
            orders = [spearman([r.predicted_s for r in group], [r.measured_s for r in group]) for group in ranked]
            lost = [100 * regret(group) for group in groups if len(group) > 1]
            regrets += lost
            consistent += [100 * regret(group) for group in groups if len(group) > 1 and not contradicts_itself(group)]
            least += [100 * regret(knowing_layouts(group)) for group in groups if len(group) > 1]
            known = [
                spearman([r.predicted_s for r in knowing_layouts(group)], [r.measured_s for r in group])
                for group in ranked
            ]
            found += [
                at_least(f"{name}: rank correlation in {len(ranked)} groups, mean", statistics.mean(orders), "", 0.95),
                informs(f"{name}: rank correlation, layouts known, mean", statistics.mean(known), ""),
                informs(f"{name}: rank correlation, median", statistics.median(orders), ""),
                informs(f"{name}: rank correlation, worst", min(orders), ""),
                informs(f"{name}: lost by our choice in {len(lost)} groups, median", statistics.median(lost), "%"),
                informs(f"{name}: lost by our choice, p95", quantile(lost, 0.95), "%"),
                *_by_halves(f"{name}: rank correlation, mean", orders, statistics.mean, ""),
            ]
        errors = [100 * abs(row.ratio - 1) for row in rows]
        found += [
            informs(f"{name}: error of the time of {len(rows)} plans, median", statistics.median(errors), "%"),
            informs(f"{name}: error of the time, p90", quantile(errors, 0.9), "%"),
            informs(f"{name}: predicted over measured, median", statistics.median(row.ratio for row in rows), ""),
        ]
    return [
        *found,
        at_most(f"lost by our choice in all {len(regrets)} groups, median", statistics.median(regrets), "%", 3),
        at_most("lost by our choice in all groups, p95", quantile(regrets, 0.95), "%", 10),
        informs("lost by our choice, layouts known, p95", quantile(least, 0.95), "%"),
        informs("groups whose fastest plan computed more samples in less time", len(regrets) - len(consistent), ""),
        informs(f"lost by our choice in the {len(consistent)} others, p95", quantile(consistent, 0.95), "%"),
        *_by_halves("lost by our choice, p95", regrets, lambda half: quantile(half, 0.95), "%"),
        *cpu_ranks.figures(),
    ]


def _by_halves(
    figure: str, groups: Sequence[float], summary: Callable[[Sequence[float]], float], unit: str
) -> list[Figure]:
    """The figure of every other group, and of those between: what was seen in one half has to hold in the other."""
    if len(groups) < 2:
        return []
    halves = {"first": groups[::2], "second": groups[1::2]}
    return [informs(f"{figure}, {name} half of the groups", summary(half), unit) for name, half in halves.items()]


def sources() -> dict[str, list[Measured]]:
    """What was measured, where."""
    return {
        "GPT on 2-8 A100": list(vtrain(DATA / "iteration_time_single_node.csv")),
        "GPT on 64-512 A100": list(vtrain(DATA / "iteration_time_multi_node.csv")),
        "BLOOM on 320-384 A100": averaged(bigscience(DATA / "published.csv")),
        "MPT on 8-512 A100, H100": list(llm_foundry(DATA / "published.csv")),
    }


# ---------------------------------------------------------------------------------------------------------- the rows


def vtrain(path: Path) -> Iterator[Measured]:
    """Megatron-DeepSpeed on nodes of eight A100 with 800 Gbit/s of InfiniBand, 1F1B, attention not fused, 50,257 words,
    every layer recomputed (VIA-Research/vTrain: data/README.md, src/config.py, use_checkpoint in config/validation/).
    """
    for row in csv.DictReader(path.open()):
        number = {name: int(text) for name, text in row.items() if "(" not in name}
        dp, micro, batch = number["data parallelism"], number["micro batch"], number["global batch"]
        shape = Shape(
            hidden=number["hidden size"],
            layers=number["# layers"],
            heads=number["attention heads"],
            tokens=number["sequence length"],
            vocabulary=50257,
            flash=False,
        )
        plan = ForeignPlan(
            engine=Engine.DEEPSPEED,
            layout=ParallelLayout(dp=dp, tp=number["tensor parallelism"], pp=number["pipeline parallelism"]),
            micro_batch_size=micro,
            gradient_accumulation_steps=batch // (dp * micro),
            activation_checkpointing=ActivationCheckpointing.FULL,
            precision=Precision.FP16,
        )
        measured_s = float(row["iteration time (ms)"]) / 1e3
        yield measured((batch,), shape, plan, machine("a100-80gb", number["# GPUs"], "100GB/s"), measured_s)


def bigscience(path: Path) -> Iterator[Measured]:
    """Megatron-DeepSpeed on nodes of eight A100 of Jean Zay, every layer recomputed.

    All rows have 320 to 384 devices, with which it always hung unless launches blocked (same file, "dealing with JZ
    hanging on the large model": CUDA_LAUNCH_BLOCKING=1).

    A group is what was tried on one day, since the software changed from day to day. Left out: rows of quality C, whose
    layers were derived from a size, and three on one node, whose global batch of 2,048 in the time that is said would
    be beyond the peak of eight A100.
    """
    for row in csv.DictReader(path.open()):
        if row["source_path"] != "train/tr11-176B-ml/chronicles-prequel.md" or not row["tput"] or row["quality"] == "C":
            continue
        if row["n_gpus"] == "8":
            continue
        day, sizes = re.search(r"02-\d\d", row["note"]), re.match(r"h(\d+) L(\d+) a(\d+)", row["arch"])
        assert day is not None, row
        assert sizes is not None, row
        hidden, layers, heads = map(int, sizes.groups())
        dp, micro, batch = int(row["dp_or_fsdp"]), int(row["micro_batch"]), int(row["global_batch"])
        plan = ForeignPlan(
            engine=Engine.DEEPSPEED,
            layout=ParallelLayout(dp=dp, tp=int(row["tp"]), pp=int(row["pp"])),
            zero_stage=ZeroStage(int(row["sharding"].removeprefix("ZeRO-"))),
            micro_batch_size=micro,
            gradient_accumulation_steps=batch // (dp * micro),
            activation_checkpointing=ActivationCheckpointing.FULL,
            precision=Precision.FP16,
        )
        shape = Shape(hidden=hidden, layers=layers, heads=heads, tokens=2048, vocabulary=250_680, flash=False)
        hardware = replace(machine("a100-80gb", int(row["n_gpus"]), JEAN_ZAY_NETWORK), launches_block=True)
        yield measured((day[0], batch), shape, plan, hardware, float(row["tput"]))


def llm_foundry(path: Path) -> Iterator[Measured]:
    """FSDP1 with flash attention on nodes of eight, with 1.6 (A100) and 3.2 (H100) Tbit/s between nodes.

    Every row is another model, length or number of GPUs, so that only their times can be compared. Left out: rows in
    fp8, an arithmetic that plans do not know.
    """
    for row in csv.DictReader(path.open()):
        if row["source_repo"] != "mosaicml/llm-foundry" or not row["tput"] or "fp8" in row["precision"]:
            continue
        sizes = re.match(r"L(\d+) h(\d+) a(\d+) ffn4x V(\d+) flash", row["arch"])
        assert sizes is not None, row
        layers, hidden, heads, vocabulary = map(int, sizes.groups())
        dp, batch, tokens = int(row["n_gpus"]), int(row["global_batch"]), int(row["seq_len"])
        plan = ForeignPlan(
            engine=Engine.TORCH,
            layout=ParallelLayout(dp=dp),
            zero_stage=SHARDED[row["sharding"]],
            micro_batch_size=int(row["micro_batch"]),
            gradient_accumulation_steps=batch // (dp * int(row["micro_batch"])),
            activation_checkpointing=RECOMPUTED[row["act_ckpt"]],
            precision=Precision.BF16,
        )
        shape = Shape(hidden=hidden, layers=layers, heads=heads, tokens=tokens, vocabulary=vocabulary, flash=True)
        device = row["gpu"].replace("_", "-")
        hardware = machine(device, dp, "400GB/s" if device.startswith("h100") else "200GB/s")
        yield measured((row["id"],), shape, plan, hardware, batch * tokens / (float(row["tput"]) * dp))


def measured(group: tuple[object, ...], shape: Shape, plan: Plan, hardware: Hardware, measured_s: float) -> Measured:
    profile = gpt(shape, plan.layout.tp, plan.precision)
    predicted_s = step_s(profile, plan, hardware)
    return Measured(group=(*group, shape, plan.world_size), plan=plan, predicted_s=predicted_s, measured_s=measured_s)


def averaged(rows: Iterable[Measured]) -> list[Measured]:
    """One row for every plan that a group measured more than once."""
    found: dict[tuple[object, Plan], list[Measured]] = defaultdict(list)
    for row in rows:
        found[row.group, row.plan].append(row)
    return [replace(same[0], measured_s=statistics.mean(row.measured_s for row in same)) for same in found.values()]


@lru_cache(maxsize=4096)
def gpt(shape: Shape, tp: int, precision: Precision) -> ModelProfile:
    """GPT as Megatron cuts it over `tp` ranks, in 16 bits (Korthikanti et al. 2022, arXiv:2205.05198, section 4).

    Without flash attention scores are kept, and the products of attention are not halved by the causal mask.
    """
    s, h, v = shape.tokens, shape.hidden, -(-shape.vocabulary // (128 * tp)) * 128
    products = ((s, h, 3 * h // tp), (s, h // tp, h), (s, h, 4 * h // tp), (s, 4 * h // tp, h))
    scores = 0 if shape.flash else 5 * shape.heads * s * s // tp
    attention_flops = (2.0 if shape.flash else 4.0) * s * s * h / tp
    kept = LOSS_BYTES_PER_LOGIT * s * v + 4 * s * h
    segments = (
        _part("embedding", v * h, kept=2 * s * h, checkpointed=2 * s * h),
        Segment(
            name="layer",
            count=shape.layers,
            parameters=12 * h * h // tp + 13 * h,
            saved_bytes=s * h * (10 * tp + 24) // tp + scores,
            checkpointed_bytes=2 * s * h,
            transient_bytes=0,
            forward_flops=sum(2.0 * rows * inner * columns for rows, inner, columns in products) + attention_flops,
            matmuls=products,
        ),
        _part("head", h, kept=kept, checkpointed=kept, product=(s, h, v)),
    )
    return ModelProfile(
        family="gpt",
        precision=precision,
        source=Source.CLOSED_FORM,
        segments=segments,
        tensor_parallel=tp,
        attention="flash" if shape.flash else "eager",
    )


def _part(
    name: str, parameters: int, *, kept: int, checkpointed: int, product: tuple[int, int, int] | None = None
) -> Segment:
    return Segment(
        name=name,
        count=1,
        parameters=parameters,
        saved_bytes=kept,
        checkpointed_bytes=checkpointed,
        transient_bytes=0,
        forward_flops=2.0 * product[0] * product[1] * product[2] if product else 0.0,
        matmuls=(product,) if product else (),
    )


@lru_cache(maxsize=64)
def machine(device: str, devices: int, network: str) -> Hardware:
    """Nodes of eight of the catalogue's device, as many as `devices` need."""
    node = {"name": "node", "devices": min(8, devices), "device": device, "host_memory": "1TiB"}
    spec = ClusterSpec.model_validate({"name": "published", "nodes": [node], "network_bandwidth": network})
    return Hardware(
        device=spec.nodes[0].device,
        devices_per_node=spec.nodes[0].devices,
        nodes=-(-devices // 8),
        network_bandwidth=spec.network_bandwidth,
    )


# ------------------------------------------------------------------------------------------------------- the figures


def grouped(rows: Iterable[Measured]) -> dict[tuple[object, ...], list[Measured]]:
    found: dict[tuple[object, ...], list[Measured]] = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their rank."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values]


def regret(group: Sequence[Measured]) -> float:
    """How much longer than the fastest the plan took that we predict to be the fastest."""
    chosen = min(group, key=lambda row: row.predicted_s)
    return chosen.measured_s / min(row.measured_s for row in group) - 1


def knowing_layouts(group: Sequence[Measured]) -> list[Measured]:
    """The same plans as a model would predict them that had, of every layout here, the median error from its rows.

    What it still gets wrong differs between micro-batches of one layout: no further term of a layout can mend that.
    """
    ratios = defaultdict(list)
    for row in group:
        ratios[row.plan.layout, row.plan.zero_stage].append(row.ratio)
    known = {layout: statistics.median(found) for layout, found in ratios.items()}
    return [replace(row, predicted_s=row.predicted_s / known[row.plan.layout, row.plan.zero_stage]) for row in group]


def contradicts_itself(group: Sequence[Measured]) -> bool:
    """Whether the fastest plan's micro-batches took less time than smaller ones of the same layout.

    In our model more work of the same kind takes longer: it cannot foresee that such a plan is the fastest.
    """
    fastest = min(group, key=lambda row: row.measured_s)
    return any(
        (row.plan.layout, row.plan.zero_stage) == (fastest.plan.layout, fastest.plan.zero_stage)
        and row.plan.micro_batch_size < fastest.plan.micro_batch_size
        and _micro_batch_s(row) > _micro_batch_s(fastest)
        for row in group
    )


def _micro_batch_s(row: Measured) -> float:
    """Of a step of so many micro-batches, that come through so many stages; the rest of a step is in it."""
    return row.measured_s / (row.plan.gradient_accumulation_steps + row.plan.layout.pp - 1)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_residuals(name: str, rows: Sequence[Measured]) -> None:
    """Predicted over measured by layout and micro-batch: median and number of plans."""
    shown = Table(title=f"{name}: predicted over measured", title_justify="left", box=None, pad_edge=False)
    for column in ("TP", "PP", *(f"MICRO {low}-{2 * low - 1}" for low in MICRO_BATCHES)):
        shown.add_column(column, justify="right", no_wrap=True)
    cells: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        size = row.plan.micro_batch_size
        cells[row.plan.layout.tp, row.plan.layout.pp][max(low for low in MICRO_BATCHES if low <= size)].append(
            row.ratio
        )
    for (tp, pp), by_size in sorted(cells.items()):
        shown.add_row(str(tp), str(pp), *(_cell(by_size[low]) for low in MICRO_BATCHES))
    Console(width=120).print(shown)


def _cell(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({len(ratios)})" if ratios else ""
