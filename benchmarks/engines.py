"""How much longer is a step of our engines than one of a loop written by hand for the same strategy?

As a program it is one rank of two: `python -m benchmarks.engines FOLDER`. Both hold the same decoder and take turns,
step by step, in one process, so that other load on the machine meets both alike. Both end a step with what a person
logs, its loss and its norm of gradients.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, at_most, informs
from orchestrator.specs.choices import Engine, ParallelLayout, ZeroStage
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from tests.ranks import start_ranks
from tests.training.gang import finish

RANKS = 2
MICRO_BATCH_SIZE, ACCUMULATION, SEQUENCE_LENGTH = 4, 2, 128
WARM_UP, PAIRS = 4, 40
LIMIT = 1.02
TIMEOUT_S = 900
DECODER = DecoderSpec(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
)
TRAINING = TrainingSpec(learning_rate=1e-4, clip_norm=1.0)

Step = Callable[
    [list[Any], int], tuple[float, float]
]  # micro-batches and tokens of the global batch -> loss, norm


def figures() -> list[Figure]:
    """The median, over pairs of steps, of our step's time over that of the loop by hand."""
    with tempfile.TemporaryDirectory() as folder:
        codes = finish(start_ranks("benchmarks.engines", [folder], RANKS), TIMEOUT_S)
        assert codes == [0] * RANKS, codes
        measured = json.loads(Path(folder, "pairs.json").read_text())
    found = []
    for strategy, pairs in measured.items():
        by_hand_s = statistics.median(by_hand for _, by_hand in pairs)
        ratio = statistics.median(ours / by_hand for ours, by_hand in pairs)
        found.append(informs(f"{strategy}: step by hand, median", by_hand_s, "s"))
        found.append(at_most(f"{strategy}: our step / by hand", ratio, "ratio", LIMIT))
    return found


def main(folder: Path) -> None:
    """Measure every strategy on this rank; rank 0 writes the pairs of times."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    text = folder / f"text-{dist.get_rank()}.txt"
    text.write_text("All work and no play makes a dull corpus.\n" * 2000)
    measured = {
        "DDP": _pairs(Engine.TORCH, ZeroStage.NONE, _ddp_by_hand, text),
        "FSDP2": _pairs(Engine.TORCH, ZeroStage.PARAMETERS, _fsdp2_by_hand, text),
        "DeepSpeed ZeRO-2": _pairs(Engine.DEEPSPEED, ZeroStage.GRADIENTS, _deepspeed_by_hand, text),
    }
    if dist.get_rank() == 0:
        (folder / "pairs.json").write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)  # gloo may abort on its way out


def _pairs(
    engine: Engine, stage: ZeroStage, by_hand: Callable[[Any, Plan], Step], text: Path
) -> list[tuple[float, float]]:
    """Seconds of (our step, the step by hand), the two taking turns in which goes first."""
    import torch

    from orchestrator.training.build import build_engine, build_recipe

    plan = Plan(
        engine=engine,
        zero_stage=stage,
        layout=ParallelLayout(dp=RANKS),
        micro_batch_size=MICRO_BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        sequence_length=SEQUENCE_LENGTH,
    )
    run = TrainingRun(
        model=ModelSpec(decoder=DECODER),
        data=DataSpec(text=(str(text),), sequence_length=SEQUENCE_LENGTH),
        training=TRAINING,
        plan=plan,
        job_folder="",
        attempt_folder="",
        epoch=1,
        device="cpu",
    )
    recipe, other = build_recipe(run), build_recipe(run)
    ours, theirs = build_engine(run, recipe, torch.device("cpu"), None), by_hand(other, plan)
    samples = list(range(MICRO_BATCH_SIZE))
    batches = [recipe.dataset.batch(samples) for _ in range(ACCUMULATION)]
    tokens = sum(recipe.dataset.token_count(sample) for sample in samples) * ACCUMULATION * RANKS
    pairs = []
    for number in range(WARM_UP + PAIRS):
        took = {}
        for name in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
            began_s = _all_ready()
            if name == "ours":
                ours.step(number, batches, tokens)
            else:
                theirs(batches, tokens)
            took[name] = time.perf_counter() - began_s
        pairs.append((took["ours"], took["theirs"]))
    return pairs[WARM_UP:]


def _all_ready() -> float:
    """The time when every rank has come here."""
    import torch.distributed as dist

    dist.barrier()
    return time.perf_counter()


def _ddp_by_hand(recipe: Any, _plan: Plan) -> Step:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    module = _on_cpu(recipe)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = _adamw(module)

    def step(batches: list[Any], tokens: int) -> tuple[float, float]:
        total = 0.0
        for turn, (inputs, labels) in enumerate(batches):
            model.require_backward_grad_sync = turn == len(batches) - 1
            loss = model(inputs, labels) * RANKS / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), TRAINING.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total / RANKS, norm.item()

    return step


def _fsdp2_by_hand(recipe: Any, _plan: Plan) -> Step:
    import torch
    from torch.distributed.fsdp import fully_shard

    module = _on_cpu(recipe)
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    optimizer = _adamw(module)

    def step(batches: list[Any], tokens: int) -> tuple[float, float]:
        total = 0.0
        for inputs, labels in batches:
            loss = module(inputs, labels) * RANKS / tokens
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), TRAINING.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total / RANKS, norm.full_tensor().item()

    return step


def _deepspeed_by_hand(recipe: Any, plan: Plan) -> Step:
    import deepspeed
    import torch

    from orchestrator.training.engines.deepspeed_settings import make_deepspeed_settings

    module = _on_cpu(recipe)
    config = make_deepspeed_settings(plan, TRAINING, torch.device("cpu"))
    engine, *_ = deepspeed.initialize(model=module, optimizer=_adamw(module), config=config)

    def step(batches: list[Any], tokens: int) -> tuple[float, float]:
        total = 0.0
        for inputs, labels in batches:
            loss = engine(inputs, labels) * RANKS * len(batches) / tokens
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / RANKS / len(batches), float(engine.get_global_grad_norm())

    return step


def _on_cpu(recipe: Any) -> Any:
    import torch

    from orchestrator.training.contract.recipe import materialise

    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    return recipe.module


def _adamw(module: Any) -> Any:
    import torch

    betas = (TRAINING.beta1, TRAINING.beta2)
    return torch.optim.AdamW(
        module.parameters(),
        lr=TRAINING.learning_rate,
        betas=betas,
        weight_decay=TRAINING.weight_decay,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
