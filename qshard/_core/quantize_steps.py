"""Quantize, dequantize and transpose as sequences of ops, shared by JAX, PyTorch and NumPy.

Each function takes `ops`, a front end's namespace of `ops.def`: every op as a function of arrays, with attributes as
keywords; `ops.swap_last_axes(array)`, a row-major copy of a matrix transposed, or of `[*outer, M, K]` as
`[K, *outer, M]`; and `ops.transposed_squares(data, scale_inv, packed=)`, such copies of the codes and scales of a plane
with 2-D blocks. The structure of a format decides which ops compute a plane: one scale or blocks, 1-D or 2-D blocks,
global scale or not, options. `operands` also branches on this structure, for padded rows, and `gemm_dispatch` does to
choose the ops of products.

`x` is a matrix `[M, K]`. In JAX it may be `[*outer, M, K]` if no block spans two matrices; transposed planes are then
`[K, *outer, M]`. If the format does not distinguish rows, `x` may be any `[*lead, K]`. Planes of a matrix have the
shapes of `layout.plane`, and the front end has already raised the errors of `layout.plane`.

Blocks that a shard boundary splits are quantized in steps: `block_amax` of the local part, an integer maximum over
ranks, `scales` on every rank, `cast`. The result has the bits of `quantize` on the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qshard._core.validation import seed_missing
from qshard.formats import E8M0, Format, Usage
from qshard.layout import is_transposed, source, stored_block

Array = Any
Reduce = Callable[[Array], Array]


PATCH, TILE, MOST_TILES = 8, 128, 256
"""Elements of a vector, side of a tile, and most tiles of a matrix with one scale that one op quantizes: on a GPU, in
one launch. `kEight`, `kTile` and `kMostWholeTiles` in `ffi/kernels/cuda` are the same numbers."""


class Plane(NamedTuple):
    """Codes and scales for one usage of a quantized tensor. `qshard.layout` has the shapes.

    In `qshard.torch_bridge`, codes and one-byte scales are uint8.

    Attributes:
      data: codes in the element's own dtype; 4-bit codes are packed two to a uint8.
      scale_inv: decode scales, `value = data * scale_inv`, as float32, float8_e8m0fnu or float8_e4m3fn.
      global_scale_inv: float32 global scale of the tensor or of each row, a second factor of `value`; None without one.
    """

    data: Array
    scale_inv: Array
    global_scale_inv: Array | None = None


class Scales(NamedTuple):
    """Scales of a plane: `scale` encodes (`x * scale`); `scale_inv` and `global_scale_inv` decode and are stored."""

    scale: Array
    scale_inv: Array
    global_scale_inv: Array | None = None


class Philox(NamedTuple):
    """Philox key and offset for stochastic rounding: a seed, and the position of `x` in the whole tensor.

    Attributes:
      seed: Philox key, uint32 or int32 `[2]`: uint64 as two uint32, low first.
      offset: index in the whole tensor of the first element of `x`, as two uint32. In JAX it may have one offset for
        each matrix of `x` `[*outer, M, K]`, if the matrices are not consecutive.
      row_step: distance between rows in the whole tensor, which is its number of columns; None: the columns of `x`.
      col_step: distance between columns in the whole tensor.
    """

    seed: Array
    offset: Array
    row_step: int | None = None
    col_step: int = 1

    def steps(self, columns: int) -> dict[str, int]:
        """Return the attributes `row_step` and `col_step` of ops; `columns` is the number of columns of `x`."""
        return {"row_step": columns if self.row_step is None else self.row_step, "col_step": self.col_step}

    def transposed(self, columns: int) -> Philox:
        """Return the state of `x.T`; `columns` is the number of columns of `x`."""
        return self._replace(row_step=self.col_step, col_step=self.steps(columns)["row_step"])


def quantize(
    ops: Any,
    x: Array,
    fmt: Format,
    usage: Usage,
    *,
    reduce_max: Reduce | None = None,
    philox: Philox | None = None,
    given: Scales | None = None,
    amax: Array | None = None,
    global_amaxes: Sequence[Array] | None = None,
    is_whole: bool = False,
) -> dict[Usage, Plane]:
    """Compute the planes of `x` with as few reads of `x` as the format allows.

    - `x`: float32, bfloat16 or float16 `[*outer, M, K]`; for `ROWWISE` alone, and blocks of one row, also `[*lead, K]`.
    - `reduce_max`: max-reduction of the amax of `x` over the shards of a tensor, for formats with one fp32 scale or one
      global scale per tensor. Blocks must be whole in `x`; see `block_amax` for partial blocks.
    - `philox`: Philox key and offset, required for stochastic rounding and unused otherwise.
    - `given`: for formats with one scale per tensor: scales to use instead of computing them from the amax.
    - `amax`: amax of `x`, if already computed. Used by formats that need no other amax.
    - `global_amaxes`: `compute_global_amaxes` of `x` after the max-reduction, in place of `reduce_max`.
    - `is_whole`: `x` is a whole matrix on one device, so that one op may compute its only scale (`fits_one_op`).

    Raises ValueError if `fmt` rounds stochastically and `philox` is None.
    """
    if fmt.stochastic and philox is None:  # check before the amax, which may be a collective
        raise ValueError(seed_missing("quantize", fmt))
    has_no_amax = reduce_max is None and given is None and amax is None and global_amaxes is None
    if is_whole and has_no_amax and fmt.block is None and fits_one_op(x.shape):
        return _quantize_whole(ops, x, fmt, usage)
    if global_amaxes is None and given is None:
        global_amaxes = compute_global_amaxes(ops, x, fmt, usage, amax)
        global_amaxes = global_amaxes if reduce_max is None else [reduce_max(each) for each in global_amaxes]
    if fmt.block is None:
        if given is None:
            assert global_amaxes is not None
            given = scales(ops, fmt, global_amaxes[0])
        if usage is Usage.ROWWISE:
            codes = [ops.cast_tensor(x, given.scale, element=fmt.element.name)]
        else:
            codes = ops.cast_transpose(x, given.scale, element=fmt.element.name, **outer_axes(x))
        return planes_of_one_scale(codes, usage, given.scale_inv)
    amaxes = _by_plane(global_amaxes or (), usage)
    if fmt.scaling.four_over_six is not None:
        sources = {source(fmt, each): None for each in usage.planes}
        planes = {each: _in_steps(ops, x, fmt, each, amaxes[each]) for each in sources}
    elif fmt.stochastic and fmt.shares_codes:  # 2-D blocks are rounded once, and their codes transposed
        planes = _quantize_at_once(ops, x, fmt, Usage.ROWWISE, amaxes, philox)
    else:
        planes = _quantize_at_once(ops, x, fmt, usage, amaxes, philox)
    return {each: planes.get(each) or transpose_plane(ops, planes[source(fmt, each)], fmt) for each in usage.planes}


def fits_one_op(shape: Sequence[int]) -> bool:
    """Return whether one op computes amax, scale and codes of `x` fastest: a small matrix of whole vectors.

    >>> fits_one_op((2048, 2048)), fits_one_op((2049, 2048)), fits_one_op((8, 9)), fits_one_op((2, 8, 8))
    (True, False, False, False)
    """
    if len(shape) != 2:
        return False
    rows, columns = shape
    return 0 < -(-rows // TILE) * -(-columns // TILE) <= MOST_TILES and columns % PATCH == 0


def _quantize_whole(ops: Any, x: Array, fmt: Format, usage: Usage) -> dict[Usage, Plane]:
    """Compute the planes of a format with one scale in one op: its block is the matrix."""
    options = {"block_rows": x.shape[0], "block_cols": x.shape[1], **block_options(fmt)}
    if usage is Usage.ROWWISE:
        data, scale_inv = ops.quantize_block(x, **options)
        codes = [data]
    else:
        data, scale_inv, data_t, _ = ops.quantize_square_both(x, **options)
        codes = [data, data_t]
    return planes_of_one_scale(codes, usage, scale_inv.reshape(()))


def makes_planes_apart(fmt: Format) -> bool:
    """Return whether `quantize` computes the two planes with separate ops."""
    return fmt.scaling.four_over_six is not None


def rotate(ops: Any, x: Array, fmt: Format) -> Array:
    """Rotate `x` along its columns to bfloat16, as the columnwise plane of a format with `hadamard` needs."""
    assert fmt.block is not None
    return ops.hadamard(x, block_rows=fmt.block[1], block_cols=fmt.block[0])


def global_amax(ops: Any, x: Array, fmt: Format, amax: Array | None = None) -> Array | None:
    """Compute the amax of `x` or of each row, unless `amax` has it; None if the format has no such scale."""
    if not (fmt.tensor_scaled or fmt.row_scaled):
        return None
    if amax is None or fmt.row_scaled:
        amax = ops.amax_tensor(x, lead=x.ndim - 1 if fmt.row_scaled else 0)
    return amax


def compute_global_amaxes(ops: Any, x: Array, fmt: Format, usage: Usage, amax: Array | None = None) -> Sequence[Array]:
    """Compute the amaxes for scales of the whole tensor or of its rows, with one read of `x`.

    There are none, one for all planes, or with a rotation one for each plane of `usage`: as many for every shard of a
    tensor. Arguments as in `quantize`.
    """
    if not fmt.rotates(usage):
        amax = global_amax(ops, x, fmt, amax)
        return () if amax is None else (amax,)
    if 0 in x.shape:
        return (global_amax(ops, x, fmt),) * len(usage.planes)
    both = ops.amax_hadamard(x, block_rows=x.shape[-2], block_cols=x.shape[-1])
    pair = zip(Usage.BOTH.planes, both, strict=True)
    return [each.reshape(each.shape[:-2]) for one, each in pair if one in usage.planes]


def _by_plane(amaxes: Sequence[Array], usage: Usage) -> dict[Usage, Array | None]:
    if len(amaxes) < 2:
        return dict.fromkeys(Usage.BOTH.planes, *amaxes)
    return dict(zip(usage.planes, amaxes, strict=True))


def block_amax(ops: Any, x: Array, block: Sequence[int]) -> Array:
    """Compute the amax of each block.

    For partial blocks, pass a divisor of the format's block and max-reduce the results.
    """
    return ops.amax_block(x, block_rows=block[0], block_cols=block[1])


def scales(ops: Any, fmt: Format, amax: Array, whole: Array | None = None, *, repeated: Reduce | None = None) -> Scales:
    """Compute scales from amaxes. Four over six is not supported: its scales depend on more than amaxes.

    - `amax`: amaxes of blocks; for formats without blocks, the amax of the tensor.
    - `whole`: amax of the tensor or of its rows, for formats with a global scale.
    - `repeated`: for many tensors: repeats each element of `whole` for the parts of `amax` that it serves.
    """
    if fmt.scaling.global_scale is not None:
        global_amaxes = whole if repeated is None else repeated(whole)
        scale, scale_inv = ops.scale_nvfp4(
            amax, global_amaxes, scale_max=fmt.scaling.scale_max, nonfinite=fmt.nonfinite
        )
        return Scales(scale, scale_inv, global_scale_inv(ops, fmt, whole))
    if fmt.scale_dtype == E8M0.name:
        rule = {"rounding": fmt.scaling.scale_rounding, "nonfinite": fmt.nonfinite}
        return Scales(*ops.scale_e8m0(amax, element=fmt.element.name, **rule))
    options: dict[str, Any] = {"eps": fmt.scaling.eps, "pow2": fmt.scaling.pow2, "nonfinite": fmt.nonfinite}
    return Scales(*ops.scale_from_amax(amax, element=fmt.element.name, **options))


def cast(ops: Any, x: Array, fmt: Format, scale: Array, block: Sequence[int], philox: Philox | None = None) -> Array:
    """Cast `x` with one encode scale per `block` of (rows, cols). Codes are in the order of `x`.

    Raises ValueError if `fmt` rounds stochastically and `philox` is None.
    """
    size = {"block_rows": block[0], "block_cols": block[1]}
    if not fmt.stochastic:
        return ops.cast_block(x, scale, element=fmt.element.name, **size)
    if philox is None:
        raise ValueError(seed_missing("quantize", fmt))
    return ops.cast_block_stochastic(x, scale, philox.seed, philox.offset, **philox.steps(x.shape[-1]), **size)


def dequantize(
    ops: Any, parts: Plane, fmt: Format, usage: Usage, dtype: Any, *, block: tuple[int, int] | None = None
) -> Array:
    """Dequantize a plane, in its stored order, to `dtype` (the front end's type).

    `block` is (rows, cols) per element of `scale_inv`, if smaller than a block of the format.
    """
    if fmt.block is None:
        return ops.dequantize(parts.data, parts.scale_inv, element=fmt.element.name, dtype=dtype)
    block = block or stored_block(fmt, usage)
    assert block is not None
    size = {"block_rows": block[0], "block_cols": block[1], "dtype": dtype}
    if fmt.scaling.global_scale is not None:
        return ops.dequantize_nvfp4(parts.data, parts.scale_inv, parts.global_scale_inv, **size)
    return ops.dequantize_block(
        parts.data, parts.scale_inv, element=fmt.element.name, scale_dtype=fmt.scale_dtype, **size
    )


def transpose_plane(ops: Any, parts: Plane, fmt: Format) -> Plane:
    """Transpose a rowwise plane to a columnwise plane or back, for formats with one scale or 2-D blocks."""
    if fmt.block is None:
        return parts._replace(data=ops.transpose(parts.data, **outer_axes(parts.data)))
    data_t, scale_inv_t = ops.transposed_squares(parts.data, parts.scale_inv, packed=fmt.element.packed)
    return parts._replace(data=data_t, scale_inv=scale_inv_t)


def plane_rows(parts: Plane, fmt: Format, usage: Usage, start: int, stop: int) -> Plane:
    """Return views of the rows `[start, stop)` of a plane. `start` must be on a block boundary."""
    data, scale_inv, global_scale_inv = parts
    transposed, block = is_transposed(fmt, usage), fmt.block_of(usage)
    unit = fmt.element.codes_per_byte if transposed else 1  # packed along the last axis
    data = _slice(data, transposed, start // unit, -(-stop // unit))
    if block is not None:
        scale_inv = _slice(scale_inv, transposed, start // block[0], -(-stop // block[0]))
    if global_scale_inv is not None and fmt.row_scaled:
        global_scale_inv = global_scale_inv[start:stop]
    return Plane(data, scale_inv, global_scale_inv)


def _slice(array: Array, transposed: bool, start: int, stop: int) -> Array:
    return array[:, start:stop] if transposed else array[start:stop]


def planes_of_one_scale(codes: Sequence[Array], usage: Usage, scale_inv: Array) -> dict[Usage, Plane]:
    """Build the planes for `usage` from the codes of the rowwise plane, or of both planes."""
    made = zip(Usage.BOTH.planes, codes, strict=False)
    return {each: Plane(data, scale_inv) for each, data in made if each in usage.planes}


def outer_axes(x: Array) -> dict[str, int]:
    """Return the attribute `outer` of ops with transposed results: the number of outer axes of `x` `[*outer, M, K]`."""
    return {"outer": x.ndim - 2} if x.ndim > 2 else {}


def global_scale_inv(ops: Any, fmt: Format, whole: Array | None) -> Array | None:
    """Compute the global scale that decodes, from amaxes of the tensor or its rows; None if the format has none."""
    if fmt.scaling.global_scale is None:
        return None
    return ops.global_scale_nvfp4(whole, scale_max=fmt.scaling.scale_max)[1]


def _in_steps(ops: Any, x: Array, fmt: Format, usage: Usage, whole: Array | None) -> Plane:
    """Compute a plane in steps, with several reads of `x`: amaxes, the better of two scales per block, codes."""
    block = stored_block(fmt, usage)
    assert block is not None
    if is_transposed(fmt, usage):
        x = ops.swap_last_axes(x)
    scale, scale_inv = ops.scale_four_over_six(
        x,
        block_amax(ops, x, block),
        whole,
        error=fmt.scaling.four_over_six,
        scale_max=fmt.scaling.scale_max,
        nonfinite=fmt.nonfinite,
        block_rows=block[0],
        block_cols=block[1],
    )
    return Plane(cast(ops, x, fmt, scale, block), scale_inv, global_scale_inv(ops, fmt, whole))


def _quantize_at_once(
    ops: Any, x: Array, fmt: Format, usage: Usage, amaxes: dict[Usage, Array | None], philox: Philox | None
) -> dict[Usage, Plane]:
    """Compute planes with one read of `x`, after the read for `amaxes`."""
    operands, planes = [x], usage.planes
    op, block = op_and_block(fmt, usage)
    if fmt.scaling.global_scale is not None:
        apart = usage is Usage.BOTH and not fmt.shares_codes  # one global amax per plane
        operands += [amaxes[each] for each in (planes if apart else planes[:1])]
        options: dict[str, Any] = {"scale_max": fmt.scaling.scale_max, "nonfinite": fmt.nonfinite}
    else:
        options = block_options(fmt)
    if fmt.rotates(usage):
        options["hadamard"] = True
    if fmt.stochastic:
        assert philox is not None
        operands += [philox.seed, philox.offset]
        options |= philox.steps(x.shape[-1])
    if op.endswith("_t") or fmt.transposes_columns and usage is Usage.BOTH:  # a plane is transposed
        options |= outer_axes(x)
    made = getattr(ops, op)(*operands, block_rows=block[0], block_cols=block[1], **options)
    global_inv, found = global_scale_inv(ops, fmt, amaxes[planes[0]]), {}
    for each, data, scale_inv in zip(planes, made[::2], made[1::2], strict=True):
        if amaxes[each] is not amaxes[planes[0]]:
            global_inv = global_scale_inv(ops, fmt, amaxes[each])
        found[each] = Plane(data, scale_inv, global_inv)
    return found


def op_and_block(fmt: Format, usage: Usage) -> tuple[str, tuple[int, int]]:
    """Return the op that quantizes blocks into the planes of `usage` with one read of `x`, and its block.

    The op that does so for padded rows has the same name with `_rows`.

    >>> from qshard.formats import MXFP8_E4M3, NVFP4
    >>> op_and_block(MXFP8_E4M3, Usage.COLUMNWISE), op_and_block(NVFP4, Usage.BOTH)
    (('quantize_block', (32, 1)), ('quantize_nvfp4_both', (16, 16)))
    """
    family = "quantize_block" if fmt.scaling.global_scale is None else "quantize_nvfp4"
    if fmt.stochastic:
        family += "_stochastic"
    block = fmt.block_shape(usage)
    if usage is not Usage.BOTH:
        return f"{family}_t" if is_transposed(fmt, usage) else family, block
    planes = "square_both" if fmt.shares_codes else "both_t" if fmt.transposes_columns else "both"
    return _BOTH[family, planes], (max(block), max(block))


def block_options(fmt: Format) -> dict[str, Any]:
    """Return the attributes of the ops that quantize blocks without a global scale."""
    return {
        "element": fmt.element.name,
        "eps": fmt.scaling.eps,
        "pow2": fmt.scaling.pow2,
        "rounding": fmt.scaling.scale_rounding,
        "scale_dtype": fmt.scale_dtype,
        "nonfinite": fmt.nonfinite,
    }


# Ops that compute both planes: of 2-D blocks; of 1-D blocks, stored transposed; of 1-D blocks, in the order of `x`.
_BOTH = {
    ("quantize_block", "square_both"): "quantize_square_both",
    ("quantize_block", "both_t"): "quantize_block_both_t",
    ("quantize_block", "both"): "quantize_block_both",
    ("quantize_nvfp4", "square_both"): "quantize_nvfp4_square_both",
    ("quantize_nvfp4", "both_t"): "quantize_nvfp4_both",
    ("quantize_nvfp4_stochastic", "both_t"): "quantize_nvfp4_stochastic_both",
}
