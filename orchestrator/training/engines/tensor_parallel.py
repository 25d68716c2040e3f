"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): parameters are DTensors, modules compute on plain parts.

A module's forward pass reads this rank's shards as plain tensors, under their usual names. Only the optimizer,
gradient clipping, FSDP2 and the checkpoint see DTensors. Inputs and outputs of a sharded pair of modules (column-wise,
then row-wise) are whole on every rank: one all-reduce in each direction. Between modules that the plan calls "gathered"
a rank has its own tokens only: see sequence_parallel.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.training.checkpoint.fragment import get_local_part
from orchestrator.training.contract.collectives import all_reduce_sum, exchange_with_gradient
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.engines.sequence_parallel import (
    TokenSplit,
    get_own_tokens,
    multiply_column_parallel,
    multiply_row_parallel,
    sum_gradients,
)

# word -> the axis along which a parameter is cut, by the parameter's name in its module; None:
# whole on every rank
CUTS: Mapping[str, Mapping[str, int | None]] = {
    "colwise": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1, "bias": None},
    "embedding": {"weight": 0},
    "head": {"weight": 0},
    "headwise": {"weight": None, "bias": None},
    "tokenwise": {"weight": None, "bias": None},
}
PARTIAL = ("headwise", "tokenwise")  # whose gradients are added up over the ranks
GATHERED = "gathered"
WORDS = (*CUTS, GATHERED)


@frozen
class TensorParallel:
    """The sharding of a module's parameters over the ranks of `mesh`."""

    mesh: DeviceMesh
    axes: Mapping[
        str, int | None
    ]  # by every whole-model name of a parameter, shared ones by all of theirs
    styles: dict[nn.Module, ParallelStyle]  # still to be applied
    partial: frozenset[
        str
    ]  # parameters that a rank applies to its own tokens or heads: their gradients are added up
    tokens: TokenSplit | None  # with sequence parallelism

    def place(self, parameter_name: str, whole_values: Tensor) -> Tensor:
        """Return the rank's shard of a whole parameter, copied, as a DTensor."""
        if parameter_name not in self.axes:  # a ParallelStyle cuts it later
            return whole_values
        axis = self.axes[parameter_name]
        if axis is None:
            return DTensor.from_local(whole_values, self.mesh, (Replicate(),), run_check=False)
        local = whole_values.chunk(self.mesh.size(), dim=axis)[self.mesh.get_local_rank()].clone(
            memory_format=torch.contiguous_format
        )
        return DTensor.from_local(local, self.mesh, (Shard(axis),), run_check=False)

    def finish(self, part: nn.Module) -> None:
        """Apply torch's ParallelStyles to `part`, whose parameters exist, in place."""
        for module in list(part.modules()):
            style = self.styles.pop(module, None)
            if style:
                parallelize_module(module, self.mesh, style, src_data_rank=None)

    def spread_tokens(self, layers: Sequence[nn.Module]) -> None:
        """Make the first of consecutive layers take this rank's tokens only, in place; only under
        sequence parallelism.
        """
        if self.tokens:
            layers[0].register_forward_pre_hook(
                _make_first_argument_hook(get_own_tokens), prepend=True, with_kwargs=True
            )

    def select_partial_gradients(
        self, parameters_by_name: Mapping[str, nn.Parameter]
    ) -> tuple[nn.Parameter, ...]:
        """Return the parameters whose gradients are partial sums on each rank, in the same order on
        every rank.
        """
        return tuple(
            parameters_by_name[name] for name in sorted(self.partial & parameters_by_name.keys())
        )

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of these parameters over the ranks of `mesh`, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        sum_gradients([get_local_part(gradient) for gradient in gradients], self.mesh.get_group())


def shard_recipe(
    recipe: Recipe, mesh: DeviceMesh, micro_batch_size: int, group_tokens_per_sample: int
) -> TensorParallel:
    """Make the recipe's modules compute on their shards, in place; return the sharding of their
    parameters.

    `group_tokens_per_sample` are the tokens of each sample that the group's ranks have together.
    Raises SpecError if the recipe's plan is missing or matches nothing, or the degree does not
    divide a size.
    """
    degree = mesh.size()
    _check_sizes(recipe, degree)
    chosen = _match_plan(recipe)
    tokens = None
    if is_sequence_parallel(recipe):
        tokens = TokenSplit(mesh.get_group(), micro_batch_size, group_tokens_per_sample)
    axes: dict[str, int | None] = {}
    styles: dict[nn.Module, ParallelStyle] = {}
    partial: set[str] = set()
    changed: dict[object, type[nn.Module]] = {}
    layers: set[nn.Module] = set()
    for layer in recipe.layers:
        layers.update(layer.modules())
    gathering = [name for name, word in chosen.items() if word == GATHERED]
    for name, module in recipe.module.named_modules():
        word = chosen.get(name, "")
        if isinstance(word, ParallelStyle):
            # for the module's own parameters; submodules have entries of their own
            styles[module] = word
            continue
        paths = {
            key: f"{name}.{key}".lstrip(".")
            for key, values in module._parameters.items()
            if values is not None
        }
        if word == GATHERED:
            assert tokens
            module.register_forward_pre_hook(
                _make_first_argument_hook(tokens.gather), with_kwargs=True
            )
        elif word and "weight" not in paths:
            raise SpecError(
                f"{word} cuts modules that have a weight",
                path="tensor_parallel",
                got=f"{name}, a {type(module).__name__}",
            )
        is_inside = any(name.startswith(f"{outer}.") for outer in gathering)
        if is_inside:
            _check_inside(name, module, word, paths)
        axes |= {
            path: _find_cut_axis(module, word, path, key, degree) for key, path in paths.items()
        }
        if word in PARTIAL or (tokens and module in layers):
            partial.update(path for path in paths.values() if axes[path] is None)
        if word == "embedding" and getattr(module, "padding_idx", None) is not None:
            module.padding_idx = _find_local_padding_row(module, mesh)
        if paths and word != "head":  # a head takes the DTensor itself
            kind = (type(module), word, tuple(module._parameters), is_inside)
            if kind not in changed:
                changed[kind] = _make_local_class(
                    *kind[:3], mesh, tokens if is_inside or word == "embedding" else None
                )
            module.__class__ = changed[kind]
    _check_shared(recipe.module, axes)
    if tokens:
        _check_ends(chosen)
    return TensorParallel(
        mesh=mesh, axes=axes, styles=styles, partial=frozenset(partial), tokens=tokens
    )


def is_sequence_parallel(recipe: Recipe) -> bool:
    """Return whether tensor-parallel ranks split the tokens between the layers' sharded modules."""
    return GATHERED in recipe.tensor_parallel.values()


def _check_ends(style_by_module: Mapping[str, str | ParallelStyle]) -> None:
    """Raise SpecError if a model with gathered modules does not begin and end with its ranks' own
    tokens.
    """
    for word in ("embedding", "head"):
        if word not in style_by_module.values():
            raise SpecError(
                "own tokens go from embedding to head",
                path="tensor_parallel",
                got=f"gathered, without {word}",
                allowed="gathered beside embedding and head",
            )


def _check_inside(
    name: str, module: nn.Module, style: str, style_by_path: Mapping[str, str]
) -> None:
    """Raise SpecError if a module's parameter gradients would be wrong on gathered tokens.

    There every rank has all tokens, and the ranks' gradients must be partial sums.
    """
    is_cut = style in ("colwise", "rowwise") and isinstance(module, nn.Linear)
    if style_by_path and not is_cut and style != "headwise":
        raise SpecError(
            "a gathered module has a part that is not cut",
            path="tensor_parallel",
            got=f"{name}, a {type(module).__name__}",
            allowed="Linear modules that are colwise or rowwise, and headwise ones",
        )


def _make_first_argument_hook(
    change_hidden: Callable[[Tensor], Tensor],
) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """Return a hook that replaces the first argument of a call, the hidden states, by what
    `change_hidden` returns.
    """

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (change_hidden(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: change_hidden(kwargs[first])}

    return hook


def _check_sizes(recipe: Recipe, degree: int) -> None:
    """Raise SpecError if the model does not support tensor parallelism, or not this degree."""
    path = "plan.layout.tp"
    if not recipe.tensor_parallel:
        raise SpecError(
            "this model has no tensor-parallel plan",
            path=path,
            got=degree,
            allowed="1",
            hint="a factory may return a Recipe with `tensor_parallel`",
        )
    for name, size in recipe.tensor_parallel_sizes.items():
        if size % degree:
            raise SpecError(
                f"tp does not divide {name} = {size}",
                path=path,
                got=degree,
                allowed="a divisor of it",
            )


def _match_plan(recipe: Recipe) -> dict[str, str | ParallelStyle]:
    """Return {module name: entry of the plan's first pattern that matches it}.

    Raises SpecError if a pattern matches nothing.
    """
    names = [name for name, _ in recipe.module.named_modules()]
    for pattern, word in recipe.tensor_parallel.items():
        path = f"tensor_parallel: {pattern}"
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                "no module matches", path=path, got=pattern, allowed=f"names such as {names[-1]}"
            )
        if isinstance(word, str) and word not in WORDS:
            raise SpecError(
                "no such word",
                path=path,
                got=word,
                allowed=f"{', '.join(WORDS)}, or a ParallelStyle",
            )
    return {
        name: next(
            word for pattern, word in recipe.tensor_parallel.items() if fnmatchcase(name, pattern)
        )
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in recipe.tensor_parallel)
    }


def _find_cut_axis(
    module: nn.Module, style: str, module_name: str, parameter_key: str, degree: int
) -> int | None:
    """Return the axis along which the style cuts a parameter; None if the parameter stays whole.

    Raises SpecError if the parameter cannot be cut.
    """
    if style in ("", GATHERED):
        return None
    cuts = {"weight": 1} if style == "colwise" and isinstance(module, nn.Embedding) else CUTS[style]
    if parameter_key not in cuts:
        got = f"{module_name} of a {type(module).__name__}"
        raise SpecError(
            f"{style} does not say how to cut this parameter",
            path="tensor_parallel",
            got=got,
            allowed=f"parameters {', '.join(cuts)}",
        )
    axis = cuts[parameter_key]
    size = 0 if axis is None else module._parameters[parameter_key].shape[axis]  # type: ignore[union-attr]
    if size % degree:
        got = f"{size} in axis {axis} of {module_name}"
        raise SpecError(
            f"tp={degree} does not divide a parameter",
            path="plan.layout.tp",
            got=got,
            allowed="a divisor",
        )
    return axis


def _find_local_padding_row(module: nn.Module, mesh: DeviceMesh) -> int | None:
    """Return the embedding's padding row as a row of this rank's shard; None if another rank has
    it.
    """
    rows = len(module.weight) // mesh.size()  # type: ignore[arg-type]
    rank, row = divmod(int(module.padding_idx), rows)  # type: ignore[arg-type]
    return row if rank == mesh.get_local_rank() else None


def _check_shared(module: nn.Module, axes: Mapping[str, int | None]) -> None:
    """Raise SpecError if a shared parameter would be cut in two ways."""
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(parameter, name)
        if first in axes and name in axes and axes[first] != axes[name]:
            raise SpecError(
                "a shared parameter is cut in two ways",
                path="tensor_parallel",
                got=f"{first} and {name}",
            )


def _make_local_class(
    kind: type[nn.Module],
    style: str,
    parameter_keys: tuple[str, ...],
    mesh: DeviceMesh,
    token_split: TokenSplit | None,
) -> type[nn.Module]:
    """Return a subclass of `kind` whose parameters read as local shards, and that sums partial
    results over ranks.

    With `token_split` its inputs are gathered already, and sums are reduce-scattered; an
    embedding's result is a stand-in (a tensor without memory).
    """
    body: dict[str, Any] = {"__module__": kind.__module__}
    group = mesh.get_group()
    for key in parameter_keys:
        body[key] = property(_make_local_property(key))
    forward: Callable[..., Any] = kind.forward
    if style == "colwise" and token_split is not None:
        body["forward"] = lambda self, x: multiply_column_parallel(x, self.weight, self.bias)
    elif style == "colwise" and not issubclass(kind, nn.Embedding):
        body["forward"] = lambda self, x, *args, **kwargs: forward(
            self, _all_reduce_in_backward(x, group), *args, **kwargs
        )
    if style == "rowwise":
        body["bias"] = None  # added once, after the sum

        def rowwise(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if token_split is not None:
                out = multiply_row_parallel(*args, self.weight, token_split)  # type: ignore[call-arg]
            else:
                out = _all_reduce_in_forward(forward(self, *args, **kwargs), group)
            bias = self._parameters.get("bias")
            return out if bias is None else out + get_local_part(bias)

        body["forward"] = rowwise
    if style == "embedding":
        rank = mesh.get_local_rank()

        def embedding(self: nn.Module, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            rows = self._parameters["weight"].shape[0] // mesh.size()  # type: ignore[union-attr]
            local = ids - rank * rows
            elsewhere = (local < 0) | (local >= rows)
            out = forward(self, local.masked_fill(elsewhere, 0), *args, **kwargs)
            out = out.masked_fill(elsewhere.unsqueeze(-1), 0)
            if token_split is not None:
                return token_split.make_stand_in(token_split.sum_tokens(out))
            return _all_reduce_in_forward(out, group)

        body["forward"] = embedding
    return type(kind.__name__, (kind,), body)


def _make_local_property(key: str) -> Callable[[nn.Module], Tensor | None]:
    """Return a getter that reads a parameter of a module as a plain tensor."""

    def part(module: nn.Module) -> Tensor | None:
        values = module._parameters[key]
        if values is None or (isinstance(values, DTensor) and values.device_mesh.ndim > 1):
            return values  # only FSDP2 reads a shard, and it needs the parameter itself
        return get_local_part(values)

    return part


def _all_reduce_in_forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` summed over the ranks; the backward pass leaves the gradient unchanged (g of
    arXiv:1909.08053, section 3).
    """
    return exchange_with_gradient(x, functools.partial(all_reduce_sum, group=group), _identity)


def _all_reduce_in_backward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `x` unchanged; the backward pass sums the gradient over the ranks (f of
    arXiv:1909.08053, section 3).
    """
    return (
        exchange_with_gradient(x, _identity, functools.partial(all_reduce_sum, group=group))
        if x.requires_grad
        else x
    )


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)
