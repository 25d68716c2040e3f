"""LaunchRequest: the files, arguments and variables with which an attempt starts, as plain data."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from orchestrator.backends.attempts.workdir import rewrite_config
from orchestrator.planning.render import (
    RenderedCommand,
    render_accelerate_config,
    render_deepspeed_config,
    render_script_command,
)
from orchestrator.planning.request import read_script_request
from orchestrator.scheduling.failures.done_steps import count_steps_before_attempt
from orchestrator.specs.attempt import Attempt, Placement, count_devices
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.command_line import Argv
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import is_python
from orchestrator.specs.job_record import Job
from orchestrator.specs.mechanics import Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from orchestrator.specs.run import (
    GUARDED_RANK,
    AttemptFolder,
    GuardSettings,
    JobFolder,
    TrainingRun,
)
from orchestrator.training.guard.fork_server import GUARD as GUARD  # for `orc launch`, too

FLAGS_WITH_A_WORD = (
    "-X",
    "-W",
    "--check-hash-based-pycs",
)  # of the Python interpreter, when written apart


@frozen
class LaunchNode:
    """Facts about a node that a launch depends on, such as its address, devices and processor
    cores.
    """

    name: str
    address: str  # under which other nodes reach its ranks
    device: DeviceSpec
    devices: int
    cpus: int
    device_ids: tuple[
        DeviceId, ...
    ] = ()  # of the driver, in the order of our indices; (): the same

    def list_driver_ids(self, devices: Sequence[int]) -> tuple[DeviceId, ...]:
        """Return the driver's ids (index or UUID) of these devices, in the same order."""
        if not self.device_ids:
            return tuple(devices)
        return tuple(self.device_ids[index] for index in devices)


@frozen
class RankRequest:
    """A process to start: a rank, or a launcher program (torchrun) that starts all ranks of a node.

    `rank` is the number of the rank, or of the node's first rank.
    """

    rank: int
    argv: Argv
    env: tuple[tuple[str, str], ...]  # added to the launcher's variables


@frozen
class LaunchRequest:
    """Everything needed to start an attempt. Secrets appear by name only."""

    name: str
    workdir: str
    # (folder, file): `workdir` gets links to everything in folder but this file
    linked: tuple[str, str] | None
    files: tuple[tuple[str, str], ...]  # (absolute path, text), written before any rank starts
    before: Argv | None  # run on the first node, to its end, before any rank starts
    ranks: tuple[
        tuple[str, tuple[RankRequest, ...]], ...
    ]  # (node, its processes), in the placement's order
    secrets: tuple[str, ...]


def list_started_ranks(spec: JobSpec, placement: Placement) -> tuple[int, ...]:
    """Return the numbers of the ranks whose processes the orchestrator starts itself.

    They are all ranks, or the first rank of each node where a launcher program (torchrun) starts
    the others.
    """
    counts = [len(part.devices) for part in placement]
    if spec.launch == "ranks":
        return tuple(range(sum(counts)))
    return tuple(sum(counts[:node]) for node in range(len(counts)))


def build_launch_request(
    job: Job,
    attempt: Attempt,
    home: Path,
    nodes: Mapping[str, LaunchNode],
    *,
    master_port: int,
    python: str,
    resume_from: str | None = None,
    config_text: str = "",
) -> LaunchRequest:
    """Return the request that starts `attempt`. Raises SpecError where the plan needs a setting
    that the script cannot take.

    `nodes` has every node of the placement. `python` is the interpreter for our modules and for
    `python` in the command. `resume_from` is the newest checkpoint of a script, and `config_text`
    its config file's text.
    """
    spec = job.spec
    folder = JobFolder(home, job.id)
    paths = folder.attempt(attempt.number)
    rendered = _render_command(job, attempt, folder, python, resume_from)
    common = {
        "TORCH_EXTENSIONS_DIR": str(home / "torch_extensions"),
        "PYTHONUNBUFFERED": "1",
        **dict(spec.env),
        **rendered.env,
    }
    files = list_attempt_files(job, attempt, folder, nodes)
    if spec.is_script:
        common["ORC_GUARD"] = str(
            paths.guard
        )  # guards what no wrapped process is: see inherited/sitecustomize.py
        files = (*files, (str(paths.resume), json.dumps({"checkpoint": resume_from})))
    if spec.config is not None:
        text = rewrite_config(
            config_text, rendered.keys, is_json=spec.config.file.endswith(".json")
        )
        files = (*files, (str(_get_config_path(spec, paths)), text))
    if spec.launch == "ranks":
        argv = (
            rendered.arguments
            if spec.command is None
            else add_guard(rendered.arguments, str(paths.guard), python)
        )
        ranks = _rank_processes(spec, attempt, nodes, argv, common, master_port)
    else:
        ranks = _iterate_launcher_processes(
            spec, attempt, nodes, paths, rendered.arguments, common, master_port, python
        )
    return LaunchRequest(
        name=attempt.name,
        workdir=_get_working_directory(spec, paths),
        linked=(str(spec.workdir), spec.config.file)
        if spec.config is not None and _has_linked_workdir(spec)
        else None,
        files=files,
        before=_make_command_before_resume(spec, rendered, resume_from, python),
        ranks=tuple(ranks),
        secrets=spec.secrets,
    )


def _make_command_before_resume(
    spec: JobSpec, rendered: RenderedCommand, resume_from: str | None, python: str
) -> Argv | None:
    """Return the job's command `resume.before`, with its placeholders filled in; None without a
    checkpoint or such a command.
    """
    if spec.resume.before is None or resume_from is None:
        return None
    filled: list[str] = []
    for word in spec.resume.before:
        filled += (
            rendered.arguments[1:]
            if word == "{arguments}"
            else [resume_from if word == "{checkpoint}" else word]
        )
    return (
        _find_interpreter(spec, python) if filled[0] in ("python", "python3") else filled[0],
        *filled[1:],
    )


def _find_interpreter(spec: JobSpec, default: str) -> str:
    """Return the Python interpreter that the command names by its path, or that is in its program's
    folder.

    `default` where there is none.
    """
    program = Path(spec.command[0] if spec.command else "").expanduser()
    beside = program if is_python(program.name) else program.with_name("python")
    return (
        str(beside)
        if len(program.parts) > 1 and (Path(spec.workdir or ".") / beside).is_file()
        else default
    )


def _get_last_step(job: Job, attempt: Attempt) -> int:
    """Return the training's last step, in the number by which the attempt counts steps; 0 where
    unknown.
    """
    before = count_steps_before_attempt(job, attempt)
    steps = job.spec.optimizer_steps
    return 0 if before is None or steps is None else steps - before


def list_attempt_files(
    job: Job, attempt: Attempt, job_folder: JobFolder, nodes: Mapping[str, LaunchNode]
) -> tuple[tuple[str, str], ...]:
    """Return (absolute path, text) of each file that the ranks read, such as DeepSpeed's
    configuration.
    """
    paths = job_folder.attempt(attempt.number)
    devices = [nodes[part.node].device for part in attempt.placement]
    virtual = [device.memory for device in devices if device.kind.traits.is_virtual]
    fault = job.fault if attempt.number == 1 else None
    guard = GuardSettings(
        attempt_folder=str(paths.path),
        virtual_capacity_bytes=min(virtual, default=None),
        last_step=_get_last_step(job, attempt),
    )
    if fault is not None:
        guard = replace(guard, fault_kind=fault.kind, fault_rank=fault.rank, fault_step=fault.step)
    files = [(str(paths.guard), json.dumps(dataclasses.asdict(guard)))]
    if job.spec.model is not None:
        run = TrainingRun(
            model=job.spec.model,
            data=job.spec.data,
            training=job.spec.training,
            plan=attempt.plan,
            job_folder=str(job_folder.path),
            attempt_folder=str(paths.path),
            epoch=attempt.number,
            device="cpu" if virtual else "cuda",
            nvme_folder=next((device.nvme_folder for device in devices), None),
        )
        files.append((str(paths.run), json.dumps(dataclasses.asdict(run))))
    if _has_deepspeed_file(job.spec, attempt.plan):
        config = render_deepspeed_config(
            attempt.plan,
            clip_norm=job.spec.training.clip_norm,
            job_keys_json=job.spec.deepspeed,
            is_virtual_device=bool(virtual),
        )
        files.append((str(_get_deepspeed_path(paths)), json.dumps(config)))
    if job.spec.launch == "accelerate":
        deepspeed = str(_get_deepspeed_path(paths))
        config = render_accelerate_config(
            job.spec.knobs, attempt.plan, deepspeed_config_path=deepspeed
        )
        files.append((str(_get_accelerate_path(paths)), yaml.safe_dump(config)))
    return tuple(files)


def _has_deepspeed_file(spec: JobSpec, plan: Plan) -> bool:
    is_sharded = isinstance(plan.mechanics, Zero)
    return spec.knobs.deepspeed_config is not None or (spec.knobs.has_deepspeed_file and is_sharded)


def _get_deepspeed_path(paths: AttemptFolder) -> Path:
    return paths.path / "deepspeed.json"


def _get_accelerate_path(paths: AttemptFolder) -> Path:
    return paths.path / "accelerate.yaml"


def _get_linked_workdir(paths: AttemptFolder) -> Path:
    return paths.path / "work"


def _has_linked_workdir(spec: JobSpec) -> bool:
    return spec.workdir is not None and spec.config is not None and spec.config.flag is None


def _get_working_directory(spec: JobSpec, paths: AttemptFolder) -> str:
    """Return the working directory of the ranks."""
    return (
        str(_get_linked_workdir(paths))
        if _has_linked_workdir(spec)
        else spec.workdir or str(paths.path)
    )


def _make_output_argument(spec: JobSpec, output: Path, paths: AttemptFolder) -> str:
    """Return the output folder's path as the script's argument takes it: absolute, or relative to
    the working directory.
    """
    if spec.knobs.output_dir is None or not spec.knobs.output_dir.relative:
        return str(output)
    return os.path.relpath(
        os.path.realpath(output), os.path.realpath(_get_working_directory(spec, paths))
    )


def _get_config_path(spec: JobSpec, paths: AttemptFolder) -> Path:
    """Return the path of the attempt's copy of the config file: beside its logs, or where the
    script reads its own.
    """
    assert spec.config is not None, "only a job with a config file has a copy of it"
    return (
        _get_linked_workdir(paths) / spec.config.file
        if spec.config.flag is None
        else paths.path / Path(spec.config.file).name
    )


def _render_command(
    job: Job, attempt: Attempt, folder: JobFolder, python: str, resume_from: str | None
) -> RenderedCommand:
    """Return the command of a rank: the engine's own program, already guarded, or the script's
    command with the plan's values.
    """
    spec = job.spec
    paths = folder.attempt(attempt.number)
    if spec.command is None:
        module = ("-m", "orchestrator.training.main", str(paths.run))
        return RenderedCommand((python, str(GUARD), str(paths.guard), "--", *module), {}, {})
    return render_script_command(
        read_script_request(spec),
        attempt.plan,
        output_dir=_make_output_argument(
            spec, paths.output if attempt.probe else folder.output, paths
        ),
        resume_from=resume_from,
        deepspeed_config_path=str(_get_deepspeed_path(paths)),
        config_path=None if spec.config is None else str(_get_config_path(spec, paths)),
        node_devices=attempt.placement[0].devices,
    )


def add_guard(argv: Argv, guard_settings: str, python: str) -> Argv:
    """Return `argv` with our guard (a wrapper that reports memory and errors) inserted before a
    Python program.

    Other commands are unchanged. The interpreter's own flags are kept. `python` replaces a bare
    `python` or `python3`. A program from `-c` or standard input stays unguarded, since it has no
    file that the guard could run.
    """
    if not is_python(argv[0]):
        return argv
    interpreter, program = _split_interpreter(argv, python)
    if not program or program[0] in ("-c", "-"):
        return (*interpreter, *program)
    return (*interpreter, str(GUARD), guard_settings, "--", *program)


def _guard_self_starting_command(argv: Argv, guard_settings: str, python: str) -> Argv:
    """Return the guarded command of a program that starts its ranks itself: they inherit the guard
    by an environment variable.

    A Python with -I, -E or -S ignores that variable, so the guard is inserted into its command.
    Children with the same flags stay unwatched, and the record of the attempt says so.
    """
    if is_python(argv[0]):
        interpreter, program = _split_interpreter(argv, python)
        flags = "".join(
            word for word in interpreter[1:] if word.startswith("-") and not word.startswith("--")
        )
        if not {"I", "E", "S"} & set(flags):
            return (*interpreter, *program)
    return add_guard(argv, guard_settings, python)


def _split_interpreter(argv: Argv, python: str) -> tuple[Argv, Argv]:
    """Return (interpreter with its flags, program with its arguments) of a Python command."""
    start = 1
    while (
        start < len(argv) and argv[start].startswith("-") and argv[start] not in ("-m", "-c", "-")
    ):
        start += 2 if argv[start] in FLAGS_WITH_A_WORD else 1
    return (python if argv[0] in ("python", "python3") else argv[0], *argv[1:start]), argv[start:]


def _iterate_launcher_processes(
    spec: JobSpec,
    attempt: Attempt,
    nodes: Mapping[str, LaunchNode],
    paths: AttemptFolder,
    argv: Argv,
    common_variables: Mapping[str, str],
    master_port: int,
    python: str,
) -> Iterator[tuple[str, tuple[RankRequest, ...]]]:
    """Yield (node name, its one process to start) for each node; the process (torchrun and others)
    starts the node's ranks.

    The script is run under the guard, or inherits it.
    """
    gang = _make_rendezvous_variables(attempt, nodes, master_port)
    firsts = list_started_ranks(spec, attempt.placement)
    for index, (first, part) in enumerate(zip(firsts, attempt.placement, strict=True)):
        node = nodes[part.node]
        env = {
            **_default_variables(node),
            **common_variables,
            **gang,
            **_make_device_variables(node, part.devices),
        }
        if spec.launch == "self":
            program = _guard_self_starting_command(argv, str(paths.guard), python)
        elif spec.launch == "dora":
            workers = (
                ("-d", "--ddp_workers", str(len(part.devices))) if len(part.devices) > 1 else ()
            )
            program = (*argv[:2], *workers, *argv[2:])
        else:
            interpreter, script = _split_interpreter(argv, python)
            arguments = _make_launcher_arguments(spec, attempt, index, gang, paths)
            program = (*interpreter, *arguments, str(GUARD), str(paths.guard), "--", *script)
        yield part.node, (RankRequest(rank=first, argv=program, env=tuple(sorted(env.items()))),)


def _make_launcher_arguments(
    spec: JobSpec,
    attempt: Attempt,
    node_index: int,
    rendezvous: Mapping[str, str],
    paths: AttemptFolder,
) -> Argv:
    """Return the arguments between interpreter and script: the module that starts the ranks, and
    its rendezvous.

    Sources: torch/distributed/run.py; accelerate/commands/launch.py; deepspeed/launcher/launch.py.
    The `deepspeed` command itself starts the latter on every node (deepspeed/launcher/runner.py),
    and it needs no ssh.
    """
    counts = [len(part.devices) for part in attempt.placement]
    where = rendezvous["MASTER_ADDR"]
    port = rendezvous["MASTER_PORT"]
    if spec.launch == "torchrun":
        return (
            *(
                "-m",
                "torch.distributed.run",
                "--nnodes",
                str(len(counts)),
                "--nproc-per-node",
                str(counts[node_index]),
            ),
            *("--node-rank", str(node_index), "--master-addr", where, "--master-port", port),
        )
    if spec.launch == "accelerate":
        return (
            *(
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(_get_accelerate_path(paths)),
            ),
            *(
                "--num_machines",
                str(len(counts)),
                "--num_processes",
                str(sum(counts)),
                "--machine_rank",
                str(node_index),
            ),
            *("--main_process_ip", where, "--main_process_port", port),
        )
    assert spec.launch == "deepspeed", spec.launch
    world = {part.node: part.devices for part in attempt.placement}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    return (
        *(
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={encoded}",
            f"--node_rank={node_index}",
        ),
        *(f"--master_addr={where}", f"--master_port={port}"),
    )


def _make_rendezvous_variables(
    attempt: Attempt, nodes: Mapping[str, LaunchNode], master_port: int
) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for the attempt's process group."""
    alone = len(attempt.placement) == 1
    first = nodes[attempt.placement[0].node]
    return {"MASTER_ADDR": "127.0.0.1" if alone else first.address, "MASTER_PORT": str(master_port)}


def _rank_processes(
    spec: JobSpec,
    attempt: Attempt,
    nodes: Mapping[str, LaunchNode],
    argv: Argv,
    common_variables: Mapping[str, str],
    master_port: int,
) -> Iterator[tuple[str, tuple[RankRequest, ...]]]:
    """Yield (node name, processes of its ranks) for each node. Ranks are numbered in the
    placement's order as by torchrun.

    Source: torch/distributed/run.py. A script on one device gets no variables of a process group:
    with RANK set, some scripts turn to distributed training (nanoGPT's train.py).
    """
    world_size = count_devices(attempt.placement)
    gang = {
        "WORLD_SIZE": str(world_size),
        **_make_rendezvous_variables(attempt, nodes, master_port),
    }
    rank = 0
    for part in attempt.placement:
        node = nodes[part.node]
        devices = _make_device_variables(node, part.devices)
        ranks = []
        for local_rank in range(len(part.devices)):
            numbers = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(part.devices)),
            }
            group = {} if spec.is_script and world_size == 1 else {**gang, **numbers}
            env = {
                **_default_variables(node),
                **common_variables,
                **group,
                **devices,
                GUARDED_RANK: str(rank),
            }
            ranks.append(RankRequest(rank=rank, argv=argv, env=tuple(sorted(env.items()))))
            rank += 1
        yield part.node, tuple(ranks)


def _default_variables(node: LaunchNode) -> dict[str, str]:
    """Return environment variables that the job's own `env` overrides, such as OMP_NUM_THREADS."""
    threads = str(max(1, node.cpus // node.devices))
    return {"OMP_NUM_THREADS": threads, **dict(node.device.kind.traits.default_variables)}


def _make_device_variables(node: LaunchNode, devices: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables that select these devices, in the driver's numbering."""
    traits = node.device.kind.traits
    variables = dict(traits.variables)
    if traits.visible_variable:
        variables[traits.visible_variable] = ",".join(map(str, node.list_driver_ids(devices)))
    return variables
