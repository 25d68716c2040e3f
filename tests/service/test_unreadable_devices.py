"""A driver that cannot be read has its own word wherever a person or a program looks."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrator.backends.devices import nvml
from orchestrator.service.commands import doctor
from orchestrator.service.commands.doctor import BAD
from orchestrator.service.terminal.tables import make_nodes_table
from orchestrator.service.views.records import parse_node_view
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.replace import replace
from tests.service.worlds import World

WHY = "NVML does not start: <b>Driver</b> Not Loaded"


def see(world: World, *errors: str) -> None:
    (node,) = world.controller.state.declared
    free_bytes = tuple(0 if error else node.device.memory for error in errors or ("", ""))
    node = replace(node, free_bytes=free_bytes, driver_errors=errors)
    event = NodesSeen(
        nodes=(node,),
        declared=world.controller.state.declared,
        at_s=world.controller.state.at_s + 1,
    )
    world.controller._apply_events([event])


def devices_by_state(world: World) -> dict[str, float]:
    families = text_string_to_metric_families(world.client.get("/metrics").text)
    samples = next(family for family in families if family.name == "orc_devices").samples
    return {sample.labels["state"]: sample.value for sample in samples}


@pytest.mark.parametrize(
    ("errors", "place"), [((WHY, WHY), "virtual"), (("", WHY), "device 1 of virtual")]
)
def test_a_driver_that_cannot_be_read_is_told_everywhere_and_no_more_once_it_is_back(
    world: World, errors: tuple[str, ...], place: str
) -> None:
    see(world, *errors)
    text, count = f"{place} ({WHY})", sum(map(bool, errors))
    assert world.stranger.get("/readyz").status_code == 200, "the service takes jobs"
    assert text in world.stranger.get("/readyz").json()["problems"][0]
    cluster = world.client.get("/cluster").json()
    assert text in cluster["problems"][0]
    assert cluster["nodes"][0]["driver_errors"] == [*errors]
    assert parse_node_view(cluster["nodes"][0]).free_bytes == (2**28, 2**28), (
        "as if the driver were back"
    )
    (takes,) = make_nodes_table(cluster["nodes"], []).columns[1].cells
    assert WHY in str(takes)
    assert devices_by_state(world)["unreadable"] == count
    assert devices_by_state(world)["free"] == 2 - count
    for path in ("/ui", "/ui/cluster", "/ui/queue"):
        page = world.client.get(path).text
        assert "cannot be read" in page, path
        assert "<b>Driver" not in page, path
    assert world.client.get("/ui/cluster").text.count("cannot be read: NVML") == count
    see(world)
    assert world.client.get("/readyz").json()["problems"] == []
    assert world.client.get("/cluster").json()["nodes"][0]["driver_errors"] == []
    assert devices_by_state(world)["unreadable"] == 0


def test_a_job_that_waits_for_the_driver_says_so_in_the_queue_and_when_explained(
    world: World,
) -> None:
    see(world, WHY, WHY)
    job_id = world.submit()
    world.controller.run_once(0.0)
    for path in (f"/jobs/{job_id}", "/jobs"):
        text = world.client.get(path).text
        assert "waits for " in text
        assert f"virtual ({WHY})" in text, path
        assert "other processes" not in text
    assert f"virtual ({WHY})" in world.client.get(f"/jobs/{job_id}/explanation").text


def test_a_doctor_names_the_device_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = nvml.NvmlReading(
        devices=(nvml.NvmlDevice(index=0), nvml.NvmlDevice(index=1, error="GPU is lost"))
    )
    monkeypatch.setattr(nvml, "read_nvml", lambda: lost)
    verdict, observation, _ = doctor._check_nvml()
    assert (verdict, observation) == (BAD, "cannot be read: device 1: GPU is lost")
