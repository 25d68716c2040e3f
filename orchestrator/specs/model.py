"""What a job trains and on what, as plain data that training processes read too. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from orchestrator.specs.errors import SpecError

FORBID_EXTRA = {"extra": "forbid"}  # read by pydantic where these nouns stand inside a JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder transformer of the Llama kind: RMSNorm, rotary positions, gated MLP. Hugging Face names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None  # None: as many as attention heads
    tie_word_embeddings: bool = False

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            if getattr(self, name) < 1:
                raise SpecError("a decoder's dimensions are at least 1", path=name, got=getattr(self, name))
        if self.hidden_size % self.num_attention_heads or self.head_dim % 2:
            raise SpecError(
                "hidden_size must split into attention heads of an even width",
                path="hidden_size",
                got=f"{self.hidden_size} over {self.num_attention_heads} heads",
                allowed="hidden_size = num_attention_heads x an even number",
            )
        if self.num_attention_heads % self.kv_heads:
            raise SpecError(
                "num_key_value_heads must divide num_attention_heads",
                path="num_key_value_heads",
                got=self.num_key_value_heads,
                allowed=f"a divisor of {self.num_attention_heads}",
            )

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Exactly one of: a decoder that we build, or `factory: path/to/file.py:function` called with `config`."""

    decoder: DecoderSpec | None = None
    factory: str | None = None
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """UTF-8 text files, read as bytes and cut into samples of at most `sequence_length` tokens (ragged at each end)."""

    text: tuple[str, ...] = ()
    sequence_length: int = 128

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise SpecError(
                "a sample needs a token and its successor",
                path="sequence_length",
                got=self.sequence_length,
                allowed="2 or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """AdamW (arXiv:1711.05101) and the length of the training; every plan keeps all of it."""

    max_steps: int = 100
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    checkpoint_every_steps: int = 50
    keep_checkpoints: int = 2

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        for name in ("max_steps", "checkpoint_every_steps", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise SpecError("must be at least 1", path=name, got=getattr(self, name))
        for name in ("learning_rate", "clip_norm"):
            if getattr(self, name) <= 0:
                raise SpecError("must be above 0", path=name, got=getattr(self, name))
