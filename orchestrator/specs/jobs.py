"""An immutable mapping of jobs by id. Copies share all unchanged parts."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.specs.job_record import Job

BUCKETS = 256
CHUNK = 128  # jobs that are copied together when one of them is replaced


class Jobs(Mapping[str, "Job"]):
    """An immutable mapping of jobs by id, in the order of submission.

    A copy costs a chunk and the list of chunks. With 10,000 jobs: 0.7 us for one job changed, 6 us for one more, 10 us
    for one less. The copy of a dict takes 26 us (measured, python 3.11, one Xeon core, 2026-11).
    """

    __slots__ = ("_chunks", "_count", "_orders")

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        chunks: dict[int, dict[str, Job]] = {}
        orders: list[dict[str, int]] = [{} for _ in range(BUCKETS)]
        for job in sorted(jobs, key=lambda job: job.order):
            chunks.setdefault(job.order // CHUNK, {})[job.id] = job
            orders[hash(job.id) % BUCKETS][job.id] = job.order
        self._chunks = chunks  # by order
        self._orders = tuple(
            orders
        )  # of each id, by hash: strings keep theirs, so that this costs nothing
        self._count = sum(map(len, orders))

    def __getitem__(self, job_id: str) -> Job:
        return self._chunks[self._orders[hash(job_id) % BUCKETS][job_id] // CHUNK][job_id]

    def __iter__(self) -> Iterator[str]:
        return (job_id for chunk in self._chunks.values() for job_id in chunk)

    def __len__(self) -> int:
        return self._count

    def values(self) -> ValuesView[Job]:
        return _Values(self)

    def items(self) -> ItemsView[str, Job]:
        return _Items(self)

    def __repr__(self) -> str:
        return f"Jobs({list(self.values())})"

    def replace_job(self, job: Job) -> Jobs:
        """Return a copy in which `job` replaces the job with its id, or is added."""
        number = job.order // CHUNK
        chunk = self._chunks.get(number, {})
        chunks = {**self._chunks, number: {**chunk, job.id: job}}
        if job.id in chunk:
            return _make_jobs(chunks, self._orders, self._count)
        assert job.id not in self, f"{job.id} has another order"
        return _make_jobs(
            chunks, self._make_index_with(job.id, {job.id: job.order}), self._count + 1
        )

    def remove_job(self, job_id: str) -> Jobs:
        """Return a copy without this job."""
        number = self[job_id].order // CHUNK
        chunk = {other: job for other, job in self._chunks[number].items() if other != job_id}
        chunks = {**self._chunks, number: chunk}
        if not chunk:
            del chunks[number]
        return _make_jobs(chunks, self._make_index_with(job_id, {}), self._count - 1)

    def iterate_changed_since(self, earlier_jobs: Jobs) -> Iterator[Job]:
        """Yield each job that is not the same object in `earlier_jobs`; chunks shared by both are
        skipped.
        """
        for number, chunk in self._chunks.items():
            before = earlier_jobs._chunks.get(number, {})
            if chunk is not before:
                yield from (job for job_id, job in chunk.items() if before.get(job_id) is not job)

    def _make_index_with(
        self, job_id: str, chunk_of_id: dict[str, int]
    ) -> tuple[dict[str, int], ...]:
        """Return a copy of the index in which this entry replaces the earlier entry of the job id."""
        number = hash(job_id) % BUCKETS
        bucket = {
            other: order for other, order in self._orders[number].items() if other != job_id
        } | chunk_of_id
        return (*self._orders[:number], bucket, *self._orders[number + 1 :])


class _Values(ValuesView["Job"]):
    _mapping: Jobs

    def __iter__(self) -> Iterator[Job]:
        return (job for chunk in self._mapping._chunks.values() for job in chunk.values())


class _Items(ItemsView[str, "Job"]):
    _mapping: Jobs

    def __iter__(self) -> Iterator[tuple[str, Job]]:
        return (item for chunk in self._mapping._chunks.values() for item in chunk.items())


def _make_jobs(
    chunks: dict[int, dict[str, Job]], orders: tuple[dict[str, int], ...], job_count: int
) -> Jobs:
    jobs = Jobs.__new__(Jobs)
    jobs._chunks = chunks
    jobs._orders = orders
    jobs._count = job_count
    return jobs
