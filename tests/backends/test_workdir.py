"""Laws of config files and working directories: the plan's keys change, nothing else does, nothing of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from orchestrator.backends.attempts.workdir import link_all_except, rewrite_config
from orchestrator.specs.errors import OrchestratorError

LATENTSYNC = """\
data:
  batch_size: 1 # per rank
  train_output_dir: debug/unet
run: {mixed_precision_training: true, enable_gradient_checkpointing: true}
ckpt:
  resume_ckpt_path: ${oc.env:HOME}/latentsync.pt
optimizer:
  lr: 1e-5
  betas: [0.9, 0.999]
version: "1.10"
"""


def test_keys_take_their_values_and_everything_else_keeps_its_text() -> None:
    keys = {
        "data.batch_size": "4",
        "run.enable_gradient_checkpointing": "false",
        "ckpt.resume_ckpt_path": "/out/c.pt",
    }
    text = rewrite_config(LATENTSYNC, keys, is_json=False)
    before, after = yaml.safe_load(LATENTSYNC), yaml.safe_load(text)
    assert after["data"] == {"batch_size": 4, "train_output_dir": "debug/unet"}
    assert after["run"] == {
        "mixed_precision_training": True,
        "enable_gradient_checkpointing": False,
    }
    assert after["ckpt"]["resume_ckpt_path"] == "/out/c.pt"
    assert (after["optimizer"], after["version"]) == (before["optimizer"], "1.10")
    assert "lr: 1e-5" in text, "YAML 1.1 reads a word there, OmegaConf a number: neither is quoted"


def test_a_key_that_the_file_has_not_is_added_with_its_sections() -> None:
    assert yaml.safe_load(rewrite_config("a: 1\n", {"b.c.d": "2", "a": "3"}, is_json=False)) == {
        "a": 3,
        "b": {"c": {"d": 2}},
    }
    assert yaml.safe_load(rewrite_config("", {"b": "[x]"}, is_json=False)) == {"b": "[x]"}, (
        "a word stays a word"
    )


def test_json_stays_json() -> None:
    text = rewrite_config(
        '{"train": {"batch_size": 4, "fp16_run": true}, "x": null}',
        {"train.batch_size": "2"},
        is_json=True,
    )
    assert json.loads(text) == {"train": {"batch_size": 2, "fp16_run": True}, "x": None}


def test_a_number_of_json_stays_a_number_however_it_is_written() -> None:
    """DeepSpeed's own examples say 1e-3 and 5e8, which YAML 1.1 takes for words."""
    text = '{"optimizer": {"params": {"lr": 1e-3, "eps": 1e-8}}, "bucket": 5e8, "zero": "auto"}'
    rewritten = json.loads(
        rewrite_config(text, {"bf16.enabled": "false", "micro": "4", "folder": "[x]"}, is_json=True)
    )
    assert rewritten.pop("bf16") == {"enabled": False}
    assert (rewritten.pop("micro"), rewritten.pop("folder")) == (4, "[x]")
    assert rewritten == json.loads(text)


def test_a_key_through_a_value_is_refused() -> None:
    for text, is_json in ((LATENTSYNC, False), ('{"data": {"batch_size": 1}}', True)):
        with pytest.raises(OrchestratorError, match=r"data\.batch_size\.x"):
            rewrite_config(text, {"data.batch_size.x": "1"}, is_json=is_json)
    with pytest.raises(OrchestratorError, match="no JSON"):
        rewrite_config("data: 1", {"data": "1"}, is_json=True)


def test_the_working_directory_is_the_users_but_for_the_one_file(tmp_path: Path) -> None:
    source, target = tmp_path / "finetune", tmp_path / "attempt" / "work"
    (source / "configs" / "deep").mkdir(parents=True)
    for name in ("train.py", "configs/config.yaml", "configs/other.yaml", "configs/deep/x"):
        (source / name).write_text(name)
    place = link_all_except(source, "configs/config.yaml", target)
    place.write_text("ours")
    assert (
        link_all_except(source, "configs/config.yaml", target)
        == place
        == target / "configs" / "config.yaml"
    )
    assert {entry.name for entry in target.iterdir()} == {"train.py", "configs"}
    assert (target / "configs/other.yaml").read_text() == "configs/other.yaml"
    assert (target / "configs/deep/x").read_text() == "configs/deep/x"
    assert (source / "configs/config.yaml").read_text() == "configs/config.yaml"
