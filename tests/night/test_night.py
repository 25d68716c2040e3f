"""Nights that are run, and checks of their judge: each law finds its planted breach."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from tests.night.catalogue import KINDS, Kind
from tests.night.laws import (
    LAWS,
    Advice,
    Entry,
    Inflicted,
    Morning,
    Notice,
    Trace,
    breaches,
    verdict,
)
from tests.night.night import FAULTS, draw, run_night, why_no_fault

HERE = [kind for kind in KINDS if kind.why_skipped() is None]
SHORT = ("plain-loop", "oom-at-0", "oom-at-50", "nan", "absolute-artifact", "hang")


def check(
    seed: int, jobs: int, faults: int, kinds: list[Kind], fault_kinds: tuple[str, ...]
) -> None:
    morning, unexpected, overdue = run_night(seed, jobs, faults, kinds, fault_kinds)
    assert unexpected == []
    assert overdue == []
    assert len(morning.entries) == jobs


@pytest.mark.timeout(900)
def test_a_short_night_ends_as_its_table_says() -> None:
    kinds = [kind for kind in KINDS if kind.name in SHORT]
    check(3, len(kinds), 1, kinds, ("kill a rank",))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_long_night_ends_as_its_table_says() -> None:
    check(5, 24, 8, HERE, tuple(fault for fault in FAULTS if why_no_fault(fault) is None))


# ------------------------------------------------------------------------------------ the judge


def test_a_seed_draws_the_same_night_and_every_kind_comes_once_before_one_comes_again() -> None:
    assert draw(7, 30, 9, KINDS, FAULTS) == draw(7, 30, 9, KINDS, FAULTS)
    assert draw(7, 30, 9, KINDS, FAULTS) != draw(8, 30, 9, KINDS, FAULTS)
    jobs, faults = draw(7, len(KINDS), len(FAULTS), KINDS, FAULTS)
    assert Counter(job.kind.name for job in jobs) == Counter(kind.name for kind in KINDS)
    assert Counter(fault.kind for fault in faults) == Counter(FAULTS)
    assert {job.way for job in jobs} == {"CLI", "form", "SDK"}
    assert sum(job.has_deadline for job in jobs) == 1


def test_each_kind_has_a_name_of_its_own_and_each_mark_names_a_law() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert set(kind.mended_by) <= set(LAWS)
        assert bool(kind.job) != bool(kind.typed)
        assert bool(kind.telling) == bool(kind.advice) == kind.fails


def test_a_kind_without_its_library_is_skipped_with_the_reason() -> None:
    kind = Kind(name="strange", job="-", steps=1, needs=("torch", "no_such_library"))
    assert kind.why_skipped() == "no no_such_library: pip install '.[night]'"


GOOD = Kind(name="good", job="-", steps=4)
BAD = Kind(
    name="bad",
    job="-",
    steps=4,
    ends=frozenset({"failed"}),
    failures=frozenset({"user_error"}),
    telling="KeyError",
    advice="mend",
)


def attempt(number: int, outcome: str = "succeeded", **changes: Any) -> dict[str, Any]:
    failure = (
        None if outcome == "succeeded" else {"kind": outcome, "reason": "KeyError", "excerpt": ""}
    )
    times = {
        "launched_at_s": 10.0 * number,
        "ended_at_s": 10.0 * number + 9,
        "placement": f"virtual[{number}]",
    }
    return {
        "number": number,
        "outcome": outcome,
        "failure": failure,
        "checkpoint_step": None,
        **times,
        **changes,
    }


def job(status: str, *attempts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "status": status,
        "reason": "KeyError",
        "asks": "",
        "attempts": list(attempts),
        **changes,
    }


def reported(
    *failed: dict[str, str], to_do: str = "bad-2: mend it: `orc logs bad-2`"
) -> dict[str, Any]:
    return {"failed": list(failed), "refused": [], "to_do": [to_do]}


def calm(**changes: Any) -> Morning:
    """A morning without a breach: a job that succeeded after a killed rank, and one with a bug."""
    node = {
        "name": "virtual",
        "busy": [],
        "jobs": [],
        "suspended": [],
        "driver_errors": [],
        "drained": False,
    }
    fields: dict[str, Any] = {
        "entries": (Entry(id="good-1", kind=GOOD), Entry(id="bad-2", kind=BAD)),
        "faults": (Inflicted(kind="kill a rank", at_s=15.0, until_s=15.0, job="good-1"),),
        "jobs": {
            "good-1": job("succeeded", attempt(1, "preempted"), attempt(2)),
            "bad-2": job("failed", attempt(1, "user_error", placement="virtual[0]")),
        },
        "nodes": [node],
        "traces": {
            "good-1-1": Trace(steps=((1, 11.0), (2, 12.0), (3, 13.0)), saves=(2,)),
            "good-1-2": Trace(steps=((3, 23.0), (4, 24.0))),
            "bad-2-1": Trace(steps=((1, 11.0),)),
        },
        "runs": [("good-1-1", True), ("good-1-2", True), ("bad-2-1", True)],
        "report": reported({"id": "bad-2", "sentence": "user_error: KeyError"}),
        "advice": {"bad-2": [Advice(command="orc logs bad-2", exit_code=0, output="KeyError")]},
        "notices": [Notice(id="n1", kind="orc.failed", job="bad-2")],
    }
    return Morning(**{**fields, **changes})


def changed(job_id: str, **changes: Any) -> Mapping[str, Any]:
    jobs = dict(calm().jobs)
    return {"jobs": {**jobs, job_id: {**jobs[job_id], **changes}}}


def traced(name: str, trace: Trace) -> Mapping[str, Any]:
    return {"traces": {**calm().traces, name: trace}}


def of_node(**changes: Any) -> Mapping[str, Any]:
    return {"nodes": [{**calm().nodes[0], **changes}]}


LATE, AGAIN = (
    Notice(id="n2", kind="orc.late", job="good-1"),
    Notice(id="n2", kind="orc.failed", job="bad-2"),
)
PLANTED = [
    ("no accepted job is lost", {"jobs": {"bad-2": calm().jobs["bad-2"]}}),
    ("each job ends as its row says", changed("good-1", status="failed")),
    ("each job ends as its row says", changed("bad-2", status="succeeded")),
    ("each job ends as its row says", changed("bad-2", reason="no plan fits")),
    ("each job ends as its row says", changed("good-1", status="queued", reason="waits")),
    ("each job ends as its row says", traced("good-1-2", Trace(steps=((3, 23.0),)))),
    ("each job ends as its row says", {"absent": frozenset({"good-1"})}),
    ("each job has as many attempts as its row says", {"faults": ()}),
    ("nobody innocent is accused", {"faults": ()}),
    (
        "nobody innocent is accused",
        changed("good-1", attempts=[attempt(1, "user_error"), attempt(2)]),
    ),
    (
        "nobody innocent is accused",
        of_node(suspended=[{"device": 0, "until_s": 1.0, "reason": "two ends"}]),
    ),
    ("nobody innocent is accused", of_node(drained=True)),
    ("no job runs twice at once", traced("good-1-2", Trace(steps=((3, 12.5), (4, 24.0))))),
    (
        "no job runs twice at once",
        changed("good-1", attempts=[attempt(1, "preempted", ended_at_s=21.0), attempt(2)]),
    ),
    ("no device is held by what has ended", of_node(busy=[0], jobs=["good-1"])),
    ("no process outlives its job", {"processes": [("good-1", "sleep 900")]}),
    (
        "no step is repeated beyond its checkpoint",
        traced("good-1-2", Trace(steps=((2, 22.0), (3, 23.0), (4, 24.0)))),
    ),
    ("no step is repeated beyond its checkpoint", traced("good-1-1", Trace(steps=((1, 11.0),)))),
    ("MLflow has one ended run of each attempt", {"runs": calm().runs[1:]}),
    ("MLflow has one ended run of each attempt", {"runs": [*calm().runs[1:], ("good-1-1", False)]}),
    ("the report names each failure with its telling line", {"report": reported()}),
    (
        "the report names each failure with its telling line",
        {"report": reported({"id": "bad-2", "sentence": "failed"})},
    ),
    ("each advice does what it says", {"report": reported(to_do="bad-2: buy a larger device")}),
    ("each advice does what it says", {"advice": {}}),
    (
        "each advice does what it says",
        {"advice": {"bad-2": [Advice(command="orc x", exit_code=2, output="")]}},
    ),
    (
        "each advice does what it says",
        {"advice": {"bad-2": [Advice(command="orc logs b", exit_code=0, output="")]}},
    ),
    ("each notice comes once", {"notices": []}),
    ("each notice comes once", {"notices": [*calm().notices, AGAIN]}),
    ("each notice comes once", {"notices": [*calm().notices, *calm().notices]}),
    ("each notice comes once", {"notices": [*calm().notices, LATE]}),
]


def test_a_morning_without_a_breach_has_none() -> None:
    assert breaches(calm()) == []


@pytest.mark.parametrize(("law", "changes"), PLANTED)
def test_a_planted_breach_is_found_by_its_law(law: str, changes: Mapping[str, Any]) -> None:
    assert law in {breach.law for breach in breaches(calm(**changes))}


def test_every_law_has_a_planted_breach() -> None:
    assert {law for law, _ in PLANTED} == set(LAWS)


def test_an_expected_breach_passes_and_has_to_show() -> None:
    law = "each job ends as its row says"
    marked = dataclasses.replace(BAD, mended_by={law: "04"})
    entries = (calm().entries[0], Entry(id="bad-2", kind=marked))
    unexpected, overdue = verdict(calm(entries=entries))
    assert (unexpected, len(overdue)) == ([], 1), "the mark is to be taken away"
    broken = {**changed("bad-2", status="cancelled"), "entries": entries, "notices": []}
    assert verdict(calm(**broken, report=reported())) == ([], [])
