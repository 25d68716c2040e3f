"""How many jobs a second does a service take from another machine, how soon does it answer under load, how large is it?

The service is a process of its own with its Ray; every client is `orc`'s own, under TLS, with a member's token. One job
holds all devices and prints a line a second, so that everything else waits behind it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from benchmarks.figure import Figure, at_least, at_most, informs
from orchestrator.service.client import lifecycle
from orchestrator.service.client.client import Client, read_service_file
from orchestrator.service.client.endpoint import make_endpoint
from orchestrator.service.client.logins import Login
from orchestrator.service.client.sending import read_and_upload_jobs
from orchestrator.service.terminal.follow import iterate_attempt_numbers_and_log
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.job.spec import JobSpec
from tests.service.test_reach import free_port

BATCH, QUEUED = 250, 2000
FOLLOWERS = 200
READ_S = 30.0  # of reads beside the followers
ENDED = 10_000
PATIENCE_S = 60.0
JOB = f"""
name: lm
command: python train.py --lr {{rate}}
global_batch_size: 64
array:
  rate: {[round(1e-4 * (number + 1), 6) for number in range(BATCH)]}
"""
HOLDER = (
    "import time\nfor second in range(86400):\n print('second', second, flush=True)\n time.sleep(1)"
)


def figures() -> list[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="orc")))
        home, login = stack.enter_context(_service(folder))
        client = stack.enter_context(closing(Client(login)))
        holder, jobs = _holder(client), _jobs(login, folder)
        start_mib = _resident_mib(home)
        taken = _submits(client, login, holder, jobs)
        read = _reads(client, login, holder, folder)
        _ends(client, jobs)
        mib = _resident_mib(home)
        size = f"resident memory of the service after {ENDED:,} ended jobs"
        return [
            *taken,
            *read,
            at_most(size, mib, "MiB", 400),
            at_most(f"{size}, over that at its start", mib / start_mib, "", 1.1),
        ]


@contextmanager
def _service(folder: Path) -> Iterator[tuple[Path, Login]]:
    home = folder / "home"
    home.mkdir()
    endpoint = make_endpoint(home, f"127.0.0.1:{free_port()}", None, None, (), trusts_users=True)
    lifecycle.start_service(home, None, None, endpoint)
    try:
        with closing(Client(home)) as owner:
            owner.set_user("ada", "member")
            token, _ = owner.create_token("ada", None)
        url, certificate = (
            f"https://127.0.0.1:{endpoint.port}",
            Path(endpoint.certificate).read_text(),
        )
        yield home, Login(url=url, token=token, certificate=certificate)
    finally:
        lifecycle.stop_service(home, force=True)


def _holder(client: Client) -> str:
    """The job that holds both devices, once it has printed a line."""
    spec = JobSpec(
        name="holder",
        command=("python", "-c", HOLDER),
        workdir="/tmp",
        global_batch_size=2,
        launch="self",
    )
    job_id = client.submit_job({**spec.model_dump(mode="json"), "gpus": {"min": 2, "max": 2}})
    until_s = time.monotonic() + PATIENCE_S
    while (
        not client.fetch_job_and_version(job_id)[0]["attempts"]
        or not client.read_log_and_offset(job_id, 1, 0, 0)[0]
    ):
        assert time.monotonic() < until_s, client.fetch_job_and_version(job_id)[0]
        time.sleep(0.2)
    return job_id


def _jobs(login: Login, folder: Path) -> list[JobSpec]:
    """A batch as `orc submit` and the SDK read it; its working directory has been uploaded."""
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text("print('trained')")
    file = project / "job.yaml"
    file.write_text(JOB)
    return read_and_upload_jobs(login, [file])


def _submits(client: Client, login: Login, holder: str, jobs: list[JobSpec]) -> list[Figure]:
    """What `orc submit` and the SDK send, in batches and one by one, while another client reads a job."""
    specs = [spec.model_dump(mode="json") for spec in jobs]
    took_s = []
    with _reading(login, holder) as read_s:
        for _ in range(QUEUED // BATCH):
            began_s = time.perf_counter()
            client.submit_jobs(specs)
            took_s.append(time.perf_counter() - began_s)
    with _reading(login, holder) as read_beside_single_s:
        began_s = time.perf_counter()
        for spec in specs:
            client.submit_job(spec)
        single_s = (time.perf_counter() - began_s) / BATCH
    return [
        at_least(
            f"submits over TLS in batches of {BATCH}, median batch",
            BATCH / statistics.median(took_s),
            "1/s",
            500,
        ),
        at_most("GET /jobs/ID beside them, 99th percentile", _ms(sorted(read_s)), "ms", 100),
        at_least("submits over TLS, one by one", 1 / single_s, "1/s", 60),
        at_most(
            "GET /jobs/ID beside those, 99th percentile",
            _ms(sorted(read_beside_single_s)),
            "ms",
            100,
        ),
        informs("load average beside them", os.getloadavg()[0], ""),
    ]


@contextmanager
def _reading(login: Login, job_id: str) -> Iterator[list[float]]:
    """Another client that reads a job twenty times a second; the seconds of each read."""
    took_s, over = list[float](), threading.Event()

    def read() -> None:
        with closing(Client(login)) as client:
            while not over.wait(0.05):
                began_s = time.perf_counter()
                client.fetch_job_and_version(job_id)
                took_s.append(time.perf_counter() - began_s)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield took_s
    finally:
        over.set()
        thread.join()


def _reads(client: Client, login: Login, holder: str, folder: Path) -> list[Figure]:
    """Each kind of read, in turn, while FOLLOWERS clients of another process follow a log."""
    reads: dict[str, Callable[[], object]] = {
        "a job": lambda: client.fetch_job_and_version(holder),
        "a queued job": lambda: client.fetch_job_and_version("lm-2"),
        "the cluster": client.fetch_cluster,
        "the teams": client.list_teams,
        "a log": lambda: client.read_log_and_offset(holder, 1, 0, 0),
        "the whole queue": client.list_jobs,
    }
    took_s: dict[str, list[float]] = {name: [] for name in reads}
    file = folder / "login.json"
    file.write_text(json.dumps(asdict(login)))
    followers = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.service", str(file), holder],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert followers.stdout is not None
        assert followers.stdout.readline() == "all follow\n"
        until_s = time.monotonic() + READ_S
        while time.monotonic() < until_s:
            for name, read in reads.items():
                began_s = time.perf_counter()
                read()
                took_s[name].append(time.perf_counter() - began_s)
    finally:
        followers.terminate()
        followers.communicate()
    all_s = sorted(one for times in took_s.values() for one in times)
    return [
        at_most(
            f"reads beside {FOLLOWERS} followers and {QUEUED:,} queued jobs, 99th percentile",
            _ms(all_s),
            "ms",
            100,
        ),
        *(
            informs(f"{name}, 99th percentile", _ms(sorted(times)), "ms")
            for name, times in took_s.items()
        ),
        *(
            informs(f"{name}, median", 1e3 * statistics.median(times), "ms")
            for name, times in took_s.items()
        ),
        informs("load average beside them", os.getloadavg()[0], ""),
    ]


def _ms(took_s: list[float]) -> float:
    return 1e3 * took_s[min(len(took_s) - 1, round(0.99 * len(took_s)))]


def _ends(client: Client, jobs: list[JobSpec]) -> None:
    """ENDED jobs that were submitted and cancelled."""
    waiting = [job["id"] for job in client.list_jobs(0) if job["status"] == "queued"]
    ended = 0
    while True:
        client.cancel_jobs(waiting, whole_arrays=False)
        ended += len(waiting)
        if ended >= ENDED:
            return
        waiting = client.submit_jobs([spec.model_dump(mode="json") for spec in jobs])["ids"]


def _resident_mib(home: Path) -> float:
    status = Path(f"/proc/{read_service_file(home)['pid']}/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        / 2**10
    )


def _follow(file: Path, job_id: str) -> None:
    """Follow the job's log FOLLOWERS times at once; tells when everyone has read a line, and ends when killed."""
    login = Login(**json.loads(file.read_text()))
    begun = threading.Barrier(FOLLOWERS + 1)

    def one() -> None:
        with closing(Client(login)) as client, suppress(ServiceError):
            lines = iterate_attempt_numbers_and_log(client, job_id, None, 0, until_end=True)
            next(lines)
            begun.wait()
            for _ in lines:
                pass

    for _ in range(FOLLOWERS):
        threading.Thread(target=one, daemon=True).start()
    begun.wait()
    print("all follow", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _follow(Path(sys.argv[1]), sys.argv[2])
