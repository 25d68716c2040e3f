"""Laws of arrays: every combination once, values where their placeholders stand, and one clear error."""

from __future__ import annotations

import pytest

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.array import JOBS_MAX
from orchestrator.specs.parse import parse_job, parse_job_data, parse_jobs

SWEEP = """\
name: sweep-{lr}
global_batch_size: 8
command: python train.py --lr {lr} --seed {seed} --out runs/{index} --keep ${HOME}
steps: "{steps}"
array:
  lr: [1e-3, 1e-4]
  seed: [0, 1, 2]
  steps: [100]
max_concurrent: 4
"""


def test_an_array_is_every_combination_in_order() -> None:
    specs = parse_jobs(SWEEP, "sweep.yaml")
    assert len(specs) == 6
    assert specs[4].command[2:] == (
        "--lr",
        "0.0001",
        "--seed",
        "1",
        "--out",
        "runs/4",
        "--keep",
        "${HOME}",
    )
    assert [spec.name for spec in specs] == ["sweep-0.001"] * 3 + ["sweep-0.0001"] * 3
    assert {spec.steps for spec in specs} == {100}
    assert {spec.family_name for spec in specs} == {"sweep"}
    assert [(spec.member.number, spec.member.of, spec.member.max_concurrent) for spec in specs] == [
        (n, 6, 4) for n in range(6)
    ]


def test_a_list_gives_each_job() -> None:
    text = (
        SWEEP.partition("array:")[0]
        + "array: [{lr: a, seed: 1, steps: 5}, {lr: b, seed: 2, steps: 6}]\n"
    )
    assert [(spec.name, spec.steps) for spec in parse_jobs(text, "sweep.yaml")] == [
        ("sweep-a", 5),
        ("sweep-b", 6),
    ]


def test_its_jobs_survive_the_way_to_the_service() -> None:
    for spec in parse_jobs(SWEEP, "sweep.yaml"):
        assert parse_job_data(spec.model_dump(mode="json"), "a test") == spec


def test_an_array_is_refused_where_one_job_is_expected() -> None:
    with pytest.raises(SpecError, match=r"(?s)an array is many jobs.*6 jobs.*orc submit"):
        parse_job(SWEEP, "sweep.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed: [0, 1, 2]", "seed: 3", "not the values of an array"),
        ("seed: [0, 1, 2]", "seed: []", "not the values of an array"),
        ("seed: [0, 1, 2]", "index: [0, 1, 2]", "not the values of an array|no part of the job"),
        (
            "seed: [0, 1, 2]",
            "sed: [0, 1, 2]",
            r"(?s)no part of the job says this placeholder.*'sed'.*\{seed\}",
        ),
        ("seed: [0, 1, 2]", f"seed: {list(range(JOBS_MAX))}", "too many jobs"),
        ("max_concurrent: 4", "max_concurrent: 0", r"max_concurrent: not a number of jobs"),
        ("1e-3", "A b", "name: the name has a form that is not allowed"),
        ("max_concurrent: 4", "member: {number: 0, of: 1, max_concurrent: 1}", "is no setting"),
    ],
)
def test_a_mistake_is_one_clear_error(old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_jobs(SWEEP.replace(old, new), "sweep.yaml")
