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


def has_loss(head_class: Any) -> bool:
    """Return whether this transformers class is a model whose `forward` takes labels."""
    is_model = isinstance(head_class, type) and issubclass(head_class, PreTrainedModel)
    return is_model and bool({*LABELS} & {*inspect.signature(head_class.forward).parameters})


def find_head_in_architectures(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that `architectures` names; None if the installed transformers has none for
    it.
    """
    for name in getattr(config, "architectures", None) or ():
        head = getattr(transformers, name, None)
        if has_loss(head) and isinstance(config, getattr(head, "config_class", None) or object):
            return head
    return None


def compute_own_loss(module: Any, tensors_by_name: Named) -> Tensor:
    """Return the module's own loss of a batch (a mean) times the number of its samples. Raises
    ValueError if it returns none.
    """
    head = getattr(module, "module", module)  # engines wrap it
    out = module(**make_forward_arguments(tensors_by_name), **make_constant_arguments(type(head)))
    loss = getattr(out, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ValueError("it returns no loss")
    return loss.float().sum() * len(next(iter(tensors_by_name.values())))


def takes_images_or_sounds(head_class: Any) -> bool:
    """Return whether the head takes images or sounds."""
    return bool({*SIGNALS} & {*inspect.signature(head_class.forward).parameters})


def make_constant_arguments(head_class: Any) -> dict[str, Any]:
    """Return the arguments of `forward` that are no tensors: a loss is requested, a cache is not."""
    flags = {"return_loss": True, "use_cache": False, "return_dict": True}
    return {
        name: value
        for name, value in flags.items()
        if name in inspect.signature(head_class.forward).parameters
    }


def make_forward_arguments(tensors_by_name: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors as `forward` takes them.

    A name `a.b` becomes key b of a dictionary per sample, `a[]` an entry of a list. The samples of
    `a*` are joined: their first two axes become one.
    """
    result: dict[str, Any] = {}
    for name, values in tensors_by_name.items():
        argument, _, key = name.partition(".")
        if key:
            for sample, row in zip(
                result.setdefault(argument, [{} for _ in values]), values, strict=True
            ):
                sample[key] = row
        else:
            if "[]" in name:
                result[name.rstrip("[]*")] = list(values)
            elif "*" in name:
                result[name.rstrip("[]*")] = values.flatten(0, 1)
            else:
                result[name.rstrip("[]*")] = values
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

    def fit(
        self, sample_count: int, module: Any, prepare_inputs: Prepared = contextlib.nullcontext
    ) -> None:
        """Find the first candidate batch for which the module returns a loss. Raises SpecError with
        the first failure if there is none.

        `prepare_inputs(tensors)` returns a context; the module takes what that yields in place of
        the tensors.
        """
        takes = {*inspect.signature(self._head.forward).parameters}
        for signal in (
            _list_signal_inputs(takes, self._config, sample_count) if "input_ids" in takes else ()
        ):
            with contextlib.suppress(Exception), prepare_inputs(signal) as passed, torch.no_grad():
                self.places = count_placeholder_tokens(module, passed, sample_count)
                break
        failure: Exception | None = None
        for place, named in enumerate(itertools.islice(self._batches(sample_count), TRIES_MAX)):
            try:
                with prepare_inputs(named) as passed:
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

    def make_named_tensors(self, sample_count: int) -> Named:
        """Return {argument: tensor} of the batch that `fit` found, with `sample_count` samples."""
        assert self.at is not None, "fit"
        return next(itertools.islice(self._batches(sample_count), self.at, None))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.make_named_tensors(1))

    def batch(self, indices: Sequence[int]) -> Batch:
        return tuple(self.make_named_tensors(len(indices)).values())

    def _batches(self, sample_count: int) -> Iterator[Named]:
        return list_candidate_batches(
            self._head, self._config, sample_count, self._length, self.places
        )


def list_candidate_batches(
    head_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    sample_count: int,
    tokens_per_sample: int,
    placeholder_count: int | None,
) -> Iterator[Named]:
    """Yield batches, as {argument: tensor}, that the head may accept, the likeliest first.

    `placeholder_count` is the result of `count_placeholder_tokens`.
    """
    takes = {*inspect.signature(head_class.forward).parameters}
    for inputs in _list_inputs(takes, config, sample_count, tokens_per_sample, placeholder_count):
        for labels in _list_labels(takes, config, sample_count, inputs):
            yield inputs | labels


def list_config_numbers(config: Any, *field_names: str) -> Iterator[int]:
    """Yield the numbers in these fields of a configuration, then those in its nested parts."""
    for name in field_names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if type(value) is int and value > 0:
            yield value
    for name in type(config).sub_configs if isinstance(config, PreTrainedConfig) else ():
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from list_config_numbers(part, *field_names)


def _find_config_number(config: Any, default: int, *field_names: str) -> int:
    return next(list_config_numbers(config, *field_names), default)


def _get_text_config(config: Any) -> Any:
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several
        return config


def _make_tokens(config: Any, sample_count: int, tokens_per_sample: int) -> Tensor:
    """Return tokens [samples, length] to which no configuration gives a meaning, with the end of
    the text last.
    """
    text = _get_text_config(config)
    vocabulary = _find_config_number(
        text, _find_config_number(config, 2, "vocab_size"), "vocab_size"
    )
    places = _find_config_number(
        text,
        tokens_per_sample,
        "max_position_embeddings",
        "n_positions",
        "max_target_positions",
        "max_seq_len",
    )
    count = max(2, min(tokens_per_sample, places - 4))
    special = set()
    for item in (config, text):
        for name, value in item.to_dict().items():
            if name.endswith("token_id"):
                special.add(value)
    plain = torch.tensor(
        [word for word in range(min(vocabulary, 64)) if word not in special] or [0]
    )
    tokens = plain[torch.arange(sample_count * count) % len(plain)].reshape(sample_count, count)
    end = getattr(text, "eos_token_id", None)
    if type(end) is int and end < vocabulary:
        tokens[:, -1] = end
    return tokens


def _list_inputs(
    argument_names: set[str],
    config: Any,
    sample_count: int,
    tokens_per_sample: int,
    placeholder_count: int | None,
) -> Iterator[Named]:
    signals = list(_list_signal_inputs(argument_names, config, sample_count))
    if "input_ids" not in argument_names:
        yield from signals
        return
    tokens = _make_tokens(config, sample_count, tokens_per_sample)
    beside: Named = (
        {"bbox": torch.zeros(*tokens.shape, 4, dtype=torch.int64)}
        if "bbox" in argument_names
        else {}
    )
    for signal in signals:
        for holders in _prepend_placeholders(config, tokens, placeholder_count):
            yield {"input_ids": holders} | beside | signal
    yield {"input_ids": tokens} | beside
    if "decoder_input_ids" in argument_names:
        yield {"input_ids": tokens, "decoder_input_ids": tokens}
    choices = tokens.unsqueeze(1).repeat(1, CHOICES, 1)
    yield {"input_ids": choices} | {
        name: item.unsqueeze(1).repeat(1, CHOICES, 1, 1) for name, item in beside.items()
    }


def _prepend_placeholders(
    config: Any, tokens: Tensor, placeholder_count: int | None
) -> Iterator[Tensor]:
    """Yield the tokens, and variants that begin with placeholder tokens for an image's or sound's
    features where a model has such tokens.
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
    if token is not None and placeholder_count:
        yield torch.cat([torch.full((len(tokens), placeholder_count), token), tokens], dim=1)
    yield tokens


def count_placeholder_tokens(
    module: Any, tensors_by_name: Mapping[str, Tensor], sample_count: int
) -> int | None:
    """Return how many tokens of a sample are placeholders for image or sound features; None if none
    are.
    """
    for name in ("get_image_features", "get_audio_features"):
        features = getattr(module, name, None)
        taken = {*inspect.signature(features).parameters} if features is not None else set()
        passed = {
            key: value
            for key, value in make_forward_arguments(tensors_by_name).items()
            if key in taken
        }
        if features is not None and passed:
            out = features(**passed)
            result = tree_leaves(getattr(out, "pooler_output", out))
            count = sum(item.numel() for item in result if isinstance(item, Tensor))
            return (
                count
                // sample_count
                // _find_config_number(
                    _get_text_config(module.config), 1, "hidden_size", "d_model", "n_embd"
                )
            )
    return None


def _list_signal_inputs(
    argument_names: set[str], config: Any, sample_count: int
) -> Iterator[Named]:
    """Yield candidate image, sound and time-series inputs."""
    channels = _find_config_number(config, 3, "num_channels", "in_channels", "in_chans")
    sides = [*list_config_numbers(config, "image_size"), IMAGE, 224]
    patch = _find_config_number(config, 16, "patch_size")
    if "image_grid_thw" in argument_names:
        depth = _find_config_number(config, 1, "temporal_patch_size")
        side = 2 * _find_config_number(config, 1, "spatial_merge_size")
        grid = torch.tensor([[1, side, side]] * sample_count)
        yield {
            "pixel_values*": torch.zeros(sample_count, side**2, channels * depth * patch**2),
            "image_grid_thw": grid,
        }
    elif "pixel_values" in argument_names:
        for side in dict.fromkeys(sides):
            image = torch.zeros(sample_count, channels, side, side)
            if "bool_masked_pos" in argument_names:
                yield {
                    "pixel_values": image,
                    "bool_masked_pos": torch.arange((side // patch) ** 2).repeat(sample_count, 1)
                    > 1,
                }
            yield {"pixel_values": image}
            frames = _find_config_number(config, 2, "num_frames", "frames_per_clip")
            yield {"pixel_values": image.unsqueeze(1).repeat(1, frames, 1, 1, 1)}
    if "flattened_patches" in argument_names:
        yield {"flattened_patches": torch.ones(sample_count, FRAMES, channels * patch**2 + 2)}
    mels = _find_config_number(
        config, 80, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_channels"
    )
    times = [2 * item for item in list_config_numbers(config, "max_source_positions")] + [FRAMES]
    if "input_features" in argument_names:
        for time in times:
            yield {"input_features": torch.zeros(sample_count, mels, time)}
        yield {"input_features": torch.zeros(sample_count, FRAMES, mels)}
    if "input_values" in argument_names:
        yield {"input_values": torch.zeros(sample_count, AUDIO)}
        yield {"input_values": torch.zeros(sample_count, 1, AUDIO)}
        yield {
            "input_values": torch.zeros(
                sample_count, _find_config_number(config, FRAMES, "max_length"), mels
            )
        }
    if "past_values" in argument_names:
        time = _find_config_number(config, FRAMES, "context_length")
        width = _find_config_number(config, 1, "num_input_channels")
        yield {"past_values": torch.zeros(sample_count, time, width)}


def _list_labels(
    argument_names: set[str], config: Any, sample_count: int, inputs: Named
) -> Iterator[Named]:
    tokens = inputs.get("input_ids")
    image = inputs.get("pixel_values")
    ones = torch.ones(sample_count, dtype=torch.int64)
    kinds = max(1, getattr(config, "num_labels", 0) or 1)
    if "start_positions" in argument_names:
        yield {"start_positions": ones, "end_positions": ones}
    if "mask_labels" in argument_names:
        yield {
            "mask_labels[]": torch.ones(sample_count, 1, IMAGE, IMAGE),
            "class_labels[]": ones.unsqueeze(1),
        }
    if "future_values" in argument_names:
        past = inputs["past_values"]
        yield {
            "future_values": torch.zeros(
                sample_count,
                _find_config_number(config, FRAMES, "prediction_length"),
                past.shape[-1],
            )
        }
    if "labels" not in argument_names:
        yield {}
        return
    result: list[Named] = []
    if tokens is not None:
        result.append({"labels": (tokens % 2).clamp(max=kinds - 1) if tokens.dim() == 2 else ones})
    result.append({"labels": ones})
    short = {"labels": torch.ones(sample_count, SHORT, dtype=torch.int64)}
    if tokens is None:
        result.append(short)
    if image is not None:
        pixels = torch.ones(sample_count, *image.shape[-2:], dtype=torch.int64)
        boxes = torch.full((sample_count, 1, 4), 0.5)
        objects = {"labels.class_labels": ones.unsqueeze(1), "labels.boxes": boxes}
        result += [
            {"labels": pixels},
            objects,
            objects | {"labels.masks": pixels[:, None]},
            {"labels": pixels.float()},
            {"labels": image},
        ]
    result.append({"labels": torch.ones(sample_count, kinds)})
    if tokens is not None:
        result.append(short)
    mels = _find_config_number(config, 80, "num_mel_bins", "feature_size")
    books = _find_config_number(config, 4, "num_codebooks")
    result += [
        {"labels": torch.zeros(sample_count, FRAMES, mels)},
        {"labels": torch.ones(sample_count, FRAMES, books, dtype=torch.int64)},
    ]
    more = [
        name for name in argument_names if name != "labels" and name.endswith(("_label", "_labels"))
    ]
    yield from result
    if more:
        yield from (item | dict.fromkeys(more, ones) for item in result[:2])
