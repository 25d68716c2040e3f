"""A job's model, data and optimizer as plain data, which training processes read too. Standard
library only.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from orchestrator.specs.choices import Optimizer, Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.from_json import from_json
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.str_enum import StrEnum

# Greatest numbers of a job file. Each is far above what anybody trains, and keeps every decision
# short.
BATCH_MAX = 2**24  # samples
LAYERS_MAX = 1024  # DeepNet has 1,000 (arXiv:2203.00555)
WIDTH_MAX = 2**20
HEADS_MAX = 2**14
TABLE_MAX = 2**24  # words of a vocabulary
LENGTH_MAX = 2**24  # tokens of a sample
RANK_MAX = 2**16
STEPS_MAX = 10**9
FACTOR_MAX = 1e9
EXACT_MAX = 2**53  # whole numbers that every reader of JSON holds exactly (RFC 8259, section 6)

# How pydantic reads the nouns that stand inside a JobSpec.
STRICT = {"extra": "forbid", "allow_inf_nan": False, "str_max_length": 4096}


class Strict:
    """Base class of objects that pydantic reads by the rules of STRICT."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@frozen
class DecoderSpec(Strict):
    """A Llama-style decoder transformer: RMSNorm, rotary positions, gated MLP. Fields are named as in Hugging Face."""

    vocab_size: int = field(metadata={"ge": 1, "le": TABLE_MAX})
    hidden_size: int = field(metadata={"ge": 1, "le": WIDTH_MAX})
    intermediate_size: int = field(metadata={"ge": 1, "le": WIDTH_MAX})
    num_hidden_layers: int = field(metadata={"ge": 1, "le": LAYERS_MAX})
    num_attention_heads: int = field(metadata={"ge": 1, "le": HEADS_MAX})
    num_key_value_heads: int | None = field(default=None, metadata={"ge": 1, "le": HEADS_MAX})
    tie_word_embeddings: bool = False
    dropout: float = field(default=0.0, metadata={"ge": 0, "lt": 1})

    def __post_init__(self) -> None:
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
        return (
            self.num_attention_heads
            if self.num_key_value_heads is None
            else self.num_key_value_heads
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@frozen
class LoraSpec(Strict):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685); with a 4-bit base, QLoRA (arXiv:2305.14314)."""

    rank: int = field(default=8, metadata={"ge": 1, "le": RANK_MAX})
    alpha: float = field(default=16.0, metadata={"gt": 0, "le": FACTOR_MAX})
    dropout: float = field(default=0.0, metadata={"ge": 0, "lt": 1})
    target_modules: tuple[str, ...] = ()
    quantise_base: bool = False


@frozen
class ModelSpec(Strict):
    """A model: exactly one of `decoder`, `hf` and `factory`. A model without a tokenizer reads
    bytes.

    `hf` with a folder reads its config.json. `config` replaces the configuration of a hub name
    where the hub cannot be reached; a factory gets it as its argument. For a script's model,
    settings without `model_type` complete the published ones, as `attn_implementation: eager`.
    `weights` is the precision of all weights, frozen ones included.
    """

    decoder: DecoderSpec | None = None
    hf: str | JsonObject | None = field(default=None, hash=False)
    lora: LoraSpec | None = None
    factory: str | None = None
    weights: Precision | None = None
    config: JsonObject = field(
        default_factory=dict,
        hash=False,
        metadata={"json_schema_extra": {"default": {}}},
    )

    def __post_init__(self) -> None:
        if self.lora is not None and self.hf is None:
            raise SpecError(
                "adapters stand beside the layers of a transformers model",
                path="lora",
                hint="say `hf`",
            )

    @property
    def weight_bytes_each(self) -> int:
        """Bytes of one stored weight in a script's process."""
        return 4 if self.weights in (None, Precision.FP32) else 2


@frozen
class DataSpec(Strict):
    """Training data: files of one kind, split into samples of at most `sequence_length` tokens.

    A decoder reads `text` as bytes. A transformers model tokenizes `text` and `chat`, and takes `tokens` unchanged. A
    model head with its own loss reads `tensors`.
    """

    text: tuple[str, ...] = ()
    chat: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    tokenizer: str | None = None
    sequence_length: int = field(default=128, metadata={"ge": 2, "le": LENGTH_MAX})

    def __post_init__(self) -> None:
        if sum(bool(files) for files in (self.text, self.chat, self.tokens, self.tensors)) > 1:
            raise SpecError(
                "one kind of files only", path="data", allowed="one of text, chat, tokens, tensors"
            )

    @property
    def files(self) -> tuple[str, ...]:
        return self.text or self.chat or self.tokens or self.tensors


class Schedule(StrEnum):
    """The learning-rate schedule from the end of the warm-up to `max_steps`."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"  # arXiv:1608.03983, equation 5, without restarts


@frozen
class Freeze(Strict):
    """Parameters to freeze, matched by their full names in the model."""

    parameters: str
    until_step: int | None = field(default=None, metadata={"ge": 1, "le": STEPS_MAX})


@frozen
class TrainingSpec(Strict):
    """Optimizer, learning-rate schedule and number of steps of the training; no plan changes them."""

    max_steps: int = field(default=100, metadata={"ge": 1, "le": STEPS_MAX})
    optimizer: Optimizer = Optimizer.ADAMW
    learning_rate: float = field(default=1e-3, metadata={"gt": 0, "le": FACTOR_MAX})
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = field(default=0, metadata={"ge": 0, "le": STEPS_MAX})
    min_learning_rate: float = field(default=0.0, metadata={"ge": 0, "le": FACTOR_MAX})
    beta1: float = field(default=0.9, metadata={"ge": 0, "lt": 1})
    beta2: float = field(default=0.95, metadata={"ge": 0, "lt": 1})
    momentum: float = field(default=0.9, metadata={"ge": 0, "lt": 1})
    weight_decay: float = field(default=0.1, metadata={"ge": 0, "le": FACTOR_MAX})
    clip_norm: float | None = field(default=1.0, metadata={"gt": 0, "le": FACTOR_MAX})
    freeze: tuple[Freeze, ...] = ()
    compile: bool = False
    batch_norm_samples: int | None = field(default=None, metadata={"ge": 1, "le": BATCH_MAX})
    sync_batch_norm: bool = False
    seed: int = field(default=0, metadata={"ge": 0, "le": EXACT_MAX})
    checkpoint_every_steps: int = field(default=50, metadata={"ge": 1, "le": STEPS_MAX})
    keep_checkpoints: int = field(default=2, metadata={"ge": 1, "le": STEPS_MAX})

    def __post_init__(self) -> None:
        if self.sync_batch_norm and self.batch_norm_samples is None:
            raise SpecError(
                "say over how many samples",
                path="batch_norm_samples",
                allowed="a number of samples",
            )


def parse_model_json(data: JsonObject) -> ModelSpec:
    """Return the ModelSpec from the JSON form of `dataclasses.asdict`."""
    return from_json(ModelSpec, data)


def parse_training_json(data: JsonObject) -> TrainingSpec:
    """Return the TrainingSpec from the JSON form of `dataclasses.asdict`."""
    return from_json(TrainingSpec, data)
