"""Quantizing, dequantizing and transposing as steps over ops, written once for JAX, PyTorch and NumPy.

Each function takes `ops`, what a front end offers of `ops.def`: every op as a function of its arrays, with its
attributes as keywords; `ops.swap_last_axes(array)`, a row-major copy with the last axis first; and
`ops.transposed_squares(data, scale_inv, packed=)`, such copies of the codes and the scales of a plane. Which ops make a
plane follows from the structure of the format: one scale or blocks, vectors or squares, a global scale or none,
options. `gemm_dispatch` alone branches on that structure too, to choose the ops of products.

`x` is a matrix `[M, K]`; or, in JAX, `[*outer, M, K]`, with blocks that end with M, of which transposed planes are
`[K, *outer, M]`. Where rows do not matter to the format, it may be any `[*lead, K]`. Shapes of planes of a matrix are
those of `layout.plane`, whose errors a front end has raised before it comes here.

Blocks that shards cut are quantized in steps: `block_amax` of what each rank has, an integer maximum over ranks,
`scales` on every rank, `cast`. The result is that of `quantize` on the whole, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from qshard._core.validation import seed_missing
from qshard.formats import E8M0, Format, Usage
from qshard.layout import is_transposed, source, stored_block

Array = Any
Reduce = Callable[[Array], Array]


class Plane(NamedTuple):
    """What one GEMM reads of a quantized tensor: codes and scales. `qshard.layout` has the shapes.

    Inside of `qshard.torch_bridge`, codes and one-byte scales are uint8.

    Attributes:
      data: codes in the element's own dtype; codes of 4 bits are packed, two a uint8.
      scale_inv: `value = data * scale_inv`, in its own dtype: float32, float8_e8m0fnu or float8_e4m3fn.
      global_scale_inv: float32, a second factor of formats that have one: of the tensor, or of each row. Else None.
    """

    data: Array
    scale_inv: Array
    global_scale_inv: Array | None = None


class Scales(NamedTuple):
    """`scale` encodes (`x * scale`), `scale_inv` and `global_scale_inv` are stored."""

    scale: Array
    scale_inv: Array
    global_scale_inv: Array | None = None


class Draws(NamedTuple):
    """The random numbers of stochastic rounding: a seed, and where `x` is in the whole tensor that they belong to.

    Attributes:
      seed: uint32 or int32 `[2]`, the low word first.
      first: the index of the first element of `x` in the whole tensor, as two words. In JAX also that of each matrix of
        `x` `[*outer, M, K]`, where those do not follow one another.
      row_step: how far apart rows are in it, so how many columns it has; as many as `x` if None.
      col_step: how far apart columns are in it.
    """

    seed: Array
    first: Array
    row_step: int | None = None
    col_step: int = 1

    def transposed(self, columns: int) -> Draws:
        """Those of the transpose of `x`, which has so many columns."""
        return self._replace(row_step=self.col_step, col_step=columns if self.row_step is None else self.row_step)


def quantize(
    ops: Any,
    x: Array,
    fmt: Format,
    usage: Usage,
    *,
    reduce_max: Reduce | None = None,
    draws: Draws | None = None,
    given: Scales | None = None,
    amax: Array | None = None,
) -> dict[Usage, Plane]:
    """The planes of `x`, each from as few reads of it as its formula allows.

    Args:
      x: float32, bfloat16 or float16 `[*outer, M, K]`; `[*lead, K]` if only `ROWWISE` is asked for and a block has one
        row.
      reduce_max: what merges the amax of `x` with those of the other shards of a tensor, where one fp32 scale, or one
        global scale, serves all of them. Blocks are those of `x`: see `block_amax` for those that shards cut.
      draws: of stochastic rounding; needed by it alone.
      given: where one scale serves the whole tensor: the scale to use, in place of that of its amax.
      amax: of `x`, if what made it has taken it: not read for it again, where a format needs just that.

    Raises:
      ValueError: `fmt` rounds stochastically and there is no `draws`.
    """
    if fmt.stochastic and draws is None:  # Before the amax, which may be a collective.
        raise ValueError(seed_missing("quantize", fmt))
    if fmt.block is None:
        made = scales(ops, fmt, global_amax(ops, x, fmt, reduce_max, amax)) if given is None else given
        if usage is Usage.ROWWISE:
            codes = [ops.cast_tensor(x, made.scale, element=fmt.element.name)]
        else:
            codes = ops.cast_transpose(x, made.scale, element=fmt.element.name, **outer_axes(x))
        return planes_of_one_scale(codes, usage, made.scale_inv)
    amaxes = _global_amaxes(ops, x, fmt, usage, reduce_max, amax)
    if fmt.scaling.four_over_six is not None:
        sources = {source(fmt, each): None for each in usage.planes}
        planes = {each: _in_steps(ops, x, fmt, each, amaxes[each]) for each in sources}
    elif fmt.stochastic and fmt.transposes:  # Squares are rounded once, and codes transposed.
        planes = _quantize_at_once(ops, x, fmt, Usage.ROWWISE, amaxes, draws)
    else:
        planes = _quantize_at_once(ops, x, fmt, usage, amaxes, draws)
    return {each: planes.get(each) or transpose_plane(ops, planes[source(fmt, each)], fmt) for each in usage.planes}


def makes_planes_apart(fmt: Format) -> bool:
    """Whether `quantize` makes two planes by ops of their own."""
    return fmt.scaling.four_over_six is not None


def rotate(ops: Any, x: Array, fmt: Format) -> Array:
    """What the columnwise plane of a format with `hadamard` is of: `x` rotated along its columns, in bfloat16."""
    assert fmt.block is not None
    return ops.hadamard(x, block_rows=fmt.block[1], block_cols=fmt.block[0])


def global_amax(
    ops: Any, x: Array, fmt: Format, reduce_max: Reduce | None = None, amax: Array | None = None
) -> Array | None:
    """What one fp32 scale of the whole tensor, or of each row, is made of; None if the format has none.

    `amax`: that of `x`, if it has been taken.
    """
    if not (fmt.tensor_scaled or fmt.row_scaled):
        return None
    if amax is None or fmt.row_scaled:
        amax = ops.amax_tensor(x, lead=x.ndim - 1 if fmt.row_scaled else 0)
    return amax if reduce_max is None else reduce_max(amax)


def _global_amaxes(
    ops: Any, x: Array, fmt: Format, usage: Usage, reduce_max: Reduce | None, amax: Array | None
) -> dict[Usage, Array | None]:
    """What the global scale of each plane is made of, from one read of `x`."""
    if not fmt.rotates(usage) or 0 in x.shape:
        return dict.fromkeys(Usage.BOTH.planes, global_amax(ops, x, fmt, reduce_max, amax))
    both = ops.amax_hadamard(x, block_rows=x.shape[-2], block_cols=x.shape[-1])
    pair = [amax.reshape(amax.shape[:-2]) for amax in both]
    amaxes = zip(Usage.BOTH.planes, pair, strict=True)
    return {each: amax if reduce_max is None else reduce_max(amax) for each, amax in amaxes if each in usage.planes}


def block_amax(ops: Any, x: Array, block: tuple[int, int]) -> Array:
    """The amax of each block. A divisor of a format's block gives parts of blocks, to be merged by a maximum."""
    return ops.amax_block(x, block_rows=block[0], block_cols=block[1])


def scales(ops: Any, fmt: Format, amax: Array, whole: Array | None = None, *, repeated: Reduce | None = None) -> Scales:
    """The scales that amaxes make, by the formula of the format: `amax` of blocks, `whole` of the tensor or its rows.

    The one scale of a format without blocks is that of `amax`.

    `repeated` gives each of several `whole` to all the leading parts of `amax` that it serves, where there are those of
    many tensors.
    Not for four over six, whose scales depend on more than amaxes.
    """
    if fmt.scaling.global_scale is not None:
        wholes = whole if repeated is None else repeated(whole)
        scale, scale_inv = ops.scale_nvfp4(amax, wholes, scale_max=fmt.scaling.scale_max, nonfinite=fmt.nonfinite)
        return Scales(scale, scale_inv, _global_scale_inv(ops, fmt, whole))
    if fmt.scale_dtype == E8M0.name:
        rule = {"rounding": fmt.scaling.scale_rounding, "nonfinite": fmt.nonfinite}
        return Scales(*ops.scale_e8m0(amax, element=fmt.element.name, **rule))
    options: dict[str, Any] = {"eps": fmt.scaling.eps, "pow2": fmt.scaling.pow2, "nonfinite": fmt.nonfinite}
    return Scales(*ops.scale_from_amax(amax, element=fmt.element.name, **options))


def cast(ops: Any, x: Array, fmt: Format, scale: Array, block: tuple[int, int], draws: Draws | None = None) -> Array:
    """The codes of `x`, with one scale for each `block` of it; in the order of `x`.

    Raises:
      ValueError: `fmt` rounds stochastically and there is no `draws`.
    """
    size = {"block_rows": block[0], "block_cols": block[1]}
    if not fmt.stochastic:
        return ops.cast_block(x, scale, element=fmt.element.name, **size)
    if draws is None:
        raise ValueError(seed_missing("quantize", fmt))
    row_step = x.shape[-1] if draws.row_step is None else draws.row_step
    return ops.cast_block_stochastic(
        x, scale, draws.seed, draws.first, row_step=row_step, col_step=draws.col_step, **size
    )


def quantize_swiglu_again(ops: Any, gate: Array, up: Array, fmt: Format, amax: Array) -> Plane:
    """The columnwise plane of `swiglu(gate, up)` `[M, K]`, whose amax is there, under one scale: without its memory."""
    made = scales(ops, fmt, amax)
    return Plane(ops.swiglu_cast_t(gate, up, made.scale, element=fmt.element.name), made.scale_inv)


def dequantize(
    ops: Any, parts: Plane, fmt: Format, usage: Usage, dtype: Any, *, block: tuple[int, int] | None = None
) -> Array:
    """The values of a plane, in the order in which it is stored. `dtype` is as the front end names it.

    `block` says what shares an element of `scale_inv`, if that is less than a block of the format: a part of one.
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
    """The columnwise plane from the rowwise one, or back, where both hold the same numbers: one scale or squares."""
    if fmt.block is None:
        return parts._replace(data=ops.transpose(parts.data, **outer_axes(parts.data)))
    data_t, scale_inv_t = ops.transposed_squares(parts.data, parts.scale_inv, packed=fmt.element.packed)
    return parts._replace(data=data_t, scale_inv=scale_inv_t)


def plane_rows(parts: Plane, fmt: Format, usage: Usage, start: int, stop: int) -> Plane:
    """What a plane of a matrix has of its rows `[start, stop)`; `start` is where a block begins. Views."""
    data, scale_inv, global_scale_inv = parts
    turned, block = is_transposed(fmt, usage), fmt.block_of(usage)
    unit = fmt.element.codes_per_byte if turned else 1  # Packed along the last axis.
    data = _slice(data, turned, start // unit, -(-stop // unit))
    if block is not None:
        scale_inv = _slice(scale_inv, turned, start // block[0], -(-stop // block[0]))
    if global_scale_inv is not None and fmt.row_scaled:
        global_scale_inv = global_scale_inv[start:stop]
    return Plane(data, scale_inv, global_scale_inv)


def _slice(array: Array, turned: bool, start: int, stop: int) -> Array:
    return array[:, start:stop] if turned else array[start:stop]


def planes_of_one_scale(codes: Sequence[Array], usage: Usage, scale_inv: Array) -> dict[Usage, Plane]:
    """The planes for `usage`, from the codes of the rowwise plane, or of both."""
    made = zip(Usage.BOTH.planes, codes, strict=False)
    return {each: Plane(data, scale_inv) for each, data in made if each in usage.planes}


def outer_axes(x: Array) -> dict[str, int]:
    """The attribute of ops with transposed results that says how many outer axes rows of `x` `[*outer, M, K]` have."""
    return {"outer": x.ndim - 2} if x.ndim > 2 else {}


def _global_scale_inv(ops: Any, fmt: Format, whole: Array | None) -> Array | None:
    if fmt.scaling.global_scale is None:
        return None
    return ops.global_scale_nvfp4(whole, scale_max=fmt.scaling.scale_max)[1]


def _in_steps(ops: Any, x: Array, fmt: Format, usage: Usage, whole: Array | None) -> Plane:
    """A plane through amaxes, the better of two scales, and codes: several reads of `x`."""
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
    return Plane(cast(ops, x, fmt, scale, block), scale_inv, _global_scale_inv(ops, fmt, whole))


def _quantize_at_once(
    ops: Any, x: Array, fmt: Format, usage: Usage, amaxes: dict[Usage, Array | None], draws: Draws | None
) -> dict[Usage, Plane]:
    """Planes from one read of `x`, after that for `amaxes`."""
    operands, planes = [x], usage.planes
    if fmt.scaling.global_scale is not None:
        family = "quantize_nvfp4_stochastic" if fmt.stochastic else "quantize_nvfp4"
        options: dict[str, Any] = {"scale_max": fmt.scaling.scale_max, "nonfinite": fmt.nonfinite}
    else:
        family = "quantize_block"
        options = {
            "element": fmt.element.name,
            "eps": fmt.scaling.eps,
            "pow2": fmt.scaling.pow2,
            "rounding": fmt.scaling.scale_rounding,
            "scale_dtype": fmt.scale_dtype,
            "nonfinite": fmt.nonfinite,
        }
    block = fmt.block_of(usage)
    assert block is not None
    if usage is not Usage.BOTH:
        op = f"{family}_t" if is_transposed(fmt, usage) else family
    else:
        turned = is_transposed(fmt, Usage.COLUMNWISE)
        op = _BOTH[family, "square_both" if fmt.transposes else "both_t" if turned else "both"]
        block = (max(block), max(block))
    if fmt.scaling.global_scale is not None:
        apart = usage is Usage.BOTH and not fmt.transposes  # A global amax for each plane.
        operands += [amaxes[each] for each in (planes if apart else planes[:1])]
    if fmt.rotates(usage):
        options["hadamard"] = True
    if fmt.stochastic:
        assert draws is not None
        operands += [draws.seed, draws.first]
        options |= {
            "row_step": x.shape[-1] if draws.row_step is None else draws.row_step,
            "col_step": draws.col_step,
        }
    if op.endswith("_t") or fmt.turns_columns and usage is Usage.BOTH:  # Some of it is transposed.
        options |= outer_axes(x)
    made = getattr(ops, op)(*operands, block_rows=block[0], block_cols=block[1], **options)
    global_scale_inv, found = _global_scale_inv(ops, fmt, amaxes[planes[0]]), {}
    for each, data, scale_inv in zip(planes, made[::2], made[1::2], strict=True):
        if amaxes[each] is not amaxes[planes[0]]:
            global_scale_inv = _global_scale_inv(ops, fmt, amaxes[each])
        found[each] = Plane(data, scale_inv, global_scale_inv)
    return found


# The ops that make both planes: of square blocks, of vectors that are stored transposed, and in the order of `x`.
_BOTH = {
    ("quantize_block", "square_both"): "quantize_square_both",
    ("quantize_block", "both_t"): "quantize_block_both_t",
    ("quantize_block", "both"): "quantize_block_both",
    ("quantize_nvfp4", "square_both"): "quantize_nvfp4_square_both",
    ("quantize_nvfp4", "both_t"): "quantize_nvfp4_both",
    ("quantize_nvfp4_stochastic", "both_t"): "quantize_nvfp4_stochastic_both",
}
