"""Sizes of published models that people fine-tune, for machines that cannot reach the hub; written 2026-11-28.

Each row has the sizes of a repository's `config.json`, and its number of parameters on the hub. Tests build each model
and count. A fine-tuned model has the sizes of its base model: name that one, or write `config:`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.packaged import load_table

WRITTEN = "2026-11-28"


class PublishedModel(NamedTuple):
    """The configuration of a hub repository, and its number of parameters."""

    config: Mapping[str, Any]
    parameters: int


@lru_cache(maxsize=1)
def load_published() -> Mapping[str, PublishedModel]:
    """Return {hub name: model} of the models in `published.yaml`."""
    models = dict[str, PublishedModel]()
    for family in load_table(__package__, "published")["families"]:
        columns = family["columns"]
        for name, (parameters, *row) in family["models"].items():
            sizes = dict(zip(columns, row[: len(columns)], strict=True))
            extras: JsonObject = dict(*row[len(columns) :])
            models[name] = PublishedModel(family["config"] | sizes | extras, parameters)
    return models


# Jobs of the repository for projects whose trainers are their own, by what names of their models
# and commands have.
PROJECT_JOBS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "musicgen": "jobs/musicgen/musicgen_small.yaml",
        "parler": "jobs/parler_tts/parler_tts_mini.yaml",
        "orpheus": "jobs/orpheus_tts/finetune_3b.yaml",
        "latentsync": "jobs/latentsync/stage2.yaml",
        "rvc": "jobs/rvc/rvc_v2_48k.yaml",
        "retrieval-based-voice": "jobs/rvc/rvc_v2_48k.yaml",
    }
)


def find_project_job(text: str) -> str | None:
    """Return the example job file for the project that a model or command names; None where there
    is none.
    """
    return next((path for word, path in PROJECT_JOBS.items() if word in text.lower()), None)


def find_nearest_models(name: str) -> list[str]:
    """Return the three models in the table whose names are most similar, most similar first."""
    models = load_published()
    likeness = {
        entry: SequenceMatcher(
            None, _strip_model_name_suffixes(name), _strip_model_name_suffixes(entry)
        ).ratio()
        for entry in models
    }
    return sorted(models, key=lambda entry: -likeness[entry])[:3]


def load_published_config(name: str) -> JsonObject:
    """Return the stored configuration of a hub repository; {} where the table has none.

    The lookup ignores case and the endings -Instruct, -it and -hf.
    """
    plain = {_strip_model_name_suffixes(entry): model for entry, model in load_published().items()}
    model = plain.get(_strip_model_name_suffixes(name))
    return {} if model is None else dict(model.config)


def list_smaller_siblings(name: str) -> list[str]:
    """Return the names of smaller models of the same model line, largest first."""
    line = _strip_model_size(name)
    parameters = next(
        (
            model.parameters
            for entry, model in load_published().items()
            if _strip_model_name_suffixes(entry) == _strip_model_name_suffixes(name)
        ),
        0,
    )
    siblings = {
        entry: model.parameters
        for entry, model in load_published().items()
        if _strip_model_size(entry) == line
    }
    smaller = [entry for entry, count in siblings.items() if count < parameters]
    return sorted(smaller, key=lambda entry: -siblings[entry])


def _strip_model_size(name: str) -> str:
    """Return the model's name without its size, such as google/gemma-2: the name of its model line."""
    return re.sub(
        r"-[0-9.]+[bm]$|-(small|base|medium|large|xl)$", "", _strip_model_name_suffixes(name)
    )


def _strip_model_name_suffixes(name: str) -> str:
    text = name.lower()
    for ending in ("-instruct", "-it", "-hf"):
        text = text.removesuffix(ending)
    return text
