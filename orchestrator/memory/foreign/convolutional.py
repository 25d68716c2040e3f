"""What a convolutional net holds in a training step: its description, walked forth and back as autograd would.

Every operation says what it keeps for the way back, as tools/autograd/derivatives.yaml of pytorch/pytorch has it, and
which gradients come of it; tests/memory/foreign/test_convolutional.py counts the same in torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from orchestrator.memory.foreign.autograd_steps import Peak, Step, Storage, Value, kept_bytes, worst_moment
from orchestrator.memory.foreign.convolutional_words import Branches, Each, Part, Regions, Word, read
from orchestrator.specs.errors import SpecError

INT64_BYTES = 8  # a label, the place of a maximum, the batches that a norm has seen
# The most objects in one image of COCO's training set, 000000157105.jpg (fchollet/deep-learning-with-python-notebooks,
# issue 299).
BOXES = 93
# For every pair of an anchor and a box: two corners and their distance, the area between them, that of their union and
# the ratio (open-mmlab/mmdetection mmdet/core/bbox/iou_calculators, bbox_overlaps; facebookresearch/detectron2
# detectron2/structures/boxes.py, pairwise_iou until April 2020).
PAIR_FLOATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a walk found."""

    parameters: int  # trained ones
    frozen_parameters: int
    buffer_bytes: int
    saved_bytes: int  # from forward to backward, images and labels among it
    peak: Peak


def walked(
    net: Part,
    batch: int,
    pixels: tuple[int, int],
    *,
    low: bool,
    transposes: bool,
    early: bool = False,
    accumulates: bool = False,
) -> Counted:
    """A training step of so many images, so high and so wide, in fp32 or as CUDA's autocast has it (`low`).

    `transposes`: convolutions run on tensor cores, and no tensor lies as they want it. `early`: by a torch that kept
    what no gradient needs, before 1.11 (pytorch/pytorch issues 63027 and 64000). `accumulates`: gradients are there
    from the start. Raises SpecError where images are too small.
    """
    walk = _Walk(batch, pixels, low=low, transposes=transposes, early=early)
    walk.run(net, walk.images)
    gradient_bytes = 4 * walk.parameters if accumulates else None
    forth = walk.forth._replace(gradients=gradient_bytes or 0)
    return Counted(
        parameters=walk.parameters,
        frozen_parameters=walk.frozen_parameters,
        buffer_bytes=walk.buffer_bytes,
        saved_bytes=kept_bytes(walk.steps),
        peak=max(forth, worst_moment(walk.steps, walk.images.storage, gradient_bytes), key=sum),
    )


class _Walk:
    """Forward, word by word."""

    def __init__(self, batch: int, pixels: tuple[int, int], *, low: bool, transposes: bool, early: bool) -> None:
        self.parameters = self.frozen_parameters = self.buffer_bytes = 0
        self.steps: list[Step] = []
        self.forth = Peak(0, 0, 0)  # at the worst moment on the way forth
        self._batch, self._width, self._transposes = batch, 2 if low else 4, transposes
        self._early, self._frozen, self._counts = early, False, True
        self._labels: dict[int, Storage] = {}
        self._anchors = 0  # of an image
        self.images = replace(self._value(3, *pixels, 4), trained=False)
        self._maps = {0: self.images}
        self._kept, self._kept_bytes = {self.images.storage}, self.images.bytes
        self._waiting: list[Storage] = []  # what other branches returned

    def run(self, part: Part, x: Value) -> Value:
        if isinstance(part, Branches):
            return self._branches(part, x)
        if isinstance(part, Each):
            return self._each(part)
        if isinstance(part, Regions):
            maps = tuple(self._maps[number] for number in part.maps)
            y = self._value(maps[0].channels, part.side, part.side, maps[0].element_bytes, self._batch * part.count)
            return self._did(maps, y, Storage(5 * 4 * y.count))  # which image, and four corners
        if isinstance(part, str):
            for word in map(read, part.split()):
                x = self._RULES[word.name](self, x, word)
        else:
            for each in part:
                x = self.run(each, x)
        return x

    def _branches(self, branches: Branches, x: Value) -> Value:
        if branches.how == "frozen":
            self._frozen = True
            x = self.run(branches.parts[0], x)
            self._frozen = False
            return x
        found: list[Value] = []
        for part in branches.parts:
            found.append(self.run(part, x))
            self._waiting.append(found[-1].storage)
        del self._waiting[-len(found) :]
        first = found[0]
        if branches.how == "gate":
            return self._did((x, first), self._like(x), x.storage, first.storage)
        if branches.how == "cat":
            channels = sum(each.channels for each in found)
            y = self._value(channels, first.height, first.width, x.element_bytes, x.count)
            return self._did(tuple(found), y, views=True)
        return self._did(tuple(found), replace(first), views=True)  # the other is added in place

    def _each(self, each: Each) -> Value:
        """Gradients of weights come with the first map of the way back."""
        found = []
        for number in each.maps:
            self._counts = number == each.maps[-1]
            found.append(self.run(each.part, self._maps[number]))
        first, height = found[0], sum(value.height for value in found)
        return self._did(
            tuple(found), self._value(first.channels, height, 1, first.element_bytes, first.count), views=True
        )

    # ---------------------------------------------------------------------------------------------------------- maps

    def _put(self, x: Value, word: Word) -> Value:
        self._maps[word.number] = x
        return x

    def _get(self, _x: Value, word: Word) -> Value:
        return self._maps[word.number]

    def _add(self, x: Value, word: Word) -> Value:
        return self._did((x, self._maps[word.number]), self._like(x), views=True)

    def _up(self, x: Value, word: Word) -> Value:
        """Nearest neighbours or between them, so many times as wide, or as wide as a map ("like"): keeps sizes."""
        return self._did(
            (x,), self._value(x.channels, word.number * x.height, word.number * x.width, x.element_bytes, x.count)
        )

    def _resized(self, x: Value, word: Word) -> Value:
        other = self._maps[word.number]
        return self._did((x,), self._value(x.channels, other.height, other.width, x.element_bytes, x.count))

    def _rows(self, x: Value, word: Word) -> Value:
        """Pixel after pixel, so many channels each: a copy."""
        height = x.channels * x.height * x.width // word.number
        return self._did((x,), self._value(word.number, height, 1, x.element_bytes, x.count))

    def _take(self, x: Value, word: Word) -> Value:
        """So many of every image: keeps which."""
        y = self._value(x.channels, x.height, x.width, x.element_bytes, self._batch * word.number)
        return self._did((x,), y, Storage(INT64_BYTES * y.count))

    def _count_anchors(self, x: Value, word: Word) -> Value:
        """So many at every pixel."""
        self._anchors += word.number * x.height * x.width
        return x

    def _assign(self, x: Value, _word: Word) -> Value:
        """Which box an anchor is to find, image after image."""
        return self._passes(x, 4 * PAIR_FLOATS * self._anchors * BOXES)

    def _passes(self, x: Value, working: int) -> Value:
        """What comes and goes beside all that is kept so far."""
        self.forth = max(self.forth, Peak(self._kept_bytes, working, 0), key=sum)
        return x

    # ------------------------------------------------------------------------------------------------------- losses

    def _cross_entropy(self, x: Value, _word: Word) -> Value:
        """Keeps log-probabilities, in fp32 anyhow, labels and the sum of their weights; logits too if early."""
        wide = self._value(x.channels, x.height, x.width, 4, x.count)
        logits = (x.storage,) if self._early else ()
        self._did((x,), wide, wide.storage, *logits)
        pixels = x.elements // x.channels
        labels = self._labels.setdefault(pixels, Storage(INT64_BYTES * pixels))
        return self._did((wide,), self._scalar(), wide.storage, labels, Storage(4))

    def _sampled(self, x: Value, _word: Word) -> Value:
        """A loss of a few elements, whose gradient is as large as all of them."""
        return self._did((x,), self._scalar())

    def _focal(self, x: Value, _word: Word) -> Value:
        """One kernel keeps what came in and its labels (mmcv/ops/focal_loss.py of open-mmlab/mmcv); then weights."""
        rows = x.elements // x.channels
        y = self._did((x,), self._like(x), x.storage, Storage(INT64_BYTES * rows))
        y = self._did((y,), self._like(y), Storage(4 * rows))
        self._passes(x, 3 * x.bytes)  # the head's own outputs, and what both steps return
        return self._did((y,), self._scalar(), views=True)

    def _composed_focal(self, x: Value, _word: Word) -> Value:
        """Of elementary operations on the rows that are not ignored (facebookresearch/fvcore, nn/focal_loss.py)."""
        rows = x.elements // x.channels
        x = self._did((x,), self._like(x), Storage(INT64_BYTES * rows))
        targets, others, balance = (Storage(x.bytes) for _ in range(3))
        p = self._like(x)
        self._did((x,), p, p.storage)
        entropy = self._did((x,), self._like(x), x.storage, targets)
        hit = self._did((p,), self._like(p), targets)
        rest = self._did((p,), self._like(p), views=True)
        missed = self._did((rest,), self._like(p), others)
        sure = self._did((hit, missed), self._like(p), views=True)
        wrong = self._did((sure,), self._like(p))
        power = self._did((wrong,), self._like(p), wrong.storage)
        loss = self._did((entropy, power), self._like(p), entropy.storage, power.storage)
        loss = self._did((loss,), self._like(p), balance)
        # The head's own outputs, their rows, the targets of all, the loss as yet, and what makes up its balance.
        self._passes(x, 6 * x.bytes)
        return self._did((loss,), self._scalar(), views=True)

    def _scalar(self) -> Value:
        return self._value(1, 1, 1, 4, 1)

    # ------------------------------------------------------------------------------------------------------- layers

    def _convolution(self, x: Value, word: Word) -> Value:
        depthwise = word.name == "dw"
        channels, groups = (x.channels, x.channels) if depthwise else (word.number, word.groups)
        around = (word.dilation * (word.kernel[0] // 2), word.dilation * (word.kernel[1] // 2))
        y = self._window(x, word, channels, self._width, padding=around)
        weights = channels * x.channels // groups * word.kernel[0] * word.kernel[1]
        # PyTorch has kernels of its own for one channel a group (use_cudnn_depthwise in aten/native/Convolution.cpp)
        return self._product(x, y, weights, bias=channels if word.bias else 0, transposes=not depthwise)

    def _deconvolution(self, x: Value, word: Word) -> Value:
        """Of a kernel as wide as its stride."""
        y = self._value(word.number, word.stride * x.height, word.stride * x.width, self._width, x.count)
        weights = x.channels * word.number * word.kernel[0] * word.kernel[1]
        return self._product(x, y, weights, bias=word.number if word.bias else 0, transposes=True)

    def _linear(self, x: Value, word: Word) -> Value:
        y = self._value(word.number, x.height, x.width, self._width, x.count)
        return self._product(x, y, x.channels * word.number, bias=word.number, transposes=False)

    def _product(self, x: Value, y: Value, weights: int, *, bias: int, transposes: bool) -> Value:
        """Autocast casts what goes in, and the weights, whose copy is kept as well.

        cuDNN works in what its plan wants, taken from the caching allocator without a bound (aten/src/ATen/native/
        cudnn/Conv_v8.cpp, run_conv_plan; with cudnn.benchmark once in the most that any plan wants). Counted are the
        copies for tensor cores, which want channels last (NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts
        In Memory"); what other algorithms want, as by FFT or Winograd, is not documented.
        """
        x = self._as(x, self._width)
        copies = (Storage(self._width * weights),) if self._width == 2 and self._counts else ()
        trained = self._holds(weights + bias)
        work = x.bytes + y.bytes + self._width * weights if transposes and self._transposes else 0
        return self._did((x,), y, x.storage, *copies, weights=trained, work_bytes=work)

    def _batch_norm(self, x: Value, _word: Word) -> Value:
        """Keeps the same in evaluation, as detectors train it."""
        if self._counts:
            self.buffer_bytes += 2 * 4 * x.channels + INT64_BYTES
        statistics = Storage(4 * x.channels), Storage(4 * x.channels)
        return self._did((x,), self._like(x), x.storage, *statistics, weights=self._holds(2 * x.channels))

    def _frozen_batch_norm(self, x: Value, _word: Word) -> Value:
        """A product and a sum with what is no parameter (detectron2/layers/batch_norm.py, FrozenBatchNorm2d)."""
        if self._counts:
            self.buffer_bytes += 4 * 4 * x.channels
        y = self._did((x,), self._like(x), Storage(x.element_bytes * x.channels))
        self._waiting.append(x.storage)  # the module's argument
        y = self._did((y,), self._like(x), views=True)
        self._waiting.pop()
        return y

    def _layer_norm(self, x: Value, _word: Word) -> Value:
        """Over the channels of every pixel; in fp32 under autocast."""
        x = self._as(x, 4)
        pixels = x.elements // x.channels
        statistics = Storage(4 * pixels), Storage(4 * pixels)
        return self._did((x,), self._like(x), x.storage, *statistics, weights=self._holds(2 * x.channels))

    def _layer_scale(self, x: Value, _word: Word) -> Value:
        """A factor for every channel, in fp32, as is what it returns then."""
        y = self._value(x.channels, x.height, x.width, 4, x.count)
        return self._did((x,), y, x.storage, weights=self._holds(x.channels))

    def _keeps_input(self, x: Value, _word: Word) -> Value:
        return self._did((x,), self._like(x), x.storage)

    def _keeps_output(self, x: Value, _word: Word) -> Value:
        y = self._like(x)
        return self._did((x,), y, y.storage)

    def _relu_apart(self, x: Value, word: Word) -> Value:
        """Not in place: what came in was kept, once."""
        return self._keeps_input(x, word) if self._early else self._keeps_output(x, word)

    def _pool(self, x: Value, word: Word) -> Value:
        y = self._window(x, word, x.channels, x.element_bytes, padding=(0, 0))
        places = (Storage(INT64_BYTES * y.elements),) if word.name == "max" else ()
        return self._did((x,), y, x.storage, *places)

    def _pool_to(self, x: Value, word: Word) -> Value:
        """To so many pixels a side; to one it is a mean, which keeps nothing."""
        y = self._value(x.channels, word.number, word.number, x.element_bytes, x.count)
        return self._did((x,), y, *((x.storage,) if word.number > 1 else ()))

    def _flat(self, x: Value, _word: Word) -> Value:
        y = Value(x.storage, x.count, x.channels * x.height * x.width, 1, 1, x.element_bytes)
        return self._did((x,), y, views=True)

    def _dropout(self, x: Value, _word: Word) -> Value:
        """CUDA's kernel keeps a mask of one byte."""
        return self._did((x,), self._like(x), Storage(x.elements))

    def _drop_maps(self, x: Value, _word: Word) -> Value:
        """Whole channels: keeps a factor of each."""
        return self._did((x,), self._like(x), Storage(x.element_bytes * x.count * x.channels))

    def _dropout_in_place(self, x: Value, _word: Word) -> Value:
        """Has no kernel of its own: it keeps what it multiplies with."""
        return self._did((x,), replace(x), Storage(x.bytes))

    def _path(self, x: Value, _word: Word) -> Value:
        """Stochastic depth keeps a factor of every sample."""
        return self._did((x,), self._like(x), Storage(x.element_bytes * x.count))

    _RULES: Mapping[str, Callable[[_Walk, Value, Word], Value]] = {
        "put": _put,
        "get": _get,
        "add": _add,
        "up": _up,
        "like": _resized,
        "rows": _rows,
        "take": _take,
        "anchors": _count_anchors,
        "assign": _assign,
        "ce": _cross_entropy,
        "end": _sampled,
        "focal": _focal,
        "focals": _composed_focal,
        **dict.fromkeys(("conv", "dw"), _convolution),
        "deconv": _deconvolution,
        "fc": _linear,
        "bn": _batch_norm,
        "fbn": _frozen_batch_norm,
        "ln": _layer_norm,
        "scale": _layer_scale,
        **dict.fromkeys(("clip", "silu", "hswish", "hsigmoid", "gelu"), _keeps_input),  # in place they copy it before
        **dict.fromkeys(("relu", "sigmoid"), _keeps_output),
        "apart": _relu_apart,
        **dict.fromkeys(("max", "avg"), _pool),
        "pool": _pool_to,
        "flat": _flat,
        "drop": _dropout,
        "dropmap": _drop_maps,
        "mask": _dropout_in_place,
        "path": _path,
    }

    # ---------------------------------------------------------------------------------------------------------- sizes

    def _did(
        self,
        inputs: tuple[Value, ...],
        output: Value,
        *saved: Storage,
        weights: int = 0,
        work_bytes: int = 0,
        views: bool = False,
    ) -> Value:
        """Remembers an operation, unless nothing before it or in it is trained."""
        if not weights and not any(value.trained for value in inputs):
            return replace(output, trained=False)
        self.steps.append(Step(inputs, output, saved, weights, work_bytes, views))
        self._kept_bytes += sum(storage.size for storage in {*saved} - self._kept)
        self._kept.update(saved)
        passing = {output.storage, *self._waiting, *(value.storage for value in inputs)} - self._kept
        self._passes(output, work_bytes + sum(storage.size for storage in passing))
        return output

    def _holds(self, weights: int) -> int:
        """Counts weights of fp32, and says how many of them get a gradient here."""
        if not self._counts:
            return 0
        if self._frozen:
            self.frozen_parameters += weights
            return 0
        self.parameters += weights
        return weights

    def _window(self, x: Value, word: Word, channels: int, width: int, *, padding: tuple[int, int]) -> Value:
        high, wide = word.padding or padding
        edges = ((x.height, word.kernel[0], high), (x.width, word.kernel[1], wide))
        height, wideness = (
            (edge + 2 * padded - word.dilation * (kernel - 1) - 1) // word.stride + 1 for edge, kernel, padded in edges
        )
        if min(height, wideness) < 1:
            smallest = min(self.images.height, self.images.width)
            raise SpecError(f"images of {smallest} pixels are too small for this net")
        return self._value(channels, height, wideness, width, x.count)

    def _value(self, channels: int, height: int, width: int, element_bytes: int, count: int | None = None) -> Value:
        count = self._batch if count is None else count
        return Value(
            Storage(count * channels * height * width * element_bytes), count, channels, height, width, element_bytes
        )

    def _like(self, x: Value) -> Value:
        return self._value(x.channels, x.height, x.width, x.element_bytes, x.count)

    def _as(self, x: Value, element_bytes: int) -> Value:
        """Cast, if it is not of that width."""
        if x.element_bytes == element_bytes:
            return x
        return self._did((x,), self._value(x.channels, x.height, x.width, element_bytes, x.count))
