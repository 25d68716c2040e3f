"""Copies a job's output folder to MLflow, in a separate process, since it imports transformers.

A whole transformers model becomes a LoggedModel, which `mlflow.transformers` and `mlflow.pyfunc` load again. So do
adapters of peft whose base model is on this machine: the LoggedModel has the adapters, and names the base's folder.
Anything else becomes artifacts under `output/`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from orchestrator.backends.mlflow.server import register_socket_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import Model

COPIED_BYTES_MAX = 16 * 2**30  # of one output folder; larger ones stay where they are
# of a job's run: PENDING, the id of its LoggedModel, or in words what became of its output
MODEL_TAG = "orc.model"
PENDING = "pending"
IN_ARTIFACTS = "output/"
TASKS: Mapping[
    str, str
] = {  # end of the name of a transformers class -> the pipeline that takes it
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
}
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_CONFIG = "adapter_config.json"
WORDY = (
    "text-generation",
    "fill-mask",
    "text-classification",
    "token-classification",
)  # tasks that need a tokenizer


def list_top_files(folder: Path) -> list[Path]:
    """Return the files directly in an output folder. Its subfolders are checkpoints of a trainer,
    and are left out.
    """
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def find_pipeline_task(folder: Path) -> str | None:
    """Return the pipeline task (such as text-generation) of the transformers model in a folder.

    None where the folder has no model with such a task.
    """
    return _read_pipeline_task(folder, has_tokenizer=_has_any(folder, TOKENIZER))


def find_base_model(folder: Path) -> tuple[Path, str] | None:
    """Return (base model's folder, its pipeline task) for the adapters in a folder.

    None where there are no adapters, or no usable base model on this machine.
    """
    try:
        name = str(json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    base = _find_local_model(name)
    if base is None or not _has_any(folder, ADAPTERS):
        return None
    task = _read_pipeline_task(
        base, has_tokenizer=_has_any(folder, TOKENIZER) or _has_any(base, TOKENIZER)
    )
    return None if task is None else (base, task)


def _read_pipeline_task(folder: Path, *, has_tokenizer: bool) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_text())
        architecture = str(config["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    task = next((task for end, task in TASKS.items() if architecture.endswith(end)), None)
    if task is None or not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return None
    return task if task not in WORDY or has_tokenizer else None


def _has_any(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def _find_local_model(model_name: str) -> Path | None:
    """Return the folder of a model: itself if the name is a path, else the model's folder in
    Hugging Face's cache, or None.
    """
    if Path(model_name).is_absolute():
        return Path(model_name)
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model_name, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(path).parent if isinstance(path, str) else None


def copy_output(home: str, tracking_uri: str, run_id: str, model_name: str, folder: str) -> None:
    """Copy the job's output folder to the artifacts of its MLflow run, and write the result or the
    error into the tag MODEL_TAG.
    """
    from mlflow import MlflowClient

    register_socket_uri(Path(home))  # whose own server the URI may name

    client = MlflowClient(tracking_uri)
    output = Path(folder)
    files = list_top_files(output)
    task = find_pipeline_task(output)
    size_bytes = sum(path.stat().st_size for path in files)
    if size_bytes > COPIED_BYTES_MAX:
        outcome = f"not copied: {size_bytes} bytes in {output}"
    elif task is not None and _can_import("transformers"):
        outcome = _find_or_log_model_id(
            client, tracking_uri, run_id, model_name, task, partial(_save_model, files, task)
        )
    elif _can_import("transformers", "peft") and (base := find_base_model(output)) is not None:
        outcome = _find_or_log_model_id(
            client, tracking_uri, run_id, model_name, base[1], partial(_save_adapters, files, *base)
        )
    else:
        for path in files:
            client.log_artifact(run_id, str(path), IN_ARTIFACTS.rstrip("/"))
        outcome = IN_ARTIFACTS
    client.set_tag(run_id, MODEL_TAG, outcome)


def _can_import(*libraries: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(library) is not None for library in libraries)


def _find_or_log_model_id(
    client: MlflowClient,
    tracking_uri: str,
    run_id: str,
    model_name: str,
    task: str,
    save_model: Callable[[Path, Model], Path],
) -> str:
    """Return the id of the run's LoggedModel; create it with `save_model` if it is missing or unfinished.

    `save_model` writes the model into a folder, and returns the folder to upload.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.models import Model

    mlflow.set_tracking_uri(tracking_uri)
    experiment = client.get_run(run_id).info.experiment_id
    for existing in client.search_logged_models(
        [experiment], filter_string=f"source_run_id = '{run_id}'"
    ):
        if existing.status == LoggedModelStatus.READY:
            return str(existing.model_id)
        client.delete_logged_model(existing.model_id)
    model = client.create_logged_model(
        experiment,
        name=re.sub(r"[^A-Za-z0-9_-]", "-", model_name),
        source_run_id=run_id,
        model_type=task,
    )
    with tempfile.TemporaryDirectory(prefix="orc-model-") as scratch:
        about: Any = Model(model_id=str(model.model_id), run_id=run_id)
        client.log_model_artifacts(model.model_id, str(save_model(Path(scratch), about)))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    return str(model.model_id)


def _save_adapters(
    files: list[Path], base_folder: Path, task: str, scratch: Path, mlflow_model: Model
) -> Path:
    """Write adapters and their base model's name in MLflow's form, and return the folder.

    The base model's weights are neither loaded nor copied.
    """
    by_name = {path.name: path for path in files}
    described = {
        path.name: path
        for path in list_top_files(base_folder)
        if path.suffix in (".json", ".txt", ".model")
    } | by_name
    adapters = [by_name.pop(name) for name in (ADAPTER_CONFIG, *ADAPTERS) if name in by_name]
    saved = _save_model(
        [path for name, path in described.items() if path not in adapters],
        task,
        scratch,
        mlflow_model,
        "peft",
    )
    shutil.rmtree(saved / "model")
    (saved / "peft").mkdir()
    for path in adapters:
        shutil.copyfile(path, saved / "peft" / path.name)
    flavor = mlflow_model.flavors["transformers"]
    del flavor["model_binary"]
    flavor |= {
        "peft_adaptor": "peft",
        "local_base_model_path": str(base_folder),
        "source_model_name": str(base_folder),
    }
    mlflow_model.model_size_bytes = sum(
        path.stat().st_size for path in saved.rglob("*") if path.is_file()
    )
    mlflow_model.save(str(saved / "MLmodel"))
    return saved


def _save_model(
    files: list[Path], task: str, scratch: Path, mlflow_model: Model, *requirements: str
) -> Path:
    """Write a model in MLflow's form, and return the folder. Its weights are linked and copied,
    never loaded.
    """
    import transformers
    from mlflow.transformers import save_model

    pipeline = transformers.pipelines.check_task(task)[1]
    if isinstance(
        pipeline["impl"], str
    ):  # a class by its path in transformers 5.24; mlflow 3.17 expects the class
        pipeline["impl"] = resolve_name(pipeline["impl"])
    (scratch / "model").mkdir()
    for path in files:
        (scratch / "model" / path.name).symlink_to(path.resolve())
    needs = [
        f"{name}=={version(name)}" for name in ("transformers", "torch", "mlflow", *requirements)
    ]
    where = str(scratch / "model"), str(scratch / "saved")
    save_model(*where, task=task, mlflow_model=mlflow_model, pip_requirements=needs)
    return scratch / "saved"


if __name__ == "__main__":
    copy_output(*sys.argv[1:])
