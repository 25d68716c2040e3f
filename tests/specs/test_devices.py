"""The catalogue of devices, and how a cluster file names one."""

from __future__ import annotations

import pytest

from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import DeviceSpec, NodeSpec, make_cluster_json_schema
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.devices import find_matching_devices, load_devices
from orchestrator.specs.errors import SpecError
from orchestrator.specs.parse import parse_cluster

CLUSTER = """
name: lab
nodes:
  - name: node
    devices: 4
    device: {device}
    host_memory: 256GiB
"""


def device(name: str) -> DeviceSpec:
    return NodeSpec.model_validate(
        {"name": "node", "devices": 1, "device": name, "host_memory": "1GiB"}
    ).device


@pytest.mark.parametrize("name", load_devices())
def test_every_device_is_complete_and_physically_plausible(name: str) -> None:
    card = device(name)
    assert card.name == name
    assert card.kind is DeviceKind.CUDA
    assert card.multiprocessors is not None
    on_the_card = int(name.rsplit("-", 1)[1].removesuffix("gb")) * 2**30
    assert 0.90 * on_the_card < card.memory < on_the_card
    fp16, fp32 = card.get_peak_flops(Precision.FP16), card.get_peak_flops(Precision.FP32)
    assert 1.9 * fp32 < fp16 < 60 * fp32
    assert card.host_bandwidth <= card.memory_bandwidth
    assert card.link_bandwidth <= card.memory_bandwidth / 4
    assert 0.35 * fp16 < 1e12 * (card.measured_tflops or card.fp16_tflops or 0) < 1.15 * fp16


def test_newer_devices_of_a_line_are_faster() -> None:
    line = [device(name) for name in ("v100-32gb", "a100-80gb", "h100-80gb", "b200-180gb")]
    for rate in (
        "memory_bandwidth",
        "link_bandwidth",
        "fp16_tflops",
        "fp32_tflops",
        "multiprocessors",
    ):
        values = [getattr(card, rate) for card in line]
        assert values == sorted(values), rate
    cards = [device(name) for name in ("rtx3090-24gb", "rtx4090-24gb", "rtx5090-32gb")]
    assert [card.fp16_tflops for card in cards] == sorted(card.fp16_tflops or 0 for card in cards)


@pytest.mark.parametrize("name", ["t4-16gb", "v100-16gb", "v100-32gb", "rtx2080ti-11gb"])
def test_a_device_before_ampere_has_no_bf16_and_computes_it_in_fp32(name: str) -> None:
    card = device(name)
    assert not card.supports(Precision.BF16)
    assert card.supports(Precision.FP16)
    assert card.get_peak_flops(Precision.BF16) == card.get_peak_flops(Precision.FP32)
    assert all(
        device(other).supports(Precision.BF16)
        for other in load_devices()
        if not other.startswith(("t4", "v100", "rtx20"))
    )


def test_a_cluster_file_may_name_a_device_or_describe_it() -> None:
    named = parse_cluster(CLUSTER.format(device="a100-80gb"), "lab.yaml").nodes[0].device
    description = (
        "{"
        + ", ".join(f"{key}: {value}" for key, value in load_devices()["a100-80gb"].items())
        + ", name: a100-80gb}"
    )
    assert parse_cluster(CLUSTER.format(device=description), "lab.yaml").nodes[0].device == named


def test_an_unknown_name_is_refused_with_all_that_are_known_and_the_nearest() -> None:
    with pytest.raises(SpecError) as refused:
        parse_cluster(CLUSTER.format(device="A100-80GB"), "lab.yaml")
    assert refused.value.path == "nodes[0].device"
    assert refused.value.source == "lab.yaml:6"
    assert refused.value.allowed == ", ".join(load_devices())
    assert "a100-80gb" in refused.value.hint


def test_a_described_device_has_16_bit_arithmetic() -> None:
    fields = {
        key: value for key, value in load_devices()["t4-16gb"].items() if key != "fp16_tflops"
    }
    with pytest.raises(ValueError, match="one of bf16_tflops and fp16_tflops"):
        DeviceSpec.model_validate({"name": "t4"} | fields)


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(SpecError, match="at least one node"):
        parse_cluster("name: lab\nnodes: []", "lab.yaml")


def test_the_schema_takes_names_of_the_catalogue_and_descriptions() -> None:
    alternatives = make_cluster_json_schema()["$defs"]["NodeSpec"]["properties"]["device"]["anyOf"]
    assert [alternatives[0]["enum"], alternatives[1]] == [
        list(load_devices()),
        {"$ref": "#/$defs/DeviceSpec"},
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("rtx3090", ["rtx3090-24gb"]),
        ("NVIDIA GeForce RTX 4090", ["rtx4090-24gb"]),
        ("3060", ["rtx3060-12gb"]),
        ("A100-80GB", ["a100-80gb"]),
        ("a100 pcie", ["a100-pcie-40gb", "a100-pcie-80gb"]),
        ("h100", ["h100-80gb", "h100-pcie-80gb", "h100-nvl-94gb"]),
        ("a10", ["a10-24gb"]),
        ("mi250", []),
        ("", []),
    ],
)
def test_people_name_cards_as_they_are_sold_and_shops_and_drivers_write_them(
    text: str, names: list[str]
) -> None:
    assert list(find_matching_devices(text)) == names


@pytest.mark.parametrize("name", load_devices())
def test_every_card_is_meant_by_its_own_name(name: str) -> None:
    assert find_matching_devices(name) == (name,)
    assert name in find_matching_devices(name.partition("-")[0])


def test_a_size_in_decimal_units_is_as_large_as_the_vendor_says() -> None:
    sizes = {
        unit: parse_cluster(
            f"name: lab\nnodes: [{{name: n, devices: 1, device: t4-16gb, host_memory: 24{unit}}}]",
            "lab.yaml",
        )
        .nodes[0]
        .host_memory
        for unit in ("GB", "GiB")
    }
    assert sizes == {"GB": 24 * 10**9, "GiB": 24 * 2**30}
