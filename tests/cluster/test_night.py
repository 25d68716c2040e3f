"""Night on four hosts: a host is lost for good, another one joins, and a comparison runs through it.

The comparison has four strategies and three seeds. In the morning it stands in MLflow, in the
table and in the files as if nothing had happened.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.backends.mlflow.server import HOST, make_short_socket_path
from orchestrator.service.terminal.follow import ENDS
from tests.cluster.chaos import GAP_S, JOB, SEEDS, STEPS, TRAINER, read_diary, undisturbed
from tests.cluster.machines import until
from tests.hosts import Host, hosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

PORT = 8443
NIGHT_S = 900.0
CROWD = 12
REPEATS = 3
COMPARED_STEPS = 40
HEAD = "virtual"  # the node of the host that runs `orc up`
STRATEGIES = """\
- {engine: torch, zero_stage: 0, dp: 2}
- {engine: torch, zero_stage: 2, dp: 2}
- {engine: torch, zero_stage: 3, dp: 2}
- {engine: torch, zero_stage: 0, dp: 1}
"""
COMPARED = """\
name: strategies
global_batch_size: 8
gpus: {min: 1, max: 2}
probe: never
model:
  decoder: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
data: {text: [corpus.txt], sequence_length: 32}
training: {max_steps: 40}
"""


@dataclass(slots=True)
class Night:
    """The hosts, what was submitted in the evening, and what the comparison printed and wrote."""

    machines: dict[str, Host]
    home: Path
    crowd: dict[str, int] = field(default_factory=dict)  # seed of each job of the crowd, by id
    compared: list[str] = field(default_factory=list)  # ids of the comparison's jobs
    lost: str = ""  # the host that never came back
    interrupted: str = ""  # the compared job that ran on it
    exit_code: int = -1
    view: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.machines["h1"]

    @property
    def folder(self) -> Path:
        return self.home.parent

    def orc(self, *arguments: str) -> Any:
        return self.head.orc(*arguments)

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the job as `orc show` prints it."""
        job: dict[str, Any] = self.orc("show", job_id)
        return job

    def placements(self, job_id: str) -> list[str]:
        """Return where each attempt of the job ran."""
        return [attempt["placement"] for attempt in self.job(job_id)["attempts"]]

    def losses(self, job_id: str) -> dict[int, float]:
        """Return the loss by step of the job's last attempt."""
        number = len(self.job(job_id)["attempts"])
        metrics = self.home / "jobs" / job_id / "attempts" / str(number) / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return {row["step"]: row["loss"] for row in rows}

    def submit_crowd(self) -> None:
        """Submit half of the small jobs of others."""
        for number in range(len(self.crowd), len(self.crowd) + CROWD // 2):
            seed = number % SEEDS
            file = self.folder / f"crowd{number}.yaml"
            python = sys.executable
            text = JOB.format(
                python=python, trainer=TRAINER, seed=seed, steps=STEPS, step_s=GAP_S[0]
            )
            file.write_text(text)
            (job_id,) = self.orc("submit", str(file))["ids"]
            self.crowd[job_id] = seed

    def running_member(self) -> tuple[str, str] | None:
        """Return (id, host) of the compared job that runs beside the head; None while there is none."""
        for job_id in self.compared:
            job = self.job(job_id)
            if job["status"] == "running" and job["attempts"]:
                placement = job["attempts"][-1]["placement"]
                for name in ("h2", "h3"):
                    if name in placement:
                        return job_id, name
        return None

    def runs(self) -> list[dict[str, Any]]:
        """Return name, status and tags of each run in MLflow."""
        with make_short_socket_path(self.home / "mlflow") as path:
            transport = httpx.HTTPTransport(uds=path)
            base = f"http://home.{HOST}/api/2.0/mlflow"
            with httpx.Client(transport=transport, base_url=base, timeout=30.0) as client:
                answer = client.post("/experiments/search", json={"max_results": 1000})
                ids = [row["experiment_id"] for row in answer.json().get("experiments", [])]
                body = {"experiment_ids": ids, "max_results": 1000}
                answer = client.post("/runs/search", json=body).raise_for_status()
        runs = []
        for run in answer.json().get("runs", []):
            tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
            runs.append({"status": run["info"]["status"], "id": run["info"]["run_id"], **tags})
        return runs


@contextmanager
def _compare(night: Night) -> Iterator[subprocess.Popen[str]]:
    """Start `orc compare` on the head, as somebody does in the evening; end it at the latest here."""
    (night.folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (night.folder / "compared.yaml").write_text(COMPARED)
    (night.folder / "strategies.yaml").write_text(STRATEGIES)
    # a command that enters a host begins in its root
    names = ("compared.yaml", "strategies.yaml", "table.csv", "table.md", "picture.png")
    job, strategies, csv_table, markdown, picture = (str(night.folder / name) for name in names)
    arguments = ["compare", job, "--strategies", strategies, "--repeats", str(REPEATS)]
    arguments += ["--steps", str(COMPARED_STEPS), "--timeout", str(NIGHT_S), "--json"]
    arguments += ["--table", csv_table, "--table", markdown, "--picture", picture]
    command = night.head.command(sys.executable, "-m", "orchestrator.cli", *arguments)
    process = subprocess.Popen(
        ["env", *(f"{name}={text}" for name, text in night.head.env.items()), *command],
        stdout=subprocess.PIPE,
        stderr=(night.folder / "compare.err").open("w"),
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def night() -> Iterator[Night]:
    """The night itself: its jobs, its faults, and the wait for the morning."""
    with hosts(["h1", "h2", "h3", "h4"]) as machines:
        home = machines["h1"].shared / "home"
        for host in machines.values():
            host.env |= {"ORC_HOME": str(home), "OMP_NUM_THREADS": "1"}
        night = Night(machines, home)
        service = f"{night.head.address}:{PORT}"
        night.orc("up", "--listen", service)
        try:
            for name in ("h2", "h3"):
                machines[name].orc("join", service)
            # the comparison begins beside the head, so that its host can be lost
            night.orc("drain", HEAD)
            with _compare(night) as process:
                members = f"{COMPARED_STEPS} steps each"
                errors = night.folder / "compare.err"
                until(
                    lambda: members in errors.read_text() or process.poll() is not None,
                    "the comparison's submission",
                )
                assert process.poll() is None, errors.read_text()
                ids = [job["id"] for job in night.orc("queue")["jobs"]]
                night.compared = sorted(ids, key=lambda name: int(name.rpartition("-")[2]))
                night.submit_crowd()
                until(
                    lambda: night.job(night.compared[1])["status"] in ENDS, "two members", NIGHT_S
                )
                night.interrupted, night.lost = until(
                    night.running_member, "a member beside the head", NIGHT_S, 0.05
                )
                machines[night.lost].kill()
                # one host is left for all of them, until the new one joins
                night.submit_crowd()
                machines["h4"].orc("join", service)
                night.orc("drain", HEAD, "--undo")
                output, _ = process.communicate(timeout=NIGHT_S)
                night.exit_code = process.returncode
                night.view = json.loads(output)
            ids = [*night.crowd, *night.compared]
            until(
                lambda: all(night.job(job_id)["status"] in ENDS for job_id in ids),
                "the end of all jobs",
                NIGHT_S,
                1.0,
            )
            yield night
        finally:
            night.orc("down", "--force")


def test_a_host_that_is_lost_for_good_ends_no_job_and_a_new_one_takes_work(night: Night) -> None:
    statuses = {job_id: night.job(job_id)["status"] for job_id in (*night.crowd, *night.compared)}
    assert set(statuses.values()) == {"succeeded"}, statuses
    attempts = night.job(night.interrupted)["attempts"]
    assert attempts[0]["outcome"] in ("node_lost", "startup"), attempts
    assert night.lost in attempts[0]["placement"]
    assert not [attempt for attempt in attempts[1:] if night.lost in attempt["placement"]]
    placements = [place for job_id in statuses for place in night.placements(job_id)]
    assert [place for place in placements if "h4" in place], "the new host took nothing"


def test_the_crowd_trains_as_an_undisturbed_run_does(night: Night) -> None:
    for job_id, seed in night.crowd.items():
        expected = undisturbed(night.folder / f"undisturbed{seed}", seed)
        lines = read_diary(night.home / "jobs" / job_id / "output")
        assert {line["step"]: line["loss"] for line in lines} == expected, job_id


def test_the_comparison_is_a_table_as_if_nothing_had_happened(night: Night) -> None:
    assert night.exit_code == 0
    assert night.view["complete"]
    assert [(row["outcome"], row["repeats"]) for row in night.view["rows"]] == [
        ("finished", REPEATS)
    ] * 4
    with (night.folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["outcome"], row["repeats"]) for row in rows] == [("finished", str(REPEATS))] * 4
    assert "Losses agree" in night.view["verdict"], night.view["verdict"]
    assert (night.folder / "picture.png").stat().st_size > 0
    again = night.orc("compare", night.compared[0])
    assert again["rows"] == night.view["rows"]


def test_every_strategy_and_seed_trained_every_step_once(night: Night) -> None:
    """Strategies of one seed agree at each step, and the seeds differ."""
    curves = [night.losses(job_id) for job_id in night.compared]
    for number, curve in enumerate(curves):
        assert list(curve) == list(range(1, COMPARED_STEPS + 1))
        first_of_seed = curves[number - number % 4]
        assert curve == pytest.approx(first_of_seed, rel=1e-3)
    assert len({curves[number][COMPARED_STEPS] for number in (0, 4, 8)}) == REPEATS


def test_mlflow_has_each_attempt_once_and_the_comparison_with_its_verdict(night: Night) -> None:
    wanted = Counter(
        (job_id, str(attempt["number"]))
        for job_id in night.compared
        for attempt in night.job(job_id)["attempts"]
    )

    def is_complete() -> bool:
        runs = night.runs()
        ended = [run for run in runs if run["status"] != "RUNNING" and "orc.comparison" in run]
        return Counter((run["orc.job_id"], run["orc.attempt"]) for run in ended) == wanted

    until(is_complete, f"one ended run of each of {sorted(wanted)}")
    (parent,) = [run for run in night.runs() if "orc.comparison_of" in run]
    children = [run for run in night.runs() if "orc.comparison" in run]
    assert {run["mlflow.parentRunId"] for run in children} == {parent["id"]}
    assert parent["status"] == "FINISHED"
    assert night.view["verdict"].split(".")[0] in parent["mlflow.note.content"]
