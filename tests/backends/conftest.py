"""One embedded Ray cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.backends import ray_cluster
from orchestrator.backends.ray_backend import RayBackend
from tests.backends.ray_jobs import CLUSTER, Reader


@dataclass(frozen=True, slots=True)
class Embedded:
    """A running cluster and the home that it belongs to."""

    home: Path
    address: str


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    home = tmp_path_factory.mktemp("home").resolve()
    try:
        yield Embedded(home, ray_cluster.start(home, CLUSTER))
    finally:
        ray_cluster.stop(home)


@pytest.fixture(scope="session")
def reader(embedded: Embedded) -> Iterator[Reader]:
    backend = RayBackend(embedded.home, CLUSTER, embedded.address)
    yield Reader(backend)
    backend.close()
