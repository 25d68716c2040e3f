"""What a job trains and on what, as plain data that training processes read too. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Optimizer, Precision
from orchestrator.specs.str_enum import StrEnum

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
    dropout: float = 0.0  # of what attention and feed-forward add to the residual stream

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
        if not 0 <= self.dropout < 1:
            raise SpecError("must be from 0 to below 1", path="dropout", got=self.dropout)
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
class LoraSpec:
    """Low-rank adapters beside frozen weights (arXiv:2106.09685).

    With `quantise_base` the frozen weights have 4 bits (QLoRA, arXiv:2305.14314): on CUDA only.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()  # last parts of module names; none: every linear layer but the head
    quantise_base: bool = False

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise SpecError("must be at least 1", path="rank", got=self.rank)
        if self.alpha <= 0:
            raise SpecError("must be above 0", path="alpha", got=self.alpha)
        if not 0 <= self.dropout < 1:
            raise SpecError("must be from 0 to below 1", path="dropout", got=self.dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Exactly one of: a decoder that we build; `hf`, a transformers model; `factory: path/to/file.py:function`.

    `hf` is a folder, a name on the hub, or a configuration (`model_type` and what it takes) with random weights.
    The factory is called with `config`. Of a folder, `config` is what stands in its config.json; of a name on the hub,
    what the job says where the hub cannot be reached. A model without a tokenizer, its own or `data`'s, reads bytes.
    `weights` is a script's: the type in which it holds its weights while it trains, frozen ones included.
    """

    decoder: DecoderSpec | None = None
    hf: str | dict[str, Any] | None = field(default=None, hash=False)
    lora: LoraSpec | None = None
    factory: str | None = None
    weights: Precision | None = None  # None: fp32, computed in the job's precision
    config: dict[str, Any] = field(default_factory=dict, hash=False)

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        if self.lora is not None and self.hf is None:
            raise SpecError("adapters stand beside the layers of a transformers model", path="lora", hint="say `hf`")

    @property
    def weight_bytes_each(self) -> int:
        """Bytes of one weight as a script holds it."""
        return 4 if self.weights in (None, Precision.FP32) else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """What is trained on: one kind of files, cut into samples of at most `sequence_length` tokens.

    A decoder reads `text` as bytes. A transformers model reads `text`, `chat` (JSON lines with `messages`) through its
    tokenizer, or `tokens` (one-dimensional .npy files of token numbers) as they are.
    """

    text: tuple[str, ...] = ()
    chat: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    tokenizer: str | None = None  # a folder, or a name on the hub; None: the model's
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
        if sum(bool(files) for files in (self.text, self.chat, self.tokens)) > 1:
            raise SpecError("one kind of files only", path="data", allowed="one of text, chat, tokens")

    @property
    def files(self) -> tuple[str, ...]:
        return self.text or self.chat or self.tokens


class Schedule(StrEnum):
    """How the learning rate goes on after the warm-up, until `max_steps`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"  # arXiv:1608.03983, equation 5, without restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Parameters whose whole-model names match the shell pattern stay as they are for the first `until_step` steps."""

    parameters: str
    until_step: int | None = None  # None: always

    __pydantic_config__: ClassVar[dict[str, str]] = FORBID_EXTRA

    def __post_init__(self) -> None:
        if self.until_step is not None and self.until_step < 1:
            raise SpecError("must be at least 1", path="until_step", got=self.until_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The optimizer and the length of the training; every plan keeps all of it."""

    max_steps: int = 100
    optimizer: Optimizer = Optimizer.ADAMW
    learning_rate: float = 1e-3
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    min_learning_rate: float = 0.0  # where linear and cosine schedules end
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.9  # SGD's
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    freeze: tuple[Freeze, ...] = ()
    compile: bool = False  # torch.compile, layer by layer
    batch_norm_samples: int | None = None  # a BatchNorm model: samples whose statistics are taken together
    sync_batch_norm: bool = False  # take them over all data-parallel ranks
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
        for name in ("warmup_steps", "min_learning_rate", "momentum", "weight_decay"):
            if getattr(self, name) < 0:
                raise SpecError("must not be negative", path=name, got=getattr(self, name))
        if self.batch_norm_samples is not None and self.batch_norm_samples < 1:
            raise SpecError("must be at least 1", path="batch_norm_samples", got=self.batch_norm_samples)
        if self.sync_batch_norm and self.batch_norm_samples is None:
            raise SpecError("say over how many samples", path="batch_norm_samples", allowed="a number of samples")


def model_from_json(data: dict[str, Any]) -> ModelSpec:
    """The ModelSpec that `dataclasses.asdict` wrote."""
    decoder, lora = data["decoder"], data["lora"]
    return ModelSpec(
        **{
            **data,
            "decoder": DecoderSpec(**decoder) if decoder else None,
            "lora": LoraSpec(**_tuples(lora, ("target_modules",))) if lora else None,
        }
    )


def data_from_json(data: dict[str, Any]) -> DataSpec:
    """The DataSpec that `dataclasses.asdict` wrote."""
    return DataSpec(**_tuples(data, ("text", "chat", "tokens")))


def training_from_json(data: dict[str, Any]) -> TrainingSpec:
    """The TrainingSpec that `dataclasses.asdict` wrote."""
    words = {"optimizer": Optimizer(data["optimizer"]), "schedule": Schedule(data["schedule"])}
    return TrainingSpec(**{**data, **words, "freeze": tuple(Freeze(**entry) for entry in data["freeze"])})


def _tuples(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**data, **{name: tuple(data[name]) for name in names}}
