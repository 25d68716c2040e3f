"""Fixtures of this folder: a single embedded Ray cluster and a single PostgreSQL for all its tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from orchestrator.backends.ray import connection
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.backends.ray.backend import RayBackend
from tests.backends import postgres as postgresql
from tests.backends.ray_jobs import CLUSTER, Alone, Reader

NVML_SOURCE = Path(__file__).parent / "fake_nvml" / "nvml.c"


@dataclass(frozen=True, slots=True)
class Embedded:
    """A running cluster, the home that it belongs to, and what its fake NVML reads."""

    home: Path
    address: str
    nvml_state: Path


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a libnvidia-ml.so.1 of our own; empty where no C compiler is."""
    folder = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is not None:
        target = str(folder / "libnvidia-ml.so.1")
        subprocess.run(
            [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-o", target, str(NVML_SOURCE)],
            check=True,
        )
    return folder


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Embedded]:
    home = tmp_path_factory.mktemp("home").resolve()
    state = home / "nvml_state"
    state.write_text("ok\n1000 0 0 -\n1000 500 0 -\n")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_LIBRARY_PATH", str(nvml_library))
            patch.setenv("NVIDIA_FAKE_STATE", str(state))
            address = embedded_ray.start_embedded(home, CLUSTER)
        yield Embedded(home, address, state)
    finally:
        embedded_ray.stop_embedded(home)


@pytest.fixture(scope="session")
def reader(embedded: Embedded) -> Iterator[Reader]:
    connection.connect_to_ray(
        embedded.address, embedded.home
    )  # as the backend's agent: tests look at what it did
    backend = RayBackend(embedded.home, CLUSTER, lambda: embedded.address, Alone())
    reader = Reader(backend)
    reader.await_nodes()
    yield reader
    backend.close()
    ray.shutdown()


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgresql.Server]:
    pytest.importorskip("psycopg")
    if postgresql.programs() is None:
        pytest.skip("this machine has no PostgreSQL: no initdb in PATH")
    if postgresql.owner() is None:
        pytest.skip("PostgreSQL refuses to be run by root, and there is no user postgres")
    with postgresql.running() as server:
        yield server
