"""Nights in which people step in: they hold, release and update jobs, some of which have a time limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from orchestrator.service.server.controller import Controller
from orchestrator.service.server.verbs import VERBS, make_update_change
from orchestrator.specs.errors import ServiceError, SpecError
from tests.scheduling.world import HOUR_S, Scenario

UPDATES = {
    "hurry": ("priority", "7"),
    "shorten": ("time_limit", "5min"),
    "unlimit": ("time_limit", "null"),
    "due": ("deadline", "02:45 UTC"),
}


def interrupted(scenario: Scenario) -> Scenario:
    """The scenario with time limits, and with jobs that people hold for a while, release twice, and update."""
    draw = random.Random(f"verbs {scenario.seed}")
    jobs = tuple(
        (
            at_s,
            spec.model_copy(update={"time_limit": draw.choice((None, 20.0, 120.0, 1000.0))}),
            fault,
        )
        for at_s, spec, fault in scenario.jobs
    )
    changes: list[tuple[float, Callable[[Controller], object]]] = []
    for index, (at_s, spec, _) in enumerate(jobs):
        job_id, from_s = f"{spec.name}-{index + 1}", at_s + draw.uniform(0.0, 900.0)
        if draw.random() < 0.5:
            until_s = from_s + draw.uniform(0.0, HOUR_S / 2)
            changes.append((from_s, changed(job_id, "suspend")))
            changes += [(until_s, changed(job_id, "release"))] * 2
        if draw.random() < 0.5:
            later_s = from_s + draw.uniform(0.0, 900.0)
            changes.append((later_s, changed(job_id, draw.choice([*UPDATES]))))
    return replace(scenario, jobs=jobs, changes=tuple(changes))


def changed(job_id: str, verb: str) -> Callable[[Controller], object]:
    """Return the change that a verb or an update of UPDATES makes to a job that has not ended or run for longer."""

    def change(controller: Controller) -> None:
        wanted = (
            make_update_change([UPDATES[verb]], controller.state.policy)
            if verb in UPDATES
            else VERBS[verb]("ada")
        )
        with suppress(ServiceError, SpecError):
            controller.change_jobs([job_id], wanted)

    return change
