"""Model, data and optimizer of a job, as plain data that training processes read too. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from orchestrator.specs.choices import Optimizer, Precision
from orchestrator.specs.errors import SpecError
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

# How pydantic reads these nouns where they stand inside a JobSpec.
STRICT = {"extra": "forbid", "allow_inf_nan": False, "str_max_length": 4096}


def _key(description: str, **bounds: float) -> dict[str, Any]:
    """Return what the JSON Schema says of a key; pydantic reads it from the metadata of the dataclass field.

    `bounds` are `ge`, `gt`, `le` and `lt`, which pydantic checks where a file or a request is read.
    """
    return {"description": description, **bounds}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A Llama-style decoder transformer: RMSNorm, rotary positions, gated MLP. Fields are named as in Hugging Face."""

    vocab_size: int = field(
        metadata=_key("Number of tokens in the vocabulary.", ge=1, le=TABLE_MAX)
    )
    hidden_size: int = field(
        metadata=_key(
            "Width of the residual stream; a multiple of `num_attention_heads`.",
            ge=1,
            le=WIDTH_MAX,
        )
    )
    intermediate_size: int = field(
        metadata=_key("Width of the gated feed-forward layer.", ge=1, le=WIDTH_MAX)
    )
    num_hidden_layers: int = field(
        metadata=_key("Number of transformer layers.", ge=1, le=LAYERS_MAX)
    )
    num_attention_heads: int = field(
        metadata=_key("Number of query heads per layer.", ge=1, le=HEADS_MAX)
    )
    num_key_value_heads: int | None = field(
        default=None,
        metadata=_key(
            "Number of key and value heads (grouped-query attention); null: as many as query heads.",
            ge=1,
            le=HEADS_MAX,
        ),
    )
    tie_word_embeddings: bool = field(
        default=False,
        metadata=_key("Whether the output layer shares the weights of the input embedding."),
    )
    dropout: float = field(
        default=0.0,
        metadata=_key(
            "Dropout probability on the output of attention and feed-forward; from 0 to below 1.",
            ge=0,
            lt=1,
        ),
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters beside frozen weights (arXiv:2106.09685); with a 4-bit base, QLoRA (arXiv:2305.14314)."""

    rank: int = field(default=8, metadata=_key("Rank of the adapter matrices.", ge=1, le=RANK_MAX))
    alpha: float = field(
        default=16.0,
        metadata=_key(
            "Scale of the adapters: their output counts alpha / rank.", gt=0, le=FACTOR_MAX
        ),
    )
    dropout: float = field(
        default=0.0,
        metadata=_key(
            "Dropout probability on the input of the adapters; from 0 to below 1.", ge=0, lt=1
        ),
    )
    target_modules: tuple[str, ...] = field(
        default=(),
        metadata=_key(
            "Last parts of the names of modules that get adapters; empty: every linear layer but the output layer.",
        ),
    )
    quantise_base: bool = field(
        default=False,
        metadata=_key("Whether the frozen weights are stored in 4 bits (QLoRA); CUDA only."),
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: exactly one of `decoder`, `hf` and `factory`. A model without a tokenizer reads bytes.

    `hf` with a folder reads its config.json. `config` replaces the configuration of a hub name where the hub cannot be
    reached; a factory gets it as its argument. `weights` is the precision of all weights, frozen ones included.
    """

    decoder: DecoderSpec | None = field(
        default=None,
        metadata=_key(
            "A decoder transformer that the engines build with random weights.",
        ),
    )
    hf: str | dict[str, Any] | None = field(
        default=None,
        hash=False,
        metadata=_key(
            "A transformers model: a folder, a name on the hub, or a configuration with random weights.",
        ),
    )
    lora: LoraSpec | None = field(
        default=None,
        metadata=_key("Trains low-rank adapters beside the frozen weights of `hf`."),
    )
    factory: str | None = field(
        default=None,
        metadata=_key(
            "A Python function, as file:function, that returns the module, its loss and its data set.",
        ),
    )
    weights: Precision | None = field(
        default=None,
        metadata=_key(
            "Under `trains`: data type of the script's weights while it trains; null: fp32."
        ),
    )
    config: dict[str, Any] = field(
        default_factory=dict,
        hash=False,
        metadata=_key(
            "Arguments of the factory, or the configuration of `hf` where it cannot be read.",
        )
        | {"json_schema_extra": {"default": {}}},
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Training data: files of one kind, split into samples of at most `sequence_length` tokens.

    A decoder reads `text` as bytes. A transformers model tokenizes `text` and `chat`, and takes `tokens` unchanged. A
    model head with its own loss reads `tensors`.
    """

    text: tuple[str, ...] = field(
        default=(), metadata=_key("Text files, relative to the job file.")
    )
    chat: tuple[str, ...] = field(
        default=(),
        metadata=_key(
            "JSON Lines files with `messages`; the loss counts only tokens of the assistant.",
        ),
    )
    tokens: tuple[str, ...] = field(
        default=(), metadata=_key("One-dimensional .npy files of token numbers.")
    )
    tensors: tuple[str, ...] = field(
        default=(),
        metadata=_key(
            "Safetensors files of a transformers head's arguments, by their names; axis 0 counts samples.",
        ),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=_key("Folder or hub name of the tokenizer; null: the model's own."),
    )
    sequence_length: int = field(
        default=128,
        metadata=_key(
            "Tokens per sample at most; longer documents are cut into samples.",
            ge=2,
            le=LENGTH_MAX,
        ),
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """Parameters to freeze, matched by their full names in the model."""

    parameters: str = field(
        metadata=_key("Shell pattern of the names of the parameters that are frozen.")
    )
    until_step: int | None = field(
        default=None,
        metadata=_key(
            "Optimizer step at which they begin to train; null: never.", ge=1, le=STEPS_MAX
        ),
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Optimizer, learning-rate schedule and length of the training. No plan changes them."""

    max_steps: int = field(
        default=100,
        metadata=_key(
            "Optimizer steps from the beginning of the job to its end.", ge=1, le=STEPS_MAX
        ),
    )
    optimizer: Optimizer = field(
        default=Optimizer.ADAMW,
        metadata=_key("Update rule; adamw_8bit keeps its moments in 8 bits."),
    )
    learning_rate: float = field(
        default=1e-3, metadata=_key("Learning rate after the warm-up.", gt=0, le=FACTOR_MAX)
    )
    schedule: Schedule = field(
        default=Schedule.CONSTANT,
        metadata=_key("Course of the learning rate from the end of the warm-up to `max_steps`."),
    )
    warmup_steps: int = field(
        default=0,
        metadata=_key(
            "Optimizer steps over which the learning rate rises linearly from 0.",
            ge=0,
            le=STEPS_MAX,
        ),
    )
    min_learning_rate: float = field(
        default=0.0,
        metadata=_key(
            "Learning rate at the end of a linear or cosine schedule.", ge=0, le=FACTOR_MAX
        ),
    )
    beta1: float = field(
        default=0.9, metadata=_key("Decay of the first moment of AdamW.", ge=0, lt=1)
    )
    beta2: float = field(
        default=0.95, metadata=_key("Decay of the second moment of AdamW.", ge=0, lt=1)
    )
    momentum: float = field(default=0.9, metadata=_key("Momentum of SGD.", ge=0, lt=1))
    weight_decay: float = field(
        default=0.1, metadata=_key("Weight decay of the optimizer.", ge=0, le=FACTOR_MAX)
    )
    clip_norm: float | None = field(
        default=1.0,
        metadata=_key(
            "Greatest norm of the gradients of the whole model; larger ones are scaled down; null: none.",
            gt=0,
            le=FACTOR_MAX,
        ),
    )
    freeze: tuple[Freeze, ...] = field(
        default=(),
        metadata=_key(
            "Parameters that are not trained, for ever or until a step.",
        ),
    )
    compile: bool = field(
        default=False, metadata=_key("Whether torch.compile compiles each layer.")
    )
    batch_norm_samples: int | None = field(
        default=None,
        metadata=_key(
            "Samples over which BatchNorm takes its statistics, under every plan; BatchNorm models only.",
            ge=1,
            le=BATCH_MAX,
        ),
    )
    sync_batch_norm: bool = field(
        default=False,
        metadata=_key("Whether the samples of one BatchNorm statistic may lie on several ranks."),
    )
    seed: int = field(
        default=0, metadata=_key("Seed of weights, data order and dropout.", ge=0, le=EXACT_MAX)
    )
    checkpoint_every_steps: int = field(
        default=50,
        metadata=_key("Optimizer steps between two checkpoints.", ge=1, le=STEPS_MAX),
    )
    keep_checkpoints: int = field(
        default=2,
        metadata=_key("Number of newest checkpoints that stay on disk.", ge=1, le=STEPS_MAX),
    )

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    def __post_init__(self) -> None:
        if self.sync_batch_norm and self.batch_norm_samples is None:
            raise SpecError(
                "say over how many samples",
                path="batch_norm_samples",
                allowed="a number of samples",
            )


def model_from_json(data: dict[str, Any]) -> ModelSpec:
    """Return the ModelSpec from the JSON form of `dataclasses.asdict`."""
    decoder, lora = data["decoder"], data["lora"]
    return ModelSpec(
        **{
            **data,
            "decoder": DecoderSpec(**decoder) if decoder else None,
            "lora": LoraSpec(**_tuples(lora, ("target_modules",))) if lora else None,
        }
    )


def data_from_json(data: dict[str, Any]) -> DataSpec:
    """Return the DataSpec from the JSON form of `dataclasses.asdict`."""
    return DataSpec(**_tuples(data, ("text", "chat", "tokens", "tensors")))


def training_from_json(data: dict[str, Any]) -> TrainingSpec:
    """Return the TrainingSpec from the JSON form of `dataclasses.asdict`."""
    enums = {"optimizer": Optimizer(data["optimizer"]), "schedule": Schedule(data["schedule"])}
    return TrainingSpec(
        **{**data, **enums, "freeze": tuple(Freeze(**entry) for entry in data["freeze"])}
    )


def _tuples(data: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {**data, **{name: tuple(data[name]) for name in names}}
