"""An example of jobs/examples under another initial seed than the job's: what a checkpoint has to make up for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orchestrator.training.contract.recipe import Recipe, from_factory

EXAMPLES = Path(__file__).parents[2] / "jobs/examples"


def build(config: dict[str, Any]) -> Recipe:
    """`example`, built with what else `config` says after seeding with `seed`."""
    settings = dict(config)
    example, seed = settings.pop("example"), settings.pop("seed")
    torch.manual_seed(seed)
    recipe = from_factory(f"{EXAMPLES / example}.py:build", settings)
    return [recipe, *recipe.then] if recipe.then else recipe  # type: ignore[return-value]
