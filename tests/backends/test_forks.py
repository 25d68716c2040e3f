"""Laws of ranks that a server forks: they are as fresh ones, nobody loses sight of them, any doubt is a plain start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts.forks import (
    EARLY,
    GUARD,
    LATE,
    SERVER,
    begins_with_torch,
)
from orchestrator.backends.attempts.launcher import RUN_AS, Launcher, LauncherStatus
from orchestrator.backends.attempts.leftovers import end_leftover_processes
from orchestrator.backends.attempts.process_census import iterate_marked_processes
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.environment import make_base_variables, select_matching
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.run import AttemptFolder, GuardSettings, write_json
from orchestrator.training.guard import fork_server
from tests.backends.ray_jobs import alive, parent_of, until

MIB = 2**20
PACKAGE = Path(__file__).parents[2]
WAIT_S = 60.0


class PlainLauncher(Launcher):
    """A launcher of fresh processes."""

    def _fork_rank_or_explain(self, *_: Any) -> str:
        return "told to"


def launcher_of(home: Path, kind: type[Launcher] = Launcher, **settings: Any) -> Launcher:
    """Return the launcher of an attempt in `home` whose guard has these settings."""
    folder = AttemptFolder(home / "attempts" / "1")
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    settings = {"virtual_capacity_bytes": 100 * MIB, **settings}
    write_json(folder.guard, GuardSettings(attempt_folder=str(folder.path), **settings))
    watched = Watched(node="n0", devices=(0,))
    return kind(str(folder.path), str(home / "epoch"), 1, mark_of(home), watched)


def mark_of(home: Path) -> str:
    return f"{home / 'attempts' / '1'}@n0"


def start(
    launcher: Launcher, home: Path, script: str, argv: tuple[str, ...] = (), **env: str
) -> LauncherStatus:
    """Start a rank of this script's text under the guard; `argv` stands in place of its command."""
    settings = str(home / "attempts" / "1" / "guard.json")
    program = home / "program" / "train.py"
    program.parent.mkdir(exist_ok=True)
    program.write_text(script)
    command = argv or (sys.executable, str(GUARD), settings, "--", str(program), "a", "b c")
    variables = {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", "ORC_GUARD": settings, **env}
    return launcher.start([(0, command, variables)], str(home))


def await_end(launcher: Launcher) -> LauncherStatus:
    return until(
        lambda: launcher.status() if launcher.status()["state"] == "ended" else None,
        "the rank has ended",
        WAIT_S,
    )


def run(home: Path, script: str, kind: type[Launcher] = Launcher, **env: str) -> tuple[str, str]:
    """Return how the rank was started, and its output."""
    home.mkdir(exist_ok=True)
    launcher = launcher_of(home, kind)
    start(launcher, home, script, **env)
    await_end(launcher)
    return start_of(home), log_of(home)


def start_of(home: Path) -> str:
    text = (home / "attempts" / "1" / "starts").read_text()
    return text.removeprefix("rank 0: ").removesuffix("\n")


def log_of(home: Path) -> str:
    return (home / "attempts" / "1" / "rank0.log").read_text()


def servers() -> list[int]:
    """Return the servers and holders of this run of the tests, parents first."""
    group = Path("/proc/self/cgroup").read_text()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_text().split("\0")
            if str(SERVER) in arguments and (entry / "cgroup").read_text() == group:
                pids.append(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return sorted(alive(pids))


@pytest.fixture(scope="module", autouse=True)
def _no_server_stays() -> Iterator[None]:
    yield
    for pid in servers():
        os.kill(pid, signal.SIGKILL)


PROBE = """
import torch
import ctypes, json, os, pickle, resource, signal, sys, threading, warnings

class Model:
    pass

own = "/proc/self/"
status = dict(line.split(":", 1) for line in open(own + "status").read().splitlines())
torch.manual_seed(0)
import numpy  # its library ends its threads before a fork, and starts them when needed
product = numpy.ones((600, 600)) @ numpy.linspace(0, 1, 360000).reshape(600, 600)
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "executable": [sys.executable, sys.prefix, sys._base_executable], "cwd": os.getcwd(),
    "variables": sorted(os.environ.items()),
    "environ": sorted(set(open(own + "environ").read().split(chr(0)))),
    "cmdline": open(own + "cmdline").read().rstrip(chr(0)),
    "names": [open(own + "comm").read(), os.readlink(own + "exe")],
    "main": [__name__, __file__, __spec__, sys.modules["__main__"].__dict__ is globals()],
    "pickled": type(pickle.loads(pickle.dumps(Model()))).__name__,
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 65)],
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "rights": [status[name] for name in ("Uid", "Gid", "Groups", "Umask", "CapEff", "Seccomp")],
    "places": [status["Cpus_allowed"], open(own + "cgroup").read(), os.getpriority(0, 0)],
    "oom": open(own + "oom_score_adj").read(),
    "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "streams": [os.readlink(own + f"fd/{number}") for number in range(3)],
    "texts": [[one.encoding, one.errors, one.line_buffering] for one in (sys.stdout, sys.stderr)],
    "files": len(os.listdir(own + "fd")), "threads": len(os.listdir(own + "task")),
    "compute": [torch.get_num_threads(), torch.rand(3).tolist(), float(product.sum()),
                torch.ones(64, 64).mm(torch.rand(64, 64)).sum().item()],
    "hooks": [len(sys.meta_path), len(sys.path_hooks), len(warnings.filters), str(sys.excepthook)],
    "modules": sorted(sys.modules), "main thread": threading.current_thread().name,
}))
"""


def test_a_forked_rank_has_what_a_fresh_one_has(tmp_path: Path) -> None:
    rows = []
    for kind in (Launcher, PlainLauncher):
        how, text = run(tmp_path, PROBE, kind, MASTER_PORT="20001", RANK="0")
        assert how == ("forked" if kind is Launcher else "told to")
        rows.append(json.loads(text))
    forked, fresh = rows
    modules = set(forked.pop("modules")) ^ set(fresh.pop("modules"))
    assert {name for name in modules if name.startswith("torch")} == set()
    assert forked == fresh


SEEDS = """
import torch
import multiprocessing, numpy, random, tempfile
print(torch.initial_seed(), random.random(), numpy.random.rand(), next(tempfile._get_candidate_names()),
      multiprocessing.current_process().authkey.hex(), torch.rand(1).item(), sep="\\n")
"""


def test_ranks_draw_other_random_numbers_than_each_other(tmp_path: Path) -> None:
    first, second = (run(tmp_path, SEEDS) for _ in range(2))
    assert first[0] == second[0] == "forked"
    pairs = list(zip(first[1].split(), second[1].split(), strict=True))
    assert len(pairs) == 6
    assert all(number != other for number, other in pairs)


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        ("sys.exit(5)", 5, ""),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt"),
        ("{}['missing']", 1, "KeyError: 'missing'"),
        ("raise SystemExit('reason')", 1, "reason"),
        ("torch.zeros(2**30)", 77, "OutOfMemoryError"),
    ],
)
def test_the_end_of_a_forked_rank_is_exact(tmp_path: Path, last: str, code: int, text: str) -> None:
    launcher = launcher_of(tmp_path)
    start(launcher, tmp_path, f"import torch\nimport os, signal, sys\n{last}\n")
    assert await_end(launcher)["exit_codes"] == {0: code}
    assert start_of(tmp_path) == "forked"
    assert text in log_of(tmp_path)
    assert "fork_server" not in log_of(tmp_path) or code == -signal.SIGINT
    assert AttemptFolder(tmp_path / "attempts" / "1").exit_code(0).read_text() == str(code)


# a daemon in a session of its own, which executes nothing
STRANDED = """
import torch
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(300)
    os._exit(0)
open("rank", "w").write(str(os.getpid()))
time.sleep(300)
"""
LAUNCHING_PROCESS = """
import sys, time
from pathlib import Path
from tests.backends.test_forks import STRANDED, launcher_of, start
launcher = launcher_of(Path(sys.argv[1]))
start(launcher, Path(sys.argv[1]), STRANDED)
time.sleep(300)
"""


def pid_of(home: Path, name: str) -> int:
    path = home / name
    return until(lambda: int(path.read_text() or 0) if path.exists() else 0, name, WAIT_S)


def test_a_forked_rank_and_its_daemons_are_processes_of_the_attempt(tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path)
    status = start(launcher, tmp_path, STRANDED)
    rank, daemon = pid_of(tmp_path, "rank"), pid_of(tmp_path, "daemon")
    assert status["pids"] == {0: rank}
    marked = {int(entry.name) for entry in iterate_marked_processes(mark_of(tmp_path), ())}
    assert marked == {rank, daemon}
    launcher.abort(0)
    assert await_end(launcher)["exit_codes"] == {0: -signal.SIGKILL}
    assert until(lambda: not alive([rank, daemon]), "none is left", 10)
    assert not (tmp_path / "attempts" / "1" / "unwatched").exists()


def test_a_forked_rank_ends_with_its_launcher_and_what_it_left_is_found(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LAUNCHING_PROCESS, str(tmp_path)]
    with subprocess.Popen(arguments, cwd=PACKAGE) as process:
        rank, daemon = pid_of(tmp_path, "rank"), pid_of(tmp_path, "daemon")
        assert start_of(tmp_path) == "forked"
        process.kill()
    assert until(lambda: not alive([rank]), "the rank is gone", 10)
    assert alive([daemon]) == [daemon]
    end_leftover_processes(mark_of(tmp_path), str(tmp_path / "attempts" / "1"))
    assert until(lambda: not alive([daemon]), "its daemon is gone", 10)


WAITS = """
import torch
import os, sys, time
open("rank", "w").write(str(os.getpid()))
while not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(5)
"""


def test_a_dead_server_costs_no_rank_and_a_dead_holder_only_its_own(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("one", "two", "three")]
    launchers = []
    for home in homes:
        home.mkdir()
        launchers.append(launcher_of(home))
    for home, launcher in zip(homes[:2], launchers[:2], strict=True):
        start(launcher, home, WAITS)
        assert start_of(home) == "forked"
    holders = [parent_of(pid_of(home, "rank")) for home in homes[:2]]
    server = parent_of(holders[0])
    assert server == parent_of(holders[1])
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive([server]), "the server is gone")
    start(launchers[2], homes[2], WAITS)
    assert start_of(homes[2]) == "forked"
    assert parent_of(parent_of(pid_of(homes[2], "rank"))) != server
    os.kill(holders[1], signal.SIGKILL)
    for home in homes:
        (home / "go").touch()
    codes = [await_end(launcher)["exit_codes"][0] for launcher in launchers]
    assert codes == [5, -signal.SIGKILL, 5]
    until(lambda: not alive(holders), "the holders are gone", 10)


def test_a_stopped_server_costs_a_wait_and_a_plain_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, WAITS.replace("while", "while 0 and"))
    monkeypatch.setattr("orchestrator.backends.attempts.launcher.FORK_TIMEOUT_S", 0.5)
    stopped = servers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        how, _ = run(tmp_path, WAITS.replace("while", "while 0 and"))
        assert how.startswith("the server did not answer")
        (tmp_path / "rank").unlink()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    # it meets the request of a launcher that hung up
    how, text = run(tmp_path, "import torch\nimport os\nprint(os.path.exists('rank'))\n")
    assert (how, text) == ("forked", "False\n")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"script": "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch"}, "precedes"),
        ({"script": "import helper\nimport torch"}, "precedes"),
        ({"script": "def"}, "SyntaxError"),
        ({"argv": (sys.executable, str(GUARD), "{settings}", "--", "-m", "train")}, "is no file"),
        ({"env": {"PYTHONPATH": "/elsewhere"}}, "PYTHONPATH"),
        ({"env": {"PYTHONOPTIMIZE": "1"}}, "PYTHONOPTIMIZE"),
        ({"env": {"LD_PRELOAD": ""}}, "LD_PRELOAD"),
        ({"env": {"WANDB_API_KEY": "secret"}}, "WANDB_API_KEY"),
        ({"env": {RUN_AS: f"{os.geteuid()}:{os.getegid()}"}}, "another user"),
        ({"settings": {"fault_kind": "node"}}, "kill its launcher"),
        ({"argv": (sys.executable, "-u", str(GUARD), "{settings}", "--", "x.py")}, "flags"),
        ({"argv": (sys.executable, "-c", "pass")}, "flags"),
        ({"argv": ("/bin/true", str(GUARD), "{settings}", "--", "program/train.py")}, "not answer"),
        ({"module": "numpy.py"}, "'numpy'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_any_doubt_is_a_plain_start(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    real = {"virtual_capacity_bytes": None, **changes.get("settings", {})}
    launcher = launcher_of(tmp_path, **real)
    (tmp_path / "program").mkdir()
    if "module" in changes:
        (tmp_path / "program" / changes["module"]).write_text("raise SystemExit(3)")
    settings = str(tmp_path / "attempts" / "1" / "guard.json")
    argv = tuple(word.format(settings=settings) for word in changes.get("argv", ()))
    script = changes.get("script", "import torch")
    status = start(launcher, tmp_path, script, argv, **changes.get("env", {}))
    await_end(launcher)
    assert reason in start_of(tmp_path)
    assert list(status["pids"]) == [0]
    if "module" in changes:
        assert launcher.status()["exit_codes"] == {0: 3}


@pytest.mark.parametrize(
    ("script", "is_first"),
    [
        ("'text'\nfrom __future__ import annotations\nimport os, torch", True),
        ("import math\nfrom torch import nn", True),
        ("import torch.nn as nn", True),
        ("import numpy\nimport torch", False),
        ("from . import torch", False),
        ("if True:\n    import torch", False),
        ("import os; os.umask(0); import torch", False),
        ("import os", False),
        ("", False),
    ],
)
def test_only_modules_of_the_standard_library_stand_before_torch(
    script: str, is_first: bool
) -> None:
    assert begins_with_torch(script.encode()) is is_first


def test_a_real_device_has_forked_ranks_where_torch_comes_first(tmp_path: Path) -> None:
    launcher = launcher_of(tmp_path, virtual_capacity_bytes=None)
    start(launcher, tmp_path, "import torch\nprint(torch.cuda.is_initialized())")
    await_end(launcher)
    assert (start_of(tmp_path), log_of(tmp_path)) == ("forked", "False\n")


def test_variables_of_every_kind_of_device_are_known() -> None:
    for kind in DeviceKind:
        traits = kind.traits
        names = {name for name, _ in (*traits.variables, *traits.default_variables)}
        names |= {traits.visible_variable} - {""}
        assert names - LATE <= set(select_matching(dict.fromkeys(names, ""), EARLY))


GETENV = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>
static char *told(const char *call, const char *name) {
    char *(*real)(const char *) = dlsym(RTLD_NEXT, call);
    write(9, name, strlen(name));
    write(9, "\\n", 1);
    return real(name);
}
char *getenv(const char *name) { return told("getenv", name); }
char *secure_getenv(const char *name) { return told("secure_getenv", name); }
"""
READS = """
import importlib, os, sys
kind = type(os.environ)
read, asked = kind.__getitem__, kind.__contains__
def told(function):
    def noted(self, name):
        caller = sys._getframe(2).f_code.co_filename
        # it goes through all variables, for those that begin with TQDM_
        if not caller.endswith("tqdm/utils.py"):
            os.write(9, f"{name}\\n".encode())
        return function(self, name)
    return noted
kind.__getitem__, kind.__contains__ = told(read), told(kind.__contains__)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_nothing_reads_a_late_variable_while_torch_is_imported(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: calls of getenv cannot be traced")
    source, library, names = (tmp_path / name for name in ("getenv.c", "getenv.so", "names"))
    source.write_text(GETENV)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-c", READS, *fork_server.MODULES]
    late = dict.fromkeys(LATE - {"ORC_GUARD", "CUDA_VISIBLE_DEVICES"}, "1")
    traced = f'exec 9>>"$0"; LD_PRELOAD={library} exec "$@"'
    subprocess.run(
        ["sh", "-c", traced, names, *command],
        env={**make_base_variables(), **late},
        cwd=PACKAGE,
        check=True,
        timeout=WAIT_S,
    )
    read = set(names.read_text().splitlines())
    assert {"OMP_NUM_THREADS", "PYTORCH_JIT"} <= read, "C's and Python's reads are traced"
    assert read & LATE == set()
    assert not any(name.startswith("TQDM_") for name in (*LATE, *EARLY))


ENDS = """
import sys
from orchestrator.training.guard import fork_server
for name, text in zip(sys.argv[2::2], sys.argv[3::2]):
    setattr(fork_server, name, float(text))
fork_server.LOOK_S = 0.1
fork_server.main()
"""


@pytest.mark.parametrize("setting", [("IDLE_S", "0.5"), ("AVAILABLE_MIN", "1.1")])
def test_a_server_ends_when_idle_and_when_memory_is_short(setting: tuple[str, str]) -> None:
    name = f"orc-forks-test-{os.getpid()}-{setting[0]}"
    command = [sys.executable, "-c", ENDS, name, *setting]
    subprocess.run(command, cwd=PACKAGE, env=make_base_variables(), check=True, timeout=WAIT_S)
    assert f"@{name}\n" in Path("/proc/net/unix").read_text()
    until(lambda: f"@{name}\n" not in Path("/proc/net/unix").read_text(), "the server ended")


def test_a_server_does_not_outlive_a_change_of_what_it_imported(tmp_path: Path) -> None:
    run(tmp_path, "import torch")
    before = servers()
    stamp = GUARD.stat()
    try:
        os.utime(GUARD, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
        assert run(tmp_path, "import torch")[0] == "installed files changed"
        until(lambda: set(before) - set(servers()), "its server ended")
    finally:
        os.utime(GUARD, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.settimeout(30)
link.connect("\\0" + sys.argv[1])
try:
    socket.send_fds(link, [b'{"argv": ["python", "x"], "workdir": "/", "env": {}}'], [2])
    print(link.recv(4096))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_server_answers_its_own_user_alone(tmp_path: Path) -> None:
    assert run(tmp_path / "one", "import torch\nprint('ran')")[0] == "forked"
    listed = Path("/proc/net/unix").read_text().split()
    name = next(word[1:] for word in listed if word.startswith("@orc-forks-"))
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER, name],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    assert stranger.stdout.strip() == "b''"
