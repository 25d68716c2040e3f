"""The service's process, `python -m orchestrator.service.process --home HOME`: the server with its pages."""

from __future__ import annotations

from orchestrator.service.pages.routes import PAGES_OF_SERVICE
from orchestrator.service.server.daemon import main

if __name__ == "__main__":
    main(PAGES_OF_SERVICE)
