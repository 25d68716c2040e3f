"""What exactly would be started? Files, arguments and variables of an attempt, as a printable value."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from orchestrator.planning.render import deepspeed_config, script_command
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.run import AttemptFolder, GuardSettings, JobFolder, TrainingRun
from orchestrator.specs.state import Job

GUARD = Path(__file__).resolve().parents[1] / "training" / "guard.py"
FLAGS_WITH_A_WORD = ("-X", "-W", "--check-hash-based-pycs")  # of the Python interpreter, when written apart


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchNode:
    """A node as a launch has to know it."""

    name: str
    address: str  # under which its ranks are reached from the other nodes
    device: DeviceSpec
    devices: int
    cpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """One process to start."""

    rank: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]  # added to the launcher's own


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One attempt to start. Secrets stand here by name only."""

    name: str
    workdir: str
    files: tuple[tuple[str, str], ...]  # (absolute path, text), written before any rank starts
    ranks: tuple[tuple[str, tuple[RankRequest, ...]], ...]  # (node, its ranks), in the placement's order
    secrets: tuple[str, ...]


def launch_request(
    job: Job,
    attempt: Attempt,
    home: Path,
    nodes: Mapping[str, LaunchNode],
    *,
    master_port: int,
    python: str,
    resume_from: str | None = None,
) -> LaunchRequest:
    """Everything that starting `attempt` means.

    `nodes` holds every node of the placement, `python` is the interpreter that `python` and our own modules mean,
    `resume_from` the newest checkpoint of a script. Raises SpecError where the plan needs a knob that is not there.
    """
    folder = JobFolder(home, job.id)
    files = attempt_files(job, attempt, folder, nodes)
    argv, knob_env = _command(job, attempt, folder, python, resume_from)
    common = {
        "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"),
        "PYTHONUNBUFFERED": "1",
        **dict(job.spec.env),
        **knob_env,
    }
    return LaunchRequest(
        name=attempt.name,
        workdir=job.spec.workdir or str(folder.attempt(attempt.number).path),
        files=files,
        ranks=tuple(_ranks(attempt, nodes, argv, common, master_port)),
        secrets=job.spec.secrets,
    )


def attempt_files(
    job: Job, attempt: Attempt, folder: JobFolder, nodes: Mapping[str, LaunchNode]
) -> tuple[tuple[str, str], ...]:
    """(absolute path, text) of each file that the ranks read."""
    paths = folder.attempt(attempt.number)
    devices = [nodes[part.node].device for part in attempt.placement]
    virtual = [device.memory for device in devices if device.kind is DeviceKind.VIRTUAL]
    fault = job.fault if attempt.number == 1 else None
    guard = GuardSettings(
        attempt_folder=str(paths.path),
        virtual_capacity_bytes=min(virtual, default=None),
    )
    if fault is not None:
        guard = dataclasses.replace(guard, fault_kind=fault.kind, fault_rank=fault.rank, fault_step=fault.step)
    files = [(str(paths.guard), json.dumps(dataclasses.asdict(guard)))]
    if job.spec.model is not None:
        run = TrainingRun(
            model=job.spec.model,
            data=job.spec.data,
            training=job.spec.training,
            plan=attempt.plan,
            job_folder=str(folder.path),
            attempt_folder=str(paths.path),
            epoch=attempt.number,
            device="cpu" if virtual else "cuda",
            nvme_folder=next((device.nvme_folder for device in devices), None),
        )
        files.append((str(paths.run), json.dumps(dataclasses.asdict(run))))
    if job.spec.knobs.deepspeed_config is not None:
        config = deepspeed_config(attempt.plan, clip_norm=job.spec.training.clip_norm, virtual=bool(virtual))
        files.append((str(_deepspeed_path(paths)), json.dumps(config)))
    return tuple(files)


def _deepspeed_path(paths: AttemptFolder) -> Path:
    return paths.path / "deepspeed.json"


def _command(
    job: Job, attempt: Attempt, folder: JobFolder, python: str, resume_from: str | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    paths = folder.attempt(attempt.number)
    if job.spec.command is None:
        module = ("-m", "orchestrator.training.main", str(paths.run))
        return (python, str(GUARD), str(paths.guard), "--", *module), {}
    argv, env, _ = script_command(
        job.spec,
        attempt.plan,
        output_dir=str(folder.output),
        resume_from=resume_from,
        deepspeed_config_path=str(_deepspeed_path(paths)),
    )
    return guarded(tuple(argv), str(paths.guard), python), dict(env)


def guarded(argv: tuple[str, ...], guard_settings: str, python: str) -> tuple[str, ...]:
    """`argv` with the guard between a Python interpreter and its program; other programs run as they are.

    The interpreter's own flags are kept. `python` stands in for a bare `python` or `python3`. A program given by
    `-c` or on standard input has no file that the guard could run, and stays unguarded.
    """
    if not re.fullmatch(r"python[0-9.]*", PurePath(argv[0]).name):
        return argv
    interpreter = python if argv[0] in ("python", "python3") else argv[0]
    start = 1
    while start < len(argv) and argv[start].startswith("-") and argv[start] not in ("-m", "-c", "-"):
        start += 2 if argv[start] in FLAGS_WITH_A_WORD else 1
    flags, program = argv[1:start], argv[start:]
    if not program or program[0] in ("-c", "-"):
        return (interpreter, *flags, *program)
    return (interpreter, *flags, str(GUARD), guard_settings, "--", *program)


def _ranks(
    attempt: Attempt,
    nodes: Mapping[str, LaunchNode],
    argv: tuple[str, ...],
    common: Mapping[str, str],
    master_port: int,
) -> Iterator[tuple[str, tuple[RankRequest, ...]]]:
    """Ranks by node, numbered in the placement's order as torchrun would (torch/distributed/run.py)."""
    alone = len(attempt.placement) == 1
    first = nodes[attempt.placement[0].node]
    gang = {
        "WORLD_SIZE": str(sum(len(part.devices) for part in attempt.placement)),
        "MASTER_ADDR": "127.0.0.1" if alone else first.address,
        "MASTER_PORT": str(master_port),
    }
    rank = 0
    for part in attempt.placement:
        node = nodes[part.node]
        local = {**_device_env(node, part.devices), "LOCAL_WORLD_SIZE": str(len(part.devices))}
        ranks = []
        for local_rank in range(len(part.devices)):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            env = {**_defaults(node), **common, **gang, **local, **numbers}
            ranks.append(RankRequest(rank=rank, argv=argv, env=tuple(sorted(env.items()))))
            rank += 1
        yield part.node, tuple(ranks)


def _defaults(node: LaunchNode) -> dict[str, str]:
    """What the job's own `env` may replace."""
    defaults = {"OMP_NUM_THREADS": str(max(1, node.cpus // node.devices))}
    if node.device.kind is DeviceKind.CUDA:
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return defaults


def _device_env(node: LaunchNode, devices: tuple[int, ...]) -> dict[str, str]:
    """NVML counts devices in the order of the PCI bus; CUDA does only when it is told to."""
    if node.device.kind is DeviceKind.VIRTUAL:
        return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in devices)}
