"""Weights of a transformers model: safetensors read by name, or random values by seed and name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from orchestrator.specs.errors import SpecError
from orchestrator.specs.group_values import group_values
from orchestrator.training.contract.recipe import make_seeded_generator

# An uninitialised tensor with at least this many elements becomes a parameter: no buffer is that
# large.
PARAMETER_ELEMENTS = 2**28


Operation = tuple[Any, tuple[Any, ...]]  # that fills a tensor, and its further arguments
Weights = Callable[[str], Tensor]  # reads a tensor by name


class InitialisationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how a library initialises parameters on the meta device, to replay it later by name.

    So a model has its family's initialisation although no process ever holds all of it. The largest
    parameters are created on the meta device: the experts of one layer can exceed host memory.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._filled: dict[int, Operation] = {}
        self._seen: list[Tensor] = []  # kept alive, so that no id is reused

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.empty.memory_format and math.prod(args[0]) >= PARAMETER_ELEMENTS:
            kwargs = {**(kwargs or {}), "device": "meta"}
        out = op(*args, **(kwargs or {}))
        target = args[0] if args else None
        if (
            isinstance(target, Tensor)
            and target.is_meta
            and op._schema.is_mutable
            and not target._is_view()
        ):
            self._filled[id(target)] = (op, tuple(args[1:]))
            self._seen.append(target)
        return out

    def record_copy(self, source: Tensor, target: Tensor) -> None:
        """Record that `target` is initialised by the same operation as `source`."""
        if id(source) in self._filled:
            self._filled[id(target)] = self._filled[id(source)]
            self._seen.append(target)

    def list_operations_by_name(self, module: nn.Module) -> dict[str, Operation]:
        """Return {parameter name: the last operation that filled it}; copies of values that do not
        exist are left out.
        """
        filled = {
            name: self._filled.get(id(parameter)) for name, parameter in module.named_parameters()
        }
        return {
            name: operation
            for name, operation in filled.items()
            if operation is not None
            and not any(isinstance(argument, Tensor) for argument in operation[1])
        }


def replay_initialisation(values: Tensor, operation: Operation, *, seed: int, name: str) -> None:
    """Replay a recorded operation on `values`, with random numbers that depend on (seed, name) on every device."""
    op, arguments = operation
    drawn = any(argument.name == "generator" for argument in op._schema.arguments)
    host = torch.empty(values.shape)
    op(host, *arguments, **({"generator": make_seeded_generator(seed, name)} if drawn else {}))
    values.copy_(host)


@contextmanager
def recording_initialisation(recorder: InitialisationRecorder) -> Iterator[None]:
    """Open a context that makes parameters on the meta device and records their initialisation;
    buffers are real.
    """
    with init_empty_weights(include_buffers=False), recorder:
        yield


def make_weight_reader(folder_or_hub_name: str, model: PreTrainedModel) -> Weights:
    """Return a function that reads a parameter or buffer of `model` by name from a folder or hub
    name.

    Safetensors are read one tensor at a time. If there are none, or their names are not the
    model's, the model is loaded whole into host memory (some families convert their files on
    loading). Raises SpecError if weights are missing.
    """
    files = _list_files_by_name(folder_or_hub_name)
    for name, tied_to in list(model.all_tied_weights_keys.items()):
        keys = [
            _find_stored_parameter_name([tied], files, model.base_model_prefix)
            for tied in (name, tied_to)
        ]
        if None not in keys and not torch.equal(*(_read_tensor(files, str(key)) for key in keys)):
            untie_parameter(model, name)  # as from_pretrained does
    places = _map_stored_names(model, files)
    if places is None:
        return _make_whole_model_reader(folder_or_hub_name, model)
    wanted = places

    return lambda name: _read_tensor(files, wanted[name])


def _read_tensor(file_by_key: Mapping[str, str], key: str) -> Tensor:
    with safe_open(file_by_key[key], framework="pt") as file:
        return file.get_tensor(key)


def untie_parameter(model: PreTrainedModel, name: str) -> tuple[Tensor, Tensor]:
    """Give the named parameter its own tensor; return (the tensor that it shared, the new one)."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    shared = model.get_parameter(name)
    parameter = torch.nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
    owner.register_parameter(leaf, parameter)
    model.all_tied_weights_keys.pop(name, None)
    return shared, parameter


def _list_files_by_name(folder_or_hub_name: str) -> dict[str, str]:
    """Return {tensor name: its safetensors file}; {} if there are none."""
    index = find_file(folder_or_hub_name, SAFE_WEIGHTS_INDEX_NAME)
    if index is not None:
        names: Mapping[str, str] = json.loads(Path(index).read_text())["weight_map"]
        files = {file: find_file(folder_or_hub_name, file) for file in set(names.values())}
        missing = sorted(file for file, path in files.items() if path is None)
        if missing:
            raise SpecError(
                "a file of weights is missing",
                path="model.hf",
                got=folder_or_hub_name,
                allowed=missing[0],
            )
        return {name: str(files[file]) for name, file in names.items()}
    single = find_file(folder_or_hub_name, SAFE_WEIGHTS_NAME)
    if single is None:
        return {}
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def find_file(folder_or_hub_name: str, file_name: str) -> str | None:
    """Return the local path of a file in a folder or of a hub name; None if there is no such file."""
    return cached_file(
        folder_or_hub_name,
        file_name,
        local_files_only=Path(folder_or_hub_name).is_dir(),
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )


def _map_stored_names(
    model: PreTrainedModel, file_by_key: Mapping[str, str]
) -> dict[str, str] | None:
    """Return {name of a parameter or stored buffer: its name in the files}; None if a parameter has
    none.
    """
    aliases = group_values(
        (id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    places: dict[str, str] = {}
    for names in aliases.values():
        stored = _find_stored_parameter_name(names, file_by_key, model.base_model_prefix)
        if stored is None:
            return None
        places |= dict.fromkeys(names, stored)
    for name, _ in model.named_buffers():
        stored = _find_stored_parameter_name([name], file_by_key, model.base_model_prefix)
        if stored is not None:
            places[name] = stored
    return places


def _find_stored_parameter_name(
    parameter_names: Sequence[str], file_by_key: Mapping[str, str], prefix: str
) -> str | None:
    """Return the first of these names that the files have, with or without the base model's prefix;
    None if they have none.
    """
    spellings = (
        spelling
        for name in parameter_names
        for spelling in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
    )
    return next((spelling for spelling in spellings if spelling in file_by_key), None)


def _make_whole_model_reader(folder_or_hub_name: str, model: PreTrainedModel) -> Weights:
    family: Any = type(model)
    try:
        loaded, report = family.from_pretrained(
            folder_or_hub_name,
            dtype=torch.float32,
            local_files_only=Path(folder_or_hub_name).is_dir(),
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"the weights cannot be loaded: {error}", path="model.hf", got=folder_or_hub_name
        ) from None
    for name in model.all_tied_weights_keys.keys() - loaded.all_tied_weights_keys.keys():
        untie_parameter(model, name)
    missing = sorted(report["missing_keys"])
    if missing:
        raise SpecError(
            "weights of the model are missing",
            path="model.hf",
            got=folder_or_hub_name,
            allowed=missing[0],
        )
    return {
        **dict(loaded.named_parameters(remove_duplicate=False)),
        **dict(loaded.named_buffers()),
    }.__getitem__
