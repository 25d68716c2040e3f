"""An application over a simulated cluster, for tests of its routes and pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.oidc.provider import Provider
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.pages.routes import PAGES_OF_SERVICE
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.routes.api import create_app
from orchestrator.specs.access import Role
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.keep import UNLIMITED, KeepSpec
from orchestrator.specs.parse import parse_job
from orchestrator.specs.policy import UNSHARED, PolicySpec
from tests.scheduling.faulty_world import FaultyBackend
from tests.service.services import TOKEN, new_journal, service_of

JOB = """\
name: lm
gpus: 1
global_batch_size: 8
model:
  decoder: {vocab_size: 64, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [/proc/version], sequence_length: 32}
"""


class World:
    """An application over a simulated cluster, and its clients."""

    def __init__(
        self,
        home: Path,
        policy: PolicySpec = UNSHARED,
        provider: Provider | None = None,
        mlflow: str = "http://127.0.0.1:1",
        keep: KeepSpec = UNLIMITED,
        users: Mapping[str, UserSpec] | None = None,
    ) -> None:
        self.home = home
        self.journal = new_journal(home)
        cluster = read_cluster(None).model_copy(update={"policy": policy})
        backend = FaultyBackend(cluster, seed=0, hazards={}, repeat_chance=0.0)
        self.controller = Controller(self.journal, backend, backend.current_time_s)
        self.controller.run_once(1.0)
        self.ended = False
        self.now_s = 1e9
        self.accounts = Accounts(self.journal.database.transaction, lambda: self.now_s)
        service = service_of(
            self.controller,
            self.journal,
            home,
            keep,
            accounts=self.accounts,
            cluster="two-virtual-devices",
            trackers={"mlflow": mlflow},
            shut_down=self._shut_down,
            pages=PAGES_OF_SERVICE,
            provider=provider,
            users=users or {},
        )
        self.app = app = create_app(service)
        self.stranger = TestClient(
            app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False
        )
        self.client = TestClient(
            app, base_url="http://127.0.0.1:8000", headers={"Authorization": f"Bearer {TOKEN}"}
        )

    def _shut_down(self) -> None:
        self.ended = True

    def by(self, role: Role, name: str = "ada") -> TestClient:
        """A client with a token of a user of this role."""
        self.accounts.set_user(name, role)
        secret, _ = self.accounts.create_token(name, 3600.0)
        return TestClient(
            self.app,
            base_url="http://127.0.0.1:8000",
            headers={"Authorization": f"Bearer {secret}"},
        )

    def submit(self) -> str:
        answer = self.client.post("/jobs", json={"spec": job_spec()})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def turn_until(self, status: str, count: int = 1) -> None:
        for _ in range(2000):
            jobs = (*self.controller.state.jobs.values(), *self.controller.list_ended_jobs(99))
            if sum(job.status == status for job in jobs) >= count:
                return
            self.controller.run_once(10.0)
        raise AssertionError(f"no job became {status}")


def job_spec() -> dict[str, Any]:
    """Return the body of a submission of JOB."""
    return parse_job(JOB, "job.yaml").model_dump(mode="json")
