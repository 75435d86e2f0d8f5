"""Primary weights: the parameter is codes, and its float32 values are a master in the state of an optimizer.

    loss, grads = value_and_grad(loss_of)(params, batch)          # of codes, with float32 gradients
    updates, state = optimizer.update(grads, state, params)       # masters change, and codes are made anew of them
    params = optax.apply_updates(params, updates)                 # exactly those codes

A function of trees would do arithmetic on the bytes of codes. So `PrimaryWeight` raises where a leaf changes its dtype,
and its `guard` stops sums over leaves. `dequantize_tree` gives values, for norms, averages and casts.

The words are those of `qshard.torch_bridge`: a *master* is the float32 values of a primary weight, and to *recast* is
to make codes anew of masters. The optimizer is in `qshard.jax._optim.primary_optimizer`.
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
    """A parameter that is codes, for `linear`. Made by `PrimaryOptimizer.recast`.

    Its arrays are the bits of a rowwise plane as unsigned integers. Arithmetic of a function of trees changes their
    dtypes, which raises, and `jax.grad` refuses them. `value_and_grad` takes the weight, `dequantize_tree` gives its
    values, and `optax.apply_updates` gives it new codes.

    Attributes:
      data, scale_inv, global_scale_inv: of `QuantizedArray.rowwise`, as uint8 or uint32.
      amax: under `DelayedScaling`, that of the master, as uint32; else None.
      guard: infinity in float8_e5m2, `[*lead, 1, 1]`: JAX does not promote float8, so a sum over leaves raises beside
        values of another dtype, and is infinite elsewhere. No function reads it.
      format, dtype, axes: those of the `QuantizedArray`.

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
        # Each call of a jitted function that gives weights makes them: this is faster than `dataclass` is.
        fields = self.__dict__
        fields["data"], fields["scale_inv"], fields["global_scale_inv"] = data, scale_inv, global_scale_inv
        fields["amax"], fields["guard"] = amax, guard
        fields["format"], fields["dtype"], fields["axes"] = format, dtype, axes
        for array in (data, scale_inv, global_scale_inv, amax):
            own = getattr(array, "dtype", None)
            if own is not None and (own.kind != "u" or (array is data and own.itemsize > 1)):
                self._check(array)

    def _check(self, array: Any) -> None:
        """Raises if an array has the dtype of other numbers.

        Transforms also put specs, shardings and objects here; comparisons give bool, and derivatives float0.
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
        """The bits of a rowwise plane."""
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
        """The same bits as what they stand for."""
        as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
        plane = Plane(
            lax.bitcast_convert_type(self.data, jnp.dtype(self.format.data_dtype)),
            lax.bitcast_convert_type(self.scale_inv, jnp.dtype(self.format.scale_dtype)),
            None if self.global_scale_inv is None else as_float(self.global_scale_inv),
        )
        return QuantizedArray(format=self.format, dtype=self.dtype, axes=self.axes, rowwise=plane)

    @property
    def shape(self) -> Shape:
        """Of the weight it stands for."""
        *lead, last = self.data.shape
        return (*lead, last * self.format.element.codes_per_byte)

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """`QuantizedArray.dequantize` of its codes."""
        return self.codes.dequantize(dtype)

    def __str__(self) -> str:
        return f"PrimaryWeight({self.format}, {self.shape})"


_GUARD = jnp.dtype("float8_e5m2")
CODED = (QuantizedArray, PrimaryWeight, CodedWeight)
"""The types of weights that are codes already."""


def is_primary(node: Any) -> bool:
    return isinstance(node, PrimaryWeight)


def dequantize_tree(tree: Any, dtype: Any = None) -> Any:
    """Values in place of codes: for norms, averages, casts and other functions of trees.

        each PrimaryWeight and QuantizedArray becomes its dequantize(dtype)

    The values are those that `linear` multiplies with. The masters of primary weights, `state.masters`, have more bits.

    Args:
      tree: a pytree, such as parameters of `PrimaryOptimizer.recast`. Inside a function that `value_and_grad`
        differentiates, gradients of the values are gradients of the weights, so penalties on weights train them.
      dtype: float32, bfloat16 or float16; None: the dtype of each tensor.

    Returns:
      The tree with arrays in place of codes; all else stays.

    Raises:
      TypeError: `dtype` is not one of them, or a weight is sharded by a `ZeroPlan`.
      ValueError: a `QuantizedArray` is a shard with scales of the whole: gather it first.

    Sharded codes give values sharded alike, without communication.

    >>> import optax
    >>> from qshard.jax import quantize
    >>> params = {"w": quantize(jnp.full((2, 8), 0.875), "FP8_E4M3"), "b": jnp.zeros(2)}
    >>> float(optax.tree.norm(dequantize_tree(params)))
    3.5

    Sources: optax (`optax.tree.norm`, `optax.incremental_update`), whose arguments it makes.
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
    """Sends the gradient of `values` to the sink."""
    return values


_with_sink.defvjp(
    lambda values, sink: (values, sink[..., :0]),
    lambda empty, gradient: (None, gradient.astype(empty.dtype)),
)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad`, of functions of trees with primary weights.

    Args:
      fun, argnums, has_aux: as for `jax.value_and_grad`. `fun` gives the primary weights of those arguments to
        `linear`, or another function that takes a `CodedWeight`.

    Returns:
      A function with the results of `jax.value_and_grad`. The gradient has, in the place of each `PrimaryWeight`, a
      float32 array of its shape, cut as the weight is.

    It runs wherever `linear` does: under `jit` on Auto and Explicit meshes, in `shard_map`, and in `scan` over
    microbatches, where codes are neither cast nor scaled again.

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
    """Where the gradient goes: zeros typed as the weight is. Nothing reads them, so under `jit` they take no memory."""
    data, per_byte = weight.data, weight.format.element.codes_per_byte
    _, zeros = vary_alike(data, jnp.zeros_like(data, dtype=jnp.float32))
    if weight.format.element.packed:
        zeros = jnp.stack([zeros] * per_byte, axis=-1)
        zeros = reshape(zeros, weight.shape, jax.typeof(data).sharding.spec)
    return zeros


def open_weight(w: Any) -> tuple[Any, jax.Array | None]:
    """A primary weight, or a `CodedWeight` of one, as `QuantizedArray`s; and the amax of its master, where it has one.

    Codes are held constant: to differentiate them is an error. JAX would give float8 zeros for float8, and an optimizer
    take these, and decay codes, without a word.
    """
    codes = w.codes if isinstance(w, CodedWeight) else w
    if codes is None:
        return w, None
    amax = guard = None
    if isinstance(codes, PrimaryWeight):
        amax = None if codes.amax is None else lax.bitcast_convert_type(codes.amax, jnp.float32)
        guard = codes.guard
        codes = codes.codes
    codes, _ = _constant((codes, guard))  # Integers have no tangents under allow_int; the guard has one.
    return (dataclasses.replace(w, codes=codes) if isinstance(w, CodedWeight) else codes), amax


@jax.custom_jvp
def _constant(codes: Any) -> Any:
    return codes


@_constant.defjvp
def _raise_at_derivative(primals: Any, _: Any) -> Any:
    raise TypeError(
        "linear: w is quantized, and codes have no gradient; exclude it from differentiation (argnums=), or train a "
        "PrimaryWeight with qshard.jax.value_and_grad"
    )
