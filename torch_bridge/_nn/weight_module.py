"""`WeightModule`: base class of modules with quantized weights, with their seeds, state dicts, moves and pickles."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qshard._files.recipe_records import error_text, is_text_of, text_of
from qshard.formats import FLOATS
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import DelayedScale, keep_amaxes
from qshard.torch_bridge._distributed.dtensor import local_box, local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, first_rank
from qshard.torch_bridge._fsdp.scale_state import ScaleState
from qshard.torch_bridge._fsdp.weight import ShardedWeight, attributes_of, plain, wrap
from qshard.torch_bridge._modules import Extends, modules_of, parameters_of
from qshard.torch_bridge._nn.operands import ROLES
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import autocast_dtype, is_compiling, may_skip_dispatcher
from qshard.torch_bridge._quantized.device_moves import Move, changes
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._torch_internals import has_other_owners, hooks_of, infers_metadata, is_flattened, put_hooks


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
    weight: Tensor, recipe: Recipe | None, name: str, root: nn.Module | None, primary: bool = False
) -> nn.Parameter:
    """Wrap a weight as a `ShardedWeight` in the same memory. Weights of one `root` share a refresh of scales.

    Expert parallelism passes DTensors, with a shard of the experts.
    """
    state = ScaleState(recipe, name, root, weight.device, primary, tuple(local_of(weight).shape))
    if isinstance(weight, DTensor):
        state.part = ShardSpec(tuple(weight.shape), weight.device_mesh, weight.placements)
    # Always a new tensor, even if nothing requires grad: `replace_parameter` swaps its contents.
    return nn.Parameter(wrap(plain(weight), state), requires_grad=weight.requires_grad)


def check_alone(name: str, weight: Tensor) -> None:
    """Raise if anything but its modules refers to a weight, which then cannot be replaced."""
    referenced: Any = weight
    if has_other_owners(referenced) or weakref.getweakrefs(referenced) or is_flattened(referenced):
        raise ValueError(
            f"convert: {name} (referenced by DistributedDataParallel, FullyShardedDataParallel or an autograd graph) "
            "cannot be replaced; convert before wrapping the model, and drop earlier losses and views"
        )


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


def delayed_of_call(modules: nn.ModuleDict) -> dict[Role, DelayedScale]:
    """Return the `DelayedScale` of each role, with its buffers as one call of the layer needs them."""
    delayed = {role: cast(DelayedScale, modules[role.value]) for role in ROLES}
    if not is_compiling():
        keep_amaxes()
        for state in delayed.values():
            state.restore_buffers()
        if infers_metadata():
            return copy.deepcopy(delayed)  # The copies take the amaxes, which no history may have.
    return delayed


def _draw(seed: Tensor, generator: torch.Generator | None = None) -> None:
    """Draw seeds, on the device of `generator` if there is one. Ranks draw the seeds of all experts and keep theirs."""
    device = seed.device if generator is None else generator.device
    of_all = torch.empty(seed.shape, dtype=torch.int32, device=device).random_(-(2**31), 2**31, generator=generator)
    local_of(seed).copy_(of_all[local_box(seed).slices])


class LinearOperands(NamedTuple):
    """Operands of one call of a layer, as arguments of `linear`. `dtype` is set under autocast."""

    input: Tensor
    weight: Tensor
    seed: Tensor | None
    delayed: dict[Role, DelayedScale] | None
    dtype: torch.dtype | None


class WeightModule(Extends):
    """Base class of modules with quantized weights: layers with one weight, and experts in 3-D parameters.

    It keeps the recipe, the seed and the scaling state consistent in state dicts, copies, pickles and moves.
    `scaling_state` saves the buffers named in `scaling_buffers`.

    Attributes:
      recipe: the format of each role; None after `switch_recipe(model, None)`, when the layer does not quantize.
      converted: the recipe that `convert` set, if `switch_recipe` has changed it; otherwise empty.
    """

    recipe: Recipe | None
    converted: tuple[Recipe | None, ...] = ()
    seed: Tensor | None
    delayed: nn.ModuleDict
    scaling_buffers = ("seed",)

    def _begin_scaling(self, state: ScaleState | None, seed: Tensor | None) -> None:
        """Register new delayed scales, of the weight those in its state, and a new seed, of the shape of `seed`."""
        self._begin_delayed(state)
        self.register_buffer("seed", seed, persistent=False)  # `scaling_state` saves it.
        self._reset_state()

    def _begin_delayed(self, state: ScaleState | None) -> None:
        self._modules.pop("delayed", None)
        if self.recipe is not None and self.recipe.stateful:
            if state is None:  # Codes have none.
                codes = next(weight for weight in self._parameters.values() if weight is not None)
                shape, device, of_weight = tuple(codes.shape), codes.device, None
            else:
                assert state.delayed is not None
                shape, device, of_weight = state.shape, state.delayed.scale.device, state.delayed
            experts = shape[0] if len(shape) > 2 else None
            made = {role.value: DelayedScale(self.recipe, role, device, experts) for role in ROLES}
            self.delayed = nn.ModuleDict(made | ({} if of_weight is None else {Role.WEIGHT.value: of_weight}))

    def _empty_seed(self) -> Tensor:
        """Return the buffer of a seed, without a value."""
        raise NotImplementedError

    def switch(self, recipe: Recipe | None, generator: torch.Generator | None) -> None:
        """Change the recipe. The weights are not gathered now.

        Seeds stay if both recipes need them; otherwise `generator` draws them.
        """
        first = self.converted or (self.recipe,)
        self.recipe, self.converted = recipe, () if first == (recipe,) else first
        groups = {own.group for own in self._delayed_scales()}
        for name, state in self._states().items():
            weight = self._parameters[name]
            assert weight is not None
            state.switch(self._gathered_recipe(), weight.device)
        self._begin_delayed(next(iter(self._states().values()), None))
        for delayed in self._delayed_scales():
            delayed.group = next(iter(groups), None)
        if recipe is None or not recipe.stochastic:
            self.seed = None
        elif self.seed is None:
            self.seed = self._empty_seed()
            _draw(self.seed, generator)

    def _gathered_recipe(self) -> Recipe | None:
        """Return the recipe of the codes of gathered weights; None if their values are gathered."""
        return self.recipe

    def _reset_state(self) -> None:
        """Draw the seed, and reset delayed scales."""
        seed: Tensor | None = self._buffers.get("seed")
        if seed is not None:
            _draw(seed)
        for delayed in self._delayed_scales():
            delayed.reset()

    def _delayed_scales(self) -> list[DelayedScale]:
        return [cast(DelayedScale, own) for own in self.delayed.values()] if "delayed" in self._modules else []

    def _states(self) -> dict[str, ScaleState]:
        """Return the states of the weights that are gathered as codes, by name."""
        local = {name: local_of(weight) for name, weight in self._parameters.items() if weight is not None}
        return {name: own.scale_state for name, own in local.items() if isinstance(own, ShardedWeight)}

    def _wrap(self, value: Tensor, name: str, root: nn.Module | None = None, primary: bool = False) -> nn.Parameter:
        """Wrap a new weight, which takes over the delayed scale."""
        weight = wrap_weight(value, self.recipe, name, root, primary)
        if "delayed" in self._modules:
            state: ScaleState = local_of(weight).scale_state  # type: ignore[attr-defined]
            state.delayed = cast(DelayedScale, self.delayed[Role.WEIGHT.value])
        return weight

    def operands_of_call(self, x: Tensor, weight: Tensor) -> LinearOperands:
        """Return the operands of one call, and take a seed for it."""
        seed = delayed = None
        dtype = autocast_dtype(x.device)  # Passed on, so that layers that share x round it once.
        if dtype is not None and dtype_name(x.dtype) not in FLOATS:
            x = x.to(dtype)
        if self.seed is not None:
            seed = take_seed(local_of(self.seed), rank_of(weight))
        if "delayed" in self._modules:
            delayed = delayed_of_call(self.delayed)
        return LinearOperands(x, weight, seed, delayed, dtype)

    def __getstate__(self) -> dict[str, Any]:
        weights = {name: (state.name, state.primary is not None) for name, state in self._states().items()}
        return {**super().__getstate__(), "_weights": weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given = dict(state)
        weights = given.pop("_weights", {})
        name, primary = given.pop("_weight_name", None), given.pop("_weight_primary", False)  # Of older files.
        super().__setstate__(given)
        for own, (full, is_primary) in {**weights, **({"weight": (name, primary)} if name is not None else {})}.items():
            weight = self._parameters.get(own)
            if type(weight) is nn.Parameter:  # Not in a copy, or if layers share the weight.
                replace_parameter(weight, self._wrap(weight, full, None, is_primary))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save plain tensors, so that the checkpoint loads without qshard and under any recipe."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, state in {} if keep_vars else self._states().items():
            value = destination[prefix + name] = plain(destination[prefix + name])
            if state.primary is not None:
                state.primary.watch(value)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if self.converted and metadata is not None:
            metadata["recipes"] = [text_of(self.converted[0]), text_of(self.recipe)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
        """Load, unless the state dict was saved after a switch that would follow the recipe of this layer."""
        before, after = metadata.get("recipes", (None, None))
        start = "load_state_dict: the state dict was saved after switch_recipe"
        lacks_switch = before is not None and is_text_of(before, self.recipe) and not is_text_of(after, self.recipe)
        if lacks_switch and not any(each.startswith(start) for each in others[-1]):
            others[-1].append(
                f"{start}, which gave {prefix[:-1] or 'the model'} the recipe {error_text(after)}, but here it has "
                f"{self.recipe!r}; call switch_recipe(model, ...) as in that run, then load"
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)

    def _assigned(self, name: str, loaded: Tensor) -> Any:
        """Return the parameter for a loaded tensor that replaces the parameter `name`."""
        state = self._states().get(name)
        if state is None:
            return loaded
        if not state.is_sealed:
            return wrap(loaded, state)
        assert state.primary is not None
        state.primary.load(local_of(loaded))
        return self._parameters[name]

    def _make_state(self, device: torch.device) -> None:
        """Initialize seeds and delayed scales that are still on meta, after the weights have left it."""
        if self.seed is not None and self.seed.is_meta:
            self.seed = torch.empty_like(self.seed, device=device)
            _draw(self.seed)
        for delayed in self._delayed_scales():
            if delayed.scale.is_meta:
                delayed.to_empty(device=device)  # `to_empty` resets the state.

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        check_not_sealed(self, fn)
        was_meta, has_codes = self._is_on_meta(), any(isinstance(p, QuantizedTensor) for p in self._parameters.values())
        with moving_parameters(self, next((state.name for state in self._states().values()), "weight")):
            super()._apply(_move_of_codes(fn) if has_codes else fn, recurse)
        if was_meta and not self._is_on_meta():
            self._reset_state()
        return self

    def _is_on_meta(self) -> bool:
        own = (*self._parameters.values(), self._buffers.get("seed"))
        return any(tensor is not None and tensor.is_meta for tensor in own)

    def extra_repr(self) -> str:
        own = super().extra_repr()
        return ", ".join([own] * bool(own) + [f"recipe={self.recipe!r}"])
