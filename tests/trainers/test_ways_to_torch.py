"""A rank is watched however its program imports torch: on a virtual device, and without one as on a real one."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.specs.attempt import Attempt, Evidence, FailureKind
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.spec import JobSpec
from tests.trainers.driver import Drive, cluster, log
from tests.uncompiled import WITHOUT_COMPILER

CUDA_WORDS = (
    "CUDA out of memory. Tried to allocate 256.00 MiB. GPU 0 has a total capacity of 64.00 MiB of which 9.81 MiB is "
    "free. Including non-PyTorch memory, this process has 54.19 MiB memory in use. Of the allocated memory 50.00 MiB "
    "is allocated by PyTorch, and 1.19 MiB is reserved by PyTorch but unallocated."
)
INNER = f"""
{WITHOUT_COMPILER}
def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    torch.zeros(64, 2**20)  # on a virtual device, more than it has
    raise torch.OutOfMemoryError({CUDA_WORDS!r})

if __name__ == "__main__":
    train()
"""
# Names of programs that import `inner` or run it, and what they are. The parent of a child has not
# imported torch.
WAYS = {
    "found before": """
import importlib.util
assert importlib.util.find_spec("torch")
import inner
inner.train()
""",
    "transformers first": """
import transformers
transformers.LlamaConfig()
import inner
inner.train()
""",
    "lazy loader": """
import importlib.util, sys
if "torch" not in sys.modules:  # on a virtual device, a wrapped rank has it from its start
    spec = importlib.util.find_spec("torch")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["torch"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
import inner
inner.train()
""",
    "import_module": """
import importlib
importlib.import_module("torch.optim")
importlib.import_module("inner").train()
""",
    "another hook in front": """
import importlib.util, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(Finder)
            return importlib.util.find_spec(name)
sys.meta_path.insert(0, Finder)
import inner
inner.train()
""",
    "subprocess": """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "inner.py"]).returncode)
""",
    "subprocess -m": """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-m", "inner"]).returncode)
""",
    "subprocess -c": """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", "import inner; inner.train()"]).returncode)
""",
    "subprocess -P": """
import os, subprocess, sys
sys.exit(subprocess.run([sys.executable, "-P", os.path.abspath("inner.py")]).returncode)
""",
    "exec": """
import os, sys
os.execv(sys.executable, [sys.executable, "inner.py"])
""",
    "a thread": """
import concurrent.futures
concurrent.futures.ThreadPoolExecutor(1).submit(lambda: __import__("inner").train()).result()
""",
    "imported by a thread": """
import threading
first = threading.Thread(target=__import__, args=("inner",))
first.start()
first.join()
import inner
inner.train()
""",
    "os.fork": """
import os, sys
if not os.fork():
    import inner
    inner.train()
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    "torchrun": """
import subprocess, sys
run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "inner.py"]
sys.exit(subprocess.run(run).returncode)
""",
    "accelerate": """
import subprocess, sys
run = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "inner.py"]
sys.exit(subprocess.run(run).returncode)
""",
    **{
        f"multiprocessing {method}": f"""
import inner, multiprocessing, sys
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=inner.train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
        for method in ("spawn", "fork", "forkserver")
    },
    "torch.multiprocessing spawn": """
import inner, torch
def run(rank):
    inner.train()
if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=1)
""",
}
SHORT = {("multiprocessing fork", "ranks", "virtual"), ("subprocess", "self", "none")}


def on(devices: str) -> ClusterSpec:
    """Return a node with virtual devices, or with devices that the guard does not cap, like real ones."""
    made = cluster("64MiB" if devices == "virtual" else "80GiB")
    if devices == "virtual":
        return made
    (node,) = made.nodes
    real = node.device.model_copy(update={"kind": DeviceKind.CUDA})
    return made.model_copy(update={"nodes": (node.model_copy(update={"device": real}),)})


def attempt_of(
    tmp_path: Path, devices: str, command: str, **changes: object
) -> tuple[Attempt, Evidence]:
    """Return a job's only attempt and its evidence."""
    (tmp_path / "inner.py").write_text(INNER)
    fields = {
        "name": "way",
        "command": command,
        "workdir": str(tmp_path),
        "global_batch_size": 1,
        "probe": "never",
    }
    job = Drive(tmp_path / "home", on(devices)).run(
        JobSpec.model_validate({**fields, "retries": {"oom": 0, "preemption": 0}, **changes})
    )
    (only,) = job.attempts
    assert only.evidence is not None
    return only, only.evidence


@dataclass(frozen=True)
class RenderedCommand:
    """The guard's reports of an attempt."""

    unwatched: tuple[str, ...]
    ranks: tuple[
        tuple[int, int, bool], ...
    ]  # each with its steps, and whether it reported its torch version
    ooms: tuple[
        tuple[int, int, int | None, str], ...
    ]  # rank, step, bytes asked for, and the first word of the error
    measured: bool  # whether it has a peak: only a virtual device has one here
    failure: FailureKind | None


def reports_of(only: Attempt, evidence: Evidence) -> RenderedCommand:
    return RenderedCommand(
        unwatched=evidence.unwatched,
        ranks=tuple(
            (beat.rank, beat.steps_done, bool(beat.torch_version)) for beat in evidence.heartbeats
        ),
        ooms=tuple(
            (oom.rank, oom.step, oom.requested_bytes, oom.message.split()[0])
            for oom in evidence.ooms
        ),
        measured=any(beat.peak_bytes > 0 for beat in evidence.heartbeats),
        failure=only.failure and only.failure.kind,
    )


def expected_reports(devices: str) -> RenderedCommand:
    """Return the reports of one rank: three steps and a fatal error, that of the cap on a virtual device."""
    is_virtual = devices == "virtual"
    return RenderedCommand(
        unwatched=(),
        ranks=((0, 3, True),),
        ooms=((0, 3, 256 * 2**20, "Virtual" if is_virtual else "CUDA"),),
        measured=is_virtual,
        failure=FailureKind.DEVICE_OOM,
    )


@pytest.mark.parametrize(
    ("way", "launch", "devices"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long, id="-".join(case))
        for case in itertools.product(WAYS, ("ranks", "self"), ("virtual", "none"))
    ],
)
def test_a_rank_is_watched(way: str, launch: str, devices: str, tmp_path: Path) -> None:
    if way == "accelerate":
        pytest.importorskip("accelerate")
    (tmp_path / "program.py").write_text(WAYS[way])
    reports = reports_of(*attempt_of(tmp_path, devices, "python program.py", launch=launch))
    assert reports == expected_reports(devices), log(tmp_path / "home", 1)


CONSOLE = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, '.')\nimport inner\ninner.train()\n"


@pytest.mark.long
@pytest.mark.parametrize("devices", ["virtual", "none"])
@pytest.mark.parametrize("launch", ["ranks", "self"])
def test_a_console_script_is_watched(launch: str, devices: str, tmp_path: Path) -> None:
    program = tmp_path / "trainer"
    program.write_text(CONSOLE)
    program.chmod(0o755)
    reports = reports_of(*attempt_of(tmp_path, devices, str(program), launch=launch))
    assert reports == expected_reports(devices), log(tmp_path / "home", 1)


@pytest.mark.long
@pytest.mark.parametrize("devices", ["virtual", "none"])
@pytest.mark.parametrize("launch", ["ranks", "self"])
@pytest.mark.parametrize("flags", ["-I", "-E", "-S", "-P", "-m", "-IS"])
def test_the_program_is_watched_under_any_interpreter_flags(
    flags: str, launch: str, devices: str, tmp_path: Path
) -> None:
    packages = [path for path in sys.path if "site-packages" in path]
    (tmp_path / "program.py").write_text(
        f"import sys\nsys.path += {[str(tmp_path), *packages]}\nimport inner\ninner.train()"
    )
    program = "-m program" if flags == "-m" else f"{flags} program.py"
    reports = reports_of(*attempt_of(tmp_path, devices, f"python {program}", launch=launch))
    assert reports == expected_reports(devices), log(tmp_path / "home", 1)


@pytest.mark.long
@pytest.mark.parametrize("devices", ["virtual", "none"])
def test_an_interpreter_of_another_environment_is_watched_and_runs_its_own_sitecustomize(
    devices: str, tmp_path: Path
) -> None:
    """Python runs two modules at start-up: one on the user's path, one in the user's folder."""
    packages = os.pathsep.join(path for path in sys.path if "site-packages" in path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sitecustomize.py").write_text(
        "import torch, sys\nsys.mine = True\nvalue = 7\n"
    )
    home = (
        tmp_path
        / "base"
        / "lib"
        / f"python{sys.version_info[0]}.{sys.version_info[1]}"
        / "site-packages"
    )
    home.mkdir(parents=True)
    (home / "usercustomize.py").write_text("import sys\nsys.users = True\n")
    (tmp_path / "program.py").write_text(
        "import inner, sitecustomize, sys\nassert sys.mine and sys.users and sitecustomize.value == 7\ninner.train()\n"
    )
    env = {
        "PYTHONPATH": f"{tmp_path / 'mine'}{os.pathsep}{packages}",
        "PYTHONUSERBASE": str(tmp_path / "base"),
    }
    command = f"{sys._base_executable} program.py"  # type: ignore[attr-defined]
    reports = reports_of(*attempt_of(tmp_path, devices, command, launch="self", env=env))
    assert reports == expected_reports(devices), log(tmp_path / "home", 1)


UNWATCHED = """
import subprocess, sys
sys.exit(subprocess.run([{words}]).returncode)
"""
INNER_UNSEEN = """
import sys, time
sys.path += {paths}
{compiler}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.zeros(1, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    ("command", "devices"),
    [
        ("sys.executable, '-I', 'unseen.py'", "virtual"),
        pytest.param("sys.executable, '-I', 'unseen.py'", "none", marks=pytest.mark.long),
        pytest.param("sys.executable, '-S', 'unseen.py'", "virtual", marks=pytest.mark.long),
        pytest.param("'env', '-i', sys.executable, 'unseen.py'", "virtual", marks=pytest.mark.long),
        pytest.param("'env', '-i', sys.executable, 'unseen.py'", "none", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("launch", ["ranks", pytest.param("self", marks=pytest.mark.long)])
def test_a_child_without_the_guard_is_recorded(
    launch: str, command: str, devices: str, tmp_path: Path
) -> None:
    packages = [path for path in sys.path if "site-packages" in path]
    (tmp_path / "unseen.py").write_text(
        INNER_UNSEEN.format(paths=packages, compiler=WITHOUT_COMPILER)
    )
    (tmp_path / "program.py").write_text(UNWATCHED.format(words=command))
    only, evidence = attempt_of(tmp_path, devices, "python program.py", launch=launch)
    (sentence,) = evidence.unwatched
    assert "unseen.py" in sentence
    assert only.peak_bytes is None
    if devices == "virtual":
        assert only.failure is not None
        assert only.failure.kind is FailureKind.GUARD_ABSENT
        assert "unseen.py" in only.failure.reason
    else:
        assert only.failure is None
