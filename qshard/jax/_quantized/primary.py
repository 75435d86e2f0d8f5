"""Primary weights: parameters stored as codes, with float32 masters in the optimizer state.

    loss, grads = value_and_grad(loss_of)(params, batch)          # reads codes, returns float32 gradients
    updates, state = optimizer.update(grads, state, params)       # updates masters and casts them to codes
    params = optax.apply_updates(params, updates)                 # sets exactly those codes

A generic tree function would do arithmetic on the bytes of codes. So `PrimaryWeight` raises when the dtype of a leaf
changes, and its `guard` stops sums over leaves. `dequantize_tree` gives values for norms, averages and casts.

The terms match `qshard.torch_bridge`: the *master* of a primary weight is its float32 values, and to *recast* is to
compute codes from masters. The optimizer is in `qshard.jax._optim.primary_optimizer`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Format, Usage
from qshard.jax._ops.mesh import reshape, vary_alike
from qshard.jax._ops.second_derivatives import refuse_derivative
from qshard.jax._ops.validation import as_float_name
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._quantized.operators import NoArithmetic
from qshard.layout import Shape


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "scale_inv", "global_scale_inv", "amax", "guard"],
    meta_fields=["format", "dtype", "axes"],
)
@dataclass(frozen=True, eq=False, kw_only=True, init=False)
class PrimaryWeight(NoArithmetic):
    """A parameter stored as codes, for `linear`. `PrimaryOptimizer.recast` creates it.

    Its arrays are the bits of a rowwise plane as unsigned integers. Arithmetic in a tree function changes their dtype,
    which raises, and `jax.grad` refuses integers. Use `value_and_grad` for gradients, `dequantize_tree` for values, and
    `optax.apply_updates` to set new codes.

    Attributes:
      data, scale_inv, global_scale_inv: the arrays of `QuantizedArray.rowwise`, bitcast to uint8 or uint32.
      amax: under `DelayedScaling`, the amax of the master, bitcast to uint32; else None.
      guard: infinity in float8_e5m2, `[*lead, 1, 1]`. JAX does not promote float8, so a sum over leaves raises if
        another leaf has a different dtype, and is infinite otherwise. No function reads it.
      format, dtype, axes: as in `QuantizedArray`.

    Raises:
      TypeError: an array has another dtype, as after arithmetic on the leaves of a tree.
    """

    data: jax.Array
    scale_inv: jax.Array
    global_scale_inv: jax.Array | None
    amax: jax.Array | None
    guard: jax.Array | None
    format: Format
    dtype: np.dtype[Any]
    axes: tuple[int | None, ...]

    def __init__(
        self,
        *,
        data: jax.Array,
        scale_inv: jax.Array,
        global_scale_inv: jax.Array | None,
        amax: jax.Array | None,
        guard: jax.Array | None,
        format: Format,
        dtype: np.dtype[Any],
        axes: tuple[int | None, ...],
    ) -> None:
        # Faster than the generated `__init__`. Every call of a jitted function that returns weights constructs them.
        fields = self.__dict__
        fields["data"], fields["scale_inv"], fields["global_scale_inv"] = data, scale_inv, global_scale_inv
        fields["amax"], fields["guard"] = amax, guard
        fields["format"], fields["dtype"], fields["axes"] = format, dtype, axes
        for array in (data, scale_inv, global_scale_inv, amax):
            own = getattr(array, "dtype", None)
            if own is not None and (own.kind != "u" or (array is data and own.itemsize > 1)):
                self._check(array)

    def _check(self, array: Any) -> None:
        """Raise TypeError if an array has the dtype of other numbers.

        Transforms also store specs, shardings and objects here; comparisons store bool, and derivatives float0.
        """
        if isinstance(array, jax.Array | np.ndarray | np.generic) and jnp.issubdtype(array.dtype, np.number):
            name = next(name for name, value in vars(self).items() if value is array)
            raise TypeError(
                f"PrimaryWeight: {name} ({quote(array)}) is not {'uint8' if name == 'data' else 'unsigned'}: a tree "
                "function changed its codes; apply it to qshard.jax.dequantize_tree(params), or to the masters in the "
                "optimizer's state"
            )

    @classmethod
    def of(cls, codes: QuantizedArray, amax: jax.Array | None = None) -> PrimaryWeight:
        """Create a primary weight from codes.

        Args:
          codes: a quantized weight. The bits of its rowwise plane are used.
          amax: float32 `[]`, the amax of the master; only under `DelayedScaling`.
        """
        data, scale_inv, whole, amax = (
            None if part is None else lax.bitcast_convert_type(part, f"uint{8 * part.dtype.itemsize}")
            for part in (*codes.plane(Usage.ROWWISE), amax)
        )
        assert data is not None
        assert scale_inv is not None
        return cls(
            data=data,
            scale_inv=scale_inv,
            global_scale_inv=whole,
            amax=amax,
            guard=jnp.full((*data.shape[:-2], 1, 1), jnp.inf, _GUARD),
            format=codes.format,
            dtype=codes.dtype,
            axes=codes.axes,
        )

    @property
    def codes(self) -> QuantizedArray:
        """The weight as a `QuantizedArray` with the same bits."""
        as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
        plane = Plane(
            lax.bitcast_convert_type(self.data, jnp.dtype(self.format.data_dtype)),
            lax.bitcast_convert_type(self.scale_inv, jnp.dtype(self.format.scale_dtype)),
            None if self.global_scale_inv is None else as_float(self.global_scale_inv),
        )
        return QuantizedArray(format=self.format, dtype=self.dtype, axes=self.axes, rowwise=plane)

    @property
    def shape(self) -> Shape:
        """The shape of the weight's values."""
        *lead, last = self.data.shape
        return (*lead, last * self.format.element.codes_per_byte)

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return len(self.data.shape)

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Compute the values of the codes in `dtype`, as `QuantizedArray.dequantize` does."""
        return self.codes.dequantize(dtype)

    def __str__(self) -> str:
        return f"PrimaryWeight({self.format}, {self.shape})"


_GUARD = jnp.dtype("float8_e5m2")
CODED = (QuantizedArray, PrimaryWeight, CodedWeight)
"""The types of weights that are already quantized."""


def is_primary(node: Any) -> bool:
    return isinstance(node, PrimaryWeight)


def dequantize_tree(tree: Any, dtype: Any = None) -> Any:
    """Replace codes by values, for norms, averages, casts and other tree functions.

        each PrimaryWeight and QuantizedArray becomes its dequantize(dtype)

    `linear` multiplies with these values. The masters of primary weights, `state.masters`, have more bits.

    Args:
      tree: a pytree, such as the parameters from `PrimaryOptimizer.recast`. Inside a function that `value_and_grad`
        differentiates, gradients of the values are gradients of the weights, so penalties on weights train them.
      dtype: float32, bfloat16 or float16. None: the dtype of each tensor.

    Returns:
      The tree with arrays in place of codes. Other leaves are unchanged.

    Raises:
      TypeError: `dtype` is not one of these, or a weight is sharded by a `ZeroPlan`.
      ValueError: a `QuantizedArray` is a shard with the scales of the whole tensor: gather it first.

    Sharded codes give values with the same sharding, without communication.

    >>> import optax
    >>> from qshard.jax import quantize
    >>> params = {"w": quantize(jnp.full((2, 8), 0.875), "FP8_E4M3"), "b": jnp.zeros(2)}
    >>> float(optax.tree.norm(dequantize_tree(params)))
    3.5

    Sources: optax (`optax.tree.norm`, `optax.incremental_update`), whose functions take the result.
    """
    if dtype is not None:
        dtype = as_float_name("dequantize_tree", dtype)
    is_codes = lambda node: isinstance(node, CODED)  # noqa: E731

    def dequantize(node: Any) -> Any:
        if not is_codes(node):
            return node
        if not isinstance(node, CodedWeight):
            return node.dequantize(dtype)
        if node.shards is not None:
            raise TypeError(
                f"dequantize_tree: tree ({quote(node)}) has a weight of ZeRO, whose slices are on all devices; use the "
                "masters"
            )
        values = node.codes.dequantize(dtype)
        return values if node.sink is None else _with_sink(values, node.sink)

    return jax.tree.map(dequantize, tree, is_leaf=is_codes)


@jax.custom_vjp
def _with_sink(values: jax.Array, sink: jax.Array) -> jax.Array:
    """Return `values`, and send their gradient to `sink`."""
    return values


_with_sink.defvjp(
    lambda values, sink: (values, sink[..., :0]),
    lambda empty, gradient: (None, gradient.astype(empty.dtype)),
)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate a function of trees with primary weights, as `jax.value_and_grad` does for arrays.

    Args:
      fun: the loss. It must pass the primary weights in its arguments `argnums` to `linear`, or to another function
        that takes a `CodedWeight`.
      argnums: the positions of the arguments to differentiate, as for `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair of the loss and auxiliary data, as for `jax.value_and_grad`.

    Returns:
      A function with the results of `jax.value_and_grad`. In the gradient, each `PrimaryWeight` is a float32 array of
      its shape, sharded like the weight.

    Raises:
      TypeError: `fun` is not a function.

    It runs wherever `linear` does: under `jit` on Auto and Explicit meshes, in `shard_map`, and in `scan` over
    microbatches, which all use the same codes and scales.

    >>> from qshard.jax import linear, quantize
    >>> params = {"w": PrimaryWeight.of(quantize(jnp.full((16, 32), 0.875), "FP8_E4M3[nonfinite=nan]"))}
    >>> loss = lambda params, x: linear(x, params["w"], "CurrentScaling").sum()
    >>> value, gradient = value_and_grad(loss)(params, jnp.full((4, 32), 7.0))
    >>> float(value), gradient["w"].shape, gradient["w"].dtype.name
    (12544.0, (16, 32), 'float32')
    """
    if not callable(fun):
        raise TypeError(f"value_and_grad: fun ({quote(fun)}) is not a function; pass the loss function")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        structure: Any
        chosen, structure = jax.tree.flatten([args[number] for number in numbers], is_leaf=is_primary)

        def of_sinks(*trees: Any) -> Any:
            sinks = structure.flatten_up_to(list(trees))
            bound = [
                CodedWeight(leaf, sink, None) if is_primary(leaf) else sink
                for leaf, sink in zip(chosen, sinks, strict=True)
            ]
            given = list(args)
            for number, tree in zip(numbers, structure.unflatten(bound), strict=True):
                given[number] = tree
            return fun(*given, **kwargs)

        sinks = structure.unflatten([_sink(leaf) if is_primary(leaf) else leaf for leaf in chosen])
        of = 0 if isinstance(argnums, int) else tuple(range(len(numbers)))
        return jax.value_and_grad(of_sinks, of, has_aux=has_aux)(*sinks)

    return run


def _sink(weight: PrimaryWeight) -> jax.Array:
    """Return the zeros that receive the gradient of a weight: float32, with the shape and sharding of the weight.

    Nothing reads them, so under `jit` they take no memory.
    """
    data, per_byte = weight.data, weight.format.element.codes_per_byte
    _, zeros = vary_alike(data, jnp.zeros_like(data, dtype=jnp.float32))
    if weight.format.element.packed:
        zeros = jnp.stack([zeros] * per_byte, axis=-1)
        zeros = reshape(zeros, weight.shape, jax.typeof(data).sharding.spec)
    return zeros


def open_weight(w: Any) -> tuple[Any, jax.Array | None]:
    """Return a primary weight, or a `CodedWeight` of one, with `QuantizedArray` codes, and its master's amax or None.

    Differentiating the codes raises. Otherwise JAX would return float8 zeros as the gradient of float8 codes, and an
    optimizer would apply weight decay to codes without an error.
    """
    codes = w.codes if isinstance(w, CodedWeight) else w
    if codes is None:
        return w, None
    amax = guard = None
    if isinstance(codes, PrimaryWeight):
        amax = None if codes.amax is None else lax.bitcast_convert_type(codes.amax, jnp.float32)
        guard = codes.guard
        codes = codes.codes
    # Under `allow_int` integers have no tangents, but the guard has one.
    codes, _ = refuse_derivative(_codes_error, "linear", (codes, guard))
    return (dataclasses.replace(w, codes=codes) if isinstance(w, CodedWeight) else codes), amax


def _codes_error(op: str) -> TypeError:
    return TypeError(
        f"{op}: w is quantized, and codes have no gradient; exclude it from differentiation (argnums=), or train a "
        "PrimaryWeight with qshard.jax.value_and_grad"
    )
