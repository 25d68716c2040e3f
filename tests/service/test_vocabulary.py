"""Laws of the words of other programs that `orc init` reads: each can take effect, and has one meaning."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import pytest

from orchestrator.service.commands.init.meanings import make_snake_case_word
from orchestrator.service.commands.init.typed_command import TOOLS
from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.specs.job.frameworks import Framework

SPELLINGS = VOCABULARY["spellings"]


def word_lists(data: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield (path, words) of each list in the data."""
    for key, value in data.items():
        if isinstance(value, list):
            yield f"{path}{key}", value
        elif isinstance(value, dict):
            yield from word_lists(value, f"{path}{key}.")


@pytest.mark.parametrize(("path", "words"), word_lists(VOCABULARY))
def test_each_list_holds_texts_and_none_twice(path: str, words: list[str]) -> None:
    assert all(isinstance(word, str) for word in words), path
    assert len(words) == len(set(words)), path


def test_a_spelling_has_one_meaning_and_is_written_as_it_is_looked_up() -> None:
    names = [*chain.from_iterable(SPELLINGS.values())]
    assert len(names) == len(set(names))
    assert [name for name in names if make_snake_case_word(name) != name] == []
    assert set(VOCABULARY["folders_of_anything"]) <= set(SPELLINGS["output_dir"])


def test_options_of_wrappers_and_launchers_begin_with_a_dash() -> None:
    options = [*chain.from_iterable(VOCABULARY["wrappers"].values())]
    options += [*VOCABULARY["launchers"]["switches"], *VOCABULARY["launchers"]["planned"]]
    options += [*VOCABULARY["slurm"], *VOCABULARY["slurm"].values()]
    assert [option for option in options if not option.startswith("-")] == []


def test_what_stands_for_a_wrapper_or_a_framework_names_one() -> None:
    counts = VOCABULARY["words_before_command"]
    assert counts.keys() <= VOCABULARY["wrappers"].keys()
    assert all(isinstance(count, int) and count > 0 for count in counts.values())
    assert set(TOOLS.values()) == VOCABULARY["trains"].keys() <= set(get_args(Framework))
