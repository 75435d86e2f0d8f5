"""`torch.ops.qshard.<op>`: every op of the table, with fake tensors, under the compiler, and with inputs to refuse."""

import ctypes
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, init_device_mesh

from qshard import _ffi
from qshard.formats import E4M3
from qshard.ops import OpSpec, table
from qshard.torch_bridge.ops import call_into
from support.awkward import awkward_values
from support.op_calls import codes_per_byte

ops = torch.ops.qshard
E4M3_CODES = {"element": "float8_e4m3fn"}
every_op = pytest.mark.parametrize("spec", table().values(), ids=table())


KEYWORDS = {
    "element": E4M3.name,
    "eps": 0.0,
    "error": "mae",
    "most_recent": False,
    "nonfinite": "nan",
    "pow2": False,
    "rounding": "up",
    "scale_dtype": "float8_e8m0fnu",
    "scale_max": 448.0,
    "batch": 0,
    "lead": 0,
    "block_rows": 1,
    "block_cols": 16,
    "rows": 2,
    "col_step": 1,
    "row_step": 32,
    "margin": 0,
    "length": 3,
}
# Of ops that blocks of 1x16 do not suit, or that do something else for another choice.
OTHERS = {
    "quantize_block": {"block_cols": 32},
    "quantize_block_t": {"block_cols": 32},
    "quantize_block_both": {"block_rows": 32, "block_cols": 32},
    "quantize_block_both_t": {"block_rows": 128, "block_cols": 128, "scale_dtype": "float32"},
    "quantize_square_both": {"block_rows": 32, "block_cols": 32},
    "quantize_nvfp4_both": {"block_rows": 16},
    "quantize_nvfp4_square_both": {"block_rows": 16},
}


def sample(spec: OpSpec, axis: int = 6) -> tuple[list[torch.Tensor], dict]:
    """Operands that an op takes: every axis, or its major factor, is `axis`, every `*name` one axis, `...` none."""
    given = {**KEYWORDS, **OTHERS.get(spec.name, {})}
    dtypes = {"float": torch.float32, "float32": torch.float32, "word": torch.int32}
    inputs = []
    for operand in spec.inputs:
        shape = []
        for term in operand.terms:
            if term != "...":
                major, *minors = (term,) if isinstance(term, str) else term
                run = math.prod(int(n) if n.isdigit() else given[n] for n in minors)
                few = min(axis, 2) if spec.name in OTHERS else axis  # Their blocks are large.
                shape.append((int(major) if major.isdigit() else given.get(major, few)) * run)
        if codes_per_byte(operand, given["element"] if "element" in spec.attributes else None) > 1:
            shape[-1] //= 2
        values = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
        scale = dtypes["float32"] if given["scale_dtype"] == "float32" else torch.uint8
        values = values if operand.dtype == "float" else values.abs()  # No code of NaN, which equals nothing.
        inputs.append(values.to(scale if operand.dtype == "scale" else dtypes.get(operand.dtype, torch.uint8)))
    keywords = {name: given[name] for name in spec.attributes}
    return inputs, keywords | ({"dtype": torch.bfloat16} if "float" in {o.dtype for o in spec.outputs} else {})


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


@every_op
@pytest.mark.parametrize("axis", [6, 0])
def test_torch_finds_nothing_wrong_with_the_op(spec, axis):
    inputs, keywords = sample(spec, axis)
    torch.library.opcheck(getattr(ops, spec.name).default, inputs, keywords)


@every_op
def test_fake_results_are_like_the_real_ones(spec):
    inputs, keywords = sample(spec)
    real = as_tuple(getattr(ops, spec.name)(*inputs, **keywords))
    for make in (lambda x: x.to("meta"), FakeTensorMode().from_tensor):
        fake = as_tuple(getattr(ops, spec.name)(*map(make, inputs), **keywords))
        assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


@every_op
def test_call_into_writes_what_the_op_returns(spec):
    inputs, keywords = sample(spec)
    expected = as_tuple(getattr(ops, spec.name)(*inputs, **keywords))
    given = [torch.full_like(x, 77) for x in expected]
    call_into(spec.name, inputs, given, {name: keywords[name] for name in spec.attributes})
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


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
    "dtype": (lambda: ops.cast_tensor(X.double(), SCALE, **E4M3_CODES), TypeError, "x .float64. is not float32 or"),
    "scale_dtype": (
        lambda: ops.cast_tensor(X, SCALE.half(), **E4M3_CODES),
        TypeError,
        "scale .float16. is not float32",
    ),
    "codes_dtype": (
        lambda: ops.dequantize(X.to(torch.float8_e5m2), SCALE, **E4M3_CODES, dtype=torch.float32),
        TypeError,
        "data .float8_e5m2. is not uint8 or float8_e4m3fn",
    ),
    "result_dtype": (
        lambda: ops.dequantize(X.to(torch.uint8), SCALE, **E4M3_CODES, dtype=torch.float64),
        TypeError,
        "dtype .float64. is not float32 or",
    ),
    "shape": (
        lambda: ops.cast_tensor(X, torch.ones(6), **E4M3_CODES),
        ValueError,
        r"scale \(6,\) is not the first axes",
    ),
    "rank": (lambda: ops.transpose(SCALE.to(torch.uint8)), ValueError, "does not have the axes"),
    "batch": (lambda: ops.transpose(X.to(torch.uint8), batch=2), ValueError, "does not have the axes"),
    "lead": (lambda: ops.amax_tensor(X, lead=3), ValueError, "does not have the axes"),
    "strided": (
        lambda: ops.cast_tensor(X.t(), SCALE, **E4M3_CODES),
        ValueError,
        r"x \(strides \(1, 6\)\) is not contig",
    ),
    "expanded": (lambda: ops.amax_tensor(X[:1].expand(3, 6)), ValueError, "is not contiguous; call .contiguous"),
    "requires_grad": (
        lambda: ops.amax_tensor(LEAF),
        ValueError,
        "x .requires grad. is not data alone",
    ),
    "element": (lambda: ops.cast_tensor(X, SCALE, element="float8"), ValueError, "element .float8. is not one of"),
    "element_of_op": (lambda: ops.cast_tensor(X, SCALE, element="float8_e8m0fnu"), ValueError, "cast_tensor: element"),
    "eps": (lambda: ops.scale_from_amax(SCALE, element=E4M3.name, eps=-1.0, pow2=False), ValueError, "eps"),
    "no_attribute": (lambda: ops.cast_tensor(X, SCALE), RuntimeError, "missing value for argument 'element'"),
    "other_attribute": (
        lambda: ops.cast_tensor(X, SCALE, elements=E4M3.name),
        RuntimeError,
        "missing value for argument 'element'|Unknown keyword",
    ),
    "device": (
        lambda: ops.cast_tensor(X, SCALE.to("meta"), **E4M3_CODES),
        ValueError,
        "operands .x on cpu, scale on meta. are not on one device",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_an_op_refuses(case):
    call, error, text = BAD[case]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("case", ["dtype", "scale_dtype", "shape", "batch", "strided", "requires_grad", "element"])
def test_tracing_refuses_the_same(case):
    """What cannot run is found out while tracing, by the same text."""
    call, _, text = BAD[case]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(call, fullgraph=True, backend="eager")()


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
def test_call_into_refuses_tensors_without_memory(x, error, text):
    with pytest.raises(error, match=text):
        call_into("amax_tensor", (x,), (torch.empty(()),), {})


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
    with pytest.raises(NotImplementedError, match=r"amax_tensor: device .cuda:0. is not one that this build"):
        _ffi.call("amax_tensor", (x,), (amax,), {})


def test_a_dtensor_is_refused_with_the_name_of_the_op(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = DTensor.from_local(X, init_device_mesh("cpu", (1,)))
        with pytest.raises(NotImplementedError, match=r"qshard.amax_tensor.default does not have a sharding strategy"):
            ops.amax_tensor(x)
    finally:
        torch.distributed.destroy_process_group()
