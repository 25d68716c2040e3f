"""The part of a DeepSpeed config that a job file sets itself, and the buffer sizes that result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from orchestrator.specs.choices import ZeroStage
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.replace import replace

# A plan decides these. A job that fixes one says so in its `plan`, `global_batch_size` or `precision`.
KEYS_OF_PLAN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "bf16.enabled",
    "fp16.enabled",
)
ZERO = "zero_optimization"
AUTO = "auto"  # transformers fills it in; of a buffer's size our own number stands there instead
ELEMENTS_MAX = 10**15


@frozen
class Buckets:
    """Sizes of DeepSpeed's buffers in elements, as `engines/deepspeed_settings.py` sets them (tested)."""

    reduce: int
    live: int  # stage 3: gathered at a time; 0: one tensor
    # stage 3: smaller tensors are never cut; norms only, which no estimate has to count
    persistent: int
    # Whether one bucket is reduced while the next one fills. None: at stage 3 only, as DeepSpeed's
    # default is (deepspeed/runtime/zero/config.py, overlap_comm_valid).
    overlap: bool | None
    swapped: int  # NVMe: of the masters that come in at a time
    copies: int  # stage 3: of a bucket while it is reduced, sorted by ranks and, by gloo, once more
    # Elements of a shard from which stage 3 begins the next group that it updates: the default of
    # `sub_group_size` (deepspeed/runtime/zero/config.py).
    group: int = 1_000_000_000

    def overlaps(self, stage: ZeroStage) -> bool:
        """Return whether DeepSpeed fills a second bucket while it reduces the first at this stage."""
        return stage is ZeroStage.PARAMETERS if self.overlap is None else self.overlap


VIRTUAL_BUCKETS = Buckets(
    reduce=2**19, live=0, persistent=1_000, overlap=False, swapped=2**18, copies=2
)
CUDA_BUCKETS = Buckets(
    reduce=50_000_000,
    live=1_000_000_000,
    persistent=100_000,
    overlap=None,
    swapped=100_000_000,
    copies=1,
)
SIZES = {
    "reduce_bucket_size": "reduce",
    "stage3_max_live_parameters": "live",
    "stage3_param_persistence_threshold": "persistent",
    "sub_group_size": "group",
}


def _read_deepspeed_keys(raw: object) -> object:
    """Return the job's DeepSpeed keys as JSON text, which can be hashed; other values unchanged.
    Raises SpecError for a key that plans set.
    """
    if not isinstance(raw, Mapping):
        return raw
    keys = dict(list_leaf_keys(raw))
    for key in keys:
        if key in KEYS_OF_PLAN or key.rpartition(".")[0] in KEYS_OF_PLAN:
            raise SpecError(
                "each plan decides this key of its DeepSpeed file",
                path=key,
                got=keys[key],
                hint="leave it out; `plan: {zero_stage: 2}` fixes a stage, and `plan: {offload: ...}` an offload",
            )
    for name in SIZES:
        size = keys.get(f"{ZERO}.{name}", AUTO)
        if size != AUTO and not _is_element_count(size):
            raise SpecError(
                "a buffer has a number of elements",
                path=f"{ZERO}.{name}",
                got=size,
                allowed=f"a whole number from 0 to {ELEMENTS_MAX:.0e}, or auto",
            )
    return json.dumps(raw, sort_keys=True)


def _is_element_count(size: object) -> bool:
    return (
        isinstance(size, int | float)
        and not isinstance(size, bool)
        and math.isfinite(size)
        and 0 <= size <= ELEMENTS_MAX
        and size == int(size)
    )


def list_leaf_keys(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every value in nested mappings that is not a mapping itself."""
    for name, value in keys.items():
        if isinstance(value, Mapping):
            yield from list_leaf_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


DeepSpeedKeys = Annotated[
    str,
    BeforeValidator(_read_deepspeed_keys),
    PlainSerializer(json.loads, return_type=dict[str, Any]),
    WithJsonSchema({"type": "object"}),
]


def find_bucket_sizes(job_keys_json: str | None, *, is_virtual_device: bool) -> Buckets:
    """Return DeepSpeed's buffer sizes: those in the job's own keys (JSON), else ours.

    `is_virtual_device` selects our small sizes for virtual devices.
    """
    buckets = VIRTUAL_BUCKETS if is_virtual_device else CUDA_BUCKETS
    zero = json.loads(job_keys_json or "{}").get(ZERO, {})
    sizes: dict[str, Any] = {
        field: int(zero[name]) for name, field in SIZES.items() if zero.get(name, AUTO) != AUTO
    }
    if isinstance(zero.get("overlap_comm"), bool):
        sizes["overlap"] = zero["overlap_comm"]
    return replace(buckets, **sizes)


def merge_config(config: dict[str, Any], job_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan's DeepSpeed configuration with the job's keys merged in; a job's key whose
    value is `auto` is ignored.
    """
    merged = dict(config)
    for name, value in job_keys.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), dict):
            merged[name] = merge_config(merged[name], value)
        elif value != AUTO or name not in merged:
            merged[name] = value
    return merged
