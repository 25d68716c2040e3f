"""A real PostgreSQL for tests: a server of its own in a folder, ended with the tests."""

from __future__ import annotations

import ctypes
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "p4ss-w0rd"  # must never be shown
TIMEOUT_S = 60
PR_SET_PDEATHSIG = 1


def programs() -> Path | None:
    """The folder of initdb and postgres, where this machine has a PostgreSQL."""
    initdb = shutil.which("initdb")
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(initdb).resolve().parent if initdb else versions[-1].parent if versions else None


def owner() -> str | None:
    """Return the user who runs the server, which refuses root; None where there is no such user."""
    if os.getuid() != 0:
        return pwd.getpwuid(os.getuid()).pw_name
    return "postgres" if any(user.pw_name == "postgres" for user in pwd.getpwall()) else None


class Server:
    """Gives out empty databases."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._numbers = itertools.count(1)

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql+psycopg://orc:{password}@127.0.0.1:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of a new one."""
        import psycopg

        name = f"journal{next(self._numbers)}"
        with psycopg.connect(self.url().replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return self.url(name)


@contextmanager
def running() -> Iterator[Server]:
    """A server, from its birth to its end."""
    folder, user = programs(), owner()
    assert folder is not None
    assert user is not None
    with tempfile.TemporaryDirectory(prefix="orcpg") as home:
        os.chown(home, pwd.getpwnam(user).pw_uid, -1)
        data, secret = Path(home, "data"), Path(home, "secret")
        secret.write_text(PASSWORD)
        os.chown(secret, pwd.getpwnam(user).pw_uid, -1)

        def run(*command: str) -> None:
            done = subprocess.run(
                command,
                user=user,
                cwd=home,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr

        run(
            f"{folder}/initdb",
            "-D",
            str(data),
            "-U",
            "orc",
            "-A",
            "scram-sha-256",
            f"--pwfile={secret}",
            "-E",
            "UTF8",
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": home}
        server = subprocess.Popen(
            [
                f"{folder}/postgres",
                "-D",
                str(data),
                *(f"--{name}={value}" for name, value in settings.items()),
            ],
            user=user,
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        try:
            _await(Server(port))
            yield Server(port)
        finally:
            server.send_signal(signal.SIGQUIT)  # at once: nobody needs its data
            server.wait(TIMEOUT_S)


def _die_with_parent() -> None:
    """Tests that are killed leave no server behind."""
    ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _await(server: Server) -> None:
    """Wait until the database answers: its port is open before."""
    import psycopg

    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            psycopg.connect(server.url().replace("+psycopg", "")).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline_s, "PostgreSQL does not come up"
            time.sleep(0.05)
