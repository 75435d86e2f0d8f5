"""Adam of both front ends, step by step: parameters, moments and masters have the bits of the reference."""

import ml_dtypes
import numpy as np
import pytest

from qshard.reference._adam import adam_constants, adam_update, decode_state, encode_state, narrow
from support.awkward import assert_bits_equal

SHAPES = {"w": (16, 384), "odd": (4, 100), "b": (24,), "s": ()}
LR, DECAY, STEPS = 1e-2, 0.1, 4
# Dtypes of both moments and of the parameters; 16-bit parameters have masters.
SETTINGS = [
    ("float32", "float32", "float32"),
    ("float32", "float8_e4m3fn", "float32"),
    ("bfloat16", "float16", "bfloat16"),
    ("float8_e4m3fn", "float8_e5m2", "bfloat16"),
]


def draw(seed, dtype):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def stepped(param, grads, dtypes):
    """Return the float32 parameter, and each moment with its scales, after steps with decoupled weight decay.

    A moment with scales along rows is float32 if there are no rows.
    """
    dtypes = [dtype if param.ndim >= 2 or dtype == "bfloat16" else "float32" for dtype in dtypes]
    p, moments = param.astype(np.float32), [np.zeros(param.shape, np.float32)] * 2
    for step, grad in enumerate(grads, 1):
        constants = adam_constants(step, LR, decay=DECAY)
        update, *moments = adam_update(constants, p, grad.astype(np.float32), *moments, "decoupled")
        stored = [
            encode_state(x, dtype, positive=bool(i)) for i, (x, dtype) in enumerate(zip(moments, dtypes, strict=True))
        ]
        moments = [decode_state(data, dtype, scale) for (data, scale), dtype in zip(stored, dtypes, strict=True)]
        p = p - update
    return p, stored


@pytest.mark.each_value
@pytest.mark.parametrize(("mu", "nu", "dtype"), SETTINGS, ids=str)
def test_steps_are_those_of_the_reference(front, mu, nu, dtype):
    params, grads = draw(9, dtype), [draw(seed, dtype) for seed in range(STEPS)]
    masters = dtype != "float32"
    made = front.adam(params, grads, (mu, nu), masters, learning_rate=LR, weight_decay=DECAY)
    for name, (param, moments, master) in made.items():
        want, stored = stepped(params[name], [grad[name] for grad in grads], (mu, nu))
        assert_bits_equal(param, narrow(want, dtype), name)
        if masters:
            assert_bits_equal(master, want, f"master of {name}")
        for (data, scale_inv), (want_data, want_scale) in zip(moments, stored, strict=True):
            assert_bits_equal(data, want_data, f"a moment of {name}")
            assert (scale_inv is None) == (want_scale is None)
            if scale_inv is not None:
                assert_bits_equal(scale_inv, want_scale, f"scales of a moment of {name}")
