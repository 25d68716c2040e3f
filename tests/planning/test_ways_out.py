"""Offers of a refusal fit: each way is given to the job again, as a person would type it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import estimate_needed_device_bytes, list_fitting
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.ways_out import (
    UnfitJob,
    WayOut,
    describe_missing_knobs,
    list_adapter_changes,
    list_ways_out,
)
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.intake.intake import read_job, read_overrides
from orchestrator.specs.choices import Degradation
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.written import as_yaml
from tests.planning.test_scripts import decoder_job, machine

JOBS = Path(__file__).parents[2] / "jobs"


def cards(text: str) -> Hardware:
    (group,) = group_equal_nodes(make_idle_nodes(parse_cards(text)))
    return group.hardware


def fits(spec: JobSpec, hardware: Hardware) -> bool:
    front = find_frontier(read_plan_request(spec), hardware, skips_oversized=True)
    return next(list_fitting(front, hardware.device.memory, UNMEASURED), None) is not None


def retyped(file: Path, way: WayOut) -> JobSpec:
    """Return the job with the way's options, as the command line reads them."""
    settings = [word for word in shlex.split(way.options) if word != "--set"]
    return read_job(file, read_overrides(settings), to_run=False)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("orpheus_tts/finetune_3b.yaml", "rtx3090"),
        ("latentsync/stage2.yaml", "rtx3090"),
        ("musicgen/musicgen_small.yaml", "rtx3070"),
        ("parler_tts/parler_tts_mini.yaml", "rtx3070"),
        ("parler_tts/parler_tts_mini.yaml", "rtx3060"),
    ],
)
def test_each_project_has_a_way_out_on_its_users_cards_that_fits_as_it_is_offered(
    name: str, card: str
) -> None:
    file, hardware = JOBS / name, cards(card)
    spec = read_job(file, to_run=False)
    assert not fits(spec, hardware)
    ways = list_ways_out(UnfitJob(spec, hardware, hardware.device.memory, UNMEASURED))
    assert ways
    for way in ways:
        if not way.settings:  # other devices
            assert way.plan is not None
            assert way.needed_bytes > hardware.device.memory or "host memory" in way.label
            continue
        assert way.needed_bytes <= hardware.device.memory
        again = retyped(file, way)
        count = again.gpus.min
        nodes = 1 if "nodes" not in way.label else count
        there = replace(hardware, devices_per_node=count // nodes, nodes=nodes)
        assert fits(again, there), way.sentence


def test_rvc_fits_a_3060_as_its_file_is() -> None:
    assert fits(read_job(JOBS / "rvc/rvc_v2_48k.yaml", to_run=False), cards("rtx3060"))


def test_every_way_of_a_decoder_fits_and_says_its_class() -> None:
    spec, hardware = decoder_job(hidden_size=768), machine()
    capacity = (
        min(
            estimate_needed_device_bytes(c, UNMEASURED)
            for c in find_frontier(read_plan_request(spec), hardware).candidates
        )
        - 2**20
    )
    assert not list(
        list_fitting(find_frontier(read_plan_request(spec), hardware), capacity, UNMEASURED)
    )
    ways = list_ways_out(UnfitJob(spec, hardware, capacity, UNMEASURED))
    assert any(way.label.startswith("4 devices instead of 2") for way in ways)
    assert any(way.label.startswith("devices with at least") for way in ways)
    for way in ways:
        assert way.sentence.count("--set") == len(way.settings)
        assert ("semantic" in way.sentence) == (way.degradation is Degradation.SEMANTIC)


def test_two_changes_are_offered_together_only_where_no_one_is_enough() -> None:
    spec, hardware = read_job(JOBS / "musicgen/musicgen_small.yaml", to_run=False), cards("rtx4080")
    case = UnfitJob(spec, hardware, hardware.device.memory, UNMEASURED)
    settings = [dict(way.settings) for way in list_ways_out(case)]
    assert {"global_batch_size": "8"} in settings
    assert all(len(way.settings) <= 1 for way in list_ways_out(case))


def test_a_script_is_told_its_missing_levers_and_the_job_of_our_engines_that_fits() -> None:
    spec, hardware = read_job(JOBS / "orpheus_tts/finetune_3b.yaml", to_run=False), cards("rtx3060")
    case = UnfitJob(spec, hardware, hardware.device.memory, UNMEASURED)
    (line,) = describe_missing_knobs(case)
    assert "activation checkpointing" in line
    assert "`knobs.gradient_accumulation_steps`" in line
    ways = list(list_adapter_changes(case, lambda adapted: adapted))
    assert any("4 bits" in way.label for way in ways)
    for way in ways:
        assert "`model: {hf: ...}`" in way.label
        assert way.needed_bytes <= hardware.device.memory
        assert not way.options, "no `--set` makes another job of it"
        assert way.job is not None
        assert way.job.command is None


def test_adapters_are_left_out_where_the_model_cannot_be_traced_and_where_there_is_none_of_transformers() -> (
    None
):
    def refuse(adapted: JobSpec) -> JobSpec:
        raise SpecError("no trace of it", path=adapted.name)

    spec, hardware = (
        read_job(JOBS / "orpheus_tts/finetune_3b.yaml", to_run=False),
        cards("a100-40gb"),
    )
    assert (
        list(
            list_adapter_changes(
                UnfitJob(spec, hardware, hardware.device.memory, UNMEASURED), refuse
            )
        )
        == []
    )
    assert (
        list(
            list_adapter_changes(
                UnfitJob(decoder_job(), machine(), 1, UNMEASURED), lambda adapted: adapted
            )
        )
        == []
    )


REMEDY = """
name: job
command: python train.py --size large --ema-device cuda key.a=1
global_batch_size: 4
knobs:
  micro_batch_size: {flag: --batch, default: 4}
remedies:
  - {label: its small variant, arguments: --size small key.a=2, set: {profile.parameters: "1000000"}}
profile: {parameters: 4000000000, activations_per_sample: 1MiB}
"""


def test_a_remedy_of_the_job_file_is_offered_as_a_job_that_fits_with_one_word_of_each_name(
    tmp_path: Path,
) -> None:
    (tmp_path / "job.yaml").write_text(REMEDY)
    (tmp_path / "train.py").touch()
    spec, hardware = read_job(tmp_path / "job.yaml", to_run=False), cards("rtx3060")
    way = list_ways_out(UnfitJob(spec, hardware, hardware.device.memory, UNMEASURED))[0]
    assert way.label == "its small variant"
    assert not way.options, "no `--set` says words of a command"
    assert way.job is not None
    (tmp_path / "other.yaml").write_text(as_yaml(way.job.as_job_file()))
    again = read_job(tmp_path / "other.yaml", to_run=False)
    assert again.command is not None
    assert again.command[2:] == ("--ema-device", "cuda", "--size", "small", "key.a=2")
    assert fits(again, hardware)


def test_a_remedy_with_an_unknown_key_is_refused_where_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        REMEDY.replace("profile.parameters", "profile.parameter_count")
    )
    with pytest.raises(SpecError, match="its small variant") as caught:
        read_job(tmp_path / "job.yaml", to_run=False)
    assert "profile.parameter_count" in str(caught.value)
