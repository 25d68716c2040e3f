"""Small jobs, attempts and nodes for tests of decisions."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, NodeDevices
from orchestrator.specs.choices import Engine
from orchestrator.specs.cluster import DeviceSpec, Node
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes

MIB = 2**20

DEVICE = DeviceSpec(
    name="virtual-256mib",
    kind=DeviceKind.VIRTUAL,
    memory="256MiB",  # type: ignore[arg-type]
    bf16_tflops=0.05,
    fp32_tflops=0.05,
    memory_bandwidth="10GB/s",  # type: ignore[arg-type]
    link_bandwidth="1GB/s",  # type: ignore[arg-type]
)


def node(name: str = "local", devices: int = 2, free_bytes: int = 256 * MIB) -> Node:
    return Node(
        name=name,
        device=DEVICE,
        free_bytes=(free_bytes,) * devices,
        host_free_bytes=2**34,
        network_bandwidth=10**9,
    )


def decoder_spec(**changes: object) -> JobSpec:
    """A decoder of 3.4 M parameters that fits one 256 MiB device."""
    decoder = DecoderSpec(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    fields: dict[str, object] = {
        "name": "lm",
        "gpus": {"min": 1, "max": 2},
        "global_batch_size": 8,
        "model": ModelSpec(decoder=decoder),
        "data": DataSpec(text=("corpus.txt",)),
    }
    return JobSpec(**{**fields, **changes})  # type: ignore[arg-type]


def script_spec(**changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "name": "script",
        "global_batch_size": 32,
        "command": "python train.py --epochs 3",
    }
    return JobSpec(**{**fields, **changes})  # type: ignore[arg-type]


def job(spec: JobSpec | None = None, job_id: str = "lm-1", order: int = 1) -> Job:
    return Job(id=job_id, spec=spec or decoder_spec(), order=order, submitted_at_s=0.0)


def estimate(allocated_bytes: int = 100 * MIB) -> MemoryEstimate:
    return MemoryEstimate(
        moment="optimizer step",
        by_cause=(("parameters", allocated_bytes),),
        allocated_bytes=allocated_bytes,
        reserved_bytes=allocated_bytes,
        device_bytes=allocated_bytes,
    )


def attempt(number: int = 1, job_id: str = "lm-1", allocated_bytes: int = 100 * MIB) -> Attempt:
    return Attempt(
        job_id=job_id,
        number=number,
        plan=Plan(engine=Engine.TORCH, micro_batch_size=8),
        placement=(NodeDevices(node="local", devices=(0,)),),
        device=DEVICE.name,
        estimate=estimate(allocated_bytes),
        correction=1.0,
        step_s=0.1,
        launched_at_s=0.0,
    )


def observation(correction: float = 1.0, ratio: float = 1.0, **changes: object) -> Observation:
    """60 MiB counted, 40 MiB activations: these were `correction` times as large, and then all of it `ratio` times."""
    moment = MomentBytes(name="backward", counted_bytes=60 * MIB, activation_bytes=40 * MIB)
    fields: dict[str, object] = {
        "job": "elsewhere-1@0.0",
        "number": 1,
        "device": DEVICE.name,
        "family": "lm",
        "torch_version": "2.11.0",
        "plan": Plan(engine=Engine.TORCH, micro_batch_size=8),
        "moments": (moment,),
        "predicted_bytes": 100 * MIB,
        "measured_bytes": round(ratio * (60 + 40 * correction) * MIB),
        "ran_out": False,
        "step_ratio": None,
        "at_s": 1.0,
    }
    return Observation(**{**fields, **changes})  # type: ignore[arg-type]
