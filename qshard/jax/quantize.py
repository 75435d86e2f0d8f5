"""`quantize`, and what all weights of a model need reduced, from one reduction."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard import layout, pipeline
from qshard.formats import Format, Usage
from qshard.jax import ops
from qshard.jax.array import Plane, QuantizedArray
from qshard.jax.cuts import Cut, Spec, matrix_of, shaped, vary_alike
from qshard.jax.steps import STEPS, as_bits, as_float, integer_max, word_pair, words_plus, words_times
from qshard.layout import stores_transposed
from qshard.ops import OpSpec
from qshard.recipes import Recipe, Role

__all__ = [
    "Amaxes",
    "AxisName",
    "Scales",
    "Seed",
    "axes_of",
    "check_float",
    "compute_scales",
    "quantize",
    "quantize_own",
    "seed_of",
]

AxisName = str | Sequence[str] | None
Seed = jax.Array | int | None


class Amaxes(NamedTuple):
    """What of a tensor in blocks is reduced over shards before the cast, as int32 views; None: nothing.

    Attributes:
      whole: of the tensor.
      block: of its blocks, where shards cut them.
    """

    whole: jax.Array | None = None
    block: jax.Array | None = None


Scales = tuple[jax.Array, jax.Array] | Amaxes


def quantize(
    x: jax.typing.ArrayLike,
    fmt: Format,
    *,
    usage: Usage = Usage.ROWWISE,
    axis_name: AxisName = None,
    spec: Spec = None,
    scales: Scales | None = None,
    seed: Seed = None,
) -> QuantizedArray:
    """Casts `x` to a format.

    `data = encode(x * scale)`, with one scale for the tensor or for each block; NUMERICS.md has the formula of each.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`; seen as a matrix `[M, K]`.
      fmt: for example `qshard.formats.MXFP8_E4M3`.
      usage: which planes to make.
      axis_name: in `shard_map`, the mesh axes over which `x` is cut: `x` is then a shard, and what its shards have in
        common is reduced over them. Without it, `x` is a tensor of its own.
      spec: how the tensor is cut. In `shard_map`, by rows if not given; on Auto meshes, not at all; types of Explicit
        meshes say it.
      scales: of `x`, from `compute_scales`: then nothing is reduced here.
      seed: for formats with stochastic rounding: an integer, two words (uint32 `[2]`, low first) or a `jax.random` key.

    Returns:
      A QuantizedArray, its planes in the shapes of `qshard.layout.plane`. In `shard_map`, scales of blocks that shards
      cut, and scales of the tensor, are those of the whole; all else is of the shard.

    Raises:
      TypeError: `x` is not of a float dtype, or another argument not of its type.
      ValueError: `fmt` cannot hold the shape of the whole, or cannot be cut so, or there is no seed.

    However `x` is sharded, the bits are those of the unsharded cast. Reduced are 4 bytes for one scale of the tensor,
    and 4 for each block if shards cut them. The cast moves nothing, with two exceptions on Auto meshes. Without `spec`,
    what cuts blocks (of formats with a scale of the tensor, runs of `gcd(K, 128)`) is gathered. For a columnwise plane
    or square blocks, so are leading axes that are cut, other than the first.

    >>> from qshard.formats import FP8_E4M3, NVFP4
    >>> q = quantize(jnp.array([[1.0, -2.0, 0.3]]), FP8_E4M3, usage=Usage.BOTH)
    >>> q.rowwise.data.shape, q.columnwise.data.shape, float(q.rowwise.scale_inv * 448)
    ((1, 3), (3, 1), 2.0)
    >>> q = quantize(jnp.ones((2, 64)), NVFP4)
    >>> q.rowwise.data.shape, q.rowwise.scale_inv.shape, q.rowwise.global_scale_inv.shape
    ((2, 32), (2, 4), ())

    Sources: arXiv:2209.05433, OCP Microscaling Formats v1.0, arXiv:2509.25149; the others in NUMERICS.md.
    """
    return quantize_own(x, fmt, usage, scales, seed_of(seed), axes_of(axis_name), spec)


def quantize_own(
    x: jax.typing.ArrayLike,
    fmt: Format,
    usage: Usage,
    scales: Scales | None,
    seed: jax.Array | None,
    axis_names: tuple[str, ...],
    spec: Spec,
    *,
    own_rows: int | None = None,
) -> QuantizedArray:
    """`quantize`. With `own_rows`, blocks end where a shard ends, though it is a part of a tensor in all else.

    Of so many rows, that is: those that `x` has beyond are no part of the tensor, and make the last blocks whole.
    """
    q: QuantizedArray = _quantize(x, scales, seed, fmt, usage, axis_names, spec, own_rows)
    return q


# Jitted for eager callers: one dispatch, and all checks done once for a shape.
@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), inline=True)
def _quantize(
    x: jax.Array,
    scales: Scales | None,
    seed: jax.Array | None,
    fmt: Format,
    usage: Usage,
    axis_names: tuple[str, ...],
    spec: Spec,
    own_rows: int | None,
) -> QuantizedArray:
    if not isinstance(fmt, Format):
        raise TypeError(f"quantize: fmt ({fmt!r}) is not a qshard.formats.Format; take one from there")
    if not isinstance(usage, Usage) or not usage:
        raise TypeError(f"quantize: usage ({usage!r}) is not Usage.ROWWISE, COLUMNWISE or BOTH; ask for one of them")
    check_float("quantize", "x", x)
    cut = Cut.of(x, axis_names, spec)
    own_blocks = own_rows is not None and cut.local
    for each in usage:
        layout.plane(fmt, x.shape if own_blocks else cut.whole(x.shape), each)
    draws = None
    if fmt.rounding == "stochastic" and seed is not None:
        rows, columns = layout.matrix_shape(x.shape)
        draws = _draws(seed, cut, (rows if own_rows is None else own_rows, columns))
    return _array_of(x, fmt, _planes(x, scales, draws, fmt, usage, cut, own_blocks))


def quantize_delayed(
    x: jax.Array, fmt: Format, usage: Usage, scale: jax.Array, scale_inv: jax.Array
) -> tuple[QuantizedArray, jax.Array]:
    """`quantize` under a scale of earlier steps, and the amax of `x`, in `shard_map` that of the shard."""
    matrix = x if usage is Usage.ROWWISE else matrix_of(x)
    planes, amax = pipeline.quantize_delayed(STEPS, matrix, fmt, usage, scale, scale_inv)
    return _array_of(x, fmt, {each: _in_shape_of(x, parts, fmt, each) for each, parts in planes.items()}), amax


def _array_of(x: jax.Array, fmt: Format, planes: dict[Usage, pipeline.Parts]) -> QuantizedArray:
    axes = tuple(None if i in (0, x.ndim - 1) else size for i, size in enumerate(x.shape))
    named = {str(each.name).lower(): Plane(*parts) for each, parts in planes.items()}
    return QuantizedArray(format=fmt, dtype=x.dtype, axes=axes, **named)


def _planes(
    x: jax.Array,
    scales: Scales | None,
    draws: pipeline.Draws | None,
    fmt: Format,
    usage: Usage,
    cut: Cut,
    own_blocks: bool,
) -> dict[Usage, pipeline.Parts]:
    flat = usage is not Usage.ROWWISE or (fmt.block is not None and (fmt.block[0] > 1 or x.ndim < 2))
    matrix = matrix_of(x) if flat else x
    given = scales if isinstance(scales, Amaxes) else None
    if fmt.block is None and scales is not None:
        planes = pipeline.cast_per_tensor(STEPS, matrix, fmt, usage, pipeline.Scales(*scales))
    else:
        reduce_max = _reduction(cut, fmt, None if given is None else given.whole)
        broken = (
            ()
            if own_blocks
            else [each for each in usage if _breaks_blocks(cut, layout.matrix_shape(x.shape), fmt, each)]
        )
        kept = Usage(sum(each.value for each in usage if each not in broken))
        planes = {}
        for some in kept if _has_edges(matrix, fmt) else (kept,):
            if some:
                planes |= pipeline.quantize(STEPS, matrix, fmt, some, reduce_max=reduce_max, draws=draws)
        for each in broken:
            planes[each] = _from_pieces(matrix_of(x), fmt, each, cut, given, draws)
    return {each: _in_shape_of(x, parts, fmt, each) for each, parts in sorted(planes.items(), key=lambda p: p[0].value)}


def _has_edges(matrix: jax.Array, fmt: Format) -> bool:
    """Whether XLA may cut a matrix with blocks cut short at an edge: an op that makes both planes is then not cut."""
    if fmt.block is None or not ops.may_be_cut(matrix):
        return False
    return any(size % unit for size in matrix.shape[-2:] for unit in fmt.block)


def _in_shape_of(x: jax.Array, parts: pipeline.Parts, fmt: Format, usage: Usage) -> pipeline.Parts:
    """The arrays of a plane in the shapes of `layout.plane`, from those of a matrix."""
    data, scale_inv, global_scale_inv = parts
    lead = x.shape[:-1]
    if usage is Usage.ROWWISE or not stores_transposed(fmt):
        data = shaped(data, (*lead, *data.shape[-1:]) if x.ndim else ())
    if usage is Usage.ROWWISE and fmt.block is not None and fmt.block[0] == 1:
        scale_inv = shaped(scale_inv, (*lead, scale_inv.shape[-1]))
    if fmt.global_scale == "row" and global_scale_inv is not None:
        global_scale_inv = global_scale_inv.reshape(lead)
    return pipeline.Parts(data, scale_inv, global_scale_inv)


def _reduction(cut: Cut, fmt: Format, given: jax.Array | None) -> pipeline.Reduce | None:
    """How the amax of a tensor, or of its rows, is merged with those of its other shards."""
    if given is not None:
        return lambda _: lax.bitcast_convert_type(given, jnp.float32)
    axes = cut.col_axes if fmt.global_scale == "row" else cut.row_axes + cut.col_axes
    if not cut.local or not axes:
        return None
    return lambda amax: as_float(lax.pmax(as_bits(amax), axes))


def _draws(seed: jax.Array, cut: Cut, shape: tuple[int, int]) -> pipeline.Draws:
    """Those of a matrix, in `shard_map` of a shard of this shape."""
    row_step = shape[1] * (cut.cols if cut.local else 1)
    if not cut.local:
        return pipeline.Draws(seed, jnp.asarray(word_pair(0)), row_step)
    row, col = (jnp.asarray(start, jnp.uint32) for start in cut.start(shape))
    first = words_plus(words_times(row, row_step), (col, jnp.zeros_like(col)))
    return pipeline.Draws(seed, jnp.stack(vary_alike(*first)), row_step)


def _breaks_blocks(cut: Cut, shape: tuple[int, int], fmt: Format, usage: Usage) -> bool:
    block = fmt.block_of(usage)
    return block is not None and cut.pieces(shape, block) != block


def _from_pieces(
    x: jax.Array,
    fmt: Format,
    usage: Usage,
    cut: Cut,
    given: Amaxes | None,
    draws: pipeline.Draws | None,
) -> pipeline.Parts:
    """A plane of a matrix whose blocks shards cut. The scales are those of the whole, on every device."""
    if usage is Usage.COLUMNWISE and fmt.square:
        return pipeline.transposed(STEPS, _from_pieces(x, fmt, Usage.ROWWISE, cut, given, draws), fmt)
    block = fmt.block_of(usage)
    assert block is not None
    for option in ("four_over_six", *(("hadamard",) if usage is Usage.COLUMNWISE else ())):
        if getattr(fmt, option):
            raise ValueError(
                f"quantize: x {x.shape}, cut into {cut.rows} x {cut.cols} shards, does not have whole "
                f"{block[0]}x{block[1]} blocks in each, which {fmt} needs, as {option} looks at all of a block; "
                "cut it at blocks"
            )
    turned = usage is Usage.COLUMNWISE and stores_transposed(fmt)
    if turned:
        draws = None if draws is None else draws.transposed(x.shape[-1])
        x, block, cut = STEPS.transposed(x), block[::-1], cut.swapped
    piece = cut.pieces(x.shape, block)
    parts = (block[0] // piece[0], block[1] // piece[1])
    if given is not None and given.block is not None:
        bits = given.block.T if turned else given.block
    else:
        bits = cut.merged(as_bits(pipeline.block_amax(STEPS, x, piece)), parts)
    # That of the tensor, or of each row, is that of its blocks: no need to read x again.
    whole = None if fmt.global_scale is None else integer_max(as_float(bits), 1 if fmt.global_scale == "row" else 0)
    made = pipeline.scales(STEPS, fmt, as_float(bits), whole)
    made = made._replace(scale=cut.everywhere(made.scale), scale_inv=cut.everywhere(made.scale_inv))
    grid = tuple(-(-size // unit) for size, unit in zip(x.shape, piece, strict=True))
    scale = cut.of_pieces(made.scale, parts, grid)
    return pipeline.Parts(pipeline.cast(STEPS, x, fmt, scale, piece, draws), made.scale_inv, made.global_scale_inv)


def compute_scales(weights: Any, recipe: Recipe, *, axis_name: AxisName = None, spec: Spec = None) -> Any:
    """What all weights of a model need reduced, from one max-reduction, for `linear` or `quantize`.

    Args:
      weights: a pytree of float32, bfloat16 or float16 arrays. For layers stacked along a first axis: under `vmap`.
      recipe: has the format of `Role.WEIGHT`.
      axis_name: in `shard_map`, the mesh axes over which the weights are cut.
      spec: how they all are cut, as for `quantize`.

    Returns:
      The pytree, in place of every array: for per-tensor formats fp32 `(scale, scale_inv)`, `[]` each; for blocks,
      `Amaxes` of what shards have in common: of the tensor if it has a global scale, of blocks if shards cut them.

    Raises:
      TypeError: a weight is not of a float dtype.

    Sharded weights stay where they are. Their amaxes are reduced together: in `shard_map` in one all-reduce of 4 bytes
    for each; elsewhere XLA combines what it can.

    >>> from qshard.recipes import NVFP4, CurrentScaling
    >>> scales = compute_scales({"a": jnp.full((2, 2), 224.0), "b": jnp.full(3, 7.0)}, CurrentScaling())
    >>> jax.tree.map(float, scales)
    {'a': (2.0, 0.5), 'b': (64.0, 0.015625)}
    >>> compute_scales([jnp.full((16, 16), 1.0)], NVFP4())[0].whole.view(jnp.float32)
    Array(1., dtype=float32)

    Sources: TorchTitan's `precompute_float8_dynamic_scale_for_fsdp` (the idea).
    """
    leaves, structure = jax.tree.flatten(weights)
    fmt = recipe.format(Role.WEIGHT)
    made = _stacked_scales(leaves, fmt=fmt, axis_names=axes_of(axis_name), spec=spec) if leaves else []
    return jax.tree.unflatten(structure, made)


@functools.partial(jax.jit, static_argnames=("fmt", "axis_names", "spec"), inline=True)
def _stacked_scales(weights: list[jax.Array], fmt: Format, axis_names: tuple[str, ...], spec: Spec) -> list[Scales]:
    for weight in weights:
        check_float("compute_scales", "weight", weight)
    cuts = [Cut.of(weight, axis_names, spec) for weight in weights]
    # Not reduced over shards, which is done for all of them at once.
    own = [_own_amaxes(weight, fmt, cut) for weight, cut in zip(weights, cuts, strict=True)]
    flat = [bits.reshape(-1) for amaxes in own for bits in amaxes if bits is not None]
    if not flat:
        return list(own)
    axes = tuple(dict.fromkeys(axis for cut in cuts if cut.local for axis in cut.row_axes + cut.col_axes))
    stacked = jnp.concatenate(vary_alike(*flat))
    stacked = lax.pmax(stacked, axes) if axes else stacked
    if fmt.block is None:
        scale, scale_inv = pipeline.scales(STEPS, fmt, None, as_float(stacked))[:2]
        return [(scale[i], scale_inv[i]) for i in range(len(weights))]
    parts = iter(jnp.split(stacked, np.cumsum([bits.size for bits in flat])[:-1]))
    return [Amaxes(*(None if bits is None else next(parts).reshape(bits.shape) for bits in amaxes)) for amaxes in own]


def _own_amaxes(x: jax.Array, fmt: Format, cut: Cut) -> Amaxes:
    """What a shard knows of the amaxes that are reduced; blocks in the grid of the whole."""
    if fmt.global_scale == "row":
        raise ValueError(f"compute_scales: format ({fmt}) has a scale a row, of which shards cut by rows share none")
    amax = pipeline.global_amax(STEPS, x, fmt)
    whole = None if amax is None else as_bits(amax)
    if not _breaks_blocks(cut, layout.matrix_shape(x.shape), fmt, Usage.ROWWISE):
        return Amaxes(whole)
    matrix, block = matrix_of(x), fmt.block
    assert block is not None
    piece = cut.pieces(matrix.shape, block)
    parts = (block[0] // piece[0], block[1] // piece[1])
    bits = as_bits(pipeline.block_amax(STEPS, matrix, piece))
    return Amaxes(whole, cut.merged(bits, parts, reduce=False))


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
    """Mesh axes as a static argument."""
    return () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def seed_of(seed: Any) -> Any:
    """A seed as two words.

    Raises:
      TypeError: it is not an integer, two words or a key.
    """
    if seed is None or (isinstance(seed, jax.Array) and seed.shape == (2,) and seed.dtype in (jnp.uint32, jnp.int32)):
        return seed
    if isinstance(seed, int | np.integer):
        return jnp.asarray(word_pair(int(seed)))
    if type(seed) is np.ndarray and seed.shape == (2,) and seed.dtype in (np.uint32, np.int32):
        return jnp.asarray(seed)
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ():
        return jax.random.bits(seed, (2,), jnp.uint32)
    raise TypeError(f"quantize: seed ({seed!r}) is not an integer, uint32 of shape (2,) or a jax.random key; give one")


def check_float(op: str, name: str, x: Any) -> None:
    """Raises the TypeError of the ops that read high precision, in the words of a public function's caller."""
    OpSpec.parse(op, f"{name} -> y", "*lead -> *lead", "float -> float32").results([()], [str(jnp.result_type(x))], {})
