"""Operands of drawn calls: edge-case values, and for each operand what its name means.

New operands need no edit here, unless not every number of their dtype is valid: `_values` adds those.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from qshard.formats import ELEMENTS
from qshard.op_table import Operand, Shape
from support.awkward import KINDS, TAME, awkward_values
from support.draws import Call, element_of


def filled(call: Call, number: int = 0) -> Call:
    """Return the call with operands of edge-case values."""
    rng = np.random.default_rng(number)
    made: list[Any] = []
    for operand, tensors in zip(call.spec.inputs, call.tensors, strict=True):
        arrays = [_values(call, operand, shape, dtype, rng, i) for i, (shape, dtype) in enumerate(tensors)]
        made.append(arrays if operand.many else arrays[0])
    call.operands = made
    return call


def every_value(dtype: str, count: int) -> np.ndarray:
    """Every number of 16 bits, shuffled, so that amaxes differ. Of fp32 its upper halves, and what is next to each."""
    rng = np.random.default_rng(count)
    bits = np.resize(np.roll(_shuffled(), rng.integers(2**16)), count)
    if np.dtype(dtype).itemsize == 2:
        return bits.view(dtype)
    return (bits.astype(np.uint32) << 16 | rng.choice(np.uint32([0, 1, 0xFFFF]), count)).view(np.float32)


@functools.cache
def _shuffled() -> np.ndarray:
    return np.random.default_rng(0).permutation(np.arange(2**16, dtype=np.uint16))


def _values(call: Call, operand: Operand, shape: Shape, dtype: str, rng: np.random.Generator, i: int) -> np.ndarray:
    name, count, seed = operand.name, math.prod(shape), int(rng.integers(2**31))
    if name in ("starts", "seeds", "seed", "offset"):
        return _words(call, name, shape, rng).view(dtype)
    if name in ("rows", "stops") and call.spec.inputs[1].name == "rows":
        return _padded_rows(call, name, shape, rng).view(dtype)
    if name in ("stops", "ends"):
        rows = call.tensors[0][0][0][call.spec.name.endswith("_k")]
        if name == "ends":
            rows = call.tensors[-3][0][0][0] if call.spec.many else call.options["tokens"]
        return _stops(call, rows, shape, rng).view(dtype)
    if name in ("positions", "tokens"):
        rows = call.tensors[0 if name == "positions" else 3][0][0][0]
        others = rng.choice([-1, rows, -(2**31), 2**31 - 1], shape)
        return (
            np.where(rng.integers(0, 8, shape) > 0, rng.integers(-1, rows + 1, shape), others)
            .astype(np.int32)
            .view(dtype)
        )
    if name == "labels":
        return _labels(call, shape, rng).view(dtype)
    if name == "sizes":
        some = [0, 0, 0, 1, 3, 17, 40, *rng.choice([0, -1, 2**31 - 1], 2)]
        return rng.choice(some, shape).astype(np.int32).view(dtype)
    if name in ("rows", "stops"):
        return _padded_rows(call, name, shape, rng).view(dtype)
    if call.spec.name == "adam":
        return _adam_values(call, name, shape, dtype, rng, i)
    if name == "hyper":
        betas = [part for beta in (0.9, 0.999) for part in (np.float32(beta), beta - float(np.float32(beta)))]
        return np.broadcast_to(np.float32([1e-2, *betas, 1e-8, 0.1, 0.5]), shape).copy()
    if name == "step":
        return rng.integers(1, 5000, shape).astype(np.float32)
    if dtype == "uint8":
        element = call.options["element"] if name == "codes" else element_of(operand, call.options)
        bits = 8 if element is None else ELEMENTS[element].bits
        if name == "data" and call.options.get("pieces"):
            return np.zeros(shape, np.uint8)
        return rng.integers(0, 2 ** (8 if bits == 4 and name != "codes" else bits), shape, np.uint8)
    if name == "x" and "hadamard" in (call.spec.name.removeprefix("amax_"), *call.options) and rng.integers(2):
        with np.errstate(over="ignore"):
            return _far_apart(shape, rng).astype(dtype)
    kinds = [KINDS, TAME, ("normal", "ties", "wide"), ("normal", "max"), None][int(rng.integers(5))]
    if kinds is None or count >= 2**16:
        x = every_value(dtype, count).reshape(shape)
    else:
        x = awkward_values(shape or (1,), seed, dtype, kinds=kinds).reshape(shape)
    # With a negative scale, the sign of zeros that mark infinities is undefined.
    if "amax" in name or name == "history" or (name == "scale" and call.options.get("nonfinite") == "nan"):
        x = np.where(np.isnan(x), x.dtype.type(np.nan), np.abs(x))
    if name == "scale" and "margin" in call.options:  # 0 means unset.
        x = np.where(rng.integers(0, 2, shape), x, x.dtype.type(0))
    if call.spec.name in ("quantize_nvfp4_both", "quantize_nvfp4_stochastic_both") and "global_amax" in name:
        batch = (
            len(call.tensors[0][0][0]) - 2 - call.options["outer"]
        )  # One per matrix, repeated over axes that a front end may shard.
        x = np.broadcast_to(x[(..., *(slice(1),) * (x.ndim - batch))], shape).copy()
    if call.options.get("shared") and operand.terms == ("...",) and x.size:
        x = np.full(shape, x.flat[0])
    return x


def _far_apart(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return sums of 16 that cancel to their smallest terms, bfloat16 ties, and exponent spans near the exact path."""
    x = rng.integers(-255, 256, shape).astype(np.float32)
    if rng.integers(2):
        x[..., 8:] = -x[..., : max(0, shape[-1] - 8)]
    span = int(rng.choice([0, 5, 17, 18, 19, 20, 60, 250]))
    base = int(rng.choice([base for base in (-133, -60, 0, 119 - span) if -133 <= base <= 119 - span]))
    return np.ldexp(x, base + rng.integers(0, span + 1, shape)).astype(np.float32)


def _words(call: Call, name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return uint64 as two uint32, the low one first."""
    numbers = rng.choice(rng.integers(0, 2**64, 3, np.uint64), shape[:-1])
    if name == "starts":
        sizes = np.prod(np.reshape(call.options["shapes"], (-1, 2)), axis=1, dtype=np.int64)
        lengths = np.array([shape[0] for shape, _ in call.tensors[[o.name for o in call.spec.inputs].index("x")]])
        room = np.maximum(sizes - lengths, 0)
        numbers = np.array(
            [rng.choice([0, r // 3, r, s, s + 2**40]) if s else 0 for r, s in zip(room, sizes, strict=True)], np.uint64
        )
    elif name == "offset":
        numbers = rng.choice(np.array([0, 1, 15, 2**32 - 5, 2**36 + 7, 2**63], np.uint64), shape[:-1])
    if call.options.get("transposed") and numbers.ndim and numbers.size:
        down = np.arange(len(numbers), dtype=np.uint64) * np.uint64(call.options["row_step"] if name == "offset" else 0)
        numbers = numbers[:1] + down.reshape(-1, *(1,) * (numbers.ndim - 1))
    return np.ascontiguousarray(numbers[..., None]).view(np.uint32).reshape(shape)


def _stops(call: Call, rows: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return where the rows of experts end: multiples of contracted blocks, or any numbers, also beyond the rows."""
    stops = np.sort(rng.integers(0, rows + 1, shape))
    if rng.integers(2):
        unit = call.options.get("cols", 1)
        return (stops // unit * unit).astype(np.int32)
    others = rng.choice([-(2**31), -1, 0, rows, rows + 1, 2**31 - 1], shape)
    return np.where(rng.integers(0, 3, shape) > 0, stops, others).astype(np.int32)


def _labels(call: Call, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return labels, mostly of local classes; also neighbouring, ignored and invalid ones."""
    first, columns = call.options.get("first", 0), call.tensors[0][0][0][-1]
    here = first + rng.integers(-1, columns + 2, shape)
    others = rng.choice([call.options.get("ignore_index", 0), -1, -(2**31), 2**31 - 1], shape)
    return np.where(rng.integers(0, 5, shape) > 0, np.clip(here, -(2**31), 2**31 - 1), others).astype(np.int32)


def _padded_rows(call: Call, name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return rows of x with padding between, or stops of experts; also numbers that lead outside, in any order."""
    rows, padded = (call.tensors[i][0][0][0] for i in (0, 1))  # Of x, and of `rows`.
    outside = [-1, -(2**31), 2**31 - 1]
    if name == "rows":
        own = rng.permutation(np.resize(np.arange(rows + 1), shape))
        return np.where(rng.integers(0, 8, shape) > 0, own, rng.choice(outside, shape)).astype(np.int32)
    unit = int(rng.choice([1, 8, 16, 128]))
    stops = np.minimum(np.sort(rng.integers(0, padded // unit + 2, shape)) * unit, padded)
    if not rng.integers(4):
        stops = rng.choice([*outside, 0, padded, padded // 3, padded // 2], shape)
    return stops.astype(np.int32)


def _adam_values(call: Call, name: str, shape: Shape, dtype: str, rng: np.random.Generator, i: int) -> np.ndarray:
    """Return values of wide range with zeros, a subnormal, infinities and NaN; states in their stored form."""
    from qshard.reference import _adam as adam

    if name == "constants":
        rows = [adam.adam_constants(i + 1, 1e-2, decay=0.1, grad_scale=0.5) for i in range(shape[0])]
        return np.array(rows, np.float32)
    if dtype == "int16":
        return rng.integers(-(2**15), 2**15, shape).astype(np.int16)
    if name.endswith("scale_inv"):
        return np.ldexp(np.float32(1), rng.integers(-40, 20, shape)).astype(np.float32)
    if dtype == "uint8":
        element = ELEMENTS[call.options[f"{name}_dtype"]]
        sign = 2**7 * rng.integers(0, 2, shape) if name == "exp_avg" else 0
        return (rng.integers(0, element.max_code + 1, shape) + sign).astype(np.uint8)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size > 8:
        flat[:3] = 0.0, -0.0, 1e-40
    if name == "grad" and flat.size > 300 and i % 2:
        flat[[5, 6, 140]] = np.nan, np.inf, -np.inf
    if name == "exp_avg_sq":
        x = np.abs(x)
    with np.errstate(all="ignore"):
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
