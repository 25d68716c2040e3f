"""Shell completion of job ids, for `orc --install-completion`."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from orchestrator.specs.errors import OrchestratorError

ENDED_OFFERED = 50


def complete_job_id(context: typer.Context, incomplete: str) -> list[str]:
    """Return the ids of live and recently ended jobs that begin with this text; [] if the service
    does not answer.
    """
    from orchestrator.service.client.client import Client
    from orchestrator.service.client.logins import find_login
    from orchestrator.specs.run import DEFAULT_HOME

    url = context.find_root().params.get("server") or os.environ.get("ORC_SERVER")
    home = Path(context.params.get("home") or os.environ.get("ORC_HOME") or DEFAULT_HOME)
    try:
        client = Client(find_login(url) if url else home.expanduser())
        return [
            job["id"] for job in client.list_jobs(ENDED_OFFERED) if job["id"].startswith(incomplete)
        ]
    except OrchestratorError:
        return []
