"""ZeRO in `shard_map`: masters and optimizer states in flat slices, and weights that are gathered as codes.

    codes of the own slices, ONE max-reduction -> codes gathered -> forward, backward -> gradients summed and scattered
    -> any elementwise optimizer on the own slices

It is `qshard.torch_bridge.zero` as functions. Bits do not depend on the number of devices but through their batches:
gradients are added in float32, in the order of devices, and then divided by their number.
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

from qshard._core.adam import BLOCK
from qshard._core.flat_shards import MasterPlan, check_world, plan_master, plan_shards
from qshard._core.layer_recipes import check_filter
from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format, quote
from qshard.formats import Format, Usage
from qshard.jax._ops.validation import check_dtype
from qshard.jax._optim.cast_master import cast_master
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.layout import Shape, plane


@dataclass(frozen=True)
class _FlatWeight:
    """A weight as all devices know it: each has `length` elements of it, the last ones maybe padding.

    Of a weight with two axes or more they are a row, as optimizer states in few bits have scales along rows: of whole
    blocks of these, so that blocks are those of the whole weight.
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

    def slices(self, count: int) -> Shape:
        return (count, self.length) if len(self.shape) > 1 else (count * self.length,)

    def cut(self, whole: jax.Array) -> jax.Array:
        """All of its elements in float32, then padding: those of each device."""
        padding = self.world * self.length - self.size
        return jnp.pad(jnp.ravel(whole).astype(jnp.float32), (0, padding)).reshape(self.world, self.length)

    def gather(self, piece: Plane) -> QuantizedArray:
        """The whole weight, of the codes of each device's slice."""
        return self.join(piece, lax.all_gather(piece.data, self.axis_name, tiled=True))

    def join(self, piece: Plane, codes: jax.Array) -> QuantizedArray:
        """The whole weight, of all its codes as bytes, and of the scales of any piece."""
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
        """The elements of this device of the mean over devices: added in their order, whatever the hardware."""
        parts = lax.all_to_all(self.cut(gradient), self.axis_name, 0, 0, tiled=True)
        total = parts[0]
        for device in range(1, self.world):
            total = total + parts[device]
        mean: jax.Array = (total / self.world).reshape(self.slices(1))
        return mean


@dataclass(frozen=True)
class ZeroPlan:
    """Made by `plan_zero`; static.

    Attributes:
      structure: of the tree of parameters.
      leaves: of each.
      master: of those that are quantized.
      shard_weights: whether each use gathers the codes of a weight.
    """

    structure: Any
    leaves: tuple[_FlatWeight, ...]
    master: MasterPlan
    shard_weights: bool

    def cut(self, params: Any) -> Any:
        """Whole parameters as float32 masters, padded: put them on a mesh by `P(axis)`.

        They are `[world, length]`, a row for each device; of parameters with less than two axes, `[world * length]`.
        """
        wholes = zip(self.structure.flatten_up_to(params), self.leaves, strict=True)
        return self.structure.unflatten([leaf.cut(p).reshape(leaf.slices(leaf.world)) for p, leaf in wholes])

    def join(self, masters: Any) -> Any:
        """The inverse of `cut`, in float32. Outside of `shard_map`."""
        slices = zip(self.structure.flatten_up_to(masters), self.leaves, strict=True)
        return self.structure.unflatten([m.reshape(-1)[: leaf.size].reshape(leaf.shape) for m, leaf in slices])

    def value_and_grad(
        self, loss: Callable[..., jax.Array], masters: Any, *args: Any, states: Any = None
    ) -> tuple[jax.Array, Any]:
        """The loss of this device, and this device's slices of the mean over devices of the gradient.

        Args:
          loss: of a tree of weights, and `args`. Weights are `CodedWeight`s for `linear` where the plan has a format,
            else arrays in the dtype of the parameter.
          masters: this device's slices, `[1, length]` or `[length]`.
          args: for example the batch of this device.
          states: of delayed scaling: `loss` takes them after the weights, and the result is `(value, (gradient,
            amaxes))`, with the amaxes of this device, for `update_delayed(..., axis_name=)`.

        Inside `shard_map`, on all devices of the axis. An all-reduce of int32 amaxes, an all-gather of bytes, of codes
        and of all else, and an all-to-all of float32 for each gradient. With `shard_weights`, that all-gather leaves
        out codes; these are gathered where `linear` uses them, once more in backward, and freed in between.
        """
        flat = self.structure.flatten_up_to(masters)
        weights = self._weights(flat)

        def of_masters(flat: Sequence[jax.Array], states: Any) -> jax.Array:
            bound = [
                _with_gradient(leaf, weight, m) if leaf.fmt is None else CodedWeight(weight, m, leaf)
                for leaf, weight, m in zip(self.leaves, weights, flat, strict=True)
            ]
            return loss(self.structure.unflatten(bound), *(() if states is None else (states,)), *args)

        if states is not None:  # Varying, or JAX would add up the amaxes of devices.
            states = jax.tree.map(lambda leaf: lax.pcast(leaf, self.leaves[0].axis_name, to="varying"), states)
        value, (grads, amaxes) = jax.value_and_grad(of_masters, (0, 1))(flat, states)
        gradient = self.structure.unflatten(grads)
        return value, gradient if states is None else (gradient, amaxes)

    def _weights(self, masters: Sequence[jax.Array]) -> list[Any]:
        """Of the masters: codes of what the plan has a format for, else the whole parameters."""
        axis = self.leaves[0].axis_name
        chosen = [(leaf, m) for leaf, m in zip(self.leaves, masters, strict=True) if leaf.fmt is not None]
        here = lax.axis_index(axis)
        starts = [here * leaf.length for leaf, _ in chosen]
        pieces = iter(cast_master(None, [m.reshape(-1) for _, m in chosen], starts, axis, plan=self.master))
        own: list[Any] = []  # Of each weight: its piece, with no codes of padding, or its elements as bytes.
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
    """Plans ZeRO for some parameters.

    Args:
      params: a tree of arrays, or of what has their shapes and dtypes.
      formats: called with the path of a parameter, such as `"['up']['w']"`, and the parameter: the format of its codes,
        or its name, for weights of `linear`; None for all others, which are gathered as they are. So must be weights
        under `DelayedScaling`, and of formats with vectors as blocks, whose two planes are different numbers.
      world: how many devices `axis_name` has.
      axis_name: the mesh axis over which all of it is cut.
      shard_weights: False: codes are gathered once a step (stage 1). True: by each use.

    Raises:
      ValueError: a format cannot hold a shape, has no square blocks, or depends on more than amaxes.

    >>> from qshard.formats import FP8_E4M3
    >>> params = {"w": jnp.ones((64, 8)), "b": jnp.ones(3)}
    >>> plan = plan_zero(params, lambda path, p: FP8_E4M3 if p.ndim == 2 else None, 2, "data")
    >>> {name: m.shape for name, m in plan.cut(params).items()}
    {'b': (4,), 'w': (2, 256)}

    Sources: ZeRO, arXiv:1910.02054.
    """
    check_world("plan_zero", world)
    takes, example = "a path and a parameter", "lambda path, p: 'MXFP8_32x32' if p.ndim > 1 else None"
    check_filter("plan_zero", formats, takes, example, argument="formats")
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
            length = plan_shards([shape], fmt, world, op="plan_zero", name=name)[0].padded
        length = max(1, length)  # Padding, of a parameter without elements: XLA has no all-gather of an empty array.
        if len(shape) > 1:
            length = -(-length // BLOCK) * BLOCK
        leaves.append(_FlatWeight(shape, str(jnp.dtype(p.dtype)), fmt, length, world, axis_name))
    quantized = [(leaf.shape, leaf.fmt, leaf.dtype) for leaf in leaves if leaf.fmt is not None]
    shapes, fmts, dtypes = zip(*quantized, strict=True) if quantized else ((), (), ())
    master = plan_master(shapes, fmts, rounded_to=dtypes, op="plan_zero")
    return ZeroPlan(structure, tuple(leaves), master, shard_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(leaf: _FlatWeight, values: jax.Array, master: jax.Array) -> jax.Array:
    """`values`, whose gradient goes to the master slices."""
    return values


_with_gradient.defvjp(
    lambda leaf, values, master: (values, None),
    lambda leaf, _, grad: (None, leaf.scatter(grad)),
)
