"""Published step times, each beside what is predicted of it: Megatron-DeepSpeed and FSDP on A100 and H100 nodes.

Nothing is fitted to a row: devices are those of the catalogue, efficiencies those of planning/kernels.py and
planning/collectives.py.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Segment, Source

DATA = Path(__file__).parents[2] / "shared" / "ground_truth"
# logits in 16 bits, their fp32 copy, its gradient, and the gradient in 16 bits
LOSS_BYTES_PER_LOGIT = 12
RECOMPUTED = {"True": ActivationCheckpointing.FULL, "False": ActivationCheckpointing.NONE}
SHARDED = {"FULL_SHARD": ZeroStage.PARAMETERS, "SHARD_GRAD_OP": ZeroStage.GRADIENTS}
# Of the A100 nodes of Jean Zay, with four links of 100 Gbit/s: all 32 devices of four of them
# reduced 4 GB in 1.53 s, a
# bus bandwidth of 40.5 Gbit/s (bigscience-workshop/bigscience
# experiments/bandwidth/all_reduce_bench-a100-n4.txt,
# 2022-01; its README: NCCL does not use all that Omni-Path has). Said as the nominal bandwidth of
# which LINK_EFFICIENCY
# is that.
JEAN_ZAY_NETWORK = "6.5GB/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPlan(Plan):
    """A plan of Megatron's: layouts that no engine of ours combines so."""

    def __post_init__(self) -> None:
        """Accept every combination."""


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


def sources() -> dict[str, list[Measured]]:
    """What was measured, where."""
    return {
        "GPT on 2-8 A100": list(vtrain(DATA / "iteration_time_single_node.csv")),
        "GPT on 64-512 A100": list(vtrain(DATA / "iteration_time_multi_node.csv")),
        "BLOOM on 320-384 A100": averaged(bigscience(DATA / "published.csv")),
        "MPT on 8-512 A100, H100": list(llm_foundry(DATA / "published.csv")),
    }


def vtrain(path: Path) -> Iterator[Measured]:
    """Megatron-DeepSpeed on nodes of eight A100 with 800 Gbit/s of InfiniBand, 1F1B, attention not fused, 50,257 words,
    every layer recomputed (VIA-Research/vTrain: data/README.md, src/config.py, use_checkpoint in config/validation/).

    Those of one node were not timed row by row: they are sums. A layer's time does not depend on the depth, the
    data-parallel or the pipeline degree: it is the same to 1e-5. Steps lie on a line over the number of micro-batches
    (`off_a_line`). One trace per width, tensor-parallel degree and micro-batch gives such rows (same, src/predictor.py,
    profile). 1,440 rows hold 32 layer times.
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
            layout=ParallelLayout(
                dp=dp, tp=number["tensor parallelism"], pp=number["pipeline parallelism"]
            ),
            micro_batch_size=micro,
            gradient_accumulation_steps=batch // (dp * micro),
            activation_checkpointing=ActivationCheckpointing.FULL,
            precision=Precision.FP16,
        )
        measured_s = float(row["iteration time (ms)"]) / 1e3
        yield measured(
            (batch,), shape, plan, machine("a100-80gb", number["# GPUs"], "100GB/s"), measured_s
        )


def bigscience(path: Path) -> Iterator[Measured]:
    """Megatron-DeepSpeed on nodes of eight A100 of Jean Zay, every layer recomputed.

    All rows have 320 to 384 devices, with which it always hung unless launches blocked (same file, "dealing with JZ
    hanging on the large model": CUDA_LAUNCH_BLOCKING=1).

    A group is what was tried on one day, since the software changed from day to day. Rows of quality C are left out:
    their layers were derived from a size. Three rows on one node are left out: at their global batch of 2,048 the
    published time would exceed the peak of eight A100.
    """
    for row in csv.DictReader(path.open()):
        if (
            row["source_path"] != "train/tr11-176B-ml/chronicles-prequel.md"
            or not row["tput"]
            or row["quality"] == "C"
        ):
            continue
        if row["n_gpus"] == "8":
            continue
        day, sizes = (
            re.search(r"02-\d\d", row["note"]),
            re.match(r"h(\d+) L(\d+) a(\d+)", row["arch"]),
        )
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
        shape = Shape(
            hidden=hidden, layers=layers, heads=heads, tokens=2048, vocabulary=250_680, flash=False
        )
        hardware = replace(
            machine("a100-80gb", int(row["n_gpus"]), JEAN_ZAY_NETWORK), launches_block=True
        )
        yield measured((day[0], batch), shape, plan, hardware, float(row["tput"]))


def llm_foundry(path: Path) -> Iterator[Measured]:
    """FSDP1 with flash attention on nodes of eight, with 1.6 (A100) and 3.2 (H100) Tbit/s between nodes.

    Every row is another model, length or number of GPUs, so that only their times can be compared. Left out: rows in
    fp8, an arithmetic that plans do not know.

    Predicted steps are 13 % too short in the median: 12 % on A100, 29 % on H100. The source explains a part of the
    latter. Its attention was FlashAttention in Triton (scripts/train/benchmarking/submit_benchmarks.py @ 5e85bd62d,
    `--attn_impl`), without Hopper's instructions. Predicted over measured falls from 0.78 at 512 tokens to 0.57 at
    65,536 on H100, and stays at 0.87 to 0.94 on A100. With A100's attention, by multiprocessors and clock 17 % of
    H100's peak, H100's rows would be 17 % too short and no more so at greater length. Its libraries were those of 2023
    (sweep.sh: PyTorch 1.13.1 with CUDA 11.7 for A100, 2.1.0 with 12.1 for H100). What these cost is not said there. The
    12 % on A100 depend on no length or width, and nothing in the source explains them.
    """
    for row in csv.DictReader(path.open()):
        if (
            row["source_repo"] != "mosaicml/llm-foundry"
            or not row["tput"]
            or "fp8" in row["precision"]
        ):
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
        shape = Shape(
            hidden=hidden,
            layers=layers,
            heads=heads,
            tokens=tokens,
            vocabulary=vocabulary,
            flash=True,
        )
        device = row["gpu"].replace("_", "-")
        hardware = machine(device, dp, "400GB/s" if device.startswith("h100") else "200GB/s")
        yield measured(
            (row["id"],), shape, plan, hardware, batch * tokens / (float(row["tput"]) * dp)
        )


def measured(
    group: tuple[object, ...], shape: Shape, plan: Plan, hardware: Hardware, measured_s: float
) -> Measured:
    profile = gpt(shape, plan.layout.tp, plan.precision)
    predicted_s = predict_step_s(profile, plan, hardware)
    return Measured(
        group=(*group, shape, plan.world_size),
        plan=plan,
        predicted_s=predicted_s,
        measured_s=measured_s,
    )


def averaged(rows: Iterable[Measured]) -> list[Measured]:
    """One row for every plan that a group measured more than once."""
    found: dict[tuple[object, Plan], list[Measured]] = defaultdict(list)
    for row in rows:
        found[row.group, row.plan].append(row)
    return [
        replace(same[0], measured_s=statistics.mean(row.measured_s for row in same))
        for same in found.values()
    ]


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
            forward_flops=sum(2.0 * rows * inner * columns for rows, inner, columns in products)
            + attention_flops,
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
    name: str,
    parameters: int,
    *,
    kept: int,
    checkpointed: int,
    product: tuple[int, int, int] | None = None,
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
    spec = ClusterSpec.model_validate(
        {"name": "published", "nodes": [node], "network_bandwidth": network}
    )
    return Hardware(
        device=spec.nodes[0].device,
        devices_per_node=spec.nodes[0].devices,
        nodes=-(-devices // 8),
        network_bandwidth=spec.network_bandwidth,
    )
