"""`orc plan --export`: a plan as files and a line with which it runs without this service.

The files are those that an attempt gets: DeepSpeed's JSON, accelerate's YAML, the script's own config file with the
plan's values. `run.sh` starts the ranks by torchrun, accelerate, DeepSpeed, dora or the script, as the job says.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from orchestrator.backends.attempts.workdir import link_all_except, rewrite_config
from orchestrator.planning.render import (
    RenderedCommand,
    render_accelerate_config,
    render_deepspeed_config,
    render_script_command,
)
from orchestrator.planning.request import read_script_request
from orchestrator.specs.command_line import Env
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import is_python
from orchestrator.specs.mechanics import Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_plan, format_settings

DEEPSPEED = "deepspeed.json"
ACCELERATE = "accelerate.yaml"
MASTER_PORT = 29500  # of torchrun's own default (torch/distributed/run.py)
# what a person sets on each node of several
NODE_RANK = "${NODE_RANK:?from 0}"
MASTER_ADDR = "${MASTER_ADDR:?of node 0}"


def export_plan(spec: JobSpec, plan: Plan, devices_per_node: int, folder: Path) -> Path:
    """Write the plan's files and `run.sh` into a new or empty folder; return the path of `run.sh`.

    Raises SpecError for a model of our own engines, which nothing else runs, and for a folder that has files.
    """
    source = Path(spec.workdir or ".")
    folder = folder.expanduser().resolve()
    _check_exportable(spec, source, folder)
    (folder / "output").mkdir(parents=True)
    nodes = -(-plan.world_size // devices_per_node)
    devices = tuple(range(plan.world_size // nodes))
    config_path = _get_config_copy_path(spec, folder)
    rendered = render_script_command(
        read_script_request(spec),
        plan,
        output_dir=str(folder / "output"),
        resume_from=None,
        deepspeed_config_path=str(folder / DEEPSPEED),
        config_path=None if config_path is None else str(config_path),
        node_devices=devices,
    )
    if spec.config is not None and config_path is not None:
        content = (source / spec.config.file).read_text()
        is_json = config_path.suffix == ".json"
        config_path.write_text(rewrite_config(content, rendered.keys, is_json=is_json))
    _write_launcher_files(spec, plan, folder)
    has_links = spec.config is not None and spec.config.flag is None
    workdir = str(folder / "work") if has_links else spec.workdir or str(folder)
    argv = _make_rank_command(spec, rendered, nodes, len(devices), folder)
    script = folder / "run.sh"
    script.write_text(_run_script_text(spec, plan, rendered.env, workdir, argv))
    script.chmod(0o755)
    return script


def _check_exportable(spec: JobSpec, workdir: Path, folder: Path) -> None:
    if spec.command is None:
        raise SpecError(
            "a `model` is trained by our engines, which no other launcher starts",
            source="--export",
            got=spec.name,
            allowed="a job with a `command`",
            hint="`orc launch` and `orc run` train it",
        )
    if folder.exists() and any(folder.iterdir()):
        raise SpecError("the folder has files", source="--export", got=str(folder))
    if spec.config is not None and not (workdir / spec.config.file).is_file():
        missing = str(workdir / spec.config.file)
        raise SpecError("the config file is not on this machine", source="--export", got=missing)


def _write_launcher_files(spec: JobSpec, plan: Plan, folder: Path) -> None:
    """Write the plan's settings, and the files that DeepSpeed and accelerate read."""
    (folder / "plan.json").write_text(json.dumps(format_settings(plan), indent=2) + "\n")
    deepspeed_path = folder / DEEPSPEED
    if spec.knobs.deepspeed_config is not None or (
        spec.knobs.has_deepspeed_file and isinstance(plan.mechanics, Zero)
    ):
        content = render_deepspeed_config(
            plan, clip_norm=spec.training.clip_norm, job_keys_json=spec.deepspeed
        )
        deepspeed_path.write_text(json.dumps(content, indent=2) + "\n")
    if spec.launch == "accelerate":
        content = render_accelerate_config(
            spec.knobs, plan, deepspeed_config_path=str(deepspeed_path)
        )
        (folder / ACCELERATE).write_text(yaml.safe_dump(content))


def _get_config_copy_path(spec: JobSpec, folder: Path) -> Path | None:
    """Return the path for the copy of the script's config file: in the export's folder, or in a
    folder of links.

    None for a script without a config file.
    """
    if spec.config is None:
        return None
    if spec.config.flag is not None:
        return folder / Path(spec.config.file).name
    return link_all_except(Path(spec.workdir or "."), spec.config.file, folder / "work")


def _make_rank_command(
    spec: JobSpec,
    rendered_command: RenderedCommand,
    node_count: int,
    ranks_per_node: int,
    folder: Path,
) -> list[str]:
    """Return the words, quoted for the shell, of the command that starts the ranks of one node."""
    arguments = [shlex.quote(word) for word in rendered_command.arguments]
    port = str(MASTER_PORT)
    count = str(ranks_per_node)
    where = ["--master-addr", f'"{MASTER_ADDR}"', "--master-port", port]
    several = ["--nnodes", str(node_count), "--node-rank", f'"{NODE_RANK}"', *where]
    if spec.launch == "dora":
        workers = ["-d", "--ddp_workers", count] if ranks_per_node > 1 else []
        return [*arguments[:2], *workers, *arguments[2:]]
    is_alone = node_count * ranks_per_node == 1 and spec.launch == "ranks"
    if spec.launch == "self" or is_alone or not is_python(rendered_command.arguments[0]):
        return arguments
    python, *program = arguments
    if spec.launch == "accelerate":
        machine = ["--machine_rank", f'"{NODE_RANK}"', "--main_process_ip", f'"{MASTER_ADDR}"']
        return [
            *(python, "-m", "accelerate.commands.launch"),
            *("--config_file", shlex.quote(str(folder / ACCELERATE))),
            *(
                "--num_machines",
                str(node_count),
                "--num_processes",
                str(node_count * ranks_per_node),
            ),
            *([*machine, "--main_process_port", port] if node_count > 1 else []),
            *program,
        ]
    if spec.launch == "deepspeed":
        # deepspeed/launcher/launch.py, which `deepspeed` starts on every node, needs no ssh
        world = {f"node-{number}": [*range(ranks_per_node)] for number in range(node_count)}
        encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
        rank, address = (
            (f'"{NODE_RANK}"', f'"{MASTER_ADDR}"') if node_count > 1 else ("0", "127.0.0.1")
        )
        return [
            *(python, "-m", "deepspeed.launcher.launch", f"--world_info={encoded}"),
            *(f"--node_rank={rank}", f"--master_addr={address}", f"--master_port={port}"),
            *program,
        ]
    group = several if node_count > 1 else ["--standalone"]
    return [*(python, "-m", "torch.distributed.run"), *group, "--nproc-per-node", count, *program]


def _run_script_text(spec: JobSpec, plan: Plan, env: Env, workdir: str, argv: Sequence[str]) -> str:
    """Return the text of `run.sh`. It contains secrets' names only; their values come from the
    caller's environment.
    """
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (*spec.env, *env.items())]
    needed = [f': "${{{name}:?is a secret of the job}}"' for name in spec.secrets]
    lines = [
        "#!/usr/bin/env bash",
        f"# {spec.name}: {format_plan(plan)}. Made by `orc plan --export`; it runs without orc.",
        "set -euo pipefail",
        f"cd {shlex.quote(workdir)}",
        *exports,
        *needed,
        f'exec {" ".join(argv)} "$@"',
    ]
    return "\n".join(lines) + "\n"
