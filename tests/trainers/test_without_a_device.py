"""Every client also runs without a virtual device, as the guard runs on a real one: it only watches.

Each rank reports PyTorch's version, its steps, a heartbeat and the out-of-memory error that it catches or dies of. The
user's own `sitecustomize` raises that error here, in PyTorch's class and CUDA's words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.specs.attempt import Evidence
from orchestrator.specs.job.spec import JobSpec
from tests.trainers.driver import Drive, checkout, log
from tests.trainers.test_frameworks import SCRIPTS
from tests.trainers.test_latentsync import latentsync
from tests.trainers.test_launch_styles import FORKS, RANKS
from tests.trainers.test_musicgen import musicgen
from tests.trainers.test_orpheus import orpheus
from tests.trainers.test_parler import parler
from tests.trainers.test_rvc import rvc
from tests.trainers.test_ways_to_torch import CUDA_WORDS, on

# What launchers and engines take for the processor, since there is no CUDA to be found.
ON_CPU = {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
RUNS_OUT = f"""
import importlib, os
if os.environ.get("RUN_OUT_AT"):
    import torch
    steps = []

    def before(*_):
        steps.append(1)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 0 and len(steps) == int(os.environ["RUN_OUT_AT"]):
            raise torch.OutOfMemoryError({CUDA_WORDS!r})

    importlib.import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(before)
"""


def launched(launch: str) -> Callable[[Path], JobSpec]:
    def spec(folder: Path) -> JobSpec:
        folder.mkdir()
        text = FORKS if launch == "self" else RANKS
        (folder / "train.py").write_text(
            text.replace("    torch.zeros(64, 2**20)  # of the host", "    pass  #")
        )
        fields = {
            "name": "ranks",
            "command": "python -u train.py",
            "workdir": str(folder),
            "launch": launch,
            "gpus": 2,
        }
        return JobSpec.model_validate({**fields, "global_batch_size": 2})

    return spec


def framework(name: str, arguments: str) -> Callable[[Path], JobSpec]:
    def spec(_: Path) -> JobSpec:
        fields = {
            "name": name,
            "command": f"python {name}.py {arguments}",
            "workdir": str(SCRIPTS),
            "launch": "ranks",
        }
        trainer = {"hf": "hf", "diffusion": "diffusers"}[name]
        return JobSpec.model_validate(
            {**fields, "trainer": trainer, "steps": 4, "global_batch_size": 4}
        )

    return spec


CLIENTS: dict[str, Callable[[Path], JobSpec]] = {
    **{
        launch: launched(launch)
        for launch in ("ranks", "torchrun", "accelerate", "deepspeed", "self")
    },
    "rvc": lambda folder: rvc(checkout("rvc", folder), gpus=2),
    "latentsync": lambda folder: latentsync(checkout("latentsync", folder)),
    "musicgen": lambda folder: musicgen(checkout("musicgen", folder)),
    "orpheus": lambda folder: orpheus(checkout("orpheus", folder)),
    "parler": lambda folder: parler(checkout("parler", folder)),
    "hf": framework(
        "hf", "--max_steps 4 --use_cpu --report_to none --per_device_train_batch_size 4"
    ),
    "diffusion": framework("diffusion", "--train_batch_size 4 --mixed_precision no"),
}
SHORT = ("ranks",)
TO_THEIR_END = ("rvc", "latentsync", "musicgen", "orpheus", "parler", "hf", "diffusion")


def evidence_of(client: str, tmp_path: Path, **env: str) -> tuple[Evidence, int, str]:
    """Return the evidence of the client's first attempt, the number of ranks, and the log."""
    spec = CLIENTS[client](tmp_path / "client")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text(RUNS_OUT)
    variables = dict(spec.env)
    path = ":".join(filter(None, [str(tmp_path / "mine"), variables.get("PYTHONPATH")]))
    variables |= {**ON_CPU, **env, "PYTHONPATH": path}
    fields = json.loads(spec.model_dump_json(exclude_unset=True))
    fields |= {
        "env": variables,
        "probe": "never",
        "retries": {"oom": 0, "hang": 0, "preemption": 0},
    }
    job = Drive(tmp_path / "home", on("none")).run(JobSpec.model_validate(fields))
    first = job.attempts[0]
    assert first.evidence is not None
    return first.evidence, first.plan.world_size, f"{job.reason}\n{log(tmp_path / 'home', 1)}"


@pytest.mark.long
@pytest.mark.parametrize(
    "client",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CLIENTS],
)
def test_every_rank_of_a_client_is_watched_and_reports_its_out_of_memory_error(
    client: str, tmp_path: Path
) -> None:
    evidence, ranks, log_text = evidence_of(client, tmp_path, RUN_OUT_AT="2")
    assert evidence.unwatched == (), log_text
    assert not evidence.virtual
    assert [beat.rank for beat in evidence.heartbeats] == list(range(ranks)), log_text
    assert all(beat.torch_version for beat in evidence.heartbeats), log_text
    assert all(beat.steps_done >= 1 for beat in evidence.heartbeats), log_text
    mine = [report for report in evidence.caught if report.rank == 0]
    assert [(report.step, report.requested_bytes) for report in mine] == [(1, 256 * 2**20)], (
        log_text
    )
    assert mine[0].phase == "optimizer"


@pytest.mark.long
@pytest.mark.parametrize(
    "client",
    [
        name
        for name in CLIENTS
        if name not in ("torchrun", "accelerate", "deepspeed", "ranks", "self")
    ],
)
def test_a_client_that_is_only_watched_trains_to_its_end(client: str, tmp_path: Path) -> None:
    evidence, ranks, log_text = evidence_of(client, tmp_path)
    assert [end.exit_code for end in evidence.ranks] in ([0], [0] * ranks), log_text
    assert [beat.rank for beat in evidence.heartbeats] == list(range(ranks)), log_text
    assert all(beat.torch_version and beat.steps_done >= 1 for beat in evidence.heartbeats), (
        log_text
    )
    assert (evidence.unwatched, evidence.caught, evidence.missing_artifacts) == ((), (), ()), (
        log_text
    )
