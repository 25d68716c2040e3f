"""Several hosts on this machine: each has an address, a host name, processes, /tmp and /dev/shm of its own.

A host is a network namespace on a common bridge, with a mount, a UTS and a PID namespace of its own. The first process
of its PID namespace holds it: what runs on the host ends with it. Files outside /tmp are shared, as on NFS.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.commands import COMMAND_S, CommandServer

READY_S = 10.0
DISK = "4G"  # as much as is written of it takes room
# What a host's own /tmp must not hide, where the clone or its environment lies below /tmp.
PROGRAMS = (
    Path(__file__).parents[1].resolve(),
    Path(sys.prefix).resolve(),
    Path(sys.executable).parent.absolute(),
)
INIT = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.sigwait([signal.SIGUSR2])"
)
_numbers = itertools.count()


def why_not() -> str | None:
    """Why this machine cannot have hosts; None where it can."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"no {missing[0]} on this machine"
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True
    )
    return (
        None
        if tried.returncode == 0
        else f"namespaces are not permitted: {tried.stderr.decode().strip()}"
    )


@dataclass(slots=True)
class Host:
    """A machine of its own, as far as its programs can tell."""

    name: str
    address: str
    interface: str  # its end in the namespace of the bridge
    shared: Path  # as every host sees it
    init: subprocess.Popen[bytes]
    env: dict[str, str] = field(default_factory=dict)
    server: CommandServer | None = None  # of its commands, once there was one

    def command(self, *arguments: str) -> list[str]:
        """The words as a command that runs on this host."""
        return [
            "nsenter",
            "--target",
            str(first_child(self.init.pid)),
            "--mount",
            "--uts",
            "--pid",
            "--net",
            "--",
            *arguments,
        ]

    def run(
        self,
        *arguments: str,
        code: int | None = 0,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end. Fails the test where it ends with another exit code; None: with any."""
        ended = subprocess.run(
            self.command(*arguments),
            env={**_clean(), **self.env, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert code is None or ended.returncode == code, (
            self.name,
            arguments,
            ended.stdout,
            ended.stderr,
        )
        return ended

    def orc(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> Any:
        """Return a command's JSON answer, or its output where it fails."""
        if self.server is None:
            path = Path(tempfile.mkdtemp(dir=self.shared)) / "socket"
            self.server = CommandServer(path, self.command(), {**_clean(), **self.env})
        variables = {**_clean(), **self.env, **(env or {})}
        if not self.server.can_run(variables):
            ended = self.run(
                sys.executable, "-m", "orchestrator.cli", *arguments, "--json", code=code, env=env
            )
            return ended.stderr if code else json.loads(ended.stdout)
        ended = self.server.run([*arguments, "--json"], env=variables)
        assert ended.returncode == code, (self.name, arguments, ended.stdout, ended.stderr)
        return ended.stderr if code else json.loads(ended.stdout)

    def cut(self) -> None:
        """Take the host off the network."""
        subprocess.run(["ip", "link", "set", self.interface, "down"], check=True)

    def heal(self) -> None:
        """Put the host on the network again."""
        subprocess.run(["ip", "link", "set", self.interface, "up"], check=True)

    def fill_disk(self) -> bool:
        """Leave no room in the host's /tmp; whether it was possible. What writes may be faster."""
        used = self.run("df", "--block-size=1", "--output=used", "/tmp").stdout.split()[-1]
        return self.run("mount", "-o", f"remount,size={used}", "/tmp", code=None).returncode == 0

    def empty_disk(self) -> None:
        """Give the host's /tmp its room back."""
        self.run("mount", "-o", "remount,size=50%", "/tmp")

    def kill(self) -> None:
        """End every process of the host at once, as a power cut does."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(first_child(self.init.pid), signal.SIGKILL)
        self.init.wait(READY_S)


@contextmanager
def hosts(names: Sequence[str], *, own_disk: bool = False) -> Iterator[dict[str, Host]]:
    """Hosts of these names on a bridge of their own, with a shared folder; all of it is removed at the end.

    With `own_disk` the folder is a file system of its own, which fsfreeze(8) can hold up. Skips the test where the
    machine does not permit it.
    """
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    mark = f"{os.getpid() % 10000}x{next(_numbers)}"  # names of interfaces end at 15 characters
    net = f"10.{77 + os.getpid() % 100}.{next(_numbers) % 250}"
    bridge, shared = f"orcb{mark}", Path(tempfile.mkdtemp(prefix="orc-shared-", dir="/var/tmp"))
    by_name: dict[str, Host] = {}
    try:
        if own_disk:
            _mount_disk(shared)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        _ip("addr", "add", f"{net}.254/24", "dev", bridge)  # the test reaches every host
        addresses = {name: f"{net}.{number}" for number, name in enumerate(names, 1)}
        for number, name in enumerate(names, 1):
            others = (
                f"{address} {other}\n" for other, address in addresses.items() if other != name
            )
            loopback = f"127.0.0.1 localhost\n127.0.1.1 {name}\n"  # as Debian has it
            (shared / f"{name}.hosts").write_text(loopback + "".join(others))
            by_name[name] = _host(name, addresses[name], bridge, f"orc{mark}h{number}", shared)
        yield by_name
    finally:
        for host in by_name.values():
            host.kill()
            _ip("netns", "del", host.interface, check=False)
            _ip("link", "del", host.interface, check=False)
        _ip("link", "del", bridge, check=False)
        if own_disk:
            subprocess.run(["umount", "--lazy", str(shared)], check=False, capture_output=True)
            shared.with_suffix(".disk").unlink(missing_ok=True)
        shutil.rmtree(shared, ignore_errors=True)


def _mount_disk(folder: Path) -> None:
    """Mount an empty file system at a folder, from a file beside it."""
    file = str(folder.with_suffix(".disk"))
    for command in (
        ("truncate", "--size", DISK, file),
        ("mkfs.ext4", "-q", file),
        ("mount", "-o", "loop", file, str(folder)),
    ):
        tried = subprocess.run(command, capture_output=True, text=True)
        if tried.returncode != 0:
            pytest.skip(f"no disk of its own: {tried.stderr.strip()}")


def _host(name: str, address: str, bridge: str, interface: str, shared: Path) -> Host:
    """Start a host; its network namespace has the name of its interface."""
    _ip("netns", "add", interface)
    _ip("link", "add", interface, "type", "veth", "peer", "name", "e0", "netns", interface)
    _ip("link", "set", interface, "master", bridge, "up")
    _ip("-n", interface, "addr", "add", f"{address}/24", "dev", "e0")
    for device in ("e0", "lo"):
        _ip("-n", interface, "link", "set", device, "up")
    ready = shared / f"{name}.ready"
    # The first process adopts every orphan; one that ignores SIGCHLD leaves no zombie of it.
    covered = {
        Path("/tmp", path.relative_to("/tmp").parts[0])
        for path in PROGRAMS
        if path.is_relative_to("/tmp")
    }
    spared = [
        (folder, shared / f"{name}.spared{number}") for number, folder in enumerate(sorted(covered))
    ]
    aside = "".join(
        f"mkdir -p {spare} && mount --bind {folder} {spare} && " for folder, spare in spared
    )
    back = "".join(
        f"mkdir -p {folder} && mount --bind {spare} {folder} && " for folder, spare in spared
    )
    script = (
        f"hostname {name} && {aside}mount -t tmpfs tmpfs /tmp && {back}mount -t tmpfs tmpfs /dev/shm && "
        f"mount --bind {shared / f'{name}.hosts'} /etc/hosts && touch {ready} && "
        f"exec {sys.executable} -c '{INIT}'"
    )
    spaces = (
        "unshare",
        "--mount",
        "--propagation=private",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    )
    command = ["ip", "netns", "exec", interface, *spaces, "sh", "-c", script]
    init = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(int(READY_S / 0.05)):
        if ready.exists():
            return Host(name, address, interface, shared, init)
        with contextlib.suppress(subprocess.TimeoutExpired):
            init.wait(0.05)
            break
    raise AssertionError(f"host {name} did not come up")


def first_child(pid: int) -> int:
    """Return the id, here, of the process that `unshare` or `nsenter` of this id started in a PID namespace."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise ProcessLookupError(pid)
    return int(children[0])


def _clean() -> dict[str, str]:
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("ORC_", "RAY_", "XDG_"))
    }


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
