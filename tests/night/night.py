"""A night that is run: a service on two virtual devices, drawn jobs, drawn faults, and a morning.

    python -m tests.night.night --seed 1 --jobs 12 --faults 4

The same seed draws the same jobs, ways of submission, users and faults. A job or a fault is due
once so many jobs have ended; which process a fault meets depends on what runs then. The verdict
goes to .bench/night.json. Exit code 1 where a law of `tests/night/laws.py` is broken, or where one
holds that a row expects to be broken.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import html
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import yaml

from orchestrator.backends.mlflow.server import HOST, make_short_socket_path
from orchestrator.backends.ray.embedded import read_record
from orchestrator.sdk import Client as Sdk
from orchestrator.service.client.client import Client, read_service_file
from orchestrator.service.intake.intake import EMBEDDED_CLUSTER
from orchestrator.service.terminal.follow import ENDS
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.run import JobFolder
from tests.backends.test_notify import SECRET, Hook
from tests.budget import Account
from tests.commands import run_orc
from tests.night.catalogue import FOLDER, KINDS, PROGRAMS, ROOT, Kind
from tests.night.laws import (
    Advice,
    Breach,
    Entry,
    Inflicted,
    Morning,
    Notice,
    Trace,
    name_of,
    verdict,
)

FAULTS = (
    "reboot",
    "kill the service",
    "kill a rank",
    "full disk",
    "kill MLflow",
    "kill Ray",
    "drain",
    "suspend",
    "update",
    "purge",
)
SERVERS = {"kill MLflow": "orchestrator.backends.mlflow.serve", "kill Ray": "/raylet/raylet"}
OPERATORS = {  # fault -> commands that an operator types; {job} has a rank that runs
    "drain": (("drain", "virtual"), ("drain", "virtual", "--undo")),
    "suspend": (("suspend", "{job}"), ("resume", "{job}")),
    "update": (("update", "{job}", "priority=1"),),
    "purge": (("purge",),),
}
WAYS = ("CLI", "form", "SDK")
USERS = ("ada", "ben")
SETTLE_S, JOB_S = (
    300.0,
    150.0,
)  # of the wall clock, on two cores that others use, too: for a night, and for each job
FULL_S = 180.0
DISK = "768m"
AHEAD_H = 10  # hours until the maintenance and the deadline
RANK_S = 60.0  # that a fault waits for a rank to meet
RECORD_S = 120.0  # until the last record and the last notice have arrived
POLL_S = 1.0
COPY = "orchestrator.backends.mlflow.log_model"
MLFLOW = f"http://home.{HOST}/api/2.0/mlflow"
CLUSTER = """\
trackers: [mlflow]
policy:
  teams:
    - {{name: day, users: [ada]}}
    - {{name: dusk, users: [ben]}}
maintenance: [{{start: {start}, end: {end}}}]
notify:
  targets: [{{name: hook, webhook: ORC_HOOK_URL, signed_with: ORC_HOOK_SECRET}}]
  allow_hosts: [localhost]
"""
# A progress bar may stand before them in their line.
STEP = re.compile(r"\bstep (\d+)(?:/\d+)? (?:loss \S+ )?at (\d+\.\d+)")
SAVED = re.compile(r"\bsaved (\d+)\b")
COMMAND = re.compile(r"`(orc [^`]+)`")


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A job that the night submits once `after` jobs have ended."""

    after: int
    kind: Kind
    way: str
    user: str
    has_deadline: bool


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """A fault that comes `delay_s` after so many jobs have ended."""

    after: int
    kind: str
    delay_s: float
    draw: float  # from 0 to 1: which of the candidates it meets


def why_no_fault(kind: str) -> str | None:
    """Return why this machine cannot inflict a kind of fault; None where it can."""
    if kind != "full disk":
        return None
    can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
    return None if can_mount else "a disk of its own needs root and mount(8)"


def draw(
    seed: int, jobs: int, faults: int, kinds: Sequence[Kind], fault_kinds: Sequence[str]
) -> tuple[list[DrawnJob], list[DrawnFault]]:
    """Return the jobs and faults of a seed: every kind comes once before one comes again."""
    drawn = random.Random(seed)
    deck: list[Kind] = []
    while len(deck) < jobs:
        deck += drawn.sample(list(kinds), len(kinds))
    drawn_jobs = []
    with_deadline = drawn.randrange(jobs)
    for number, kind in enumerate(deck[:jobs]):
        # Two thirds are there in the evening; others come while the night is under way.
        after = 0 if number < jobs * 2 / 3 else drawn.randint(0, jobs // 2)
        way = WAYS[number % len(WAYS)]
        drawn_jobs.append(DrawnJob(after, kind, way, drawn.choice(USERS), number == with_deadline))
    drawn_faults: list[DrawnFault] = []
    pile: list[str] = []
    for _ in range(faults):
        pile = pile or drawn.sample(list(fault_kinds), len(fault_kinds))
        after = drawn.randint(0, max(0, jobs - 3))
        drawn_faults.append(DrawnFault(after, pile.pop(), drawn.uniform(0.0, 4.0), drawn.random()))
    return drawn_jobs, sorted(drawn_faults, key=lambda fault: fault.after)


def until(holds: Callable[[], Any], what: str, patience_s: float) -> Any:
    """Return the first true answer of `holds`; after `patience_s` tell that none came."""
    deadline_s = time.monotonic() + patience_s
    while not (answer := holds()):
        if time.monotonic() > deadline_s:
            print(f"not within {patience_s:.0f} s: {what}", flush=True)
            break
        time.sleep(POLL_S)
    return answer


class Night:
    """A service with what is submitted to it and inflicted on it."""

    def __init__(self, folder: Path, hook: Hook) -> None:
        self.folder, self.hook = folder, hook
        self.home = folder / "home"
        self.entries: list[Entry] = []
        self.faults: list[Inflicted] = []
        self.full_until_s: float | None = None
        bin_folder = str(Path(sys.executable).parent)
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("ORC_")}
        self.env = inherited | {
            "ORC_HOME": str(self.home),
            "ORC_HOOK_URL": hook.url,
            "ORC_HOOK_SECRET": SECRET,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        }
        shutil.copytree(PROGRAMS, folder / "programs", ignore=shutil.ignore_patterns("__pycache__"))
        now = datetime.now(UTC)
        begins = now + timedelta(hours=AHEAD_H)
        window = {"start": begins.isoformat(), "end": (begins + timedelta(hours=1)).isoformat()}
        (folder / "cluster.yaml").write_text(EMBEDDED_CLUSTER + CLUSTER.format(**window))
        self.deadline = (now + timedelta(hours=AHEAD_H)).strftime("%Y-%m-%dT%H:%M UTC")

    def orc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Return the end of a command that a user types."""
        return run_orc(arguments, env=self.env, cwd=self.folder / "programs")

    def orc_up(self, *arguments: str) -> None:
        """Start the service; raise AssertionError where it does not start."""
        ended = self.orc("up", *arguments)
        assert ended.returncode == 0, (ended.stdout, ended.stderr)

    # ------------------------------------------------------------------------------- submissions

    def submit(self, job: DrawnJob) -> bool:
        """Submit a job in its way; return False where the service cannot take it now."""
        number = len(self.entries)
        text = self.write_job_file(job, number)
        file = self.folder / f"job{number}.yaml"
        file.write_text(text)
        try:
            job_id = {
                "CLI": self.submit_by_cli,
                "form": self.submit_by_form,
                "SDK": self.submit_by_sdk,
            }[job.way](file)
        except ServiceError as error:
            print(f"not taken: {job.kind.name}: {error}", flush=True)
            return False
        self.entries.append(Entry(id=job_id, kind=job.kind, way=job.way))
        print(f"submitted {job_id} by {job.way} for {job.user}", flush=True)
        return True

    def write_job_file(self, job: DrawnJob, number: int) -> str:
        """Return the job file: the row's own, or what `orc init` proposes."""
        programs = self.folder / "programs"
        if job.kind.prepare is not None and not (programs / "model").exists():
            job.kind.prepare(programs)
        text = job.kind.job.replace(FOLDER, str(self.folder / f"job{number}"))
        if job.kind.typed:
            proposal = self.orc("init", *job.kind.typed)
            assert proposal.returncode == 0, proposal.stderr
            text = proposal.stdout
        config = yaml.safe_load(text) | {"name": f"{job.kind.name}-n{number}", "user": job.user}
        if "command" in config:
            config["workdir"] = str(programs)
        else:
            config["model"]["hf"] = str(programs / "model")
            config["data"]["chat"] = [str(programs / name) for name in config["data"]["chat"]]
        if job.has_deadline:
            config["deadline"] = self.deadline
        return yaml.safe_dump(config, sort_keys=False)

    def submit_by_cli(self, file: Path) -> str:
        """Return the id of a job that `orc submit` has submitted. Raises ServiceError."""
        ended = self.orc("submit", str(file), "--json")
        if ended.returncode != 0:
            raise ServiceError(ended.stdout + ended.stderr)
        (job_id,) = json.loads(ended.stdout)["ids"]
        return str(job_id)

    def submit_by_form(self, file: Path) -> str:
        """Return the id of a job that the button of the Submit page has sent. Raises ServiceError."""
        url = f"http://127.0.0.1:{read_service_file(self.home)['port']}"
        headers = {"Authorization": f"Bearer {(self.home / 'token').read_text()}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False) as browser:
            try:
                answer = browser.post("/ui/submit", data={"text": file.read_text()})
                page = answer.raise_for_status().text
                button = re.search(r"hx-post=\"(/jobs/batch)\" hx-vals='([^']*)'", page)
                if button is None:
                    errors = re.findall(r"role=.alert.>([^<]*)", page)
                    raise ServiceError(f"the page has no button: {errors}")
                body = json.loads(html.unescape(button[2]))
                answer = browser.post(button[1], json=body).raise_for_status()
            except httpx.HTTPError as error:
                raise ServiceError(str(error)) from error
        (job_id,) = answer.json()["ids"]
        return str(job_id)

    def submit_by_sdk(self, file: Path) -> str:
        """Return the id of a job that the SDK has submitted. Raises ServiceError."""
        with Sdk(self.home) as client:
            return client.submit(file).id

    # ------------------------------------------------------------------------------------ faults

    def inflict(self, fault: DrawnFault) -> None:
        """Inflict a fault, and start again what it ended. Waits at most RANK_S for a rank to meet."""
        time.sleep(fault.delay_s)
        ranks = until(self.ranks, f"a rank to meet, for {fault.kind}", RANK_S)
        at_s = time.time()
        job = None
        if fault.kind == "reboot":
            self.reboot()
        elif fault.kind == "kill the service":
            os.kill(int(read_service_file(self.home)["pid"]), signal.SIGKILL)
            self.orc_up()
        elif fault.kind == "full disk":
            until(self.fill_disk, "a disk as small as what it holds", RANK_S)
            self.full_until_s = time.monotonic() + FULL_S
        elif fault.kind in SERVERS:
            self.kill_server(SERVERS[fault.kind])
        elif fault.kind in OPERATORS and ranks:
            _, job = ranks[int(fault.draw * len(ranks))]
            for command in OPERATORS[fault.kind]:
                ended = self.orc(*(word.format(job=job) for word in command))
                print(" ".join(command), ended.returncode, ended.stderr[:300], flush=True)
                assert ended.returncode < 2, f"no command of this version: {command}"
        elif ranks:
            pid, job = ranks[int(fault.draw * len(ranks))]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            return
        lasts_s = FULL_S if fault.kind == "full disk" else 0.0
        until_s = time.time() + lasts_s
        self.faults.append(Inflicted(kind=fault.kind, at_s=at_s, until_s=until_s, job=job))
        print(f"inflicted: {fault.kind} {job or ''}", flush=True)

    def ranks(self) -> list[tuple[int, str]]:
        """Return (process, job) of each rank that runs, in order of the jobs."""
        below = str(self.home / "jobs") + os.sep
        ranks = []
        for pid, command, _ in _processes():
            job = re.search(re.escape(below) + r"([^/]+)/attempts/", command)
            if job is not None and "guard.py" in command:
                ranks.append((pid, job[1]))
        return sorted(ranks, key=lambda rank: (rank[1], rank[0]))

    def processes(self) -> list[tuple[str, str]]:
        """Return (job, command) of each process whose command or environment names a job's folder.

        The service's own copy of an output to MLflow is none of a job: it ends with the service.
        """
        below = re.compile(re.escape(str(self.home / "jobs") + os.sep) + r"([^/\0]+)/")
        processes = []
        for _, command, environment in _processes():
            job = below.search(command) or below.search(environment)
            if job is not None and COPY not in command:
                processes.append((job[1], command.replace("\0", " ")))
        return processes

    def reboot(self) -> None:
        """Kill every process of the home, as a reboot does, and start the service again."""
        state = read_record(self.home)
        marks = [str(self.home), *([state["temp_dir"]] if state is not None else [])]
        for _ in range(20):
            pids = []
            for pid, command, environment in _processes():
                if any(mark in command or mark in environment for mark in marks):
                    pids.append(pid)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.2)
        self.orc_up()

    def kill_server(self, name: str) -> None:
        """Kill the processes of the home whose command has a name."""
        state = read_record(self.home)
        marks = [str(self.home), *([state["temp_dir"]] if state is not None else [])]
        for pid, command, environment in _processes():
            if name in command and any(mark in command + environment for mark in marks):
                os.kill(pid, signal.SIGKILL)

    def fill_disk(self) -> bool:
        """Shrink the disk to what it holds; return whether nobody wrote more in between."""
        used = _output("df", "--block-size=1", "--output=used", str(self.home)).split()[-1]
        command = ("mount", "-o", f"remount,size={used}", str(self.home))
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0

    def give_room(self) -> None:
        """End a full disk whose time is over."""
        if self.full_until_s is not None and time.monotonic() > self.full_until_s:
            _output("mount", "-o", f"remount,size={DISK}", str(self.home))
            self.full_until_s = None

    # ------------------------------------------------------------------------------------- night

    def views(self) -> dict[str, Any]:
        """Return the service's jobs by id; {} while it does not answer."""
        with contextlib.suppress(ServiceError), closing(Client(self.home)) as client:
            return {job["id"]: job for job in client.list_jobs(ended_max=1000)}
        return {}

    def run(self, jobs: Sequence[DrawnJob], faults: Sequence[DrawnFault]) -> None:
        """Submit jobs and inflict faults when they are due, until all jobs have ended or it is late."""
        deadline_s = time.monotonic() + SETTLE_S + JOB_S * len(jobs) + FULL_S
        jobs_to_come, faults_to_come = list(jobs), list(faults)
        ended = 0
        while time.monotonic() < deadline_s:
            self.give_room()
            due = [job for job in jobs_to_come if job.after <= ended]
            for job in due:
                if not self.submit(job):
                    break
                jobs_to_come.remove(job)
            if faults_to_come and faults_to_come[0].after <= ended and self.full_until_s is None:
                self.inflict(faults_to_come.pop(0))
            statuses = [view["status"] for view in self.views().values()]
            ended = sum(status in ENDS for status in statuses)
            if ended == len(jobs) and self.full_until_s is None:
                return
            # Nothing more ends: what is left to come, comes now.
            if ended == len(self.entries) and jobs_to_come:
                jobs_to_come = [dataclasses.replace(job, after=0) for job in jobs_to_come]
            time.sleep(POLL_S)
        print(f"the night is over before its jobs: {ended} of {len(jobs)} have ended", flush=True)

    # ----------------------------------------------------------------------------------- morning

    def morning(self) -> Morning:
        """Return what the last record and notice complete; type what the report advises."""
        jobs = self.views()
        traces = {}
        for job_id, job in jobs.items():
            for attempt in job["attempts"]:
                traces[name_of(job_id, attempt)] = self.trace(job_id, attempt["number"])
        ends = sorted((name, True) for name in traces)
        until(lambda: sorted(self.records()) == ends, "all records", RECORD_S)
        failed = {job_id for job_id, job in jobs.items() if job["status"] in ("failed", "refused")}
        until(lambda: failed <= {notice.job for notice in self.notices()}, "all notices", RECORD_S)
        with closing(Client(self.home)) as client:
            until(
                lambda: not any(node["busy"] for node in client.fetch_cluster()["nodes"]),
                "free devices",
                RECORD_S,
            )
            nodes = client.fetch_cluster()["nodes"]
        processes = self.processes()
        ended = self.orc("report", "--since", "12h", "--json")
        assert ended.returncode == 0, ended.stderr
        report = json.loads(ended.stdout)
        self.orc("drain", "virtual")  # what the advice submits again starts nowhere
        return Morning(
            entries=tuple(self.entries),
            faults=tuple(self.faults),
            jobs=jobs,
            nodes=nodes,
            traces=traces,
            runs=self.records(),
            report=report,
            advice={job_id: self.follow_advice(job_id, report) for job_id in sorted(failed)},
            notices=self.notices(),
            absent=frozenset(self.without_file(jobs)),
            processes=processes,
        )

    def trace(self, job_id: str, number: int) -> Trace:
        """Return the steps and saves of an attempt, by its log or by the metrics of our engine."""
        folder = JobFolder(self.home, job_id).attempt(number)
        if folder.metrics.exists():
            lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
            return Trace(steps=tuple((line["step"], 0.0) for line in lines))
        text = folder.log(0).read_text(errors="replace") if folder.log(0).exists() else ""
        steps = tuple((int(step), float(at_s)) for step, at_s in STEP.findall(text))
        return Trace(steps=steps, saves=tuple(map(int, SAVED.findall(text))))

    def records(self) -> list[tuple[str, bool]]:
        """Return (attempt, whether it has ended) of each run in MLflow; [] while it does not answer."""
        runs: list[tuple[str, bool]] = []
        with contextlib.suppress(httpx.HTTPError, OSError), self.mlflow() as client:
            answer = client.post("/experiments/search", json={"max_results": 1000})
            rows = answer.raise_for_status().json().get("experiments", [])
            experiments = [row["experiment_id"] for row in rows]
            body = {"experiment_ids": experiments, "max_results": 1000}
            answer = client.post("/runs/search", json=body).raise_for_status()
            for run in answer.json().get("runs", []):
                tags = {tag["key"] for tag in run["data"].get("tags", [])}
                if "mlflow.parentRunId" in tags:
                    runs.append((run["info"]["run_name"], run["info"]["status"] != "RUNNING"))
        return runs

    @contextmanager
    def mlflow(self) -> Iterator[httpx.Client]:
        """Connect to the home's MLflow; importing its client takes seconds. Raises OSError."""
        with make_short_socket_path(self.home / "mlflow") as path:
            transport = httpx.HTTPTransport(uds=path)
            with httpx.Client(transport=transport, base_url=MLFLOW, timeout=30.0) as client:
                yield client

    def notices(self) -> list[Notice]:
        """Return the notices that the webhook got."""
        notices = []
        for headers, body in list(self.hook.got):
            message = json.loads(body)
            job = str(message["data"].get("job", ""))
            notices.append(Notice(id=headers["webhook-id"], kind=message["type"], job=job))
        return notices

    def without_file(self, jobs: dict[str, Any]) -> Iterator[str]:
        """Yield the jobs that succeeded without the file that their row says they leave."""
        for number, entry in enumerate(self.entries):
            left = entry.kind.leaves.replace(FOLDER, str(self.folder / f"job{number}"))
            status = jobs.get(entry.id, {}).get("status")
            if left and status == "succeeded" and not Path(left).exists():
                yield entry.id

    def follow_advice(self, job_id: str, report: dict[str, Any]) -> list[Advice]:
        """Type each command that the report has for a job. What `orc retry` submits is cancelled."""
        advice = []
        for sentence in report["to_do"]:
            if not sentence.startswith(f"{job_id}:"):
                continue
            for command in COMMAND.findall(sentence):
                arguments = command.split()[1:]
                ended = self.orc(*arguments)
                advice.append(
                    Advice(
                        command=command,
                        exit_code=ended.returncode,
                        output=ended.stdout + ended.stderr,
                    )
                )
                if arguments[0] == "retry" and ended.returncode == 0:
                    self.orc("cancel", ended.stdout.split()[0])
        return advice


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _processes() -> Iterator[tuple[int, str, str]]:
    """Yield (process, command, environment) of each process but this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone meanwhile
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                environment = (entry / "environ").read_bytes().decode(errors="replace")
                yield int(entry.name), command, environment


@contextmanager
def night(*, with_disk: bool) -> Iterator[Night]:
    """Yield a started night in a folder of its own, on a disk of its own where one is to be full."""
    with tempfile.TemporaryDirectory(prefix="orc-night-") as name, closing(Hook()) as hook:
        started = Night(Path(name), hook)
        started.home.mkdir()
        if with_disk:
            _output("mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(started.home))
        try:
            started.orc_up("--cluster", str(started.folder / "cluster.yaml"))
            yield started
        finally:
            started.orc("down", "--force")
            if with_disk:
                subprocess.run(["umount", "--lazy", str(started.home)], check=False)


def run_night(
    seed: int, jobs: int, faults: int, kinds: Sequence[Kind], fault_kinds: Sequence[str]
) -> tuple[Morning, list[Breach], list[str]]:
    """Return the morning of a seed, with its breaches as `verdict` returns them."""
    drawn_jobs, drawn_faults = draw(seed, jobs, faults, kinds, fault_kinds)
    with night(with_disk=any(fault.kind == "full disk" for fault in drawn_faults)) as started:
        started.run(drawn_jobs, drawn_faults)
        morning = started.morning()
        unexpected, overdue = verdict(morning)
        if unexpected or overdue:
            print((started.home / "service.log").read_text(errors="replace")[-4000:], flush=True)
    return morning, unexpected, overdue


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--faults", type=int, required=True)
    parser.add_argument("--kind", action="append", help="draw from these kinds alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the night ends its processes
    kinds, fault_kinds = [], []
    for kind in KINDS:
        if options.kind and kind.name not in options.kind:
            continue
        if (why := kind.why_skipped()) is None:
            kinds.append(kind)
        else:
            print(f"skipped: {kind.name}: {why}")
    for fault in FAULTS:
        if (why := why_no_fault(fault)) is None:
            fault_kinds.append(fault)
        else:
            print(f"skipped: {fault}: {why}")
    print(f"seed {options.seed}: {options.jobs} jobs, {options.faults} faults", flush=True)
    began_s, account = time.monotonic(), Account()
    morning, unexpected, overdue = run_night(
        options.seed, options.jobs, options.faults, kinds, fault_kinds
    )
    for entry in morning.entries:
        job = morning.jobs.get(entry.id, {})
        outcomes = [attempt["outcome"] for attempt in job.get("attempts", [])]
        reason = job.get("reason", "")[:150]
        print(f"{entry.id} ({entry.way}): {job.get('status')}, {outcomes}: {reason!r}")
    for breach in unexpected:
        print(f"BROKEN {breach.law}: {breach.job} {breach.text}")
    for sentence in overdue:
        print(f"OVERDUE {sentence}")
    verdict_file = ROOT / ".bench" / "night.json"
    verdict_file.parent.mkdir(exist_ok=True)
    figures = {
        "seed": options.seed,
        "jobs": len(morning.entries),
        "faults": [fault.kind for fault in morning.faults],
        "attempts": sum(len(job["attempts"]) for job in morning.jobs.values()),
        "seconds": time.monotonic() - began_s,
        "processor_seconds": account.used_s(),
        "broken": [dataclasses.asdict(breach) for breach in unexpected],
        "overdue": overdue,
    }
    verdict_file.write_text(json.dumps(figures, indent=1))
    account.pytest_unconfigure()
    print({name: figure for name, figure in figures.items() if name not in ("broken", "overdue")})
    return 1 if unexpected or overdue else 0


if __name__ == "__main__":
    sys.exit(main())
