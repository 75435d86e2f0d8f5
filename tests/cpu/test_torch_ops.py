"""`torch.ops.qshard.<op>` under the compiler, and tensors that no row can speak of. Every op is in `test_ops.py`."""

import contextlib
import ctypes
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh

from qshard import _ffi
from qshard.formats import E4M3
from qshard.op_table import table
from qshard.torch_bridge._ops import bind
from qshard.torch_bridge._ops.bind import into
from support.awkward import awkward_values

ops = torch.ops.qshard
E4M3_CODES = {"element": "float8_e4m3fn"}


def chain(x):
    """Every op that a tensor with one scale passes through."""
    amax = ops.amax_tensor(x)
    scale, scale_inv = ops.scale_from_amax(amax, element=E4M3.name, eps=0.0, pow2=False)
    data, data_t = ops.cast_transpose(x, scale, element=E4M3.name)
    again = ops.cast_tensor(ops.dequantize(data, scale_inv, element=E4M3.name, dtype=x.dtype), scale, element=E4M3.name)
    return data, data_t, again, ops.transpose(data), ops.amax_tensor(x, lead=1)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_ops_give_the_same_bits(backend, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(chain, fullgraph=True, backend=backend, dynamic=dynamic)
    for shape in [(8, 16), (31, 37)]:
        x = torch.from_numpy(awkward_values(shape, seed=1, kinds=["normal", "ties", "zeros"]))
        for got, want in zip(compiled(x), chain(x), strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()


SCALE = torch.ones(())
X = torch.ones(4, 6)
LEAF = X.clone().requires_grad_()
BAD = {
    "dtype": (
        lambda ops: ops.cast_tensor(X.double(), SCALE, **E4M3_CODES),
        TypeError,
        "x .float64. is not float32, bfloat16 or",
    ),
    "scale_dtype": (
        lambda ops: ops.cast_tensor(X, SCALE.half(), **E4M3_CODES),
        TypeError,
        "scale .float16. is not float32",
    ),
    "shape": (
        lambda ops: ops.cast_tensor(X, torch.ones(6), **E4M3_CODES),
        ValueError,
        r"scale \(6,\) does not match the leading axes",
    ),
    "strided": (
        lambda ops: ops.cast_tensor(X.t(), SCALE, **E4M3_CODES),
        ValueError,
        r"x \(strides \(1, 6\)\) is not contig",
    ),
    "codes_dtype": (
        lambda ops: ops.dequantize(X.to(torch.float8_e5m2), SCALE, **E4M3_CODES, dtype=torch.float32),
        TypeError,
        "data .float8_e5m2. is not uint8 or float8_e4m3fn",
    ),
    "result_dtype": (
        lambda ops: ops.dequantize(X.to(torch.uint8), SCALE, **E4M3_CODES, dtype=torch.float64),
        TypeError,
        "dtype .float64. is not float32, bfloat16 or",
    ),
    "lead": (lambda ops: ops.amax_tensor(X, lead=3), ValueError, "does not have the axes"),
    "expanded": (lambda ops: ops.amax_tensor(X[:1].expand(3, 6)), ValueError, "is not contiguous; call .contiguous"),
    "requires_grad": (
        lambda ops: ops.amax_tensor(LEAF),
        ValueError,
        "amax_tensor: x requires grad, but the op has no derivative; pass",
    ),
    "element": (lambda ops: ops.cast_tensor(X, SCALE, element="float8"), ValueError, "element .float8. is not one of"),
    "no_attribute": (lambda ops: ops.cast_tensor(X, SCALE), RuntimeError, "missing value for argument 'element'"),
    "other_attribute": (
        lambda ops: ops.cast_tensor(X, SCALE, elements=E4M3.name),
        RuntimeError,
        "missing value for argument 'element'|Unknown keyword",
    ),
    "device": (
        lambda ops: ops.cast_tensor(X, SCALE.to("meta"), **E4M3_CODES),
        ValueError,
        "operands .x on cpu, scale on meta. are not on one device",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_an_op_refuses(case):
    """`torch.ops` knows no TypeError: PyTorch turns an error of a kernel in C++ into a ValueError or a RuntimeError."""
    call, error, text = BAD[case]
    if error is not RuntimeError:  # that of PyTorch's own check of the schema
        with pytest.raises(error, match=text):
            call(bind.ops)
    with pytest.raises(ValueError if error is TypeError else error, match=text):
        call(ops)


def test_ops_on_single_tensors_have_kernels_in_cpp():
    for name in table():
        assert torch._C._dispatch_dump(f"qshard::{name}").count("torch_kernels.cc") == 2, name


def test_a_kernel_keeps_nothing():
    """Kernels own their arguments: a call, right or wrong, leaves no reference behind."""
    for scale in (SCALE, torch.ones(3)):
        x = torch.ones(4, 6)
        gone = weakref.ref(x)  # alive as long as C++ has a reference
        with contextlib.suppress(ValueError):
            ops.cast_transpose(x, scale, **E4M3_CODES)
        del x
        assert gone() is None


def refused_while_tracing(*cases):
    for case in cases:
        call, _, text = BAD[case]
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            torch.compile(call, fullgraph=True, backend="eager")(ops)


def test_tracing_refuses_the_same():
    """What cannot run is found out while tracing, by the same text.

    In a process of its own: after a trace that fails, calls in Python hold their arguments longer, and tests of memory
    see it.
    """
    cases = ["dtype", "scale_dtype", "shape", "strided", "requires_grad", "element"]
    here = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\n"
    code += f"import test_torch_ops; test_torch_ops.refused_while_tracing(*{cases})"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_gradients_are_no_concern_under_no_grad():
    with torch.no_grad():
        assert ops.amax_tensor(X.clone().requires_grad_()) == 1
    parameter = torch.nn.Parameter(X.clone(), requires_grad=False)
    assert ops.amax_tensor(parameter) == 1


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (FakeTensorMode().from_tensor(X), ValueError, r"call: input 0 .*FakeTensor. has no memory"),
        (X.to("meta"), RuntimeError, "Cannot pack tensors on meta"),  # PyTorch's own words.
    ],
    ids=["fake", "meta"],
)
def test_into_refuses_tensors_without_memory(x, error, text):
    with pytest.raises(error, match=text):
        into(torch.empty(())).amax_tensor(x)


class OnCuda:
    """What DLPack says of a tensor on a GPU, and its memory is that of an array."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __dlpack__(self, **_: object) -> object:
        capsule = self.array.__dlpack__()
        ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
        ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        tensor = ctypes.pythonapi.PyCapsule_GetPointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + 8).value = 2  # The type of its device.
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_a_device_without_kernels_is_named():
    if _ffi.cuda_built:
        pytest.skip("this build has kernels for every device")
    x, amax = (OnCuda(np.ones(shape, np.float32)) for shape in (4, ()))
    with pytest.raises(
        NotImplementedError, match=r"amax_tensor: this build of qshard has no kernels for device .cuda:0."
    ):
        _ffi.call("amax_tensor", (x,), (amax,), {})


def test_a_dtensor_is_refused_with_the_name_of_the_op(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = DTensor.from_local(X, init_device_mesh("cpu", (1,)))
        with pytest.raises(NotImplementedError, match=r"qshard.amax_tensor.default does not have a sharding strategy"):
            ops.amax_tensor(x)
    finally:
        torch.distributed.destroy_process_group()
