"""Laws of every history of the core: `violations` names each breach in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from typing import Any

from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.scheduling.queue.fair_share import (
    FORGOTTEN_DEVICE_S,
    compute_decayed_device_s_by_user,
)
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import AttemptStatus, FailureKind
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from tests.scheduling import laws_of_attempts, laws_of_moves, laws_of_policies, laws_of_turns
from tests.scheduling.laws_of_attempts import BUDGET_OF
from tests.scheduling.transition import Transition, attempts, devices

GENERAL_LAWS = (*laws_of_attempts.LAWS, *laws_of_moves.LAWS, *laws_of_turns.LAWS)


def violations(
    transitions: Sequence[Transition],
    processes: Mapping[str, SimulatedProcess] | None = None,
    *,
    complete: bool = False,
) -> list[str]:
    """Return each breach of a law once.

    `processes` are those of the simulated world; `complete` says that the history was played to its end.
    """
    breaches = [
        f"{breach} (event {index}: {transition.event.type})"
        for index, transition in enumerate(transitions)
        for law in (*GENERAL_LAWS, *laws_of_policies.LAWS[transition.after.policy.order])
        for breach in law(transition)
    ]
    launches = Counter(
        action.attempt.name
        for t in transitions
        for action in t.actions
        if isinstance(action, Launch)
    )
    breaches += [
        f"{name} was launched {count} times" for name, count in launches.items() if count > 1
    ]
    if transitions:
        last = transitions[-1].after
        breaches += [breach for job in last.jobs.values() for breach in _budgets(job)]
        breaches += _usage(transitions)
        breaches += _unfinished(last) if complete else []
        breaches += _world(last, processes or {})
    return list(dict.fromkeys(breaches))


def _budgets(job: Job) -> Iterator[str]:
    """Each budget bounds its own retries."""
    real = [attempt for attempt in job.attempts if not attempt.probe]
    kinds = [attempt.failure.kind for attempt in real if attempt.failure]
    retried = Counter(
        BUDGET_OF[kind] for kind in kinds[: max(0, len(real) - 1)] if kind in BUDGET_OF
    )
    for budget, count in retried.items():
        if count > getattr(job.spec.retries, budget):
            yield f"{job.id} was tried again {count} times on retries.{budget}={getattr(job.spec.retries, budget)}"


def _usage(transitions: Sequence[Transition]) -> Iterator[str]:
    """Everybody has used what the attempts of their jobs held, from launch to release, less what is forgotten."""
    policy = transitions[-1].after.policy
    if not policy.has_teams or any(
        t.after.policy != policy for t in transitions if any(attempts(t.after))
    ):
        return
    spans: dict[str, list[Any]] = {}  # user, devices, from, to
    for t in transitions:
        for attempt in attempts(t.after):
            user = t.after.jobs[attempt.job_id].user
            span = spans.setdefault(attempt.name, [user, len(devices(attempt)), t.after.at_s, None])
            if attempt.released and span[3] is None:
                span[3] = t.after.at_s
    now_s, life_s = transitions[-1].after.at_s, policy.half_life / log(2)
    device_s: Counter[str] = Counter()
    for user, count, from_s, to_s in spans.values():
        ages_s = now_s - (now_s if to_s is None else to_s), now_s - from_s
        device_s[user] += count * life_s * (exp(-ages_s[0] / life_s) - exp(-ages_s[1] / life_s))
    used = compute_decayed_device_s_by_user(
        transitions[-1].state, transitions[-1].state.jobs.values()
    )
    for user in {*device_s, *used}:
        if abs(device_s[user] - used.get(user, 0.0)) > 1e-6 * device_s[
            user
        ] + FORGOTTEN_DEVICE_S * len(spans):
            yield f"{user or 'nobody'} is said to have used {used.get(user)} device-seconds, and held {device_s[user]}"


def _unfinished(state: State) -> Iterator[str]:
    for job in state.jobs.values():
        if not job.status.ended:
            yield f"{job.id} never ended: {job.status} ({job.reason})"
        if not all(attempt.released for attempt in job.attempts):
            yield f"{job.id} never gave its devices back"


def _world(state: State, processes: Mapping[str, SimulatedProcess]) -> Iterator[str]:
    """The core believes what the world saw, and the world never held two gangs on one device."""
    last_on: dict[tuple[str, int], SimulatedProcess] = {}
    for name, process in processes.items():
        for device in process.devices:
            earlier = last_on.get(device)
            if earlier and (
                earlier.released_at_s is None or earlier.released_at_s > process.launched_at_s
            ):
                yield f"{name} began on {device[0]}:{device[1]} before {earlier.attempt.name} had left it"
            last_on[device] = process
    for name, process in processes.items():
        for node in (node for node in state.declared if node.name in process.nodes):
            for start_s, end_s in node.maintenance:
                if process.launched_at_s < end_s and (
                    process.ended_at_s is None or process.ended_at_s > start_s
                ):
                    yield f"{name} ran on {node.name} in its maintenance"
    for attempt in attempts(state):
        process = processes.get(attempt.name)
        if process is not None and attempt.status is AttemptStatus.ENDED:
            believed = attempt.failure.kind if attempt.failure else None
            stopped_kinds = (FailureKind.MOVED, FailureKind.TIME_LIMIT, FailureKind.PROBED)
            if (
                believed in stopped_kinds
                and attempt.moved_for
                and process.ending is FailureKind.CANCELLED
            ):
                believed = FailureKind.CANCELLED  # the world knows no reasons
            if believed is FailureKind.UNKNOWN and process.ending is FailureKind.USER_ERROR:
                # a mistake within training is one when it comes back
                believed = FailureKind.USER_ERROR
            if believed is not process.ending:
                yield f"{attempt.name} ended by {process.ending or 'success'} but is taken for {believed or 'success'}"
    if processes:
        unknown = set(processes) - {attempt.name for attempt in attempts(state)}
        yield from (f"{name} runs and the core does not know it" for name in unknown)
        absent = {attempt.name for attempt in attempts(state)} - set(processes)
        yield from (f"{name} was never begun" for name in absent)
