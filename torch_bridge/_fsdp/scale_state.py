"""The scales of sharded weights, which every pass over the model makes anew.

Glossary, in the manner of FSDP2's own `_fsdp_param.py`. All code of this package uses these words.

  weight      the whole parameter, `[rows, columns]`; no rank holds it in high precision
  shard       what this rank holds of it in high precision: rows or columns, maybe none
  slice       a shard of rows, as flat elements of the row-major weight
  codes       the shard, cast with the scales of the weight: one uint8 tensor, 4-bit codes two a byte
  padded      codes with room for those of the longest shard, the rest zeros: what every rank sends
  gathered    the padded codes of all ranks, one after the other, which begin with the codes of the weight
  unsharded   gathered codes and scales as a `QuantizedTensor`, between a gather and the reshard
  scales      of the weight: the same on every rank, made of amaxes that ranks have max-reduced; they never travel
  pass        one forward of the converted model, or one backward: its gathers want weights as they are when it begins
  refresh     to make the scales of some weights, on all ranks at once, with one max-reduction
  staged      scales as a refresh has made them: shards are cast with them
  stored      scales in memory that stays with the weight: what is unsharded reads them
  commit      to copy scales from where they are staged to where they are stored

A scale is of the whole weight, so making one is a collective, and ranks must agree on when. They do, since gathers
alone decide, which FSDP2 makes in one order on all ranks: the first gather of a pass refreshes all weights of the model
that are cut over its ranks. Scales never outlive their pass. So nobody asks who has written to a shard, by what way, or
on which ranks. A gather outside a pass, as by `unshard()`, refreshes its own weight alone: it is as right, and a
reduction for each weight.

Autograd keeps codes and stored scales, not the weight. FSDP2 fills the memory of the codes anew before backward; so
scales are stored in memory that stays, and both are always of one weight, also in a graph that is older than a step: it
computes with the new weight then, as with plain FSDP2. Refreshes run on the stream where FSDP2 copies, commits on that
where layers compute, after all that has read the scales before.

Under `DelayedScaling` scales are those of earlier steps, and a refresh takes a copy of them. Before its first update a
weight has none: until ranks know that it has, a refresh makes them as of other weights.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qshard._core.quantize_steps import Scales
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import DelayedScale, update_delayed
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import Part, fsdp_axis
from qshard.torch_bridge._fsdp.epochs import Passes
from qshard.torch_bridge._fsdp.group_casts import Ahead, cast_together
from qshard.torch_bridge._fsdp.primary import Primary
from qshard.torch_bridge._fsdp.scale_computation import check_agree, delayed_scales, made_scales
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
from qshard.torch_bridge._module_tree import parameters_of
from qshard.torch_bridge._quantized.validation import check_model


class ScaleState:
    """What a rank knows of one weight. Every tensor object that stands for the weight refers to the one state.

    It is no attribute of a tensor that FSDP2 may replace: it does so on unevenly sharded ranks only, and ranks that
    lost their scales would start collectives that the others never join.

    Attributes:
      fills: how often random values have been put there.
      refusal: why FSDP2 cannot gather it; None if it can.
      delayed: holds the scales instead, if the recipe is `DelayedScaling`.
      primary: its master and codes, if it is a primary weight.
      shape: of the weight, when it was made.
      whole, first: the shape of what FSDP2 has cut, and where in it the shard begins, in elements.
      gathers: whether FSDP2 gathers it: it has asked for hooks.
      travels: whether codes have left, and have not arrived.
      staged, stored: its scales; None before the first refresh.
      ahead: codes that were cast along with those of another weight.
      group: a weak reference to FSDP2's group of parameters that it is in; None: nobody has looked.
      part: under tensor parallelism, which part of a larger weight this one is. One scale serves all parts.
    """

    def __init__(
        self, recipe: Recipe, name: str, root: nn.Module | None = None, device: Any = None, primary: bool = False
    ):
        self.fmt = recipe.format(Role.WEIGHT)
        self.name = name
        self.refusal = self.fmt.gather_refusal
        self.delayed = DelayedScale(recipe, Role.WEIGHT, device) if recipe.stateful else None
        self.primary = Primary(name) if primary else None
        self.shape: tuple[int, ...] = ()
        self.part: Part | None = None
        self.whole: tuple[int, ...] = ()
        self.first = self.fills = 0
        self.gathers = self.travels = False
        self.staged: Scales | None = None
        self.stored: Scales | None = None
        self.refresh: Refresh | None = None
        self.ahead: Ahead | None = None
        self.group: Callable[[], object | None] | None = None
        self.passes = Passes.of(root)
        self.agreed = False
        self._recipe = recipe
        self._plans: dict[Any, ShardPlan] = {}
        self._last: tuple[Any, ShardPlan] | None = None
        self._axis: tuple[Any, int] = (None, 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleState:
        """A copied weight goes its own way. Its passes are those of the copied model, if that is what is copied."""
        copied = ScaleState(self._recipe, self.name, memo.get(id(self.passes.root)), primary=self.primary is not None)
        copied.delayed = copy.deepcopy(self.delayed, memo)
        for name in ("shape", "part", "whole", "first", "gathers"):
            setattr(copied, name, getattr(self, name))
        return copied

    @property
    def is_sealed(self) -> bool:
        """Whether the parameter has no values: it is a primary weight, and they are its master."""
        return self.primary is not None and self.primary.master is not None

    def at_home(self, shard: Tensor) -> Tensor:
        """The shard that the parameter has: of one that is offloaded, FSDP2 gathers a copy."""
        root = self.passes.root
        for parameter in () if root is None else root.parameters():
            if _state_of(parameter) is self:
                found: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
                return found
        return shard

    def note_cut(self, shape: torch.Size) -> None:
        """Called for each tensor that is cut. The last one, before FSDP2 asks for hooks, is what FSDP2 has cut."""
        if not self.gathers:
            self.whole = tuple(shape)

    def note_place(self, first: int) -> None:
        """Called for each part that is copied: FSDP2 copies the one of this rank, which begins at element `first`."""
        if not self.gathers:
            self.first = first

    def shard_of(self, parameter: Tensor) -> ShardOf | None:
        """What this rank has of the weight, which is `parameter`; None if it is not sharded now."""
        if not isinstance(parameter, DTensor):
            return None
        known, axis = self._axis
        if known is not parameter._spec:  # A weak reference to the parameter would keep torch from moving it.
            axis = fsdp_axis(self.name, parameter, self.part)
            self._axis = (parameter._spec, axis)
        shard: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
        if self.primary is not None and self.primary.master is not None:
            shard = self.primary.master
        return ShardOf(self, shard, self.plan_of(shard, self.whole, parameter.device_mesh, axis))

    def plan_of(self, shard: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, mesh_dim: int = 0) -> ShardPlan:
        """What `shard` is of the weight, which is cut over one axis of `mesh`."""
        key = (mesh, mesh_dim, shape, shard.shape, shard.dtype, shard.device)
        if self._last is not None and self._last[0] == key:  # To hash it takes longer.
            return self._last[1]
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ShardPlan(self.name, self.fmt, shape, shard, mesh, mesh_dim)
        self._last = (key, plan)
        return plan

    def scales_for(self, shard: Tensor, plan: ShardPlan) -> Scales:
        """The scales for a gather that starts. If it is the first of its pass, a refresh comes before."""
        if self.primary is not None and self.primary.codes is not None:
            self.primary.check()
            assert self.staged is not None
            self.travels = True
            return self.staged
        now, mine = self.passes.now(), ShardOf(self, shard, plan)
        if now is None or self.refresh is None or self.refresh.made_in != now:
            weights = [mine]
            if now is not None:
                others = [mine if other.state is self else other for other in _sharded_weights(self.passes.root)]
                weights = [other for other in others if other.plan.group.group_name == plan.group.group_name]
            _refresh(weights if any(each is mine for each in weights) else [mine], now)
        assert self.staged is not None
        self.travels = True
        return self.staged

    def arrive(self, refresh: Refresh) -> Scales:
        """The stored scales of codes that have arrived, which were cast after `refresh`."""
        refresh.commit(self)
        self.travels = False
        assert self.stored is not None
        return self.stored


class ShardOf(NamedTuple):
    """A sharded weight, as a refresh takes it: its state, what this rank holds of it, and which part that is."""

    state: ScaleState
    shard: Tensor
    plan: ShardPlan

    @property
    def is_cast_in_gathers(self) -> bool:
        """Whether each gather casts it: a slice, with scales that are there before."""
        return self.state.primary is None and self.state.delayed is None and self.plan.columns is None


class Refresh:
    """Scales that were made together.

    Attributes:
      made_in: the pass.
    """

    def __init__(self, states: Sequence[ScaleState], made: Sequence[Scales], made_in: object):
        self.made_in = made_in
        self._states = [weakref.ref(state) for state in states]  # They hold it, until the next.
        for state, scales in zip(states, made, strict=True):
            state.staged, state.refresh = scales, self
            if state.stored is None:
                with torch.inference_mode(False):  # A later refresh, in training, writes to it too.
                    of_planes = (None if part is None else torch.empty_like(part) for part in scales[1:])
                    state.stored = Scales(scales.scale, *of_planes)

    def commit(self, arrived: ScaleState) -> None:
        """Once, on the stream that computes, before the first layer reads what was gathered.

        Where it was made outside a pass, as for an optimizer, some weights may be unsharded with older codes: then for
        the one alone that has arrived.
        """
        old: list[Tensor] = []
        new: list[Tensor] = []
        together = self.made_in is not None
        states = [state for ref in self._states if (state := ref()) is not None]
        chosen = [state for state in states if together or state is arrived]
        self._states = [] if together else [weakref.ref(state) for state in states if state is not arrived]
        for state in chosen:
            if state.refresh is self:  # Not of a later one already, for a gather that has overtaken this one.
                assert state.stored is not None
                assert state.staged is not None
                for stored, staged in zip(state.stored[1:], state.staged[1:], strict=True):
                    if stored is not None and staged is not None:
                        old.append(stored)
                        new.append(staged)
        if not old:
            return
        # Autograd has saved them. It is to see no write: codes change alike, where FSDP2 gathers them again.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(old)):
            torch._foreach_copy_(old, new)
        if new[0].is_cuda:
            stream = torch.cuda.current_stream(new[0].device)
            for staged in new:
                staged.record_stream(stream)


def update_scales(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """What `DelayedScaling` needs once a step: makes the scales of the next one from the amaxes of this one.

    Other recipes need no call: each forward, and each backward, makes the scales of all sharded weights of the model
    anew before its first gather, with one all-reduce of amaxes for each group of ranks, 4 bytes a scale. Under them it
    does nothing, so that one loop serves all recipes.

    Args:
      model: after `convert` and `fully_shard`.
      group: the ranks that train this model, or this stage of a pipeline, if its parameters do not tell; they do not if
        none is a DTensor. As for `update_delayed`.

    Collective under `DelayedScaling`: call it on all ranks, after `optimizer.step()`; `update_delayed` has the formula.

    Weights of a model that was unpickled, and of `Linear`s made one by one, are refreshed each by itself, until this
    has seen the model that they are in.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> update_scales(convert(nn.Sequential(nn.Linear(4, 4)), CurrentScaling()))
    """
    check_model("update_scales", model)
    passes = Passes.of(model)
    for parameter in parameters_of(model):
        state = _state_of(parameter)
        if state is None or state.passes is passes:
            continue
        root = state.passes.root
        if root is None or getattr(root, "is_one_layer", False):  # Made by itself, it knows of no model but itself.
            state.passes = passes
    update_delayed(model, group)


def recast(parameters: Iterable[Tensor]) -> None:
    """Makes the codes of primary weights anew, of masters that an optimizer has changed. Collective.

    One max-reduction for each group of ranks. Under `DelayedScaling` the next gather does it, with the scales of then.
    """
    groups: dict[str, list[ShardOf]] = {}
    for parameter in parameters:
        state = _state_of(parameter)
        if state is None or state.primary is None or state.primary.master is None:
            continue
        if state.delayed is not None or not state.gathers:
            state.primary.load(state.primary.master)
        elif (found := state.shard_of(parameter)) is not None:
            groups.setdefault(found.plan.group.group_name, []).append(found)
    for weights in groups.values():
        _refresh(weights, None)
        _recast_all(weights)


@torch.no_grad()
def _recast_all(weights: Sequence[ShardOf]) -> None:
    """With one launch for all slices of a format, where they are."""
    for device in dict.fromkeys(weight.shard.device for weight in weights):
        slices = [weight for weight in weights if weight.plan.columns is None and weight.shard.device == device]
        if not slices:
            continue
        rooms = []
        for state, _, of_weight in slices:
            assert state.primary is not None
            rooms.append(state.primary.room(of_weight))
        cast_together(slices, rooms)
    for state, _, of_weight in weights:
        assert state.primary is not None
        if of_weight.columns is None:
            state.primary.end_cast(of_weight)
        else:
            assert state.staged is not None
            state.primary.cast(of_weight, state.staged.scale)


def _sharded_weights(model: nn.Module | None) -> Iterator[ShardOf]:
    """Those of our weights that are sharded now, and need scales, in the order of the model: on all ranks the same."""
    for parameter in () if model is None else parameters_of(model):
        state = _state_of(parameter)
        if state is None or not state.gathers or state.travels:
            continue
        if state.primary is not None and state.primary.codes is not None:
            continue
        found = state.shard_of(parameter)
        if found is not None:
            yield found


def _state_of(parameter: Tensor) -> ScaleState | None:
    local = local_of(parameter)
    state: ScaleState | None = getattr(local, "scale_state", None)
    return None if state is None or local.is_meta else state


@torch.no_grad()
def _refresh(weights: Sequence[ShardOf], made_in: object) -> None:
    """Makes the scales of weights that are cut over one group. All ranks give the same list."""
    if not all(weight.state.agreed for weight in weights):
        check_agree(weights)
    for delayed in (False, True):
        chosen = [weight for weight in weights if (weight.state.delayed is not None) is delayed]
        if chosen:
            made = delayed_scales(chosen) if delayed else made_scales(chosen)
            Refresh([weight.state for weight in chosen], made, made_in)
