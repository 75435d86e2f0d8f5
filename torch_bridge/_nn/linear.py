"""`Linear` and its base class: layers with a quantized weight, their state dicts, moves and pickles."""

from __future__ import annotations

import contextlib
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
from qshard.torch_bridge._distributed.scaling_state import load_state_if_present
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, first_rank
from qshard.torch_bridge._fsdp.functional import is_converted, warn_of_late_quantization
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.weight import ShardedWeight, attributes_of, plain, wrap
from qshard.torch_bridge._modules import Extends, modules_of, parameters_of
from qshard.torch_bridge._nn.functional import WeightLayout, linear
from qshard.torch_bridge._nn.operands import ROLES
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import is_compiling, may_skip_dispatcher
from qshard.torch_bridge._quantized.device_moves import Move, changes
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor
from qshard.torch_bridge._torch_internals import hooks_of, put_hooks


def take_seed(seed: Tensor, rank: int) -> Tensor:
    """Return this rank's seed, or seeds `[E, 2]`, for one call, and advance the buffer `seed`."""
    return next_seed(seed, rank) if may_skip_dispatcher((seed,)) else _take_seed_op(seed, rank)


def next_seed(seed: Tensor, rank: int) -> Tensor:
    taken = seed.clone()
    if rank:
        taken[..., 1].add_(rank)
    seed[..., 0].add_(1)
    return taken


# A single op, because compilers of torch 2.13 would move a copy that only the backward pass needs into the backward
# graph, where it would read the next seed.
_take_seed_op = torch.library.custom_op("qshard::take_seed", next_seed, mutates_args=("seed",))


@_take_seed_op.register_fake
def _(seed: Tensor, rank: int) -> Tensor:
    return torch.empty_like(seed)


def wrap_weight(
    weight: Tensor, recipe: Recipe, name: str, root: nn.Module | None, primary: bool = False
) -> nn.Parameter:
    """Wrap a weight as a `ShardedWeight` in the same memory. Weights of one `root` share a refresh of scales.

    Expert parallelism passes DTensors, with a shard of the experts.
    """
    state = ScaleState(recipe, name, root, weight.device, primary, tuple(local_of(weight).shape))
    if isinstance(weight, DTensor):
        state.part = ShardSpec(tuple(weight.shape), weight.device_mesh, weight.placements)
    # Always a new tensor, even if nothing requires grad: `replace_parameter` swaps its contents.
    return nn.Parameter(wrap(plain(weight), state), requires_grad=weight.requires_grad)


def replace_parameter(weight: nn.Parameter, new: nn.Parameter) -> None:
    """Swap `new` into `weight`, the same object, which keeps its gradient, hooks and attributes. Then drop `new`."""
    new.grad = weight.grad
    put_hooks(new, *hooks_of(weight))
    new.__dict__.update(attributes_of(weight))
    torch.utils.swap_tensors(weight, new)


def _move_of_codes(move: Move) -> Move:
    """Wrap `move` so that it keeps codes: a new dtype would raise, and `to_empty` would replace codes by floats."""

    def move_codes(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, QuantizedTensor) or not changes(move, tensor):
            return move(tensor)
        target = move(torch.empty(1, dtype=tensor.dtype, device=tensor.device))
        return tensor.move_to(target.device, target.dtype)

    return move_codes


def _codes_without_scale(state_dict: Any, key: str) -> str | None:
    """Return the name of the codes of a weight in a state dict that was read from a file, with their dtype; or None."""
    for suffix in ("", "_packed", "_blocks", ".rowwise.data"):
        stored = state_dict.get(key + suffix)
        if isinstance(stored, Tensor) and stored.dtype.itemsize == 1:
            return f"{key}{suffix} ({stored.dtype})"
    return None


def check_not_sealed(module: nn.Module, move: Move) -> None:
    """Raise if `move` would change a sealed primary weight, because its master in the optimizer would not move."""
    for each in modules_of(module):
        if isinstance(each, FSDPModule):
            each.reshard()  # FSDP2 does the same before a move: its parameters may be the gathered ones.
    for parameter in parameters_of(module):
        state: ScaleState | None = getattr(local_of(parameter), "scale_state", None)
        if state is not None and state.is_sealed and changes(move, parameter):
            raise NotImplementedError(
                f"Linear: {state.name} (primary) has a master in its optimizer, which would not move; move the model "
                "before its first forward and before making the optimizer"
            )


@contextlib.contextmanager
def moving_parameters(module: nn.Module, name: str) -> Iterator[None]:
    """Keep the hooks and attributes of parameters that a move swaps. `name` is the weight that errors name."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    belongings = [(hooks_of(parameter), attributes_of(parameter)) for parameter in own]
    try:
        yield
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise RuntimeError(
            f"{type(module).__name__}: {name} is in an autograd graph or has a view, so it cannot move or change its "
            "dtype; drop losses, outputs and views of the model first"
        ) from None
    for parameter, (hooks, attributes) in zip(own, belongings, strict=True):
        put_hooks(parameter, *hooks)  # `swap_tensors`, which moves tensor subclasses, drops hooks and attributes.
        for key, value in attributes.items():
            parameter.__dict__.setdefault(key, value)


def rank_of(weight: Tensor) -> int:
    """Return the offset of this rank's seed. Ranks with shards of the same tensor use the same seed."""
    if isinstance(weight, DTensor):
        return first_rank(weight.device_mesh)
    return dist.get_rank() if dist.is_initialized() else 0


def delayed_of_roles(recipe: Recipe, state: ScaleState, device: torch.device) -> nn.ModuleDict:
    """Return a `DelayedScale` for each role of a layer: of the weight the one in its state, of others new ones."""
    assert state.delayed is not None
    experts = state.shape[0] if len(state.shape) > 2 else None
    own = {role.value: DelayedScale(recipe, role, device, experts) for role in Role if role is not Role.WEIGHT}
    return nn.ModuleDict({Role.WEIGHT.value: state.delayed, **own})


def delayed_of_call(modules: nn.ModuleDict) -> dict[Role, DelayedScale]:
    """Return the `DelayedScale` of each role, with its buffers as one call of the layer needs them."""
    delayed = {role: cast(DelayedScale, modules[role.value]) for role in ROLES}
    if not is_compiling():
        keep_amaxes()
        for state in delayed.values():
            state.restore_buffers()
    return delayed


class LinearOperands(NamedTuple):
    """Operands of one call of a layer, as arguments of `linear`. `dtype` is set under autocast."""

    input: Tensor
    weight: Tensor
    seed: Tensor | None
    delayed: dict[Role, DelayedScale] | None
    dtype: torch.dtype | None


class WeightLayer(Extends):
    """Base class of layers with one quantized weight. `Linear` documents its attributes.

    It keeps the recipe, the seed and the scaling state consistent in state dicts, copies, pickles and moves. A module
    with `is_one_layer` lets a model that contains it take over the refresh of its scales. `scaling_state` saves the
    buffers named in `scaling_buffers`.
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
        self.recipe, self.weight = recipe, weight
        state = self._state()
        assert state is not None
        self._modules.pop("delayed", None)
        if recipe.stateful:
            self.delayed = delayed_of_roles(recipe, state, weight.device)
        seed = torch.empty(2, dtype=torch.int32, device=weight.device) if recipe.stochastic else None
        self.register_buffer("seed", seed, persistent=False)  # `scaling_state` saves it.
        self._reset_state()

    def _reset_state(self) -> None:
        seed: Tensor | None = self._buffers.get("seed")
        if seed is not None:
            seed.random_(-(2**31), 2**31)
        for module in self.children():
            for state in module.children():
                cast(DelayedScale, state).reset()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Tensor parallelism replaces the weight by a shard through this method.

        Some shardings copy the weight, and DTensor copies to a plain tensor, which is wrapped again here. Whether the
        layer can run with this sharding is checked in `forward`, because a weight that is gathered before may have any
        sharding.
        """
        old: Any = self._parameters.get("weight")
        new: Any = param
        if name == "weight" and isinstance(new, DTensor) and isinstance(old, ShardedWeight):
            state, part = old.scale_state, ShardSpec(tuple(new.shape), new.device_mesh, new.placements)
            state.part = part
            state.passes.watch()  # Their forward passes share one reduction of amaxes.
            if not isinstance(local_of(new), ShardedWeight):
                param = nn.Parameter(wrap(new, state), requires_grad=new.requires_grad)
        super().register_parameter(name, param)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules, except the scaling states while `parallelize_module` shards this layer.

        `parallelize_module` shards each module before it requests the next, and turns all parameters and buffers into
        DTensors. The states must stay plain tensors.
        """
        was_sharded = isinstance(self._parameters.get("weight"), DTensor)
        modules = super().named_modules(memo, prefix, remove_duplicate)
        for name, module in modules:
            yield name, module
            if module is self and not was_sharded and isinstance(self.weight, DTensor):
                if self.seed is not None:
                    self.seed = local_of(self.seed)
                return

    def _state(self) -> ScaleState | None:
        local = local_of(self.weight)
        return local.scale_state if isinstance(local, ShardedWeight) else None

    def __getstate__(self) -> dict[str, Any]:
        state = self._state()
        name, primary = (None, False) if state is None else (state.name, state.primary is not None)
        return {**super().__getstate__(), "_weight_name": name, "_weight_primary": primary}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        name, primary = given.pop("_weight_name", None), given.pop("_weight_primary", False)  # Older files lack them.
        super().__setstate__(given)
        if name is not None and type(self.weight) is nn.Parameter:  # Not in a copy, or if layers share the weight.
            replace_parameter(self.weight, self._wrap(self.weight, name, primary))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save plain tensors, so that the checkpoint loads without qshard and under any recipe."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + "weight"
        if not keep_vars and key in destination:  # The key is missing if the weight is parametrized.
            value = destination[key] = plain(destination[key])
            state = self._state()
            if state is not None and state.primary is not None:
                state.primary.watch(value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any) -> None:
        """Load values or codes. Scaling state in old state dicts is ignored if the recipe does not use it."""
        state, key, seed = self._state(), prefix + "weight", prefix + "seed"
        assign, was_meta = metadata.get("assign_to_params_buffers", False), self.weight.is_meta
        loaded, held = state_dict.get(key), cast(Any, self._parameters.get("weight"))
        if isinstance(loaded, Tensor) and isinstance(local_of(loaded), QuantizedTensor):
            if (problem := self._unfit(local_of(loaded), key, assign)) is not None:
                others[-1].append(problem)
                state_dict = {**state_dict, key: self.weight}
        elif (found := _codes_without_scale(state_dict, key)) is not None:
            others[-1].append(
                f"load_state_dict: {found} has codes of a file, and load_state_dict does not apply their scales; call "
                "qshard.torch_bridge.load_quantized(model, path)"
            )
            state_dict = {**state_dict, key: self.weight}
        elif isinstance(loaded, Tensor) and assign:
            if state is not None and state.is_sealed:
                assert state.primary is not None
                state.primary.load(local_of(loaded))
                loaded = self.weight
            elif state is not None:
                loaded = wrap(loaded, state)
            elif isinstance(held, QuantizedTensor) and type(loaded) in (Tensor, nn.Parameter):
                loaded = self._wrap(loaded, key)  # Values replace codes.
            state_dict = {**state_dict, key: loaded}
        foreign = [prefix + "delayed."] * ("delayed" not in self._modules) + [seed] * (self.seed is None)
        state_dict = {name: value for name, value in state_dict.items() if not name.startswith(tuple(foreign))}
        with load_state_if_present(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)
        if was_meta and not self.weight.is_meta:
            self._make_state(self.weight.device)

    def _unfit(self, codes: Tensor, name: str, assign: bool) -> str | None:
        """Return an error message if codes in a state dict cannot become the weight, else None."""
        assert isinstance(codes, QuantizedTensor)
        what, state = f"load_state_dict: {name} ({codes.format})", self._state()
        if isinstance(self.weight, DTensor) or (state is not None and state.is_sealed):
            return f"{what} is quantized, but the layer has sharded values or a master; load codes.dequantize()"
        if state is not None and not assign:
            return f"{what} is quantized, but the layer has values; pass assign=True, or load codes.dequantize()"
        if codes.parts(Usage.ROWWISE) is None:
            return f"{what} has no rowwise plane, which a layer needs; quantize with usage=Usage.ROWWISE or Usage.BOTH"
        try:
            check_weight_format("load_state_dict", name, codes.format, self.recipe, frozen=True)
        except ValueError as error:
            return str(error)
        return None

    def _wrap(self, value: Tensor, name: str, primary: bool = False) -> nn.Parameter:
        weight = wrap_weight(value, self.recipe, name, None, primary)
        if "delayed" in self._modules:
            cast(ShardedWeight, weight).scale_state.delayed = cast(DelayedScale, self.delayed[Role.WEIGHT.value])
        return weight

    def _make_state(self, device: torch.device) -> None:
        """Initialize seeds and delayed scales that are still on meta, after the weight has left it."""
        if self.seed is not None and self.seed.is_meta:
            self.seed = torch.empty_like(self.seed, device=device).random_(-(2**31), 2**31)
        for module in self.children():
            for state in module.children():
                if cast(DelayedScale, state).scale.is_meta:
                    state.to_empty(device=device)  # `to_empty` resets the state.

    def _apply(self, fn: Any, recurse: bool = True) -> WeightLayer:
        check_not_sealed(self, fn)
        was_meta, state = self.weight.is_meta, self._state()
        has_codes = isinstance(self._parameters.get("weight"), QuantizedTensor)
        with moving_parameters(self, "weight" if state is None else state.name):
            super()._apply(_move_of_codes(fn) if has_codes else fn, recurse)
        if was_meta and not self.weight.is_meta:
            self._reset_state()
        return self

    def call_operands(self, input: Tensor) -> LinearOperands:
        """Return the operands of one call, and take a seed for it."""
        given: Any = input
        if not isinstance(given, Tensor):
            check_tensor("Linear", "input", given)
        seed = delayed = dtype = None
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)  # Passed on, so that layers that share x round it once.
            if dtype_name(input.dtype) not in FLOATS:
                input = input.to(dtype)
        weight: Tensor = self.weight  # Read once: a parametrization may compute or gather it on each access.
        if self.seed is not None:
            seed = take_seed(self.seed, rank_of(weight))
        if "delayed" in self._modules:
            delayed = delayed_of_call(self.delayed)
        if type(weight) is Tensor and is_converted(self._parameters.get("weight")):
            warn_of_late_quantization(weight)
        return LinearOperands(input, weight, seed, delayed, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `linear` with the weight, bias and recipe of the layer."""
        x, weight, seed, delayed, dtype = self.call_operands(input)
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
        return ", ".join([own] * bool(own) + [f"recipe={self.recipe!r}"])


class Linear(WeightLayer, nn.Linear):
    """`nn.Linear` with quantized GEMM operands, and a weight that FSDP2 gathers as codes.

    The weight stays a parameter in high precision, for any optimizer, and is saved as a plain tensor. Each forward pass
    quantizes it. Under `fully_shard` each rank quantizes its shard, and codes are gathered.

    The layer can be moved, pickled, copied and shared between processes like `nn.Linear`.
    `load_state_dict(assign=True)` also accepts a `QuantizedTensor` in the recipe's weight format, and then uses its
    codes as the weight.

    Args:
      in_features: K.
      out_features: N.
      bias: add a learned bias.
      recipe: the format of each role, for example `CurrentScaling()`, or the name of a recipe, such as
        "CurrentScaling".
      device: as for `nn.Linear`.
      dtype: float32, bfloat16 or float16; as for `nn.Linear`.

    Attributes:
      seed: for stochastic rounding, if the recipe uses it: a buffer, a uint64 as int32 `[2]`, low word first. Each
        forward pass uses it and increments it on the device. Each rank adds its rank number to the high word of the
        seed that it uses, so that ranks with equal buffers, for example after loading one checkpoint, draw different
        bits. The initial value is random, from `torch.manual_seed`.
      delayed: under `DelayedScaling`, the `DelayedScale` of each role. `update_scales` updates it.
      scatter_dim: as for `linear`; set by the styles of `tensor_parallel.py`.
      overlap: as for `linear`; set by the styles of `tensor_parallel.py`.
      activation_group: the ranks that each save a part of the codes of x, if passed to `prepare_modules_for_fsdp1`.

    Raises:
      TypeError: `bias` is a recipe.
      ValueError: a size is negative, or the weight is not whole blocks of the recipe's formats.

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
        """Initialize weight and bias like `nn.Linear`, and reset the seed and the scaling state."""
        super().reset_parameters()
        self._reset_state()
