"""What `orc plan --export` writes trains, run bare, with the micro-batch, the ranks and the files of its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import export_job, plan_job
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError

TRAIN = """
import json, os, sys
import yaml
import torch.distributed as dist
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
keys = {}
for name in ("config.yaml", flags.get("--config", "")):
    if os.path.exists(name):
        keys |= yaml.safe_load(open(name))
size = int(flags.get("--batch") or keys["batch"])
line = {"world": world, "micro": size, "accumulation": flags.get("--accumulate"), "note": flags.get("--note")}
line |= {"lr": keys.get("lr"), "stage": None}
if "--deepspeed" in flags:
    line["stage"] = json.load(open(flags["--deepspeed"]))["zero_optimization"]["stage"]
if int(os.environ.get("RANK", "0")) == 0:
    print(json.dumps(line))
"""
SHARED: dict[str, Any] = {
    "name": "job",
    "python": sys.executable,
    "global_batch_size": 32,
    "command": "python train.py --note 'a $HOME \"b\"'",
    "profile": {"parameters": 2 * 10**8, "activations_per_sample": "600MiB"},
}
BATCH = {"flag": "--batch", "default": 32}
STEPS = {"gradient_accumulation_steps": {"flag": "--accumulate", "default": 1}}


def exported(folder: Path, cards: str, **changes: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what the exported script says, run bare, and the settings of the plan that `orc plan` shows."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "job.yaml").write_text(yaml.safe_dump({**SHARED, **changes}))
    spec = read_job(folder / "job.yaml", to_run=False)
    nodes = make_idle_nodes(parse_cards(cards))
    answer = plan_job(spec, nodes)
    assert answer["chosen"] is not None
    script = export_job(spec, nodes, (), folder / "out")
    bare = {name: value for name, value in os.environ.items() if not name.startswith("ORC_")}
    ended = subprocess.run([script], env=bare, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout), answer["frontier"][answer["chosen"]]["settings"]


@pytest.mark.parametrize(
    ("cards", "changes"),
    [
        ("rtx3060-12gb", {"knobs": {"micro_batch_size": BATCH, **STEPS}}),
        ("2xrtx3090", {"gpus": 2, "launch": "torchrun", "knobs": {"micro_batch_size": BATCH, **STEPS}}),
    ],
)  # fmt: skip
def test_an_exported_plan_runs_bare_with_its_micro_batch_and_its_ranks(
    cards: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    line, plan = exported(tmp_path, cards, **changes)
    assert (str(line["world"]), str(line["micro"])) == (plan["gpus"], plan["micro_batch_size"])
    assert line["accumulation"] == plan["gradient_accumulation_steps"]
    assert line["note"] == 'a $HOME "b"'


@pytest.mark.parametrize("flag", [None, "--config"])
def test_keys_stand_in_a_copy_of_the_config_file(flag: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("batch: 32\nlr: 1e-3\n")
    config = {"file": "config.yaml"} if flag is None else {"file": "config.yaml", "flag": flag}
    knobs = {"micro_batch_size": {"key": "batch", "default": 32}, **STEPS}
    line, plan = exported(tmp_path, "rtx3060-12gb", config=config, knobs=knobs)
    assert str(line["micro"]) == plan["micro_batch_size"]
    assert line["lr"] == "1e-3"
    assert (tmp_path / "config.yaml").read_text() == "batch: 32\nlr: 1e-3\n"


def test_a_deepspeed_file_has_the_stage_of_the_plan(tmp_path: Path) -> None:
    knobs = {"micro_batch_size": BATCH, **STEPS, "deepspeed_config": {"flag": "--deepspeed"}}
    changes = {"gpus": 2, "launch": "torchrun", "precision": "bf16", "knobs": knobs}
    changes["profile"] = {"parameters": 2 * 10**9, "activations_per_sample": "300MiB"}
    line, plan = exported(tmp_path, "2xrtx3090", **changes)
    assert str(line["stage"]) == plan["zero_stage"]
    assert line["stage"] > 0


def test_what_nothing_else_runs_is_refused_and_a_folder_with_files_is_kept(tmp_path: Path) -> None:
    nodes = make_idle_nodes(parse_cards("rtx3090"))
    decoder = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    decoder["num_attention_heads"] = 2
    content = {"name": "own", "global_batch_size": 8, "model": {"decoder": decoder}}
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**content, "data": {"text": ["text.txt"]}}))
    with pytest.raises(SpecError, match="which no other launcher starts"):
        export_job(read_job(tmp_path / "own.yaml", to_run=False), nodes, (), tmp_path / "out")
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({**SHARED, "knobs": {"micro_batch_size": BATCH, **STEPS}})
    )
    with pytest.raises(SpecError, match="the folder has files"):
        export_job(read_job(tmp_path / "job.yaml", to_run=False), nodes, (), tmp_path)
