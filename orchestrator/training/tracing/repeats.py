"""Finds the repeating layers of a model, and the few of them that need to be traced.

Layers are compared by what their modules hold, so no list of families is needed. A pattern that does not repeat, or
that is too long to save anything, has no Stack: such a model is traced whole.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import nn

from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import DecoderSpec
from orchestrator.specs.replace import replace

Kinds = list[Hashable]


@frozen
class RepeatPattern:
    """The repeating pattern of a model's first `length` layers: after `lead` layers, one repeats
    every `period`.
    """

    lead: int
    period: int
    length: int

    @property
    def depth(self) -> int:
        """Number of layers to trace.

        The first and the last period are at the ends: masks are made and freed there. Between them, at least one kind
        occurs three times, so that a line through them can fail.
        """
        fewest = self.lead + 3 * self.period + 2
        return min(self.length, fewest + (self.length - fewest) % self.period)


def find_repeat_pattern(layer_kinds: Sequence[Hashable], layer_count: int) -> RepeatPattern | None:
    """Return the repeating pattern of the first `layer_count` layers that needs the fewest layers
    traced; None: trace all.
    """
    best = None
    numbers = dict[Hashable, int]()
    same = [numbers.setdefault(kind, len(numbers)) for kind in layer_kinds]
    for period in range(1, layer_count // 3 if len(layer_kinds) >= layer_count else 1):
        lead = layer_count - period
        while lead and same[lead - 1] == same[lead - 1 + period]:
            lead -= 1
        candidate = RepeatPattern(lead=lead, period=period, length=layer_count)
        if candidate.depth < (best.depth if best else layer_count):
            best = candidate
    return best


def count_layers(config: Any) -> int:
    """Return the number of layers in a configuration; 0 where it has none."""
    return getattr(config, "num_hidden_layers", None) or 0


def describe_layers(layers: Sequence[nn.Module], config: Any, model_layer_count: int) -> Kinds:
    """Return a comparison key per layer: its modules, shapes and settings, and its entries in the
    configuration's lists.

    `model_layer_count` is that of the whole model. A setting that counts the layers is left out.
    """
    described = [dict(_list_comparison_items(layer)) for layer in layers]
    stack = described[: count_layers(config)]
    numbers = {
        key
        for key, first in (stack[0].items() if len(stack) > 1 else ())
        if type(first) is int
        and all(layer.get(key) == first + index for index, layer in enumerate(stack))
    }
    rows = [
        value
        for name, value in sorted(getattr(config, "__dict__", {}).items())
        if isinstance(value, list | tuple)
        and (len(value) == model_layer_count or name == "layer_types")
    ]
    kinds: Kinds = []
    for index, description in enumerate(described):
        of_layer = tuple(str(row[index]) for row in rows if index < len(row))
        kinds.append((*(item for item in description.items() if item[0] not in numbers), of_layer))
    return kinds


def cut_layers(config: Any, layer_count: int) -> Any:
    """Return a copy of the configuration with `layer_count` layers."""
    if isinstance(config, DecoderSpec):
        return replace(config, num_hidden_layers=layer_count)
    shorter = copy.deepcopy(config)  # its dictionary has no `attn_implementation`
    shorter.num_hidden_layers = layer_count
    kinds = getattr(shorter, "layer_types", None)
    if kinds and len(kinds) > layer_count:  # some families derive them from the number
        shorter.layer_types = kinds[:layer_count]
    return shorter


def _list_comparison_items(layer: nn.Module) -> Iterator[tuple[str, Hashable]]:
    for path, part in layer.named_modules():
        yield path, f"{type(part).__module__}.{type(part).__qualname__}"
        for name, value in vars(part).items():
            if not name.startswith("_"):
                yield f"{path}.{name}", _make_comparison_value(value)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}", (*parameter.shape, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}", (*buffer.shape, buffer.dtype)


def _make_comparison_value(value: Any) -> Hashable:
    """Return a layer's setting in the form in which layers are compared.

    Of a fraction, such as a dropout rate, only whether it is zero matters.
    """
    if isinstance(value, list | tuple):
        return tuple(map(_make_comparison_value, value))
    if isinstance(value, float):
        return bool(value)
    return value if isinstance(value, int | str) else getattr(value, "__qualname__", None)
