"""Laws of reading job files: paths are absolute, files exist, knobs are set once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.models.hf import find_decoder_shape
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.service.intake.hub import make_hint_for_unknown_model
from orchestrator.service.intake.intake import (
    EMBEDDED_CLUSTER,
    read_cluster,
    read_job,
    read_overrides,
)
from orchestrator.service.intake.profiling import TraceScope
from orchestrator.specs.choices import Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.profile import Source
from orchestrator.specs.published import PROJECT_JOBS, load_published

MODEL = """\
name: lm
global_batch_size: 8
model:
  decoder: {vocab_size: 9, hidden_size: 8, intermediate_size: 9, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [corpus.txt, ../other.txt]}
"""
HF = """\
name: tune
global_batch_size: 8
model: {hf: model}
data: {chat: [corpus.txt], tokenizer: ./model}
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
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


def test_a_model_folder_is_found_from_the_job_file_and_its_configuration_read(
    tmp_path: Path,
) -> None:
    path = job_file(tmp_path, HF)
    folder = tmp_path / "jobs" / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    spec = read_job(path)
    assert spec.model is not None
    assert spec.model.hf == spec.data.tokenizer == str(folder)
    assert spec.model.config == LLAMA
    assert spec.data.chat == (str(tmp_path / "jobs" / "corpus.txt"),)


@pytest.mark.parametrize(
    ("text", "config", "messages"),
    [
        (HF, None, ["model.hf", "no config.json"]),
        (HF, "no JSON", ["model.hf", "no config.json"]),
        (
            HF.replace("hf: model", "hf: ./nowhere"),
            None,
            ["model.hf", "jobs/nowhere", "the folder does not exist"],
        ),
        (HF.replace("./model", "./nowhere"), json.dumps(LLAMA), ["data.tokenizer", "jobs/nowhere"]),
        (
            HF.replace("corpus.txt", "corpse.jsonl"),
            json.dumps(LLAMA),
            ["data.chat[0]", "corpse.jsonl"],
        ),
        (
            HF.replace("hf: model", "hf: {model_type: gpt3}"),
            "{}",
            ["model", "no such family", "give its costs"],
        ),
    ],
)
def test_a_transformers_model_that_cannot_be_planned_is_refused(
    tmp_path: Path, text: str, config: str | None, messages: list[str]
) -> None:
    path = job_file(tmp_path, text)
    (tmp_path / "jobs" / "model").mkdir()
    if config is not None:
        (tmp_path / "jobs" / "model" / "config.json").write_text(config)
    with pytest.raises(SpecError) as caught:
        read_job(path, cache_home=tmp_path / "home")
    assert [message for message in messages if message not in str(caught.value)] == [], str(
        caught.value
    )


def test_a_declared_profile_lets_any_family_be_planned(tmp_path: Path) -> None:
    profile = "profile: {parameters: 1000, activations_per_sample: 1MiB}\n"
    text = HF.replace("hf: model", "hf: {model_type: gpt2}").replace("./model", "x/y") + profile
    spec = read_job(job_file(tmp_path, text))
    declared_profile = find_rank_profile(
        read_model_request(spec), RankShare(precision=spec.precision)
    )
    assert declared_profile is not None
    assert (declared_profile.source, declared_profile.parameters) == (Source.DECLARED, 1000)


FACTORY = """\
import torch
from orchestrator.training.contract.recipe import Recipe

class Points:
    def __len__(self): return 9
    def token_count(self, index): return 1
    def batch(self, indices): return (torch.ones(len(indices), WIDTH),)

def build(config):
    module = torch.nn.Linear(WIDTH, config["outputs"])
    return Recipe(module=module, loss_sum=lambda module, batch: module(*batch).sum(), dataset=Points())
"""
OWN = "name: own\nglobal_batch_size: 8\nmodel: {factory: own.py:build, config: {outputs: 3}}\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of profiles, shared by the tests."""
    return tmp_path_factory.mktemp("home")


def own_job(folder: Path, code: str, text: str = OWN) -> Path:
    path = job_file(folder, text)
    (folder / "jobs" / "own.py").write_text(code)
    return path


@pytest.mark.timeout(300)  # a child process that imports torch
def test_a_model_without_a_profile_is_traced_once(tmp_path: Path, home: Path) -> None:
    path = own_job(tmp_path, FACTORY.replace("WIDTH", "5"))
    spec = read_job(path, cache_home=home)
    profile = find_rank_profile(read_model_request(spec), RankShare(precision=spec.precision))
    assert profile is not None
    assert (profile.source, profile.parameters) == (Source.TRACED, 5 * 3 + 3)
    assert (
        find_rank_profile(
            read_model_request(spec),
            RankShare(precision=Precision.BF16, autocast=True),
        )
        is not None
    )
    stamps = stamps_of(home)
    assert read_job(path, cache_home=home) == spec
    assert stamps_of(home) == stamps, "a stored profile is not made again"
    (tmp_path / "jobs" / "own.py").write_text(FACTORY.replace("WIDTH", "6"))
    changed = find_rank_profile(
        read_model_request(read_job(path, cache_home=home)),
        RankShare(precision=spec.precision),
    )
    assert changed is not None
    assert changed.parameters == 6 * 3 + 3, "other code is another model"


def stamps_of(home: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in (home / "profiles").iterdir()}


@pytest.mark.long
@pytest.mark.timeout(300)  # a child process that imports torch
def test_arithmetic_that_no_plan_has_is_not_traced_until_one_has_it(tmp_path: Path) -> None:
    path, home = own_job(tmp_path, FACTORY.replace("WIDTH", "5")), tmp_path / "home"
    spec = read_job(
        path, cache_home=home, trace_scope=lambda _: TraceScope(cuda=(True,), numeric=False)
    )
    assert [(entry.profile.precision, entry.autocast) for entry in spec.traced] == [
        (Precision.FP32, False)
    ]
    stamps = stamps_of(home)
    every = read_job(path, cache_home=home, trace_scope=lambda _: TraceScope(cuda=(True,)))
    assert {entry.profile.precision for entry in every.traced} == {Precision.FP32, Precision.BF16}
    assert every.traced[0] == spec.traced[0]
    assert stamps.items() < stamps_of(home).items(), "what was traced before is not traced again"


@pytest.mark.timeout(300)  # a child process that imports torch
def test_a_traced_job_is_the_same_after_the_journal(tmp_path: Path, home: Path) -> None:
    spec = read_job(own_job(tmp_path, FACTORY.replace("WIDTH", "5")), cache_home=home)
    assert spec.traced
    text = spec.model_dump_json()
    again = parse_job_data(json.loads(text), "the journal")
    assert again == spec
    assert hash(again) == hash(spec)
    assert len(text) < 20_000, "segments and their worst moments, not operations"
    with pytest.raises(SpecError, match="the costs of the model are unknown"):
        parse_job_data({**json.loads(text), "traced": []}, "the submitted job")


@pytest.mark.timeout(300)  # a child process that imports torch
def test_a_model_that_cannot_be_traced_is_refused_with_its_own_error(tmp_path: Path) -> None:
    code = FACTORY.replace("WIDTH", "5").replace("module(*batch).sum()", "1 / 0")
    with pytest.raises(SpecError) as caught:
        read_job(own_job(tmp_path, code), cache_home=tmp_path / "home")
    message = str(caught.value)
    assert [
        part for part in ("job.yaml", "ZeroDivisionError", "give its costs") if part not in message
    ] == [], message


@pytest.mark.long
@pytest.mark.timeout(300)  # a child process that imports transformers
def test_an_error_of_transformers_names_its_line_and_the_factory(tmp_path: Path) -> None:
    sizes = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64"
    model = f"{{hf: {{model_type: olmo_hybrid, vocab_size: 99, pad_token_id: 500, {sizes}}}}}"
    text = f"name: own\nglobal_batch_size: 8\nmodel: {model}\ndata: {{text: [corpus.txt]}}\n"
    with pytest.raises(SpecError) as caught:
        read_job(job_file(tmp_path, text), cache_home=tmp_path / "home")
    message = str(caught.value)
    assert "(transformers/models/olmo_hybrid/modeling_olmo_hybrid.py, line " in message
    assert "write a `factory`" in message


@pytest.mark.timeout(300)  # a child process that imports torch
@pytest.mark.long
def test_the_model_that_a_script_trains_is_traced_and_may_import_from_its_project(
    tmp_path: Path,
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").touch()
    (project / "sizes.py").write_text("WIDTH = 5\n")
    text = "trains: {factory: own.py:build, config: {outputs: 3}}\ncommand: python train.py\nworkdir: ../project\n"
    path = own_job(
        tmp_path, "from sizes import WIDTH\n" + FACTORY, f"name: own\nglobal_batch_size: 8\n{text}"
    )
    spec = read_job(path, cache_home=tmp_path / "home")
    profile = find_rank_profile(read_model_request(spec), RankShare(precision=spec.precision))
    assert profile is not None
    assert (profile.source, profile.parameters) == (Source.TRACED, 5 * 3 + 3)
    assert parse_job_data(json.loads(spec.model_dump_json()), "the journal") == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "trains: {factory: own.py:build}\nmodel: {factory: own.py:build}\n",
            "`trains` says which model",
        ),
        (
            "trains: {hf: a, factory: own.py:build}\ncommand: ./train.sh\n",
            "`trains` says exactly one",
        ),
        ("trains: {factory: none.py:build}\ncommand: python train.py\n", "trains.factory"),
        ("trains: {hf: ./none}\ncommand: python train.py\n", "trains.hf"),
    ],
)
def test_a_mistake_in_what_a_script_trains_is_one_clear_error(
    tmp_path: Path, text: str, message: str
) -> None:
    path = own_job(tmp_path, FACTORY, f"name: own\nglobal_batch_size: 8\n{text}")
    (tmp_path / "jobs" / "train.py").touch()
    with pytest.raises(SpecError, match=message):
        read_job(path, cache_home=tmp_path / "home")


def test_the_interpreter_of_an_environment_is_not_resolved_into_one_without_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    (tmp_path / "jobs").mkdir()
    for name in ("train.py", "migrate_checkpoint.py"):
        (tmp_path / "jobs" / name).touch()
    path = tmp_path / "jobs" / "job.yaml"
    before = "resume: {before: ../venv/python migrate_checkpoint.py}"
    path.write_text(f"name: own\nglobal_batch_size: 8\ncommand: python train.py\n{before}\n")
    venv, jobs = tmp_path.resolve() / "venv", tmp_path.resolve() / "jobs"
    assert read_job(path).resume.before == (
        str(venv / "python"),
        str(jobs / "migrate_checkpoint.py"),
    )


def test_a_job_file_cannot_set_traced_profiles(tmp_path: Path, home: Path) -> None:
    path = own_job(tmp_path, FACTORY.replace("WIDTH", "5"))
    traced = read_job(path, cache_home=home).model_dump(mode="json")["traced"]
    path.write_text(f"{OWN}traced: {json.dumps(traced)}\n")
    with pytest.raises(SpecError, match="no setting"):
        read_job(path, cache_home=home)


@pytest.mark.parametrize("name", ["tiny_llama", "llama3_8b_lora"])
def test_the_examples_of_fine_tuning_can_be_planned_without_a_network(name: str) -> None:
    spec = read_job(Path(__file__).parents[2] / "jobs" / "finetune" / f"{name}.yaml")
    assert spec.model is not None
    assert find_decoder_shape(spec.model, spec.data.sequence_length) is not None


def test_a_script_runs_in_the_folder_of_its_job_file(tmp_path: Path) -> None:
    assert read_job(job_file(tmp_path, SCRIPT)).workdir == str(tmp_path / "jobs")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MODEL.replace("corpus", "corpse"), ["data.text[0]", "jobs/corpse.txt", "does not exist"]),
        (SCRIPT.replace("train.py", "trane.py"), ["command", "trane.py", "relative to `workdir`"]),
        (
            SCRIPT.replace("train.py", "-m old.train"),
            ["command: the script does not exist", "jobs/old/train.py", "it may have moved"],
        ),
        (
            f"{SCRIPT}config: {{file: old.yaml}}\n",
            ["config.file: the file does not exist", "'old.yaml'", "it may have moved"],
        ),
        (
            f"{SCRIPT}config: {{file: old/c.yaml}}\nknobs: {{output_dir: {{key: run.out}}}}\n",
            ["knobs.output_dir.key: the file has no such key", "'run.out'", "jobs/old/c.yaml"],
        ),
        (
            f"{SCRIPT}config: {{file: old/c.yaml}}\nknobs: {{output_dir: {{key: run.folder.x}}}}\n",
            ["knobs.output_dir.key: the file has no such key", "'run.folder.x'"],
        ),
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
        (
            f"{SCRIPT}knobs: {{micro_batch_size: {{flag: --lr}}}}\n",
            ["knobs.micro_batch_size", "'--lr'", "remove it"],
        ),
        (
            SCRIPT.replace("--lr 1", "--lr=1") + "knobs: {micro_batch_size: {flag: --lr}}\n",
            ["knobs.micro_batch_size", "remove it from `command`"],
        ),
        (
            f"{SCRIPT}env: {{B: '2'}}\nknobs: {{micro_batch_size: {{env: B}}}}\n",
            ["knobs.micro_batch_size", "remove it from `env`"],
        ),
    ],
    ids=[
        "data",
        "script",
        "module",
        "config",
        "key",
        "key in a value",
        "program",
        "workdir",
        "factory",
        "factory form",
        "flag twice",
        "flag= twice",
        "env twice",
    ],
)
def test_files_that_a_job_names_must_exist_and_knobs_be_set_once(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    path = job_file(tmp_path, text)
    (path.parent / "old").mkdir()
    (path.parent / "old/c.yaml").write_text("run: {folder: .}")
    with pytest.raises(SpecError) as caught:
        read_job(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    "text",
    [
        SCRIPT.replace("train.py", "-m pkg.train"),
        SCRIPT.replace("train.py", "-m nowhere.train"),  # it may be installed
        SCRIPT.replace("--lr 1", "-m old.train"),  # an option of the script
        f"{SCRIPT}config: {{file: c.yaml}}\nknobs: {{output_dir: {{key: run.out}}}}\n",
        f"{SCRIPT}config: {{file: made.yaml}}\nknobs: {{output_dir: {{key: run.new}}}}\n",
        f"{SCRIPT}config: {{file: bad.yaml}}\nknobs: {{output_dir: {{key: run.out}}}}\n",
    ],
    ids=["module", "module elsewhere", "option -m", "key", "file of others", "unreadable file"],
)
def test_what_may_be_there_is_not_refused(tmp_path: Path, text: str) -> None:
    path = job_file(tmp_path, text)
    (path.parent / "pkg").mkdir()
    (path.parent / "old").mkdir()
    (path.parent / "pkg/train.py").touch()
    (path.parent / "c.yaml").write_text("run: {out: null}")
    (path.parent / "made.yaml").write_text("defaults: [model]\nrun: {out: x}")
    (path.parent / "bad.yaml").write_text("run: !ours {out: x}")
    assert read_job(path).workdir == str(path.parent)


def test_a_plan_needs_no_data(tmp_path: Path) -> None:
    path = job_file(tmp_path, MODEL.replace("corpus", "corpse"))
    assert read_job(path, to_run=False).data.text[0] == str(tmp_path / "jobs" / "corpse.txt")


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.yaml: the file does not exist"):
        read_job(tmp_path / "nothing.yaml")


@pytest.mark.parametrize("settings", [["zero_stage"], ["=3"], ["a=1", "a=2"]])
def test_a_setting_is_key_equals_value_once(settings: list[str]) -> None:
    with pytest.raises(SpecError, match="--set"):
        read_overrides(settings)


def test_a_micro_batch_above_the_global_batch_is_refused_where_it_is_typed(tmp_path: Path) -> None:
    path = job_file(tmp_path, SCRIPT + "knobs: {micro_batch_size: {flag: -b, default: 16}}\n")
    assert read_job(path).global_batch_size == 8
    with pytest.raises(SpecError, match="global_batch_size=8"):
        read_job(path, read_overrides(["knobs.micro_batch_size.default=16"]))


def test_a_training_setting_that_nothing_tells_a_script_is_refused_where_it_is_typed(
    tmp_path: Path,
) -> None:
    path = job_file(tmp_path, SCRIPT)
    read_job(path, read_overrides(["training.optimizer=adamw_8bit"]))
    with pytest.raises(SpecError, match="say it in `command`"):
        read_job(path, read_overrides(["training.learning_rate=0.1"]))


def test_the_refusal_of_a_model_names_its_projects_job_and_models_of_the_table() -> None:
    hint = make_hint_for_unknown_model("facebook/musicgen-medium")
    assert PROJECT_JOBS["musicgen"] in hint
    for path in PROJECT_JOBS.values():
        assert (Path(__file__).parents[2] / path).is_file()
    assert str(len(load_published())) in hint
    assert "meta-llama/Llama-3.2-1B" in make_hint_for_unknown_model(
        "meta-llama/Llama-3.2-11B-Vision"
    )


def test_the_embedded_cluster_is_the_one_among_the_cluster_files() -> None:
    assert read_cluster(None) == read_cluster(
        Path(__file__).parents[2] / "clusters" / "two-virtual-devices.yaml"
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("measured", "{fixed_bytes: 1, sample_bytes: 1, is_of_one_rank: true}"),
        ("relative_to", "{micro_batch_size: 1, sequence_length: 1, precision: fp32}"),
    ],
)
def test_a_file_that_sets_learned_fields_is_refused(
    tmp_path: Path, field: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: a\nglobal_batch_size: 1\ncommand: python train.py\n{field}: {message}\n"
    )
    with pytest.raises(SpecError, match=f"(?s){field}.*is no setting"):
        read_job(path)


def test_a_cluster_file_names_trackers_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(EMBEDDED_CLUSTER + "trackers: [mlflow, jsonl]\n")
    assert read_cluster(path).trackers == ("mlflow", "jsonl")
    path.write_text(EMBEDDED_CLUSTER + "trackers: [json]\n")
    with pytest.raises(SpecError, match=r"no such tracker[\s\S]*jsonl"):
        read_cluster(path)
    path.write_text(EMBEDDED_CLUSTER + "trackers: []\n")
    with pytest.raises(SpecError, match="trackers"):
        read_cluster(path)


def test_a_preset_of_the_user_lies_beside_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: a\nglobal_batch_size: 16\ncommand: python train.py\ntrainer: presets/ours.yaml\n"
    )
    with pytest.raises(SpecError, match="does not exist"):
        read_job(file)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets/ours.yaml").write_text("extends: hf\nlaunch: torchrun\n")
    assert (read_job(file).trainer, read_job(file).launch) == ("hf", "torchrun")
