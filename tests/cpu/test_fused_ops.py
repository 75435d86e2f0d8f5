"""Ops that quantize with one read of `x`, against the reference: every format, plane, dtype and shape."""

import functools
import itertools

import numpy as np
import pytest
import torch

from qshard import _ffi, formats, layout, reference
from qshard.formats import E2M1, E4M3, E5M2, E8M0, Format, Usage
from qshard.ops import table
from support.awkward import BFLOAT16, DTYPES, assert_bits_equal, awkward_values, fits
from support.op_calls import call

USAGES = (Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH)
OPTIONS = [
    *(fmt for fmt in formats.FORMATS.values() if fmt.block),
    formats.FP8_1x128.with_options(pow2=False),
    formats.FP8_1x128.with_options(element=E5M2, eps=1e-3),
    formats.FP8_128x128.with_options(element=E5M2, pow2=False, eps=1e-3),
    formats.MXFP8_E4M3.with_options(scale_rounding="floor"),
    formats.MXFP8_E5M2.with_options(scale_rounding="floor"),
    formats.MXFP8_32x32.with_options(element=E5M2),
    formats.NVFP4.with_options(global_scale="row"),
    formats.NVFP4.with_options(scale_max=256.0),
    formats.NVFP4_16x16.with_options(scale_max=256.0),
]
# One row, one column, K = 16, 32, 48, 80, 288, primes, empty; more than one panel, and blocks cut at both edges.
SHAPES = [
    (0, 32),
    (32, 0),
    (1, 1),
    (1, 16),
    (1, 4128),
    (7, 1),
    (257, 1),
    (3, 7),
    (16, 16),
    (32, 32),
    (31, 37),
    (127, 131),
    (129, 257),
    (16, 48),
    (64, 80),
    (96, 160),
    (544, 288),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
formats_ = pytest.mark.parametrize("fmt", OPTIONS, ids=str)


def op_of(fmt: Format, usage: Usage) -> tuple[str, dict[str, object]]:
    """The op that makes these planes, and its attributes."""
    nvfp4 = fmt.scaling.global_scale is not None
    rows, cols = fmt.block if usage is not Usage.COLUMNWISE else fmt.block[::-1]
    if usage is Usage.BOTH and not fmt.transposes:
        rows = cols
    turned = layout.is_transposed(fmt, Usage.COLUMNWISE)
    name = {Usage.ROWWISE: "", Usage.COLUMNWISE: "_t" if turned else "", Usage.BOTH: "_both"}[usage]
    if usage is Usage.BOTH and turned and not nvfp4 and not fmt.transposes:
        name = "_both_t"
    if usage is Usage.BOTH and fmt.transposes:
        name = "_square_both"
    where = {"block_rows": rows, "block_cols": cols, "nonfinite": fmt.nonfinite}
    if nvfp4:
        return f"quantize_nvfp4{name}", {"scale_max": fmt.scaling.scale_max, **where}
    name = "quantize_square_both" if name == "_square_both" else f"quantize_block{name}"
    scales = {
        "eps": fmt.scaling.eps,
        "pow2": fmt.scaling.pow2,
        "rounding": fmt.scaling.scale_rounding,
        "scale_dtype": fmt.scale_dtype,
    }
    return name, {"element": fmt.element.name, **scales, **where}


def global_amax(x: np.ndarray, fmt: Format) -> list[np.ndarray]:
    """The operand that NVFP4 ops have besides a matrix."""
    if fmt.scaling.global_scale is None:
        return []
    return [np.asarray(reference.amax(x, axis=-1 if fmt.scaling.global_scale == "row" else None))]


def expected(x: np.ndarray, fmt: Format, usage: Usage, whole: np.ndarray | None = None) -> list[np.ndarray]:
    """What the op gives, from the reference's planes."""
    planes = reference.quantize(x, fmt, usage, amax=whole)
    both = [plane for plane in (planes.rowwise, planes.columnwise) if plane is not None]
    return [part for plane in both for part in (plane.data, plane.scale_inv)]


def check(x: np.ndarray, fmt: Format, usage: Usage, what: str = "") -> None:
    op, attributes = op_of(fmt, usage)
    got = call(op, x, *global_amax(x, fmt), **attributes)
    names = [operand.name for operand in table()[op].outputs]
    for name, a, b in zip(names, got, expected(x, fmt, usage), strict=True):
        assert_bits_equal(a, b, f"{op} {fmt} {x.dtype} {x.shape} {name} {what}")


def cases(fmt: Format, usage: Usage, shapes: list[tuple[int, int]] = SHAPES) -> list[tuple[int, int]]:
    legal = usage is Usage.ROWWISE or fmt.scaling.global_scale != "row"
    return [shape for shape in shapes if legal and fits(fmt, shape, usage)]


@dtypes
@formats_
def test_planes_are_those_of_the_reference(fmt, dtype):
    check_planes(fmt, dtype, SHAPES)


def check_planes(fmt, dtype, shapes):
    for usage in USAGES:
        for shape in cases(fmt, usage, shapes):
            x = awkward_values(shape, sum(shape), dtype)
            check(x, fmt, usage)
            # Rows that are infinite or NaN leave no block down a column sane.
            check(awkward_values(shape, 3, dtype, kinds=["normal", "ties", "wide"]), fmt, usage, "tame")


@functools.cache
def every_value(dtype: np.dtype) -> np.ndarray:
    """Every 16-bit float, once; of fp32, every exponent with mantissas around ties."""
    bits = np.arange(2**16, dtype=np.uint32)
    values = (bits << 16 | bits % 3).view(np.float32) if dtype == np.float32 else bits.astype(np.uint16).view(dtype)
    return values.reshape(256, 256)


@dtypes
@formats_
def test_every_16_bit_value(fmt, dtype):
    """As an element among its like: in order, an amax is in its binade; in disorder, zeros and NaN are next to it."""
    x = every_value(dtype)
    orders = [x, np.random.default_rng(0).permutation(x.reshape(-1)).reshape(x.shape)]
    finite = np.where(np.isfinite(x.astype(np.float32)), x, dtype.type(0))
    large = np.abs(finite.astype(np.float32)) > np.sqrt(float(np.abs(finite).max()))
    for values in (*orders, finite, np.where(large, dtype.type(0), finite), np.ascontiguousarray(finite.T)):
        for usage in USAGES:
            if cases(fmt, usage):
                check(values, fmt, usage)


def batches(fmt: Format, usage: Usage) -> list[tuple[int, ...]]:
    shapes = [(2, 96, 160), (3, 256, 128), (2, 3, 32, 32), (3, 0, 32), (0, 32, 32)]
    return [
        s for s in shapes if fits(fmt, s[-2:], usage) and (usage is Usage.ROWWISE or fmt.scaling.global_scale != "row")
    ]


@formats_
def test_batch_axes(fmt):
    """Each matrix is quantized alone; a global amax is that of all of them, or of each matrix, row, or block."""
    for usage in USAGES:
        op, attributes = op_of(fmt, usage)
        for shape in batches(fmt, usage):
            x = awkward_values(shape, 5, BFLOAT16)
            matrices = [x[i] for i in np.ndindex(shape[:-2])]
            if fmt.scaling.global_scale == "row":
                operands = [[reference.amax(x, axis=-1)]]
                each = [reference.amax(m, axis=-1) for m in matrices]
            elif fmt.scaling.global_scale:
                each = [np.float32(i + 1) for i in range(len(matrices))]
                grid = (shape[-2] // attributes["block_rows"], shape[-1] // attributes["block_cols"])
                whole = np.array(each, np.float32).reshape(shape[:-2])
                wide = [
                    np.broadcast_to(whole.reshape(*shape[:-2], *(1,) * n), (*shape[:-2], *grid[:n])) for n in (1, 2)
                ]
                operands = [[whole], *([w.copy()] for w in wide)]
            else:
                operands, each = [[]], [None] * len(matrices)
            want = [expected(m, fmt, usage, a) for m, a in zip(matrices, each, strict=True)]
            for more in operands:
                got = call(op, x, *more, **attributes)
                for i, result in enumerate(got):
                    if want:
                        parts = result.reshape(len(matrices), *result.shape[len(shape) - 2 :])
                        assert_bits_equal(parts, np.stack([w[i] for w in want]), f"{op} {fmt} {shape} {i}")


BLOCKS = [(1, 1), (1, 5), (3, 1), (3, 5), (2, 300), (1, 1000), (300, 2), (1000, 1), (64, 64), (7, 130), (300, 300)]


@dtypes
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_any_size(block, dtype):
    """Larger than a piece or a panel, not a divisor of anything: the bits of the ops that it is made of."""
    where = {"block_rows": block[0], "block_cols": block[1]}
    for shape in [(1, 1), (5, 7), (260, 515), (1030, 9), (9, 2060)]:
        x = awkward_values(shape, 4, dtype)
        for scale_dtype, element in itertools.product(("float32", E8M0.name), (E4M3, E5M2)):
            options = {"element": element.name, "eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": scale_dtype}
            data, scale_inv = two_steps(x, options, where)
            turned = np.ascontiguousarray(data.T), np.ascontiguousarray(scale_inv.T)
            for op, want in [("quantize_block", (data, scale_inv)), ("quantize_block_t", turned)]:
                for a, b in zip(call(op, x, **options, **where), want, strict=True):
                    assert_bits_equal(a, b, f"{op} {shape}")
            if block[0] == block[1]:
                got = call("quantize_square_both", x, **options, **where)
                for a, b in zip(got, (data, scale_inv, *turned), strict=True):
                    assert_bits_equal(a, b, f"quantize_square_both {shape}")
            first = two_steps(x, options, {"block_rows": 1, "block_cols": block[1]})
            second = two_steps(x, options, {"block_rows": block[0], "block_cols": 1})
            turned = [np.ascontiguousarray(a.T) for a in second]
            for op, want in [("quantize_block_both", second), ("quantize_block_both_t", turned)]:
                for a, b in zip(call(op, x, **options, **where), (*first, *want), strict=True):
                    assert_bits_equal(a, b, f"{op} {shape}")


def two_steps(x, options, where):
    amax, element = call("amax_block", x, **where), options["element"]
    if options["scale_dtype"] == "float32":
        scale, scale_inv = call("scale_from_amax", amax, element=element, eps=options["eps"], pow2=options["pow2"])
    else:
        scale, scale_inv = call("scale_e8m0", amax, element=element, rounding=options["rounding"])
    return call("cast_block", x, scale, element=element, **where), scale_inv


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_odd_addresses(threads):
    """Pieces of many tasks, from and to the middle of a cache line, and nothing beside the results is written."""
    x = torch.from_numpy(awkward_values((704, 1056), 1, kinds=["normal", "ties", "zeros"])).bfloat16()
    room = torch.zeros(x.numel() + 3, dtype=torch.bfloat16)
    odd = room[3:].view(x.shape).copy_(x)
    array = x.view(torch.int16).numpy().view(BFLOAT16)
    before = _ffi.num_threads()
    _ffi.set_num_threads(threads)
    try:
        for fmt, usage in itertools.product([f for f in formats.FORMATS.values() if f.block], USAGES):
            op, attributes = op_of(fmt, usage)
            operands = [odd, *(torch.from_numpy(a) for a in global_amax(array, fmt))]
            rooms, views = [], []
            for want in expected(array, fmt, usage):
                kind = torch.float32 if want.dtype == np.float32 else torch.uint8
                rooms.append(torch.full((want.size + 130,), 90, dtype=kind))
                views.append(rooms[-1][65:-65].view(want.shape))
            _ffi.call(op, tuple(operands), tuple(views), {**attributes, "split": False})
            for space, view, want in zip(rooms, views, expected(array, fmt, usage), strict=True):
                assert_bits_equal(view.numpy(), want, f"{op} {fmt} {threads} threads")
                assert (space[:65] == 90).all()
                assert (space[-65:] == 90).all()
    finally:
        _ffi.set_num_threads(before)


FP8 = {"element": E4M3.name, "eps": 0.0, "pow2": True, "rounding": "up", "scale_dtype": "float32"}
MX = {**FP8, "scale_dtype": E8M0.name}
FP4 = {"scale_max": 448.0}
# op, block, shape of x, shapes of the results, attributes, and the error.
REFUSED = [
    ("quantize_block", (1, 4), (4, 8), [(4, 8), (4, 3)], FP8, r"scale_inv \(4, 3\) .*\(4, 2\)"),
    ("quantize_block", (1, 4), (4, 8), [(4, 7), (4, 2)], FP8, r"data \(4, 7\) .*\(4, 8\)"),
    ("quantize_block", (0, 4), (4, 8), [(4, 8), (4, 2)], FP8, "block .0x4. is not of positive"),
    ("quantize_block", (1, 4), (8,), [(8,), (2,)], FP8, "does not have the axes"),
    ("quantize_block", (1, 4), (4, 8), [(4, 8), (4, 2)], {**FP8, "eps": -1.0}, "eps .-1. is not at least 0"),
    ("quantize_block", (1, 4), (4, 8), [(4, 8), (4, 2)], {**FP8, "rounding": "x"}, "rounding .x. is not one of up"),
    ("quantize_block", (1, 4), (4, 8), [(4, 8), (4, 2)], {**FP8, "scale_dtype": "x"}, "scale_dtype .x. is not"),
    (
        "quantize_block",
        (1, 4),
        (4, 8),
        [(4, 4), (4, 2)],
        {**FP8, "element": E2M1.name},
        "element .* has no float32 scales",
    ),
    (
        "quantize_block",
        (1, 4),
        (4, 8),
        [(4, 8), (4, 2)],
        {**FP8, "split": True},
        "does not have the axes .* in split blocks",
    ),
    ("quantize_block_t", (4, 1), (4, 8), [(4, 4), (8, 1)], FP8, r"data_t \(4, 4\) .*\(8, 4\)"),
    ("quantize_block_t", (4, 1), (4, 8), [(8, 4), (2, 8)], FP8, r"scale_inv_t \(2, 8\) .*\(8, 1\)"),
    ("quantize_block_both", (4, 4), (4, 8), [(4, 8), (4, 2), (4, 8), (8, 1)], MX, "scale_inv_c .8, 1."),
    ("quantize_block_both_t", (4, 4), (4, 8), [(4, 8), (4, 2), (4, 9), (8, 1)], FP8, "data_t .4, 9."),
    ("quantize_square_both", (1, 4), (4, 8), [(4, 8), (4, 2), (8, 4), (2, 4)], FP8, "1x4. is not square"),
    ("quantize_square_both", (4, 4), (4, 8), [(4, 8), (1, 2), (8, 5), (2, 1)], FP8, "data_t .8, 5."),
    ("quantize_square_both", (4, 4), (4, 8), [(4, 8), (1, 2), (8, 4), (2, 2)], FP8, "scale_inv_t .2, 2."),
    ("quantize_nvfp4", (1, 32), (4, 32), [(4, 16), (4, 1)], FP4, "1x32. is not 1x16"),
    ("quantize_nvfp4", (1, 16), (4, 40), [(4, 20), (4, 3)], FP4, "not a whole number of block_cols=16"),
    ("quantize_nvfp4", (1, 16), (4, 32), [(4, 32), (4, 2)], FP4, r"data .4, 32. is not of shape .4, 16."),
    ("quantize_nvfp4", (1, 16), (4, 32), [(4, 16), (4, 2)], {"scale_max": 99.0}, "scale_max .99. is not"),
    ("quantize_nvfp4_t", (16, 1), (8, 32), [(32, 4), (32, 1)], FP4, "not a whole number of block_rows=16"),
    ("quantize_nvfp4_both", (1, 16), (16, 32), [(16, 16), (16, 2), (32, 8), (32, 1)], FP4, "not 16x16"),
    ("quantize_nvfp4_square_both", (1, 16), (16, 32), [(16, 16), (16, 2), (32, 8), (2, 16)], FP4, "not 16x16"),
    ("quantize_nvfp4_square_both", (16, 16), (16, 32), [(16, 16), (1, 2), (16, 16), (2, 1)], FP4, "data_t"),
]


def refused(op, block, operands, results, attributes, error):
    where = {"split": False, "block_rows": block[0], "block_cols": block[1], **attributes}
    with pytest.raises(ValueError, match=f"^{op}: .*{error}"):
        _ffi.call(op, operands, results, where)
    assert all(bool((result == 90).all()) for result in results)


def results_of(op, shapes, attributes):
    names = [operand.name for operand in table()[op].outputs]
    floats = attributes.get("scale_dtype") == "float32"
    kinds = [torch.float32 if floats and name.startswith("scale") else torch.uint8 for name in names]
    return tuple(torch.full(shape, 90, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True))


@pytest.mark.parametrize(("op", "block", "shape", "shapes", "attributes", "error"), REFUSED)
def test_bad_calls_are_refused_and_write_nothing(op, block, shape, shapes, attributes, error):
    operands = (torch.ones(shape), torch.ones(())) if "nvfp4" in op else (torch.ones(shape),)
    refused(op, block, operands, results_of(op, shapes, attributes), attributes, error)


def test_bad_dtypes_are_refused_and_write_nothing():
    x, shapes = torch.ones(4, 8), [(4, 8), (4, 2)]
    data, scale_inv = results_of("quantize_block", shapes, FP8)
    for operand, results, attributes, error in [
        (x.double(), (data, scale_inv), FP8, "x .* is not float32 or bfloat16 or float16"),
        (x, (data.float(), scale_inv), FP8, "data .* is not uint8 or float8_e4m3fn"),
        (x, (data, scale_inv.byte()), FP8, "scale_inv .* is not float32"),
        (x, (data, scale_inv), MX, "scale_inv .* is not uint8 or float8_e8m0fnu"),
    ]:
        refused("quantize_block", (1, 4), (operand,), results, attributes, error)


def test_a_global_amax_is_of_the_first_axes_of_the_grid():
    for shape in [(3,), (4, 3), (4, 2, 1)]:
        results = results_of("quantize_nvfp4", [(4, 16), (4, 2)], FP4)
        operands = torch.ones(4, 32), torch.ones(shape)
        refused(
            "quantize_nvfp4", (1, 16), operands, results, FP4, "global_amax .* is not the first axes of blocks of x"
        )


def test_shapes_are_checked_before_a_call():
    for op, shape, options in [
        ("quantize_nvfp4", (4, 40), {"block_rows": 1, "block_cols": 16}),
        ("quantize_nvfp4_both", (8, 32), {"block_rows": 16, "block_cols": 16}),
    ]:
        with pytest.raises(ValueError, match=f"{op}: x .* not a whole number of block_(rows|cols)=16"):
            call(op, np.zeros(shape, np.float32), np.float32(1), scale_max=448.0, **options)
