"""State dicts of ZeRO: exact masters under the names and in the shapes of the weights, for any sharding.

With one rank they contain plain tensors. With more, each tensor is a `SlicedState`, a DTensor subclass with a flat
slice on each rank. `torch.distributed.checkpoint` saves it as boxes and loads it into any other sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from qshard._core.optimizers.adam import BLOCK
from qshard._core.placement import Box, slice_boxes
from qshard._core.validation import quote
from qshard.torch_bridge._optim.slices import gather_parts
from qshard.torch_bridge._torch_internals import SKIPS_DISPATCH_OF_DTENSORS, DTensorSpec, TensorMeta, pytree
from qshard.torch_bridge._zero.buffers import FlatBuffer
from qshard.torch_bridge._zero.placeholders import WeightPlaceholder, own_part
from qshard.torch_bridge._zero.schedule import Hook
from qshard.torch_bridge._zero.weight import Ranks, ZeroParameter

aten = torch.ops.aten
_OPS: dict[Any, Any] = {Tensor.detach: aten.detach.default, Tensor.clone: aten.clone.default}
_OF_METADATA = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.data_ptr, Tensor.is_floating_point)
_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)


class SlicedState(DTensor):
    """A tensor that is sharded into flat slices, in the form of a DTensor. This rank's slice begins at element `start`.

    A real DTensor is sharded along its axes. This one can be saved, loaded, gathered and copied to the CPU; other ops
    raise. A load calls the function `on_write` before it writes to the slice. A copy would copy the object of a method.
    """

    local: Tensor
    start: int
    slices: Sequence[tuple[int, int]]
    label: str
    on_write: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        shape: Sequence[int],
        slices: Sequence[tuple[int, int]],
        mesh: DeviceMesh,
        name: str,
        on_write: Callable[[], None],
    ) -> Any:
        size = torch.Size(shape)
        meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
        spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
        # A view would give the wrapper its offset, and `data_ptr` other than 0, which copies would read.
        self: Any = super().__new__(cls, local.new_empty(0), spec, requires_grad=False)
        self._local_tensor = local
        self.local, self.slices, self.label, self.on_write = local, slices, name, on_write
        self.start = slices[mesh.get_local_rank()][0]
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def _like(self, local: Tensor) -> SlicedState:
        return SlicedState(local, self.shape, self.slices, self.device_mesh, self.label, lambda: None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stop = self.start + self.local.numel()
        return (
            f"SlicedState({self.label}, shape={tuple(self.shape)}, dtype={self.dtype}, elements {self.start} to {stop})"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `__torch_dispatch__` where torch would compute with the local slices, as if they were whole tensors."""
        self, run = args[0] if args else None, super().__torch_function__
        is_attribute = func in _OF_METADATA or getattr(func, "__name__", "") == "__get__"
        is_load = func is Tensor.copy_ and isinstance(self, WeightPlaceholder)
        if not SKIPS_DISPATCH_OF_DTENSORS or is_attribute or is_load:
            return run(func, types, args, kwargs or {})
        if func in _MOVES and isinstance(self, SlicedState):
            moved: Any = run(func, types, args, kwargs or {})
            if moved.dtype == self.dtype:
                return moved if isinstance(moved, SlicedState) else self._like(moved.to_local())
        return cls.__torch_dispatch__(_OPS.get(func, func), types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self = args[0] if args else None
        if isinstance(self, SlicedState):
            if func in (aten.detach.default, aten.alias.default):
                return SlicedState(self.local, self.shape, self.slices, self.device_mesh, self.label, self.on_write)
            if func is aten.clone.default:
                return self._like(self.local.clone())
            if func is aten._to_copy.default and (kwargs or {}).get("dtype", self.dtype) == self.dtype:
                return self._like(self.local.to((kwargs or {}).get("device", self.device)))
        leaves = pytree.tree_leaves((args, kwargs))
        found = next(leaf for leaf in leaves if isinstance(leaf, SlicedState))
        raise RuntimeError(
            f"ZeroOptimizer: {found.label} {tuple(found.shape)} of a state dict is the slice of this rank; save it "
            "with torch.distributed.checkpoint,\nor call get_model_state_dict or get_optimizer_state_dict with "
            "full_state_dict=True for whole tensors"
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor on every rank. Collective. `grad_placements` is ignored."""
        group = self.device_mesh.get_group()
        lengths = [stop - start for start, stop in self.slices]
        device = torch.device(self.device_mesh.device_type)
        own = self.local if self.local.device.type == device.type else self.local.to(device)
        if own.itemsize == 1:  # FP8: not every backend gathers it.
            own = own.view(torch.uint8)
        parts = gather_parts(own, lengths, group)
        return torch.cat(parts).view(self.dtype).view(self.shape)

    def redistribute(self, *_: Any, **__: Any) -> DTensor:
        """Return the whole tensor as a replicated DTensor, for full state dicts. Collective."""
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return a placeholder that accepts a copy of the whole tensor and keeps the slice, for full state dicts."""
        placeholder: Tensor = WeightPlaceholder(
            self.local, self.start, self.shape, self.dtype, self.label, self.on_write
        )
        return placeholder

    def new_empty(self, size: Any, *, device: Any = None, **_: Any) -> SlicedState:  # type: ignore[override]
        """Return a slice for a copy on another device. `dcp.async_save` calls it, and then copies all attributes.

        It is a method because torch 2.11 does not call `__torch_dispatch__` of a subclass of DTensor.
        """
        assert tuple(size) == tuple(self.shape)
        return self._like(self.local.new_empty(self.local.shape, device=device))

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedState:
        return memo.setdefault(id(self), self._like(self.local.clone()))  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"ZeroOptimizer: {self.label} of a state dict is the slice of this rank, and cannot be pickled; save with "
            "torch.distributed.checkpoint,\nor save get_model_state_dict and get_optimizer_state_dict with "
            "full_state_dict=True"
        )

    def _boxes(self) -> list[Box]:
        return list(slice_boxes(tuple(self.shape), self.start, self.start + self.local.numel()))

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the chunks to load. Every rank calls it in a load, also one without elements."""
        self.on_write()
        return [_chunk(box) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        box = next(box for box in self._boxes() if index.offset == torch.Size(box.start))
        first = box.philox_offset() - self.start
        return self.local[first : first + math.prod(box.size)].view(box.size)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.size))


class StateDicts:
    """Converts between slices of this rank and entries of state dicts.

    Args:
      ranks: the ranks that hold the slices.
      device: their device.
      layout: identifies model, stage and number of ranks. A state dict with masters loads only if it has the same.
      weights: all weights, in the order of their masters in a state dict of the optimizer.
      ordered: all weights, in the order of the optimizer's parameters.
      on_write: called by loads of masters.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        layout: str,
        weights: Sequence[ZeroParameter],
        ordered: Sequence[ZeroParameter],
        on_write: Callable[[], None],
    ):
        self._ranks, self._device, self._layout, self._on_write = ranks, device, layout, on_write
        self._weights, self._ordered = weights, ordered
        self._mesh: DeviceMesh | None = None

    def of_optimizer(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of `Adam` with states in whole shapes and, under "zero", the masters."""
        state = {
            key: {name: _each(self.entry, self._ordered[key], name, value) for name, value in values.items()}
            for key, values in given["state"].items()
        }
        own = {
            "layout": self._layout,
            "rank": self._ranks.rank,
            "masters": [self.entry(w, "master", w.master, master=True) for w in self._weights],
        }
        return {**given, "state": state, "zero": own}

    def local_slices(self, state_dict: dict[str, Any], sizes: list[int]) -> tuple[dict[Any, Any], list[Tensor]]:
        """Return this rank's slices of the states, and of the masters if there are any: inverts `of_optimizer`.

        `sizes` are the numbers of parameters of the optimizer's groups.

        Raises:
          ValueError: the states belong to another model, or the masters to another layout or rank.
        """
        own = state_dict.get("zero")
        if own is not None and (own.get("layout"), own.get("rank")) != (self._layout, self._ranks.rank):
            raise ValueError(
                f"ZeroOptimizer: state (layout {str(own.get('layout'))[:8]}, rank {own.get('rank')}) does not match "
                f"layout {self._layout[:8]}, rank {self._ranks.rank}; load it with the same model, stage and number of "
                "ranks, or save with get_optimizer_state_dict"
            )
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        weights = dict(zip(names, self._ordered, strict=False))
        given = [len(group["params"]) for group in state_dict["param_groups"]]
        strays = [key for key in state_dict["state"] if key not in weights]
        if given != sizes or strays:
            has = f"a parameter {strays[0]!r} that no group has" if given == sizes else f"groups of {given} parameters"
            raise ValueError(
                f"ZeroOptimizer: state (of {has}) does not match the groups of {sizes} of this optimizer; load a state "
                "of the same model, with the same settings"
            )
        states = {
            key: {name: _each(self.local_slice, weights[key], name, value) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        }
        masters = [] if own is None else own["masters"]
        return states, [self.local_slice(w, "master", m) for w, m in zip(self._weights, masters, strict=False)]

    def entry(self, weight: ZeroParameter, name: str, local: Tensor, *, master: bool = False) -> Tensor:
        """Return a slice of the master, or of a state, as the state dict entry of the whole tensor."""
        local = local.detach().view(-1)
        shape, slices = _layout(weight, name)
        if self._ranks.size == 1:
            return local.view(shape)
        if self._mesh is None:
            assert isinstance(self._ranks.group, dist.ProcessGroup)
            self._mesh = DeviceMesh.from_group(self._ranks.group, self._device.type)
        on_write = self._on_write if master else _nothing
        state: Tensor = SlicedState(local, shape, slices, self._mesh, f"{weight.name} ({name})", on_write)
        return state

    def local_slice(self, weight: ZeroParameter, name: str, value: Tensor) -> Tensor:
        """Return this rank's slice of a state dict entry, in the optimizer's shape: `[1, n]`, or `[n]`."""
        shape, slices = _layout(weight, name)
        if name.endswith("_scale_inv") and tuple(value.shape) == _blocks_of_rows(weight):
            shape = tuple(value.shape)  # Of `Adam`: the same blocks, row by row.
        start, stop = slices[self._ranks.rank]
        part = own_part(value, shape, start, stop - start, f"{weight.name} ({name})")
        return part.view(1, -1) if weight.master.ndim > 1 else part

    def watch(self, model: nn.Module, flats: Sequence[FlatBuffer], publish: Callable[[], None]) -> None:
        """Register hooks that put masters into state dicts of the model, and load them from there."""
        owners: dict[int, tuple[nn.Module, list[tuple[str, ZeroParameter, FlatBuffer]]]] = {}
        for flat in flats:
            for weight in flat.weights:
                for module, name in weight.owners:
                    owners.setdefault(id(module), (module, []))[1].append((name, weight, flat))
        loading = False

        def put_masters(
            weights: list[tuple[str, ZeroParameter, FlatBuffer]], state_dict: dict[str, Any], prefix: str
        ) -> None:
            for name, weight, _ in weights:
                if prefix + name in state_dict:
                    state_dict[prefix + name] = self.entry(weight, "master", weight.master, master=True)

        def before_load(
            module: nn.Module, weights: list[tuple[str, ZeroParameter, FlatBuffer]], metadata: dict[str, Any]
        ) -> None:
            if metadata.get("assign_to_params_buffers", False):
                raise RuntimeError(
                    f"ZeroOptimizer: load_state_dict of {type(module).__name__} with assign=True would replace its "
                    "parameters; load without assign"
                )
            for name, weight, _ in weights:
                module._parameters[name] = weight.placeholder

        def after_load(module: nn.Module, weights: list[tuple[str, ZeroParameter, FlatBuffer]]) -> None:
            for name, weight, flat in weights:
                module._parameters[name] = weight.parameter if flat.in_use else weight.visible
            if not loading:
                publish()

        def begin(*_: Any) -> None:
            nonlocal loading
            loading = True

        def end(*_: Any) -> None:
            nonlocal loading
            loading = False
            publish()

        for module, weights in owners.values():
            module.register_state_dict_post_hook(Hook(lambda _, d, p, __, weights=weights: put_masters(weights, d, p)))
            module.register_load_state_dict_pre_hook(
                Hook(lambda m, _, __, metadata, *___, weights=weights: before_load(m, weights, metadata))
            )
            module.register_load_state_dict_post_hook(Hook(lambda m, _, weights=weights: after_load(m, weights)))
        model.register_load_state_dict_pre_hook(Hook(begin))
        model.register_load_state_dict_post_hook(Hook(end))


def check_is_state(state_dict: Any) -> None:
    """Raise ValueError if an object is not a state dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"ZeroOptimizer: state_dict ({quote(state_dict)}) is not the state of an optimizer; pass the result of "
            "state_dict(), which has 'state' and 'param_groups'"
        )


def _each(change: Callable[[ZeroParameter, str, Tensor], Tensor], weight: ZeroParameter, name: str, value: Any) -> Any:
    """Apply `change` to elementwise states, but not to step numbers. A nested dict has the bytes of FP8 states."""
    if isinstance(value, dict):
        return {key: _each(change, weight, name, part) for key, part in value.items()}
    return change(weight, name, value) if isinstance(value, Tensor) and name != "step" else value


def _layout(weight: ZeroParameter, name: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Return the shape of a state and the slices of all ranks. No boundary splits a block of scaled states."""
    if not name.endswith("_scale_inv"):
        return weight.shape, weight.slices
    shape = (1, -(-weight.size // BLOCK))
    return shape, [(-(-start // BLOCK), -(-stop // BLOCK)) for start, stop in weight.slices]


def _blocks_of_rows(weight: ZeroParameter) -> tuple[int, int] | None:
    """Return the shape of scales in a state of `Adam`; None if a block of the flattened weight joins two rows."""
    columns = math.prod(weight.shape[1:])
    return None if columns % BLOCK else (weight.shape[0], columns // BLOCK)


def _nothing() -> None:
    pass
