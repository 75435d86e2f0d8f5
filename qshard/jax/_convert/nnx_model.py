"""The linear layers of a flax nnx model: which ones `convert` can quantize, and how. Requires flax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.layer_recipes import is_name_of_table
from qshard._core.name_patterns import NamePatterns, closest_names
from qshard._core.validation import check_float
from qshard.jax import nnx as modules
from qshard.jax._convert import nnx_einsum
from qshard.jax._moe import layer as moe_layer
from qshard.jax._nn import dot_general
from qshard.jax._nn.dimension_numbers import Terms
from qshard.jax._sharding.inference import MeshAxisRoles, sharding_of
from qshard.recipes import Recipe

_KINDS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_TABLES_AND_NORMS = (nnx.Embed, nnx.LayerNorm, nnx.RMSNorm, nnx.BatchNorm, nnx.GroupNorm, nnx.InstanceNorm)
_EXCLUDE = {"convert": "filter=", "switch_recipe": "a pattern"}
_CALLS = {kind.__call__ for kind in (*_KINDS, nnx.LoRALinear)}


@dataclass(frozen=True)
class Layer:
    """A linear layer."""

    module: Any

    @property
    def parameter(self) -> str:
        """The name of the attribute with the kernel."""
        return "kernel"

    @property
    def kernel(self) -> Any:
        return self._variable.get_value()

    @property
    def _variable(self) -> Any:
        return getattr(self.module, self.parameter)

    @property
    def contracted(self) -> tuple[int, ...]:
        """The axes of the kernel of one layer that are K."""
        if isinstance(self.module, nnx.Einsum):
            (x, w), out = self._terms
            return tuple(i for i, label in enumerate(w) if label in x and label not in out)
        return tuple(range(len(self.module.axis) if isinstance(self.module, nnx.LinearGeneral) else 1))

    @property
    def ndim(self) -> int:
        """The number of axes of the kernel of one layer."""
        if isinstance(self.module, nnx.Einsum):
            return len(self.module.kernel_shape)
        if isinstance(self.module, nnx.LinearGeneral):
            return len(self.module.in_features) + len(self.module.out_features)
        return 2

    @property
    def stacked(self) -> tuple[int, ...]:
        """The sizes of leading axes of layers, if one module stands for several layers."""
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
        """The reason to leave the layer; None if it can be converted."""
        module, kind = self.module, type(self.module)
        if kind.__call__ not in _CALLS:
            return f"{kind.__name__} overrides __call__"
        multiplier = getattr(module, self._attribute)
        known = (None, lax.dot_general, jax.numpy.einsum)
        if not isinstance(multiplier, dot_general.DotGeneral | modules.DotGeneral) and multiplier not in known:
            return f"its {self._attribute} was replaced"
        if getattr(module, "dot_general_cls", None) is not None:
            return "it has a dot_general_cls"
        if module.precision is not None and module.precision not in dot_general.DEFAULT_PRECISIONS:
            return f"it has precision {module.precision}"
        if getattr(module, "batch_axis", None):
            return "its kernel has batch axes"
        if isinstance(module, nnx.Einsum):
            (x, w), out = self._terms
            if any(label in x and label in out for label in w):
                return "its kernel has batch axes"
        return None

    def sharding_options(self, meaning: MeshAxisRoles, name: str) -> dict[str, Any]:
        """The sharding of the kernel, as options of `linear`."""
        return self._options_of(self.parameter, meaning, name)

    def _options_of(self, weight: str, meaning: MeshAxisRoles, name: str) -> dict[str, Any]:
        """The sharding of the attribute `weight`, as options of `linear`."""
        variable, more = getattr(self.module, weight), len(self.stacked)
        array = variable.get_value()
        sharding = sharding_of(array) or _annotate(variable)
        if sharding is None:
            return {}
        entries = (*sharding.spec, *[None] * array.ndim)[: array.ndim]
        if any(entry is not None for entry in entries[:more]):
            raise ValueError(
                f"convert: {name}.{weight} {array.shape} is sharded along its stacked layer axes "
                f"({sharding.spec}); shard the axes of one layer"
            )
        return meaning.options(
            f"{name}.{weight}", NamedSharding(sharding.mesh, PartitionSpec(*entries[more:])), self.ndim
        )

    def check(self, name: str, multiplier: dot_general.DotGeneral, op: str = "convert") -> None:
        """Raise TypeError or ValueError unless the recipe can quantize the kernel."""
        array = self.kernel
        check_float(op, f"{name}.{self.parameter}", str(array.dtype))
        shape = array.shape[len(self.stacked) :]
        k = math.prod(shape[axis] for axis in self.contracted)
        why = dot_general.broken_blocks(multiplier.recipe, k, math.prod(shape) // max(1, k))
        if why is not None and multiplier.otherwise == "raise":
            raise ValueError(
                f"{op}: {name}.{self.parameter} {shape} has {why}; exclude it with {_EXCLUDE[op]}, or pass "
                "otherwise='plain' to convert"
            )

    def multiplier(self, recipe: Recipe, rngs: Any, options: dict[str, Any]) -> Any:
        """The `DotGeneral` or `Einsum` for the layer."""
        kept = recipe.stateful or recipe.stochastic
        if not kept and not isinstance(self.module, nnx.Einsum):
            return dot_general.DotGeneral(recipe, **options)
        kind = modules.Einsum if isinstance(self.module, nnx.Einsum) else modules.DotGeneral
        return kind(recipe, rngs=rngs, layers=self.stacked, **options)

    @property
    def installed(self) -> Any:
        """The module or function that multiplies now."""
        return getattr(self.module, self._attribute)

    @property
    def current(self) -> dot_general.DotGeneral | None:
        """The recipe and options of the layer now; None if it is not converted."""
        now = self.installed
        now = now.dot_general if isinstance(now, modules.DotGeneral) else now
        return now if isinstance(now, dot_general.DotGeneral) else None

    def switched(self, recipe: Recipe, rngs: Any) -> Any:
        """The multiplier of a converted layer with another recipe. It goes on with its random stream."""
        assert self.current is not None
        options = {"otherwise": self.current.otherwise, **self.current.options}
        return self._keep_stream(lambda source: self.multiplier(recipe, source, options), rngs)

    def _keep_stream(self, make: Callable[[Any], Any], rngs: Any) -> Any:
        own = getattr(self.installed, "rngs", None)
        made = make(rngs if own is None else own)
        if getattr(made, "rngs", None) is not None and own is not None:
            made.rngs = nnx.data(own)
        return made

    def revert(self) -> None:
        """Undo `install`."""
        plain = jax.numpy.einsum if isinstance(self.module, nnx.Einsum) else lax.dot_general
        setattr(self.module, self._attribute, nnx.static(plain))
        if isinstance(self.module.promote_dtype, _KeepKernelDtype):
            self.module.promote_dtype = self.module.promote_dtype.promote

    def install(self, multiplier: Any) -> None:
        """Make the layer multiply with `multiplier`, and quantize the kernel in its own dtype."""
        module = isinstance(multiplier, nnx.Module)
        setattr(self.module, self._attribute, nnx.data(multiplier) if module else nnx.static(multiplier))
        if not isinstance(self.module.promote_dtype, _KeepKernelDtype):
            self.module.promote_dtype = _KeepKernelDtype(self.module.promote_dtype)


@dataclass(frozen=True)
class _KeepKernelDtype:
    """A `promote_dtype` of a layer that leaves the kernel alone, so that masters are quantized, not bfloat16 copies."""

    promote: Any

    def __call__(self, args: tuple[Any, Any, Any], **options: Any) -> tuple[Any, Any, Any]:
        inputs, _, bias = self.promote(args, **options)
        return inputs, args[1], bias


@dataclass(frozen=True)
class EinsumModule(Layer):
    """A module with an einsum of its own, as a linear layer: the `equation` of x and the attribute named `weight`."""

    equation: str
    weight: str

    @property
    def parameter(self) -> str:
        return self.weight

    @property
    def ndim(self) -> int:
        return len(self.equation.partition("->")[0].partition(",")[2].replace(" ", ""))

    @property
    def contracted(self) -> tuple[int, ...]:
        terms = self._terms_of_layer
        return tuple(i for i, label in enumerate(terms.w) if label not in terms.out)

    @property
    def _terms_of_layer(self) -> Terms:
        return nnx_einsum.terms_of(self.equation, self.ndim)

    @property
    def unfit(self) -> str | None:
        terms = self._terms_of_layer
        return "its weight has batch axes" if {*terms.x} & {*terms.w} & {*terms.out} else None

    def check(self, name: str, multiplier: dot_general.DotGeneral, op: str = "convert") -> None:
        if not nnx_einsum.is_extended(type(self.module)):
            stacked = len(self.stacked)
            nnx_einsum.check_equation("convert", name, self.module, self.weight, self.equation, stacked)
        super().check(name, multiplier, op)

    def multiplier(self, recipe: Recipe, rngs: Any, options: dict[str, Any]) -> Any:
        return modules.Einsum(recipe, rngs=rngs, layers=self.stacked, **options)

    def install(self, multiplier: Any) -> None:
        object.__setattr__(self.module, "__class__", nnx_einsum.extend_class(type(self.module)))
        self.module.einsum_op = nnx.data(multiplier)
        self.module.einsum_rule = nnx.static((self.equation, self.weight))

    @property
    def installed(self) -> Any:
        return getattr(self.module, "einsum_op", None)

    def revert(self) -> None:
        object.__setattr__(self.module, "__class__", type(self.module)._extends)
        del self.module.einsum_op, self.module.einsum_rule


@dataclass(frozen=True)
class ExpertsLayer(Layer):
    """The experts of a `qshard.jax.nnx.MoE` as a linear layer. Both weights have one sharding."""

    weights = ("w13", "w2")

    @property
    def parameter(self) -> str:
        return self.weights[0]

    @property
    def contracted(self) -> tuple[int, ...]:
        return (1,)

    @property
    def ndim(self) -> int:
        return 3

    @property
    def unfit(self) -> str | None:
        kind = type(self.module)
        return None if kind.__call__ is modules.MoE.__call__ else f"{kind.__name__} overrides __call__"

    def sharding_options(self, meaning: MeshAxisRoles, name: str) -> dict[str, Any]:
        each = [self._options_of(weight, meaning, name) for weight in self.weights]
        if each[0] != each[1]:
            specs = [options["weight_spec"].spec if options else None for options in each]
            raise ValueError(
                f"convert: {name or 'the layer'} has w13 sharded as {specs[0]} and w2 as {specs[1]}; shard both along "
                "the same axes"
            )
        return each[0]

    def check(self, name: str, multiplier: dot_general.DotGeneral, op: str = "convert") -> None:
        for weight in self.weights:
            array = getattr(self.module, weight).get_value()
            check_float(op, f"{name}.{weight}", str(array.dtype))
            if (why := dot_general.broken_blocks(multiplier.recipe, *array.shape[-2:])) is not None:
                own = f"{name}.{weight}".removeprefix(".")
                raise ValueError(f"{op}: {own} {array.shape} has {why}; exclude it with {_EXCLUDE[op]}")

    def multiplier(self, recipe: Recipe, rngs: Any, options: dict[str, Any]) -> Any:
        own = {name: each for name, each in options.items() if name in moe_layer.OPTIONS}
        kept = dict(self.module.experts.options)
        return self._experts(recipe, rngs, kept | own)

    def _experts(self, recipe: Recipe | None, rngs: Any, options: Mapping[str, Any]) -> modules.GroupedMLP:
        return modules.GroupedMLP(recipe, self.kernel.shape[-3], rngs=rngs, layers=self.stacked, **options)

    def install(self, multiplier: Any) -> None:
        self.module.experts = multiplier

    @property
    def installed(self) -> Any:
        return self.module.experts

    @property
    def current(self) -> dot_general.DotGeneral | None:
        recipe = self.module.experts.recipe
        return None if recipe is None else dot_general.DotGeneral(recipe)

    def switched(self, recipe: Recipe, rngs: Any) -> Any:
        return self._keep_stream(lambda source: self.multiplier(recipe, source, {}), rngs)

    def revert(self) -> None:
        self.module.experts = self._experts(None, None, dict(self.module.experts.options))


class Candidate(NamedTuple):
    """A module with weights, as a linear layer; `layer` is None if it has to stay.

    Attributes:
      names: the qualified name of the module, then the names of its weights. A pattern may match any of them.
      why: the reason to leave the module, and what to do; None for a linear layer.
    """

    layer: Layer | None
    module: nnx.Module
    names: tuple[str, ...]
    why: str | None


def survey(model: nnx.Module, einsums: Mapping[str, str]) -> dict[str, Candidate]:
    """Find the modules with weights that may be operands of a product, by name.

    A weight is a float `nnx.Param` with at least two axes longer than 1. Embeddings, norms and adapters (`nnx.LoRA`)
    have none. Whether a module multiplies its weight cannot be seen from outside. `einsums` has equations by pattern of
    names, or the name of the attribute with the equation; ValueError if a pattern matches no such module, or one with
    several weights.
    """
    found: dict[str, Candidate] = {}
    used: set[str] = set()
    patterns = NamePatterns(einsums, names_of(model))
    for path, module in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        prefix = f"{name}." if name else ""
        if isinstance(module, _KINDS):
            found[name] = Candidate(Layer(module), module, (name, f"{prefix}kernel"), None)
            continue
        if isinstance(module, modules.MoE):
            weights_of_experts = (prefix + each for each in ExpertsLayer.weights)
            found[name] = Candidate(ExpertsLayer(module), module, (name, *weights_of_experts), None)
            continue
        if nnx_einsum.is_extended(type(module)):
            layer = EinsumModule(module, *cast(Any, module).einsum_rule)
            found[name] = Candidate(layer, module, (name, prefix + layer.weight), None)
            used |= {pattern for pattern in einsums if patterns.matches(pattern, name)}
            continue
        weights = _weights_of(module, path[-1] if path else "")
        if not weights:
            continue
        names = (name, *(prefix + each for each in weights))
        pattern = patterns.first(*names)
        equation = None if pattern is None else _equation_of(module, einsums[pattern])
        if pattern is None or equation is None:
            found[name] = Candidate(None, module, names, _why(module, weights))
            continue
        used.add(pattern)
        if len(weights) > 1:
            raise ValueError(
                f"convert: {name} ({type(module).__name__}) has weights {', '.join(weights)}, and einsums[{pattern!r}] "
                "is an equation of one; call qshard.jax.einsum in its __call__, or use a narrower pattern"
            )
        found[name] = Candidate(EinsumModule(module, equation, *weights), module, names, None)
    if unused := [pattern for pattern in einsums if pattern not in used]:
        known = [each for candidate in found.values() if candidate.layer is None for each in candidate.names]
        like = closest_names(unused[0], known)
        raise ValueError(f"convert: einsums ({unused[0]!r}) matches no module that can take an equation; {like}")
    return found


def names_of(model: nnx.Module) -> list[str]:
    return [".".join(map(str, path)) for path, _ in nnx.iter_modules(model)]


def _equation_of(module: Any, given: str) -> str | None:
    """The equation of a module: `given`, or its attribute of that name; None if the module has no such attribute."""
    if "->" in given:
        return given
    own = getattr(module, given, None)
    return own if isinstance(own, str) and "->" in own else None


def _weights_of(module: nnx.Module, own: Any) -> list[str]:
    """The attributes of a module that may be weights of products. `own`: the name of the module in its parent."""
    kind = type(module).__name__.lower()
    if isinstance(module, _TABLES_AND_NORMS) or "embed" in kind or "norm" in kind or is_name_of_table(str(own), ""):
        return []
    return [
        str(name)
        for name, value in vars(module).items()
        if isinstance(value, nnx.Param) and not isinstance(value, nnx.LoRAParam)
        if not is_name_of_table("", str(name)) and _is_weight(value.get_value())
    ]


def _is_weight(array: Any) -> bool:
    if not hasattr(array, "dtype") or not jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        return False
    return bool(sum(size > 1 for size in array.shape) > 1)


def _why(module: nnx.Module, weights: list[str]) -> str:
    """Why `convert` leaves the weights of a module, and what to do."""
    if isinstance(module, nnx.Conv | nnx.ConvTranspose):
        return "convolutions are not supported"
    kind, names = type(module).__name__, ", ".join(weights)
    if len(weights) > 1:
        return f"{kind} has its own {names}; for weights of products call qshard.jax.einsum or ragged_dot"
    return f"{kind} has its own {names}; for the weight of a product pass its equation in einsums="


def _annotate(kernel: Any) -> NamedSharding | None:
    """The sharding in the metadata of a kernel; None if it has none."""
    if kernel.get_metadata("out_sharding", None) is None:
        return None
    mesh = kernel.get_metadata("mesh", None) or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            f"convert: a kernel has out_sharding {kernel.get_metadata('out_sharding')}, but there is no mesh; enter "
            "the mesh with jax.set_mesh"
        )
    return NamedSharding(mesh, nnx.get_partition_spec(kernel).get_value())
