"""Laws of the map of jobs: it is a dict in order of submission, whose earlier versions stay as they were."""

from __future__ import annotations

import random
from dataclasses import dataclass

from orchestrator.specs.jobs import CHUNK, Jobs


@dataclass(frozen=True)
class Job:
    id: str
    order: int
    reason: str = ""


def test_it_is_a_dict_in_order_of_submission_and_no_version_ever_changes() -> None:
    draw = random.Random(0)
    mirror: dict[str, Job] = {}
    jobs, versions = Jobs(), []
    for order in range(1, 6 * CHUNK):
        mirror[f"job-{order}"] = Job(f"job-{order}", order)
        jobs = jobs.replace_job(mirror[f"job-{order}"])
        for _ in range(draw.choice((0, 0, 1, 3))):
            victim = draw.choice(list(mirror))
            if draw.random() < 0.5:
                del mirror[victim]
                jobs = jobs.remove_job(victim)
            else:
                mirror[victim] = Job(victim, mirror[victim].order, reason=str(draw.random()))
                jobs = jobs.replace_job(mirror[victim])
            if not mirror:
                break
        versions.append((jobs, dict(mirror)))
    for version, expected in versions:
        assert list(version.items()) == list(expected.items())
        assert list(version.values()) == list(expected.values())
        assert (list(version), len(version)) == (list(expected), len(expected))
        assert all(version[job_id] is job for job_id, job in expected.items())
    assert "job-0" not in jobs
    assert jobs == Jobs(mirror.values()) == mirror


def test_exactly_the_jobs_that_changed_between_two_versions_are_named() -> None:
    before = Jobs(Job(f"job-{order}", order) for order in range(5 * CHUNK))
    changed = Job("job-7", 7, "waits"), Job(f"job-{5 * CHUNK}", 5 * CHUNK)
    after = before.remove_job("job-200").replace_job(changed[0]).replace_job(changed[1])
    assert list(after.iterate_changed_since(before)) == list(changed)
    assert list(after.iterate_changed_since(after)) == []
    assert len(list(after.iterate_changed_since(Jobs()))) == len(after)
