"""Laws of which nodes count: those that live, offer devices, and whose devices are known."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.backends.attempts.nodes import NodeWatch
from orchestrator.backends.attempts.ports import LiveNode
from orchestrator.backends.devices.nvml import NvmlDevice, NvmlReading
from orchestrator.backends.ray.nodes import select_live_nodes
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from tests.backends.ray_jobs import DEVICE
from tests.local_cluster import LocalNodes

H200 = DEVICE.model_copy(update={"name": "h200"})


def spec(*nodes: NodeSpec) -> ClusterSpec:
    return ClusterSpec(name="c", nodes=nodes)


def node_spec(name: str, device: object = DEVICE) -> NodeSpec:
    return NodeSpec.model_validate(
        {"name": name, "devices": 2, "device": device, "host_memory": "4GiB"}
    )


def ray_node(
    node_id: str, *, host: str = "h", alive: bool = True, devices: int = 2, **labels: str
) -> dict[str, Any]:
    gpus = {f"gpu{index}": 1.0 for index in range(devices)}
    return {
        "NodeID": node_id,
        "Alive": alive,
        "NodeManagerHostname": host,
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {**gpus, "CPU": 8.0, "memory": 1024.0},
        "Labels": {f"orc-{name}": value for name, value in labels.items()},
    }


def test_a_node_is_known_by_its_label_else_by_its_host() -> None:
    live = select_live_nodes(
        spec(node_spec("a")), [ray_node("1", host="x", node="a"), ray_node("2", host="y")]
    )
    assert {name: node.id for name, node in live.items()} == {"a": "1", "y": "2"}
    assert (live["a"].host_memory_bytes, live["y"].host_memory_bytes) == (2**32, 1024)


def test_dead_nodes_and_nodes_without_devices_do_not_count() -> None:
    entries = [ray_node("1", node="a", alive=False), ray_node("2", node="b", devices=0)]
    assert select_live_nodes(spec(node_spec("a")), entries) == {}


def test_two_nodes_of_one_host_are_two() -> None:
    live = select_live_nodes(spec(node_spec("h")), [ray_node("1234567"), ray_node("7654321")])
    assert sorted(live) == ["h", "h-765432"]


def test_devices_are_known_by_label_then_by_the_file_then_as_the_only_kind() -> None:
    both = spec(node_spec("a"), node_spec("b", H200))
    entries = [
        ray_node("1", node="a", device="h200"),
        ray_node("2", node="b"),
        ray_node("3", node="unheard-of"),
    ]
    assert {
        name: node.launch.device.name for name, node in select_live_nodes(both, entries).items()
    } == {
        "a": "h200",
        "b": "h200",
    }
    assert (
        select_live_nodes(spec(node_spec("a")), entries[2:])["unheard-of"].launch.device == DEVICE
    )


def test_what_was_free_before_an_attempt_is_what_nvml_said_of_its_idle_devices_to_the_byte() -> (
    None
):
    cluster = spec(node_spec("a"))
    node = select_live_nodes(cluster, [ray_node("1", node="a")])["a"]
    watch, parts = NodeWatch(cluster, LocalNodes(cluster)), [("a", 1), ("a", 0)]

    def see(*free: int | None) -> None:
        devices = (
            NvmlDevice(
                index=index, free_bytes=free_or_none or 0, error=None if free_or_none else "lost"
            )
            for index, free_or_none in enumerate(free)
        )
        watch.record_reading(node, NvmlReading(devices=tuple(devices)), 0.0)

    see(1001, None)
    assert watch.list_free_bytes_when_idle(parts) == (), "one of them is lost"
    see(1002, 2002)
    watch.occupy_devices(parts)
    see(3, 4)
    assert watch.list_free_bytes_when_idle(parts) == (2002, 1002), "in the order of the ranks"


def test_an_attempts_device_is_idle_since_it_computed_last_and_as_far_as_nvml_tells() -> None:
    cluster = spec(node_spec("a"))
    node = select_live_nodes(cluster, [ray_node("1", node="a")])["a"]
    watch, parts = NodeWatch(cluster, LocalNodes(cluster)), [("a", 0), ("a", 1)]
    watch.occupy_devices(parts)

    def idle_for_s(at_s: float, *busy: int | None) -> float:
        devices = tuple(
            NvmlDevice(index=index, busy_percent=percent) for index, percent in enumerate(busy)
        )
        watch.record_reading(node, NvmlReading(devices=devices), at_s)
        return watch.compute_idle_for_s(parts)

    assert idle_for_s(0.0, 0, 0) == 0.0, "nothing has computed yet: it may be loading"
    assert idle_for_s(10.0, 90, 0) == 0.0, "the other one is not used at all"
    assert idle_for_s(20.0, 0, 0) == 10.0
    assert idle_for_s(30.0, 100, 100) == 0.0
    assert idle_for_s(40.0, 100, 0) == 10.0, "one rank is gone, the other waits for it"
    assert idle_for_s(50.0, None, None) == 10.0, "who does not tell is no idler for it"
    watch.occupy_devices(parts)
    assert idle_for_s(60.0, 0, 0) == 0.0, "another attempt"


OK, LOST = NvmlDevice(index=0, free_bytes=2**30), NvmlDevice(index=1, error="GPU is lost")
OK_TOO = NvmlDevice(index=1, free_bytes=2**30)


@pytest.mark.parametrize(
    ("reading", "errors"),
    [
        (NvmlReading(devices=(OK, OK_TOO)), ()),
        (NvmlReading(error="Driver Not Loaded"), ("Driver Not Loaded",) * 2),
        (NvmlReading(devices=(OK, LOST)), ("", "GPU is lost")),
        (NvmlReading(devices=(OK,)), ("", "the driver names 1 of 2 devices")),
        (NvmlReading(), ("the driver names 0 of 2 devices",) * 2),
        (NvmlReading(error="\x1b]52;c;aGk=\a a\r\n  b\u202e"), ("]52;c;aGk= a b",) * 2),
        (NvmlReading(error="\x00"), ("unknown",) * 2),
        (NvmlReading(error="x" * 10**6), ("x" * 200,) * 2),
        (NvmlReading(devices=(OK, OK_TOO, NvmlDevice(index=2, error="no device of the node"))), ()),
    ],
)
def test_what_cannot_be_read_is_a_fact_of_the_device_also_while_it_is_busy(
    reading: NvmlReading, errors: tuple[str, ...]
) -> None:
    """Every kind of bad reading, then the driver is back. The text is printable, on one line, and bounded."""
    cluster = spec(node_spec("a", "h100-80gb"))
    nodes = BreakingNodes(cluster)
    watch = NodeWatch(cluster, nodes)
    for parts in ((), [("a", 0), ("a", 1)]):
        watch.occupy_devices(parts)
        for nodes.reading in (reading, NvmlReading(devices=(OK, OK_TOO))):
            watch._probed_at_s.clear()
            (current,) = watch.refresh()
            expected = errors if nodes.reading is reading else ()
            assert current.driver_errors == expected
            assert [bool(free) for free in current.free_bytes] == [
                not error for error in expected or ("", "")
            ]


def test_a_number_that_differs_at_each_reading_is_no_news_and_another_word_is() -> None:
    cluster = spec(node_spec("a", "h100-80gb"))
    nodes = BreakingNodes(cluster)
    watch, readings = NodeWatch(cluster, nodes), set[Any]()
    for number in range(5):
        nodes.reading = NvmlReading(error=f"failed at {number} s, 0x7f{number}")
        watch._probed_at_s.clear()
        readings.add(watch.refresh())
    assert len(readings) == 1
    nodes.reading = NvmlReading(error="GPU is lost")
    watch._probed_at_s.clear()
    assert watch.refresh()[0].driver_errors == ("GPU is lost",) * 2


class BreakingNodes(LocalNodes):
    """Nodes whose driver answers what a test sets."""

    reading = NvmlReading()

    def read_devices(self, _node: LiveNode) -> NvmlReading:
        return self.reading
