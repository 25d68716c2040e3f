"""Convolutional nets in torch, built from their descriptions, and what autograd and the dispatcher see of them.

Tensors are fake: they have sizes and no memory.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.memory.foreign.convolutional import BOXES, PAIR_FLOATS
from orchestrator.memory.foreign.convolutional_words import Each, Part, Regions
from orchestrator.training.cuda_autocast import as_on_cuda

ACTIVATIONS = {
    **dict.fromkeys(("relu", "apart"), functional.relu),
    "clip": lambda x: functional.relu6(x, inplace=True),
    "silu": lambda x: functional.silu(x, inplace=True),
    "hswish": lambda x: functional.hardswish(x, inplace=True),
    "hsigmoid": functional.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "drop": lambda x: torch.native_dropout(x, 0.5, True)[0],  # CUDA's kernel
    "mask": lambda x: functional.dropout(x, 0.2, inplace=True),
    "path": lambda x: x * torch.empty(len(x), 1, 1, 1, dtype=x.dtype).bernoulli_(0.8),
    "flat": lambda x: x.flatten(1),
    "dropmap": lambda x: functional.dropout2d(x, 0.1, training=True),
}


class Net:
    """Runs a description; its layers are made as they are met."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList()
        self.losses: list[Tensor] = []
        self._labels: dict[int, Tensor] = {}
        self._maps: dict[int, Tensor] = {}
        self._outputs: list[Tensor] = []  # of heads, which their training holds until there are losses
        self._again: list[nn.Module] = []  # layers that a further map shares
        self._frozen, self._anchors = False, 0

    def loss(self, part: Part, images: Tensor) -> Tensor:
        self._maps[0], self._images = images, len(images)
        self._run(part, images)
        self._maps.clear()
        self._outputs.clear()
        return torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]

    def _run(self, part: Part, x: Tensor) -> Tensor:
        if isinstance(part, str):
            for word in part.split():
                x = self._apply(word, x)
            return x
        if isinstance(part, tuple):
            for each in part:
                x = self._run(each, x)
            return x
        if isinstance(part, Each):
            return self._each(part)
        if isinstance(part, Regions):
            maps = [self._maps[number] for number in part.maps]
            return Pooled.apply(part.count * self._images, part.side, *maps)  # type: ignore[no-any-return]
        if part.how == "frozen":
            self._frozen = True
            x = self._run(part.parts[0], x)
            self._frozen = False
            return x
        found = [self._run(each, x) for each in part.parts]
        if part.how == "gate":
            return found[0] * x
        if part.how == "cat":
            return torch.cat(found, 1)
        found[0] += found[1]
        return found[0]

    def _each(self, each: Each) -> Tensor:
        first, found = len(self.layers), []
        for number in each.maps:
            found.append(self._run(each.part, self._maps[number]))
            self._again = list(self.layers[first:])
        self._again = []
        return torch.cat(found, 1) if found[0].dim() else found[0]

    def _end(self, x: Tensor, name: str) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if name == "ce":
            labels = self._labels.setdefault(
                x.numel() // x.shape[1], torch.zeros(len(x), *x.shape[2:], dtype=torch.int64)
            )
            loss = functional.cross_entropy(x, labels)
        elif name == "end":
            loss = Sampled.apply(x)
        elif name == "focal":
            loss = (Focal.apply(x, torch.zeros(rows, dtype=torch.int64)) * torch.zeros(rows).view(len(x), -1, 1)).sum()
        else:
            targets = torch.zeros_like(x).flatten(0, 1)[(chosen := torch.zeros(rows, dtype=torch.int64))]
            self._outputs += [x, torch.zeros_like(x)]
            x = x.flatten(0, 1)[chosen]
            p = x.sigmoid()
            entropy = functional.binary_cross_entropy_with_logits(x, targets, reduction="none")
            wrong = 1 - (p * targets + (1 - p) * (1 - targets))
            loss = entropy * wrong**2
            loss = ((0.25 * targets + 0.75 * (1 - targets)) * loss).sum()
        self.losses.append(loss)
        return loss

    def _apply(self, word: str, x: Tensor) -> Tensor:
        name, number, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", word).groups()  # type: ignore[union-attr]
        said = {key: [int(one) for one in value.split("x")] for key, value in re.findall(r"([kspgd])([\dx]+)", rest)}
        stride, channels = said.get("s", [1])[0], x.shape[1] if x.dim() else 0
        if name in ("ce", "end", "focal", "focals"):
            return self._end(x, name)
        if name in ("put", "get", "add", "like"):
            return self._mapped(name, int(number), x)
        if name == "up":
            return functional.interpolate(x, scale_factor=int(number))
        if name == "rows":
            self._outputs.append(x)
            return x.unflatten(1, (-1, int(number))).permute(0, 3, 4, 1, 2).reshape(len(x), -1, int(number))
        if name == "take":
            return x[torch.zeros(self._images * int(number), dtype=torch.int64)]
        if name == "anchors":
            self._anchors += int(number) * x.shape[2] * x.shape[3]
            return x
        if name == "assign":
            torch.empty(PAIR_FLOATS, self._anchors, BOXES)
            return x
        if name in ACTIVATIONS:
            return ACTIVATIONS[name](x)  # type: ignore[no-untyped-call, no-any-return]
        if name in ("max", "avg"):
            kind = functional.max_pool2d if name == "max" else functional.avg_pool2d
            return kind(x, int(number), stride, said.get("p", [0])[0])  # type: ignore[no-any-return]
        if name == "pool":
            return functional.adaptive_avg_pool2d(x, int(number))
        if name == "ln":
            norm = self._made(nn.LayerNorm(channels))
            return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
        if name == "fc":
            layer = self._made(nn.Linear(channels, int(number)))
            return layer(x) if x.dim() == 2 else layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
        if name == "bn":
            return self._made(nn.BatchNorm2d(channels))(x)  # type: ignore[no-any-return]
        if name == "fbn":
            return self._made(FrozenNorm(channels))(x)  # type: ignore[no-any-return]
        if name == "deconv":
            return self._made(nn.ConvTranspose2d(channels, int(number), said["k"][0], stride, bias=rest.endswith("b")))(
                x
            )  # type: ignore[no-any-return]
        if name == "scale":
            scale = nn.Parameter(torch.ones(channels, 1, 1))
            self.layers.append(nn.ParameterList([scale]))
            return scale * x
        kernel = said["k"] if name == "conv" else [int(number)]
        dilation = said.get("d", [1])[0]
        return self._made(  # type: ignore[no-any-return]
            nn.Conv2d(
                channels,
                int(number) if name == "conv" else channels,
                tuple(kernel) if len(kernel) > 1 else kernel[0],
                stride,
                tuple(said["p"] * 2)[:2] if "p" in said else tuple(dilation * (each // 2) for each in (kernel * 2)[:2]),
                dilation=dilation,
                groups=said.get("g", [1])[0] if name == "conv" else channels,
                bias=rest.endswith("b"),
            )
        )(x)

    def _mapped(self, name: str, number: int, x: Tensor) -> Tensor:
        if name == "put":
            self._maps[number] = x
            return x
        other = self._maps[number]
        if name == "like":
            return functional.interpolate(x, other.shape[2:], mode="bilinear")
        return other if name == "get" else x + other

    def _made(self, layer: nn.Module) -> Any:
        if self._again:
            return self._again.pop(0)
        self.layers.append(layer.requires_grad_(not self._frozen))
        return layer


class FrozenNorm(nn.Module):
    """A batch norm of buffers alone."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("factor", "summand", "mean", "variance"):
            self.register_buffer(name, torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.factor * self.variance.rsqrt()  # type: ignore[operator]
        return x * scale.view(1, -1, 1, 1) + (self.summand - self.mean * scale).view(1, -1, 1, 1)  # type: ignore[operator]


class Pooled(torch.autograd.Function):
    """Regions of several maps: keeps where they are."""

    @staticmethod
    def forward(context: Any, count: int, side: int, *maps: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(torch.zeros(count, 5))
        context.shapes = [each.shape for each in maps]
        return maps[0].new_zeros(count, maps[0].shape[1], side, side)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, *(gradient.new_zeros(shape) for shape in context.shapes)


class Sampled(torch.autograd.Function):
    """A loss of a few elements."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        context.shape = x.shape
        return x.new_zeros(())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.new_zeros(context.shape)


class Focal(torch.autograd.Function):
    """One kernel, as mmcv has it."""

    @staticmethod
    def forward(context: Any, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(x, labels)
        return torch.zeros_like(x)

    @staticmethod
    def backward(context: Any, _gradient: Tensor) -> Any:  # type: ignore[override]
        return torch.zeros_like(context.saved_tensors[0]), None


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages as they come and go, and the most bytes of them that were live after any operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.events: list[tuple[int, int]] = []  # which storage, and its bytes; none once it is gone
        self._seen: dict[int, int] = {}
        self._count_of_all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return found

    def number_of(self, tensor: Tensor) -> int:
        return self._seen[tensor.untyped_storage()._cdata]

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._seen:
            self._seen[key] = self._count_of_all = self._count_of_all + 1
            self.live_bytes += (size := storage.nbytes())
            self.events.append((self._seen[key], size))
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.events.append((self._seen.pop(key), 0))
        self.live_bytes -= size


def counted(net: Part, batch: int, pixels: tuple[int, int], *, low: bool = False) -> tuple[int, int, int, int]:
    """Trained parameters, bytes of buffers, bytes kept from forward to backward, and the most live beside what is held.

    Held are weights and buffers. `low`: bf16 autocast by CUDA's lists.
    """
    run, kept = Net(), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with arithmetic(low=low), Live() as live:
        images = torch.zeros(batch, 3, *pixels)
        keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)  # type: ignore[no-untyped-call]
        with keeping, torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = run.loss(net, images)
        loss.backward()  # type: ignore[no-untyped-call]
    parameters, buffers = list(run.layers.parameters()), list(run.layers.buffers())
    for tensor in (*parameters, *buffers):
        kept.pop(tensor.untyped_storage()._cdata, None)
    if low:  # the CPU's batch norm keeps its statistics in bf16, CUDA's in fp32 (aten/native/cuda/Normalization.cu)
        norms = (layer for layer in run.layers if isinstance(layer, nn.BatchNorm2d) and layer.weight.requires_grad)
        kept[0] = sum(2 * 2 * norm.num_features for norm in norms)
    held = sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *buffers))
    buffer_bytes = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return trained, buffer_bytes, sum(kept.values()), live.peak_bytes - held


@contextlib.contextmanager
def arithmetic(*, low: bool) -> Iterator[None]:
    if not low:
        with torch.device("meta"):
            yield
        return
    with as_on_cuda(), FakeTensorMode():
        yield


def step_events(net: Part, batch: int, side: int) -> tuple[list[tuple[int, int]], set[int]]:
    """Storages as they come and go in a step, and those of weights and buffers among them; gradients stay."""
    run = Net()
    with arithmetic(low=False), Live() as live:
        run.loss(net, torch.zeros(batch, 3, side, side)).backward()  # type: ignore[no-untyped-call]
        run.losses.clear()
        held = {live.number_of(each) for each in (*run.layers.parameters(), *run.layers.buffers())}
        return list(live.events), held
