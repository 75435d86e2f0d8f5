"""Handlers under call frames of later versions of XLA, and the extension in subinterpreters."""

import ctypes
import itertools
import subprocess
import sys

import numpy as np
import pytest

_ffi = pytest.importorskip("qshard._ffi")
P = ctypes.c_void_p
Z = ctypes.c_size_t


def struct(name, **fields):
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


# As in ffi/third_party/xla/ffi/api/c_api.h.
Extension = struct("Extension", struct_size=Z, type=ctypes.c_int, next=P)
Version = struct("Version", struct_size=Z, extension=P, major=ctypes.c_int, minor=ctypes.c_int)
Metadata = struct("Metadata", struct_size=Z, api=Version, traits=ctypes.c_uint32, state_type_id=ctypes.c_int64)
MetadataExtension = struct("MetadataExtension", base=Extension, metadata=P)
Side = struct("Side", struct_size=Z, extension=P, size=ctypes.c_int64, types=P, values=P)
Attributes = struct("Attributes", struct_size=Z, extension=P, size=ctypes.c_int64, types=P, names=P, values=P)
Frame = struct(
    "Frame",
    **{"struct_size": Z, "extension": P, "api": P, "context": P, "stage": ctypes.c_int},
    **{"args": Side, "rets": Side, "attrs": Attributes, "future": P, "of_the_future": ctypes.c_int64},
)
Buffer = struct("Buffer", struct_size=Z, extension=P, dtype=ctypes.c_int, data=P, rank=ctypes.c_int64, dims=P)
Scalar = struct("Scalar", dtype=ctypes.c_int, value=P)
Text = struct("Text", data=ctypes.c_char_p, length=Z)
ErrorArguments = struct("ErrorArguments", struct_size=Z, extension=P, message=ctypes.c_char_p, code=ctypes.c_int)
EXECUTE, METADATA, F32, S64, BUFFER, SCALAR = 3, 1, 11, 5, 1, 3
BUILT = Frame.future.offset  # XLA counts up to `attrs`.
GROWN = BUILT + 8

messages = []
Function = ctypes.CFUNCTYPE(P, P)


@Function
def create_error(arguments):
    messages.append(ErrorArguments.from_address(arguments).message.decode())
    return 1


@Function
def refuse(_):
    return 1  # An error: no pool.


@Function
def nothing(_):
    return None


def api():
    """`XLA_FFI_Api` with what handlers on CPUs call, by its place."""
    table = (P * 40)()
    table[0] = ctypes.sizeof(table)
    first = ctypes.sizeof(Version) // 8 + 3  # struct_size, extension, the version, an internal pointer
    functions = [create_error, refuse, nothing]  # The second gives the message of an error; the third destroys one.
    for place, function in enumerate(functions):
        table[first + place] = ctypes.cast(function, P).value
    for place in range(first + len(functions), len(table)):
        table[place] = ctypes.cast(refuse, P).value
    return table


def handler(op):
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
    capsule = _ffi.handlers("cpu")[op]
    return ctypes.CFUNCTYPE(P, ctypes.POINTER(Frame))(pointer(capsule, b"xla._CUSTOM_CALL_TARGET"))


def address(x):
    return ctypes.cast(ctypes.pointer(x), P)


@pytest.mark.parametrize("size", [BUILT, GROWN])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_metadata_are_given_whatever_extensions_come_first(size, before):
    metadata = Metadata(struct_size=ctypes.sizeof(Metadata))
    last = MetadataExtension(Extension(ctypes.sizeof(MetadataExtension), METADATA, None), address(metadata))
    chain = [Extension(ctypes.sizeof(Extension), 77, None) for _ in range(before)]
    for extension, following in itertools.pairwise([*chain, last]):
        extension.next = address(following)
    table = api()
    frame = Frame(struct_size=size, extension=address((chain or [last])[0]), api=address(table))
    assert handler("cast_tensor")(frame) is None
    assert (metadata.api.major, metadata.api.minor) == (0, 1)


def side(arrays):
    """The operands or results of a frame, and the objects that they point to."""
    dims = [(ctypes.c_int64 * max(1, x.ndim))(*x.shape) for x in arrays]
    buffers = [
        Buffer(ctypes.sizeof(Buffer), None, F32, x.ctypes.data, x.ndim, address(d))
        for x, d in zip(arrays, dims, strict=True)
    ]
    types, values = (ctypes.c_int * len(arrays))(*[BUFFER] * len(arrays)), (P * len(arrays))(*map(address, buffers))
    return Side(ctypes.sizeof(Side), None, len(arrays), address(types), address(values)), (dims, buffers, types, values)


@pytest.mark.parametrize(
    ("size", "args", "runs"), [(BUILT, 0, True), (GROWN, 0, True), (BUILT - 8, 0, False), (GROWN, 8, False)]
)
def test_frames_may_grow_at_their_end(size, args, runs):
    x, amax = np.array([1.0, -3.0], np.float32), np.zeros((), np.float32)
    lead, name = ctypes.c_int64(0), Text(b"lead", 4)
    scalar = Scalar(S64, address(lead))
    types, names, values = (ctypes.c_int * 1)(SCALAR), (P * 1)(address(name)), (P * 1)(address(scalar))
    attrs = Attributes(ctypes.sizeof(Attributes), None, 1, address(types), address(names), address(values))
    (inputs, held), (outputs, held_too) = side([x]), side([amax])
    inputs.struct_size += args
    table = api()
    frame = Frame(size, None, address(table), None, EXECUTE, inputs, outputs, attrs, None, 0)
    messages.clear()
    error = handler("amax_tensor")(frame)
    assert held
    assert held_too
    if runs:
        assert (error, float(amax), messages) == (None, 3.0, [])
    else:
        assert error is not None
        assert "XLA_FFI_CallFrame has another layout" in messages[0]
        assert amax == 0


SUBINTERPRETER = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import sys
import qshard.op_table
code = '''
try:
    import importlib.machinery, importlib.util
    loader = importlib.machinery.ExtensionFileLoader("qshard._ffi", PATH)
    loader.exec_module(importlib.util.module_from_spec(importlib.util.spec_from_loader("qshard._ffi", loader)))
except ImportError as error:
    assert "subinterpreter" in str(error), error
else:
    raise SystemExit("imported")
'''.replace("PATH", repr(qshard.op_table._ffi.__file__))
for _ in range(3):
    try:
        new = interpreters.create("legacy")
    except (TypeError, ValueError):
        new = interpreters.create(isolated=False)
    failed = interpreters.run_string(new, code)
    assert failed is None, failed
    interpreters.destroy(new)
print(len(qshard.op_table.table()) > 10)
"""


def test_subinterpreters_are_refused():
    """Types of nanobind die with the interpreter that created them."""
    run = subprocess.run([sys.executable, "-P", "-c", SUBINTERPRETER], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr
