"""Hold, release, suspend, resume, update, retry and cancel many: as the API, the SDK and the commands have them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.attempts.start import link_source_checkpoint
from orchestrator.sdk import Client
from orchestrator.service.server.retry import choose_start, list_changed_files
from orchestrator.service.terminal.verbs import STATUSES
from orchestrator.specs.access import Role
from orchestrator.specs.attempt import Evidence
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder
from orchestrator.training.checkpoint import folder as checkpoint_folder
from tests.commands import run_orc
from tests.scheduling.factories import attempt, decoder_spec, script_spec
from tests.service.test_access import TEAMS
from tests.service.worlds import World, job_spec
from tests.test_sdk import still  # noqa: F401  a fixture

VERBS = ("hold", "release", "suspend", "resume")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, TEAMS)
    world.controller.drain_node("virtual", undo=False)  # jobs wait
    yield world
    world.journal.close()


def test_a_verb_is_for_members_of_the_jobs_team_and_audited(world: World) -> None:
    clients = {name: world.by(Role.MEMBER, name) for name in ("ada", "bob", "cyd")}
    job_id = clients["ada"].post("/jobs", json={"spec": job_spec()}).json()["id"]
    for verb in VERBS:
        assert clients["cyd"].post(f"/jobs/{verb}", json={"jobs": [job_id]}).status_code == 403
    body = {"settings": {"priority": "high"}}
    assert clients["cyd"].post(f"/jobs/{job_id}/update", json=body).status_code == 403
    assert (
        world.by(Role.VIEWER, "eve").post("/jobs/hold", json={"jobs": [job_id]}).status_code == 403
    )
    assert clients["bob"].post("/jobs/hold", json={"jobs": [job_id]}).json() == {
        "changed": [job_id]
    }
    rows = world.by(Role.ADMIN, "root").get("/audit").json()["rows"]
    assert (rows[0]["user"], rows[0]["action"], rows[0]["status"]) == (
        "bob",
        f"POST /jobs/hold {job_id}",
        200,
    )


def test_a_verb_told_twice_changes_nothing_and_all_or_none_are_changed(world: World) -> None:
    first, second = world.submit(), world.submit()
    send = world.client.post
    for verb in VERBS:
        assert send(f"/jobs/{verb}", json={"jobs": [second]}).json() == {"changed": [second]}
        version = world.controller.version
        assert send(f"/jobs/{verb}", json={"jobs": [second, second]}).json() == {"changed": []}
        assert world.controller.version == version
    world.controller.cancel_jobs([first])
    refused = send("/jobs/hold", json={"jobs": [second, first]})
    assert (refused.status_code, f"`orc retry {first}`" in refused.json()["error"]) == (409, True)
    assert all(job.held_by is None for job in world.controller.state.jobs.values())


def test_a_suspended_job_ends_its_attempt_and_goes_on_when_it_is_resumed(world: World) -> None:
    long = {**job_spec(), "training": {**job_spec()["training"], "max_steps": 100_000}}
    job_id = world.client.post("/jobs", json={"spec": long}).json()["id"]
    world.controller.drain_node("virtual", undo=True)
    world.turn_until("running")
    refused = world.client.post("/jobs/hold", json={"jobs": [job_id]})
    assert (refused.status_code, f"`orc suspend {job_id}`" in refused.json()["error"]) == (
        409,
        True,
    )
    world.client.post("/jobs/suspend", json={"jobs": [job_id]})
    world.turn_until("queued")
    shown = world.client.get(f"/jobs/{job_id}").json()["job"]
    assert (shown["held_by"] is not None, shown["attempts"][0]["outcome"]) == (True, "moved")
    assert f"`orc resume {job_id}`" in shown["reason"]
    world.client.post("/jobs/resume", json={"jobs": [job_id]})
    world.turn_until("succeeded")


def test_an_update_is_judged_as_a_submission_and_names_what_it_may_change(world: World) -> None:
    job_id = world.submit()
    send = world.client.post
    assert send(f"/jobs/{job_id}/update", json={"settings": {"priority": "high"}}).json() == {
        "changed": [job_id]
    }
    assert send(f"/jobs/{job_id}/update", json={"settings": {"priority": "100"}}).json() == {
        "changed": []
    }
    unknown = send(f"/jobs/{job_id}/update", json={"settings": {"gpus": "4"}})
    assert (unknown.status_code, "priority, deadline, time_limit" in unknown.json()["error"]) == (
        422,
        True,
    )
    for settings in (
        {"priority": "urgent"},
        {"deadline": "1969-01-01T00:00 UTC"},
        {"time_limit": "-1"},
        {},
    ):
        assert send(f"/jobs/{job_id}/update", json={"settings": settings}).status_code == 422, (
            settings
        )
    assert world.client.get(f"/jobs/{job_id}").json()["job"]["priority"] == 100


def test_a_job_above_its_teams_limit_is_refused_and_one_without_gets_the_default(
    tmp_path: Path,
) -> None:
    team = {"name": "vision", "users": ["ada"], "time_limit": "1h", "max_time_limit": "2h"}
    world = World(tmp_path, PolicySpec(teams=[team]))
    ada = world.by(Role.MEMBER)
    refused = ada.post("/jobs", json={"spec": {**job_spec(), "time_limit": "3h"}})
    assert (refused.status_code, "at most 2.0 h" in refused.json()["error"]) == (422, True)
    job_id = ada.post("/jobs", json={"spec": job_spec()}).json()["id"]
    assert world.controller.state.jobs[job_id].spec.time_limit == 3600.0
    assert (
        ada.post(f"/jobs/{job_id}/update", json={"settings": {"time_limit": "3h"}}).status_code
        == 422
    )
    world.journal.close()


def test_an_ended_job_is_submitted_again_as_a_new_one_with_its_settings(still: World) -> None:  # noqa: F811
    still.controller.drain_node("virtual", undo=False)
    with Client(still.home) as client:
        job = client.submit("job.yaml")
        with pytest.raises(ServiceError, match=f"`orc cancel {job.id}` ends it"):
            job.retry()
        job.cancel()
        again = job.retry(priority="high", **{"training.max_steps": 7})
        record = again.info()
        assert (record["retry_of"], record["continues_from"], record["priority"]) == (
            job.id,
            None,
            100,
        )
        spec = still.controller.state.jobs[again.id].spec
        assert (spec.training.max_steps, spec.time_limit) == (7, None)
        with pytest.raises(SpecError, match="nonsense"):
            job.retry(nonsense=1)
        with pytest.raises(SpecError, match=f"retries it already\n  given:   '{again.id}'"):
            job.retry()
        assert still.controller.state.submitted == 2


def ended_job(spec: JobSpec, status: JobStatus = JobStatus.FAILED) -> Job:
    """An ended job whose attempt left a checkpoint."""
    ended = replace(attempt(), evidence=Evidence(checkpoint_step=4))
    return Job(id="lm-1", spec=spec, order=1, submitted_at_s=0.0, status=status, attempts=(ended,))


def test_a_retry_continues_where_the_training_is_the_same_and_else_says_why_it_starts_over() -> (
    None
):
    spec = decoder_spec()
    job, script = ended_job(spec), ended_job(script_spec())
    assert choose_start(job, spec, ["time_limit", "gpus"])[:2] == ("lm-1", 4)
    assert (
        choose_start(job, spec, ["training.learning_rate"]).why
        == "starts over: `training` changes the training"
    )
    assert (
        choose_start(ended_job(spec, JobStatus.SUCCEEDED), spec, []).why
        == "starts over: it had succeeded"
    )
    assert choose_start(replace(job, attempts=()), spec, []) == (
        None,
        0,
        "starts over: nothing was saved",
    )
    unsaved = replace(job, attempts=(), continues_from="lm-0", continues_step=3)
    assert choose_start(unsaved, spec, [])[:2] == ("lm-0", 3)
    assert choose_start(job, spec.model_copy(update={"user": "bob"}), []).continues_from is None
    assert "knobs.resume_from" in choose_start(script, script.spec, []).why


def test_a_retry_names_data_that_changed_since_the_first_attempt(tmp_path: Path) -> None:
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    for file, changed_at_s in ((old, 50.0), (new, 150.0)):
        file.write_text("text")
        os.utime(file, (changed_at_s, changed_at_s))
    spec = decoder_spec(data={"text": [str(old), str(new)], "sequence_length": 32})
    job = ended_job(spec)
    assert list_changed_files(
        replace(job, attempts=(replace(job.attempts[0], launched_at_s=100.0),)), spec
    ) == [str(new)]


def test_a_retry_begins_with_the_files_of_the_newest_checkpoint_and_leaves_them_alone(
    tmp_path: Path,
) -> None:
    old, new = JobFolder(tmp_path, "lm-1"), JobFolder(tmp_path, "lm-2")
    for step in (4, 8):
        unfinished = checkpoint_folder.get_unfinished_checkpoint_path(old.checkpoints, 1, step)
        unfinished.mkdir(parents=True)
        (unfinished / "part").write_text(str(step))
        written = checkpoint_folder.make_manifest_entry(1, zlib.crc32(str(step).encode()))
        checkpoint_folder.write_manifest(unfinished, {"part": written})
        unfinished.rename(checkpoint_folder.get_complete_checkpoint_path(old.checkpoints, step))
    job = replace(ended_job(decoder_spec()), id="lm-2", continues_from="lm-1")
    for _ in range(2):  # a launch that is repeated changes nothing
        link_source_checkpoint(job, tmp_path)
        newest = checkpoint_folder.find_latest_complete(new.checkpoints)
        assert newest is not None
        assert (
            checkpoint_folder.read_step_of_checkpoint(newest),
            (newest / "part").read_text(),
        ) == (
            8,
            "8",
        )
        assert checkpoint_folder.find_damage(newest) == []
    assert len(checkpoint_folder.list_complete(old.checkpoints)) == 2


def test_many_jobs_are_cancelled_by_a_filter_that_somebody_confirms(still: World) -> None:  # noqa: F811
    def orc(*arguments: str) -> tuple[int, str]:
        done = run_orc(arguments, env=dict(os.environ))
        return done.returncode, done.stdout + done.stderr

    still.controller.drain_node("virtual", undo=False)
    with Client(still.home) as client:
        ids = [client.submit("job.yaml", user=user).id for user in ("ada", "bob", "ada")]
    code, output = orc("cancel", "--user", "ada")
    assert (code, "--yes" in output, ids[0] in output) == (2, True, True)
    assert orc("cancel", "--status", "failed", "--yes")[0] == 2
    assert orc("cancel")[0] == orc("cancel", ids[0], "--all")[0] == 2
    code, output = orc("cancel", "--user", "ada", "--yes", "--json")
    assert (code, json.loads(output)["cancelled"]) == (0, [ids[0], ids[2]])
    code, output = orc("queue", "--user", "ada", "--status", "cancelled", "--json")
    assert [job["id"] for job in json.loads(output)["jobs"]] == [ids[0], ids[2]]
    assert orc("queue", "--status", "idle")[0] == 2
    assert set(STATUSES) == {status.value for status in JobStatus}
    assert orc("hold", ids[1]) == (0, f"{ids[1]}: held.\n")
    assert orc("update", ids[1], "priority=7", "time_limit=2h") == (0, f"{ids[1]}: updated.\n")
    assert orc("release", ids[1])[0] == 0
    assert orc("cancel", ids[0], ids[1]) == (
        0,
        f"{ids[1]} is being cancelled. Ended before: {ids[0]}.\n",
    )
    code, output = orc("retry", ids[0], "--set", "priority=low")
    assert (code, output) == (0, f"lm-4 retries {ids[0]}: starts over: nothing was saved.\n")
