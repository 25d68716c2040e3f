"""Values of fake tensors, for code that reads them: lengths, masks, indices, routes.

Integers and booleans are computed beside the fake tensors, on their real sources: batches, buffers and constants. Where
they come from activations (a router's choice, a threshold), these are random numbers of the same shape. An operator
that has no fake form is run once on such numbers. So sizes that depend on values are those of a small real run, while
weights and activations have no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

ELEMENTS_MAX = 2**24  # of a tensor whose values are computed
READS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class FakeTensorValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode, inside a FakeTensorMode, that answers operators which read values."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._values: Any = WeakIdKeyDictionary()
        self._random = torch.Generator().manual_seed(0)

    def note(self, fake_tensor: Tensor, real_tensor: Tensor) -> None:
        """Attach a copy of a real tensor's values to a fake tensor."""
        if not real_tensor.is_floating_point() and not real_tensor.is_meta:
            with _disable_current_modes():
                self._values[fake_tensor] = real_tensor.detach().clone()

    @contextlib.contextmanager
    def allowing_array_reads(self) -> Iterator[None]:
        """Open a context in which fake tensors can also be converted to arrays."""
        with (
            patch.object(
                FakeTensor,
                "numpy",
                lambda tensor, **_: self._get_real_values(tensor).numpy(),
                create=True,
            ),
            self,
        ):
            yield

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = op(*args, **kwargs)
        except READS:
            return self._as_fake(self._run_or_defer(op, args, kwargs))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        integral = [
            leaf for leaf in made if not leaf.is_floating_point() and leaf.numel() <= ELEMENTS_MAX
        ]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        writes = op._schema.is_mutable and args and isinstance(args[0], Tensor)
        if (
            integral
            and (len(integral) == len(made) or any(self._has_values(leaf) for leaf in inputs))
        ) or (writes and self._has_values(args[0])):
            real = self._run_or_defer(op, args, kwargs)
            for leaf, values in zip(tree_leaves(out), tree_leaves(real), strict=True):
                if (
                    isinstance(leaf, Tensor)
                    and isinstance(leaf, FakeTensor)
                    and not leaf.is_floating_point()
                ):
                    self._values[leaf] = values
        elif integral:  # chosen by activations
            for leaf in integral:
                self._values[leaf] = _DeferredValue(
                    op, tree_map(_describe, args), tree_map(_describe, kwargs), _index_of(out, leaf)
                )
        return out

    def _has_values(self, tensor: Tensor) -> bool:
        return tensor in self._values or not isinstance(tensor, FakeTensor)

    def _run_or_defer(self, op: Any, args: Any, kwargs: Any) -> Any:
        args = tree_map(self._get_real_values, args)
        kwargs = tree_map(self._get_real_values, kwargs)
        with _disable_current_modes():
            return op(*args, **kwargs)

    def _get_real_values(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, (Tensor, _TensorShape)):
            return value
        if isinstance(value, Tensor):
            values = self._find_attached_values(value)
            if values is not None:
                return values
        return self._make_up_values(value)

    def _find_attached_values(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor's values, computed now if an operator was deferred; None where there
        are none.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor
        noted = self._values.get(tensor)
        if isinstance(noted, _DeferredValue):
            out = self._run_or_defer(noted.op, noted.args, noted.kwargs)
            self._values[tensor] = noted = tree_leaves(out)[noted.place]
        return noted if isinstance(noted, Tensor) else tensor.constant

    def _make_up_values(self, value: Any) -> Tensor:
        """Return made-up values of the given tensor's shape and dtype. Raises ValueError where they
        would take too much memory.
        """
        if value.numel() > ELEMENTS_MAX:
            raise ValueError(f"the values of {tuple(value.shape)} are read")
        with _disable_current_modes():
            if (
                value.numel() == 1 and value.dtype.is_floating_point
            ):  # such as a draw that may drop a layer
                return torch.full(value.shape, 0.5, dtype=value.dtype)
            if not value.dtype.is_floating_point:
                return torch.zeros(value.shape, dtype=value.dtype)
            return torch.randn(value.shape, generator=self._random).to(value.dtype)

    def _as_fake(self, real: Any) -> Any:
        def made(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            fake = self._fake.from_tensor(value)
            self.note(fake, value)
            return fake

        return tree_map(made, real)


class _TensorShape:
    """The shape of a tensor, without its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def numel(self) -> int:
        return self.shape.numel()


class _DeferredValue(NamedTuple):
    """An operator that runs when its values are read, and which of its results is wanted."""

    op: Any
    args: Any
    kwargs: Any
    place: int


def _describe(value: Any) -> Any:
    return _TensorShape(value) if isinstance(value, Tensor) else value


def _index_of(out: Any, leaf: Tensor) -> int:
    return next(index for index, other in enumerate(tree_leaves(out)) if other is leaf)
