"""The five audio projects' job files are planned without the projects, as their communities found them to run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import Candidate, list_fitting
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.service.intake.intake import read_cluster, read_job
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.plan import Plan

ROOT = Path(__file__).parents[1]
GB = 10**9
ORPHEUS = "orpheus_tts/finetune_3b.yaml"


def job(name: str) -> JobSpec:
    return read_job(ROOT / "jobs" / name, to_run=False)


def hardware(cluster: str) -> Hardware:
    spec = read_cluster(ROOT / "clusters" / f"{cluster}.yaml")
    (node,) = spec.nodes
    return Hardware(
        device=node.device,
        devices_per_node=node.devices,
        nodes=1,
        network_bandwidth=spec.network_bandwidth,
    )


def fit(name: str, cluster: str) -> list[Candidate]:
    where = hardware(cluster)
    return list(
        list_fitting(
            find_frontier(read_plan_request(job(name)), where), where.device.memory, UNMEASURED
        )
    )


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("musicgen/musicgen_small.yaml", "1x2-rtx4090-24gb"),
        ("parler_tts/parler_tts_mini.yaml", "1x2-rtx4090-24gb"),
        ("rvc/rvc_v2_48k.yaml", "1x1-rtx3060-12gb"),
        ("latentsync/stage2.yaml", "1x4-a100-80gb"),
        (ORPHEUS, "1x4-a100-80gb"),
    ],
)
def test_a_plan_is_found_for_each_on_the_hardware_of_its_users(name: str, cluster: str) -> None:
    spec, candidates = job(name), fit(name, cluster)
    assert candidates
    assert {candidate.plan.global_batch_size for candidate in candidates} == {
        spec.global_batch_size
    }
    assert parse_job_data(spec.model_dump(mode="json"), "request") == spec, (
        "as it goes to the service"
    )


@pytest.mark.parametrize(
    ("name", "line", "count"),
    [
        # Printed by the trainers at the commits that the job files name, with tiny models on CPU.
        ("rvc/rvc_v2_48k.yaml", "INFO:voice:Training epoch: 3 [50%]", "3"),
        (
            "parler_tts/parler_tts_mini.yaml",
            "Step... (3 / 8 | Loss: 4.399537563323975, Learning Rate: 5e-05)",
            "3",
        ),
        (ORPHEUS, " 17%|█▋        | 2/12 [00:02<00:13,  1.33s/it]", "2"),
        (
            "musicgen/musicgen_small.yaml",
            "\x1b[0m] - \x1b[1mTrain Summary | Epoch 1 | lr=1.25E-08 | ce=6.459",
            "1",
        ),
        (
            "rvc/rvc_v2_48k.yaml",
            "INFO:voice:====> Epoch: 3 [2026-11-22 08:31:40] | (0:00:21.104501)",
            "3",
        ),
    ],
)
def test_progress_is_counted_in_the_lines_that_the_trainer_prints(
    name: str, line: str, count: str
) -> None:
    progress = job(name).progress
    assert progress is not None
    assert re.findall(progress, line) == [count]


def test_rvcs_last_words_are_known() -> None:
    log = job("rvc/rvc_v2_48k.yaml").success.log
    assert log is not None
    assert re.search(log, "INFO:voice:Saving final checkpoint: Success")


def test_what_is_to_run_needs_its_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SpecError, match="workdir"):
        read_job(ROOT / "jobs" / ORPHEUS)


def test_orpheus_runs_out_in_the_optimizer_at_batch_1_and_fits_fully_sharded_over_four() -> None:
    """canopyai/Orpheus-TTS issue 93: out of memory on devices of 80 GB at the default batch of 1, cured by FSDP.

    Issues 214 and 215: on 40 GB in optimizer.step, where no sample counts any more: no smaller batch helps.
    """
    spec, where = job(ORPHEUS), hardware("1x4-a100-80gb")
    alike = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=4),
        micro_batch_size=1,
        precision=Precision.BF16,
    )
    assert alike in list(list_plans(read_plan_request(spec), where))
    needed = estimate(find_profile(read_plan_request(spec), where, alike), alike, where.device)
    assert needed.device_bytes > where.device.memory
    (in_step,) = [moment for moment in needed.moments if moment.name == "optimizer step"]
    assert in_step.activation_bytes == 0
    assert in_step.counted_bytes > 60 * GB
    candidates = fit(ORPHEUS, "1x4-a100-80gb")
    assert all(candidate.plan.zero_stage for candidate in candidates), (
        "on one device the same batch does not fit either"
    )
    over_four = {
        candidate.plan.offload: candidate
        for candidate in candidates
        if candidate.plan.layout.dp == 4
    }
    assert set(over_four) == {Offload.NONE, Offload.PARAMETERS}, (
        "accelerate's FSDP may keep its state on the host"
    )
    assert {candidate.plan.zero_stage for candidate in over_four.values()} == {ZeroStage.PARAMETERS}
    on_device, on_host = (
        over_four[offload].estimate.device_bytes for offload in (Offload.NONE, Offload.PARAMETERS)
    )
    assert on_host < 30 * GB <= on_device <= 40 * GB


def test_musicgen_needs_its_checkpointing_on_24_gb() -> None:
    assert {
        candidate.plan.activation_checkpointing
        for candidate in fit("musicgen/musicgen_small.yaml", "1x2-rtx4090-24gb")
    } == {ActivationCheckpointing.FULL}


def decoder_parameters(
    *, layers: int, width: int, books: int, words: int, pads: int, rest: int
) -> int:
    """Weights of a decoder with cross-attention over codebooks: two attentions, a feed-forward of 4, three norms."""
    per_layer = (4 + 4 + 8) * width**2 + 3 * 2 * width
    return layers * per_layer + books * width * (2 * words + pads) + 2 * width + rest


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # audiocraft, issue 357: 420.37M; a projection of T5-base's 768 stands beside.
        (
            "musicgen/musicgen_small.yaml",
            decoder_parameters(layers=24, width=1024, books=4, words=2048, pads=1, rest=769 * 1024),
        ),
        # helpers/model_init_scripts/init_model_600M.py, and a table of T5's 32,128 words for the
        # prompt.
        (
            "parler_tts/parler_tts_mini.yaml",
            decoder_parameters(
                layers=24, width=1024, books=9, words=1088, pads=1, rest=32128 * 1024
            ),
        ),
    ],
)
def test_declared_parameters_are_those_of_the_published_sizes(name: str, count: int) -> None:
    profile = job(name).profile
    assert profile is not None
    assert profile.parameters == pytest.approx(count, rel=0.002)
