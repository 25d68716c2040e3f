"""Four hosts, one journal, two services: what holds when jobs span hosts, and when a host or a service is lost.

The laws are ordered, the harmless ones first: each leaves the cluster whole, but for the last one.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.attempts.durable import read_attempt_number
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.journal.ownership import LEASE_S
from orchestrator.service import demo
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.events import Finished, Submitted
from orchestrator.specs.run import JobFolder
from orchestrator.training.checkpoint import folder as checkpoint_folder
from tests.cluster.chaos import journalled_spans, overlaps
from tests.cluster.machines import Cluster, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 12
# more than a host takes between its cut and its loss: it trains on, since files are shared
MOVED_STEPS = 800
MAINTAINED_AFTER_S, MAINTAINED_S = (
    60.0,
    15.0,
)  # after the services start again, which takes a busy machine a while
FAILOVER_S = 20.0
RETRIED = ("node_lost", "startup", "hung", "preempted")
DECODER = """\
name: {name}
global_batch_size: 8
gpus: {gpus}
probe: never
model:
  decoder: {{vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{text: [corpus.txt], sequence_length: 32}}
training: {{max_steps: {steps}, checkpoint_every_steps: 4}}
"""
FOREIGN = """\
name: foreign
command: {python} {script} --data {folder}/corpus.txt --steps 4 --save-every 2
probe: never
gpus: 1
global_batch_size: 256
knobs:
  micro_batch_size: {{flag: --batch-size, default: 256}}
  gradient_accumulation_steps: {{flag: --accumulate, default: 1}}
  output_dir: {{flag: --output}}
  resume_from: {{flag: --resume}}
success: {{artifacts: [model.pt]}}
"""


def submit(cluster: Cluster, text: str, name: str) -> str:
    corpus = cluster.folder / "corpus.txt"
    if not corpus.exists():  # a rank has it mapped: one that is cut short under it ends by SIGBUS
        corpus.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    file = cluster.folder / f"{name}.yaml"
    file.write_text(text)
    spec = read_job(file).model_dump(mode="json")
    return cluster.ask(lambda client: client.submit_job(spec), f"the submission of {name}")


def decoder(cluster: Cluster, name: str, gpus: int, steps: int = STEPS) -> str:
    return submit(cluster, DECODER.format(name=name, gpus=gpus, steps=steps), name)


def losses(cluster: Cluster, job_id: str) -> dict[int, float]:
    """Return the loss by optimizer step over all attempts; a repeated step must give the same loss."""
    by_step: dict[int, float] = {}
    for path in sorted((cluster.home / "jobs" / job_id / "attempts").glob("*/metrics.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert row["loss"] == pytest.approx(by_step.get(row["step"], row["loss"]), rel=1e-3)
            by_step[row["step"]] = row["loss"]
    return by_step


def nodes_of(job: Mapping[str, Any]) -> list[set[str]]:
    """Return the nodes of each attempt."""
    return [set(re.findall(r"n\d", attempt["placement"])) for attempt in job["attempts"]]


def saves(cluster: Cluster, job_id: str) -> None:
    folder = JobFolder(cluster.home, job_id).checkpoints
    until(lambda: checkpoint_folder.find_latest_complete(folder), f"a checkpoint of {job_id}")


def logged_s(cluster: Cluster, node: str, text: str) -> float:
    """Return the time of the newest log line of a node's service that contains `text`."""
    lines = cluster.parts[f"service-{node}"].log.read_text().splitlines()
    newest = next(line for line in reversed(lines) if text in line)
    return datetime.strptime(newest[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()


def actions(cluster: Cluster, node: str) -> list[tuple[float, str]]:
    """Return the times and lines of launches and stops by a node's service."""
    lines = cluster.parts[f"service-{node}"].log.read_text().splitlines()
    action_lines = [line for line in lines if " action " in line]
    return [
        (datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp(), line)
        for line in action_lines
    ]


def only_after_a_loss(job: Mapping[str, Any]) -> None:
    """A busy machine may lose a launcher: another attempt is legal once the one before has ended so."""
    for before, after in itertools.pairwise(job["attempts"]):
        assert before["outcome"] in RETRIED, job
        assert after["launched_at_s"] >= before["ended_at_s"], (
            f"two attempts of one job at once: {job}"
        )


def roles(cluster: Cluster) -> tuple[str, str]:
    """The nodes of the service that owns the journal and of its standby, once both are there."""
    cluster.supervise()
    holder = until(cluster.serving, "a service")
    other = {"n0": "n1", "n1": "n0"}[holder]
    until(lambda: cluster.status(other, "/readyz") == 503, "its standby")
    return holder, other


def test_a_gang_over_two_hosts_trains_as_one_host_does(hosts_of_our_own: Cluster) -> None:
    cluster = hosts_of_our_own
    wide, narrow = decoder(cluster, "wide", 4), decoder(cluster, "narrow", 2)
    jobs = [cluster.await_end(wide), cluster.await_end(narrow)]
    assert [job["status"] for job in jobs] == ["succeeded"] * 2, jobs
    assert [len(nodes_of(job)[0]) for job in jobs] == [2, 1]
    assert list(losses(cluster, wide)) == list(range(1, STEPS + 1))
    assert losses(cluster, wide) == pytest.approx(losses(cluster, narrow), rel=1e-3)


def test_a_gang_of_two_hosts_stays_in_one_rack_and_its_ranks_talk_by_the_hosts_addresses(
    hosts_of_our_own: Cluster,
) -> None:
    """Nodes n0 and n1 would suit by name and load, but they stand in two racks."""
    cluster = hosts_of_our_own
    job_id = decoder(cluster, "racked", 4, steps=300)
    saves(cluster, job_id)  # every rank has spoken to every other by then
    ranks = [(pid, cluster.peers(pid)) for pid in cluster.ranks()]
    addresses = {name: host.address for name, host in cluster.hosts.items()}
    job = cluster.await_end(job_id)
    assert job["status"] == "succeeded", job
    assert all(nodes == {"n1", "n2"} for nodes in nodes_of(job)), job
    ends = [(local, other) for _, connections in ranks for local, _, other, _ in connections]
    assert len(ranks) == 4
    assert not [
        pair for pair in ends if pair[0].startswith("127.") or pair[1].startswith("127.")
    ], "by the loopback"
    assert {other for _, other in ends} == {addresses["n1"], addresses["n2"]}
    for _, connections in ranks:
        assert {other for _, _, other, _ in connections} == {addresses["n1"], addresses["n2"]}, (
            "not with every other rank"
        )


def test_out_of_memory_on_the_device_of_a_host_is_recovered_from(hosts_of_our_own: Cluster) -> None:
    cluster = hosts_of_our_own
    script = Path(demo.__file__).parent / "files" / "train_bytes.py"
    text = FOREIGN.format(python=sys.executable, script=script, folder=cluster.folder)
    job = cluster.await_end(submit(cluster, text, "foreign"))
    assert job["status"] == "succeeded", job
    outcomes = [attempt["outcome"] for attempt in job["attempts"]]
    assert outcomes[0] == "device_oom"
    assert outcomes[-1] == "succeeded"


def test_a_drained_host_takes_nothing_new(hosts_of_our_own: Cluster) -> None:
    cluster = hosts_of_our_own
    for node in ("n0", "n1"):
        cluster.ask(
            lambda client, node=node: client.drain_node(node, undo=False), f"the drain of {node}"
        )
    try:
        job = cluster.await_end(decoder(cluster, "away", 2))
    finally:
        for node in ("n0", "n1"):
            cluster.ask(
                lambda client, node=node: client.drain_node(node, undo=True),
                f"the end of the drain of {node}",
            )
    assert job["status"] == "succeeded"
    assert nodes_of(job) == [{"n2"}]


def test_a_host_that_is_cut_off_is_lost_and_its_job_goes_on_elsewhere(
    hosts_of_our_own: Cluster,
) -> None:
    cluster = hosts_of_our_own
    for node in ("n0", "n1"):
        cluster.ask(
            lambda client, node=node: client.drain_node(node, undo=False), f"the drain of {node}"
        )
    job_id = decoder(cluster, "moves", 2, steps=MOVED_STEPS)
    saves(cluster, job_id)
    for node in ("n0", "n1"):
        cluster.ask(
            lambda client, node=node: client.drain_node(node, undo=True),
            f"the end of the drain of {node}",
        )
    cluster.set_synchronous("")  # the standby database is cut off, too: nothing could be committed
    cluster.hosts["n2"].cut()
    try:
        job = cluster.await_end(job_id)
    finally:
        cluster.hosts["n2"].heal()
    assert job["status"] == "succeeded", job
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["node_lost", "succeeded"]
    assert nodes_of(job)[0] == {"n2"}
    assert "n2" not in nodes_of(job)[1]
    assert list(losses(cluster, job_id)) == list(range(1, MOVED_STEPS + 1))
    second = (
        (cluster.home / "jobs" / job_id / "attempts" / "2" / "metrics.jsonl")
        .read_text()
        .splitlines()
    )
    assert json.loads(second[0])["step"] > 4, "from its checkpoint"
    cluster.parts["ray-n2"].kill()
    cluster.parts["ray-n2"].start()
    until(
        lambda: (
            "n2"
            in cluster.ask(
                lambda client: [node["name"] for node in client.fetch_cluster()["nodes"]], "n2"
            )
        ),
        "n2",
    )
    cluster.await_replication()


def test_a_host_is_left_before_its_maintenance_and_taken_again_after_it(
    hosts_of_our_own: Cluster,
) -> None:
    cluster = hosts_of_our_own
    for node in ("n0", "n1"):
        cluster.ask(
            lambda client, node=node: client.drain_node(node, undo=False), f"the drain of {node}"
        )
    try:
        leaves = decoder(cluster, "leaves", 2, steps=MOVED_STEPS)
        saves(cluster, leaves)
        start_s = time.time() + MAINTAINED_AFTER_S
        end_s = start_s + MAINTAINED_S
        cluster.maintain("n2", start_s, end_s)
        waits = decoder(cluster, "waits", 2)  # no other host takes anything
        jobs = [cluster.await_end(leaves), cluster.await_end(waits)]
    finally:
        for node in ("n0", "n1"):
            cluster.ask(
                lambda client, node=node: client.drain_node(node, undo=True),
                f"the end of the drain of {node}",
            )
    assert [job["status"] for job in jobs] == ["succeeded"] * 2, jobs
    first, *later = jobs[0]["attempts"]
    assert (first["outcome"], nodes_of(jobs[0])[0]) == ("moved", {"n2"}), jobs[0]
    assert first["ended_at_s"] < start_s, "it ran into the maintenance"
    assert all(attempt["launched_at_s"] >= end_s for attempt in (*later, *jobs[1]["attempts"])), (
        "one began in the maintenance"
    )
    assert list(losses(cluster, leaves)) == list(range(1, MOVED_STEPS + 1))


def test_a_standby_takes_over_from_a_killed_service_and_its_jobs_run_on(
    hosts_of_our_own: Cluster,
) -> None:
    cluster = hosts_of_our_own
    holder, other = roles(cluster)
    assert cluster.status(other, "/healthz") == 200
    job_id = decoder(cluster, "survives", 2, steps=300)
    saves(cluster, job_id)
    assert roles(cluster) == (holder, other), "it failed over by itself"
    killed_s = time.time()
    cluster.parts[f"service-{holder}"].kill()
    next_id = decoder(cluster, "next", 2)
    decided_s = (
        next(e.at_s for e in cluster.events() if isinstance(e, Submitted) and e.job_id == next_id)
        - killed_s
    )
    owned_s, serving_s = (
        logged_s(cluster, other, what) - killed_s for what in ("is owned by this", "serving home=")
    )
    print(
        f"failover: lease {owned_s:.1f} s, serving {serving_s:.1f} s, next decision {decided_s:.1f} s"
    )
    assert cluster.serving() == other
    for running_id in (job_id, next_id):
        job = cluster.await_end(running_id)
        assert (job["status"], len(job["attempts"])) == ("succeeded", 1), job
    assert decided_s <= FAILOVER_S


def test_a_holder_that_is_cut_off_from_the_journal_acts_no_more(hosts_of_our_own: Cluster) -> None:
    cluster = hosts_of_our_own
    holder, other = roles(cluster)
    job_id = decoder(cluster, "fenced", 2, steps=300)
    saves(cluster, job_id)
    cluster.cut(holder, cluster.database)
    cut_s = time.time()
    try:
        until(lambda: cluster.serving() == other, "the other service")
        print(f"the other service decides after {time.time() - cut_s:.1f} s")
        next_id = decoder(cluster, "behind", 2)
        jobs = [cluster.await_end(job_id), cluster.await_end(next_id)]
        until(
            lambda: not cluster.parts[f"service-{holder}"].runs,
            "the end of the holder that was cut off",
        )
        print(f"the holder that was cut off has ended after {time.time() - cut_s:.1f} s")
    finally:
        cluster.heal(holder, cluster.database)
    assert [job["status"] for job in jobs] == ["succeeded"] * 2, jobs
    late = [line for line in actions(cluster, holder) if line[0] > cut_s + LEASE_S]
    assert not late, f"the holder that was cut off acted: {late}"
    for job in jobs:
        only_after_a_loss(job)
        assert read_attempt_number(JobFolder(cluster.home, job["id"]).epoch) == len(job["attempts"])
    with closing(Journal(cluster.dsn, reads_only=True)) as journal:
        assert (
            overlaps(
                journalled_spans(
                    list(journal.list_ended_jobs(1000)),
                    list(journal.iterate_events()),
                )
            )
            == []
        )


def test_the_queue_goes_on_when_the_primary_database_is_lost_and_nothing_is_missing(
    hosts_of_our_own: Cluster,
) -> None:
    cluster = hosts_of_our_own
    before = [decoder(cluster, f"kept{number}", 2) for number in range(2)]
    count = len(cluster.events())
    cluster.promote()

    def goes_on() -> bool:
        cluster.supervise()
        return cluster.serving() is not None

    until(goes_on, "a service on the other database")
    after = decoder(cluster, "after", 2)
    for job_id in (*before, after):
        assert cluster.await_end(job_id)["status"] == "succeeded"
    assert len(cluster.events()) > count
    ended = [
        (event.job_id, event.number) for event in cluster.events() if isinstance(event, Finished)
    ]
    assert len(ended) == len(set(ended))


def test_no_job_of_all_has_two_records_or_none(hosts_of_our_own: Cluster) -> None:
    """The last one: it looks at all jobs above."""
    from mlflow import MlflowClient

    cluster = hosts_of_our_own

    def told() -> tuple[list[str], list[str]]:
        jobs = cluster.ask(lambda client: client.list_jobs(1000), "the jobs")
        wanted = [f"{job['id']}-{attempt['number']}" for job in jobs for attempt in job["attempts"]]
        client = MlflowClient(cluster.mlflow)
        experiments = [
            experiment.experiment_id
            for experiment in client.search_experiments()
            if experiment.name != "Default"
        ]
        runs = client.search_runs(experiments, "attributes.status != 'RUNNING'", max_results=1000)
        return sorted(wanted), sorted(
            run.info.run_name for run in runs if "mlflow.parentRunId" in run.data.tags
        )

    until(lambda: (both := told())[0] == both[1], f"one record per attempt {told()}")
    with closing(cluster.client(cluster.serving() or "n0")) as client:
        assert all(job["status"] == "succeeded" for job in client.list_jobs(1000))
