"""ClusterSpec, the description of the hardware, and Node, its live state. Units: bytes, FLOP/s and bytes/s."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from orchestrator.specs.choices import Precision
from orchestrator.specs.device_kind import DeviceId, DeviceKind
from orchestrator.specs.devices import load_devices
from orchestrator.specs.errors import SpecError, suggest_word
from orchestrator.specs.fields import Bandwidth, Bytes, Name, Seconds, UserName
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.keep import UNLIMITED, KeepSpec
from orchestrator.specs.notify import UNNOTIFIED, NotifySpec
from orchestrator.specs.oidc import OidcSpec
from orchestrator.specs.order import Order
from orchestrator.specs.plain_text import join_first_words
from orchestrator.specs.policy import UNSHARED, PolicySpec
from orchestrator.specs.spec_model import SpecModel, make_json_schema

# From a launch to the first training step. Ray and the guard take 2.3 s of it (make bench-launch,
# 2026-11); the rest is
# what real programs load and compile: peers assume 25 to 250 s (Sia, SOSP'23, section 4), on which
# a cluster file says
# what is true of its own programs and disks.
LAUNCH_COST_S = 30.0
TFLOPS_MAX = 1e6
MULTIPROCESSORS_MAX = 100_000
PRICE_MAX = 1e9
DEVICE_ID = re.compile(r"\d{1,4}|[A-Z]{2,8}-[\w/-]{1,80}")
DEVICE_ID_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "string", "maxLength": 89},
    ]
}


class DeviceSpec(SpecModel):
    """A device model. FLOP/s are dense peaks of the data sheet."""

    name: str
    kind: DeviceKind = DeviceKind.CUDA
    memory: Bytes
    bf16_tflops: float | None = Field(default=None, gt=0, le=TFLOPS_MAX)
    fp16_tflops: float | None = Field(default=None, gt=0, le=TFLOPS_MAX)
    fp32_tflops: float = Field(gt=0, le=TFLOPS_MAX)
    measured_tflops: float | None = Field(default=None, gt=0, le=TFLOPS_MAX)
    multiprocessors: int | None = Field(default=None, ge=1, le=MULTIPROCESSORS_MAX)
    memory_bandwidth: Bandwidth
    link_bandwidth: Bandwidth
    host_bandwidth: Bandwidth = 25_000_000_000
    nvme_folder: str | None = None
    nvme_bandwidth: Bandwidth = 1_000_000_000
    price_per_hour: float | None = Field(default=None, ge=0, le=PRICE_MAX)

    @model_validator(mode="after")
    def _check_has_16_bit_precision(self) -> DeviceSpec:
        if self.bf16_tflops is None and self.fp16_tflops is None:
            raise ValueError("one of bf16_tflops and fp16_tflops is required")
        return self

    def supports(self, precision: Precision) -> bool:
        """Return whether the device has hardware for this precision."""
        return precision is not Precision.BF16 or self.bf16_tflops is not None

    def get_peak_flops(self, precision: Precision) -> float:
        """Return the dense peak FLOP/s in this precision. A device without bf16 computes it in
        fp32.
        """
        if precision is Precision.FP32 or not self.supports(precision):
            return 1e12 * self.fp32_tflops
        same = self.bf16_tflops if precision is Precision.BF16 else self.fp16_tflops
        rate = same or self.bf16_tflops
        assert rate is not None, self
        return 1e12 * rate


Window = tuple[float, float]  # from when to when, in seconds since 1970
DeviceName = Annotated[
    str, Field(json_schema_extra=lambda schema: schema.update(enum=list(load_devices())))
]


def _fill_from_catalogue(device: object) -> Any:
    """Return the catalogue's fields for a device given by name, with the price that stands beside
    the name; other values unchanged.
    """
    if isinstance(device, dict) and set(device) == {"name", "price_per_hour"}:
        return _fill_from_catalogue(device["name"]) | {"price_per_hour": device["price_per_hour"]}
    if not isinstance(device, str):
        return device
    devices = load_devices()
    if device not in devices:
        raise SpecError(
            "the catalogue has no such device",
            got=device,
            allowed=", ".join(devices),
            hint=suggest_word(
                device.lower(),
                devices,
                "describe it: name, memory, fp32_tflops, bf16_tflops, ...",
            ),
        )
    return {"name": device, **devices[device]}


def find_catalogue_device(name: str) -> DeviceSpec:
    """Return the catalogue's device with this name. Raises SpecError where there is none."""
    return DeviceSpec.model_validate(_fill_from_catalogue(name))


def _check_device_id(device_id: DeviceId) -> DeviceId:
    if not DEVICE_ID.fullmatch(str(device_id)):
        raise SpecError(
            "names no device",
            got=device_id,
            allowed="an index up to 9999, or a UUID, such as GPU-... or MIG-...",
        )
    return device_id


class NodeSpec(SpecModel):
    """`count` equal nodes: one is named `name`, several are named `name0`, `name1`, ..."""

    name: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]*$")
    count: int = Field(default=1, ge=1, le=65536)
    devices: int = Field(ge=1, le=64)
    device_ids: tuple[
        Annotated[DeviceId, AfterValidator(_check_device_id), WithJsonSchema(DEVICE_ID_SCHEMA)],
        ...,
    ] = ()
    device: Annotated[
        DeviceSpec,
        BeforeValidator(_fill_from_catalogue, json_schema_input_type=DeviceName | DeviceSpec),
    ]
    host_memory: Bytes
    rack: str = ""

    @model_validator(mode="after")
    def _check_device_ids(self) -> NodeSpec:
        if self.device_ids and len({*self.device_ids}) != self.devices:
            raise SpecError(
                "`device_ids` names each device once",
                path="device_ids",
                got=", ".join(map(str, self.device_ids)),
                allowed=f"{self.devices} different indices, since `devices` is {self.devices}",
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return (
            (self.name,)
            if self.count == 1
            else tuple(f"{self.name}{index}" for index in range(self.count))
        )


def _check_nodes(nodes: tuple[NodeSpec, ...]) -> tuple[NodeSpec, ...]:
    """Return the nodes of a cluster file; raise ValueError where there are none.

    `min_length` is no check: it counts a node with a mistake as missing.
    """
    if not nodes:
        raise ValueError("a cluster has at least one node")
    return nodes


def _refuse_bare_number(time_value: object) -> object:
    """Return the value; raise ValueError for a bare number, which pydantic would read as seconds
    since 1970.
    """
    if isinstance(time_value, int | float):
        raise ValueError(
            "a date and a time with an offset is wanted, such as 2026-12-24T22:00+01:00"
        )
    return time_value


Moment = Annotated[AwareDatetime, BeforeValidator(_refuse_bare_number)]


class Maintenance(SpecModel):
    """A maintenance window, in which nothing runs on the named nodes."""

    start: Moment
    end: Moment
    nodes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_begins_before_end(self) -> Maintenance:
        if self.end <= self.start:
            raise ValueError("a maintenance ends after its start")
        return self


class UserSpec(SpecModel):
    """The uid and gid under which a user's jobs run on every machine."""

    uid: int = Field(ge=1, le=2**32 - 2)
    gid: int | None = Field(default=None, ge=1, le=2**32 - 2)


class ClusterSpec(SpecModel):
    """A cluster file: nodes, the network between them, maintenance windows, and the queue's policy."""

    name: Name
    nodes: Annotated[tuple[NodeSpec, ...], AfterValidator(_check_nodes)] = Field(
        json_schema_extra={"minItems": 1}
    )
    network_bandwidth: Bandwidth = 12_500_000_000
    launch_cost: Seconds = Field(default=LAUNCH_COST_S, ge=0)
    maintenance: tuple[Maintenance, ...] = ()
    policy: PolicySpec = UNSHARED
    trackers: tuple[str, ...] = Field(default=("mlflow",), min_length=1)
    inherit_env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,126}\*?$")], ...] = (
        Field(default=(), max_length=100)
    )
    users: dict[UserName, UserSpec] = Field(default={}, max_length=10_000)
    oidc: OidcSpec | None = None
    notify: NotifySpec = UNNOTIFIED
    keep: KeepSpec = UNLIMITED

    @model_validator(mode="after")
    def _check_distinct_trackers(self) -> ClusterSpec:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError("a tracker is named once")
        return self

    @model_validator(mode="after")
    def _check_distinct_names(self) -> ClusterSpec:
        names: list[str] = []
        for node in self.nodes:
            names.extend(node.names)
        twice = (
            {name for name in names if names.count(name) > 1}
            if len(set(names)) < len(names)
            else set()
        )
        if twice:
            raise ValueError(f"two nodes are named {sorted(twice)[0]!r}")
        return self

    @model_validator(mode="after")
    def _check_maintenance_nodes(self) -> ClusterSpec:
        names = {name for node in self.nodes for name in node.names} if self.maintenance else set()
        for maintenance in self.maintenance:
            for name in set(maintenance.nodes) - names:
                raise SpecError(
                    "the cluster has no such node",
                    path="maintenance",
                    got=name,
                    hint=suggest_word(name, names),
                )
        return self

    @model_validator(mode="after")
    def _check_quotas(self) -> ClusterSpec:
        devices = self.device_count
        quotas = sum(team.quota for team in self.policy.teams)
        if quotas > devices:
            raise ValueError(
                f"the quotas of all teams together are {quotas} devices: there are {devices}"
            )
        return self

    @property
    def device_count(self) -> int:
        return sum(node.devices * node.count for node in self.nodes)

    def replace_order(self, order: str) -> ClusterSpec:
        """Return a copy whose queue has this order. Teams and objective are dropped where the order
        ignores them.
        """
        policy = self.policy if order is Order.ADAPTIVE else PolicySpec()
        return self.model_copy(update={"policy": policy.model_copy(update={"order": order})})

    def list_maintenance(self, node_name: str) -> tuple[Window, ...]:
        """Return (begin, end) of each maintenance window of this node, in seconds since 1970, in order."""
        windows = (
            maintenance
            for maintenance in self.maintenance
            if not maintenance.nodes or node_name in maintenance.nodes
        )
        return tuple(
            sorted((window.start.timestamp(), window.end.timestamp()) for window in windows)
        )


@frozen
class Node:
    """A live node: its devices by index, with the free bytes last reported for each."""

    name: str
    device: DeviceSpec
    free_bytes: tuple[int, ...]  # by device index: available to a new attempt now
    host_free_bytes: int
    network_bandwidth: int  # bytes per second to other nodes, per direction
    launch_cost_s: float = LAUNCH_COST_S  # from a launch to the first training step
    maintenance: tuple[Window, ...] = ()  # when nothing may run on it, earliest first
    rack: str = ""
    # by device index: why the driver cannot read it, "" where it can; () where it can read all.
    # Such a device has 0
    # free bytes and takes no new attempt.
    driver_errors: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return len(self.free_bytes)

    @property
    def unreadable(self) -> dict[int, str]:
        """Return {device index: why the driver cannot read it}."""
        return {index: error for index, error in enumerate(self.driver_errors) if error}


def describe_unreadable(nodes: Iterable[Node]) -> str:
    """Return text on which devices cannot be read and why, at most three; "" where all can be read."""
    places = []
    for node in nodes:
        errors = node.unreadable
        if len(errors) == node.devices and len(set(errors.values())) == 1:
            places.append(f"{node.name} ({errors[0]})")
        else:
            places += [
                f"device {index} of {node.name} ({error})" for index, error in errors.items()
            ]
    return join_first_words(places, 3)


def make_idle_nodes(cluster: ClusterSpec) -> tuple[Node, ...]:
    """Return all nodes of the cluster file as live nodes with all of their memory free."""
    return tuple(
        Node(
            name=name,
            device=node.device,
            free_bytes=(node.device.memory,) * node.devices,
            host_free_bytes=node.host_memory,
            network_bandwidth=cluster.network_bandwidth,
            launch_cost_s=cluster.launch_cost,
            maintenance=cluster.list_maintenance(name),
            rack=node.rack,
        )
        for node in cluster.nodes
        for name in node.names
    )


def make_cluster_json_schema() -> JsonObject:
    """Return the JSON Schema (2020-12) of a cluster file, for editors."""
    return make_json_schema(ClusterSpec)
