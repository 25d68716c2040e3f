"""Adapters of a transformers model from a factory, with a separate seed for their initial values."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.specs.run import parse_training_run_json
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.models.hf_model import make_hf_recipe


def build(config: dict[str, Any]) -> Recipe:
    """The recipe of the run in `config`, made with another seed."""
    run = parse_training_run_json(config["run"])
    return make_hf_recipe(
        dataclasses.replace(run, training=dataclasses.replace(run.training, seed=config["seed"]))
    )
