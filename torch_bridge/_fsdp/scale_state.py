"""The scales of sharded weights, which every pass over the model makes anew.

Glossary, in the manner of FSDP2's own `_fsdp_param.py`. All code of this package uses these words.

  weight      the whole parameter, `[rows, columns]`; no rank holds it in high precision
  shard       what this rank holds of it in high precision: rows or columns, maybe none
  slice       a shard of rows, as flat elements of the row-major weight
  codes       the shard, cast with the scales of the weight: one uint8 tensor, 4-bit codes two a byte
  padded      codes with buffer for those of the longest shard, the rest zeros: what every rank sends
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

Autograd keeps codes and stored scales, not the weight. FSDP2 fill_count the memory of the codes anew before backward; so
scales are stored in memory that stays, and both are always of one weight, also in a graph that is older than a step: it
computes with the new weight then, as with plain FSDP2. Refreshes run on the stream where FSDP2 copies, commits on that
where layers compute, after all that has read the scales before.

Under `DelayedScaling` scales are those of earlier steps, and a refresh takes a copy of them. Before its first update a
weight has none: until ranks know that it has, a refresh makes them as of other weights.

A backward pass is a graph task of autograd. A forward pass is a call of the converted model: hooks on the model record
it. They are registered once FSDP2 shards a part of the model, and run before FSDP2's own hooks, which gather.
"""

from __future__ import annotations

import copy
import enum
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from qshard._core.flat_shards import FlatSlice
from qshard._core.operands import OperandSpec
from qshard._core.placement import Box, box_amax, cast_box
from qshard._core.quantize_steps import Scales
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec, fsdp_axis
from qshard.torch_bridge._fsdp.primary import Primary
from qshard.torch_bridge._ops.bind import dtype_name, into, ops
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.foreach import xp
from qshard.torch_bridge._torch_internals import backward_id, preserve_version_counter, spec_of


class Status(enum.Enum):
    """The stage of a weight in FSDP2."""

    PLAIN = enum.auto()
    """It has not asked for hooks: it does not gather the weight, or not yet."""
    SHARDED = enum.auto()
    """It gathers the weight, but not now."""
    GATHERING = enum.auto()
    """Codes have left this rank, and those of all ranks have not arrived."""


class ShardPlan:
    """How one weight is cut, and which part of it the shard of this rank is. Made once, then looked up.

    Args:
      shape: of the weight, of which FSDP2 has cut the rows, or columns into even parts.
      mesh, mesh_dim: the ranks that it is cut over are one axis of it.

    Attributes:
      group, device: of the ranks; where they compute. An offloaded shard is elsewhere.
      data_shape: of the codes of the weight.
      padded_shape: of the padded codes.
      buffer: bytes to cast into: 4-bit codes need one more than there are, for half a byte that no cut of rows leaves.
      packs_columns: whether FSDP2, which joins columns, must be told that codes have fewer than the weight.
      slice: the flat slice that the shard is; an empty one if it is a box.
      box: where columns of blocks are in the weight; None: the shard is a slice.
      block: what shares a scale; all of it, if there are no blocks.
      described: what all ranks must have in common.

    Raises:
      NotImplementedError: ranks share a byte. All of them raise.
    """

    def __init__(self, name: str, fmt: Format, shape: tuple[int, ...], shard: Tensor, mesh: DeviceMesh, mesh_dim: int):
        rows, columns = shape
        width = shard.shape[1]
        of_rows, ranks, per_byte = width == columns, mesh.size(mesh_dim), fmt.element.codes_per_byte
        if width % per_byte:
            raise NotImplementedError(
                f"fully_shard: {name} {tuple(shape)} is cut into {ranks} shards of {width} columns, but "
                f"{per_byte} codes of {fmt} share a byte; cut its rows"
            )
        where = plane(fmt, shape, Usage.ROWWISE, op="fully_shard")
        longest = -(-(rows if of_rows else columns) // ranks)  # As FSDP2 and `torch.chunk` cut.
        start = longest * mesh.get_local_rank(mesh_dim)
        self.group, kind = mesh.get_group(mesh_dim), mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.fmt, self.shape, self.dtype = fmt, (rows, columns), dtype_name(shard.dtype)
        self.data_shape = where.data_shape
        self.padded_shape = (longest if of_rows else rows, width // per_byte)
        self.buffer_size = math.prod(self.padded_shape) + per_byte - 1
        self.packs_columns = fmt.element.packed and not of_rows
        self.described = (self.shape, self.dtype, of_rows, ranks)
        self.slice = FlatSlice(self.shape, fmt, self.dtype, min(rows, start) * columns if of_rows else 0)
        self.block = where.scaled_shape
        self.box: Box | None = None
        if not of_rows and not fmt.per_tensor:  # Under one scale places do not matter: any shard is a slice.
            self.box = Box(self.shape, (0, start), (rows, width))

    def note_amaxes_of_columns(self, shard: Tensor, grid: Tensor, whole: Tensor | None) -> None:
        """Writes what columns of blocks know of the amaxes of the weight, those of its blocks and its own."""
        if self.box is None or not shard.numel():
            return
        found = box_amax(ops, xp, shard, self.box, self.block, grid)
        if whole is not None:
            whole.copy_(ops.amax_tensor(found))

    def buffer_in(self, part: Tensor) -> Tensor:
        """Room to cast into, at the beginning of some bytes: where codes have a byte each, as padded codes."""
        if self.buffer_size == self.padded_shape[0] * self.padded_shape[1]:
            return part.as_strided(self.padded_shape, (self.padded_shape[1], 1))
        return part[: self.buffer_size]

    def padded_view(self, buffer: Tensor) -> Tensor:
        if buffer.shape == self.padded_shape:
            return buffer
        return buffer.as_strided(self.padded_shape, (self.padded_shape[1], 1))

    def cast_columns(self, shard: Tensor, scale: Tensor, buffer: Tensor) -> None:
        """Casts columns of blocks. Slices are cast by `FlatPlan.cast`."""
        assert self.box is not None
        if not shard.numel():
            return
        codes, of_blocks = self.padded_view(buffer), scale[self.box.blocks(self.block)].contiguous()
        outer = self.box.aligned(self.block)
        made = cast_box(into(codes) if outer == self.box else ops, xp, shard, self.box, self.fmt, self.block, of_blocks)
        if outer != self.box:
            first = self.box.within(outer)[1].start // self.fmt.element.codes_per_byte
            codes.copy_(made[:, first : first + codes.shape[1]])

    def codes(self, gathered: Tensor) -> Tensor:
        """The codes of the weight: the memory that was gathered, without the padding at its end."""
        return gathered.as_strided(self.data_shape, (self.data_shape[1], 1))


class ScaleState:
    """What a rank knows of one weight. Every tensor object that stands for the weight refers to the one state.

    It is no attribute of a tensor that FSDP2 may replace: it does so on unevenly sharded ranks only, and ranks that
    lost their scales would start collectives that the others never join.

    Attributes:
      fill_count: how often random values have been put there.
      operand: how the weight is quantized.
      refusal: why FSDP2 cannot gather it; None if it can.
      delayed: holds the scales instead, if the recipe is `DelayedScaling`.
      primary: its master and codes, if it is a primary weight.
      shape: of the weight, when it was made.
      whole, first: the shape of what FSDP2 has cut, and where in it the shard begins, in elements.
      status: what FSDP2 does with it now.
      staged, stored: its scales; None before the first refresh.
      prefetched: codes that were cast along with those of another weight.
      group: a weak reference to FSDP2's group of parameters that it is in; None: nobody has looked.
      part: under tensor parallelism, which part of a larger weight this one is. One scale serves all parts.
    """

    def __init__(
        self, recipe: Recipe, name: str, root: nn.Module | None = None, device: Any = None, primary: bool = False
    ):
        self.operand = OperandSpec.of(recipe, Role.WEIGHT, Usage.ROWWISE, op="quantize")
        self.fmt = self.operand.format
        self.name = name
        self.refusal = self.fmt.gather_refusal
        self.delayed = DelayedScale(recipe, Role.WEIGHT, device) if recipe.stateful else None
        self.primary = Primary(name) if primary else None
        self.shape: tuple[int, ...] = ()
        self.part: ShardSpec | None = None
        self.whole: tuple[int, ...] = ()
        self.first = self.fill_count = 0
        self.status = Status.PLAIN
        self.staged: Scales | None = None
        self.stored: Scales | None = None
        self.refresh: Refresh | None = None
        self.prefetched: PrefetchedCodes | None = None
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
        for name in ("shape", "part", "whole", "first"):
            setattr(copied, name, getattr(self, name))
        copied.status = Status.SHARDED if self.gathers else Status.PLAIN
        return copied

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers it: it has asked for hooks."""
        return self.status is not Status.PLAIN

    @property
    def is_sealed(self) -> bool:
        """Whether the parameter has no values: it is a primary weight, and they are its master."""
        return self.primary is not None and self.primary.master is not None

    def resident_shard(self, shard: Tensor) -> Tensor:
        """The shard that the parameter has: of one that is offloaded, FSDP2 gathers a copy."""
        root = self.passes.root
        for parameter in () if root is None else root.parameters():
            if state_of(parameter) is self:
                found: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
                return found
        return shard

    def note_split(self, shape: torch.Size) -> None:
        """Called for each tensor that is cut. The last one, before FSDP2 asks for hooks, is what FSDP2 has cut."""
        if not self.gathers:
            self.whole = tuple(shape)

    def note_start(self, first: int) -> None:
        """Called for each part that is copied: FSDP2 copies the one of this rank, which begins at element `first`."""
        if not self.gathers:
            self.first = first

    def shard_of(self, parameter: Tensor) -> WeightShard | None:
        """What this rank has of the weight, which is `parameter`; None if it is not sharded now."""
        if not isinstance(parameter, DTensor):
            return None
        known, axis = self._axis
        if known is not spec_of(parameter):  # A weak reference to the parameter would keep torch from moving it.
            axis = fsdp_axis(self.name, parameter, self.part)
            self._axis = (spec_of(parameter), axis)
        shard: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
        if self.primary is not None and self.primary.master is not None:
            shard = self.primary.master
        return WeightShard(self, shard, self.plan_of(shard, self.whole, parameter.device_mesh, axis))

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

    def end_gather(self, refresh: Refresh) -> Scales:
        """The stored scales of codes that have arrived, which were cast after `refresh`."""
        refresh.commit(self)
        self.status = Status.SHARDED
        assert self.stored is not None
        return self.stored


class WeightShard(NamedTuple):
    """A sharded weight, as a refresh takes it: its state, what this rank holds of it, and which part that is."""

    state: ScaleState
    shard: Tensor
    plan: ShardPlan

    @property
    def is_cast_in_gathers(self) -> bool:
        """Whether each gather casts it: a slice, with scales that are there before."""
        return self.state.primary is None and self.state.delayed is None and self.plan.box is None

    @property
    def staged(self) -> Scales:
        assert self.state.staged is not None
        return self.state.staged

    @property
    def primary(self) -> Primary:
        assert self.state.primary is not None
        return self.state.primary


class PrefetchedCodes(NamedTuple):
    """Codes that were cast in the hook of another weight of the same FSDP2 group.

    Attributes:
      refresh: the one that made their scales.
      memory: where the shard is.
    """

    buffer: Tensor
    refresh: Refresh
    memory: int


class Refresh:
    """Scales that were made together.

    Attributes:
      pass_id: the pass.
    """

    def __init__(self, states: Sequence[ScaleState], made: Sequence[Scales], pass_id: object):
        self.pass_id = pass_id
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
        together = self.pass_id is not None
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
        with torch.no_grad(), preserve_version_counter(tuple(old)):
            torch._foreach_copy_(old, new)
        if new[0].is_cuda:
            stream = torch.cuda.current_stream(new[0].device)
            for staged in new:
                staged.record_stream(stream)


def state_of(parameter: Tensor) -> ScaleState | None:
    local = local_of(parameter)
    state: ScaleState | None = getattr(local, "scale_state", None)
    return None if state is None or local.is_meta else state


class Passes:
    """The passes over one model. `Passes.of(model)` is always the same object.

    It does not keep the model: weights refer to it, and what tensors refer to is freed late, or never.
    """

    def __init__(self, root: nn.Module | None = None):
        self._root = None if root is None else weakref.ref(root)
        self._forward: object | None = None

    @classmethod
    def of(cls, root: nn.Module | None) -> Passes:
        """Without a model there are backward passes alone."""
        if root is None:
            return cls()
        found = _OF.get(root)
        passes = None if found is None else found()
        if passes is None:
            passes = cls(root)
            _OF[root] = weakref.ref(passes)  # States hold it, as long as there are any.
        return passes

    @property
    def root(self) -> nn.Module | None:
        return None if self._root is None else self._root()

    def now(self) -> object | None:
        """The pass that runs, to be compared with others; None if there is none that we know of."""
        task = backward_id()
        return self._forward if task is None else task

    def watch(self) -> None:
        """Sees to it that forward passes are seen. To ask again is cheap."""
        root = self.root
        if root is None:
            return
        hooks = root._forward_pre_hooks
        if next(iter(hooks.values()), None) is _begin_forward:
            return
        for key, hook in hooks.items():
            if hook is _begin_forward:
                hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
                return
        root.register_forward_pre_hook(_begin_forward, prepend=True)
        root.register_forward_hook(_end_forward)


_OF: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Passes]] = weakref.WeakKeyDictionary()


# Functions, not methods: a model is copied and pickled with its hooks. A model that is compiled as a whole, and its
# hooks with it, is not seen to run, so its weights are refreshed one by one.
def _begin_forward(module: nn.Module, args: Any) -> None:
    if not is_compiling():
        passes = Passes.of(module)
        passes._forward = object()


def _end_forward(module: nn.Module, args: Any, output: Any) -> None:
    if not is_compiling():
        Passes.of(module)._forward = None
