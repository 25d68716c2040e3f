"""The one cluster of all laws of this folder: it takes a minute to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.machines import Cluster, cluster


@pytest.fixture(scope="session")
def hosts_of_our_own() -> Iterator[Cluster]:
    with cluster() as made:
        yield made
