"""Our decoder from a factory: its first weights follow from a seed of their own, apart from the order of the data."""

from __future__ import annotations

from typing import Any

from orchestrator.specs.model import DecoderSpec
from orchestrator.training.dataset import TextDataset
from orchestrator.training.decoder import decoder_recipe
from orchestrator.training.recipe import Recipe


def build(config: dict[str, Any]) -> Recipe:
    dataset = TextDataset(config["text"], config["sequence_length"])
    return decoder_recipe(DecoderSpec(**config["decoder"]), dataset, config["seed"])
