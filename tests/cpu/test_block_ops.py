"""The steps of quantizing in blocks, one kernel at a time and in the order of a front end, against the reference."""

import itertools

import numpy as np
import pytest

from qshard import formats, layout, reference
from qshard.formats import E2M1, E4M3, E5M2, E8M0, FloatScaling, Format, PowerScaling, Usage
from support.awkward import DTYPES, assert_bits_equal, awkward_values, fits
from support.op_calls import call

BLOCKS = [
    (1, 16),
    (1, 32),
    (32, 1),
    (32, 32),
    (1, 128),
    (128, 128),
    (16, 1),
    (16, 16),
    (3, 5),
    (1, 1000),
    (1000, 1),
    (7, 1),
]
SHAPES = [(0, 32), (32, 0), (1, 1), (1, 7), (13, 1), (31, 37), (16, 16), (64, 96), (127, 131), (160, 288), (3, 4100)]
OPTIONS = [
    *(fmt for fmt in formats.FORMATS.values() if fmt.block),
    formats.FP8_1x128.with_options(pow2=False),
    formats.FP8_128x128.with_options(element=E5M2, eps=1e-3),
    formats.MXFP8_E4M3.with_options(scale_rounding="floor"),
    formats.MXFP8_E5M2.with_options(scale_rounding="floor"),
    formats.NVFP4.with_options(global_scale="row"),
    formats.NVFP4.with_options(scale_max=256.0),
    *(
        fmt.with_options(four_over_six=error, scale_max=scale_max)
        for fmt in (formats.NVFP4, formats.NVFP4_16x16, formats.NVFP4.with_options(global_scale="row"))
        for error in ("mae", "mse")
        for scale_max in (448.0, 256.0)
    ),
    formats.NVFP4.with_options(rounding="stochastic"),
    formats.NVFP4.with_options(hadamard=True),
    formats.NVFP4.with_options(hadamard=True, rounding="stochastic"),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def words(*values: int) -> np.ndarray:
    """64-bit numbers as pairs of words, the low one first."""
    return np.array(values, np.uint64).view(np.uint32).reshape(*([len(values)] if len(values) > 1 else []), 2)


def quantize(x, fmt, usage, seed=0, start=0, row_stride=None, whole=None):
    """(data, scale_inv, global_scale_inv) of a plane `[M, K]`, from the ops alone.

    A transposed plane is the rowwise plane of the transpose of `x`; `whole` is the global amax.
    """
    row_step, col_step = x.shape[1] if row_stride is None else row_stride, 1
    turned = layout.is_transposed(fmt, usage) and not fmt.transposes
    if turned:
        x, row_step, col_step = np.ascontiguousarray(x.T), col_step, row_step
    block = fmt.block if turned else fmt.block_of(usage)
    where = {"block_rows": block[0], "block_cols": block[1]}
    if turned and fmt.hadamard:
        x = call("hadamard", x, **where)
    amax = call("amax_block", x, **where)
    global_scale_inv, shown = None, {"nonfinite": fmt.nonfinite}
    if fmt.scale_dtype == "float32":
        scale, scale_inv = call(
            "scale_from_amax", amax, element=fmt.element.name, eps=fmt.scaling.eps, pow2=fmt.scaling.pow2, **shown
        )
    elif fmt.scale_dtype == E8M0.name:
        scale, scale_inv = call(
            "scale_e8m0", amax, element=fmt.element.name, rounding=fmt.scaling.scale_rounding, **shown
        )
    else:
        if whole is None:
            whole = reference.amax(amax, axis=1 if fmt.scaling.global_scale == "row" else None)
        _, global_scale_inv = call("global_scale_nvfp4", whole, scale_max=fmt.scaling.scale_max)
        if fmt.scaling.four_over_six:
            error = {"error": fmt.scaling.four_over_six, "scale_max": fmt.scaling.scale_max}
            scale, scale_inv = call("scale_four_over_six", x, amax, whole, **error, **where, **shown)
        else:
            scale, scale_inv = call("scale_nvfp4", amax, whole, scale_max=fmt.scaling.scale_max, **shown)
    if fmt.rounding == "stochastic":
        steps = {"row_step": row_step, "col_step": col_step}
        data = call("cast_block_stochastic", x, scale, words(seed), words(start), **steps, **where)
    else:
        data = call("cast_block", x, scale, element=fmt.element.name, **where)
    if usage is Usage.COLUMNWISE and fmt.transposes:
        packed = fmt.element is E2M1
        data = call("transpose_packed", data) if packed else call("transpose", data, batch=0)
        scale_inv = np.ascontiguousarray(scale_inv.T)
    return data, scale_inv, global_scale_inv


def dequantize(data, scale_inv, global_scale_inv, fmt, block, dtype):
    where = {"block_rows": block[0], "block_cols": block[1], "dtype": dtype}
    if global_scale_inv is not None:
        return call("dequantize_nvfp4", data, scale_inv, global_scale_inv, **where)
    return call("dequantize_block", data, scale_inv, element=fmt.element.name, scale_dtype=fmt.scale_dtype, **where)


@dtypes
@pytest.mark.parametrize("fmt", OPTIONS, ids=str)
def test_ops_in_order_are_quantize(fmt, dtype):
    for usage in Usage.BOTH:
        for shape in [*SHAPES, (64, 32), (128, 512)]:
            if not fits(fmt, shape, usage):
                continue
            x = awkward_values(shape, sum(shape), dtype)
            x[::3] = x[::3] if shape[0] < 9 else awkward_values(x[::3].shape, 1, dtype, kinds=["normal", "ties"])
            data, scale_inv, global_scale_inv = quantize(x, fmt, usage, seed=3)
            want = reference.quantize(x, fmt, usage, seed=3)
            plane = want.rowwise or want.columnwise
            assert_bits_equal(data, plane.data, f"{usage} {shape} data")
            assert_bits_equal(scale_inv, plane.scale_inv, f"{usage} {shape} scale_inv")
            if fmt.scaling.global_scale:
                assert_bits_equal(global_scale_inv, plane.global_scale_inv, f"{usage} {shape} global_scale_inv")
            turned = layout.plane(fmt, shape, usage).transposed
            for out in DTYPES:
                block = fmt.block if turned else fmt.block_of(usage)
                values = dequantize(data, scale_inv, global_scale_inv, fmt, block, out)
                assert_bits_equal(values.T if turned else values, want.dequantize(out), f"{fmt} {usage} {shape} {out}")


@dtypes
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_amax_block(block, dtype):
    for shape in SHAPES:
        x = awkward_values(shape, 1, dtype)
        amax = call("amax_block", x, block_rows=block[0], block_cols=block[1])
        assert_bits_equal(amax, reference.block_amax(x, block), f"{shape}")


@dtypes
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_casts_with_any_scales_in_any_blocks(block, dtype):
    for shape, element in itertools.product(SHAPES, PowerScaling.elements):
        if element is E2M1 and shape[1] % 2:
            continue
        x = awkward_values(shape, 2, dtype)
        grid = [-(-size // unit) for size, unit in zip(shape, block, strict=True)]
        scale = awkward_values((*grid, 1), 3)[..., 0]
        where = {"block_rows": block[0], "block_cols": block[1]}
        each = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: shape[0], : shape[1]]
        with np.errstate(all="ignore"):
            codes = reference.encode(x.astype(np.float32) * each, element)
        data = call("cast_block", x, scale, element=element.name, **where)
        assert_bits_equal(data, reference.pack(codes) if element is E2M1 else codes, f"{element} {shape}")
        if element not in FloatScaling.elements:
            continue
        with np.errstate(all="ignore"):
            values = (reference.decode(codes, element) * each).astype(dtype)
        values[np.isnan(values)] = np.nan
        back = call("dequantize_block", data, scale, element=element.name, scale_dtype="float32", dtype=dtype, **where)
        assert_bits_equal(back, values, f"{element} {shape} back")


@dtypes
@pytest.mark.parametrize("element", PowerScaling.elements, ids=str)
def test_every_16_bit_input(element, dtype):
    """As elements, and as amaxes of blocks. Of fp32: every exponent, around ties."""
    bits = np.arange(2**16, dtype=np.uint32)
    x = (bits << 16 | bits % 3).view(np.float32) if dtype == np.float32 else bits.astype(np.uint16).view(dtype)
    x = x.reshape(-1, 16)
    where = {"block_rows": 1, "block_cols": 16}
    data = call("cast_block", x, np.ones((len(x), 1), np.float32), element=element.name, **where)
    codes = reference.encode(x.astype(np.float32), element)
    assert_bits_equal(data, reference.pack(codes) if element is E2M1 else codes)
    amax = np.abs(x.astype(np.float32))
    if element is E2M1:
        for whole in (0.0, 1e-38, 1.0, 3.3e38, np.inf, np.nan):
            whole = np.float32(whole)
            for scale_max in (448.0, 256.0):
                fmt = formats.NVFP4.with_options(scale_max=scale_max)
                want = reference.scales_from_amax(reference.Amax(whole, amax), fmt)
                scale, scale_inv = call("scale_nvfp4", amax, whole, scale_max=scale_max)
                assert_bits_equal(scale, want.multiplier)
                assert_bits_equal(scale_inv, want.scale_inv)
    else:
        for rounding in ("up", "floor"):
            fmt = formats.MXFP8_E4M3.with_options(element=element, scale_rounding=rounding)
            want = reference.scales_from_amax(reference.Amax(None, amax), fmt)
            scale, scale_inv = call("scale_e8m0", amax, element=element.name, rounding=rounding)
            assert_bits_equal(scale, want.multiplier)
            assert_bits_equal(scale_inv, want.scale_inv)


def test_every_code_is_decoded_under_every_kind_of_scale():
    codes = np.arange(256, dtype=np.uint8)
    data = np.tile(codes, (256, 1))
    where = {"block_rows": 1, "block_cols": 256}
    for element, dtype in itertools.product((E4M3, E5M2), DTYPES):
        with np.errstate(all="ignore"):
            want = (reference.decode(data, element) * reference.decode(codes, E8M0)[:, None]).astype(dtype)
        want[np.isnan(want)] = np.nan
        options = {"element": element.name, "scale_dtype": E8M0.name, "dtype": dtype}
        assert_bits_equal(call("dequantize_block", data, codes[:, None], **options, **where), want)
    for dtype, whole in itertools.product(DTYPES, (1.0, 2.0**-127, 3e38, 0.37, np.inf)):
        with np.errstate(all="ignore"):
            scale = reference.decode(codes, E4M3) * np.float32(whole)
            want = (reference.decode(reference.unpack(data), E2M1) * scale[:, None]).astype(dtype)
        want[np.isnan(want)] = np.nan
        wide = {"block_rows": 1, "block_cols": 512}
        assert_bits_equal(call("dequantize_nvfp4", data, codes[:, None], np.float32(whole), dtype=dtype, **wide), want)


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (32, 1), (16, 16), (1, 128)], ids=str)
def test_amaxes_of_shards_merge_to_that_of_the_whole(block):
    """Cut anywhere, blocks included: each shard takes the amax of its part of the grid of the whole."""
    x = awkward_values((160, 288), 5)
    where = {"block_rows": block[0], "block_cols": block[1]}
    for pieces in (2, 3, 7, 160):
        merged = np.zeros([-(-size // unit) for size, unit in zip(x.shape, block, strict=True)], np.float32)
        for rows in np.array_split(np.arange(len(x)), pieces):
            padded = np.zeros_like(x)
            padded[rows] = x[rows]
            part = call("amax_block", padded, **where)
            merged = np.maximum(merged.view(np.int32), part.view(np.int32)).view(np.float32)
        assert_bits_equal(merged, call("amax_block", x, **where))


@pytest.mark.parametrize("fmt", OPTIONS, ids=str)
def test_cast_of_shards_is_shard_of_cast(fmt: Format):
    """The law, for cuts that keep blocks whole: shards cast alone give the bytes of the whole."""
    x = awkward_values((256, 256), 6)
    for usage in Usage.BOTH:
        if not fits(fmt, x.shape, usage):
            continue
        block = fmt.block_of(usage)
        rotated = fmt.hadamard and usage is Usage.COLUMNWISE
        y = call("hadamard", np.ascontiguousarray(x.T), block_rows=1, block_cols=16) if rotated else x
        whole = reference.amax(y) if fmt.scaling.global_scale == "tensor" else None
        want = quantize(x, fmt, usage, seed=9)
        for pieces in (2, 256 // max(block[0], 16)):
            parts = [
                quantize(part, fmt, usage, seed=9, start=i * part.size, whole=whole)
                for i, part in enumerate(np.split(x, pieces))
            ]
            axis = int(layout.plane(fmt, x.shape, usage).transposed)
            for got, all_ in zip(zip(*parts, strict=True), want, strict=True):
                if all_ is None or all_.ndim == 0:
                    continue
                assert_bits_equal(np.concatenate(got, axis), all_, f"{usage} in {pieces}")


REFUSED = [
    ("amax_block", [(4, 8)], {"block_rows": 0, "block_cols": 4}, "block_rows=0|not of positive size"),
    ("cast_block", [(4, 8), (4, 3)], {"block_rows": 1, "block_cols": 4, "element": E4M3.name}, "does not fit"),
    ("cast_block", [(4, 9), (4, 1)], {"block_rows": 1, "block_cols": 16, "element": E2M1.name}, "share a byte"),
    ("hadamard", [(4, 17)], {"block_rows": 1, "block_cols": 16}, "not a whole number of block_cols=16"),
    ("hadamard", [(4, 16)], {"block_rows": 1, "block_cols": 8}, "block .1x8. is not 1x16 or 16x1"),
    ("transpose_packed", [(3, 8)], {}, "not a whole number of 2"),
    ("scale_nvfp4", [(4, 8), (3,)], {"scale_max": 448.0}, "not the first axes of amax"),
    ("scale_nvfp4", [(4, 8), ()], {"scale_max": 100.0}, "scale_max .100. is not one of 448, 256"),
    ("scale_e8m0", [(4, 8)], {"element": E8M0.name, "rounding": "up"}, "element .float8_e8m0fnu. is not one of float8"),
    ("scale_e8m0", [(4, 8)], {"element": E4M3.name, "rounding": "down"}, "rounding .down. is not one of up, floor"),
    ("swizzle_scale", [(4, 8)], {"rows": 3}, "rows .3. is not one of 1, 2, 4"),
]


@pytest.mark.parametrize(
    ("op", "shapes", "options", "error"), REFUSED, ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_what_does_not_fit_is_refused(op, shapes, options, error):
    kind = np.uint8 if op in ("transpose_packed", "swizzle_scale") else np.float32
    with pytest.raises(ValueError, match=f"{op}: .*({error})"):
        call(op, *(np.zeros(shape, kind) for shape in shapes), **options)
