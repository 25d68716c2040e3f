"""Laws of the keys of other tools: each leads to a key of ours, and none hides one."""

from __future__ import annotations

import re

import pytest

from orchestrator.specs.errors import SpecError, convert_error_to_json
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job
from orchestrator.specs.synonyms import advise_key, load_job_keys

JOB = "name: a\ncommand: python train.py\nglobal_batch_size: 8\n"


def refusal(text: str) -> SpecError:
    with pytest.raises(SpecError) as refused:
        parse_job(JOB + text, "job.yaml")
    return refused.value


def test_each_key_of_another_tool_is_none_of_ours_and_leads_to_one() -> None:
    for key, hint in load_job_keys().items():
        assert key not in JobSpec.model_fields, key
        written = re.findall(r"`(\w+):", hint)
        assert set(written) <= {*JobSpec.model_fields, "array"}, (
            key,
            hint,
        )  # which a file says of many jobs
        assert written or hint.startswith("nothing: "), (key, hint)


@pytest.mark.parametrize("key", ["timeout", "Nproc-Per-Node", "accelerators"])
def test_a_key_of_another_tool_is_answered_by_its_meaning(key: str) -> None:
    assert str(advise_key(key)) in refusal(f"{key}: 4\n").hint


def test_a_setting_of_a_plan_at_the_top_level_is_told_to_be_pinned() -> None:
    assert "`--plan zero_stage=...`" in refusal("zero_stage: 3\n").hint


def test_several_unknown_keys_list_the_allowed_ones_once() -> None:
    message = str(refusal("one: 1\nother: 2\n"))
    assert (message.count("unknown key"), message.count("hang_timeout")) == (2, 1)


@pytest.mark.parametrize(("text", "least", "most"), [("1-4", 1, 4), ("2 - 8", 2, 8), ("3", 3, 3)])
def test_a_range_of_gpus_is_read(text: str, least: int, most: int) -> None:
    gpus = parse_job(f"{JOB}gpus: {text}\n", "job.yaml").gpus
    assert (gpus.min, gpus.max) == (least, most)


@pytest.mark.parametrize("text", ["4-1", "0-2", "1-", "a-b"])
def test_what_is_no_range_of_gpus_is_refused(text: str) -> None:
    assert "gpus" in str(refusal(f"gpus: {text}\n"))


def test_the_json_of_an_error_has_its_parts() -> None:
    view = convert_error_to_json(refusal("timeout: 1h\n"))
    assert (view["kind"], view["path"], view["source"]) == ("bad_input", "timeout", "job.yaml:4")
    assert "time_limit" in view["to_do"]


def test_a_script_in_the_place_of_a_job_file_leads_to_the_command_that_reads_it() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job("#!/bin/bash\n#SBATCH --gres=gpu:4\npython train.py\n", "train.sbatch")
    assert "`orc init train.sbatch > job.yaml`" in refused.value.hint
