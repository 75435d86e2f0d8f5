"""Operands of a quantized product: format, scale source, seed and padding of each role, and checks of weights.

`OperandSpec` describes how to quantize an operand. `quantize_operand` does it with the steps of `quantize_steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Philox, Plane, Reduce
from qshard._core.validation import seed_missing
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, Shape, has_row_blocks_of, plane, source, takes_rows, whole_units
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, Role

Array = Any


# A NamedTuple, because eager PyTorch builds one per operand and call, and a frozen dataclass takes twice as long.
class OperandSpec(NamedTuple):
    """Specification of the quantization of one operand.

    Attributes:
      format: format of its codes.
      usage: planes to compute.
      role: role in a layer, which gives the operand its own random bits; None outside a layer.
      margin: delayed scaling: headroom in powers of two; None: scales come from the operand's own amaxes.
      added_rows: zero rows appended to the matrix `[M, K]` so that blocks along its rows are whole.
      op, name: the caller and its argument, for errors.
    """

    format: Format
    usage: Usage
    role: Role | None = None
    margin: int | None = None
    added_rows: int = 0
    op: str = "quantize"
    name: str = "x"

    @staticmethod
    def of(
        recipe: Recipe, role: Role, usage: Usage, rows: int = 0, *, op: str = "linear", name: str = "x"
    ) -> OperandSpec:
        """Build the spec of the operand of a layer in `role`: a matrix of `rows` rows.

        >>> spec = OperandSpec.of(DelayedScaling(margin=1), Role.ACTIVATION, Usage.BOTH, 40)
        >>> print(spec.format, spec.margin, spec.added_rows)
        FP8_E4M3[nonfinite=nan] 1 0
        """
        margin = recipe.margin if isinstance(recipe, DelayedScaling) else None
        return OperandSpec(
            recipe.format(role), usage, role, margin, recipe.added_rows(role, usage, rows), op=op, name=name
        )

    def seed_of(self, seed: Array | None, xor: Callable[[Array, int], Array]) -> Array | None:
        """Derive the seed of the operand, `seed ^ ROLE_SEEDS[role]`; None if the format rounds to nearest.

        `xor(seed, number)` is the front end's XOR of a uint64 stored as two uint32 with a 64-bit int.
        """
        if seed is None or not self.format.stochastic:
            return None
        number = 0 if self.role is None else ROLE_SEEDS[self.role]
        return xor(seed, number) if number else seed

    def layouts(self, shape: Shape) -> dict[Usage, PlaneLayout]:
        """Return the layout of each plane for an operand of this shape, or raise ValueError if it splits blocks."""
        return {each: plane(self.format, shape, each, op=self.op, name=self.name) for each in self.usage.planes}


def quantize_operand(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    *,
    scale: Array | None = None,
    philox: Philox | None = None,
    amax: Array | None = None,
    reduce_max: Reduce | None = None,
    global_amax: Array | None = None,
    is_whole: bool = False,
) -> tuple[dict[Usage, Plane], Array | None]:
    """Quantize an operand. Return its planes, and under delayed scaling the amax of `x`, otherwise None.

    A delayed scale of 0 means an empty history. The scale then comes from the amax of `x`, so `x` is read twice. With
    `reduce_max`, `x` is always read twice, because the cast may need the reduced amax.

    - `ops`: ops of a front end, as in `quantize_steps.quantize`.
    - `x`: the operand, with `spec.added_rows` already appended.
    - `scale`: delayed scale from earlier steps, `[]`.
    - `amax`: amax of `x`, if known. Under delayed scaling it is used with `reduce_max` only.
    - `reduce_max`: max-reduction of the amax of `x` over the shards of its tensor.
    - `global_amax`: under delayed scaling, amax of the whole tensor, after any reduction, in place of `reduce_max`.
    - `is_whole`: `x` is a whole matrix on one device, as in `quantize_steps.quantize`.
    """
    fmt, usage = spec.format, spec.usage
    if spec.margin is None:
        planes = quantize_steps.quantize(
            ops, x, fmt, usage, reduce_max=reduce_max, philox=philox, amax=amax, is_whole=is_whole
        )
        return planes, None
    element, rowwise = {"element": fmt.element.name}, usage is Usage.ROWWISE
    options: dict[str, Any] = {**element, "nonfinite": fmt.nonfinite}
    if reduce_max is not None:
        global_amax = reduce_max(ops.amax_tensor(x, lead=0) if amax is None else amax)
    if global_amax is not None:
        amax = global_amax
        scale, scale_inv = ops.delayed_scale(amax, scale, margin=spec.margin, **element)
        if rowwise:
            codes = [ops.cast_tensor(x, scale, **options)]
        else:
            codes = ops.cast_transpose(x, scale, **quantize_steps.outer_axes(x), **options)
    elif rowwise:
        *codes, amax, scale_inv = ops.cast_delayed(x, scale, lead=0, margin=spec.margin, **options)
    else:
        *codes, amax, scale_inv = ops.cast_transpose_delayed(x, scale, batch=0, margin=spec.margin, **options)
    return quantize_steps.planes_of_one_scale(codes, usage, scale_inv), amax


def quantize_rows(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    rows: Array,
    stops: Array,
    *,
    scale: Array | None = None,
    seeds: Array | None = None,
    reduce_max: Reduce | None = None,
    row_amaxes: Array | None = None,
) -> tuple[dict[Usage, Plane], Array | None]:
    """Quantize tokens `x` `[T, K]`, sorted by expert, into P padded rows.

    Padded rows have the rows of each expert one after the other, and zeros up to a multiple of the tallest block. The
    codes of an expert are the same as if its rows were quantized alone. Ops gather the rows.

    - `ops`: ops of a front end, as in `quantize_steps.quantize`.
    - `spec`: the operand; its usage includes the rowwise plane.
    - `rows`: int32 `[P]`, for each padded row the row of `x`, or T and more for zeros. P is a multiple of the format's
      block.
    - `stops`: int32 `[E]`, the end of each expert's padded rows, multiples of the format's block.
    - `scale`: fp32 `[E]`, the scales of delayed scaling.
    - `seeds`: uint32 or int32 `[E, 2]`, the Philox key of each expert as two words, low first; for stochastic rounding.
    - `reduce_max`: max-reduction of the amaxes `[E]` over the devices that have rows of the same experts.
    - `row_amaxes`: fp32 `[T]`, the amax of each row of `x`, if known. It saves the read of `x` for amaxes of experts.

    Returns the planes, and under delayed scaling the amax of each expert, otherwise None. The planes belong to the
    matrix of padded rows `[P, K]`. Formats with one scale, or one global scale, have one for each expert, `[E]`.
    """
    fmt = spec.format
    if fmt.stochastic and seeds is None:
        raise ValueError(seed_missing(spec.op, fmt))
    measured = x if row_amaxes is None else row_amaxes.reshape(-1, 1)
    if fmt.per_tensor:
        return _rows_of_one_scale(ops, x, spec, rows, stops, scale, reduce_max, measured)
    if not takes_rows(fmt):
        return _gathered_rows(ops, x, spec, rows, stops, seeds, reduce_max, measured), None
    if fmt.tensor_scaled:
        return _nvfp4_rows(ops, x, spec, rows, stops, seeds, reduce_max, measured), None
    op, block = quantize_steps.op_and_block(fmt, spec.usage)
    options = quantize_steps.block_options(fmt)
    made = getattr(ops, f"{op}_rows")(x, rows, block_rows=block[0], block_cols=block[1], **options)
    return {each: Plane(*made[2 * i : 2 * i + 2]) for i, each in enumerate(spec.usage.planes)}, None


def _amaxes_of_experts(
    ops: Any, x: Array, rows: Array, stops: Array, reduce_max: Reduce | None, *, rotated: bool = False
) -> list[Array]:
    """Return the amaxes `[E]` of the rows of each expert, and with `rotated` also the amaxes of its rotated columns."""
    amaxes = ops.amax_hadamard_grouped(x, rows, stops) if rotated else (ops.amax_grouped(x, rows, stops),)
    return [amax if reduce_max is None else reduce_max(amax) for amax in amaxes]


def _rows_of_one_scale(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    rows: Array,
    stops: Array,
    scale: Array | None,
    reduce_max: Reduce | None,
    measured: Array,
) -> tuple[dict[Usage, Plane], Array | None]:
    """Quantize padded rows with one scale for each expert. `measured` has rows with the amaxes of the rows of `x`."""
    fmt, both = spec.format, spec.usage is Usage.BOTH
    (amax,) = _amaxes_of_experts(ops, measured, rows, stops, reduce_max)
    options: dict[str, Any] = {"element": fmt.element.name}
    if spec.margin is None:
        scale, scale_inv, _ = quantize_steps.scales(ops, fmt, amax)
    else:
        scale, scale_inv = ops.delayed_scale(amax, scale, margin=spec.margin, **options)
        options["nonfinite"] = fmt.nonfinite
    cast = ops.cast_transpose_grouped if both else ops.cast_grouped
    made = cast(x, rows, stops, scale, **options)
    planes = quantize_steps.planes_of_one_scale(made if both else [made], spec.usage, scale_inv)
    return planes, None if spec.margin is None else amax


def _nvfp4_rows(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    rows: Array,
    stops: Array,
    seeds: Array | None,
    reduce_max: Reduce | None,
    measured: Array,
) -> dict[Usage, Plane]:
    """Quantize padded rows with a global scale for each expert. 2-D blocks are quantized once, and transposed."""
    fmt, usage = spec.format, spec.usage
    rotates, two_sets = fmt.rotates(usage), usage is Usage.BOTH and not fmt.shares_codes
    amaxes = _amaxes_of_experts(ops, x if rotates else measured, rows, stops, reduce_max, rotated=rotates)
    options: dict[str, Any] = {"scale_max": fmt.scaling.scale_max, "nonfinite": fmt.nonfinite}
    operands = [x, rows, stops, amaxes[0]]
    if two_sets:
        operands.append(amaxes[-1])
        options["hadamard"] = rotates
    if fmt.stochastic:
        operands.append(seeds)
    op, block = quantize_steps.op_and_block(fmt, usage if two_sets else Usage.ROWWISE)
    made = getattr(ops, f"{op}_rows")(*operands, block_rows=block[0], block_cols=block[1], **options)
    scales = [quantize_steps.global_scale_inv(ops, fmt, amax) for amax in amaxes]
    planes = {Usage.ROWWISE: Plane(made[0], made[1], scales[0])}
    if two_sets:
        planes[Usage.COLUMNWISE] = Plane(made[2], made[3], scales[-1])
    elif usage is Usage.BOTH:
        planes[Usage.COLUMNWISE] = quantize_steps.transpose_plane(ops, planes[Usage.ROWWISE], fmt)
    return planes


def _gathered_rows(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    rows: Array,
    stops: Array,
    seeds: Array | None,
    reduce_max: Reduce | None,
    measured: Array,
) -> dict[Usage, Plane]:
    """Gather padded rows, and quantize them as one matrix, with several reads.

    No op quantizes these formats into padded rows: four over six tries two scales for each block, and a format may have
    a global scale for each row.
    """
    fmt, padded = spec.format, ops.gather_rows(x, rows)
    (count, columns), usage = padded.shape, spec.usage
    if fmt.row_scaled:
        philox = None if seeds is None else Philox(*ops.philox_of_rows(seeds, stops, count, columns))
        return quantize_steps.quantize(ops, padded, fmt, usage, philox=philox)
    (amax,) = _amaxes_of_experts(ops, measured, rows, stops, reduce_max)
    height, strip = fmt.block_shape()
    grids = {Usage.ROWWISE: (height, (count // height,)), Usage.COLUMNWISE: (strip, (columns, count // strip))}
    planes: dict[Usage, Plane] = {}
    for each in dict.fromkeys(source(fmt, each) for each in usage.planes):
        whole = ops.values_of_strips(amax, stops, *grids[each])
        planes |= quantize_steps.quantize(ops, padded, fmt, each, amax=whole)
    global_scale_inv = quantize_steps.global_scale_inv(ops, fmt, amax)
    planes = {each: plane._replace(global_scale_inv=global_scale_inv) for each, plane in planes.items()}
    if usage is Usage.BOTH and fmt.shares_codes:
        planes[Usage.COLUMNWISE] = quantize_steps.transpose_plane(ops, planes[Usage.ROWWISE], fmt)
    return planes


def check_state(
    op: str, name: str, given: object, recipe: Recipe, advice: str, *, layers: str = "", fits: bool = True
) -> None:
    """Raise ValueError unless state is passed exactly if the recipe keeps state. `advice` says what to pass.

    - `given`: description of the state that was passed; None if none was.
    - `layers`: description of the layers that the state is for.
    - `fits`: False if the state does not match the other arguments.
    """
    kind = type(recipe).__name__
    if recipe.stateful and given is None:
        raise ValueError(f"{op}: {kind} needs `{name}`; pass {advice}")
    if given is not None and not recipe.stateful:
        raise ValueError(f"{op}: {name} is for DelayedScaling, and the recipe is {kind}; leave it out")
    if not fits:
        raise ValueError(f"{op}: {name} ({given}) does not fit {layers or 'the other arguments'}; pass {advice}")


CAST_OPTIONS = ("nonfinite", "pow2", "eps")
"""Options that affect casts, but not the meaning of codes."""


def takes_frozen(fmt: Format, recipe: Recipe) -> bool:
    """Return whether codes of `fmt` can be a frozen weight though the recipe's weights have 2-D blocks.

    Engines store 1-D blocks along K, which the forward product contracts. Their columnwise plane has other codes, so
    the gradient of x multiplies dequantized values.

    >>> from qshard.formats import MXFP8_E4M3, NVFP4
    >>> from qshard.recipes import MXFP8
    >>> [takes_frozen(MXFP8_E4M3, MXFP8()), takes_frozen(NVFP4, MXFP8())]
    [True, False]
    """
    return recipe.weight.shares_codes and has_row_blocks_of(fmt, recipe.weight)


def two_formats_error(op: str, name: str, advice: str = "") -> NotImplementedError:
    """Return the error for a weight that forward and dgrad use in two formats. `advice`: another way out."""
    return NotImplementedError(
        f"{op}: {name} has two formats, because the recipe changes forward or dgrad, but codes are gathered in one; "
        f"pass a recipe that changes wgrad alone{advice}"
    )


def check_takes_codes(op: str, name: str, recipe: Recipe) -> None:
    """Raise ValueError if no codes can be the weight `name` of a layer, whatever their format."""
    if not recipe.has_one_weight:
        raise ValueError(
            f"{op}: {name} is codes, but forward and dgrad of {recipe} need its values, for other formats; pass a "
            "weight in high precision, or a recipe that changes wgrad alone"
        )


def check_weight_format(op: str, name: str, fmt: Format, recipe: Recipe, *, frozen: bool = False) -> None:
    """Raise ValueError unless codes of `fmt` can be the weight of a layer with this recipe.

    `frozen` also accepts 1-D blocks (`takes_frozen`).
    """
    check_takes_codes(op, f"{name} ({fmt})", recipe)
    if frozen and takes_frozen(fmt, recipe):
        return
    own, wanted = fmt.options, recipe.weight.options
    same = {option: wanted[option] for option in CAST_OPTIONS if option in own and option in wanted}
    if fmt.with_options(**same) == recipe.weight:
        return
    what, remedy = "is not in the weight format of the recipe", f"quantize it to {recipe.weight}"
    if fmt.name == recipe.weight.name and own.keys() == wanted.keys():
        differ = [option for option in own if option not in CAST_OPTIONS and own[option] != wanted[option]]
        had, needed = (", ".join(f"{option}={of[option]}" for option in differ) for of in (own, wanted))
        what = f"has {had}, but the weight format of the recipe has {needed}"
    raise ValueError(f"{op}: {name} ({fmt}) {what}; {remedy}")


def operand_planes(recipe: Recipe) -> list[tuple[Role, Format, Usage]]:
    """Return the planes that the three products of a layer contract, first the planes of the weight.

    >>> from qshard.recipes import NVFP4
    >>> [(role.value, usage.name) for role, _, usage in operand_planes(NVFP4(dgrad="bf16", wgrad="bf16"))]
    [('weight', 'ROWWISE'), ('activation', 'ROWWISE')]
    """
    forward, dgrad, wgrad = recipe.products
    contracted = [
        (Role.WEIGHT, forward, Usage.ROWWISE),
        (Role.WEIGHT, dgrad, Usage.COLUMNWISE),
        (Role.ACTIVATION, forward, Usage.ROWWISE),
        (Role.GRADIENT, dgrad, Usage.ROWWISE),
        (Role.ACTIVATION, wgrad, Usage.COLUMNWISE),
        (Role.GRADIENT, wgrad, Usage.COLUMNWISE),
    ]
    return [(role, own.format(role), usage) for role, own, usage in contracted if own is not None]


def check_weight_shape(op: str, name: str, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight `[N, K]` and the tensors that multiply it have whole blocks in all products."""
    for role, fmt, usage in operand_planes(recipe):
        if role is Role.WEIGHT:
            plane(fmt, shape, usage, op=op, name=name)
            continue
        # Rows are padded.
        axis, size = ("columns", shape[1]) if role is Role.ACTIVATION else ("rows", shape[0])
        unit = whole_units(fmt, source(fmt, usage))[1]
        if size % unit:
            raise ValueError(
                f"{op}: {name} {shape} does not fit the {role.value}s, which have blocks of {unit} ({fmt}); pad the "
                f"{axis} to {size + -size % unit}"
            )
