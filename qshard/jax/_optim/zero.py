"""ZeRO in `shard_map`: masters and optimizer states in flat slices, with weights gathered as codes.

    codes of the own slices, ONE max-reduction -> codes gathered -> forward, backward -> gradients summed and scattered
    -> any elementwise optimizer on the own slices

This is `qshard.torch_bridge.zero` in functional form. Apart from the split of the batch, the number of devices does not
change any bit: gradients are added in float32, in the order of devices, and then divided by their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard._core.flat_shards import FlatSlice, MasterPlan, check_world, plan_master, plan_shards
from qshard._core.layer_recipes import check_function
from qshard._core.optimizers.adam import BLOCK
from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format, quote
from qshard.formats import Format, Usage
from qshard.jax._ops.uint64 import multiply_uint64
from qshard.jax._ops.validation import check_dtype
from qshard.jax._optim.cast_master import cast_master
from qshard.jax._optim.rounding import round_product
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.layout import Shape, plane


@dataclass(frozen=True)
class _FlatWeight:
    """A parameter in flat slices: `length` elements for each device, with padding at the end.

    Slices of a parameter with two axes or more are rows, because low-precision optimizer states have scales along rows.
    `length` is then a whole number of blocks of these states, so that blocks do not depend on the number of devices.
    """

    shape: Shape
    dtype: str
    fmt: Format | None
    length: int
    world: int
    axis_name: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def start(self) -> jax.Array:
        """The index of this device's first element: a uint64 as two uint32, as int32 would wrap in large weights."""
        here = lax.axis_index(self.axis_name).astype(jnp.uint32)
        return jnp.stack(multiply_uint64(here, self.length))

    def slices(self, count: int) -> Shape:
        return (count, self.length) if len(self.shape) > 1 else (count * self.length,)

    def shard(self, whole: jax.Array) -> jax.Array:
        """Return all elements in float32, padded, `[world, length]`: a row for each device."""
        padding = self.world * self.length - self.size
        return jnp.pad(jnp.ravel(whole).astype(jnp.float32), (0, padding)).reshape(self.world, self.length)

    def gather(self, piece: Plane) -> QuantizedArray:
        """Gather the whole weight from the codes of each device's slice."""
        return self.join(piece, lax.all_gather(piece.data, self.axis_name, tiled=True))

    def join(self, piece: Plane, codes: jax.Array) -> QuantizedArray:
        """Return the whole weight from all its codes as bytes and from the scales of any piece."""
        assert self.fmt is not None
        where = plane(self.fmt, self.shape, Usage.ROWWISE)
        codes = codes[: math.prod(where.data_shape)].reshape(where.data_shape).view(self.fmt.data_dtype)
        return QuantizedArray(
            format=self.fmt,
            dtype=jnp.dtype(self.dtype),
            axes=(None,) * len(self.shape),
            rowwise=piece._replace(data=codes),
        )

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """Average a gradient over devices, and return the elements of this device.

        Terms are added in the order of devices, on any hardware. `round_product` separates these sums from a float32
        gradient, which may itself be a sum of scaled products. It would let XLA skip the rounding to 16 bits of others.
        """
        if gradient.dtype == jnp.float32:
            gradient = round_product(gradient)
        parts = lax.all_to_all(self.shard(gradient), self.axis_name, 0, 0, tiled=True)
        total = parts[0]
        for device in range(1, self.world):
            total = total + parts[device]
        mean: jax.Array = (total / self.world).reshape(self.slices(1))
        return mean


@dataclass(frozen=True)
class ZeroPlan:
    """The slices of each parameter, from `plan_zero`. Static.

    Attributes:
      structure: the structure of the tree of parameters.
      leaves: the slices of each parameter.
      master: the plan to cast the masters of quantized weights.
      shard_weights: whether each use of a weight gathers its codes.
    """

    structure: Any
    leaves: tuple[_FlatWeight, ...]
    master: MasterPlan
    shard_weights: bool

    def shard(self, params: Any) -> Any:
        """Convert whole parameters to padded float32 masters, to be sharded over a mesh by `P(axis)`.

        Args:
          params: the tree of parameters.

        Returns:
          The tree of masters: `[world, length]`, a row for each device; for parameters with fewer than two axes
          `[world * length]`.
        """
        wholes = zip(self.structure.flatten_up_to(params), self.leaves, strict=True)
        return self.structure.unflatten([leaf.shard(p).reshape(leaf.slices(leaf.world)) for p, leaf in wholes])

    def unshard(self, masters: Any) -> Any:
        """Convert masters to whole float32 parameters: the inverse of `shard`. Call it outside of `shard_map`.

        Args:
          masters: the tree of masters of all devices, in the shapes that `shard` returns.
        """
        slices = zip(self.structure.flatten_up_to(masters), self.leaves, strict=True)
        return self.structure.unflatten([m.reshape(-1)[: leaf.size].reshape(leaf.shape) for m, leaf in slices])

    def value_and_grad(
        self, loss: Callable[..., jax.Array], masters: Any, *args: Any, states: Any = None
    ) -> tuple[jax.Array, Any]:
        """Compute the loss of this device, and its slices of the gradient averaged over devices.

        Args:
          loss: a function of a tree of weights, of `states` if they are passed, and of `args`. Weights are
            `CodedWeight`s for `linear` if the plan has a format for them, else arrays in the dtype of the parameter.
          masters: the slices of this device, `[1, length]` or `[length]`.
          args: other arguments of `loss`, such as the batch of this device.
          states: states of delayed scaling, or None.

        Returns:
          `(value, gradient)`. With `states`, `(value, (gradient, amaxes))`: pass the amaxes, which this device
          observed, to `update_delayed(..., axis_name=)`.

        Call it inside `shard_map`, on all devices of the axis. The communication is an int32 all-reduce of amaxes, an
        all-gather of bytes (codes, and parameters that are not quantized), and a float32 all-to-all for each gradient.
        With `shard_weights`, the all-gather leaves out codes: they are gathered where `linear` uses them, gathered
        again in backward, and freed in between.

        Raises:
          ValueError: the mesh axis does not have the size of the plan.
        """
        axis, world = self.leaves[0].axis_name, self.leaves[0].world
        if (size := lax.axis_size(axis)) != world:
            raise ValueError(
                f"plan_zero: world ({world}) is not the size of the mesh axis {axis!r} ({size}); plan for it"
            )
        flat = self.structure.flatten_up_to(masters)
        weights = self._weights(flat)

        def of_masters(flat: Sequence[jax.Array], states: Any) -> jax.Array:
            bound = [
                _with_gradient(leaf, weight, m) if leaf.fmt is None else CodedWeight(weight, m, leaf)
                for leaf, weight, m in zip(self.leaves, weights, flat, strict=True)
            ]
            return loss(self.structure.unflatten(bound), *(() if states is None else (states,)), *args)

        if states is not None:  # Typed as varying, or JAX would sum amaxes over devices.
            states = jax.tree.map(lambda leaf: lax.pcast(leaf, self.leaves[0].axis_name, to="varying"), states)
        value, (grads, amaxes) = jax.value_and_grad(of_masters, (0, 1))(flat, states)
        gradient = self.structure.unflatten(grads)
        return value, gradient if states is None else (gradient, amaxes)

    def _weights(self, masters: Sequence[jax.Array]) -> list[Any]:
        """Return the weights from the masters: codes if the plan has a format, else the whole parameter."""
        axis = self.leaves[0].axis_name
        chosen = [(leaf, m) for leaf, m in zip(self.leaves, masters, strict=True) if leaf.fmt is not None]
        starts: Any = jnp.stack([leaf.start for leaf, _ in chosen]) if chosen else []
        pieces = iter(cast_master(None, [m.reshape(-1) for _, m in chosen], starts, axis, plan=self.master))
        own: list[Any] = []  # For each weight its piece, without codes of padding, or its elements as bytes.
        for leaf, m in zip(self.leaves, masters, strict=True):
            if leaf.fmt is None:
                own.append(lax.bitcast_convert_type(m.reshape(-1).astype(leaf.dtype), jnp.uint8).reshape(-1))
            else:
                piece = next(pieces)
                own.append(piece._replace(data=piece.data[: leaf.length // leaf.fmt.element.codes_per_byte]))
        sent = [part.data if isinstance(part, Plane) else part for part in own]
        if self.shard_weights:
            sent = [part for part in own if not isinstance(part, Plane)]
        received = iter([])  # type: ignore[var-annotated]
        if sent:
            together = lax.all_gather(jnp.concatenate(sent), axis)
            received = iter(jnp.split(together, np.cumsum([part.size for part in sent])[:-1], axis=1))
        weights: list[Any] = []
        for leaf, part in zip(self.leaves, own, strict=True):
            if isinstance(part, Plane):
                weights.append(part if self.shard_weights else leaf.join(part, next(received).reshape(-1)))
            else:
                dtype = jnp.dtype(leaf.dtype)
                values = lax.bitcast_convert_type(next(received).reshape(-1, dtype.itemsize), dtype)
                weights.append(values[: leaf.size].reshape(leaf.shape))
        return weights


def plan_zero(
    params: Any,
    formats: Callable[[str, Any], FormatLike | None],
    world: int,
    axis_name: str,
    *,
    shard_weights: bool = False,
) -> ZeroPlan:
    """Plan ZeRO for a tree of parameters.

    Args:
      params: a tree of arrays, or of objects with their shapes and dtypes.
      formats: called with the path of a parameter, such as `"['up']['w']"`, and the parameter. Returns the format of
        its codes, or its name, for weights of `linear`; or None, to gather the parameter unquantized. Return None also
        for weights under `DelayedScaling`, and for formats with 1-D blocks, because their two planes have different
        codes.
      world: the number of devices along `axis_name`.
      axis_name: the mesh axis that shards all masters.
      shard_weights: False: codes are gathered once a step (stage 1). True: each use gathers them.

    Returns:
      The plan. Its methods convert parameters to masters and back, and compute gradients.

    Raises:
      TypeError: `formats` is not a function, or `axis_name` is not a name.
      ValueError: a format does not support a shape, has no 2-D blocks, or depends on more than amaxes.

    >>> from qshard.formats import FP8_E4M3
    >>> params = {"w": jnp.ones((64, 8)), "b": jnp.ones(3)}
    >>> plan = plan_zero(params, lambda path, p: FP8_E4M3 if p.ndim == 2 else None, 2, "data")
    >>> {name: m.shape for name, m in plan.shard(params).items()}
    {'b': (4,), 'w': (2, 256)}

    Sources: ZeRO, arXiv:1910.02054.
    """
    check_world("plan_zero", world)
    takes, example = "a path and a parameter", "lambda path, p: 'MXFP8_32x32' if p.ndim > 1 else None"
    check_function("plan_zero", "formats", formats, takes, example)
    if not isinstance(axis_name, str):
        raise TypeError(f"plan_zero: axis_name ({quote(axis_name)}) is not one mesh axis name; pass one")
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, p in paths:
        name = jax.tree_util.keystr(path)
        fmt = formats(name, p)
        shape, size = tuple(p.shape), math.prod(p.shape)
        length = -(-size // world)
        if fmt is not None:
            fmt = as_format(fmt, "plan_zero", f"formats({name!r})")
            check_dtype("plan_zero", name, p)
            if fmt.gather_refusal is not None:
                raise ValueError(
                    f"plan_zero: {name} cannot be gathered as codes of {fmt}: {fmt.gather_refusal}; return None for it "
                    "in formats, and pass the weight to linear"
                )
            (_, length), *_ = plan_shards([shape], fmt, world, op="plan_zero", name=name)[0]
        length = max(1, length)  # XLA cannot all-gather an empty array.
        if len(shape) > 1:
            length = -(-length // BLOCK) * BLOCK
        leaves.append(_FlatWeight(shape, str(jnp.dtype(p.dtype)), fmt, length, world, axis_name))
    slices = [FlatSlice(leaf.shape, leaf.fmt, rounded_to=leaf.dtype) for leaf in leaves if leaf.fmt is not None]
    master = plan_master(slices, op="plan_zero")
    return ZeroPlan(structure, tuple(leaves), master, shard_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(leaf: _FlatWeight, values: jax.Array, master: jax.Array) -> jax.Array:
    """Return `values`, and send their gradient to the slices of `master`."""
    return values


_with_gradient.defvjp(
    lambda leaf, values, master: (values, None),
    lambda leaf, _, grad: (None, leaf.scatter(grad)),
)
