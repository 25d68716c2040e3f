"""Samples as named tensors in safetensors files, for any model head of transformers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator.specs.errors import SpecError


class TensorFiles:
    """Samples along axis 0 of the tensors of all files, in order; every file has the same names and shapes."""

    def __init__(self, files: Sequence[str]) -> None:
        """Open the files. Raises SpecError where one cannot be read, or its tensors differ in axis
        0 or from the first file's.
        """
        self._files = [_open_tensor_file(name) for name in files]
        self.names = tuple(sorted(self._files[0].keys()))
        counts = []
        for name, file in zip(files, self._files, strict=True):
            sizes = {file.get_slice(key).get_shape()[0] for key in file.keys()}  # noqa: SIM118  # no dict
            if tuple(sorted(file.keys())) != self.names or len(sizes) != 1:
                raise SpecError(
                    "files differ in tensors or samples",
                    source=name,
                    path="data.tensors",
                    got=f"tensors {sorted(file.keys())} of {sorted(sizes)} samples",
                )
            counts.append(sizes.pop())
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def token_count(self, _index: int) -> int:
        return 1

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the samples as one tensor per name in `names`."""
        return tuple(
            torch.stack([self._read_sample(name, index) for index in indices])
            for name in self.names
        )

    def _read_sample(self, tensor_name: str, sample_index: int) -> Tensor:
        number = bisect_right(self._ends, sample_index)
        row: Tensor = self._files[number].get_slice(tensor_name)[
            sample_index - (self._ends[number - 1] if number else 0)
        ]
        return row


def _open_tensor_file(file_path: str) -> Any:
    try:
        return safe_open(file_path, framework="pt").__enter__()  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise SpecError(
            f"no safetensors file: {error}", source=file_path, path="data.tensors"
        ) from None
