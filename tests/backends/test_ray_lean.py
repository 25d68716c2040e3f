"""Laws of a Ray that starts with the processes that are needed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray import _raylet
from ray._private import services

import orchestrator
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.backends.ray import lean
from tests.backends.conftest import Embedded
from tests.backends.ray_jobs import CLUSTER

SUPERFLUOUS = (
    "dashboard/dashboard.py",
    "dashboard/agent.py",
    "monitor.py",
    "runtime_env/agent/main.py",
)
BREAKS_LEAN = """
import orchestrator.backends.ray.lean as lean
lean.UNUSED_PORT = "no number"
"""


def _commands(home: Path) -> list[str]:
    """Return the command lines of all processes of the home's Ray."""
    state = embedded_ray.read_record(home)
    assert state is not None
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
        if state["temp_dir"] in command:
            commands.append(command)
    return commands


@pytest.mark.usefixtures("reader")
def test_a_node_runs_jobs_without_api_server_monitor_and_agents(embedded: Embedded) -> None:
    commands = _commands(embedded.home)
    raylets = [command for command in commands if "/raylet/raylet " in command]
    assert len(raylets) == sum(node.count for node in CLUSTER.nodes)
    assert [command for command in commands if command.split()[1].endswith(SUPERFLUOUS)] == []
    stand_ins = [command for command in commands if lean.__file__ in command.split()[:4]]
    assert len(stand_ins) == 2 * len(raylets)


def test_a_ray_without_one_of_the_functions_is_left_as_it_is_and_says_which(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = services.start_ray_process
    monkeypatch.delattr(_raylet, "persist_port")
    assert lean.patch_ray_or_explain() == "Ray has no persist_port"
    assert services.start_ray_process is before


@pytest.mark.long
def test_a_node_whose_lean_start_fails_starts_with_all_of_rays_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS_LEAN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    home = tmp_path / "home"
    one_node = type(CLUSTER)(name="alone", nodes=CLUSTER.nodes[:1])
    try:
        address = embedded_ray.start_embedded(home, one_node)
        commands = _commands(home)
        assert embedded_ray.find_local_address(home) == address
        assert any("dashboard/agent.py" in command for command in commands)
    finally:
        embedded_ray.stop_embedded(home)


def test_no_code_of_ours_passes_a_runtime_env() -> None:
    sources = Path(orchestrator.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "runtime_env=" in path.read_text()] == []
