"""Laws of users' patterns: submission refuses what cannot run, and what it accepts runs within bounds."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from orchestrator.specs.errors import SpecError
from orchestrator.specs.globs import parse_glob
from orchestrator.specs.parse import parse_job
from orchestrator.specs.patterns import (
    PATTERN_CHARACTERS_MAX,
    LinePattern,
    compile_pattern,
    parse_count,
)
from tests.specs.test_parse import SCRIPT

ATOMS = (
    *(
        "a",
        ".",
        "\\d",
        "\\w+",
        "[a-z]",
        "[^x]",
        "(a|a)",
        "(a+)+",
        "(a*)*",
        "$",
        "^",
        "\\b",
        "x{3}",
        "a{2,900}",
        "(?:b)",
    ),
    *(
        "(?i)",
        "\\u0041",
        "\\Z",
        "(?=a)",
        "(?<!b)",
        "\\1",
        "(",
        ")",
        "[",
        "{",
        "*",
        "é",
        "\ud800",
        "\x00",
        "\\",
        "a{99999}",
    ),
    *("(?P<n>a)", "(?s).", "|", "\\x41", "\\p{L}", "(?#c)", "(?>a)", "a++"),
)
REFUSED_PATTERNS = (
    *(
        "a{2,99999}b",
        "(" * 3000 + ")" * 3000,
        "(?=a)",
        "(?<=a)b",
        "(a)\\1",
        "\\u0041",
        "a\\Z",
        "[z-a]",
        "(",
        "*",
    ),
    *("x" * (PATTERN_CHARACTERS_MAX + 1), "(?:(?:(?:a{100}){100}){100}){100}"),
)
REFUSED_GLOBS = (
    "",
    "\x00",
    "~/model.pt",
    "~ada/x",
    "[z-a]",
    "/",
    ".",
    "./",
    "a/" * 65 + "b",
    "x" * 1001,
)
CPU_S_MAX = 0.25  # of one pattern on one line


def job_with(section: str) -> Any:
    return parse_job(f"{SCRIPT}\n{section}", "job.yaml")


def quoted(pattern: str) -> str:
    return "'" + pattern.replace("'", "''") + "'"


@pytest.mark.parametrize(
    "key",
    ["success: {{log: {}}}", "phases: {{encoding: {}}}", "progress: {}", "resume: {{step: {}}}"],
)
def test_a_pattern_that_the_engine_refuses_is_one_error_at_submission(key: str) -> None:
    for pattern in REFUSED_PATTERNS:
        text = key.format(
            quoted(f"({pattern})" if key.startswith(("progress", "resume")) else pattern)
        )
        with pytest.raises(SpecError) as refused:
            job_with(text)
        assert refused.value.path.split(".")[0] == key.split(":")[0], text[:80]


def test_what_submission_accepts_is_evaluated_in_bounded_time() -> None:
    draw = random.Random(53)
    accepted = 0
    lines = [
        "a" * 45 + "!",
        "a" * 16_000,
        "".join(draw.choices("ab x1\t", k=16_000)),
        "é" * 8000,
        "\x00" * 1000,
    ]
    for _ in range(400):
        pattern = "".join(draw.choices(ATOMS, k=draw.randint(1, 6)))
        try:
            compile_pattern(pattern)
        except ValueError:
            continue
        accepted += 1
        search = LinePattern(pattern)
        assert search.problem is None
        for line in lines:
            began_s = time.thread_time()
            search.matches(line)
            assert time.thread_time() - began_s < CPU_S_MAX, pattern
    assert accepted > 50


def test_a_kept_pattern_that_the_engine_refuses_is_told_and_matches_nothing() -> None:
    for pattern in REFUSED_PATTERNS:
        search = LinePattern(pattern)
        assert not search.matches("aaaa")
        assert search.list_groups("aaaa") == []
        assert search.problem is not None
        assert "is not evaluated" in search.problem


def test_a_count_is_what_decimal_digits_write() -> None:
    assert [parse_count(text) for text in ("7", "007", "", "-1", "²", "٣", "1e3", "9" * 5000)] == [
        7,
        7,
        *[None] * 6,
    ]


@pytest.mark.parametrize(
    "key",
    ["success: {{artifacts: [{}]}}", "resume: {{checkpoints: [{}]}}", "resume: {{holds: [{}]}}"],
)
def test_a_pattern_of_files_that_cannot_work_is_one_error_at_submission(key: str) -> None:
    for pattern in REFUSED_GLOBS:
        with pytest.raises(SpecError):
            job_with(key.format('"' + pattern.replace("\x00", "\\0") + '"'))


def test_a_pattern_of_files_may_be_absolute_and_lead_upwards() -> None:
    assert parse_glob("/a//b/./*.pt") == ("/", "a", "b", "*.pt")
    assert parse_glob("../x/**/**/y**") == ("..", "x", "**", "y**")
