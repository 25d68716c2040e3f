"""A process that forks a service for every home on its input, so that a kill hits the service, not imports.

Answers each line with the service's pid, and then with how it ended. The service is the real one (journal, controller,
HTTP), on a world that is a folder.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from orchestrator.backends.journal.journal import Journal
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.routes.api import create_app
from tests.scheduling.world import cluster, device
from tests.service.folder_world import FolderBackend
from tests.service.services import service_of

CLUSTER = cluster(("node", 2, 2, device("small", "512MiB")))


def serve(home: Path) -> None:
    """Serve until killed."""
    with closing(Journal(f"sqlite:///{home / 'journal.sqlite'}")) as journal:
        controller = Controller(journal, FolderBackend(home / "world", CLUSTER), time.time)
        token = (home / "token").read_text()
        service = service_of(controller, journal, home, token=token, cluster=CLUSTER.name)
        with serve_http(create_app(service)) as port:
            write_service_file(home, port)
            controller.run(threading.Event())


if __name__ == "__main__":
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(Path(line.strip()))
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
