"""The script of docs/guides/coming-from.md in allocations of a real Slurm: the second ends what the first began."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.service.demo.run import write_demo_files
from orchestrator.specs.run import JobFolder
from tests.backends.local.lines import SCRIPT as TRAINER

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guides/coming-from.md").read_text()
SCRIPT = next(block for block in GUIDE.split("```bash\n") if block.startswith("#!")).partition(
    "```"
)[0]
DAEMONS = ("slurmctld", "slurmd")
WAIT_S = 200.0  # a job that is queued again waits for 120 s

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(map(shutil.which, DAEMONS)), reason="needs slurmctld and slurmd (Debian: slurm-wlm)"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]


def configuration(folder: Path) -> str:
    """Return a slurm.conf of this machine as the only node, without accounts, cgroups or GPUs."""
    host = socket.gethostname()
    with socket.socket() as first, socket.socket() as second:
        for free in (first, second):
            free.bind(("127.0.0.1", 0))
        ports = first.getsockname()[1], second.getsockname()[1]
    return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} Gres=gpu:4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs a command as a user of this Slurm and of the queue in `home`; it must end well."""
    (tmp_path / "slurm.conf").write_text(configuration(tmp_path))
    # four GPUs, which no driver knows: Slurm counts their files
    cards = ("null", "zero", "full", "random")
    gres = "".join(f"Name=gpu File=/dev/{name}\n" for name in cards)
    (tmp_path / "gres.conf").write_text(gres)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {
        **os.environ,
        "SLURM_CONF": f"{tmp_path}/slurm.conf",
        "ORC_HOME": f"{tmp_path}/home",
        "PATH": programs,
    }

    def run(*words: str) -> str:
        ended = subprocess.run(
            words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
        )
        assert ended.returncode == 0, (words, ended.stdout, ended.stderr)
        return ended.stdout

    daemons = []
    try:
        for name in DAEMONS:
            (tmp_path / {"slurmctld": "state", "slurmd": "spool"}[name]).mkdir()
            with (tmp_path / f"{name}.log").open("w") as log:
                daemons.append(subprocess.Popen([name, "-D"], env=env, stdout=log, stderr=log))
        yield run
    finally:
        subprocess.run(["scancel", "--state=RUNNING"], env=env, capture_output=True)
        subprocess.run(["orc", "down", "--force"], env=env, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(WAIT_S)


def wait_for(what: str, is_so: Callable[[], Any]) -> None:
    """Wait until it is so; fail with `what` where it never is."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.5)


def test_a_second_allocation_goes_on_with_the_queue_of_the_first(run: Run, tmp_path: Path) -> None:
    write_demo_files(tmp_path / "demo")
    (tmp_path / "queue.sbatch").write_text(SCRIPT)
    job = "fits-1"

    def allocate() -> str:
        options = ("--parsable", "--gres=none", "--time=10", f"--output={tmp_path}/slurm.out")
        return run("sbatch", *options, "queue.sbatch").strip()

    def is_over(allocation: str) -> bool:
        return allocation not in run("squeue", "--noheader", "--format=%i").split()

    wait_for("no node", lambda: "idle" in run("sinfo", "--noheader", "--format=%t"))
    run("orc", "up", "--cluster", str(ROOT / "clusters/two-virtual-devices.yaml"))
    run("orc", "down")

    first = allocate()
    wait_for("the first allocation trains", lambda: (tmp_path / "home/service.json").exists())
    settings = ("--set", "training.max_steps=5000", "--set", "training.checkpoint_every_steps=5")
    run("srun", f"--jobid={first}", "--overlap", "orc", "submit", "demo/fits.yaml", *settings)
    checkpoints = tmp_path / "home/jobs" / job / "checkpoints"
    wait_for("a checkpoint", lambda: checkpoints.is_dir() and any(checkpoints.glob("step*")))
    run("scancel", "--signal=TERM", "--batch", first)
    wait_for("the end of the first allocation", lambda: is_over(first))
    assert not (tmp_path / "home/service.json").exists()

    second = allocate()
    wait_for("the service of the second", lambda: (tmp_path / "home/service.json").exists())
    metrics = JobFolder(tmp_path / "home", job).attempt(2).metrics
    wait_for("a step of the next attempt", lambda: metrics.exists() and "\n" in metrics.read_text())
    assert json.loads(metrics.read_text().splitlines()[0])["step"] > 1
    run("scancel", "--signal=TERM", "--batch", second)
    wait_for("the end of the second allocation", lambda: is_over(second))


def has_text(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def submit_line(run: Run, folder: Path, *options: str) -> str:
    """Submit the guide's batch script with the tests' trainer; return the job's id."""
    (folder / "train.py").write_text(TRAINER)
    lines = (
        "#!/bin/bash",
        "exec orc launch --requeue --grace 5 --devices virtual-1GiB python train.py --wait ${WAIT-2}",
    )
    (folder / "my.sh").write_text("\n".join(lines))
    output = (
        f"--output={folder}/slurm.%a.out"
        if "--array=0-1" in options
        else f"--output={folder}/slurm.out"
    )
    common = ("--parsable", "--time=10", "--requeue", "--open-mode=append", output)
    return run("sbatch", *common, *options, "my.sh").strip()


def test_a_line_that_slurm_ends_is_queued_again_and_goes_on(run: Run, tmp_path: Path) -> None:
    job = submit_line(run, tmp_path, "--gres=gpu:1", f"--output={tmp_path}/slurm.out")
    log = tmp_path / "slurm.out"
    wait_for("its script never began", lambda: has_text(log, "waits"))
    run("scancel", "--batch", "--signal=TERM", job)
    wait_for("it was not queued again", lambda: "trained 4 steps" in log.read_text())
    text = log.read_text()
    assert f"job {job} of Slurm is queued again" in text
    assert "goes on with what attempt 1 of this line left" in text
    assert f"--resume {tmp_path}/out/checkpoint-2.pt" in text


def test_tasks_of_an_array_have_states_of_their_own(run: Run, tmp_path: Path) -> None:
    output = f"--output={tmp_path}/slurm.%a.out"
    submit_line(run, tmp_path, "--gres=gpu:1", "--array=0-1%1", "--export=ALL,WAIT=0", output)
    logs = [tmp_path / f"slurm.{task}.out" for task in (0, 1)]
    wait_for("a task never ended", lambda: all(has_text(log, "trained 4 steps") for log in logs))
    assert len(list((tmp_path / ".orc-launch").iterdir())) == 2


def test_a_cancelled_line_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    job = submit_line(run, tmp_path, "--gres=gpu:1", f"--output={tmp_path}/slurm.out")
    wait_for("its script never began", lambda: has_text(tmp_path / "slurm.out", "waits"))
    run("scancel", job)
    wait_for("it did not end", lambda: not run("squeue", "--noheader", f"--jobs={job}"))
    marks = [path for path in Path("/proc").glob("[0-9]*/environ") if is_marked(path, tmp_path)]
    assert marks == []


def is_marked(environ: Path, folder: Path) -> bool:
    """Return whether a process carries the mark of a line in a folder."""
    try:
        return f"ORC_LAUNCHER={folder}".encode() in environ.read_bytes()
    except OSError:  # it ended meanwhile
        return False
