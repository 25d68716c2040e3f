"""`orc fit`: which GPUs of the catalogue can run a job, and how few of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TypedDict

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.memory.profiles import is_memory_known
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import Candidate, estimate_needed_device_bytes, list_fitting
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.trust import Choice
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.options.job_options import make_choice_rule
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import make_placeholder_job
from orchestrator.service.intake.intake import JobSource, read_job
from orchestrator.service.intake.profiling import TraceScope, trace_model
from orchestrator.specs.choices import Offload
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.devices import load_devices
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import LoraSpec, ModelSpec
from orchestrator.specs.job.sections import GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import Override
from orchestrator.specs.profile import WITHOUT_SECONDS
from orchestrator.specs.replace import replace
from orchestrator.specs.run import DEFAULT_HOME
from orchestrator.specs.settings import format_plan

COUNTS = (1, 2, 4, 8)  # of one machine's cards
ADAPTER_RANK = 16
# Assumed settings of a fine-tuning of which only the model is given; `--set` changes each key.
ASSUMED: JsonObject = {
    "global_batch_size": 8,
    "precision": "bf16",
    "data": {"text": ["text.txt"], "sequence_length": 1024},  # a file that nothing reads here
    "training": {"optimizer": "adamw"},
}


class FitRow(TypedDict):
    """A way to train on one kind of GPU: the fewest GPUs with a plan (null: more than eight), and
    that plan.
    """

    way: str  # "as written", "as a script", "full", "adapters" or "adapters, 4 bits"
    device: str
    memory_bytes: int
    devices: int | None
    plan: str | None
    needed_bytes: int | None  # of each card
    host_bytes: int | None  # of host memory on one machine
    offloads: bool  # whether training state waits in host memory
    degradation: str | None
    step_s: float | None  # predicted; null where nothing is known of the speed
    why: str | None  # why there is no plan


def make_model_job_data(model_name: str) -> JsonObject:
    """Return job-file data of a job that trains all weights of this transformers model, a folder or
    a hub name.
    """
    return {"name": "fit", "gpus": 1, "model": {"hf": model_name}, **ASSUMED}


def make_model_script_data(model_name: str) -> JsonObject:
    """Return job-file data of a script that trains all weights of a model on its own samples.

    It is for model heads that take no text, since a job of our engines would need their data.
    """
    flags = {
        model_name: {"flag": f"--{model_name}"}
        for model_name in ("micro_batch_size", "gradient_accumulation_steps")
    }
    assumed = {key: ASSUMED[key] for key in ("global_batch_size", "precision")}
    length = {"sequence_length": ASSUMED["data"]["sequence_length"]}
    script = {
        "command": "python -m train",
        "knobs": flags,
        "trains": {"hf": model_name},
        "data": length,
    }
    return {"name": "fit", "gpus": 1, **assumed, **script}


def read_job_and_fit_rows(
    job: JobSource | str,
    overrides: Sequence[Override],
    home: Path = DEFAULT_HOME,
    *,
    allow_other_machine: bool = False,
) -> tuple[JobSpec, list[FitRow]]:
    """Return (job, one row per way to train and GPU model).

    The job is read from a file, or made for a model `hf:NAME`. Raises SpecError for bad input.
    """
    name = job.removeprefix("hf:") if isinstance(job, str) else None
    read = partial(
        read_job,
        overrides=overrides,
        cache_home=home,
        to_run=False,
        allow_other_machine=allow_other_machine,
        trace_scope=_trace_on_cuda,
    )
    try:
        spec = read(job if isinstance(job, Path | Mapping) else make_model_job_data(str(name)))
    except SpecError as error:
        if name is None or error.allowed != "data.tensors":
            raise
        spec = read(make_model_script_data(name))
    ways = []
    for way, changed in list_jobs_by_training_way(spec):
        if changed is not spec and not is_memory_known(changed):
            traced = trace_model(changed, home.expanduser(), str(job), _trace_on_cuda(changed))
            changed = changed.model_copy(update={"traced": traced})
        ways.append((way, changed))
    return spec, list(iterate_fit_rows(ways))


def _trace_on_cuda(_: JobSpec) -> TraceScope:
    return TraceScope(cuda=(True,))


def list_jobs_by_training_way(spec: JobSpec) -> list[tuple[str, JobSpec]]:
    """Return (name, job) of each way to fine-tune the job's model (all weights, adapters); models
    are not traced yet.

    A script, or a model without a hub name, has one way.
    """
    model = spec.model
    if model is None or model.hf is None or model.lora is not None:
        return [("as a script" if spec.is_script else "as written", spec)]
    return [
        ("full", spec),
        ("adapters", _add_adapters(spec, model, in_4_bits=False)),
        ("adapters, 4 bits", _add_adapters(spec, model, in_4_bits=True)),
    ]


def iterate_fit_rows(jobs_by_way: Sequence[tuple[str, JobSpec]]) -> Iterator[FitRow]:
    """Yield a row per GPU model and way to train, smallest GPU first. The job's own `gpus` is
    ignored.
    """
    for name in sorted(load_devices(), key=lambda name: _make_card_hardware(name, 1).device.memory):
        for way, spec in jobs_by_way:
            yield _make_fit_row(way, spec, name)


def _make_fit_row(way: str, spec: JobSpec, card_name: str) -> FitRow:
    device = _make_card_hardware(card_name, 1).device
    row = FitRow(
        way=way,
        device=card_name,
        memory_bytes=device.memory,
        devices=None,
        plan=None,
        needed_bytes=None,
        host_bytes=None,
        offloads=False,
        degradation=None,
        step_s=None,
        why="no plan fits, even on eight of one machine",
    )
    if not device.supports(spec.precision):
        row["why"] = (
            f"no plan fits without {spec.precision} arithmetic, which the card lacks; `--set precision=fp16`"
        )
    for count in COUNTS:
        try:
            best = _find_best_plan(
                spec.model_copy(update={"gpus": GpuRange(min=count, max=count)}),
                _make_card_hardware(card_name, count),
            )
        except SpecError as error:
            if count == 1:
                row["why"] = error.what
            continue
        if best is not None:
            _add_plan(row, best)
            break
    return row


def _add_plan(row: FitRow, best: Candidate) -> None:
    """Write the plan of the fewest devices into the row."""
    plan = best.plan
    row["devices"] = plan.world_size
    row["plan"] = format_plan(plan)
    row["needed_bytes"] = estimate_needed_device_bytes(best, UNMEASURED)
    row["host_bytes"] = best.host_bytes
    row["offloads"] = plan.offload is not Offload.NONE or plan.activation_offload
    row["degradation"] = best.degradation.name.lower()
    if best.estimate.source not in WITHOUT_SECONDS:
        row["step_s"] = best.step_s
    row["why"] = None


@cache
def _make_card_hardware(card_name: str, card_count: int) -> Hardware:
    (group,) = group_equal_nodes(make_idle_nodes(parse_cards(f"{card_count}x{card_name}")))
    return group.hardware


def _find_best_plan(spec: JobSpec, hardware: Hardware) -> Candidate | None:
    """Return the plan that the scheduler would choose on an idle cluster, as `orc plan` shows it;
    None where no plan fits.
    """
    plans = find_frontier(read_plan_request(spec), hardware, skips_oversized=True)
    memory_bytes = hardware.device.memory
    candidates = list(list_fitting(plans, memory_bytes, UNMEASURED))
    if not candidates:
        return None
    mildest = candidates[0].degradation
    alike = [candidate for candidate in candidates if candidate.degradation is mildest]
    rule = make_choice_rule(make_placeholder_job(spec), "", UNMEASURED, alike[0])
    choices = []
    for candidate in alike:
        fill = estimate_needed_device_bytes(candidate, UNMEASURED) / memory_bytes
        choices.append(Choice(candidate.plan, candidate.step_s, fill))
    return alike[rule.choose_plan_index(choices)]


def _add_adapters(spec: JobSpec, model: ModelSpec, *, in_4_bits: bool) -> JobSpec:
    with_lora = replace(model, lora=LoraSpec(rank=ADAPTER_RANK, quantise_base=in_4_bits))
    return spec.model_copy(update={"model": with_lora, "traced": ()})
