"""The service's process, `python -m orchestrator.service.process --home HOME`: the server with its pages."""

from __future__ import annotations

from orchestrator.service.server.own_environment import reexecute_without_secret_variables

if __name__ == "__main__":
    reexecute_without_secret_variables()
    from orchestrator.service.pages.routes import (
        PAGES_OF_SERVICE,
    )  # seconds: once, not before and after
    from orchestrator.service.server.daemon import run_daemon

    run_daemon(PAGES_OF_SERVICE)
