"""State of sharded weights on this rank: scales, refreshes, passes, and how a shard is cast.

Glossary, modelled on FSDP2's `_fsdp_param.py`. The whole package uses these terms.

  weight      the whole parameter, `[rows, columns]`; no rank has it in high precision
  stack       a weight `[E, rows, columns]`: matrices with their own scales, as of experts
  shard       the local high-precision part of it: rows, columns or matrices, possibly none
  slice       a shard as a flat range of the row-major weight
  codes       the shard, cast with the scales of the weight: uint8, with two 4-bit codes a byte
  padded      codes in a buffer for the longest shard, zeros after the end: the all-gather input
  gathered    the padded codes of all ranks, concatenated: the codes of the weight come first
  unsharded   gathered codes and scales as a `QuantizedTensor`, between a gather and the reshard
  scales      of the whole weight, equal on all ranks: computed from max-reduced amaxes, never gathered
  pass        one forward of the converted model, or one backward: its gathers use the weights as they are at its start
  refresh     computing the scales of several weights, on all ranks, with one max-reduction
  staged      scales as a refresh returned them; shards are cast with them
  stored      scales in memory that lives as long as the weight; the unsharded weight refers to them
  commit      copying scales from staged to stored

A scale belongs to the whole weight, so computing one is a collective, and ranks must agree on when. Only gathers
trigger it, and FSDP2 issues them in the same order on all ranks: the first gather of a pass refreshes all weights of
the model that are sharded over its group. Scales never outlive their pass, so writes to shards need no tracking: ranks
would have to agree on the dirty flag. A gather outside a pass, such as `unshard()`, refreshes its own weight alone,
with a reduction of its own.

Autograd saves codes and stored scales, not the weight. FSDP2 refills the memory of the codes before backward, and
stored scales are overwritten in place, so both always belong to the same weight. A graph that is older than an
optimizer step then computes with the new weight, as under plain FSDP2. Refreshes run on the stream where FSDP2 copies.
Commits run on the compute stream, after everything that read the previous scales.

Under `DelayedScaling` the scales come from earlier steps, and a refresh copies them. Before its first update a weight
has no scale: a refresh computes one as for other recipes, until ranks know that there is one.

A backward pass is a graph task of autograd. A forward pass is a call of the converted model, which hooks on the model
record. The hooks are registered when FSDP2 shards part of the model, and run before FSDP2's own hooks, which gather.
"""

from __future__ import annotations

import copy
import enum
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from qshard._core.operands import OperandSpec, two_formats_error
from qshard._core.quantize_steps import Scales
from qshard.formats import Usage
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._fsdp.primary import Primary
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._torch_internals import backward_id, preserve_version_counter, spec_of


class Status(enum.Enum):
    """Stage of a weight in FSDP2."""

    PLAIN = enum.auto()
    """FSDP2 has not requested the gather hooks: it does not shard the weight, or not yet."""
    SHARDED = enum.auto()
    """FSDP2 shards the weight, and no gather is running."""
    GATHERING = enum.auto()
    """The codes of this rank were sent, and the all-gather has not finished."""


class ScaleState:
    """State of one weight on this rank, shared by all tensor objects that stand for the weight.

    It is not an attribute of a tensor that FSDP2 may replace. FSDP2 replaces tensors on unevenly sharded ranks only,
    and ranks that lost their scales would start collectives that the others never join.

    Attributes:
      fmt: format of its codes; None if its layer has no recipe, so that values are gathered.
      refusal: why FSDP2 cannot gather it; None if it can.
      has_one_format: False if forward and dgrad use the weight in two formats.
      part: under tensor parallelism, the part of a larger weight that this weight is. One scale serves all parts.
      whole: shape of the tensor that FSDP2 shards.
      first: flat index of the local shard in `whole`.
      fill_count: how often random values were written to the weight.
      staged: scales of the last refresh; None before the first.
      stored: scales that the unsharded weight refers to; None before the first refresh.
      group: weak reference to the weight's `FSDPParamGroup`; None until it is looked up.
      prefetched: codes that were cast in the hook of another weight.
      whole_amax: under tensor parallelism, the `weight_amax.WholeAmax` of the last pass.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        name: str,
        root: nn.Module | None = None,
        device: Any = None,
        primary: bool = False,
        shape: tuple[int, ...] = (),
    ):
        self.name, self.shape = name, shape
        self.primary = Primary(name) if primary else None
        self.part: ShardSpec | None = None
        self.whole: tuple[int, ...] = ()
        self.first = self.fill_count = 0
        self.status = Status.PLAIN
        self.group: Callable[[], object | None] | None = None
        self.passes = Passes.of(root)
        self._axis: tuple[Any, int] = (None, 0)
        self._begin(recipe, device)

    def _begin(self, recipe: Recipe | None, device: Any) -> None:
        """Set everything that depends on the recipe. Scales come later."""
        self._recipe = recipe
        self.operand = None if recipe is None else OperandSpec.of(recipe, Role.WEIGHT, Usage.ROWWISE, op="quantize")
        self.fmt = None if self.operand is None else self.operand.format
        self.refusal = None if self.fmt is None else self.fmt.gather_refusal
        self.has_one_format = recipe is None or recipe.has_one_weight
        experts = self.shape[0] if len(self.shape) > 2 else None
        is_delayed = recipe is not None and recipe.stateful
        self.delayed = DelayedScale(recipe, Role.WEIGHT, device, experts) if recipe is not None and is_delayed else None
        self.staged: Scales | None = None
        self.stored: Scales | None = None
        self.refresh: Refresh | None = None
        self.prefetched: PrefetchedCodes | None = None
        self.whole_amax: Any = None
        self.agreed = False
        self._plans: dict[Any, ShardPlan] = {}
        self._last: tuple[Any, ShardPlan] | None = None

    def switch(self, recipe: Recipe | None, device: Any) -> None:
        """Change the recipe. Gathered codes of the old one must be freed. Masters and the sharding stay."""
        if self.stored is not None:  # Earlier graphs saved them, and their codes are gone: backward must raise.
            old = [part for part in self.stored[1:] if part is not None and not part.is_inference()]
            torch.autograd.graph.increment_version(old)
        self._begin(recipe, device)
        if self.primary is not None:
            self.primary.codes = None

    def check_recipe(self, recipe: Recipe | None, parameter: Tensor) -> None:
        """Raise unless FSDP2 can gather the weight `parameter`, which it shards, under another recipe."""
        other = copy.deepcopy(self)
        other.primary = self.primary
        other._begin(recipe, "meta")
        if other.fmt is not None:
            other.check_format()
            other.shard_of(parameter)

    def check_format(self) -> None:
        """Raise NotImplementedError if FSDP2 cannot gather a weight of this format. All ranks raise."""
        if not self.has_one_format:
            raise two_formats_error("fully_shard", self.name, ", or use DistributedDataParallel")
        if self.refusal is not None:
            raise NotImplementedError(
                f"fully_shard: {self.name} ({self.fmt}) is not a format that FSDP2 can gather: {self.refusal}; "
                "choose a weight format with 2-D blocks, such as MXFP8_32x32, or with a tensor scale"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleState:
        """Copy the state with scales of its own. If the model is copied too, it refers to the passes of the copy."""
        copied = ScaleState(self._recipe, self.name, memo.get(id(self.passes.root)), primary=self.primary is not None)
        copied.delayed = copy.deepcopy(self.delayed, memo)
        for name in ("shape", "part", "whole", "first"):
            setattr(copied, name, getattr(self, name))
        copied.status = Status.SHARDED if self.gathers else Status.PLAIN
        return copied

    @property
    def gathers(self) -> bool:
        return self.status is not Status.PLAIN

    @property
    def is_sealed(self) -> bool:
        """True if the parameter has no values: it is a primary weight, and its optimizer has the master."""
        return self.primary is not None and self.primary.master is not None

    def resident_shard(self, shard: Tensor) -> Tensor:
        """Return the shard in the parameter. FSDP2 passes a copy of an offloaded shard to the hooks."""
        root = self.passes.root
        for parameter in () if root is None else root.parameters():
            if state_of(parameter) is self:
                found: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
                return found
        return shard

    def note_split(self, shape: torch.Size) -> None:
        """Record the shape of a tensor that is split. The last split before FSDP2 requests hooks is FSDP2's own."""
        if not self.gathers:
            self.whole = tuple(shape)

    def note_start(self, first: int) -> None:
        """Record where a copied part starts. The last copy before FSDP2 requests hooks is the local shard."""
        if not self.gathers:
            self.first = first

    def shard_of(self, parameter: Tensor) -> WeightShard | None:
        """Return the local shard of the weight `parameter`; None if it is not sharded now."""
        if not isinstance(parameter, DTensor):
            return None
        known, axis = self._axis
        if known is not spec_of(parameter):  # A weak reference to the parameter would make `swap_tensors` fail.
            axis = self._axis_of(parameter)
            self._axis = (spec_of(parameter), axis)
        shard: Tensor = local_of(parameter).shard  # type: ignore[attr-defined]
        if self.primary is not None and self.primary.master is not None:
            shard = self.primary.master
        plan = self.plan_of("fully_shard", shard, self.whole, parameter.device_mesh, axis, self.part)
        return WeightShard(self, shard, plan)

    def _axis_of(self, parameter: DTensor) -> int:
        """Return the mesh axis over which FSDP2 shards a parameter. Axes of tensor parallelism come last."""
        axes = parameter.device_mesh.ndim - (0 if self.part is None else self.part.mesh.ndim)
        found = [axis for axis in range(axes) if not isinstance(parameter.placements[axis], Replicate)]
        if len(found) != 1:
            raise NotImplementedError(
                f"fully_shard: {self.name} {tuple(parameter.shape)} is sharded over {len(found)} mesh axes besides "
                "those of parallelize_module, but one is the limit; exclude the layer with convert(filter=)"
            )
        return found[0]

    def plan_of(
        self,
        op: str,
        shard: Tensor,
        shape: tuple[int, ...],
        mesh: DeviceMesh | None,
        mesh_dim: int | None,
        part: ShardSpec | None,
    ) -> ShardPlan:
        """Return the plan of a shard. `shape` is the shape of the tensor that is sharded over an axis of the mesh.

        Errors name the caller `op`.
        """
        key = (mesh, mesh_dim, shape, shard.shape, shard.dtype, shard.device, part)
        if self._last is not None and self._last[0] == key:  # Faster than hashing the key.
            return self._last[1]
        plan = self._plans.get(key)
        if plan is None:
            assert self.fmt is not None
            delayed = self.delayed is not None
            plan = ShardPlan(op, self.name, self.fmt, shard, shape, mesh, mesh_dim, part, delayed)
            self._plans[key] = plan
        self._last = (key, plan)
        return plan


class WeightShard(NamedTuple):
    """A weight in a refresh: its state, the local shard, and the plan of the shard."""

    state: ScaleState
    shard: Tensor
    plan: ShardPlan

    @property
    def is_cast_in_gathers(self) -> bool:
        """True if every gather casts the shard with existing scales: a slice, neither primary nor delayed."""
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
    """Codes that another weight's hook has cast, valid for scales of `refresh` and a shard at address `memory`."""

    buffer: Tensor
    refresh: Refresh
    memory: int


class Refresh:
    """Scales that were computed together, in the pass `pass_id`, which is None outside of a pass."""

    def __init__(self, states: Sequence[ScaleState], scales: Sequence[Scales], pass_id: object):
        self.pass_id = pass_id
        self._states = [weakref.ref(state) for state in states]  # States refer to their last refresh.
        for state, new in zip(states, scales, strict=True):
            state.staged, state.refresh = new, self
            if state.stored is None:
                with torch.inference_mode(False):  # A later refresh, in training, writes to it.
                    of_planes = (None if part is None else torch.empty_like(part) for part in new[1:])
                    state.stored = Scales(new.scale, *of_planes)

    def commit(self, arrived: ScaleState) -> None:
        """Copy staged scales to stored ones, on the compute stream, before a layer reads the gathered codes.

        The first gather of a pass commits all weights. After a refresh outside a pass, as by an optimizer, other
        weights may still be unsharded with older codes, so only the scales of `arrived` are committed.
        """
        in_pass = self.pass_id is not None
        states = [state for ref in self._states if (state := ref()) is not None]
        chosen = [state for state in states if in_pass or state is arrived]
        self._states = [] if in_pass else [weakref.ref(state) for state in states if state is not arrived]
        pairs = [
            (stored, staged)
            for state in chosen
            if state.refresh is self and state.stored and state.staged  # A later gather may have refreshed it already.
            for stored, staged in zip(state.stored[1:], state.staged[1:], strict=True)
            if stored is not None and staged is not None
        ]
        if not pairs:
            return
        old, new = [stored for stored, _ in pairs], [staged for _, staged in pairs]
        # Autograd has saved the stored scales. It must not count this write: FSDP2 refills the codes to match.
        with torch.no_grad(), preserve_version_counter(tuple(old)):
            torch._foreach_copy_(old, new)
        if new[0].is_cuda:
            stream = torch.cuda.current_stream(new[0].device)
            for staged in new:
                staged.record_stream(stream)


def state_of(parameter: Tensor) -> ScaleState | None:
    """Return the state of a sharded or unsharded weight; None for other tensors and for weights on meta."""
    local = local_of(parameter)
    state: ScaleState | None = getattr(local, "scale_state", None)
    return None if state is None or local.is_meta else state


class Passes:
    """Forward and backward passes over one model. `Passes.of(model)` always returns the same object.

    It refers to the model weakly: weights refer to this object, and objects that tensors refer to may never be freed.
    """

    def __init__(self, root: nn.Module | None = None):
        self._root = None if root is None else weakref.ref(root)
        self._forward: object | None = None

    @classmethod
    def of(cls, root: nn.Module | None) -> Passes:
        """Return the passes of a model. Without a model only backward passes are known."""
        if root is None:
            return cls()
        found = _OF.get(root)
        if found is None or (passes := found()) is None:
            passes = cls(root)
            _OF[root] = weakref.ref(passes)  # States keep it alive.
        return passes

    @property
    def root(self) -> nn.Module | None:
        return None if self._root is None else self._root()

    def now(self) -> object | None:
        """Return an identifier of the running pass, to be compared with others; None outside of a pass."""
        task = backward_id()
        return self._forward if task is None else task

    def watch(self) -> None:
        """Register the hooks that record forward passes, ahead of all other hooks. Repeated calls are cheap."""
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
        root.register_forward_hook(_end_forward, always_call=True)  # Else a forward that raises would never end.


_OF: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Passes]] = weakref.WeakKeyDictionary()


# Functions, not methods: a model is copied and pickled with its hooks. The hooks do nothing in a model that is compiled
# as a whole, so its weights are refreshed one by one.
def _begin_forward(module: nn.Module, args: Any) -> None:
    if not is_compiling():
        Passes.of(module)._forward = object()


def _end_forward(module: nn.Module, args: Any, output: Any) -> None:
    if not is_compiling():
        Passes.of(module)._forward = None
