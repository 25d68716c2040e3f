"""Connection to an MLflow server, with bounded requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.backends.mlflow.server import HOST

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "orchestrator"
REQUEST_TIMEOUT_S = 5


def limit_mlflow_requests() -> None:
    """Set timeouts and retries of MLflow's client, and bypass proxies for servers on this machine."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = (
        "0"  # the relay's are longer apart; the default waits 4 minutes
    )
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_TIMEOUT_S)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = (
        "true"  # for which it would ask for each run that ends
    )
    hosts = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    os.environ["no_proxy"] = ",".join(
        filter(None, dict.fromkeys((*hosts, "127.0.0.1", "localhost", HOST)))
    )


class Contact:
    """Connection to an MLflow server, with a cache of run ids. It is replaced after any error."""

    def __init__(self, tracking_uri: str) -> None:
        from mlflow import MlflowClient  # 2 s of imports, in the relay's thread

        self.client: MlflowClient = MlflowClient(tracking_uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        self.experiment_id: str = (
            experiment.experiment_id if experiment else self.client.create_experiment(EXPERIMENT)
        )
        self.run_ids: dict[str, str] = {}
        self.closed: set[str] = set()  # keys of runs that are complete

    def find_or_create_run(
        self, run_key: str, start_ms: int, tags: Mapping[str, str], run_name: str
    ) -> Run:
        """Return the run whose tag `orc.run` is this key; create it with these tags if there is
        none.

        `start_ms` is the run's start in milliseconds since 1970.
        """
        first = self.find_run(run_key)
        if first is not None:
            return first
        run = self.create_run(start_ms, tags, run_name)
        return (
            self.find_run(run_key) or run
        )  # another service may have created one since, and this one been frozen

    def create_run(self, start_ms: int, tags: Mapping[str, str], run_name: str) -> Run:
        """Create a run, and return it. `start_ms` is its start in milliseconds since 1970."""
        return self.client.create_run(
            self.experiment_id, start_time=start_ms, tags=dict(tags), run_name=run_name
        )

    def find_run(self, run_key: str) -> Run | None:
        """Return the run whose tag `orc.run` is this key; None without one. If there are several,
        all but one are deleted.

        Duplicates come from a creation that timed out but succeeded, or from a service that was
        frozen. Every service leaves the same run: the one that has ended, else the first by id.
        """
        runs = self.client.search_runs(
            [self.experiment_id], f"tags.`orc.run` = '{run_key}'", max_results=100
        )
        first, *others = sorted(
            runs, key=lambda run: (run.info.end_time is None, run.info.run_id)
        ) or (None,)
        for other in others:
            assert other is not None
            self.client.delete_run(other.info.run_id)
        return first
