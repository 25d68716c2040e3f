"""Laws of the form of a new job: it has every key of a job file, and writes what was typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.service.pages.form import (
    OF_KEY,
    WRITTEN,
    FormKey,
    list_form_sections,
    read_field_values,
    write_job_file,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.written import as_yaml, as_yaml_line
from orchestrator.specs.yaml_text import read_document, read_value

JOBS = sorted(Path("jobs").rglob("*.yaml"))
TEXT = """\
name: lm  # of the night
gpus: {min: 1, max: 2}
global_batch_size: 64
command: python train.py
workdir: /srv/lm
training: {max_steps: 3}
"""


def _posted(text: str, **changes: str) -> dict[str, str]:
    """Return the fields that a browser sends from the page of that text, after a user changed these."""
    return (
        {"text": text, WRITTEN: text}
        | read_field_values(text)
        | {OF_KEY + name: typed for name, typed in changes.items()}
    )


def _after(text: str, **changes: str) -> dict[str, Any]:
    return read_document(write_job_file(_posted(text, **changes)), "the job").data


@pytest.mark.parametrize("path", JOBS, ids=str)
def test_a_form_that_nobody_changed_leaves_the_file_as_it_is(path: Path) -> None:
    text = path.read_text()
    assert write_job_file(_posted(text)) == text


@pytest.mark.parametrize("path", JOBS, ids=str)
def test_a_changed_field_changes_its_key_and_no_other(path: Path) -> None:
    text = path.read_text()
    before = read_document(text, "the job").data
    assert _after(text, steps="77") == before | {"steps": 77}


def test_a_command_of_several_lines_is_no_change_and_is_shown_in_one() -> None:
    text = TEXT.replace("python train.py", "|\n  python train.py\n  --lr 1")
    shown = read_field_values(text)[f"{OF_KEY}command"]
    assert shown.strip() == "python train.py --lr 1"
    assert write_job_file(_posted(text)) == text
    assert write_job_file(_posted(text, command=shown.strip())) == text  # as a browser may send it


def test_every_key_of_the_schema_has_a_field() -> None:
    names = set()
    for section in list_form_sections():
        names |= {key.name.removeprefix(OF_KEY) for key in section.keys}
    assert {name.split(".")[0] for name in names} == set(make_job_json_schema()["properties"])
    assert {
        "training.optimizer",
        "model.decoder.hidden_size",
        "sweep.early_terminate.type",
        "knobs.devices",
    } <= names


def _key(name: str) -> FormKey:
    return next(
        key for section in list_form_sections() for key in section.keys if key.name == OF_KEY + name
    )


def test_words_of_the_schema_are_choices() -> None:
    assert _key("precision").choices == ("fp32", "bf16", "fp16")
    assert _key("training.compile").choices == ("true", "false")
    assert _key("priority").choices == ()  # a number or a word


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("command", "python -c 'x: 1' # not a comment", "python -c 'x: 1' # not a comment"),
        ("command", "[python, train.py]", ["python", "train.py"]),
        ("name", "8", "8"),
        ("progress", "[0-9]+ of (\\d+)", "[0-9]+ of (\\d+)"),
        ("priority", "high", "high"),
        ("gpus", "4", 4),
        ("gpus", "1-4", "1-4"),
        ("gpus", "{min: 2, max: 4}", {"min": 2, "max": 4}),
        ("env", "{LR: '1e-3'}", {"LR": "1e-3"}),
        ("deadline", "08:00", "08:00"),
    ],
)
def test_what_is_typed_is_what_the_file_says(name: str, typed: str, value: object) -> None:
    assert _after(TEXT, **{name: typed})[name] == value


def test_an_emptied_field_takes_its_key_away_and_a_section_without_keys() -> None:
    after = _after(TEXT, **{"training.max_steps": "", "workdir": ""})
    assert set(after) == {"name", "gpus", "global_batch_size", "command"}


def test_a_field_inside_a_section_that_the_file_has_not_makes_it() -> None:
    assert _after(TEXT, **{"degrade.allow": "numeric"})["degrade"] == {"allow": "numeric"}


def test_a_field_and_an_edited_text_both_count() -> None:
    posted = _posted(TEXT, precision="bf16") | {"text": TEXT.replace("64", "128")}
    after = read_document(write_job_file(posted), "the job").data
    assert (after["precision"], after["global_batch_size"]) == ("bf16", 128)


def test_fields_alone_write_a_file() -> None:
    assert read_document(
        write_job_file({"text": "", WRITTEN: "", f"{OF_KEY}name": "lm"}), ""
    ).data == {"name": "lm"}


def test_a_text_without_fields_is_taken_as_it_is() -> None:
    assert write_job_file({"text": "name: x  # kept"}) == "name: x  # kept"


def test_what_cannot_be_read_is_refused_by_the_name_of_its_key() -> None:
    with pytest.raises(SpecError, match="env"):
        write_job_file(_posted(TEXT, env="{A: [}"))


def test_a_field_inside_a_value_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(SpecError, match="training"):
        write_job_file(_posted(TEXT.replace("{max_steps: 3}", "fast"), **{"training.seed": "1"}))


TRAPS = (
    "1e-3",
    "1_0",
    "0x1f",
    "yes",
    "null",
    "~",
    "08:00",
    "a: b",
    "# c",
    "",
    "=",
    "<<",
    "\x85",
    "a\nb\n",
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
WORDS = st.text(max_size=20) | st.sampled_from(TRAPS)
PLAIN = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.hypothesis
@given(PLAIN)
def test_written_data_is_read_as_the_same_data(data: Any) -> None:
    assert read_document(as_yaml({"value": data}), "").data["value"] == data
    assert read_value(as_yaml_line(data), "") == data
