"""Parameters that ZeRO trains: how each is gathered, the slice of this rank, and the cast of slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from qshard._core.flat_shards import FlatSlice, piece_bytes
from qshard._core.quantize_steps import Plane
from qshard.formats import Format
from qshard.layout import splits_stack
from qshard.recipes import Role
from qshard.torch_bridge._delayed_scaling import DelayedScale, delayed_scales
from qshard.torch_bridge._experts.layer import GroupedLinear
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._moe.layer import MoE
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.flat_plan import FlatPlan
from qshard.torch_bridge._optim.cast_master import Parity
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_dtype
from qshard.torch_bridge._zero.placeholders import GradientPlaceholder, has_optimizer

_CALL_NO_CHILD = (GroupedLinear, nn.MultiheadAttention)
"""Modules that use the weights of their children without calling them."""


class Ranks(NamedTuple):
    """A process group, or a single process without one."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        if group is None and not dist.is_initialized():
            return cls(None, 1, 0)
        group = group or dist.group.WORLD
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors of the first rank to all ranks, except for tensors on meta. Collective."""
        for tensor in tensors if self.size > 1 else ():
            if not tensor.is_meta:
                dist.broadcast(memory_of(tensor), group=self.group, group_src=0)


@dataclass(eq=False)
class ZeroParameter:
    """A parameter of the model, and this rank's slice of it.

    Attributes:
      parameter: the original parameter, then the parameter that layers use.
      first: its first byte in the buffer.
      master: float32 values of the slice, a view of the flat master: `[1, n]`, a row for scaled states, or `[n]` for
        weights with fewer than two axes.
      slices: start and stop of the slices of all ranks.
      visible: the tensor that users see between uses: `placeholder` if weights are sharded, else the parameter.
      quantized: codes of the slice (`piece_bytes`) and scales of the whole weight; None if it is gathered as values.
      values: the slice in the dtype of the model; None if it is gathered as codes.
      address: address and dtype of visible values when they were published, to detect moves.
      version: their version then, to detect writes.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    fmt: Format | None = None
    delayed: DelayedScale | None = None
    first: int = 0
    start: int = 0
    master: nn.Parameter = field(init=False)
    slices: list[tuple[int, int]] = field(init=False)
    placeholder: nn.Parameter = field(init=False)
    visible: nn.Parameter = field(init=False)
    grad_placeholder: GradientPlaceholder = field(init=False)
    quantized: Plane | None = None
    values: Tensor | None = None
    address: tuple[int, torch.dtype] | None = None
    version: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_stack(self) -> bool:
        """True for the weights of experts in one parameter."""
        return len(self.shape) > 2

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.size)

    @property
    def buffer_size(self) -> int:
        """Bytes in the buffer, with the byte that cast ops may need for a slice that starts within a byte."""
        return self.bytes if self.fmt is None else piece_bytes(self.fmt, self.size)

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of the first `elements` elements. No boundary splits a byte."""
        return elements * self.dtype.itemsize if self.fmt is None else elements // self.fmt.element.codes_per_byte

    def first_elements(self, end: int) -> int:
        """Return the number of elements before byte `end` of the buffer."""
        end = min(max(end - self.first, 0), self.bytes)
        return end // self.dtype.itemsize if self.fmt is None else end * self.fmt.element.codes_per_byte


def weights_of(model: nn.Module) -> list[ZeroParameter]:
    """Return the parameters to train, each once, in the order of the model."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ValueError(
            f"ZeroOptimizer: model ({type(model).__name__}) reduces gradients itself; pass its .module, and call that"
        )
    found: dict[int, ZeroParameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            full = f"{prefix}.{name}" if prefix else name
            weight = found.setdefault(id(parameter), ZeroParameter(full, parameter, []))
            weight.owners.append((module, name))
    for weight in found.values():
        parameter, what = weight.parameter, f"ZeroOptimizer: {weight.name} {weight.shape}"
        if has_optimizer(parameter):
            raise ValueError(f"{what} is already trained by another ZeroOptimizer; use one per model")
        if isinstance(parameter, QuantizedTensor):
            raise ValueError(f"{what} (QuantizedTensor) has no float32 values; make the model from float32 weights")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{what} (DTensor) is not a plain tensor; pass a model that is not sharded yet")
        check_contiguous("ZeroOptimizer", f"{weight.name} {weight.shape}", parameter)
        check_dtype("ZeroOptimizer", f"{weight.name} {weight.shape}", parameter.dtype)
        # A weight that only quantized layers use is gathered as codes, if its rowwise plane determines the other.
        formats = {
            m.recipe.format(Role.WEIGHT)
            if ((isinstance(m, WeightLayer) and n == "weight") or (isinstance(m, Experts) and weight.is_stack))
            and m.recipe is not None
            else None
            for m, n in weight.owners
        }
        state = parameter.scale_state if isinstance(parameter, ShardedWeight) else None
        if state is None or state.fmt is None or (weight.is_stack and splits_stack(state.fmt, weight.shape)):
            continue  # Flat slices of such a stack have no grid of blocks.
        if formats == {state.fmt} and state.refusal is None and state.has_one_format:
            weight.fmt, weight.delayed = state.fmt, state.delayed
    weights = list(found.values())
    if not weights:
        raise ValueError(
            f"ZeroOptimizer: model ({type(model).__name__}) has no parameter that requires grad; pass a model that has "
            "one"
        )
    _check_experts(model, weights)
    devices = {weight.parameter.device for weight in weights if not weight.parameter.is_meta}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"ZeroOptimizer: model (on {names}) is not on one device; move it to one")
    return weights


def _check_experts(model: nn.Module, weights: Sequence[ZeroParameter]) -> None:
    """Raise ValueError if other parameters are trained beside experts that ranks share.

    Ranks of an `ep_group` have other experts, so they are in different groups of an optimizer. Such a group would
    update the other parameters from the tokens of its own ranks alone, and they would diverge.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.ep_group is not None and module.ep_group.size() > 1
    }
    experts = {id(p) for layer in layers.values() for product in (layer.w13, layer.w2) for p in product.parameters()}
    others = [weight.name for weight in weights if id(weight.parameter) not in experts]
    if layers and others:
        name, size = next((name, layer.ep_group.size()) for name, layer in layers.items() if layer.ep_group is not None)
        raise ValueError(
            f"ZeroOptimizer: {others[0]} would differ between the {size} ranks that share the experts of "
            f"{name or 'the model'} (ep_group); train the model with fully_shard, or give this optimizer experts alone"
        )


def units_of(
    model: nn.Module, weights: Sequence[ZeroParameter], units: Sequence[nn.Module] | None
) -> list[tuple[nn.Module, list[ZeroParameter]]]:
    modules = list(model.modules())
    # Forward hooks of a module that is never called never run: the module that uses its weight is the unit.
    users = {id(m): user for user in modules if isinstance(user, _CALL_NO_CHILD) for m in user.modules()}
    if units is None:
        # A compiled module replaces the module inside, so that hooks stay outside of the compiled graph.
        compiled = {id(m._modules["_orig_mod"]): m for m in modules if "_orig_mod" in m._modules}
        owners = (users.get(id(module), module) for weight in weights for module, _ in weight.owners)
        unit_ids = {id(compiled.get(id(module), module)) for module in owners}
    else:
        unit_ids = {id(module) for module in (*units, model)}
        if strays := [type(unit).__name__ for unit in units if not any(unit is module for module in modules)]:
            raise ValueError(f"ZeroOptimizer: units ({strays[0]}) is not a module of the model; pass submodules of it")
        for unit in units:
            if (user := users.get(id(unit), unit)) is not unit:
                raise ValueError(
                    f"ZeroOptimizer: units ({type(unit).__name__}) is in a {type(user).__name__}, which reads its "
                    "weight without calling it; pass that module, or one that contains it"
                )
    chosen = [module for module in modules if id(module) in unit_ids]
    innermost: dict[int, nn.Module] = {}
    for unit in chosen:  # Outer modules come first, so the innermost unit wins.
        innermost.update({id(module): unit for module in unit.modules()})
    of_unit: dict[int, list[ZeroParameter]] = {id(unit): [] for unit in chosen}
    for weight in weights:
        homes = {id(innermost[id(module)]) for module, _ in weight.owners}
        if len(homes) > 1:
            raise ValueError(
                f"ZeroOptimizer: {weight.name} (shared) is shared by several units; pass units= with a module that "
                "contains all of its owners"
            )
        of_unit[homes.pop()].append(weight)
    return [(unit, of_unit[id(unit)]) for unit in chosen if of_unit[id(unit)]]


def copy_values(weights: Iterable[ZeroParameter]) -> None:
    """Copy the masters of weights that are gathered as values to their slices in the dtype of the model."""
    pairs = [(w.values, w.master) for w in weights if w.values is not None and w.values.numel()]
    if pairs:
        torch._foreach_copy_([values for values, _ in pairs], [master for _, master in pairs])


class SliceCast:
    """The cast of slices, either all with current scales or all with delayed scales."""

    def __init__(self, weights: Sequence[ZeroParameter], parity: Parity, device: torch.device):
        self._planes = [weight.quantized for weight in weights if weight.quantized is not None]
        self._masters = [weight.master.detach().view(-1) for weight in weights]
        self.delayed = [weight.delayed for weight in weights if weight.delayed is not None]
        slices = []
        for w in weights:
            assert w.fmt is not None
            rounded_to = dtype_name(w.dtype) if parity == "model" else None
            slices.append(FlatSlice(w.shape, w.fmt, start=w.start, rounded_to=rounded_to, is_stack=w.is_stack))
        self._flat = FlatPlan(slices, device)
        self._versions: list[int] = []

    def cast(self, group: dist.ProcessGroup | None) -> None:
        """Cast all slices, with one max-reduction of amaxes if scales must be computed."""
        if not self._planes:
            return
        if self.delayed:

            def whole_amaxes(indices: list[int]) -> list[Tensor]:
                found = self._split(max_over_ranks(self._flat.amaxes(self._masters), group))
                return [found[i] for i in indices]

            scales = delayed_scales(self.delayed, whole_amaxes)
        else:
            amaxes = max_over_ranks(self._flat.amaxes(self._masters), group)
            scales = self._flat.split_scales(self._flat.scales(amaxes))
        of_batches = self._flat.join_scales([each.scale for each in scales])
        self._flat.cast([own.data for own in self._planes], self._masters, of_batches, pieces=True)
        both = [zip(own[1:], new[1:], strict=True) for own, new in zip(self._planes, scales, strict=True)]
        pairs = [(old, new) for pair in both for old, new in pair if old is not None]
        torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        self._versions = self._scale_versions()

    @property
    def are_scales_written(self) -> bool:
        """True if torch has written to delayed scales since the last cast, for example by `load_scaling_state`."""
        return self._versions != self._scale_versions()

    def _scale_versions(self) -> list[int]:
        return [state.scale._version for state in self.delayed]

    def observe(self) -> None:
        """Record the amaxes of the slices; `update_delayed` reduces them to amaxes of whole weights."""
        if self.delayed:
            amaxes = self._split(self._flat.amaxes(self._masters))
            for state, amax in zip(self.delayed, amaxes, strict=True):
                state.observe(amax)

    def _split(self, amaxes: Tensor) -> list[Tensor]:
        """Return the per-tensor amaxes of each weight."""
        return [grid for grid, _ in self._flat.plan.split_amaxes(amaxes)]
