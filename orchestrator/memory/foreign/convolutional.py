"""What a convolutional classifier holds in a training step: its description, walked forth and back as autograd would.

Every operation says what it keeps for the way back, as tools/autograd/derivatives.yaml of pytorch/pytorch has it, and
which gradients come of it; tests/memory/foreign/test_convolutional.py counts the same in torch itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from orchestrator.specs.errors import SpecError

INT64_BYTES = 8  # a label, the place of a maximum, the batches that a norm has seen


@dataclass(frozen=True, slots=True)
class Branches:
    """Parts that take in the same; what they return is summed, laid side by side or multiplied with what came in.

    `aside` goes on with what came in: its one part ends in a loss of its own.
    """

    how: Literal["sum", "cat", "gate", "aside"]
    parts: tuple[Part, ...]


# Words for operations, such as "conv64k7s2 bn relu" (class _Walk), or parts, one after the other.
Part = str | Branches | tuple["Part", ...]


class Peak(NamedTuple):
    """Bytes at the worst moment of the way back."""

    kept: int
    working: int  # gradients of activations, and what a convolution works in
    gradients: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a walk found."""

    parameters: int
    buffer_bytes: int
    saved_bytes: int  # from forward to backward, images and labels among it
    peak: Peak


def walked(net: Part, batch: int, side: int, *, low: bool, transposes: bool, accumulates: bool = False) -> Counted:
    """A training step of so many square images, in fp32 or as CUDA's autocast has it (`low`).

    `transposes`: convolutions run on tensor cores, and no tensor lies as they want it. `accumulates`: gradients of
    earlier micro-batches are there from the start. Raises SpecError where images are too small.
    """
    walk = _Walk(batch, side, low=low, transposes=transposes)
    walk.loss(walk.run(net, walk.images))
    return Counted(
        parameters=walk.parameters,
        buffer_bytes=walk.buffer_bytes,
        saved_bytes=sum(storage.size for storage in {each for step in walk.steps for each in step.saved}),
        peak=walk.back(accumulates=accumulates),
    )


@dataclass(eq=False, slots=True)
class _Storage:
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class _Value:
    """A batch of images, or of vectors as images of one pixel."""

    storage: _Storage
    channels: int
    height: int
    width: int
    element_bytes: int
    trained: bool = True  # it has a gradient


class _Step(NamedTuple):
    """One operation as the way back sees it."""

    inputs: tuple[_Value, ...]
    output: _Value
    saved: tuple[_Storage, ...]
    weights: int = 0
    work_bytes: int = 0
    views: bool = False  # gradients of what goes in are views of that of what comes out


class _Word(NamedTuple):
    """An operation, its channels or its kernel, and k(ernel), s(tride), p(adding), g(roups) and b(ias)."""

    name: str
    number: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int] | None
    groups: int
    bias: bool


_WORD = re.compile(r"([a-z]+)(\d*)((?:[kspg]\d+(?:x\d+)?)*)(b?)")
_OPTION = re.compile(r"([kspg])(\d+)(?:x(\d+))?")


def _read(word: str) -> _Word:
    match = _WORD.fullmatch(word)
    assert match is not None, f"no operation is written like {word!r}"
    said = {key: (int(one), int(other or one)) for key, one, other in _OPTION.findall(match[3])}
    number = int(match[2] or 0)
    return _Word(
        name=match[1],
        number=number,
        kernel=said.get("k", (number, number)),
        stride=said.get("s", (1, 1))[0],
        padding=said.get("p"),
        groups=said.get("g", (1, 1))[0],
        bias=bool(match[4]),
    )


class _Walk:
    """Forward, word by word (`run`, `loss`); then `back`."""

    def __init__(self, batch: int, side: int, *, low: bool, transposes: bool) -> None:
        self.parameters = self.buffer_bytes = 0
        self.steps: list[_Step] = []
        self._batch, self._width, self._transposes = batch, 2 if low else 4, transposes
        self.images = replace(self._value(3, side, side, 4), trained=False)
        self._labels = _Storage(INT64_BYTES * batch)

    # ------------------------------------------------------------------------------------------------------- forward

    def run(self, part: Part, x: _Value) -> _Value:
        if isinstance(part, Branches):
            return self._branches(part, x)
        if isinstance(part, str):
            for word in map(_read, part.split()):
                x = self._RULES[word.name](self, x, word)
        else:
            for each in part:
                x = self.run(each, x)
        return x

    def loss(self, logits: _Value) -> None:
        """Cross entropy keeps log-probabilities, in fp32 anyhow, labels and the sum of their weights."""
        wide = self._value(logits.channels, 1, 1, 4)
        self._did((logits,), wide, wide.storage)
        self._did((wide,), _Value(_Storage(4), 1, 1, 1, 4), wide.storage, self._labels, _Storage(4))

    def _branches(self, branches: Branches, x: _Value) -> _Value:
        found = tuple(self.run(part, x) for part in branches.parts)
        first = found[0]
        if branches.how == "aside":
            self.loss(first)
            return x
        if branches.how == "gate":
            return self._did((x, first), self._like(x), x.storage, first.storage)
        if branches.how == "cat":
            channels = sum(each.channels for each in found)
            return self._did(found, self._value(channels, first.height, first.width, x.element_bytes), views=True)
        return self._did(found, replace(first), views=True)  # the other is added in place

    def _convolution(self, x: _Value, word: _Word) -> _Value:
        depthwise = word.name == "dw"
        channels, groups = (x.channels, x.channels) if depthwise else (word.number, word.groups)
        y = self._window(x, word, channels, self._width, padding=(word.kernel[0] // 2, word.kernel[1] // 2))
        weights = channels * x.channels // groups * word.kernel[0] * word.kernel[1]
        # PyTorch has kernels of its own for one channel a group (use_cudnn_depthwise in aten/native/Convolution.cpp)
        return self._product(x, y, weights, bias=channels if word.bias else 0, transposes=not depthwise)

    def _linear(self, x: _Value, word: _Word) -> _Value:
        y = self._value(word.number, x.height, x.width, self._width)
        return self._product(x, y, x.channels * word.number, bias=word.number, transposes=False)

    def _product(self, x: _Value, y: _Value, weights: int, *, bias: int, transposes: bool) -> _Value:
        """Autocast casts what goes in, and the weights, whose copy is kept as well.

        cuDNN works in what its plan wants, taken from the caching allocator without a bound (aten/src/ATen/native/
        cudnn/Conv_v8.cpp, run_conv_plan; with cudnn.benchmark once in the most that any plan wants). Counted are the
        copies for tensor cores, which want channels last (NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts
        In Memory"); what other algorithms want, as by FFT or Winograd, is not documented.
        """
        x = self._as(x, self._width)
        copies = (_Storage(self._width * weights),) if self._width == 2 else ()
        self.parameters += weights + bias
        work = self._bytes(x) + self._bytes(y) + self._width * weights if transposes and self._transposes else 0
        return self._did((x,), y, x.storage, *copies, weights=weights + bias, work_bytes=work)

    def _batch_norm(self, x: _Value, _word: _Word) -> _Value:
        self.buffer_bytes += 2 * 4 * x.channels + INT64_BYTES
        self.parameters += 2 * x.channels
        statistics = _Storage(4 * x.channels), _Storage(4 * x.channels)
        return self._did((x,), self._like(x), x.storage, *statistics, weights=2 * x.channels)

    def _layer_norm(self, x: _Value, _word: _Word) -> _Value:
        """Over the channels of every pixel; in fp32 under autocast."""
        x = self._as(x, 4)
        self.parameters += 2 * x.channels
        pixels = self._elements(x) // x.channels
        statistics = _Storage(4 * pixels), _Storage(4 * pixels)
        return self._did((x,), self._like(x), x.storage, *statistics, weights=2 * x.channels)

    def _layer_scale(self, x: _Value, _word: _Word) -> _Value:
        """A factor for every channel, in fp32, as is what it returns then."""
        self.parameters += x.channels
        y = self._value(x.channels, x.height, x.width, 4)
        return self._did((x,), y, x.storage, weights=x.channels)

    def _keeps_input(self, x: _Value, _word: _Word) -> _Value:
        return self._did((x,), self._like(x), x.storage)

    def _keeps_output(self, x: _Value, _word: _Word) -> _Value:
        y = self._like(x)
        return self._did((x,), y, y.storage)

    def _pool(self, x: _Value, word: _Word) -> _Value:
        y = self._window(x, word, x.channels, x.element_bytes, padding=(0, 0))
        places = (_Storage(INT64_BYTES * self._elements(y)),) if word.name == "max" else ()
        return self._did((x,), y, x.storage, *places)

    def _pool_to(self, x: _Value, word: _Word) -> _Value:
        """To so many pixels a side; to one it is a mean, which keeps nothing."""
        y = self._value(x.channels, word.number, word.number, x.element_bytes)
        return self._did((x,), y, *((x.storage,) if word.number > 1 else ()))

    def _flat(self, x: _Value, _word: _Word) -> _Value:
        y = _Value(x.storage, x.channels * x.height * x.width, 1, 1, x.element_bytes)
        return self._did((x,), y, views=True)

    def _dropout(self, x: _Value, _word: _Word) -> _Value:
        """CUDA's kernel keeps a mask of one byte."""
        return self._did((x,), self._like(x), _Storage(self._elements(x)))

    def _dropout_in_place(self, x: _Value, _word: _Word) -> _Value:
        """Has no kernel of its own: it keeps what it multiplies with."""
        return self._did((x,), replace(x), _Storage(self._bytes(x)))

    def _path(self, x: _Value, _word: _Word) -> _Value:
        """Stochastic depth keeps a factor of every sample."""
        return self._did((x,), self._like(x), _Storage(x.element_bytes * self._batch))

    _RULES: Mapping[str, Callable[[_Walk, _Value, _Word], _Value]] = {
        **dict.fromkeys(("conv", "dw"), _convolution),
        "fc": _linear,
        "bn": _batch_norm,
        "ln": _layer_norm,
        "scale": _layer_scale,
        **dict.fromkeys(("clip", "silu", "hswish", "hsigmoid", "gelu"), _keeps_input),  # in place they copy it before
        **dict.fromkeys(("relu", "sigmoid"), _keeps_output),
        **dict.fromkeys(("max", "avg"), _pool),
        "pool": _pool_to,
        "flat": _flat,
        "drop": _dropout,
        "mask": _dropout_in_place,
        "path": _path,
    }

    # ---------------------------------------------------------------------------------------------------------- back

    def back(self, *, accumulates: bool) -> Peak:
        """What is live at the worst moment from the loss to the first operation, samples among it."""
        held = Counter(storage for step in self.steps for storage in step.saved)
        held[self.images.storage] += 1  # the training's own
        kept, working = sum(storage.size for storage in held), 0
        gradients = 4 * self.parameters if accumulates else 0
        users: Counter[_Storage] = Counter()  # values whose gradient lies there
        found: dict[_Value, _Storage] = {}
        peaks = [Peak(kept, working, gradients)]
        for step in reversed(self.steps):
            given = found.pop(step.output, None) or _Storage(self._bytes(step.output))
            if not users[given]:  # of a loss
                users[given] += 1
                working += given.size
            for value in step.inputs:
                if not value.trained:
                    continue
                is_view = step.views and value.element_bytes == step.output.element_bytes
                made = given if is_view else _Storage(self._bytes(value))
                working += 0 if users[made] else made.size
                users[made] += 1
                peaks.append(Peak(kept, working + step.work_bytes, gradients))
                if value in found:  # they are added up in one of both
                    working -= self._dropped(users, made)
                else:
                    found[value] = made
            gradients += 0 if accumulates else 4 * step.weights
            peaks.append(Peak(kept, working + step.work_bytes, gradients))
            working -= self._dropped(users, given)
            kept -= sum(self._dropped(held, storage) for storage in step.saved)
        return max(peaks, key=sum)

    @staticmethod
    def _dropped(users: Counter[_Storage], storage: _Storage) -> int:
        """Bytes that are free once one user less has it."""
        users[storage] -= 1
        return 0 if users[storage] else storage.size

    # ---------------------------------------------------------------------------------------------------------- sizes

    def _did(
        self,
        inputs: tuple[_Value, ...],
        output: _Value,
        *saved: _Storage,
        weights: int = 0,
        work_bytes: int = 0,
        views: bool = False,
    ) -> _Value:
        self.steps.append(_Step(inputs, output, saved, weights, work_bytes, views))
        return output

    def _window(self, x: _Value, word: _Word, channels: int, width: int, *, padding: tuple[int, int]) -> _Value:
        high, wide = word.padding or padding
        edges = ((x.height, word.kernel[0], high), (x.width, word.kernel[1], wide))
        height, wideness = ((edge + 2 * padded - kernel) // word.stride + 1 for edge, kernel, padded in edges)
        if min(height, wideness) < 1:
            raise SpecError(f"images of {self.images.height} pixels are too small for this net")
        return self._value(channels, height, wideness, width)

    def _value(self, channels: int, height: int, width: int, element_bytes: int) -> _Value:
        size = self._batch * channels * height * width * element_bytes
        return _Value(_Storage(size), channels, height, width, element_bytes)

    def _like(self, x: _Value) -> _Value:
        return self._value(x.channels, x.height, x.width, x.element_bytes)

    def _as(self, x: _Value, element_bytes: int) -> _Value:
        """Cast, if it is not of that width."""
        if x.element_bytes == element_bytes:
            return x
        return self._did((x,), replace(self._value(x.channels, x.height, x.width, element_bytes), trained=x.trained))

    def _elements(self, x: _Value) -> int:
        return self._batch * x.channels * x.height * x.width

    def _bytes(self, x: _Value) -> int:
        return x.element_bytes * self._elements(x)
