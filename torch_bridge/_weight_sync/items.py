"""The parameters and buffers of a model as items of a weight stream, and the facts that decide how each is gathered."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard._core.name_patterns import NamePatterns
from qshard._core.serialization import Description
from qshard._files.engine_formats import EngineTensor
from qshard._files.engine_stream import EngineWeight, stream_tensors
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import plane
from qshard.recipes import Recipe
from qshard.torch_bridge._convert.export import entries_of
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._fsdp.code_gather import row_shard_plan
from qshard.torch_bridge._fsdp.shard_plan import ShardPlan
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.weight_module import WeightModule
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._weight_sync.names import Names, engine_weights, expert_names
from qshard.torch_bridge._zero.schedule import ZeroUnit

OP = "stream_weights"


class Item(NamedTuple):
    """A parameter or buffer of the model, without its values.

    Attributes:
      name: name in the model.
      names: the weights of the engine that it contains; none for a stack.
      fmt: format that it is quantized to; None: it is not.
      shape: shape of a weight, `[N, K]` for each expert of a stack.
      dtype: name of the dtype of its values.
      size: bytes that a rank has of it at the end.
      unit: the unit of a `ZeroOptimizer` that gathers it before it has memory.
      layout: of a stack, a 3-D parameter with a weight for each expert: "NK" or "KN"; None: it is none.
      experts: number of weights of a stack.
    """

    name: str
    names: Names
    fmt: Format | None
    shape: tuple[int, ...]
    dtype: str
    size: int
    unit: ZeroUnit | None
    layout: str | None
    experts: int

    @property
    def what(self) -> Description:
        assert self.fmt is not None
        dtype = self.dtype if self.dtype in FLOATS else "bfloat16"
        return Description(format=self.fmt, shape=self.shape, dtype=dtype, planes=(Usage.ROWWISE,))

    def tensors(self, format: str, weight: EngineWeight) -> tuple[EngineTensor, ...]:
        """Plan the tensors of a weight. Raises ValueError if the engine's format cannot hold it."""
        return stream_tensors(format, weight, self.what, OP)

    def of_expert(self, expert: int) -> list[EngineWeight]:
        """Return the weights of the engine for one expert of a stack."""
        return expert_names(self.name, expert, self.shape[0])

    @property
    def first_weights(self) -> Sequence[EngineWeight]:
        """The weights of the engine on the first rank of expert parallelism, or of the first expert of a stack."""
        return self.names.of_ranks[0] if self.layout is None else self.of_expert(0)

    def check(self, format: str) -> None:
        """Raise ValueError if the engine's format cannot hold the weights."""
        if self.fmt is not None:
            for weight in self.first_weights:
                self.tensors(format, weight)


Formats = tuple[tuple[str, Format | None], ...]
"""Pattern of names -> format, in order of precedence. None: values. Other weights have the format of their recipe."""


def items_of(model: nn.Module, formats: Formats) -> list[Item]:
    """Return the parameters and buffers of a model, each once, in the order of its state dict.

    Raises ValueError if a pattern of `formats` has no effect.
    """
    names, modules = engine_weights(model), dict(model.named_modules(remove_duplicate=False))
    entries, rules = entries_of(model), dict(formats)
    patterns = NamePatterns(rules, [*modules, *(name for name, _ in entries)])
    patterns.check_used(OP, [_names_of(name) for name, value in entries if _is_weight(modules, name, value)], "weight")
    units: dict[int, ZeroUnit] = {}
    for module in model.modules():
        if isinstance(unit := getattr(module, "zero_unit", None), ZeroUnit):
            units |= {id(weight.visible): unit for weight in unit.flat.weights}
    found: dict[int, Item] = {}
    for name, value in entries:
        module, layout, shape, own = modules[name.rpartition(".")[0]], None, tuple(value.shape), None
        if isinstance(local := local_of(value), QuantizedTensor):
            own = local.format
        elif _is_weight(modules, name, value):
            pattern = patterns.first(*_names_of(name))
            own = _weight_format(module) if pattern is None else rules[pattern]
        if own is not None and isinstance(module, Experts) and value.ndim == 3:
            layout = module.weight_layout
            shape = shape[:0:-1] if layout == "KN" else shape[1:]
        size = value.numel() * value.itemsize
        if own is not None and layout is None:
            size = plane(own, shape, Usage.ROWWISE, op=OP, name=name).nbytes
        of = names.get(name, Names.of(EngineWeight(name)))
        dtype = dtype_name(value.dtype)
        experts = 0 if layout is None else value.shape[0]
        found.setdefault(id(value), Item(name, of, own, shape, dtype, size, units.get(id(value)), layout, experts))
    return [*found.values()]


def _names_of(name: str) -> tuple[str, str]:
    """Return the names that a pattern may match for a parameter: of the parameter, and of its module."""
    return name, name.rpartition(".")[0]


def _is_weight(modules: Mapping[str, nn.Module], name: str, value: Tensor) -> bool:
    """Return whether a parameter can be quantized: the weight of a linear layer, or of all experts."""
    prefix, _, attribute = name.rpartition(".")
    module = modules[prefix]
    if isinstance(module, Experts):
        return value.ndim == 3
    is_linear = isinstance(module, nn.Linear | WeightLayer) and attribute == "weight"
    return is_linear and getattr(module, "weight_layout", "NK") == "NK"


def transposed_weights(model: nn.Module, entries: list[tuple[str, Tensor]]) -> list[str]:
    """Return the names of weights `[K, N]`, of converted `Conv1D` layers, that are sent as values. Codes stay codes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name, value in entries:
        prefix, _, attribute = name.rpartition(".")
        module, is_codes = modules[prefix], isinstance(local_of(value), QuantizedTensor)
        if isinstance(module, WeightLayer) and module.recipe is not None and module.weight_layout == "KN":
            found += [name] if attribute == "weight" and not is_codes else []
    return found


def _weight_format(module: nn.Module) -> Format | None:
    """Return the weight format of the recipe of a layer."""
    return None if not isinstance(module, WeightModule) or module.recipe is None else module.recipe.weight


def plan_of(item: Item, value: Tensor) -> ShardPlan | None:
    """Return the plan of a weight that is gathered as codes in a bucket; None for others."""
    is_codes = isinstance(local_of(value), QuantizedTensor)
    if item.fmt is None or item.layout is not None or is_codes:
        return None
    return row_shard_plan(OP, value, item.fmt) if item.fmt.slice_refusal is None else None


def rows_group_of(value: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that share the rows of a tensor evenly; None if it is not sharded so."""
    if not isinstance(value, DTensor):
        return None
    mesh = value.device_mesh
    axes = [i for i, each in enumerate(value.placements) if not isinstance(each, Replicate) and mesh.size(i) > 1]
    if len(axes) != 1 or value.placements[axes[0]] != Shard(0) or value.shape[0] % mesh.size(axes[0]):
        return None
    return mesh.get_group(axes[0])


class Facts:
    """The facts of a model that the plan of a stream depends on: modules, recipes, types and shardings of tensors.

    Tensors may be others than before. Nothing here keeps a model alive, or has weak references to tensors, which
    `torch.utils.swap_tensors` refuses.
    """

    def __init__(self, model: nn.Module, entries: list[tuple[str, Tensor]]):
        modules = [*model.modules()]
        first: dict[int, str] = {}
        self._known: list[tuple[Any, ...]] = [
            (id(module), _recipe_of(module), *(id(module.__dict__.get(name)) for name in _DECIDES))
            for module in modules
        ]
        self._known += [(name, first.setdefault(id(value), name), *_facts_of(value)) for name, value in entries]
        self._modules = [weakref.ref(module) for module in modules]
        self._meshes = [value.device_mesh for _, value in entries if isinstance(value, DTensor)]

    def holds(self, other: Facts) -> bool:
        """Return whether these facts, found earlier, still hold. An id may be used again once its object is gone."""
        return self._known == other._known and all(module() is not None for module in self._modules)


_DECIDES = ("ep_group", "zero_unit")
"""Attributes of modules. The plan keeps their objects, so that their ids stay unique, or is not kept itself."""


def _recipe_of(module: nn.Module) -> Recipe | None:
    """Return the recipe of a module: its value, because another recipe may get the id of one that is gone."""
    recipe = module.__dict__.get("recipe")
    return recipe if isinstance(recipe, Recipe) else None


def _facts_of(value: Tensor) -> tuple[Any, ...]:
    local = local_of(value)
    sharding = (id(value.device_mesh), value.placements) if isinstance(value, DTensor) else None
    if isinstance(local, QuantizedTensor):
        return value.shape, value.dtype, local.device, sharding, local.format
    state, memory = getattr(local, "scale_state", None), memory_of(value)
    delayed = None if state is None or state.delayed is None else state.fmt
    return value.shape, memory.dtype, memory.device, sharding, type(local), delayed
