"""A model that is named by its name on the hub: the table of sizes, and a hub that does not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from orchestrator.specs.published import (
    list_smaller_siblings,
    load_published,
    load_published_config,
)

FIT = "from orchestrator.cli import main; import sys; main(sys.argv[1:])"


@pytest.mark.parametrize("name", load_published())
def test_a_model_of_the_table_has_as_many_parameters_as_the_hub_shows(name: str) -> None:
    config, expected = load_published()[name].config, load_published()[name].parameters
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(built)
    count = sum(parameter.numel() for parameter in model.parameters())
    # tied until it is read
    own_head = config["vocab_size"] * config["d_model"] if config["model_type"] == "t5" else 0
    assert count + own_head == expected


def test_tuned_versions_have_the_sizes_of_their_base_and_other_names_have_none() -> None:
    assert load_published_config("qwen/qwen2.5-7b-INSTRUCT") == dict(
        load_published()["Qwen/Qwen2.5-7B"].config
    )
    assert load_published_config("google/gemma-2-9b-it") == dict(
        load_published()["google/gemma-2-9b"].config
    )
    assert load_published_config("somebody/Qwen2.5-7B") == {}


def test_a_refusal_names_the_largest_smaller_model_of_the_line_that_fits(tmp_path: Path) -> None:
    assert list_smaller_siblings("Qwen/Qwen2.5-7B-Instruct")[:2] == [
        "Qwen/Qwen2.5-3B",
        "Qwen/Qwen2.5-1.5B",
    ]
    assert list_smaller_siblings("google/flan-t5-base") == ["google/flan-t5-small"]
    assert list_smaller_siblings("somebody/model-7b") == []
    job = tmp_path / "job.yaml"
    model = "model: {hf: Qwen/Qwen2.5-14B}\ndata: {text: [text.txt], sequence_length: 1024}\nprecision: bf16\n"
    job.write_text(f"name: tune\nglobal_batch_size: 8\n{model}")
    refused = run(
        tmp_path, FIT, "plan", str(job), "--gpu", "a100-40gb", HF_HUB_OFFLINE="1", COLUMNS="300"
    )
    assert refused.returncode == 1, refused.stderr
    (way,) = [line for line in refused.stdout.splitlines() if "a smaller model" in line]
    setting = way.rpartition("--set ")[2].strip()
    for adapters in (line for line in refused.stdout.splitlines() if "adapters of rank 16" in line):
        settings = [
            word for pair in adapters.split("--set ")[1:] for word in ("--set", pair.strip())
        ]
        adapted = run(
            tmp_path, FIT, "plan", str(job), "--gpu", "a100-40gb", *settings, HF_HUB_OFFLINE="1"
        )
        assert adapted.returncode == 0, adapted.stdout
    assert "adapters of rank 16" in refused.stdout
    assert setting.startswith("model.hf=Qwen/Qwen2.5-")
    again = run(
        tmp_path, FIT, "plan", str(job), "--gpu", "a100-40gb", "--set", setting, HF_HUB_OFFLINE="1"
    )
    assert again.returncode == 0, again.stdout


def run(
    folder: Path, program: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "HF_HOME": str(folder / "hf"),
        "ORC_HOME": str(folder / "home"),
        **env,
    }
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)


@pytest.mark.long
def test_without_the_hub_a_model_of_the_table_is_planned_and_another_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    planned = run(tmp_path, FIT, "fit", "hf:Qwen/Qwen2.5-0.5B-Instruct", HF_HUB_OFFLINE="1")
    assert planned.returncode == 0, planned.stderr
    assert "our table of" in planned.stderr
    refused = run(tmp_path, FIT, "fit", "hf:somebody/own-model", HF_HUB_OFFLINE="1")
    assert refused.returncode == 2
    assert "model.hf" in refused.stderr
    for way in ("HF_ENDPOINT", "HF_TOKEN", "config:"):
        assert way in refused.stderr


@pytest.mark.long
def test_a_head_that_takes_no_text_is_fitted_as_a_script_that_makes_its_samples(
    tmp_path: Path,
) -> None:
    sizes = {
        "d_model": 16,
        "vocab_size": 64,
        "num_mel_bins": 8,
        "max_source_positions": 32,
        "pad_token_id": 1,
    }
    sizes |= {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "max_target_positions": 32,
    }
    transformers.WhisperConfig(
        **sizes, architectures=["WhisperForConditionalGeneration"]
    ).save_pretrained(tmp_path)
    fitted = run(
        tmp_path, FIT, "fit", f"hf:{tmp_path}", "--set", "data.sequence_length=16", "--json"
    )
    assert fitted.returncode == 0, fitted.stderr
    rows = json.loads(fitted.stdout)["rows"]
    assert {(row["way"], row["devices"]) for row in rows if row["device"] == "rtx3090-24gb"} == {
        ("as a script", 1)
    }


def test_a_hub_that_never_answers_is_waited_for_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        program = (
            "from orchestrator.service.intake import hub; hub.TRY_S = 0.5; "
            "print(hub.load_hub_config('a/model'))"
        )
        ended = run(tmp_path, program, HF_ENDPOINT=endpoint)
    assert (ended.returncode, ended.stdout.strip()) == (0, "{}"), ended.stderr
