"""`orc fit` and `orc plan` give one answer for a card."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.fit import iterate_fit_rows, list_jobs_by_training_way
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.terminal.plan_tables import make_plan_panel
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.job.sections import GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.replace import replace

CARDS = ("rtx3090-24gb", "l40s-48gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def job_of(layers: int) -> JobSpec:
    job = {
        "name": "job",
        "global_batch_size": 64,
        "precision": "bf16",
        "gpus": {"min": 1, "max": 8},
        "model": {"hf": LLAMA | {"num_hidden_layers": layers}},
        "data": {"text": ["corpus.txt"], "sequence_length": 4096},
    }
    return parse_job_data(job, "test")


@pytest.mark.parametrize("layers", [8, 32])
def test_a_card_gets_the_plan_of_orc_plan_with_its_bytes_and_seconds(layers: int) -> None:
    for way, spec in list_jobs_by_training_way(job_of(layers))[:2]:
        for row in iterate_fit_rows([(way, spec)]):
            if row["device"] not in CARDS or row["devices"] is None:
                continue
            exactly = spec.model_copy(
                update={"gpus": GpuRange(min=row["devices"], max=row["devices"])}
            )
            cards = f"{row['devices']}x{row['device']}"
            answer = plan_job(exactly, make_idle_nodes(parse_cards(cards)))
            assert answer["chosen"] is not None
            chosen = answer["frontier"][answer["chosen"]]
            plan, step_s, needed_bytes = row["plan"], row["step_s"], row["needed_bytes"]
            expected = (chosen["plan"], chosen["step_s"], chosen["needed_bytes"])
            assert (plan, step_s, needed_bytes) == expected, (way, cards)


@pytest.mark.parametrize("layers", [8, 32])
def test_the_table_by_devices_has_the_plan_that_so_many_devices_would_run(layers: int) -> None:
    nodes = make_idle_nodes(parse_cards("8xh100-80gb"))
    answer = plan_job(job_of(layers), nodes)
    assert answer["chosen"] in answer["by_devices"]
    for index in answer["by_devices"]:
        view = answer["frontier"][index]
        count = int(view["settings"]["gpus"])
        exactly = job_of(layers).model_copy(update={"gpus": GpuRange(min=count, max=count)})
        alone = plan_job(exactly, nodes)
        assert alone["chosen"] is not None
        assert alone["frontier"][alone["chosen"]]["plan"] == view["plan"]


@pytest.mark.parametrize("price", [None, 2.5])
def test_a_whole_training_costs_its_device_hours_where_a_device_has_a_price(
    price: float | None,
) -> None:
    cluster = parse_cards("8xh100-80gb")
    nodes = [
        replace(node, device=node.device.model_copy(update={"price_per_hour": price}))
        for node in make_idle_nodes(cluster)
    ]
    answer = plan_job(job_of(8), nodes)
    assert answer["price_per_hour"] == price
    output = io.StringIO()
    Console(file=output, width=200).print(make_plan_panel(answer))
    lines = output.getvalue().splitlines()
    (head,) = (line for line in lines if "DEVICE-HOURS" in line)
    assert ("COST" in head) == (price is not None)
    if price is not None:
        row = re.search(r"(\S+) +\S+ GiB +(\S+)  \d+ gpu", lines[lines.index(head) + 1])
        assert row is not None
        hours, cost = map(float, row.groups())
        assert cost == pytest.approx(price * hours, rel=0.02)
