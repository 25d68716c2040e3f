"""Engine: what the training loop asks of whatever runs a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from orchestrator.training.contract.recipe import Batch
from orchestrator.training.contract.results import StepResult

State = Mapping[str, Any]  # canonical name -> Tensor, DTensor or Chunks that are read and written in place


class Engine(Protocol):
    """A model on its devices. Both calls are collective: every rank makes them in the same order."""

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        """The optimizer step after `step` ones, over this rank's part of a global batch with `tokens` loss terms."""

    def state(self) -> State:
        """The canonical checkpoint's tensors, by reference: saving reads them, loading fills them."""
