"""Codes are state, sentences are views: with every sentence replaced by a word, all decisions and numbers are equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from string import Formatter
from typing import Any

import pytest

from orchestrator.scheduling.base import sentences
from orchestrator.scheduling.base.sentences import (
    SENTENCES,
    describe_status,
    format_waiting_sentence,
)
from orchestrator.scheduling.options.probe import ONE_SAMPLE, failed_because_of_single_sample
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.morning import make_morning_report
from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.views.records import make_job_view
from orchestrator.specs.attempt import (
    Attempt,
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    RankEnd,
)
from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_queue import played, script, seen, submitted
from tests.scheduling.transition import history
from tests.scheduling.world import (
    MemoryJournal,
    backend_of,
    play,
    random_crowd,
    random_scenario,
)

WORD = "vogelhaus"
AFTER = Dependency(job="job-1")


def word(sentence: str) -> str:
    """Return the word; "" stays, since it says that there is no sentence."""
    return WORD if sentence else ""


def reworded_attempt(attempt: Attempt) -> Attempt:
    failure = attempt.failure
    return replace(
        attempt,
        change_reason=word(attempt.change_reason),
        moved_for=word(attempt.moved_for),
        failure=None if failure is None else replace(failure, reason=word(failure.reason)),
    )


def reworded_job(job: Job) -> Job:
    return replace(
        job,
        reason=word(job.reason),
        asks=word(job.asks),
        cancel_reason=word(job.cancel_reason),
        attempts=tuple(map(reworded_attempt, job.attempts)),
    )


def reworded(state: State) -> State:
    """Return the state with the word in the place of every sentence."""
    for job in state.jobs.values():
        state = replace(state, jobs=state.jobs.replace_job(reworded_job(job)))
    suspensions = [replace(entry, reason=WORD) for entry in state.suspensions]
    return replace(state, suspensions=tuple(suspensions))


def night(
    patch: pytest.MonkeyPatch, between: Callable[[State], State], seed: int, *, is_shared: bool
) -> list[Any]:
    """Return a night's decisions, and each job's codes and numbers at its end.

    After each event, the scheduler goes on from `between(state)`.
    """
    step = Scheduler.step

    def step_on(self: Scheduler, event: Any) -> Any:
        actions = step(self, event)
        self._index = make_index(between(self.state))
        return actions

    draw, journal = random.Random(seed), MemoryJournal()
    scenario = random_crowd(draw) if is_shared else random_scenario(draw)
    with patch.context() as patched:
        patched.setattr(Scheduler, "step", step_on)
        state = play(scenario, journal, backend_of(scenario))
    return [*journal.decided, *(reworded_job(job) for job in state.jobs.values())]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_no_decision_reads_a_sentence(
    seed: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = night(monkeypatch, lambda state: state, seed, is_shared=is_shared)
    assert night(monkeypatch, reworded, seed, is_shared=is_shared) == before


def reports_of(state: State) -> Mapping[str, Any]:
    waits = WaitExplainer(state)
    return {
        "morning": asdict(make_morning_report(state, (), 0.0, state.at_s)),
        "jobs": [make_job_view(job) for job in state.jobs.values()],
        "waits": [
            waits.explain_wait(job) for job in state.jobs.values() if job.status is JobStatus.QUEUED
        ],
    }


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested data that has no parts, with its path."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, part in enumerate(value):
            yield from leaves(part, f"{path}[{index}]")
    else:
        assert not is_dataclass(value), path
        yield path, value


@pytest.mark.parametrize("make", [random_scenario, random_crowd])
def test_reports_differ_in_the_word_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, scenario = MemoryJournal(), make(random.Random(2))
    play(scenario, journal, backend_of(scenario))
    changed = 0
    for transition in history(journal.events)[::4]:
        before = dict(leaves(reports_of(transition.after)))
        with monkeypatch.context() as patched:
            patched.setattr(sentences, "SENTENCES", dict.fromkeys(SENTENCES, WORD))
            after = dict(leaves(reports_of(reworded(transition.after))))
        assert before.keys() == after.keys()
        for path, text in after.items():
            if text != before[path]:
                changed += 1
                assert isinstance(text, str), path
                assert WORD in text, path
                assert all(part in before[path] for part in text.split(WORD)), path
    assert changed > 10, "no sentence was replaced"


@pytest.mark.parametrize(
    "evidence",
    [
        Evidence(ranks=(RankEnd(rank=0, exit_code=1, log_tail=f"ValueError: {ONE_SAMPLE}"),)),
        Evidence(
            errors=(
                ErrorReport(
                    rank=0, step=0, phase="forward", type="ValueError", traceback=ONE_SAMPLE
                ),
            )
        ),
    ],
    ids=["log", "traceback"],
)
def test_a_probe_that_one_sample_cannot_train_is_known_by_what_the_program_said(
    evidence: Evidence,
) -> None:
    _, launches = played(seen(node()), submitted(1, script({1: 10.0})))
    attempt = replace(launches["job-1"], evidence=evidence)
    attempt = replace(attempt, plan=replace(attempt.plan, micro_batch_size=1))
    assert failed_because_of_single_sample(
        attempt, Failure(kind=FailureKind.USER_ERROR, reason=WORD)
    )
    empty = replace(attempt, evidence=Evidence())
    assert not failed_because_of_single_sample(
        empty, Failure(kind=FailureKind.USER_ERROR, reason=ONE_SAMPLE)
    )


def test_a_sentence_has_the_facts_that_its_key_names() -> None:
    for key, sentence in SENTENCES.items():
        fields = [name for _, name, _, _ in Formatter().parse(sentence) if name is not None]
        assert sorted(fields) == sorted(key.split()[1:]), key
    # After a failure, the last event says why the job waits.
    assert {key.split()[0] for key in SENTENCES} >= {*Pending} - {Pending.BACK_OFF}


def test_a_wait_that_no_sentence_is_about_says_its_code() -> None:
    assert format_waiting_sentence(Pending.DRAIN, (("moon", 3),)) == "drain"
    assert format_waiting_sentence(Pending.START_WINDOW, ()) == "start window"


def test_a_sentence_that_an_older_version_kept_is_shown_as_it_is() -> None:
    draw = random.Random(0)
    journal, scenario = MemoryJournal(), random_scenario(draw)
    state = play(scenario, journal, backend_of(scenario))
    job = next(iter(state.jobs.values()))
    older = replace(
        job,
        status=JobStatus.QUEUED,
        waits_for=(),
        pending=Pending.DEVICES,
        facts=(),
        reason="waits for two devices",
    )
    assert describe_status(older) == "waits for two devices"
    assert describe_status(replace(older, reason="")) == "waits for devices"


def test_what_a_job_waits_for_outranks_its_last_event() -> None:
    state, _ = played(
        seen(node()),
        submitted(1, script({1: 10.0})),
        submitted(2, script({1: 10.0}).model_copy(update={"depends_on": (AFTER,)})),
    )
    released = replace(state.jobs["job-2"], reason="was released")
    assert describe_status(released) == "waits for job-1 to succeed"
    more = replace(released, waits_for=(AFTER,) * 5)
    assert describe_status(more).endswith("job-1 to succeed and 2 more")
