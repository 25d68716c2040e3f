"""Convolutional classifiers in torch, built from their descriptions, and what autograd and the dispatcher see of them.

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

from orchestrator.memory.foreign.convolutional import Part
from orchestrator.training.cuda_autocast import as_on_cuda

ACTIVATIONS = {
    "relu": functional.relu,
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
}


class Classifier:
    """Runs a description; its layers are made as they are met."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList()
        self.losses: list[Tensor] = []

    def loss(self, part: Part, images: Tensor, labels: Tensor) -> Tensor:
        self._labels = labels
        self._end(self._run(part, images))
        return torch.stack(self.losses).sum() if len(self.losses) > 1 else self.losses[0]

    def _end(self, logits: Tensor) -> None:
        self.losses.append(functional.cross_entropy(logits, self._labels))

    def _run(self, part: Part, x: Tensor) -> Tensor:
        if isinstance(part, str):
            for word in part.split():
                x = self._apply(word, x)
            return x
        if isinstance(part, tuple):
            for each in part:
                x = self._run(each, x)
            return x
        if part.how == "aside":
            self._end(self._run(part.parts[0], x))
            return x
        found = [self._run(each, x) for each in part.parts]
        if part.how == "gate":
            return found[0] * x
        if part.how == "cat":
            return torch.cat(found, 1)
        found[0] += found[1]
        return found[0]

    def _apply(self, word: str, x: Tensor) -> Tensor:
        name, number, rest = re.fullmatch(r"([a-z]+)(\d*)(.*)", word).groups()  # type: ignore[union-attr]
        said = {key: [int(one) for one in value.split("x")] for key, value in re.findall(r"([kspg])([\dx]+)", rest)}
        stride, channels = said.get("s", [1])[0], x.shape[1]
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
        if name == "scale":
            scale = nn.Parameter(torch.ones(channels, 1, 1))
            self.layers.append(nn.ParameterList([scale]))
            return scale * x
        kernel = said["k"] if name == "conv" else [int(number)]
        return self._made(  # type: ignore[no-any-return]
            nn.Conv2d(
                channels,
                int(number) if name == "conv" else channels,
                tuple(kernel) if len(kernel) > 1 else kernel[0],
                stride,
                tuple(said["p"] * 2)[:2] if "p" in said else tuple(each // 2 for each in (kernel * 2)[:2]),
                groups=said.get("g", [1])[0] if name == "conv" else channels,
                bias=rest.endswith("b"),
            )
        )(x)

    def _made(self, layer: nn.Module) -> Any:
        self.layers.append(layer)
        return layer


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


def counted(net: Part, batch: int, side: int, *, low: bool = False) -> tuple[int, int, int, int]:
    """Parameters, bytes of buffers, bytes kept from forward to backward, and the most live beside weights and buffers.

    `low`: bf16 autocast by CUDA's lists.
    """
    classifier, kept = Classifier(), {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with arithmetic(low=low), Live() as live:
        images, labels = torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.int64)
        keeping = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)  # type: ignore[no-untyped-call]
        with keeping, torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = classifier.loss(net, images, labels)
        loss.backward()  # type: ignore[no-untyped-call]
    parameters, buffers = list(classifier.layers.parameters()), list(classifier.layers.buffers())
    for tensor in (*parameters, *buffers):
        kept.pop(tensor.untyped_storage()._cdata, None)
    if low:  # the CPU's batch norm keeps its statistics in bf16, CUDA's in fp32 (aten/native/cuda/Normalization.cu)
        norms = (layer for layer in classifier.layers if isinstance(layer, nn.BatchNorm2d))
        kept[0] = sum(2 * 2 * norm.num_features for norm in norms)
    held = sum(tensor.untyped_storage().nbytes() for tensor in (*parameters, *buffers))
    buffer_bytes = sum(buffer.untyped_storage().nbytes() for buffer in buffers)
    return sum(each.numel() for each in parameters), buffer_bytes, sum(kept.values()), live.peak_bytes - held


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
    classifier = Classifier()
    with arithmetic(low=False), Live() as live:
        classifier.loss(net, torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
        classifier.losses.clear()
        held = {live.number_of(each) for each in (*classifier.layers.parameters(), *classifier.layers.buffers())}
        return list(live.events), held
