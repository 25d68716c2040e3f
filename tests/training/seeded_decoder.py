"""Our decoder from a factory: the seed of its initial weights is separate from that of the data order."""

from __future__ import annotations

from typing import Any

from orchestrator.specs.job.model import DecoderSpec
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.models.decoder import make_decoder_recipe


def build(config: dict[str, Any]) -> Recipe:
    dataset = TextDataset(config["text"], config["sequence_length"])
    return make_decoder_recipe(DecoderSpec(**config["decoder"]), dataset, config["seed"])
