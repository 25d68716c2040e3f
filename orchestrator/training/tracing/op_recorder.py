"""Records live bytes and the running layer after every operation of a training step.

The tensors may be fake (torch's FakeTensorMode): a storage then has a size but no memory.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from orchestrator.specs.profile import Product
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.tracing.allocator import AllocationLedger
from orchestrator.training.tracing.timeline import Event, ModelPlace, PlaceVisit

aten = torch.ops.aten
prim = torch.ops.prim
NO_LAYER = NO_PLACE = -1
# Modules that DeepSpeed's stage 3 gathers and reduces as one (DEFAULT_LEAF_MODULE_CLASSES in
# deepspeed/runtime/zero/leaf_module_config.py, 0.19.8).
LEAF_MODULES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
MATRICES = "matrices of scores"  # made by attention on a CPU if no fused kernel supports it
# Products of rows with the matrices of their experts. torch's flop_registry (2.13.0) has neither.
# The second is that of
# transformers (integrations/moe.py, 5.23) for dtypes that the first does not support.
GROUPED_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


def _group_norm_backward(
    _grad: Tensor, x: Tensor, _mean: Tensor, _rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> list[Tensor | None]:
    """Return the gradients in the dtypes of their tensors. torch's fake version makes all fp32 if
    the weight is.
    """
    of_each = (x, weight, weight)  # a bias has the type of its weight
    wanted = zip(of_each, sizes[-1], strict=True)
    return [
        torch.empty_like(like) if like is not None and is_asked else None
        for like, is_asked in wanted
    ]


AS_REAL: dict[Any, Callable[..., Any]] = {
    aten.native_group_norm_backward.default: _group_norm_backward
}


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records training steps, each within `step` and `turn`.

    The first step defines the places: the layers, and the code between two of them.
    """

    def __init__(
        self, recipes: Sequence[Recipe], stored_bytes_per_element: Mapping[Tensor, float]
    ) -> None:
        """Make the recorder. `stored_bytes_per_element` is independent of the dtype in which a
        parameter is computed with.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phases: list[PlaceVisit] = []
        self.places: list[ModelPlace] = []
        self.attention = ""  # the attention kernel that ran
        # apart from autocast, nothing ran that CUDA does differently (cuda_autocast.py)
        self.is_alike_on_cuda = True
        self.estimate_buffer_bytes = 0
        self._recipes = recipes
        self._held_bytes = stored_bytes_per_element
        self._layers = [layer for recipe in recipes for layer in recipe.layers]
        self._parameters: list[nn.Parameter] = []
        for recipe in recipes:
            self._parameters += recipe.module.parameters()
        # shared ones once
        self._parameters = [*dict.fromkeys(self._parameters)]
        self._layer_of: dict[nn.Parameter, int] = dict.fromkeys(self._parameters, NO_LAYER)
        for index, layer in enumerate(self._layers):
            self._layer_of |= dict.fromkeys(layer.parameters(), index)
        self._names = {
            part: f"{recipe.name}.{name}" if recipe.name else name
            for recipe in recipes
            for name, part in (*recipe.module.named_modules(), *recipe.module.named_parameters())
        }
        self._place_of: dict[
            tuple[int, int], int
        ] = {}  # (NO_LAYER, layer) or (turn, layers passed before)
        self._layer_at: dict[int, int] = {}  # place -> layer
        self._trained = dict.fromkeys(p for p in self._parameters if p.requires_grad)
        self._looked_up: set[Tensor] = set()
        self._unread = {p for p in self._parameters if self._layer_of[p] == NO_LAYER}
        self._arrived: dict[nn.Parameter, None] = {}  # in the order of their first gradients
        self._home: dict[nn.Parameter, ModelPlace] = {}  # parameter -> its place
        self._in_leaf = {
            parameter: module
            for recipe in recipes
            for module in recipe.module.modules()
            if f"{type(module).__module__}.{type(module).__qualname__}" in LEAF_MODULES
            for parameter in module.parameters()
        }
        self._packed = {
            module.in_proj_weight
            for recipe in recipes
            for module in recipe.module.modules()
            if isinstance(module, nn.MultiheadAttention)
        }
        self._is_first_step = True
        self._is_ahead = False
        self._live_bytes = self._resident_bytes = 0
        self.ledger = AllocationLedger()  # of the latest step
        # With size, number in the ledger, and the place that made it.
        self._storages: dict[int, tuple[weakref.ref[Any], int, int, int]] = {}
        # of the latest step, when its backward pass begins
        self.bytes_by_place: Counter[int] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles here

    @contextlib.contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Open a context for recording a step of `samples` samples: parameters and buffers are
        live, gradients are not.
        """
        self.phases = []
        self.ledger = AllocationLedger()
        self._samples = samples
        self._live_bytes = 0
        self._storages = {}
        for parameter in self._parameters:
            self._count_storage_of(parameter)
        weights = self._live_bytes
        for recipe in self._recipes:
            for buffer in recipe.module.buffers():
                self._count_storage_of(buffer)
        self._resident_bytes = self._live_bytes
        self.estimate_buffer_bytes = self._live_bytes - weights
        self.ledger.begin_step()
        self._held_by = {
            parameter.untyped_storage()._cdata: parameter for parameter in self._parameters
        }
        handles = [
            parameter.register_post_accumulate_grad_hook(self._record_gradient)  # type: ignore[no-untyped-call]
            for parameter in self._trained
        ]
        for recipe in self._recipes:
            handles.append(
                recipe.module.register_forward_pre_hook(self._mark_inside_model, prepend=True)
            )
            handles.append(recipe.module.register_forward_hook(self._mark_outside_model))
        for index, layer in enumerate(self._layers):
            handles.append(
                layer.register_forward_pre_hook(
                    self._make_pre_hook(index), with_kwargs=True, prepend=True
                )
            )
            handles.append(layer.register_forward_hook(self._make_post_hook(index)))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        self._is_first_step = False

    @contextlib.contextmanager
    def turn(self, recipe_number: int) -> Iterator[None]:
        """Open a context for recording forward and backward of this recipe; its gradients are
        dropped at the end.
        """
        self._turn = recipe_number
        self._layers_passed = 0
        self._is_forward = True
        self._is_outside = False
        self._gradients: Counter[int] = Counter()  # layer or NO_LAYER -> elements
        self._come: Counter[int] = Counter()  # id of a place -> elements of its gradients
        self._gradient_bytes = 0
        self._passed_back: dict[int, int] = {}  # layer -> parameters
        self._hooked: Any = WeakIdKeyDictionary()
        self._enter_place(self._get_place_between_layers(), is_backward=False)
        yield
        for parameter in self._parameters:
            parameter.grad = None
        self._gradient_bytes = 0

    def mark_backward_start(self) -> None:
        """Mark the start of the backward pass, after the loss."""
        self._is_forward = False
        self.bytes_by_place = Counter()
        for _, size, _, place in self._storages.values():
            self.bytes_by_place[place] += size
        self._enter_place(self._get_place_between_layers(), is_backward=True)

    def wrap_as_backward(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper of a function that makes gradients in the forward pass; its products
        then count as the backward pass's.
        """

        def called(*args: Any) -> None:
            self._is_ahead = True
            try:
                function(*args)
            finally:
                self._is_ahead = False

        return called

    def list_named_places(self) -> list[ModelPlace]:
        """Return the places (layers and code between) in order of first visit, with their
        parameters and names filled in.
        """
        for parameter in self._parameters:
            if parameter not in self._home:  # nothing reads it
                self._assign_parameter(parameter, 0)
        for arrived in self._arrived:
            home = self._home[arrived]
            home.tensors += (arrived.numel(),)
            if arrived in self._in_leaf:
                home.leaf_until = sum(home.tensors)
        self._add_up_leaf_sizes()
        for parameter in self._trained:
            self._home[parameter].registered += (parameter.numel(),)
        self._arrived.clear()
        self._store_last_parameters()
        for (turn, passed), number in self._place_of.items():
            place = self.places[number]
            if not place.name:
                last = passed == max(layers for number, layers in self._place_of if number == turn)
                if last:
                    word = "loss"
                elif not passed:
                    word = "input"
                else:
                    word = "between layers"
                place.name = ".".join(filter(None, (self._recipes[turn].name, word)))
        return self.places

    def _add_up_leaf_sizes(self) -> None:
        """Add up the parameters of each of DeepSpeed's leaf modules."""
        leaves: Counter[nn.Module] = Counter()
        for parameter in self._parameters:
            if parameter in self._in_leaf:
                home = self._home[parameter]
                leaf = self._in_leaf[parameter]
                leaves[leaf] += parameter.numel()
                home.side_by_side = max(home.side_by_side, leaves[leaf])
                if parameter in self._trained:
                    home.leaf += (parameter.numel(),)

    def _store_last_parameters(self) -> None:
        """Store in the places the size of the last parameter of each layer, and of those outside
        layers.

        FSDP2 reduces each of these groups together.
        """
        for turn, recipe in enumerate(self._recipes):
            last = max(passed for number, passed in self._place_of if number == turn)
            rest = self.places[self._place_of[turn, last]]
            # A shared parameter counts at its first place.
            for parameter in dict.fromkeys(_list_in_fsdp2_order(recipe.module)):
                if parameter in self._trained:
                    is_free = self._layer_of[parameter] == NO_LAYER
                    home = rest if is_free else self._home[parameter]
                    home.last_parameter = parameter.numel()

    @property
    def updated_before_largest(self) -> int:
        """Value of `ModelProfile.updated_before_largest`; each optimizer updates its recipe's parameters in order."""
        sizes = [
            [
                parameter.numel()
                for parameter in recipe.module.parameters()
                if parameter in self._trained
            ]
            for recipe in self._recipes
        ]
        pairs: list[tuple[int, int]] = []
        for counts in sizes:
            pairs.extend(zip((0, *counts), counts, strict=False))
        return max((before + 2 * size for before, size in pairs), default=0) - 2 * max(
            (size for _, size in pairs), default=0
        )

    # ------------------------------------------------------------------------------------------------------ counting

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is prim.device.default:  # the most frequent operation
            return args[0].fake_device
        out = AS_REAL.get(op, op)(*args, **(kwargs or {}))
        if self._is_forward and self._is_first_step and not self._is_ahead:
            self._record_operation(op, args, kwargs or {}, out)
        before = self._live_bytes
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count_storage_of(leaf)
        if self._live_bytes > before:
            self.phases[-1].events.append(self._make_event())
        return out

    def _count_storage_of(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        counted = self._storages.get(key)
        if counted is None:
            place = self.phases[-1].place if self.phases else NO_PLACE
            reference = weakref.ref(storage, lambda _: self._forget(key))
            self._storages[key] = (reference, size, self.ledger.record_allocation(size), place)
            self._live_bytes += size
        elif counted[1] != size:
            self.ledger.record_free(counted[2])
            self._storages[key] = (
                counted[0],
                size,
                self.ledger.record_allocation(size),
                counted[3],
            )
            self._live_bytes += size - counted[1]

    def _forget(self, key: int) -> None:
        _, size, number, _ = self._storages.pop(key)
        self._live_bytes -= size
        self.ledger.record_free(number)

    def _make_event(self) -> Event:
        place = self.phases[-1].place
        total = self._gradients.total()
        gradients = self._gradients[self._layer_at[place]] if place in self._layer_at else 0
        return Event(
            live_bytes=self._live_bytes - self._resident_bytes - self._gradient_bytes,
            gradients=gradients,
            done=total - gradients,
            ends_done=self._gradients[NO_LAYER],
            units_done=sum(self._passed_back.values()),
            outside=self._is_outside,
        )

    def _record_gradient(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._arrived.setdefault(parameter)
        self._gradients[self._layer_of[parameter]] += parameter.numel()
        self._gradient_bytes += parameter.grad.untyped_storage().nbytes()
        home = self._home.get(parameter)
        place = self.places[self.phases[-1].place]
        if home is place and len(self._recipes) == 1:
            self._come[id(home)] += parameter.numel()
            event = self._make_event()
            ready = self._come[id(home)]
            total = event.gradients + event.done
            arrival = event._replace(gradients=ready, done=total - ready, fresh=parameter.numel())
            self.phases[-1].events.append(arrival)

    # -------------------------------------------------------------------------------------------------------- phases

    def _enter_place(self, place: int, *, is_backward: bool) -> None:
        if self.phases and self.phases[-1].turn == self._turn:
            last = self.phases[-1]
            if (last.place, last.backward) == (place, is_backward):
                return
            if last.backward and last.place in self._layer_at:
                self._passed_back[last.place] = self.places[last.place].parameters
            if not last.backward and len(last.events) == 1 and last.place not in self._layer_at:
                self.phases.pop()  # nothing was allocated between two layers
        self.phases.append(PlaceVisit(place, self._turn, is_backward, []))
        self.phases[-1].events.append(self._make_event())

    def _get_place_between_layers(self) -> int:
        """Return the number of the place behind the layers that have run forward in this turn."""
        key = (self._turn, self._layers_passed)
        if key not in self._place_of:
            self._place_of[key] = len(self.places)
            self.places.append(ModelPlace(name="", is_layer=False))
        return self._place_of[key]

    def _place_of_layer(self, layer_index: int) -> int:
        key = (NO_LAYER, layer_index)
        if key not in self._place_of:
            place = self._place_of[key] = len(self.places)
            self._layer_at[place] = layer_index
            self.places.append(
                ModelPlace(name=self._names[self._layers[layer_index]], is_layer=True)
            )
            for parameter in self._parameters:
                if self._layer_of[parameter] == layer_index:
                    self._assign_parameter(parameter, place)
        return self._place_of[key]

    def _make_pre_hook(self, layer_index: int) -> Callable[..., None]:
        def enters(_place_of_layer: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_forward:
                between = self._get_place_between_layers()
                if len(self.phases[-1].events) > 1:
                    self._record_backward_at_gradient((args, kwargs), between)
                self._enter_place(self._place_of_layer(layer_index), is_backward=False)

        return enters

    def _make_post_hook(self, layer_index: int) -> Callable[..., None]:
        def leaves(_place_of_layer: nn.Module, _args: Any, out: Any) -> None:
            if self._is_forward:
                self._record_backward_at_gradient(out, self._place_of_layer(layer_index))
                self._layers_passed += 1
                self._enter_place(self._get_place_between_layers(), is_backward=False)

        return leaves

    def _mark_inside_model(self, *_: Any) -> None:
        """Record that the model runs: a hook for its call, and for the arrival of the gradient of
        its output.
        """
        self._is_outside = False

    def _mark_outside_model(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self._is_outside = True
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._mark_inside_model)  # type: ignore[no-untyped-call]

    def _record_backward_at_gradient(self, output: Any, place: int) -> None:
        """Install a hook that records the start of a module's backward pass once the gradient of
        its output is complete.

        `output` is the module's output, and `place` the module's number in the recording.
        """
        for tensor in tree_leaves(output):
            if (
                isinstance(tensor, Tensor)
                and tensor.grad_fn is not None
                and tensor not in self._hooked
            ):
                self._hooked[tensor] = True
                tensor.register_hook(lambda _: self._enter_place(place, is_backward=True))  # type: ignore[no-untyped-call]

    # -------------------------------------------------------------------------------------------------------- places

    def _record_operation(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the parameters that an operation reads, and its FLOPs."""
        place = self.places[self.phases[-1].place]

        def parameter_of(leaf: Any) -> nn.Parameter | None:
            return (
                self._held_by.get(leaf.untyped_storage()._cdata)
                if isinstance(leaf, Tensor)
                else None
            )

        for leaf in tree_leaves((args, kwargs)):
            parameter = parameter_of(leaf)
            if parameter is not None and parameter in self._unread:
                self._assign_parameter(parameter, self._get_place_between_layers())
        packet = op._overloadpacket
        table = parameter_of(args[0]) if packet is aten.embedding else None
        if table is not None and table in self._trained.keys() - self._looked_up:
            self._looked_up.add(table)
            self._home[table].looked_up += table.numel()
        if packet is aten.transpose and args[0].dim() > 2 and parameter_of(args[0]) is not None:
            place.viewed += args[0].numel()  # expert tensors: their product saves the view
            place.side_by_side = max(place.side_by_side, place.viewed)
        self._count_products(op, args, kwargs, out)

    def _count_products(self, op: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operation's FLOPs and matrix products, and record which attention kernel runs,
        and dropout.
        """
        place = self.places[self.phases[-1].place]
        samples = self._samples
        packet = op._overloadpacket
        if packet in (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_efficient_attention,
        ):
            is_flash = packet is aten._scaled_dot_product_flash_attention_for_cpu
            arguments = (
                dict(zip([argument.name for argument in op._schema.arguments], args, strict=False))
                | kwargs
            )
            batch, heads, rows, width = arguments[
                "query"
            ].shape  # torch 2.11's sdpa_flop_count knows no shared keys
            flops = (
                2
                * batch
                * heads
                * rows
                * arguments["key"].shape[2]
                * (width + arguments["value"].shape[3])
            )
            place.flops += (flops / 2 if arguments.get("is_causal") else flops) / samples
            self.attention = (
                "flash" if is_flash and arguments.get("attn_mask") is None else "memory-efficient"
            )
        elif op.name() in GROUPED_PRODUCTS:
            rows, inner = args[0].shape
            columns = args[1].shape[-1]
            place.flops += 2 * rows * inner * columns / samples
            place.matmuls += ((-(-rows // samples), inner, columns),)
        elif packet in flop_registry:
            place.flops += flop_registry[packet](*args, **kwargs, out_val=out) / samples
            products = _list_matrix_products(packet, args, out)
            place.matmuls += tuple(
                (-(-rows // samples), inner, columns) for rows, inner, columns in products
            )
        elif packet is aten._safe_softmax:
            self.attention = MATRICES
            self.is_alike_on_cuda = False
        elif packet is aten.bernoulli_:  # dropout of any kind
            self.is_alike_on_cuda = False
        elif packet is aten._softmax and out.dim() == 4:
            self.attention = self.attention or "eager"

    def _assign_parameter(self, parameter: nn.Parameter, place_index: int) -> None:
        """Record that the place with this index owns the parameter."""
        place = self.places[place_index]
        count = parameter.numel()
        self._home[parameter] = place
        self._unread.discard(parameter)
        if not place.is_layer and count > place.largest_parameter:
            place.name = self._names[parameter].rpartition(".")[0]
        place.parameters += count
        place.largest_parameter = max(place.largest_parameter, count)
        if parameter in self._packed:
            # ZeRO-3 passes its inputs one by one: torch does not see one tensor
            place.viewed += count
        if parameter in self._trained:
            place.trained += count
            place.factored += _compute_factored_elements(parameter.shape)
        else:
            place.frozen_bytes += round(count * self._held_bytes[parameter])


def _list_in_fsdp2_order(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters in FSDP2's order (`_get_managed_modules` in
    torch/distributed/fsdp/_fully_shard/_fsdp_init.py).
    """
    for part in module.children():
        yield from _list_in_fsdp2_order(part)
    yield from module.parameters(recurse=False)


def _list_matrix_products(packet: Any, args: Any, out: Tensor) -> tuple[Product, ...]:
    """Return an operation as matrix products (rows, inner, columns); () for products of activations
    only.

    A convolution is the product of patches and filters (Chetlur et al. 2014, arXiv:1410.0759,
    section 3). A transposed convolution is the product of inputs and filters, whose results are
    summed.
    """
    if packet in (aten.mm, aten.addmm):
        left, right = args[-2:]
        return ((left.shape[0], left.shape[1], right.shape[1]),)
    if packet is aten.convolution:
        x = args[0]
        weight = args[1]
        transposed = args[6]
        output = x if transposed else out
        rows = output.shape[0] * math.prod(output.shape[2:])
        patch = math.prod(weight.shape[1:])
        return ((rows, weight.shape[0], patch) if transposed else (rows, patch, weight.shape[0]),)
    return ()


def _compute_factored_elements(shape: Sequence[int]) -> int:
    """Elements of Adafactor's second moments: one row and one column per matrix (torch/optim/_adafactor.py)."""
    count = math.prod(shape)
    return count // shape[-1] + count // shape[-2] if len(shape) > 1 else count
