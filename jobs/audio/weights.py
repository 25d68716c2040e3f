"""Initial weights from local files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from orchestrator.specs.errors import SpecError


def read_weights(module: nn.Module, path: str | Path) -> None:
    """Fill the module's parameters by name from a .safetensors file, or a folder of them, in place.

    Other tensors of the files are ignored. Raises SpecError if a parameter is missing or has another shape.
    """
    at = Path(path)
    files = sorted(at.glob("*.safetensors")) if at.is_dir() else [at]
    wanted = {
        name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta
    }
    missing = set(wanted)
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in missing & set(stored.keys()):
                values = stored.get_tensor(name)
                if values.shape != wanted[name].shape:
                    got, allowed = tuple(values.shape), tuple(wanted[name].shape)
                    raise SpecError(
                        f"weight {name} has another shape", path="weights", got=got, allowed=allowed
                    )
                with torch.no_grad():
                    wanted[name].copy_(values)
            missing -= set(stored.keys())
    if missing:
        raise SpecError(
            "a weight of the model is not stored", path="weights", got=str(at), allowed=min(missing)
        )
