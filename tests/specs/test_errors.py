"""Laws of error texts: words stay whole."""

from __future__ import annotations

import pytest

from orchestrator.specs.errors import GIVEN_MAX, LINE, SpecError
from orchestrator.specs.parse import parse_job


def test_a_long_list_of_allowed_keys_is_cut_between_words_within_80_columns() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job("name: a\nglobal_batch_size: 1\ncommand: x\nnonsense: 1\n", "job.yaml")
    lines = str(refused.value).splitlines()
    text = "\n".join(lines).partition("allowed: ")[2].partition("\n  to do")[0]
    assert max(map(len, lines)) <= LINE
    assert " ".join(text.split()) == refused.value.allowed
    assert "on_caught_oom" in text.replace(",", " ").split()


def test_a_long_value_is_cut_between_words() -> None:
    text = str(SpecError("no", got="word " * GIVEN_MAX))
    assert text.endswith(" word ...")
    assert str(SpecError("no", got="x" * 2 * GIVEN_MAX)).endswith("xx ...")
