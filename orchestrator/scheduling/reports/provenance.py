"""Provenance: model, data, optimizer and commit of a job, as text. A script states them by its
command.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.specs.job.spec import JobSpec

COMMIT_CHARACTERS = 12
NAMED_MAX = 3  # data files that are named; the others are counted
BILLION = 1e9
MILLION = 1e6


def describe_provenance(spec: JobSpec) -> dict[str, str]:
    """Return {name: text} of what the job's figures rest on: model, size, data, optimizer, learning
    rate, seed, commit.

    Unknown values are left out.
    """
    training = spec.training
    source = spec.source
    rate = spec.knobs.learning_rate
    texts = {
        "model": name_model(spec) * (spec.known_model is not None),
        "parameters": _format_parameters(spec),
    }
    if spec.is_script:
        texts["learning_rate"] = "" if rate is None or rate.default is None else str(rate.default)
    else:
        texts["data"] = _describe_data_files(spec.data.files)
        texts["optimizer"] = training.optimizer.value
        texts["learning_rate"] = f"{training.learning_rate:g}"
        texts["seed"] = str(training.seed)
    if source is not None:
        texts["commit"] = source.commit[:COMMIT_CHARACTERS] + " with changes" * source.dirty
    return {name: text for name, text in texts.items() if text}


def describe_shared_provenance(specs: Iterable[JobSpec]) -> dict[str, str]:
    """Return {name: text} as `describe_provenance`, for several jobs; differing values are joined
    by commas.
    """
    values: dict[str, dict[str, None]] = {}
    for spec in specs:
        for name, text in describe_provenance(spec).items():
            values.setdefault(name, {})[text] = None
    return {name: ", ".join(texts) for name, texts in values.items()}


def name_model(spec: JobSpec) -> str:
    """Return a name of the job's model if its file tells one, else the name of its script."""
    model = spec.known_model
    if model is not None and model.decoder is not None:
        return f"decoder of {model.decoder.num_hidden_layers} layers, hidden size {model.decoder.hidden_size}"
    if model is not None:
        hf = model.hf
        if isinstance(hf, dict):
            hf = hf.get("model_type", "transformers model")
        return str(hf or model.factory)
    command = spec.command or ()
    scripts = [part for part in command if part.endswith(".py")]
    return next(iter((*scripts, *command, spec.name)))


def _format_parameters(spec: JobSpec) -> str:
    """Return the number of parameters as `1.35B`; "" where no profile gives it."""
    profile = find_rank_profile(read_model_request(spec), RankShare(precision=spec.precision))
    if profile is None or not profile.parameters:
        return ""
    count = profile.parameters
    if count >= BILLION:
        return f"{count / BILLION:.3g}B"
    return f"{count / MILLION:.3g}M"


def _describe_data_files(files: tuple[str, ...]) -> str:
    """Return the names of the first NAMED_MAX data files, and how many more there are."""
    rest = f" and {len(files) - NAMED_MAX} more" if len(files) > NAMED_MAX else ""
    return ", ".join(files[:NAMED_MAX]) + rest
