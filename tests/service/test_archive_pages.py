"""Laws of the pages' archive: each archived job is read once, and no new one is missed."""

from __future__ import annotations

from orchestrator.service.pages.archive import ENDED_MAX, FRESH, ArchivedJobs
from orchestrator.specs.job_record import Job
from orchestrator.specs.parse import parse_job
from tests.service.worlds import JOB

SPEC = parse_job(JOB, "job.yaml")


class Journal:
    """Archived jobs, and how many were read."""

    def __init__(self, count: int) -> None:
        self.jobs: list[Job] = []
        self.reads = 0
        self.add(count)

    def add(self, count: int) -> None:
        first = len(self.jobs)
        self.jobs += [
            Job(id=f"a-{n}", spec=SPEC, order=n, submitted_at_s=0.0)
            for n in range(first, first + count)
        ]

    def ended(self, limit: int, before: str | None) -> list[Job]:
        newest = self.jobs[::-1]
        start = 0 if before is None else 1 + [job.id for job in newest].index(before)
        page = newest[start : start + limit]
        self.reads += len(page)
        return page


def test_every_new_job_is_there_and_what_was_read_is_not_read_again() -> None:
    journal = Journal(50)
    archive = ArchivedJobs(journal.ended)
    for count in (0, 1, FRESH, 100):
        journal.add(count)
        assert [job.id for job in archive.list_newest()] == [job.id for job in journal.jobs[::-1]]
    journal.reads = 0
    archive.list_newest()
    assert journal.reads <= FRESH


def test_the_archive_is_bounded_in_what_it_has_and_in_what_it_reads() -> None:
    journal = Journal(10)
    archive = ArchivedJobs(journal.ended)
    journal.add(3 * ENDED_MAX)
    assert len(archive.list_newest()) == ENDED_MAX
    assert journal.reads <= ENDED_MAX + 10
