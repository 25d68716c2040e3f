"""Laws of what is started: it is a value, complete, printable, and free of secrets."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.attempts.launch_request import (
    GUARD,
    LaunchNode,
    LaunchRequest,
    add_guard,
    build_launch_request,
)
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.choices import Engine
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.run import GuardSettings, parse_training_run_json
from tests.backends.ray_jobs import BOTH, DEVICE, launch_of
from tests.scheduling.factories import decoder_spec

HOME = Path("/home/orc")
PYTHON = "/env/bin/python"
GPU = DEVICE.model_copy(update={"name": "h200", "kind": DeviceKind.CUDA})


def nodes(device: DeviceSpec = DEVICE) -> dict[str, LaunchNode]:
    return {
        name: LaunchNode(name=name, address=address, device=device, devices=2, cpus=6)
        for name, address in (("n0", "10.0.0.1"), ("n1", "10.0.0.2"))
    }


def request(
    spec: JobSpec, *, device: DeviceSpec = DEVICE, number: int = 1, **changes: object
) -> LaunchRequest:
    launch = launch_of("j", spec, BOTH, number)
    job = replace(launch.job, **changes)  # type: ignore[arg-type]
    attempt = launch.attempt
    if spec.model is not None:
        attempt = replace(
            attempt, plan=replace(attempt.plan, engine=Engine.TORCH, sequence_length=128)
        )
    return build_launch_request(job, attempt, HOME, nodes(device), master_port=29999, python=PYTHON)


def envs(launch: LaunchRequest) -> list[dict[str, str]]:
    return [dict(rank.env) for _, ranks in launch.ranks for rank in ranks]


def script(**changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "j", "command": "python -u train.py", "global_batch_size": 4, **changes}
    )


def test_ranks_are_numbered_in_the_order_of_the_placement() -> None:
    launch = request(script())
    assert [node for node, _ in launch.ranks] == ["n0", "n1"]
    assert [
        (e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in envs(launch)
    ] == [
        ("0", "0", "4", "2"),
        ("1", "1", "4", "2"),
        ("2", "0", "4", "2"),
        ("3", "1", "4", "2"),
    ]
    assert {(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in envs(launch)} == {("10.0.0.1", "29999")}


def on_one_node(spec: JobSpec, *devices: int) -> LaunchRequest:
    launch = launch_of("j", spec, (NodeDevices(node="n1", devices=devices),))
    attempt = launch.attempt
    if spec.model is not None:
        attempt = replace(
            attempt, plan=replace(attempt.plan, engine=Engine.TORCH, sequence_length=128)
        )
    return build_launch_request(launch.job, attempt, HOME, nodes(), master_port=1, python=PYTHON)


def test_a_gang_on_one_node_meets_on_the_loopback_interface() -> None:
    assert {env["MASTER_ADDR"] for env in envs(on_one_node(script(), 0, 1))} == {"127.0.0.1"}


def test_a_script_on_one_device_gets_the_environment_of_a_plain_command() -> None:
    (env,) = envs(on_one_node(script(env={"RANK": "7"}), 1))
    group = {
        name: value
        for name, value in env.items()
        if "RANK" in name or "WORLD" in name or "MASTER" in name
    }
    assert group == {"ORC_RANK": "0", "RANK": "7"}, "the job's own word, and the guard's"


def test_our_engine_on_one_device_gets_its_process_group() -> None:
    (env,) = envs(on_one_node(decoder_spec(), 1))
    assert {
        name: env.get(name)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    } == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def test_real_devices_are_named_in_the_order_of_the_driver() -> None:
    env = envs(request(script(), device=GPU))[2]
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "DS_ACCELERATOR" not in env


def test_virtual_devices_hide_real_ones_and_share_the_processors() -> None:
    env = envs(request(script()))[0]
    assert (env["CUDA_VISIBLE_DEVICES"], env["DS_ACCELERATOR"], env["OMP_NUM_THREADS"]) == (
        "",
        "cpu",
        "3",
    )


def test_a_users_variables_win_over_defaults_and_lose_to_the_gangs() -> None:
    env = envs(request(script(env={"OMP_NUM_THREADS": "1", "RANK": "7", "MINE": "yes"})))[1]
    assert (env["OMP_NUM_THREADS"], env["RANK"], env["MINE"]) == ("1", "1", "yes")


def test_our_training_runs_under_the_guard_with_everything_it_needs() -> None:
    launch = request(decoder_spec())
    folder = HOME / "jobs/j/attempts/1"
    argv = launch.ranks[0][1][0].argv
    assert argv == (
        *(PYTHON, str(GUARD), str(folder / "guard.json"), "--"),
        *("-m", "orchestrator.training.main", str(folder / "run.json")),
    )
    files = dict(launch.files)
    run = parse_training_run_json(json.loads(files[str(folder / "run.json")]))
    assert (run.epoch, run.device, run.plan.engine, run.job_folder) == (
        1,
        "cpu",
        Engine.TORCH,
        str(HOME / "jobs/j"),
    )
    guard = GuardSettings(**json.loads(files[str(folder / "guard.json")]))
    assert (guard.virtual_capacity_bytes, guard.attempt_folder) == (DEVICE.memory, str(folder))


def test_nothing_caps_a_real_device() -> None:
    launch = request(decoder_spec(), device=GPU)
    files = {Path(path).name: json.loads(text) for path, text in launch.files}
    assert files["guard.json"]["virtual_capacity_bytes"] is None
    assert files["run.json"]["device"] == "cuda"


@pytest.mark.parametrize(("number", "kind"), [(1, "kill"), (2, None)])
def test_a_rehearsed_failure_befalls_the_first_attempt_only(number: int, kind: str | None) -> None:
    launch = request(script(), number=number, fault=Fault(kind=FaultKind.KILL, rank=1, step=20))
    guard = json.loads(dict(launch.files)[str(HOME / f"jobs/j/attempts/{number}/guard.json")])
    assert guard["fault_kind"] == kind


def test_knobs_reach_the_script_and_its_deepspeed_file_is_written() -> None:
    knobs = {
        "micro_batch_size": {"flag": "--bs"},
        "deepspeed_config": {"env": "DS"},
        "output_dir": {"flag": "--out"},
    }
    launch = request(script(knobs=knobs))
    argv, env = launch.ranks[0][1][0].argv, envs(launch)[0]
    assert argv[-4:] == ("--bs", "1", "--out", str(HOME / "jobs/j/output"))
    assert json.loads(dict(launch.files)[env["DS"]])["train_micro_batch_size_per_gpu"] == 1


def test_secrets_stand_in_a_request_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_value")
    launch = request(script(secrets=("HF_TOKEN",)))
    assert launch.secrets == ("HF_TOKEN",)
    assert "hf_value" not in repr(launch)


GUARDED = (str(GUARD), "guard.json", "--")


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("python train.py --x", (PYTHON, *GUARDED, "train.py", "--x")),
        (
            "python3 -u -X dev -Wignore train.py",
            (PYTHON, "-u", "-X", "dev", "-Wignore", *GUARDED, "train.py"),
        ),
        (
            "/other/bin/python3.11 -m pkg.train -u",
            ("/other/bin/python3.11", *GUARDED, "-m", "pkg.train", "-u"),
        ),
        ("python -c pass", (PYTHON, "-c", "pass")),
        ("python", (PYTHON,)),
        ("./train.sh python", ("./train.sh", "python")),
        ("pythonic train.py", ("pythonic", "train.py")),
    ],
)
def test_the_guard_stands_between_interpreter_and_program(
    command: str, started: tuple[str, ...]
) -> None:
    assert add_guard(tuple(command.split()), "guard.json", PYTHON) == started


def request_of(
    launch: str,
    *,
    device: DeviceSpec = GPU,
    command: str = "python -u train.py --x",
    config_text: str = "",
    **changes: object,
) -> LaunchRequest:
    """Launch on two nodes of two devices, or on one node where the launcher knows no other."""
    placement = BOTH[:1] if launch in ("self", "dora") else BOTH
    start = launch_of("j", script(launch=launch, command=command, gpus=4, **changes), placement)
    return build_launch_request(
        start.job,
        start.attempt,
        HOME,
        nodes(device),
        master_port=29999,
        python=PYTHON,
        config_text=config_text,
    )


PROGRAM = (str(GUARD), str(HOME / "jobs/j/attempts/1/guard.json"), "--", "train.py", "--x")


@pytest.mark.parametrize(
    ("launch", "launcher_arguments"),
    [
        (
            "torchrun",
            "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank {} --master-addr 10.0.0.1 "
            "--master-port 29999",
        ),
        (
            "accelerate",
            f"-m accelerate.commands.launch --config_file {HOME}/jobs/j/attempts/1/accelerate.yaml --num_machines 2 "
            "--num_processes 4 --machine_rank {} --main_process_ip 10.0.0.1 --main_process_port 29999",
        ),
    ],
)
def test_a_launcher_starts_the_guard_on_every_node_and_meets_on_the_first(
    launch: str, launcher_arguments: str
) -> None:
    made = request_of(launch)
    starts = [rank for _, ranks in made.ranks for rank in ranks]
    assert [start.rank for start in starts] == [0, 2], "the first rank of each node"
    for number, start in enumerate(starts):
        assert start.argv == (PYTHON, "-u", *launcher_arguments.format(number).split(), *PROGRAM)
    environments = [dict(start.env) for start in starts]
    assert not [
        name for env in environments for name in env if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    ]
    assert {env["CUDA_VISIBLE_DEVICES"] for env in environments} == {"0,1"}


def test_deepspeeds_launcher_is_told_every_node_and_its_devices() -> None:
    starts = [rank for _, ranks in request_of("deepspeed").ranks for rank in ranks]
    for number, start in enumerate(starts):
        world = next(word for word in start.argv if word.startswith("--world_info="))
        assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {
            "n0": [0, 1],
            "n1": [0, 1],
        }
        assert f"--node_rank={number}" in start.argv
        assert start.argv[-len(PROGRAM) :] == PROGRAM


@pytest.mark.parametrize(
    ("launch", "command", "argv"),
    [
        ("self", "python -u train.py -e voice", (PYTHON, "-u", "train.py", "-e", "voice")),
        ("self", "./train.sh", ("./train.sh",)),
        ("dora", "dora run solver=x", ("dora", "run", "-d", "--ddp_workers", "2", "solver=x")),
    ],
)
def test_ranks_that_others_spawn_inherit_the_guard(
    launch: str, command: str, argv: tuple[str, ...]
) -> None:
    made = request_of(launch, command=command, env={"PYTHONPATH": "/repo"})
    ((_, (start,)),) = made.ranks
    env = dict(start.env)
    assert start.argv == argv
    assert env["PYTHONPATH"] == "/repo", "the launcher puts the guard's before it"
    assert env["ORC_GUARD"] == str(HOME / "jobs/j/attempts/1/guard.json")


@pytest.mark.parametrize("flags", ["-I", "-E -B", "-uS"])
def test_a_python_that_ignores_its_environment_gets_the_guard_by_its_path(flags: str) -> None:
    for launch, program in (("self", "train.py"), ("self", "-m train")):
        ((_, (start,)),) = request_of(launch, command=f"python {flags} {program}").ranks
        guarded_by = (str(GUARD), str(HOME / "jobs/j/attempts/1/guard.json"), "--")
        assert start.argv == (PYTHON, *flags.split(), *guarded_by, *program.split())


def test_a_script_that_opens_its_config_itself_runs_in_a_folder_of_links() -> None:
    knobs = {"micro_batch_size": {"key": "batch_size"}}
    made = request_of("torchrun", workdir="/repo", config={"file": "conf/config.yaml"}, knobs=knobs)
    assert (made.workdir, made.linked) == (
        f"{HOME}/jobs/j/attempts/1/work",
        ("/repo", "conf/config.yaml"),
    )
    assert dict(made.files)[f"{made.workdir}/conf/config.yaml"] == "batch_size: 1\n"
    in_json = request_of(
        "torchrun",
        workdir="/repo",
        config={"file": "config.json"},
        knobs=knobs,
        config_text='{"learning_rate": 1e-3}',
    )
    assert json.loads(dict(in_json.files)[f"{in_json.workdir}/config.json"]) == {
        "learning_rate": 1e-3,
        "batch_size": 1,
    }
    in_yaml = request_of(
        "torchrun", workdir="/repo", config={"file": "conf/config.yaml", "flag": "-c"}, knobs=knobs
    )
    assert (in_yaml.workdir, in_yaml.linked) == ("/repo", None)
    assert in_yaml.ranks[0][1][0].argv[-2:] == ("-c", f"{HOME}/jobs/j/attempts/1/config.yaml")


def test_what_goes_before_a_restart_runs_in_the_environment_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("dora", "python"):
        (tmp_path / "bin" / name).touch()
    for command, runs in (
        ("bin/dora run x", "bin/python"),
        ("bin/python train.py", "bin/python"),
        ("dora run", PYTHON),
    ):
        spec = script(
            command=command, workdir=str(tmp_path), resume={"before": "python carry.py"}, knobs={}
        )
        start = launch_of("j", spec, BOTH)
        made = build_launch_request(
            start.job, start.attempt, HOME, nodes(), master_port=1, python=PYTHON, resume_from="/c"
        )
        assert made.before == (runs, "carry.py")


def test_what_goes_before_a_restart_is_told_the_checkpoint_and_the_arguments() -> None:
    spec = script(
        resume={"before": "python carry.py {checkpoint} {arguments}"},
        knobs={"output_dir": {"flag": "-o"}},
    )
    start = launch_of("j", spec, BOTH)
    made = [
        build_launch_request(
            start.job,
            start.attempt,
            HOME,
            nodes(),
            master_port=1,
            python=PYTHON,
            resume_from=checkpoint,
        )
        for checkpoint in (None, "/c")
    ]
    assert made[0].before is None, "there is nothing to go on from"
    assert made[1].before == (
        PYTHON,
        "carry.py",
        "/c",
        "-u",
        "train.py",
        "-o",
        f"{HOME}/jobs/j/output",
    )
