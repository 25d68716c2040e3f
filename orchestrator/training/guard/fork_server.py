"""A process that has imported torch and the guard, and forks ranks: `fork_server.py NAME FILLER`

The launcher starts it in a rank's own interpreter, and asks it over an abstract socket (backends/attempts/forks.py).
No program of a job runs in it. Any doubt is an answer {"why": text}; the launcher then starts the rank plainly.

server   one thread: it imports, then forks a holder for each request
holder   the parent of one rank: it tells the rank's exit code; where the launcher ends, it ends, and the rank with it
rank     becomes what a fresh process would be, waits for the launcher's word, and runs guard.py's `main`
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.specs.json_object import JsonObject

GUARD = Path(__file__).resolve().with_name("guard.py")
MODULES = (
    "orchestrator.training.guard.failure_reporter",
    "torch",
    "torch.distributed",
    "torch.optim.optimizer",
    "torch.utils.data._utils.worker",
    "orchestrator.training.guard.virtual_device",
)
MARK = "ORC_LAUNCHER"  # the last variable here: a rank's own take its room in /proc/PID/environ
IDLE_S = 300.0  # since the last request
LOOK_S = 10.0
REQUEST_S = 5.0
REQUEST_BYTES_MAX = 2**20
AVAILABLE_MIN = 0.05  # of the machine's memory: with less, the server ends
PR_SET_PDEATHSIG = 1
# arg_start and env_start behind the name, proc(5)
ARGUMENTS_FIELD = 45
ENVIRONMENT_FIELD = 47


class Request(NamedTuple):
    """A rank to fork: its connection to the launcher, command, folder, own variables and log."""

    connection: socket.socket
    log: int
    argv: list[str]
    workdir: str
    env: dict[str, str]


class ForkRefused(Exception):
    """A reason not to fork the rank; the launcher then starts a new interpreter."""


def main() -> None:
    """Serve under the socket name in `sys.argv[1]` until idle; in a forked rank, run the rank's
    program and return.

    Returns at once where another process has the name.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind("\0" + sys.argv[1])
        except OSError:  # another process has the name
            return
        listener.listen(64)
        if os.fork():
            os._exit(0)  # the launcher waits for this one only
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for holders
        request = _serve_requests(listener)
    if request is None:
        os._exit(0)
    _run_guard(request)


class ImportedModules:
    """The modules that this server has imported, and why a process with them must not be forked, if
    so.
    """

    def __init__(self) -> None:
        before = _list_open_descriptor_numbers()
        printed = os.memfd_create("printed")
        for stream in (1, 2):
            os.dup2(printed, stream)
        self._doubt = ""
        try:
            self._import_all()
        except Exception as error:  # no torch, or one that is too old
            self._doubt = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fstat(printed).st_size:
            self._doubt = self._doubt or "importing torch prints"
        for stream in (1, 2):
            os.dup2(0, stream)
        os.close(printed)
        if _list_open_descriptor_numbers() != before:
            self._doubt = self._doubt or "importing torch opens files"
        self.names = {name.partition(".")[0] for name in sys.modules}
        self._files = {path: _make_file_stamp(path) for path in self._list_watched_paths()}
        gc.collect()
        gc.freeze()  # the collector of a rank does not copy these pages

    def _import_all(self) -> None:
        name = "_orchestrator_guard"  # as in a fresh rank
        spec = importlib.util.spec_from_file_location(name, GUARD)
        assert spec is not None, GUARD
        assert spec.loader is not None, GUARD
        self.guard = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.guard)
        sys.path.pop(0)  # the folder of this file
        self.guard._make_package_importable()
        for module in MODULES:
            importlib.import_module(module)
        if sys.modules["torch"].cuda.is_initialized():
            self._doubt = "importing torch initialises CUDA"
        child = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when needed
        if not child:
            os._exit(0)

    def _list_watched_paths(self) -> list[str]:
        """Return the files of the imported modules, and the folders in which modules are searched."""
        files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        return [*filter(None, files), *sys.path]

    def is_stale(self) -> bool:
        """Return whether a file of a module was changed since it was imported."""
        return any(_make_file_stamp(path) != stamp for path, stamp in self._files.items())

    def find_fork_obstacle(self) -> str:
        """Return why no rank can be forked from this process now; "" where one can."""
        if self._doubt:
            return self._doubt
        threads = len(os.listdir("/proc/self/task"))
        return f"the server has {threads} threads" if threads > 1 else ""


def _serve_requests(listener: socket.socket) -> Request | None:
    """Answer the launcher until idle, stale or short of memory, then return None. In a forked rank,
    return its request.
    """
    imports = ImportedModules()
    last_s = time.monotonic()
    while time.monotonic() - last_s < IDLE_S and not _is_short_of_memory():
        if not select.select([listener], [], [], LOOK_S)[0]:
            continue
        last_s = time.monotonic()
        connection, _ = listener.accept()
        connection.settimeout(REQUEST_S)
        if (
            read_peer_user_id(connection) != os.geteuid()
        ):  # an abstract name is open to every local user
            connection.close()
            continue
        try:
            message, logs, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 1)
            request = Request(connection, logs[0], **json.loads(message))
        except (OSError, ValueError, IndexError, TypeError):  # a launcher that went away
            connection.close()
            continue
        is_stale = imports.is_stale()
        doubt = "installed files changed" if is_stale else imports.find_fork_obstacle()
        if doubt:
            _send_answer(connection, {"why": doubt})
        elif not os.fork():
            listener.close()
            _fork_rank_and_wait(request, imports)
            return request
        connection.close()
        os.close(request.log)
        if is_stale:
            return None
    return None


def read_peer_user_id(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of the connection."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", peer)[1])


def _fork_rank_and_wait(request: Request, imports: ImportedModules) -> None:
    """Fork the rank, and return in the rank's process alone. The parent waits for the rank, reports
    its exit code, and exits.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection = request.connection
    holder = os.getpid()
    connection.settimeout(None)
    rank = os.fork()
    if not rank:
        _become_rank(request, imports, holder)
        return
    os.close(request.log)
    watched = select.poll()
    watched.register(connection, select.POLLRDHUP)  # the launcher ended
    watched.register(os.pidfd_open(rank), select.POLLIN)
    watched.poll()
    # It stays a zombie until the launcher knows: nobody else gets its number.
    ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if ended is not None:
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _send_answer(connection, {"code": code})
        connection.recv(1)  # the launcher hangs up
    os._exit(0)  # a rank that lives ends by its PR_SET_PDEATHSIG


def _become_rank(request: Request, imports: ImportedModules, holder_pid: int) -> None:
    """Make this process the requested rank, and return when the launcher says so; otherwise end the
    process.
    """
    try:
        _take_over_request(request, imports, holder_pid)
    except Exception as error:  # nothing of the program has run
        _send_answer(request.connection, {"why": f"{type(error).__name__}: {error}"})
        os._exit(1)
    _send_answer(request.connection, {"pid": os.getpid()})
    if not request.connection.recv(16):
        os._exit(1)
    request.connection.close()


def _take_over_request(request: Request, imports: ImportedModules, holder_pid: int) -> None:
    """Set folder, variables, streams and modules as the launcher would for a fresh process. Raises
    ForkRefused or OSError.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != holder_pid:
        raise ForkRefused("its holder ended")
    os.setsid()
    os.chdir(request.workdir)
    folder = request.workdir
    if request.argv[4] != "-m":
        folder = os.path.dirname(os.path.realpath(request.argv[4]))
    hidden = imports.names & {name.partition(".")[0] for name in os.listdir(folder)}
    if hidden:
        raise ForkRefused(
            f"{folder} has a module {min(hidden)!r}, which was imported from elsewhere"
        )
    imports.guard._map_settings_file(
        request.argv[2]
    )  # before it can be counted as a process of the attempt
    for stream in (1, 2):
        os.dup2(request.log, stream)
    os.close(request.log)
    del os.environ[MARK]
    os.environ.update(request.env)
    variables = [f"{name}={value}" for name, value in request.env.items()]
    shown = Path("/proc/self/environ").read_bytes()
    _rewrite_proc_field("environ", ENVIRONMENT_FIELD, shown.rindex(f"{MARK}=".encode()), variables)
    _rewrite_proc_field("cmdline", ARGUMENTS_FIELD, 0, request.argv)
    _reseed()


def _rewrite_proc_field(
    proc_file: str, field_number: int, offset: int, shown_words: list[str]
) -> None:
    """Make the kernel show `shown_words` in /proc/PID/`proc_file` from `offset` on, as in a fresh
    process. Raises ForkRefused.
    """
    path = Path("/proc/self") / proc_file
    shown = path.read_bytes()
    text = b"".join(os.fsencode(word) + b"\0" for word in shown_words)
    room = len(shown) - offset
    if len(text) > room:
        raise ForkRefused(f"its {proc_file} is too long")
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    text = text.ljust(room, b"\0")
    ctypes.memmove(int(fields[field_number]) + offset, text, room)
    if path.read_bytes() != shown[:offset] + text:
        raise ForkRefused(f"its {proc_file} cannot be rewritten")


def _reseed() -> None:
    """Draw new random seeds, as a fresh process does; `random` draws its own after a fork."""
    modules: dict[str, Any] = sys.modules
    modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _run_guard(request: Request) -> None:
    """Run the guard with the rank's program, as `python guard.py GUARD_JSON -- ...` does."""
    sys.orig_argv = list(request.argv)
    sys.argv = request.argv[1:]
    sys.path.insert(0, str(GUARD.parent))
    importlib.invalidate_caches()
    sys.modules["_orchestrator_guard"].main(request.argv[2:])


def _send_answer(connection: socket.socket, message: JsonObject) -> None:
    with contextlib.suppress(OSError):  # the launcher went away
        connection.send(json.dumps(message).encode())


def _list_open_descriptor_numbers() -> set[str]:
    """Return the numbers of this process's open file descriptors, as text."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def _make_file_stamp(path: str) -> tuple[int, ...]:
    """Return numbers that change with a file's content or a folder's entries; () where there is
    none.
    """
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _is_short_of_memory() -> bool:
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(sizes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return available < AVAILABLE_MIN * total


if __name__ == "__main__":
    main()
