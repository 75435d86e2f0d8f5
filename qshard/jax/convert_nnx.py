"""The linear layers of flax's nnx, as `convert` sees them. It needs flax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax import dot
from qshard.jax import nnx as modules
from qshard.jax.placement import Meaning, sharding_of
from qshard.names import check_float
from qshard.recipes import Recipe

_KINDS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_CALLS = {kind.__call__ for kind in (*_KINDS, nnx.LoRALinear)}


@dataclass(frozen=True)
class Layer:
    """A linear layer.

    Attributes:
      module: the layer.
    """

    module: Any

    @property
    def kernel(self) -> Any:
        return self.module.kernel.get_value()

    @property
    def contracted(self) -> tuple[int, ...]:
        """The axes of the kernel of one layer that are K."""
        if isinstance(self.module, nnx.Einsum):
            (x, w), out = self._terms
            return tuple(i for i, label in enumerate(w) if label in x and label not in out)
        return tuple(range(len(self.module.axis) if isinstance(self.module, nnx.LinearGeneral) else 1))

    @property
    def ndim(self) -> int:
        """Of the kernel of one layer."""
        if isinstance(self.module, nnx.Einsum):
            return len(self.module.kernel_shape)
        if isinstance(self.module, nnx.LinearGeneral):
            return len(self.module.in_features) + len(self.module.out_features)
        return 2

    @property
    def stacked(self) -> tuple[int, ...]:
        """The axes in front, where one module stands for several layers."""
        shape: tuple[int, ...] = self.kernel.shape
        return shape[: len(shape) - self.ndim]

    @property
    def _terms(self) -> tuple[list[str], str]:
        operands, out = self.module.einsum_str.replace("...", "").split("->")
        return operands.split(","), out

    @property
    def _attribute(self) -> str:
        return "einsum_op" if isinstance(self.module, nnx.Einsum) else "dot_general"

    @property
    def unfit(self) -> str | None:
        """Why it has to stay as it is."""
        module, kind = self.module, type(self.module)
        if kind.__call__ not in _CALLS:
            return f"{kind.__name__} overrides __call__"
        multiplier = getattr(module, self._attribute)
        known = (None, lax.dot_general, jax.numpy.einsum)
        if not isinstance(multiplier, dot.DotGeneral | modules.DotGeneral) and multiplier not in known:
            return f"its {self._attribute} was replaced"
        if getattr(module, "dot_general_cls", None) is not None:
            return "it has a dot_general_cls"
        if module.precision is not None and module.precision not in dot.DEFAULT_PRECISIONS:
            return f"it asks for precision {module.precision}"
        if getattr(module, "batch_axis", None):
            return "its kernel has batch axes"
        if isinstance(module, nnx.Einsum):
            (x, w), out = self._terms
            if any(label in x and label in out for label in w):
                return "its kernel has batch axes"
        return None

    def placed(self, meaning: Meaning, name: str) -> dict[str, Any]:
        """How its kernel lies over a mesh, as options of `linear`."""
        array, more = self.kernel, len(self.stacked)
        sharding = sharding_of(array) or _annotated(self.module.kernel)
        if sharding is None:
            return {}
        entries = (*sharding.spec, *[None] * array.ndim)[: array.ndim]
        if any(entry is not None for entry in entries[:more]):
            raise ValueError(
                f"convert: {name}.kernel {array.shape} is cut along its axes of layers ({sharding.spec}); cut what one "
                "layer has"
            )
        return meaning.options(
            f"{name}.kernel", NamedSharding(sharding.mesh, PartitionSpec(*entries[more:])), self.ndim
        )

    def check(self, name: str, asked: dot.DotGeneral) -> None:
        """Raises unless the recipe can take its kernel."""
        array = self.kernel
        check_float("convert", f"{name}.kernel", str(array.dtype))
        shape = array.shape[len(self.stacked) :]
        k = math.prod(shape[axis] for axis in self.contracted)
        why = dot.broken_blocks(asked.recipe, k, math.prod(shape) // max(1, k))
        if why is not None and asked.otherwise == "raise":
            raise ValueError(
                f"convert: {name}.kernel {shape} has {why}; leave it out with filter=, or pass otherwise='plain'"
            )

    def multiplier(self, recipe: Recipe, rngs: Any, options: dict[str, Any]) -> Any:
        """What its products become."""
        kept = recipe.stateful or recipe.stochastic
        if not kept and not isinstance(self.module, nnx.Einsum):
            return dot.DotGeneral(recipe, **options)
        kind = modules.Einsum if isinstance(self.module, nnx.Einsum) else modules.DotGeneral
        return kind(recipe, rngs=rngs, layers=self.stacked, **options)

    def put(self, multiplier: Any) -> None:
        module = isinstance(multiplier, nnx.Module)
        setattr(self.module, self._attribute, nnx.data(multiplier) if module else nnx.static(multiplier))
        if not isinstance(self.module.promote_dtype, _KernelAsItIs):
            self.module.promote_dtype = _KernelAsItIs(self.module.promote_dtype)


@dataclass(frozen=True)
class _KernelAsItIs:
    """A `promote_dtype` of a layer, but for the kernel: masters are quantized, not what bfloat16 makes of them."""

    promote: Any

    def __call__(self, args: tuple[Any, Any, Any], **options: Any) -> tuple[Any, Any, Any]:
        inputs, _, bias = self.promote(args, **options)
        return inputs, args[1], bias


def layers(model: nnx.Module) -> Iterator[tuple[str, Layer]]:
    """The linear layers of a model, by name."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, _KINDS):
            yield ".".join(map(str, path)), Layer(module)


def _annotated(kernel: Any) -> NamedSharding | None:
    """How a kernel is to lie, by its metadata."""
    if kernel.get_metadata("out_sharding", None) is None:
        return None
    mesh = kernel.get_metadata("mesh", None) or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"convert: a kernel is annotated with out_sharding {kernel.get_metadata('out_sharding')}, and no mesh is "
            "known; enter it with jax.set_mesh"
        )
    return NamedSharding(mesh, nnx.get_partition_spec(kernel).get_value())
