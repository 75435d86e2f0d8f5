"""Tensors with hand-made DLPack structs: on devices that do not exist, and larger than any memory."""

import ctypes

import pytest

from qshard import _ffi

P = ctypes.c_void_p


class Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        *(("data", P), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32)),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("shape", P), ("strides", P), ("byte_offset", ctypes.c_uint64)),
    ]


class Api(ctypes.Structure):
    """`DLPackExchangeAPI`."""

    _fields_ = [
        *(("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", P)),
        *(("allocate", P), ("from_object_managed", P), ("to_object", P), ("from_object", P), ("stream", P)),
    ]


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
def from_object(made, tensor):
    tensor[0] = made.tensor
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(P))
def stream(device_type, device_id, found):
    found[0] = None
    return 0


API = Api(1, 3, None, None, None, None, ctypes.cast(from_object, P), ctypes.cast(stream, P))
NAME = b"dlpack_exchange_api"
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object
ctypes.pythonapi.PyCapsule_New.argtypes = [P, ctypes.c_char_p, P]
CUDA, INT, FLOAT, BFLOAT = 2, 0, 2, 4


class HandMade:
    __dlpack_c_exchange_api__ = ctypes.pythonapi.PyCapsule_New(ctypes.addressof(API), NAME, None)

    def __init__(self, device, code, bits, *shape, data=256):
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        address = ctypes.cast(self.shape, P)
        self.tensor = Tensor(data, CUDA, device, len(shape), code, bits, 1, address, None, 0)


def test_a_device_that_cannot_be_made_current_is_an_error():
    x, amax = HandMade(77, FLOAT, 32, 8), HandMade(77, FLOAT, 32, data=512)
    with pytest.raises(RuntimeError, match="call: cuda:77 cannot be made the current device: "):
        _ffi.call("amax_tensor", [x], [amax], {"lead": 0})


@pytest.mark.parametrize("rows", [2**31, 2**32 + 1])
def test_more_rows_than_a_grid_has_blocks_are_an_error(rows):
    """Nothing is launched, so no kernel reads the memory. As 32 bits, 2^32 + 1 blocks are one."""
    far = 2**44
    logits = HandMade(0, BFLOAT, 16, rows, 8, data=far)
    labels = HandMade(0, INT, 32, rows, data=2 * far)
    stats = HandMade(0, FLOAT, 32, rows, 4, data=3 * far)
    lse, grad = (HandMade(0, FLOAT, 32, rows, data=place * far) for place in (4, 5))
    d = HandMade(0, BFLOAT, 16, rows, 8, data=6 * far)
    said = r"the work is more blocks of threads than one launch takes \(2\^31 - 1\)"
    with pytest.raises(RuntimeError, match=f"cross_entropy_stats: {said}"):
        _ffi.call("cross_entropy_stats", [logits, labels], [stats], {"first": 0, "total": False})
    rule = {"classes": 8, "first": 0, "ignore_index": -100, "smoothing": 0.0, "z_loss": 0.0}
    with pytest.raises(RuntimeError, match=f"cross_entropy_grad: {said}"):
        _ffi.call("cross_entropy_grad", [logits, labels, lse, grad], [d], rule)
