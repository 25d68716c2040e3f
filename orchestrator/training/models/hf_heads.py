"""Generic support for transformers model heads other than language models: class, a synthetic batch, and own loss.

Nothing here is specific to a model family. The class is the one in `architectures`. A batch follows from the names of
`forward`'s arguments and from sizes in the configuration. A few shapes are tried for each, and the first batch that
gives a loss is used. A head that takes none of them is refused with the factory to write.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.recipe import Batch

LABELS = ("labels", "return_loss", "start_positions", "future_values", "class_labels")
SIGNALS = ("pixel_values", "input_features", "input_values", "flattened_patches", "past_values")
TRIES_MAX = 96  # batches for one head
IMAGE, FRAMES, AUDIO, CHOICES, SHORT = 64, 64, 8000, 2, 8  # sizes where the configuration says none
FACTORY = "write a `factory`: `path/to/file.py:function`, which returns a Recipe with the module, its loss and its data"
Named = dict[str, Tensor]
Prepared = Callable[[Named], contextlib.AbstractContextManager[Named]]


def has_loss(head: Any) -> bool:
    """Return whether a class is a model whose `forward` takes labels."""
    is_model = isinstance(head, type) and issubclass(head, PreTrainedModel)
    return is_model and bool({*LABELS} & {*inspect.signature(head.forward).parameters})


def find_named_head(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that `architectures` names; None if the installed transformers has none for
    it.
    """
    for name in getattr(config, "architectures", None) or ():
        head = getattr(transformers, name, None)
        if has_loss(head) and isinstance(config, getattr(head, "config_class", None) or object):
            return head
    return None


def compute_own_loss(module: Any, named: Named) -> Tensor:
    """Return the module's own loss (a mean) of a batch times its samples. Raises ValueError if it
    returns none.
    """
    head = getattr(module, "module", module)  # engines wrap it
    out = module(**forward_arguments(named), **constant_arguments(type(head)))
    loss = getattr(out, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError("it returns no loss")
    return loss.float().sum() * len(next(iter(named.values())))


def takes_images_or_sounds(head: Any) -> bool:
    """Return whether the head takes images or sounds."""
    return bool({*SIGNALS} & {*inspect.signature(head.forward).parameters})


def constant_arguments(head: Any) -> dict[str, Any]:
    """Return the non-tensor arguments of `forward`: a loss is requested, a cache is not."""
    flags = {"return_loss": True, "use_cache": False, "return_dict": True}
    return {
        name: value
        for name, value in flags.items()
        if name in inspect.signature(head.forward).parameters
    }


def forward_arguments(named: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return tensors as `forward` takes them: `a.b` becomes key b of a dictionary per sample, `a[]`
    a list.

    The samples of `a*` are joined: their first two axes become one.
    """
    result: dict[str, Any] = {}
    for name, values in named.items():
        argument, _, key = name.partition(".")
        if key:
            for sample, row in zip(
                result.setdefault(argument, [{} for _ in values]), values, strict=True
            ):
                sample[key] = row
        else:
            result[name.rstrip("[]*")] = (
                list(values) if "[]" in name else values.flatten(0, 1) if "*" in name else values
            )
    return result


@dataclass(frozen=True, slots=True)
class AnySamples:
    """Placeholder for a script's own samples in a trace: `tokens`, or whatever the head takes."""

    tokens: Any  # the samples of a language model


class SyntheticBatch:
    """A made-up batch for a head: the first one that the head accepts, found by `fit`."""

    def __init__(
        self, head: type[PreTrainedModel], config: PreTrainedConfig, any_samples: AnySamples
    ) -> None:
        self._head = head
        self._config = config
        self._length = any_samples.tokens.token_count(0)
        self.at: int | None = None  # index among `batches`, and its `places`: see `fit`
        self.places: int | None = None

    def __len__(self) -> int:
        return 2**31

    def token_count(self, _index: int) -> int:
        return 1

    def fit(self, samples: int, module: Any, prepared: Prepared = contextlib.nullcontext) -> None:
        """Find the first batch for which the module returns a loss. Raises SpecError with the first
        failure if none.

        `prepared` returns a context in which the module takes what it yields in place of the
        tensors.
        """
        takes = {*inspect.signature(self._head.forward).parameters}
        for signal in (
            _list_signal_inputs(takes, self._config, samples) if "input_ids" in takes else ()
        ):
            with contextlib.suppress(Exception), prepared(signal) as passed, torch.no_grad():
                self.places = count_placeholder_tokens(module, passed, samples)
                break
        failure: Exception | None = None
        for place, named in enumerate(itertools.islice(self._batches(samples), TRIES_MAX)):
            try:
                with prepared(named) as passed:
                    compute_own_loss(module, passed).backward()  # type: ignore[no-untyped-call]
            except (
                Exception
            ) as error:  # a guessed batch may break a model in any way: the next one is tried
                failure = failure or error
            else:
                self.at = place
                return
        lines = str(failure or "").strip().splitlines() or [repr(failure)]
        raise SpecError(
            f"no batch that follows from its arguments gives a loss: {lines[0]}",
            path="model.hf",
            got=self._head.__name__,
            hint=FACTORY,
        ) from failure

    def named(self, samples: int) -> Named:
        """Return {argument: tensor} of the batch that `fit` found, for `samples` samples."""
        assert self.at is not None, "fit"
        return next(itertools.islice(self._batches(samples), self.at, None))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.named(1))

    def batch(self, indices: Sequence[int]) -> Batch:
        return tuple(self.named(len(indices)).values())

    def _batches(self, samples: int) -> Iterator[Named]:
        return list_candidate_batches(self._head, self._config, samples, self._length, self.places)


def list_candidate_batches(
    head: type[PreTrainedModel],
    config: PreTrainedConfig,
    samples: int,
    length: int,
    places: int | None,
) -> Iterator[Named]:
    """Yield batches that the head may accept, the likeliest first.

    `places` is the result of `count_placeholder_tokens`.
    """
    takes = {*inspect.signature(head.forward).parameters}
    for inputs in _list_inputs(takes, config, samples, length, places):
        for labels in _list_labels(takes, config, samples, inputs):
            yield inputs | labels


def list_sizes(config: Any, *names: str) -> Iterator[int]:
    """Yield the numbers under these names in a configuration, then those in its nested parts."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if type(value) is int and value > 0:
            yield value
    for name in type(config).sub_configs if isinstance(config, PreTrainedConfig) else ():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from list_sizes(part, *names)


def _find_size(config: Any, default: int, *names: str) -> int:
    return next(list_sizes(config, *names), default)


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several
        return config


def _make_tokens(config: Any, samples: int, length: int) -> Tensor:
    """Return tokens [samples, length] to which no configuration gives a meaning, with the end of
    the text last.
    """
    text = _text_config(config)
    vocabulary = _find_size(text, _find_size(config, 2, "vocab_size"), "vocab_size")
    places = _find_size(
        text,
        length,
        "max_position_embeddings",
        "n_positions",
        "max_target_positions",
        "max_seq_len",
    )
    count = max(2, min(length, places - 4))
    special = {
        value
        for item in (config, text)
        for name, value in item.to_dict().items()
        if name.endswith("token_id")
    }
    plain = torch.tensor(
        [word for word in range(min(vocabulary, 64)) if word not in special] or [0]
    )
    tokens = plain[torch.arange(samples * count) % len(plain)].reshape(samples, count)
    end = getattr(text, "eos_token_id", None)
    if type(end) is int and end < vocabulary:
        tokens[:, -1] = end
    return tokens


def _list_inputs(
    takes: set[str], config: Any, samples: int, length: int, places: int | None
) -> Iterator[Named]:
    signals = list(_list_signal_inputs(takes, config, samples))
    if "input_ids" not in takes:
        yield from signals
        return
    tokens = _make_tokens(config, samples, length)
    beside: Named = (
        {"bbox": torch.zeros(*tokens.shape, 4, dtype=torch.int64)} if "bbox" in takes else {}
    )
    for signal in signals:
        for holders in _with_placeholders(config, tokens, places):
            yield {"input_ids": holders} | beside | signal
    yield {"input_ids": tokens} | beside
    if "decoder_input_ids" in takes:
        yield {"input_ids": tokens, "decoder_input_ids": tokens}
    choices = tokens.unsqueeze(1).repeat(1, CHOICES, 1)
    yield {"input_ids": choices} | {
        name: item.unsqueeze(1).repeat(1, CHOICES, 1, 1) for name, item in beside.items()
    }


def _with_placeholders(config: Any, tokens: Tensor, places: int | None) -> Iterator[Tensor]:
    """Yield the tokens, preceded by placeholder tokens for an image's or sound's features where a
    model has them.
    """
    names = (
        "image_token_id",
        "image_token_index",
        "audio_token_id",
        "audio_token_index",
        "video_token_id",
    )
    token = next(
        (getattr(config, name) for name in names if type(getattr(config, name, None)) is int), None
    )
    if token is not None and places:
        yield torch.cat([torch.full((len(tokens), places), token), tokens], dim=1)
    yield tokens


def count_placeholder_tokens(module: Any, named: Mapping[str, Tensor], samples: int) -> int | None:
    """Return how many tokens of a sample are placeholders for image or sound features; None if none
    are.
    """
    for name in ("get_image_features", "get_audio_features"):
        features = getattr(module, name, None)
        taken = {*inspect.signature(features).parameters} if features is not None else set()
        passed = {key: value for key, value in forward_arguments(named).items() if key in taken}
        if features is not None and passed:
            out = features(**passed)
            result = tree_leaves(getattr(out, "pooler_output", out))
            count = sum(item.numel() for item in result if isinstance(item, Tensor))
            return (
                count
                // samples
                // _find_size(_text_config(module.config), 1, "hidden_size", "d_model", "n_embd")
            )
    return None


def _list_signal_inputs(takes: set[str], config: Any, samples: int) -> Iterator[Named]:
    """Yield candidate image, sound and time-series inputs."""
    channels = _find_size(config, 3, "num_channels", "in_channels", "in_chans")
    sides = [*list_sizes(config, "image_size"), IMAGE, 224]
    patch = _find_size(config, 16, "patch_size")
    if "image_grid_thw" in takes:
        depth = _find_size(config, 1, "temporal_patch_size")
        side = 2 * _find_size(config, 1, "spatial_merge_size")
        grid = torch.tensor([[1, side, side]] * samples)
        yield {
            "pixel_values*": torch.zeros(samples, side**2, channels * depth * patch**2),
            "image_grid_thw": grid,
        }
    elif "pixel_values" in takes:
        for side in dict.fromkeys(sides):
            image = torch.zeros(samples, channels, side, side)
            if "bool_masked_pos" in takes:
                yield {
                    "pixel_values": image,
                    "bool_masked_pos": torch.arange((side // patch) ** 2).repeat(samples, 1) > 1,
                }
            yield {"pixel_values": image}
            frames = _find_size(config, 2, "num_frames", "frames_per_clip")
            yield {"pixel_values": image.unsqueeze(1).repeat(1, frames, 1, 1, 1)}
    if "flattened_patches" in takes:
        yield {"flattened_patches": torch.ones(samples, FRAMES, channels * patch**2 + 2)}
    mels = _find_size(
        config, 80, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_channels"
    )
    times = [2 * item for item in list_sizes(config, "max_source_positions")] + [FRAMES]
    if "input_features" in takes:
        for time in times:
            yield {"input_features": torch.zeros(samples, mels, time)}
        yield {"input_features": torch.zeros(samples, FRAMES, mels)}
    if "input_values" in takes:
        yield {"input_values": torch.zeros(samples, AUDIO)}
        yield {"input_values": torch.zeros(samples, 1, AUDIO)}
        yield {"input_values": torch.zeros(samples, _find_size(config, FRAMES, "max_length"), mels)}
    if "past_values" in takes:
        time = _find_size(config, FRAMES, "context_length")
        width = _find_size(config, 1, "num_input_channels")
        yield {"past_values": torch.zeros(samples, time, width)}


def _list_labels(takes: set[str], config: Any, samples: int, inputs: Named) -> Iterator[Named]:
    tokens = inputs.get("input_ids")
    image = inputs.get("pixel_values")
    ones = torch.ones(samples, dtype=torch.int64)
    kinds = max(1, getattr(config, "num_labels", 0) or 1)
    if "start_positions" in takes:
        yield {"start_positions": ones, "end_positions": ones}
    if "mask_labels" in takes:
        yield {
            "mask_labels[]": torch.ones(samples, 1, IMAGE, IMAGE),
            "class_labels[]": ones.unsqueeze(1),
        }
    if "future_values" in takes:
        past = inputs["past_values"]
        yield {
            "future_values": torch.zeros(
                samples, _find_size(config, FRAMES, "prediction_length"), past.shape[-1]
            )
        }
    if "labels" not in takes:
        yield {}
        return
    result: list[Named] = []
    if tokens is not None:
        result.append({"labels": (tokens % 2).clamp(max=kinds - 1) if tokens.dim() == 2 else ones})
    result.append({"labels": ones})
    short = {"labels": torch.ones(samples, SHORT, dtype=torch.int64)}
    if tokens is None:
        result.append(short)
    if image is not None:
        pixels = torch.ones(samples, *image.shape[-2:], dtype=torch.int64)
        boxes = torch.full((samples, 1, 4), 0.5)
        objects = {"labels.class_labels": ones.unsqueeze(1), "labels.boxes": boxes}
        result += [
            {"labels": pixels},
            objects,
            objects | {"labels.masks": pixels[:, None]},
            {"labels": pixels.float()},
            {"labels": image},
        ]
    result.append({"labels": torch.ones(samples, kinds)})
    if tokens is not None:
        result.append(short)
    mels = _find_size(config, 80, "num_mel_bins", "feature_size")
    books = _find_size(config, 4, "num_codebooks")
    result += [
        {"labels": torch.zeros(samples, FRAMES, mels)},
        {"labels": torch.ones(samples, FRAMES, books, dtype=torch.int64)},
    ]
    more = [name for name in takes if name != "labels" and name.endswith(("_label", "_labels"))]
    yield from result
    if more:
        yield from (item | dict.fromkeys(more, ones) for item in result[:2])
