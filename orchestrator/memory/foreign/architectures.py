"""The shape of a transformer as far as memory knows it, and the short strings in which people publish shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.memory.foreign.convolutional import Counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A transformer as far as memory knows it. Widths are in elements."""

    repeats: ClassVar[bool] = True  # one layer stands for all; else a step has to be `walked`

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool  # three matrices in the feed-forward part (SwiGLU) and RMSNorm; else two, biases and LayerNorm
    tied: bool  # head and embedding share one matrix
    table_width: int = 0  # of the embedding, where it is projected to the hidden states; 0: as wide as they are
    positions: int = 0  # rows of a learned position table; 0: rotary, alibi
    causal: bool = True  # a decoder with a language-model head; else an encoder with a small head
    dropout: bool = False
    flash: bool | None = None  # whether the description says that attention never holds its scores
    qk_norm: bool = False  # norms over every head's query and key
    capped: bool = False  # scores and logits go through a tanh, whose result is kept
    experts: int = 0  # feed-forward parts beside each other in every layer, of width `ffn` each
    chosen: int = 0  # of the experts, those that a token goes through
    shared_ffn: int = 0  # width of the expert that all tokens go through
    frozen_beside: int = 0  # elements of what reads images for a decoder
    trained_beside: int = 0  # elements of what joins both
    crossed: int = 0  # of the layers, those that attend to another sequence as well: decoders behind an encoder

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of one layer, by the names of the Llama family."""
        h, f = self.hidden, self.ffn
        attention = {
            "q": (h, self.query),
            "k": (h, self.key_value),
            "v": (h, self.key_value),
            "o": (self.query, h),
        }
        return attention | {"up": (h, f), "down": (f, h)} | ({"gate": (h, f)} if self.gated else {})

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer: what tensor parallelism cuts and quantisation reaches."""
        attention = sum(math for name, math in _elements(self) if name in "qkvo")
        attention += attention * self.crossed // self.layers  # a layer in the mean
        beside = 0 if self.experts else self.ffn
        return attention + self.routed_matrices + (3 if self.gated else 2) * self.hidden * (beside + self.shared_ffn)

    @property
    def routed_matrices(self) -> int:
        """Elements of the matrices of one layer's experts: what expert parallelism spreads."""
        return self.experts * (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def busy_ffn(self) -> int:
        """Width of all feed-forward parts that one token goes through."""
        return self.chosen * self.ffn + self.shared_ffn if self.experts else self.ffn

    @property
    def layer_vectors(self) -> int:
        """Elements of norms, biases and the router of one layer."""
        if self.gated:
            router = self.hidden * (self.experts + (1 if self.shared_ffn else 0))
            return 2 * self.hidden + self.hidden * self.crossed // self.layers + router
        attention = 2 * self.hidden + self.query + 2 * self.key_value + self.hidden
        return attention + attention * self.crossed // self.layers + 3 * self.hidden + self.ffn

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head where it has a matrix of its own."""
        return self.vocab * (self.table_width or self.hidden)

    @property
    def ends(self) -> int:
        """Elements outside of the layers."""
        heads = self.table if self.causal and not self.tied else 0
        return self.table + heads + self.positions * self.hidden + (1 if self.gated else 2) * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * (self.layer_matrices + self.layer_vectors) + self.ends

    def walked(self, batch: int, *, low: bool, early: bool, accumulates: bool) -> Counted:
        """A step of so many samples, operation by operation, where no layer stands for the others."""
        raise NotImplementedError


def _elements(shape: Architecture) -> Iterator[tuple[str, int]]:
    return ((name, inputs * outputs) for name, (inputs, outputs) in shape.projections.items())


_PARTS = re.compile(
    r"\b(?:L~?(?P<layers>\d+)(?:\+(?P<decoders>\d+))?|h(?P<hidden>\d+)|a(?P<heads>\d+)|kv(?P<kv>\d+)|ffn(?P<times>\d+(?:\.\d+)?)x"
    r"|ffn(?P<ffn>\d+)|V(?P<vocab>\d+)(?P<thousands>k)?|d(?P<head_dim>\d+)|(?:experts|E|e)(?P<experts>\d+)"
    r"|top-?(?P<chosen>\d+)|shared(?P<shared>\d+))"
    r"(?=$|[\s(,;])"
)
GATED = {"swiglu", "geglu", "gated", "reglu"}
# bigscience's tokenizer has 250,680 words, padded to a multiple of 128 x tp: bigscience/bloom config.json
BLOOM_VOCAB = 250_880


def described(arch: str) -> tuple[Architecture, tuple[str, ...]] | None:
    """The shape that a string like "L32 h4096 a32 kv8 ffn14336 V128256 tied" says, and what was inferred of it.

    "L24+12" are layers of an encoder and of a decoder behind it.
    """
    said = {name: value for match in _PARTS.finditer(arch) for name, value in match.groupdict().items() if value}
    if not {"layers", "hidden", "heads", "vocab"} <= said.keys():
        return None
    hidden, heads, inferred = int(said["hidden"]), int(said["heads"]), []
    words = set(re.findall(r"[\w-]+", arch.lower()))
    other = bool({"learned-pos", "alibi", "gelu", "relu", "squared-relu", "relu2"} & words)
    gated = bool(GATED & words) or ("ffn" in said and not other and ("kv" in said or int(said["ffn"]) != 4 * hidden))
    ffn = int(said["ffn"]) if "ffn" in said else round(float(said.get("times", "4")) * hidden)
    vocab = int(said["vocab"])
    if "thousands" in said:
        vocab = BLOOM_VOCAB if vocab == 250 else 1000 * vocab
        inferred.append(f"vocabulary {vocab}")
    if "(padded)" in arch:
        vocab = -(-vocab // 128) * 128
        inferred.append(f"vocabulary padded to {vocab}")
    tied = "untied" not in words and ("tied" in words or not gated)
    if not gated and not {"tied", "untied"} & words:
        inferred.append("head and embedding share a matrix, as GPT-2's do")
    positions = 0
    if not gated and not {"alibi", "rope", "rotary"} & words:
        positions = 2048
        if "learned-pos" not in words:
            inferred.append("learned positions, as GPT-2's are")
    return (
        Architecture(
            layers=int(said["layers"]) + int(said.get("decoders", 0)),
            hidden=hidden,
            heads=heads,
            kv_heads=int(said.get("kv", heads)),
            head_dim=int(said.get("head_dim", hidden // heads)),
            ffn=ffn,
            vocab=vocab,
            gated=gated,
            tied=tied,
            positions=positions,
            flash=True if "flash" in words else None,
            experts=int(said.get("experts", 0)),
            chosen=int(said.get("chosen", 0)),
            shared_ffn=int(said.get("shared", 0)),
            crossed=int(said.get("decoders", 0)),
        ),
        tuple(inferred),
    )
