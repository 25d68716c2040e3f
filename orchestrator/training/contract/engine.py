"""Engine: the interface between the training loop and the implementations of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from orchestrator.training.contract.recipe import Batch
from orchestrator.training.contract.results import StepResult

State = Mapping[
    str, Any
]  # canonical name -> Tensor, DTensor or Chunks that are read and written in place


class Engine(Protocol):
    """Interface of an engine: a model on its devices that trains step by step. Both calls are
    collective.
    """

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        """Run the optimizer step that follows `step` completed ones, on this rank's part of the
        global batch.

        `tokens` is the number of loss terms in the global batch.
        """

    def state(self) -> State:
        """Return the tensors of the canonical checkpoint by reference: saving reads them, loading
        fills them.
        """
