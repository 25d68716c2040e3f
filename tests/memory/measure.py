"""Measured peaks: the real engines on real gloo ranks under a virtual device, many plans in one launch.

As a program it is one rank: `python -m tests.memory.measure FOLDER`, with the folder's request.json.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.specs.choices import Engine, ZeroStage
from orchestrator.specs.from_json import from_json
from orchestrator.specs.job.model import DataSpec, Freeze, ModelSpec, TrainingSpec, parse_model_json
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import OOM_EXIT_CODE, TrainingRun
from tests.ranks import Rank, start_ranks

STEPS = 2  # DDP rebuilds its buckets in the second
TEXT, PAIRS, TOKENIZER = "text.txt", "pairs.jsonl", "tokenizer"
START_TIMEOUT_S, RUN_TIMEOUT_S = 120, 20
UNLIMITED_BYTES = 2**50


@dataclass(frozen=True, kw_only=True)
class Run:
    """A plan of a model, on devices of a capacity."""

    model: ModelSpec
    plan: Plan
    sequence_length: int
    capacity_bytes: int = UNLIMITED_BYTES
    frozen: tuple[str, ...] = ()  # names of parameters, as patterns


def peaks(model: ModelSpec, sequence_length: int, plans: Sequence[Plan], folder: Path) -> list[int]:
    """Allocated peak of the worst rank of every plan; all plans have one world size and share one launch."""
    return measure_peaks(
        [Run(model=model, plan=plan, sequence_length=sequence_length) for plan in plans], folder
    )


def measure_peaks(runs: Sequence[Run], folder: Path) -> list[int]:
    """Allocated peak of the worst rank of every run; all have one world size and share one launch.

    Fails where a run needs more than its capacity: what its log ends with says which one.
    """
    (world_size,) = {run.plan.world_size for run in runs}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TEXT).write_text("All work and no play makes a dull corpus.\n" * 4000)
    if any(map(_is_encoder_decoder, (run.model for run in runs))):
        _write_pairs(folder)
    order = sorted(range(len(runs)), key=lambda index: _leaves_behind(runs[index].plan))
    (folder / "request.json").write_text(
        json.dumps([dataclasses.asdict(runs[index]) for index in order])
    )
    ranks = start_ranks("tests.memory.measure", [str(folder)], world_size)
    try:
        codes = _exit_codes(ranks, START_TIMEOUT_S + RUN_TIMEOUT_S * len(runs))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    logs = [
        (folder / f"{rank}.log").read_text()[-2000:]
        for rank, code in enumerate(codes)
        if code not in (0, None)
    ]
    assert codes == [0] * world_size, "\n".join(logs)
    peaks_by_rank = [
        json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)
    ]
    worst = dict(zip(order, map(max, zip(*peaks_by_rank, strict=True)), strict=True))
    return [worst[index] for index in range(len(runs))]


def _leaves_behind(plan: Plan) -> int:
    """Rank the plan by what later runs see of it: DeepSpeed's stage 3 replaces torch's linear function by its own.

    (`zero3_linear_wrap` in deepspeed/runtime/zero/linear.py, which saves other tensors.)
    """
    return 0 if plan.engine is Engine.TORCH else 1 + (plan.zero_stage is ZeroStage.PARAMETERS)


def _is_encoder_decoder(model: ModelSpec) -> bool:
    return isinstance(model.hf, dict) and model.hf["model_type"] in ("t5", "bart")


def _write_pairs(folder: Path) -> None:
    """Inputs and targets, of which every other is shorter than a sample, and the tokenizer for them."""
    from tests.training import tiny_hf  # only here: importing transformers takes seconds

    turns = (
        (("user", "work " * 100), ("assistant", "play " * 100)),
        (("user", "work"), ("assistant", "play")),
    )
    talks = (
        [{"role": role, "content": content} for role, content in turns[number % 2]]
        for number in range(400)
    )
    (folder / PAIRS).write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    tiny_hf.tokenizer().save_pretrained(folder / TOKENIZER)


def _data(run: Run, folder: Path) -> DataSpec:
    if _is_encoder_decoder(run.model):
        chat, tokenizer = (str(folder / PAIRS),), str(folder / TOKENIZER)
        return DataSpec(chat=chat, tokenizer=tokenizer, sequence_length=run.sequence_length)
    return DataSpec(text=(str(folder / TEXT),), sequence_length=run.sequence_length)


def _exit_codes(ranks: Sequence[Rank], timeout_s: float) -> list[int | None]:
    """Return the exit codes of all ranks; None for a rank that waits for another which has failed."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        codes = [process.poll() for process in ranks]
        if None not in codes or any(codes):
            return codes
        time.sleep(0.05)
    raise TimeoutError(f"{len(ranks)} ranks are not done after {timeout_s:.0f} s")


def main(folder: Path, rank: int) -> None:
    """Measure every run of the request on this rank."""
    import torch
    import torch.distributed as dist

    request = json.loads((folder / "request.json").read_text())
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(log, standard)
    dist.init_process_group("gloo")
    peaks_bytes = []
    for fields in request:
        run = Run(
            **{
                **fields,
                "model": parse_model_json(fields["model"]),
                "plan": from_json(Plan, fields["plan"]),
            }
        )
        try:
            peaks_bytes.append(_peak_bytes(run, folder))
        except torch.OutOfMemoryError as error:
            print(error, run, flush=True)
            os._exit(OOM_EXIT_CODE)
    (folder / f"{rank}.json").write_text(json.dumps(peaks_bytes))
    os._exit(0)  # gloo may abort on its way out


def _peak_bytes(request: Run, folder: Path) -> int:
    import torch
    import torch.distributed as dist

    from orchestrator.training.build import build_engine, build_recipe
    from orchestrator.training.data.dataset import list_global_batch, split_micro_batches
    from orchestrator.training.guard.virtual_device import VirtualDevice

    plan = request.plan
    run = TrainingRun(
        model=request.model,
        data=_data(request, folder),
        training=TrainingSpec(
            max_steps=STEPS,
            optimizer=plan.optimizer,
            clip_norm=None if plan.optimizer_in_backward else 1.0,
            batch_norm_samples=plan.micro_batch_size,
            freeze=tuple(Freeze(parameters=names) for names in request.frozen),
        ),
        plan=plan,
        job_folder=str(folder),  # pairs are tokenised once for all runs
        attempt_folder="",
        epoch=1,
        device="cpu",
    )
    with VirtualDevice(request.capacity_bytes) as device:
        recipe = build_recipe(run)
        engine = build_engine(run, recipe, torch.device("cpu"), None)
        for step in range(STEPS):
            samples = list_global_batch(
                step * plan.global_batch_size, plan.global_batch_size, len(recipe.dataset), 0
            )
            tokens = sum(recipe.dataset.token_count(sample) for sample in samples)
            dp_rank = plan.layout.data_parallel_index_of(dist.get_rank())
            mine = split_micro_batches(
                samples, dp_rank, plan.micro_batch_size, plan.gradient_accumulation_steps
            )
            engine.step(step, (recipe.dataset.batch(indices) for indices in mine), tokens)
        del engine, recipe
        peak = device.peak_bytes
    gc.collect()
    dist.barrier()
    return peak


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
