"""`Linear`: the layer whose three matrix products take quantized operands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qshard._core.validation import quote
from qshard.formats import FLOATS, Usage
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe, check_weight_format, check_weight_shape
from qshard.torch_bridge._delayed_scaling import DelayedScale, keep_amaxes
from qshard.torch_bridge._distributed.activation_group import ActivationGroup
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, first_rank
from qshard.torch_bridge._fsdp.functional import is_converted, warn_of_late_quantization
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.weight import ShardedWeight, attributes_of, plain, wrap
from qshard.torch_bridge._module_tree import modules_of, parameters_of
from qshard.torch_bridge._nn.class_swap import Extends
from qshard.torch_bridge._nn.functional import WeightLayout, linear
from qshard.torch_bridge._nn.operands import ROLES
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import is_compiling, may_skip_dispatcher
from qshard.torch_bridge._quantized.device_moves import Move, changes
from qshard.torch_bridge._quantized.scaling_state import loaded_if_there
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor
from qshard.torch_bridge._torch_internals import hooks_of, put_hooks


def _take_seed(seed: Tensor, rank: int) -> Tensor:
    """What `seed` is, for this rank; `seed` becomes the next one."""
    return _seed_taken(seed, rank) if may_skip_dispatcher((seed,)) else _take_seed_op(seed, rank)


def _seed_taken(seed: Tensor, rank: int) -> Tensor:
    taken = seed.clone()
    if rank:
        taken[1].add_(rank)
    seed[0].add_(1)
    return taken


# One op, since compilers of torch 2.13 move a copy that only the backward pass needs into it, where it reads the next
# seed.
_take_seed_op = torch.library.custom_op("qshard::take_seed", _seed_taken, mutates_args=("seed",))


@_take_seed_op.register_fake
def _(seed: Tensor, rank: int) -> Tensor:
    return torch.empty_like(seed)


def wrap_weight(
    weight: Tensor, recipe: Recipe, name: str, root: nn.Module | None, primary: bool = False
) -> nn.Parameter:
    """A weight with the hooks by which FSDP2 gathers it as codes; the same memory."""
    state = ScaleState(recipe, name, root, weight.device, primary)
    state.shape = tuple(weight.shape)
    # A tensor of its own also where nothing requires a gradient: `replace_parameter` makes another of the weight.
    return nn.Parameter(ShardedWeight(plain(weight).detach(), state), requires_grad=weight.requires_grad)


def replace_parameter(weight: nn.Parameter, made: nn.Parameter) -> None:
    """Makes `weight` what `made` is. It stays the object that optimizers hold, with its gradient, hooks and attributes.

    `made` is of no use afterwards.
    """
    made.grad = weight.grad
    put_hooks(made, *hooks_of(weight))
    made.__dict__.update(attributes_of(weight))
    torch.utils.swap_tensors(weight, made)


def _move_of_codes(move: Move) -> Move:
    """A move that keeps codes. Without it another dtype raises, and `to_empty` replaces them by a float tensor."""

    def move_codes(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, QuantizedTensor) or not changes(move, tensor):
            return move(tensor)
        target = move(torch.empty(1, dtype=tensor.dtype, device=tensor.device))
        return tensor.move_to(target.device, target.dtype)

    return move_codes


def check_not_sealed(module: nn.Module, move: Move) -> None:
    """Raises if a move would change a sealed primary weight: its master would stay."""
    for each in modules_of(module):
        if isinstance(each, FSDPModule):
            each.reshard()  # As it does itself to move: its parameters may be what is gathered.
    for parameter in parameters_of(module):
        state: ScaleState | None = getattr(local_of(parameter), "scale_state", None)
        if state is not None and state.is_sealed and changes(move, parameter):
            raise NotImplementedError(
                f"Linear: {state.name} (primary) has a master in its optimizer, which would not move; move the model "
                "before its first forward and before making the optimizer"
            )


def _rank_of(weight: Tensor) -> int:
    """What to add to a seed: ranks that have parts of one tensor share a seed."""
    if isinstance(weight, DTensor):
        return first_rank(weight.device_mesh)
    return dist.get_rank() if dist.is_initialized() else 0


class LinearOperands(NamedTuple):
    """What a call of a layer multiplies, as `linear` takes it; `dtype`: in which, under autocast."""

    input: Tensor
    weight: Tensor
    seed: Tensor | None
    delayed: dict[Role, DelayedScale] | None
    dtype: torch.dtype | None


class WeightLayer(Extends):
    """A layer with one quantized weight: its recipe, seed and state of scaling, in checkpoints, copies and pickles.

    Attributes:
      recipe: the format of each role.
      weight_layout: how the weight lies, as for `linear`.
      seed, delayed, scatter_dim, overlap, activation_group: as of `Linear`.
    """

    recipe: Recipe
    weight: Any
    bias: Any
    weight_layout: ClassVar[WeightLayout] = "NK"
    seed: Tensor | None
    delayed: nn.ModuleDict
    scatter_dim: int | None = None
    overlap: bool = False
    activation_group: ActivationGroup | None = None
    is_one_layer = True
    scaling_buffers = ("seed",)

    def begin(self, recipe: Recipe, weight: nn.Parameter) -> None:
        """Takes a recipe, and a weight that is wrapped for it."""
        self.recipe, self.weight = recipe, weight
        state = self._state()
        assert state is not None
        self._modules.pop("delayed", None)
        if recipe.stateful:
            own = {role.value: DelayedScale(recipe, role, weight.device) for role in Role if role is not Role.WEIGHT}
            assert state.delayed is not None
            self.delayed = nn.ModuleDict({Role.WEIGHT.value: state.delayed, **own})
        seed = torch.empty(2, dtype=torch.int32, device=weight.device) if recipe.stochastic else None
        self.register_buffer("seed", seed, persistent=False)  # `scaling_state` has it.
        self._reset_state()

    def _reset_state(self) -> None:
        seed: Tensor | None = self._buffers.get("seed")
        if seed is not None:
            seed.random_(-(2**31), 2**31)
        for module in self.children():
            for state in module.children():
                cast(DelayedScale, state).reset()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Where tensor parallelism puts the cut weight in the place of the whole one.

        Some cuts copy, and what DTensor copies is plain: it becomes a sharded weight again. Whether a layer can be cut
        so is seen when it runs: weights that are gathered before may be cut anywhere.
        """
        old: Any = self._parameters.get("weight")
        new: Any = param
        if name == "weight" and isinstance(new, DTensor) and isinstance(old, ShardedWeight):
            state, part = old.scale_state, ShardSpec(tuple(new.shape), new.device_mesh, new.placements)
            state.part = part
            if not isinstance(local_of(new), ShardedWeight):
                param = nn.Parameter(wrap(new, state), requires_grad=new.requires_grad)
        super().register_parameter(name, param)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules in here, but none while `parallelize_module` walks, which would cut states as it cuts weights.

        It cuts each module that it comes by before it asks for the next, and makes DTensors of all buffers.
        """
        was_cut = isinstance(self._parameters.get("weight"), DTensor)
        modules = super().named_modules(memo, prefix, remove_duplicate)
        for name, module in modules:
            yield name, module
            if module is self and not was_cut and isinstance(self.weight, DTensor):
                if self.seed is not None:
                    self.seed = local_of(self.seed)
                return

    def _state(self) -> ScaleState | None:
        local = local_of(self.weight)
        return local.scale_state if isinstance(local, ShardedWeight) else None

    def __getstate__(self) -> dict[str, Any]:
        """A sharded weight is pickled as a plain parameter, with the name and the kind that `__setstate__` restores."""
        state = self._state()
        name, primary = (None, False) if state is None else (state.name, state.primary is not None)
        return {**super().__getstate__(), "_weight_name": name, "_weight_primary": primary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        name, primary = given.pop("_weight_name", None), given.pop("_weight_primary", False)  # Older files lack it.
        super().__setstate__(given)
        if name is not None and type(self.weight) is nn.Parameter:  # Not so in a copy, nor if layers share it.
            replace_parameter(self.weight, self._wrap(self.weight, name, primary))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A checkpoint holds plain tensors: it loads without qshard, and under any other recipe."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + "weight"
        if not keep_vars and key in destination:  # It is not where the weight is computed, as if it is parametrized.
            value = destination[key] = plain(destination[key])
            state = self._state()
            if state is not None and state.primary is not None:
                state.primary.show(value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any) -> None:
        """The state of scaling is in no state dict, but in those of old files: that of another recipe is left out."""
        state, key, seed = self._state(), prefix + "weight", prefix + "seed"
        assign, was_meta = metadata.get("assign_to_params_buffers", False), self.weight.is_meta
        loaded, held = state_dict.get(key), cast(Any, self._parameters.get("weight"))
        if isinstance(loaded, Tensor) and isinstance(local_of(loaded), QuantizedTensor):
            if (problem := self._unfit(local_of(loaded), key, assign)) is not None:
                others[-1].append(problem)
                state_dict = {**state_dict, key: self.weight}
        elif isinstance(loaded, Tensor) and assign:
            if state is not None and state.is_sealed:
                assert state.primary is not None
                state.primary.load(local_of(loaded))
                loaded = self.weight
            elif state is not None:
                loaded = wrap(loaded, state)
            elif isinstance(held, QuantizedTensor) and type(loaded) in (Tensor, nn.Parameter):
                loaded = self._wrap(loaded, key)  # Values in the place of codes.
            state_dict = {**state_dict, key: loaded}
        foreign = [prefix + "delayed."] * ("delayed" not in self._modules) + [seed] * (self.seed is None)
        state_dict = {name: value for name, value in state_dict.items() if not name.startswith(tuple(foreign))}
        with loaded_if_there(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)
        if was_meta and not self.weight.is_meta:
            self._make_state(self.weight.device)

    def _unfit(self, codes: Tensor, name: str, assign: bool) -> str | None:
        """An error if codes of a state dict cannot be the weight, or be copied to it; else None."""
        assert isinstance(codes, QuantizedTensor)
        what, state = f"load_state_dict: {name} ({codes.format})", self._state()
        if isinstance(self.weight, DTensor) or (state is not None and state.is_sealed):
            return f"{what} is quantized, but the layer has sharded values or a master; load codes.dequantize()"
        if state is not None and not assign:
            return f"{what} is quantized, but the layer has values; pass assign=True, or load codes.dequantize()"
        if codes.parts(Usage.ROWWISE) is None:
            return f"{what} has no rowwise plane, which a layer needs; quantize with usage=Usage.ROWWISE or Usage.BOTH"
        try:
            check_weight_format("load_state_dict", name, codes.format, self.recipe)
        except ValueError as error:
            return str(error)
        return None

    def _wrap(self, value: Tensor, name: str, primary: bool = False) -> nn.Parameter:
        """`wrap_weight` for this layer, with its delayed state."""
        weight = wrap_weight(value, self.recipe, name, None, primary)
        if "delayed" in self._modules:
            cast(ShardedWeight, weight).scale_state.delayed = cast(DelayedScale, self.delayed[Role.WEIGHT.value])
        return weight

    def _make_state(self, device: torch.device) -> None:
        """Initializes seeds and delayed scales that are still on meta, once the weight has left it."""
        if self.seed is not None and self.seed.is_meta:
            self.seed = torch.empty_like(self.seed, device=device).random_(-(2**31), 2**31)
        for module in self.children():
            for state in module.children():
                if cast(DelayedScale, state).scale.is_meta:
                    state.to_empty(device=device)  # It resets itself.

    def _apply(self, fn: Any, recurse: bool = True) -> WeightLayer:
        check_not_sealed(self, fn)
        own = [parameter for parameter in self._parameters.values() if parameter is not None]
        belongings = [(hooks_of(parameter), attributes_of(parameter)) for parameter in own]
        was_meta = self.weight.is_meta
        has_codes = isinstance(self._parameters.get("weight"), QuantizedTensor)
        try:
            super()._apply(_move_of_codes(fn) if has_codes else fn, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            state = self._state()
            raise RuntimeError(
                f"{type(self).__name__}: {'weight' if state is None else state.name} is in an autograd graph or has a "
                "view, so it cannot move or change its dtype; drop losses, outputs and views of the model first"
            ) from None
        for parameter, (hooks, attributes) in zip(own, belongings, strict=True):
            put_hooks(parameter, *hooks)  # `swap_tensors`, by which subclasses move, loses hooks and attributes.
            for name, value in attributes.items():
                parameter.__dict__.setdefault(name, value)
        if was_meta and not self.weight.is_meta:
            self._reset_state()
        return self

    def taken(self, input: Tensor) -> LinearOperands:
        """What a call multiplies, and the seed and the states that it takes."""
        given: Any = input
        if not isinstance(given, Tensor):
            check_tensor("Linear", "input", given)
        seed = delayed = dtype = None
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)  # Given on, so that layers which share x round it once.
            if dtype_name(input.dtype) not in FLOATS:
                input = input.to(dtype)
        weight: Tensor = self.weight  # Once: it may be a property, as of a parametrization that gathers.
        if self.seed is not None:
            seed = _take_seed(self.seed, _rank_of(weight))
        if "delayed" in self._modules:
            delayed = {role: cast(DelayedScale, self.delayed[role.value]) for role in ROLES}
            if not is_compiling():
                keep_amaxes()
                for state in delayed.values():
                    state.restore_buffers()
        if type(weight) is Tensor and is_converted(self._parameters.get("weight")):
            warn_of_late_quantization(weight)
        return LinearOperands(input, weight, seed, delayed, dtype)

    def forward(self, input: Tensor) -> Tensor:
        x, weight, seed, delayed, dtype = self.taken(input)
        return linear(
            x,
            weight,
            self.bias,
            self.recipe,
            seed=seed,
            delayed=delayed,
            dtype=dtype,
            scatter_dim=self.scatter_dim,
            overlap=self.overlap,
            activation_group=self.activation_group,
            weight_layout=self.weight_layout,
        )

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return ", ".join([own] * bool(own) + [f"{role.value}={self.recipe.format(role)}" for role in Role])


class Linear(WeightLayer, nn.Linear):
    """`nn.Linear` with quantized matrix products, whose weight FSDP2 gathers as codes.

    The weight stays what it was: a parameter in high precision, for any optimizer, saved as a plain tensor. Each
    forward quantizes it; under `fully_shard` each rank quantizes its shard, and codes are gathered.

    Layers and models can be moved, pickled, copied, and shared with processes, as those of `nn.Linear`.
    `load_state_dict(assign=True)` also takes a `QuantizedTensor` of the recipe's weight format, and uses its codes.

    Args:
      in_features, out_features, bias, device, dtype: as for `nn.Linear`.
      recipe: the format of each role, for example `CurrentScaling()`, or a name, such as "CurrentScaling".

    Attributes:
      seed: of stochastic rounding, if the recipe has any: a buffer, int32 `[2]`. Each forward takes one and leaves the
        next, on the device alone. Ranks add their number to the high word as they take it, so that equal buffers, or
        one that a checkpoint of one rank has put everywhere, draw other bits on each rank. It begins at random, by
        `torch.manual_seed`.
      delayed: under `DelayedScaling`, the `DelayedScale` of each role, which `update_scales` brings up to date.
      scatter_dim, overlap: of `linear`, under tensor parallelism. The styles of `tensor_parallel.py` set them.
      activation_group: the ranks that keep codes of x together, if `prepare_modules_for_fsdp1` was told.

    >>> from qshard.recipes import CurrentScaling
    >>> layer = Linear(8, 4, bias=False, recipe=CurrentScaling())
    >>> layer(torch.ones(2, 8)).shape, layer.state_dict()["weight"].__class__.__name__
    (torch.Size([2, 4]), 'Tensor')
    """

    _of: type[nn.Module] = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: RecipeLike | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        given: Any = bias
        if isinstance(given, Recipe | str):
            raise TypeError(f"Linear: bias ({quote(given)}) is not True or False; pass a recipe as recipe=")
        recipe = as_recipe(recipe, "Linear")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not hasattr(size, "__index__") or size < 0:
                raise ValueError(f"Linear: {name} ({quote(size)}) is not a size; pass an integer of at least 0")
        check_weight_shape("Linear", "weight", recipe, (out_features, in_features))
        check_dtype("Linear", "dtype", torch.get_default_dtype() if dtype is None else dtype)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.begin(recipe, wrap_weight(self.weight, recipe, "weight", self))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._reset_state()
