"""Copies what a job left in its output folder to MLflow; a process of its own, since it imports transformers.

A whole transformers model becomes a LoggedModel, which `mlflow.transformers` and `mlflow.pyfunc` load again. Anything
else becomes artifacts under `output/`, of which nothing is claimed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

COPIED_BYTES_MAX = 16 * 2**30  # of one output folder; larger ones stay where they are
MODEL_TAG = "orc.model"  # of a job's run: PENDING, the id of its LoggedModel, or in words what became of its output
PENDING = "pending"
IN_ARTIFACTS = "output/"
TASKS: Mapping[str, str] = {  # end of the name of a transformers class -> the pipeline that takes it
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
WORDY = "text-generation", "fill-mask", "text-classification", "token-classification"  # tasks that need a tokenizer


def files_of(folder: Path) -> list[Path]:
    """The files at the top of an output folder: folders below are a trainer's checkpoints."""
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def task_of(folder: Path) -> str | None:
    """The pipeline of the transformers model in a folder; None where it holds none that a pipeline takes."""
    try:
        config = json.loads((folder / "config.json").read_text())
        architecture = str(config["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    task = next((task for end, task in TASKS.items() if architecture.endswith(end)), None)
    if task is None or not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        return None
    return task if task not in WORDY or any((folder / name).is_file() for name in TOKENIZER) else None


def main(tracking_uri: str, run_id: str, name: str, folder: str) -> None:
    """Copy the output, and say on the run by MODEL_TAG what became of it."""
    from mlflow import MlflowClient

    client, output = MlflowClient(tracking_uri), Path(folder)
    files, task = files_of(output), task_of(output)
    size_bytes = sum(path.stat().st_size for path in files)
    if size_bytes > COPIED_BYTES_MAX:
        said = f"not copied: {size_bytes} bytes in {output}"
    elif task is not None and _has_transformers():
        said = _logged_model(client, tracking_uri, run_id, name, files, task)
    else:
        for path in files:
            client.log_artifact(run_id, str(path), IN_ARTIFACTS.rstrip("/"))
        said = IN_ARTIFACTS
    client.set_tag(run_id, MODEL_TAG, said)


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


def _logged_model(client: MlflowClient, tracking_uri: str, run_id: str, name: str, files: list[Path], task: str) -> str:
    """The id of the run's LoggedModel; one that an earlier process left unfinished is made anew."""
    import mlflow
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus

    mlflow.set_tracking_uri(tracking_uri)
    experiment = client.get_run(run_id).info.experiment_id
    for known in client.search_logged_models([experiment], filter_string=f"source_run_id = '{run_id}'"):
        if known.status == LoggedModelStatus.READY:
            return str(known.model_id)
        client.delete_logged_model(known.model_id)
    model = client.create_logged_model(
        experiment, name=re.sub(r"[^A-Za-z0-9_-]", "-", name), source_run_id=run_id, model_type=task
    )
    with tempfile.TemporaryDirectory(prefix="orc-model-") as scratch:
        _saved(Path(scratch), files, task, str(model.model_id), run_id)
        client.log_model_artifacts(model.model_id, str(Path(scratch) / "saved"))
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
    return str(model.model_id)


def _saved(scratch: Path, files: list[Path], task: str, model_id: str, run_id: str) -> None:
    """Write MLflow's form of the model; its weights are linked and copied, and never loaded."""
    import transformers
    from mlflow.models import Model
    from mlflow.transformers import save_model

    known = transformers.pipelines.check_task(task)[1]
    if isinstance(known["impl"], str):  # a class by its path in transformers 5.24; mlflow 3.17 expects the class
        known["impl"] = resolve_name(known["impl"])
    (scratch / "model").mkdir()
    for path in files:
        (scratch / "model" / path.name).symlink_to(path.resolve())
    about: Any = Model(model_id=model_id, run_id=run_id)
    needs = [f"{name}=={version(name)}" for name in ("transformers", "torch", "mlflow")]
    where = str(scratch / "model"), str(scratch / "saved")
    save_model(*where, task=task, mlflow_model=about, pip_requirements=needs)


if __name__ == "__main__":
    main(*sys.argv[1:])
