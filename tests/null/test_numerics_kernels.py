"""The NumPy front of the pipeline: the bits of the reference, from the compiled kernels."""

import ml_dtypes
import numpy as np
import pytest

from qshard import _ffi, reference
from qshard._core import quantize_steps
from qshard.formats import Usage
from qshard.layout import matrix_shape, plane
from qshard.numerics._kernels import ops, philox
from support.awkward import DTYPES, assert_bits_equal, awkward_values, shapes_of
from support.formats import every_plane

SEED = 2**63 + 5


@pytest.mark.each_value
@every_plane
def test_planes_are_those_of_the_reference(fmt, usage):
    for i, shape in enumerate(shapes_of(fmt, usage)):
        x = awkward_values(shape, seed=i, dtype=DTYPES[i % 3])
        random = philox("quantize", SEED) if fmt.stochastic else None
        made = quantize_steps.quantize(ops, x.reshape(matrix_shape(shape)), fmt, usage, philox=random)
        expected = reference.quantize(x, fmt, usage, seed=SEED)
        assert set(made) == set(usage.planes)
        for one, parts in made.items():
            wanted = expected.rowwise if one is Usage.ROWWISE else expected.columnwise
            for name, value in vars(wanted).items():
                got = getattr(parts, name)
                assert (got is None) == (value is None), name
                if value is not None:
                    # Ranks see a matrix; leading axes come back with the shape of the layout.
                    assert_bits_equal(got.reshape(value.shape), value, f"{one} {name} of {shape}")


@pytest.mark.each_value
@every_plane
def test_values_are_those_of_the_reference(fmt, usage):
    for one in usage.planes:
        x = awkward_values((128, 256), seed=3)
        random = philox("quantize", SEED) if fmt.stochastic else None
        parts = quantize_steps.quantize(ops, x, fmt, one, philox=random)[one]
        value = quantize_steps.dequantize(ops, parts, fmt, one, "float32")
        expected = reference.quantize(x, fmt, one, seed=SEED).dequantize(np.float32, usage=one)
        stored = expected.T if plane(fmt, x.shape, one).transposed else expected
        nan = np.isnan(stored)
        assert np.array_equal(np.isnan(value), nan)
        assert_bits_equal(np.where(nan, 0, value), np.where(nan, 0, stored))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16])
def test_arrays_that_numpy_cannot_export_go_by_the_name_of_their_dtype(dtype):
    x = np.array([1.0, -3.0, 2.0]).astype(dtype)
    out = np.empty(3, np.float32)
    if x.dtype.itemsize == 2:
        x.flags.writeable = False
        _ffi.call("amax_tensor", [x], [out[:1].reshape(())], {"lead": 0})
        assert out[0] == 3
    else:
        _ffi.call("dequantize", [x, np.float32(2).reshape(())], [out], {"element": "float8_e4m3fn"})
        assert out.tolist() == [2, -6, 4]


def test_what_kernels_cannot_read_is_refused():
    amax = np.empty((), np.float32)
    bfloat16 = np.ones(4, ml_dtypes.bfloat16)
    for x in (np.ones(4, ">f2"), np.ones(4, ">f4"), np.array(["a"]), np.ones(4, np.longdouble), np.ones(4, "f4,f4")):
        with pytest.raises(TypeError, match=r"^call: input 0 \(ndarray\) is not an array that DLPack can share$"):
            _ffi.call("amax_tensor", [x], [amax], {"lead": 0})
    with pytest.raises(ValueError, match=r"^call: input 0 \(ndarray\) is strided"):
        _ffi.call("amax_tensor", [bfloat16[::2]], [amax], {"lead": 0})
    bfloat16.flags.writeable = False
    with pytest.raises(TypeError, match=r"^call: output 0 \(ndarray\) is not an array that DLPack can share$"):
        _ffi.call("hadamard", [np.ones((1, 16), np.float32)], [bfloat16], {"block_rows": 1, "block_cols": 16})
