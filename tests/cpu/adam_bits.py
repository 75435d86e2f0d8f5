"""The bits of the kernel `adam` against the reference: on the CPU, or on the device that the first argument names.

A script, as the SIMD target is chosen when the extension is loaded: `QSHARD_SIMD=scalar python adam_bits.py`.
"""

from __future__ import annotations

import itertools
import sys

import ml_dtypes
import numpy as np
import torch

from qshard import _ffi
from qshard.ops import multi_table
from qshard.reference import adam as reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STATES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
PARAMETERS = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "remainder"),
    ("bfloat16", "master"),
    ("float16", "master"),
)
# Rows of whole blocks, of cut blocks, of single elements, and none; some not a multiple of four.
MATRICES = [(3, 5), (4, 128), (2, 300), (5, 2, 97), (1, 129), (7, 256), (0, 4), (3, 1), (2, 5000), (3, 132)]
OTHERS = [(1,), (127,), (1000,), (0,), ()]


def values(rng: np.random.Generator, shape: tuple[int, ...], special: bool) -> np.ndarray:
    """A wide bell, with zeros, a subnormal, and, if asked for, infinities and NaN."""
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size > 8:
        flat[:3] = 0.0, -0.0, 1e-40
    if special and flat.size > 300:
        flat[[5, 6, 140]] = np.nan, np.inf, -np.inf
    return x


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(BFLOAT16 if dtype == "bfloat16" else dtype)


def rows_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], int(np.prod(x.shape[1:]))) if x.ndim > 1 else x.reshape(1, x.size)


def to_torch(x: np.ndarray, device: str) -> torch.Tensor:
    plain = np.asarray(x, order="C")
    made = (
        torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_numpy(plain)
    )
    return made.to(device, copy=True)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()


def check(
    device: str, param: str, low: str, grad: str, dtypes: tuple[str, str], decay: str, *, special: bool, update: bool
) -> None:
    """Runs one step of tensors of every shape in one call, and compares all that it writes."""
    rng = np.random.default_rng(0)
    scaled = any(dtype not in ("float32", "bfloat16") for dtype in dtypes)
    names = ("param", "low", "exp_avg", "exp_avg_scale_inv", "exp_avg_sq", "exp_avg_sq_scale_inv")
    lists: dict[str, list[torch.Tensor]] = {name: [] for name in ("grad", *names)}
    expected, constants = [], []
    shapes = MATRICES if scaled else MATRICES + OTHERS
    for i, shape in enumerate(shapes):
        c = reference.adam_constants(i + 1, 1e-2, decay=0.1, grad_scale=0.5)
        constants.append(np.array(c))
        g, exact = round_to(values(rng, shape, special), grad), values(rng, shape, special)
        moments = values(rng, shape, False), np.abs(values(rng, shape, False)) ** 2
        if len(shape) > 1 and shape[0] > 2:
            moments[0][1] = moments[1][1] = g[1] = 0
        stored = [
            reference.encode_state(rows_of(x), dtype, positive=positive)
            for x, dtype, positive in zip(moments, dtypes, (False, True), strict=True)
        ]
        extra = None
        if low == "remainder":
            p, extra = reference.split_float32(exact)
        else:
            p = round_to(exact, param)
            if low == "master":
                extra = exact
            else:
                exact = p.astype(np.float32)
        before = [
            reference.decode_state(data, dtype, scale_inv).reshape(shape)
            for (data, scale_inv), dtype in zip(stored, dtypes, strict=True)
        ]
        step, *after = reference.adam_update(c, exact, g.astype(np.float32), *before, decay)
        with np.errstate(all="ignore"):
            new = exact - step
            rounded = reference.narrow(new, param).astype(np.float32) - p.astype(np.float32)
        results = [
            reference.encode_state(rows_of(x), dtype, positive=positive)
            for x, dtype, positive in zip(after, dtypes, (False, True), strict=True)
        ]
        if update:
            new_p = reference.narrow(rounded if low == "master" else -step, "float32")
        else:
            new_p = reference.narrow(new, param)
        new_low = reference.narrow(new, "float32")
        if low == "remainder":
            new_p, new_low = reference.split_float32(new)
        flat = [part for data, scale_inv in stored for part in (data.reshape(shape), scale_inv)]
        for name, part in zip(("grad", *names), (g, p, extra, *flat), strict=True):
            if part is not None:
                lists[name].append(to_torch(part, device))
        expected.append((new_p, new_low, *(part for pair in results for part in pair)))
    has_param = not update or decay != "none" or low != "none"
    operands = {name: made for name, made in lists.items() if made and (name != "param" or has_param)}
    outputs = {name: operands.get(name, []) for name in names}
    if update:  # The parameter stays; the change to it is a result of its own.
        outputs["param"] = [torch.empty(x.shape, device=device) for x in lists["param"]]
    attributes = {
        "decay": decay,
        "exp_avg_dtype": dtypes[0],
        "exp_avg_sq_dtype": dtypes[1],
        "low": low,
        "update": update,
    }
    assert set(attributes) == set(multi_table()["adam"].attributes)
    _ffi.call(
        "adam",
        [to_torch(np.stack(constants), device), *itertools.chain(*operands.values())],
        list(itertools.chain(*outputs.values())),
        attributes,
    )
    for name, of_all in outputs.items():
        for i, tensor in enumerate(of_all):
            want = np.ascontiguousarray(expected[i][names.index(name)]).tobytes()
            got = np.ascontiguousarray(to_numpy(tensor)).tobytes()
            assert got == want, f"{name} of {shapes[i]}, {param}, {grad}, {special=}, {attributes}"


def main(device: str) -> None:
    products = list(
        itertools.product(
            STATES, STATES, PARAMETERS, ("float32", "bfloat16"), ("none", "coupled", "decoupled"), (False, True)
        )
    )
    cases = 0
    for i, (first, second, (param, low), grad, decay, update) in enumerate(products[::11]):
        if update and low == "remainder":
            continue
        check(device, param, low, grad, (first, second), decay, special=i % 2 == 1, update=update)
        cases += 1
    print(f"{cases} cases, SIMD target {_ffi.simd()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
