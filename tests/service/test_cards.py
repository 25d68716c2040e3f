"""Cards that a command line names: how many nodes they make, what is between these, and what a whole training takes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.intake.intake import read_job
from orchestrator.service.terminal.output import make_console
from orchestrator.service.terminal.plan_tables import make_plan_panel
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError
from tests.commands import run_orc

JOB = Path(__file__).parents[2] / "jobs/finetune/llama3_8b_lora.yaml"


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "network"),
    [
        ("rtx3090", 1, 1, 12.5e9),
        ("2xrtx3090", 1, 2, 12.5e9),
        ("16xh100-80gb", 2, 8, 12.5e9),
        ("16xh100-80gb@400Gb", 2, 8, 50e9),
        ("16 x h100-80gb @ 50GB/s", 2, 8, 50e9),
        ("2x4xa100-80gb@100Gb/s", 2, 4, 12.5e9),
        ("1x16xh100-80gb", 1, 16, 12.5e9),
    ],
)
def test_cards_make_nodes_with_a_network(
    text: str, nodes: int, devices: int, network: float
) -> None:
    cluster = parse_cards(text)
    (node,) = cluster.nodes
    assert (node.count, node.devices, cluster.network_bandwidth) == (nodes, devices, network)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("1xrtx3060-12gb", 64 * 2**30),
        ("2xrtx3090:1TiB", 2**40),
        ("16xh100-80gb : 512 GiB @ 400Gb", 2**39),
    ],
)
def test_cards_have_the_host_memory_that_is_typed(text: str, host: int) -> None:
    (node,) = parse_cards(text).nodes
    assert node.host_memory == host


@pytest.mark.parametrize("cards", ["2xh100-80gb", "2xh100-80gb:1TiB"])
def test_a_plan_says_that_host_memory_is_assumed_where_none_is_typed(
    tmp_path: Path, cards: str
) -> None:
    env = {"PATH": os.environ["PATH"], "ORC_HOME": str(tmp_path)}
    reply = run_orc(["plan", str(JOB), "--gpu", cards, "--json"], env=env)
    assert ("assumed" in json.loads(reply.stdout)["hardware"]) is (":" not in cards)


@pytest.mark.parametrize(
    "text",
    ["12xrtx3090", "0xrtx3090", "2x0xrtx3090", "999999x8xrtx3090", "2xrtx3090@x", "2xrtx3090:x", "2xrtx3090:1",
     "@1Gb", "rtx3090@0Gb"],
)  # fmt: skip
def test_other_numbers_and_networks_are_one_error(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cards(text)
    assert "--gpu" in str(caught.value)


def test_a_plan_says_its_hardware_and_what_each_number_of_devices_takes(tmp_path: Path) -> None:
    spec = read_job(JOB, [("gpus", "1-16")], to_run=False)
    plans = plan_job(spec, make_idle_nodes(parse_cards("16xh100-80gb@400Gb")))
    with (tmp_path / "text").open("w") as file:
        make_console(file).print(make_plan_panel(plans))
    text = (tmp_path / "text").read_text()
    assert "2 nodes of 8, 50 GB/s between nodes" in text
    begin = text.index("DEVICE-HOURS")
    rows = [line.split() for line in text[begin:].splitlines()[1:6]]
    counts = [int(row[1] if row[0] == "→" else row[0]) for row in rows]
    assert counts == [1, 2, 4, 8, 16]
    assert "1,000 STEPS" in text
