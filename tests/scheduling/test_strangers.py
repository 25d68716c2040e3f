"""The service reacts to the ends of foreign programs as an operator would want it to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.scheduling.corpus import STRANGERS
from tests.scheduling.strangers import judge_file

RIGHT_SHARE_MIN, BOUNDED_SHARE_MIN = 0.84, 0.97  # 62 and 72 of 74


@pytest.mark.parametrize("path", STRANGERS, ids=lambda path: path.name)
def test_strangers_failures_are_followed_by_what_an_operator_would_do(path: Path) -> None:
    if not path.is_file():
        pytest.skip("logs of strangers are not beside this checkout")
    judgements = judge_file(path)
    counts = Counter(entry.grade for entry in judgements)
    others = [entry.case for entry in judgements if entry.grade != "right"]
    assert counts["dangerous"] == 0, others
    assert counts["right"] >= RIGHT_SHARE_MIN * len(judgements), others
    assert counts["right"] + counts["bounded"] >= BOUNDED_SHARE_MIN * len(judgements), others
