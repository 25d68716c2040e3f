"""Laws of taking in job files: paths are absolute, files exist, knobs are said once."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.service.intake import read_cluster, read_job, read_overrides
from orchestrator.specs.errors import SpecError

MODEL = """\
name: lm
global_batch_size: 8
model:
  decoder: {vocab_size: 9, hidden_size: 8, intermediate_size: 9, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [corpus.txt, ../other.txt]}
"""
SCRIPT = "name: s\nglobal_batch_size: 8\ncommand: python -u train.py --lr 1\n"


def job_file(folder: Path, text: str) -> Path:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "corpus.txt").write_text("a")
    (folder / "other.txt").write_text("b")
    (folder / "jobs" / "train.py").write_text("")
    path = folder / "jobs" / "job.yaml"
    path.write_text(text)
    return path


def test_files_are_found_from_the_job_file_and_made_absolute(tmp_path: Path) -> None:
    spec = read_job(job_file(tmp_path, MODEL))
    assert spec.data.text == (str(tmp_path / "jobs" / "corpus.txt"), str(tmp_path / "other.txt"))


def test_a_script_runs_in_the_folder_of_its_job_file(tmp_path: Path) -> None:
    assert read_job(job_file(tmp_path, SCRIPT)).workdir == str(tmp_path / "jobs")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL.replace("corpus", "corpse"), ["data.text[0]", "jobs/corpse.txt", "does not exist"]),
        (SCRIPT.replace("train.py", "trane.py"), ["command", "trane.py", "start at `workdir`"]),
        (SCRIPT.replace("python -u train.py", "./go.sh"), ["command", "./go.sh"]),
        (f"{SCRIPT}workdir: nowhere\n", ["workdir", "jobs/nowhere", "the folder does not exist"]),
        (
            "name: f\nglobal_batch_size: 1\nmodel: {factory: net.py:build}\n"
            "profile: {parameters: 1, activations_per_sample: 1MiB}\n",
            ["model.factory", "jobs/net.py"],
        ),
        (
            "name: f\nglobal_batch_size: 1\nmodel: {factory: train.py}\n"
            "profile: {parameters: 1, activations_per_sample: 1MiB}\n",
            ["model.factory", "path/to/file.py:function"],
        ),
        (f"{SCRIPT}knobs: {{micro_batch_size: {{flag: --lr}}}}\n", ["knobs.micro_batch_size", "'--lr'", "remove it"]),
        (
            SCRIPT.replace("--lr 1", "--lr=1") + "knobs: {micro_batch_size: {flag: --lr}}\n",
            ["knobs.micro_batch_size", "remove it from `command`"],
        ),
        (
            f"{SCRIPT}env: {{B: '2'}}\nknobs: {{micro_batch_size: {{env: B}}}}\n",
            ["knobs.micro_batch_size", "remove it from `env`"],
        ),
    ],
    ids=["data", "script", "program", "workdir", "factory", "factory form", "flag twice", "flag= twice", "env twice"],
)
def test_what_the_job_names_must_exist_and_be_said_once(tmp_path: Path, text: str, said: list[str]) -> None:
    path = job_file(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        read_job(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert [words for words in said if words not in message] == [], message


def test_a_missing_job_file_is_said_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.yaml: the file does not exist"):
        read_job(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("settings", [["zero_stage"], ["=3"], ["a=1", "a=2"]])
def test_a_setting_is_key_equals_value_once(settings: list[str]) -> None:
    with pytest.raises(SpecError, match="--set"):
        read_overrides(settings)


def test_the_embedded_cluster_is_the_one_among_the_cluster_files() -> None:
    assert read_cluster(None) == read_cluster(Path(__file__).parents[2] / "clusters" / "two-virtual-devices.yaml")
