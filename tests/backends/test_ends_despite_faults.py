"""Laws of an attempt's end: whatever raises, or was left behind, its job ends and its devices are free."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts import evidence as evidence_module
from orchestrator.backends.attempts import launcher, watch
from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.evidence import Ending, collect_evidence
from orchestrator.backends.attempts.leftovers import end_leftover_processes, make_process_mark
from orchestrator.backends.attempts.nodes import NodeWatch
from orchestrator.backends.attempts.process_census import MARK
from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.specs.attempt import Evidence, FailureKind
from orchestrator.specs.events import Finished, Released
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.run import AttemptFolder, JobFolder
from tests.backends.ray_jobs import CLUSTER, Alone, Reader, launch_of, script, until
from tests.local_cluster import LocalLaunchers, LocalNodes
from tests.scheduling.factories import attempt, job, script_spec

SECONDS_UNTIL_FREE = 10.0
GOOD = {
    "rank": 0,
    "step": 3,
    "steps_done": 3,
    "step_s": 0.5,
    "peak_bytes": 2**20,
    "phase": "forward",
    "at_s": 1e9,
}
POISONS = (
    *({"step_s": value} for value in (float("nan"), float("inf"), "x", -1.0, 1e300, [])),
    *({"loss": value} for value in ("x", [1], float("nan"), 1e300, {})),
    *({"peak_bytes": value} for value in (float("nan"), -1, 10**40, None, 1.5, True)),
    *({"step": value} for value in (None, "3", 10**4200, -(2**70))),
    *({"at_s": value} for value in (None, 1e300, float("inf"), "now")),
    *({"phase": value} for value in ("\ud800", "x" * 10**6, None, "\x1b]52;c;\x07")),
    *({"rank": value} for value in (7, None, "0")),
    {"nested": {"a": [[[]]]}},
    {"pid": 2.5, "group_size": "x", "backwards": [], "device_model": 7},
)
FAULTS: dict[str, tuple[object, str]] = {
    "the ending is written": (watch, "write_ending"),
    "an earlier ending is read": (watch, "read_ending"),
    "evidence is collected": (watch, "collect_evidence"),
    "secrets are hidden": (watch, "mask_evidence"),
    "the user is looked up": (watch, "make_file_access"),
    "results are looked for": (evidence_module, "find_results"),
    "checkpoints are looked for": (evidence_module, "find_checkpoints"),
    "reports are read": (evidence_module, "read_reports"),
    "logs are read": (evidence_module, "scan_log"),
    "devices are released": (NodeWatch, "_wait_until_free"),
    "launchers are ended": (LocalLaunchers, "end_launchers"),
}


@pytest.fixture
def launchers() -> LocalLaunchers:
    return LocalLaunchers()


@pytest.fixture
def backends(tmp_path: Path, launchers: LocalLaunchers) -> Iterator[Callable[[], Reader]]:
    made = []

    def make() -> Reader:
        made.append(ProcessBackend(tmp_path, CLUSTER, LocalNodes(CLUSTER), launchers, Alone()))
        return Reader(made[-1])

    yield make
    for backend in made:
        backend.close()


def plant(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    owner, name = FAULTS[place]

    def fail(*_: object, **__: object) -> Any:
        raise LookupError("planted")

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("place", FAULTS)
def test_whatever_raises_while_an_attempt_ends_its_job_ends_and_its_devices_are_free(
    backends: Callable[[], Reader], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    reader, launch = backends(), launch_of("faulty", script("exit:0"))
    plant(monkeypatch, place)
    reader.backend.launch(launch)
    began_s = time.monotonic()
    finished = reader.await_end(launch)
    assert time.monotonic() - began_s < SECONDS_UNTIL_FREE
    ended = classify_end(launch.job, launch.attempt, finished.evidence)
    assert ended is None or ended.kind in (FailureKind.UNKNOWN, FailureKind.STARTUP), ended
    monkeypatch.undo()
    other = launch_of("after", script("exit:0"))  # on the same device
    reader.backend.launch(other)
    assert classify_end(other.job, other.attempt, reader.await_end(other).evidence) is None


@pytest.mark.parametrize(
    "place", ["evidence is collected", "an earlier ending is read", "devices are released"]
)
def test_an_end_that_raises_again_after_a_restart_is_an_end(
    backends: Callable[[], Reader], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    first, launch = backends(), launch_of("faulty", script("exit:0"))
    plant(monkeypatch, place)
    first.backend.launch(launch)
    first.await_end(launch)
    first.backend.close()  # as if the journal had not got the end before the service was killed
    second = backends()
    second.backend.adopt(launch.job, launch.attempt)
    second.await_end(launch)
    monkeypatch.undo()
    third = backends()
    third.backend.adopt(launch.job, launch.attempt)
    third.await_end(launch)
    assert sum(isinstance(event, Released) for event in third.received) == 1


@pytest.mark.parametrize(
    "obstacle", ["a folder for its exit code", "no folder", "an epoch of words"]
)
def test_what_a_rank_does_to_its_folder_does_not_hide_its_end(
    backends: Callable[[], Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(launcher, "WRITE_AGAIN_S", 0.01)
    jobs = JobFolder(tmp_path, "odd")
    folder = jobs.attempt(1)
    code = {
        "a folder for its exit code": f"import os; os.makedirs({str(folder.exit_code(0) / 'x')!r})",
        "no folder": f"import shutil; shutil.rmtree({str(folder.path)!r})",
        "an epoch of words": f"open({str(jobs.epoch)!r}, 'w').write('words')",
    }[obstacle]
    command = (sys.executable, "-c", f"{code}; import time; time.sleep(1)")
    spec = script().model_copy(update={"command": command, "launch": "self"})
    reader, launch = backends(), launch_of("odd", spec)
    reader.backend.launch(launch)
    evidence = reader.await_end(launch).evidence
    failure = classify_end(launch.job, launch.attempt, evidence)
    if obstacle == "a folder for its exit code":
        assert [end.exit_code for end in evidence.ranks] == [None]
        assert failure is not None, "nobody knows whether it succeeded"
    else:
        assert failure is None, failure
    assert evidence.nodes_lost == ()


def test_an_end_on_a_full_disk_is_told_once_there_is_room_and_accuses_no_node(
    backends: Callable[[], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_room, refusals = threading.Event(), list[str]()

    def write(path: Path, text: str, mode: int = 0o666) -> None:
        is_watched = path.name.endswith(".rc") or path.name == "writable"
        if is_watched and not has_room.is_set():
            refusals.append(path.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        write_durably(path, text, mode)

    monkeypatch.setattr(launcher, "write_durably", write)
    monkeypatch.setattr(launcher, "WRITE_AGAIN_S", 0.05)
    monkeypatch.setattr(watch, "write_durably", write)
    monkeypatch.setattr(watch, "END_TIMEOUT_S", 0.2)
    reader, launch = backends(), launch_of("full", script("wait", hang_timeout="1s"))
    reader.backend.launch(launch)
    until(lambda: refusals.count("rank0.rc") > 40, "2 s without room")
    reader.poll(0.0)
    assert reader.find(launch, Finished) is None
    has_room.set()
    evidence = reader.await_end(launch).evidence
    assert (evidence.nodes_lost, evidence.hung_for_s is not None) == ((), True)
    assert evidence.disk_full


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "{}",
        '{"model": 1, "data": [], "training": null, "plan": "x"}',
        "\x00",
    ],
    ids=["deep", "empty", "wrong types", "NUL"],
)
def test_a_description_of_a_run_that_nobody_can_read_ends_no_cleaning_up(
    tmp_path: Path, text: str
) -> None:
    folder = AttemptFolder(tmp_path)
    folder.run.write_text(text)
    mark = make_process_mark(folder, "n0")
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: mark})
    try:
        until(lambda: mark.encode() in Path(f"/proc/{left.pid}/environ").read_bytes(), "its mark")
        end_leftover_processes(mark, str(tmp_path))
        assert left.wait(10.0) == -signal.SIGKILL
    finally:
        left.kill()
    assert folder.run.exists()


def test_an_end_that_nobody_could_read_is_final_and_says_so() -> None:
    failure = classify_end(job(), attempt(), Evidence(collect_error="KeyError: 'x'"))
    assert failure is not None
    assert failure.reason == "its evidence cannot be read: KeyError: 'x'"
    assert failure.verdict is not None
    assert failure.verdict.wait_s is None


def leave(
    home: Path, name: str, text: bytes | str, exit_code: str = "0", spec: JobSpec | None = None
) -> Evidence:
    """The evidence of an attempt that left this text in one of its files, and trained to its end."""
    jobs = JobFolder(home, "lm-1")
    folder = jobs.attempt(1)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.log(0).write_text("step 1\n")
    folder.guard.write_text("{}")
    folder.exit_code(0).write_text(exit_code)
    path = folder.path / name
    path.unlink(missing_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    return collect_evidence(spec or script_spec(), attempt(), jobs, Ending())


def names_of(folder: AttemptFolder) -> list[str]:
    files = (
        folder.heartbeat(0),
        folder.oom(0),
        folder.caught(0),
        folder.error(0),
        folder.resume,
        folder.guard,
    )
    return [
        path.name for path in (*files, folder.unwatched, folder.log(0), folder.path / "ending.json")
    ]


def test_a_report_is_typed_bounded_and_finite_whatever_a_rank_wrote(tmp_path: Path) -> None:
    name = JobFolder(tmp_path, "lm-1").attempt(1).heartbeat(0).name
    for poison in POISONS:
        left = leave(tmp_path, name, json.dumps({**GOOD, **poison}))
        for beat in left.heartbeats:
            json.dumps([beat.step_s, beat.loss, beat.at_s], allow_nan=False)
            assert beat.rank == 0
            assert type(beat.step) is type(beat.peak_bytes) is int
            assert len(beat.phase) <= 200
        assert classify_end(job(), attempt(), left) is None, poison
        is_honest = (
            poison.keys() <= {"nested"}
            or isinstance(poison.get("loss"), float)
            or isinstance(poison.get("phase"), str)
        )
        assert is_honest or left.unread, f"{poison} is dropped in silence"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b"9" * 5000,
        b"x" * 5_000_000,
        b"[1,2]",
        b'{"rank"',
    ],
    ids=["empty", "binary", "null", "deep", "deep objects", "digits", "long", "list", "cut"],
)
def test_no_file_that_a_rank_leaves_changes_how_its_attempt_ended(
    tmp_path: Path, text: bytes
) -> None:
    for name in names_of(JobFolder(tmp_path, "lm-1").attempt(1)):
        left = leave(tmp_path, name, text)
        assert left.ranks[0].exit_code == 0
        assert classify_end(job(), attempt(), left) is None, name


def test_drawn_files_never_raise(tmp_path: Path) -> None:
    draw = random.Random(53)
    names = names_of(JobFolder(tmp_path, "lm-1").attempt(1))
    for _ in range(60):
        good = json.dumps({**GOOD, **draw.choice(POISONS)}).encode(errors="surrogatepass")
        cut = draw.randrange(len(good))
        text = (
            good[:cut]
            + draw.randbytes(draw.choice((0, 1, 30)))
            + good[cut + draw.choice((0, 1, 20)) :]
        )
        assert leave(tmp_path, draw.choice(names), text).ranks[0].exit_code == 0


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    jobs = JobFolder(tmp_path, "lm-1")
    folder = jobs.attempt(1)
    folder.path.mkdir(parents=True)
    folder.exit_code(0).write_text("0")
    folder.log(0).write_text("")
    heartbeat = folder.heartbeat(0)
    if kind == "a pipe":
        os.mkfifo(heartbeat)
    elif kind == "a link":
        heartbeat.symlink_to("/proc/self/environ")
    else:
        heartbeat.mkdir()
    assert collect_evidence(script_spec(), attempt(), jobs, Ending()).heartbeats == ()
