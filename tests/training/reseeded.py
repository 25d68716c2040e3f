"""An example of jobs/examples with another initial seed: a loaded checkpoint must replace its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orchestrator.training.contract.recipe import Recipe, from_factory

EXAMPLES = Path(__file__).parents[2] / "jobs/examples"


def build(config: dict[str, Any]) -> Recipe:
    """`example`, built with the rest of `config` after seeding with `seed`."""
    settings = dict(config)
    example, seed = settings.pop("example"), settings.pop("seed")
    torch.manual_seed(seed)
    recipe = from_factory(f"{EXAMPLES / example}.py:build", settings)
    return [recipe, *recipe.then] if recipe.then else recipe  # type: ignore[return-value]
