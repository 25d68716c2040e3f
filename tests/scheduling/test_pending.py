"""Seeded nights meet the reasons for which jobs wait; tests of the sentences meet the others."""

from __future__ import annotations

import random

from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.pending import Pending
from tests.scheduling.transition import history
from tests.scheduling.world import (
    MemoryJournal,
    backend_of,
    play,
    random_crowd,
    random_rush,
    random_scenario,
    random_tide,
)

NIGHTS = (random_scenario, random_tide, random_rush, random_crowd)
ELSEWHERE = {  # test_arrays, _heterogeneous, _promises, _unreadable, _verbs
    *(
        Pending.ARRAY_LIMIT,
        Pending.FOREIGN_MEMORY,
        Pending.NODES_AWAY,
        Pending.HELD,
        Pending.UNREADABLE,
    ),
}


def test_every_word_for_what_a_job_waits_for_is_met_in_some_night() -> None:
    met = set[Pending]()
    for seed in range(3):
        for night in NIGHTS:
            journal, scenario = MemoryJournal(), night(random.Random(f"{night.__name__} {seed}"))
            play(scenario, journal, backend_of(scenario))
            for t in history(journal.events):
                queued = (job for job in t.after.jobs.values() if job.status is JobStatus.QUEUED)
                met |= {get_pending_code(job, t.after.at_s) for job in queued}
    assert met >= set(Pending) - ELSEWHERE
