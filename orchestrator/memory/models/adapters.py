"""Memory of peft's LoRA adapters beside the frozen projections of a Llama-style layer, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from orchestrator.specs.frozen import frozen

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Those of one input, which adapters share; attention keeps its own output, so o_proj's is there
# anyhow.
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",))


class Projection(NamedTuple):
    """Sizes of a matrix of a layer."""

    inputs: int
    outputs: int


@frozen
class AdaptedLayer:
    """A Llama-style decoder layer with LoRA adapters; all bytes are per token."""

    projections: Mapping[str, Projection]  # all of them, by name
    targets: tuple[str, ...]  # which have an adapter; (): all
    dropout: bool  # before adapters
    width: int  # bytes of an element that a product returns
    autocast: bool
    cuda: bool

    @property
    def hidden(self) -> int:
        """Width of the layer's input."""
        return self.projections["up_proj"][0]

    @property
    def ffn(self) -> int:
        """Width of the gated product in the feed-forward part."""
        return self.projections["down_proj"][0]

    @property
    def matrices(self) -> int:
        """Number of elements of all frozen projections together."""
        return sum(inputs * outputs for inputs, outputs in self.projections.values())

    @property
    def adapted(self) -> dict[str, Projection]:
        """Sizes of each projection with an adapter, by name."""
        return {
            name: size
            for name, size in self.projections.items()
            if not self.targets or name in self.targets
        }

    @property
    def inputs_bytes(self) -> int:
        """Bytes per token that adapters save of their inputs.

        Autocast casts the input of every adapter separately, and dropout makes another copy. Both
        are kept in the compute type, with dropout's mask beside them.
        """
        if self.autocast or self.dropout:
            input_width = self.width + (self._mask_bytes if self.dropout else 0)
            return input_width * sum(inputs for inputs, _ in self.adapted.values())
        inputs = 0
        for names in ONE_INPUT:
            if self.adapted.keys() & set(names):
                inputs += self.projections[names[0]][0]
        return self.width * inputs

    @property
    def forward_bytes(self) -> int:
        """Bytes that are live while the last projection runs, on top of the layer's saved bytes.

        These are the feed-forward part's input and the gated product, where no adapter keeps just these, and the output
        of the base projection. Under autocast only casts of both are kept: the input is fp32, and the product is copied
        in the type of the adapters, fp32 (`_cast_input_dtype` in peft/tuners/tuners_utils.py, peft 0.19), in which
        dropout returns another. Where the weights are cast, norms keep fp32 copies of the inputs of the layer and of
        its second half.
        """
        adapted = self.adapted
        if self.autocast:
            copies = 0
            if "down_proj" in adapted:
                copies = 8 if self.dropout else 4
            return 6 * self.hidden + (2 + copies) * self.ffn
        gated = 0 if "down_proj" in adapted and not self.dropout else self.ffn
        inputs = 0 if {"gate_proj", "up_proj"} & set(adapted) and not self.dropout else self.hidden
        streams = 2 * self.hidden if self.width == 2 else 0
        return self.width * (gated + inputs + self.hidden + streams)

    @property
    def forward_and_backward_traffic_bytes(self) -> tuple[int, int]:
        """(Forward, backward) bytes per token that the adapters' operators read and write beside
        their products.

        peft scales what an adapter returns and adds it to what the base returned; under autocast it
        casts inputs to fp32, and autocast casts back. Counted by operator
        (tests/memory/test_moved.py; peft 0.19, 2026-11-29).
        """
        inputs = sum(inputs for inputs, _ in self.adapted.values())
        outputs = sum(outputs for _, outputs in self.adapted.values())
        forward = 5 * self.width * outputs
        backward = self.width * (3 * inputs + 2 * outputs)
        if self.autocast:
            forward = 12 * inputs + 10 * outputs
            backward = 18 * inputs + 4 * outputs
        if self.dropout:  # it reads, writes, and keeps a mask
            dropped = (2 * (4 if self.autocast else self.width) + self._mask_bytes) * inputs
            forward += dropped
            backward += dropped
        return forward, backward

    @property
    def backward_bytes(self) -> int:
        """Bytes that are live in the backward pass of the gated product, on top of the layer's saved bytes.

        These are the gradients of the product and of both its factors, without what an adapter had kept of it. Where
        the weights are cast, the layer's input counts as well, of which the norm kept a copy.
        """
        gone = 0
        if "down_proj" in self.adapted:
            masked = self.dropout and not self.autocast  # under autocast the forward pass has more
            gone = self.width + (self._mask_bytes if masked else 0)
        inputs = 2 * self.hidden if self.width == 2 and not self.autocast else 0
        return (3 * self.width - gone) * self.ffn + inputs

    @property
    def _mask_bytes(self) -> int:
        """Bytes per element of dropout's mask: one byte on CUDA, the width of the adapters' type on
        a CPU (cuda_autocast.py).
        """
        if self.cuda:
            return 1
        if self.autocast:
            return 4
        return self.width
