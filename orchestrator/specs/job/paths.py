"""File paths in a job, each with its key: `workdir`, `data.text[0]`, `model.factory` and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.replace import replace

KINDS_OF_FILES = ("text", "chat", "tokens", "tensors")

Change = Callable[[str, str], str]  # (key, path) -> another path


def change_paths(spec: JobSpec, change_path: Change) -> JobSpec:
    """Return the job in which each file path is replaced by what `change_path(key, path)` returns.

    `model.hf` and similar keys count if they look like paths.
    """
    files: JsonObject = {
        kind: tuple(
            change_path(f"data.{kind}[{index}]", file)
            for index, file in enumerate(getattr(spec.data, kind))
        )
        for kind in KINDS_OF_FILES
    }
    data = replace(
        spec.data,
        tokenizer=_apply_to_path(change_path, "data.tokenizer", spec.data.tokenizer),
        **files,
    )
    changed: dict[str, object] = {"data": data}
    if spec.workdir is not None:
        changed["workdir"] = change_path("workdir", spec.workdir)
    if spec.resume.before is not None:
        before = [
            _apply_to_path(change_path, f"resume.before[{index}]", word)
            for index, word in enumerate(spec.resume.before)
        ]
        changed["resume"] = spec.resume.model_copy(update={"before": tuple(before)})
    for key in ("model", "trains"):
        model = getattr(spec, key)
        if model is not None:
            changed[key] = _change_model_paths(model, key, change_path)
    return spec.model_copy(update=changed)


def list_paths(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of each file path in the job."""
    pairs: list[tuple[str, str]] = []

    def note(key: str, path: str) -> str:
        pairs.append((key, path))
        return path

    change_paths(spec, note)
    yield from pairs


def _change_model_paths(model: ModelSpec, key: str, change: Change) -> ModelSpec:
    if model.factory is not None:
        file, colon, function = model.factory.rpartition(":")
        return (
            replace(model, factory=f"{change(f'{key}.factory', file)}:{function}")
            if colon
            else model
        )
    if isinstance(model.hf, str):
        return replace(model, hf=_apply_to_path(change, f"{key}.hf", model.hf))
    return model


def _apply_to_path(change: Change, key: str, path: str | None) -> str | None:
    return change(key, path) if path is not None and path.startswith(("/", "upload:")) else path
