"""The process of a home's own MLflow server: one worker on a socket file in its working directory."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import uvicorn

from orchestrator.backends.mlflow.server import SOCKET

UNUSED = (
    "pyarrow",
    "scipy",
    "pygments",
)  # 30 MB that libraries of MLflow import where they find it, for nothing here


def serve_mlflow() -> None:
    """Serve MLflow until SIGTERM. Only this process's user may open the socket file and other
    files.
    """
    sys.modules.update(dict.fromkeys(UNUSED))  # type: ignore[arg-type]  # None: the import fails
    os.umask(0o077)
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores()  # else the first requests do it, several at once
    with suppress(FileNotFoundError):  # of a server that was killed
        os.unlink(SOCKET)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SOCKET)  # in this folder: its whole path may be too long
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listener])


if __name__ == "__main__":
    serve_mlflow()
