"""Adam: the reference compared with the formulas in fp64, and kernel properties; kernel_bits.py tests its bits."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qshard._core.optimizers.adam import BLOCK  # noqa: E402
from qshard.formats import ELEMENTS  # noqa: E402
from qshard.reference import _adam as reference  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402

SCALED = ("float16", "float8_e4m3fn", "float8_e5m2")
STATES = ("float32", "bfloat16", *SCALED)
ATTRIBUTES = {"decay": "none", "keeps": "none", "update": False}


# --- the reference ---


def ulp(x):
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


def draw(seed, n=4000):
    rng = np.random.default_rng(seed)
    p, g, m, v = (rng.standard_normal(n) * np.exp(spread * rng.standard_normal(n)) for spread in (1, 3, 3, 3))
    return tuple(x.astype(np.float32) for x in (p, g, m, v * v))


def adam_in_float64(step, p, g, m, v, *, lr, betas, weight_decay, decay, eps=1e-8):
    """Compute a step by the published formulas."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    u = m / (1 - betas[0] ** step) / (np.sqrt(v / (1 - betas[1] ** step)) + eps)
    return lr * (u + weight_decay * p if decay == "decoupled" else u), m, v


@pytest.mark.parametrize("decay", ["none", "decoupled"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.99, 0.9999)])
@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**7])
def test_fp32_is_within_ulps_of_fp64(step, betas, decay):
    """Moments are within 3 ulps, the update within 5, in units of the terms before they are added, which may cancel."""
    p, g, m, v = draw(step)
    c = reference.adam_constants(step, 3e-4, betas, 1e-8, 0.1)
    u1, m1, v1 = reference.adam_update(c, p, g, m, v, decay)
    settings = {"lr": 3e-4, "betas": betas, "weight_decay": 0.1, "decay": decay}
    p, g, m, v = (x.astype(np.float64) for x in (p, g, m, v))
    u2, m2, v2 = adam_in_float64(step, p, g, m, v, **settings)
    largest, *_ = adam_in_float64(step, np.abs(p), np.abs(g), np.abs(m), v, **settings)
    assert (np.abs(m1 - m2) / ulp(betas[0] * np.abs(m) + (1 - betas[0]) * np.abs(g))).max() <= 3
    assert (np.abs(v1 - v2) / ulp(v2)).max() <= 3
    assert (np.abs(u1 - u2) / ulp(largest)).max() <= 5


def test_coupled_decay_is_that_of_a_changed_gradient():
    """So its error is that of `g + decay p`, one ulp of the larger term, and the bounds of the test before."""
    p, g, m, v = draw(0)
    c = reference.adam_constants(3, 3e-4, decay=0.5)
    coupled = reference.adam_update(c, p, g, m, v, "coupled")
    for x, y in zip(coupled, reference.adam_update(c, p, g + np.float32(0.5) * p, m, v), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", STATES)
@pytest.mark.parametrize("positive", [False, True])
def test_states_round_once(dtype, positive):
    """The error is half a unit of the format, of a value or of the smallest normal number of its block."""
    x = draw(1)[3 if positive else 2].reshape(4, 1000)
    value = reference.decode_state(*_with_dtype(reference.encode_state(x, dtype, positive=positive), dtype))
    if dtype in ELEMENTS:
        mantissa, tiny = ELEMENTS[dtype].mantissa_bits, 2.0 ** (1 - ELEMENTS[dtype].bias)
    else:
        mantissa, tiny = {"float32": (23, 0.0), "bfloat16": (7, 0.0), "float16": (10, 2.0**-14)}[dtype]
    if dtype in SCALED:
        _, scale_inv = reference.encode_state(x, dtype)
        tiny = tiny * np.repeat(scale_inv, BLOCK, axis=1)[:, :1000]
    unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), tiny + 1e-300))) - mantissa)
    bound = unit if positive else unit / 2  # Values that would round to 0 become the smallest value.
    assert (np.abs(value.astype(np.float64) - x) <= bound).all()
    if positive:
        assert (value[x > 0] > 0).all()


def _with_dtype(stored, dtype):
    data, scale_inv = stored
    return data, dtype, scale_inv


@pytest.mark.parametrize("dtype", SCALED)
def test_extreme_blocks(dtype):
    x = np.zeros((8, 128), np.float32)
    x[1] = 1e-45
    x[2] = 3e38  # The largest float32 rounds to infinity, as it does in bfloat16.
    x[3, 0] = -1e-30
    x[4, 0], x[5, 0], x[6, 0] = np.inf, np.nan, -0.0
    data, scale_inv = reference.encode_state(x, dtype)
    value = reference.decode_state(data, dtype, scale_inv)
    assert np.isfinite(scale_inv).all()
    assert (scale_inv > 0).all()
    assert (np.frexp(scale_inv)[0] == 0.5).all(), "powers of two"
    assert not value[0].any()
    assert not value[6].any()
    assert (scale_inv[[0, 4, 5, 6]] == 1).all()
    np.testing.assert_allclose(value[2:4], x[2:4], rtol=0.13)  # Half a step of E5M2 is 1/8.
    assert np.isnan(value[5, 0])
    assert not np.isnan(value[[0, 1, 2, 3, 4, 6, 7]]).any()


def test_halves_are_the_whole():
    """Splits are exact for every lower half, with zero, subnormal, normal, infinite and largest upper halves."""
    upper = np.array([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x42FF, 0x7F7E, 0x7F7F], np.uint32)
    bits = np.concatenate([(sign | upper[:, None]) << 16 | np.arange(1 << 16, dtype=np.uint32) for sign in (0, 0x8000)])
    bits = np.append(bits.reshape(-1), np.array([0x7F800000, 0xFF800000, 0x7FC00000], np.uint32)).astype(np.uint32)
    x = bits.view(np.float32)
    high, low = reference.split_float32(x)
    np.testing.assert_array_equal(reference.join_float32(high, low).view(np.uint32), bits)
    finite = np.abs(x) < 3e38
    error = np.abs(high[finite].astype(np.float64) - x[finite])
    assert (error <= np.abs(reference.narrow(x[finite], "bfloat16").astype(np.float64) - x[finite])).all(), "nearest"


# --- the kernel ---


def run(shapes, dtypes=("float32", "float32"), *, seed=0, calls=None, cut=None):
    """Run a step for tensors of these shapes, `calls` tensors in each call, or sliced by the rows of `cut`."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    tensors = []
    for i, shape in enumerate(shapes):
        p, g, m = (torch.randn(shape, generator=generator) for _ in range(3))
        tensors.append((torch.from_numpy(np.array(reference.adam_constants(i + 1, 0.1))), g, p, m, m * m))
    if cut is not None:
        tensors = [(c, *(x[rows] for x in rest)) for c, *rest in tensors for rows in cut]
    calls = calls or len(tensors)
    for first in range(0, len(tensors), calls):
        lists = [[] for _ in range(6)]
        some = tensors[first : first + calls]
        for _, g, p, m, v in some:
            parts = [g.contiguous(), p.clone()]
            for x, dtype, positive in zip((m, v), dtypes, (False, True), strict=True):
                data, scale_inv = reference.encode_state(x.numpy(), dtype, positive=positive)
                parts += [torch.from_numpy(data), None if scale_inv is None else torch.from_numpy(scale_inv)]
            for made, part in zip(lists, parts, strict=True):
                if part is not None:
                    made.append(part)
        attributes = {**ATTRIBUTES, "exp_avg_dtype": dtypes[0], "exp_avg_sq_dtype": dtypes[1]}
        grads, params, *states = lists
        ops.adam(torch.stack([t[0] for t in some]), grads, params, [], *states, **attributes)
        results.extend(zip(params, *(s for s in states if s), strict=True))
    return results


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        for s, t in zip(x, y, strict=True):
            assert torch.equal(s, t)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float8_e4m3fn", "float8_e5m2")])
def test_many_tensors_at_once_are_each_alone(dtypes):
    """More tensors than one GPU launch takes, of all sizes, so that threads begin inside tensors."""
    shapes = [(1 + i % 3, 1 + (i * 37) % 300) for i in range(500)] + [(70, 1000)]
    assert_same(run(shapes, dtypes), run(shapes, dtypes, calls=100))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float8_e4m3fn", "float8_e5m2"), ("float16", "float16")])
@pytest.mark.parametrize("cols", [128, 200, 7])
def test_the_state_of_a_shard_is_the_shard_of_the_state(dtypes, cols):
    rows = [slice(0, 3), slice(3, 3), slice(3, 4), slice(4, 9)]
    (whole,) = run([(9, cols)], dtypes)
    parts = run([(9, cols)], dtypes, cut=rows)
    assert_same([tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))], [whole])


def test_zeros_stay_zeros_and_never_become_nan():
    for dtype in STATES:
        zeros = np.zeros((3, 300), np.float32)
        data, scale_inv = reference.encode_state(zeros, dtype)
        if dtype == "bfloat16":
            state = [torch.zeros(3, 300, dtype=torch.bfloat16)]
        else:
            state = [torch.from_numpy(data.copy()), *([] if scale_inv is None else [torch.from_numpy(scale_inv)])]
        other = [x.clone() for x in state]
        p, g = torch.ones(3, 300), torch.zeros(3, 300)
        attributes = {**ATTRIBUTES, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
        lists = [[state[0]], state[1:], [other[0]], other[1:]]
        for step in range(1, 4):
            constants = torch.from_numpy(np.array(reference.adam_constants(step, 0.1))).reshape(1, -1)
            ops.adam(constants, [g], [p], [], *lists, **attributes)
        assert (p == 1).all()
        assert not state[0].view(torch.uint8).any()
        assert not other[0].view(torch.uint8).any()
        assert all((scale == 1).all() for scale in (*state[1:], *other[1:]))


def wrong(message, **change):
    good = {
        "constants": torch.zeros(1, 10),
        "grad": [torch.zeros(2, 130)],
        "param": [torch.zeros(2, 130)],
        "low": [],
        "exp_avg": [torch.zeros(2, 130, dtype=torch.uint8)],
        "exp_avg_scale_inv": [torch.ones(2, 2)],
        "exp_avg_sq": [torch.zeros(2, 130)],
        "exp_avg_sq_scale_inv": [],
    }
    attributes = {**ATTRIBUTES, "exp_avg_dtype": "float8_e4m3fn", "exp_avg_sq_dtype": "float32"}
    attributes |= {name: change.pop(name) for name in list(change) if name in attributes}
    with pytest.raises(ValueError, match=message):
        ops.adam(*{**good, **change}.values(), **attributes)


def test_errors_say_what_does_not_fit():
    wrong(r"constants \(1, 9\) does not fit '\*rows 10'", constants=torch.zeros(1, 9))
    wrong(r"constants \(0, 10\) is not 10 numbers for each of 1 tensors", constants=torch.zeros(0, 10))
    wrong(r"param\[0\] \(2, 131\) does not fit", param=[torch.zeros(2, 131)])
    wrong(r"exp_avg_scale_inv \(2, 3\) is not one for every 128", exp_avg_scale_inv=[torch.ones(2, 3)])
    wrong(r"exp_avg_scale_inv \(260,\) is not one for every 128", exp_avg_scale_inv=[torch.ones(260)])
    wrong(r"exp_avg.* is not uint8 or float8_e4m3fn", exp_avg=[torch.zeros(2, 130)])
    wrong(r"exp_avg_sq.* is not float32", exp_avg_sq=[torch.zeros(2, 130, dtype=torch.uint8)])
    wrong(r"decay \(adamw\) is not one of none, coupled, decoupled", decay="adamw")
    wrong(r"exp_avg_dtype \(int8\) is not one of float32", exp_avg_dtype="int8")
    wrong(r"lists \(6 tensors in all\) are not 5 of equal length", grad=[torch.zeros(2, 130)] * 2)


def test_the_extra_bits_have_their_dtypes():
    def call(param, low, attribute):
        state = [[torch.zeros(4)], [], [torch.zeros(4)], []]
        attributes = {**ATTRIBUTES, "exp_avg_dtype": "float32", "exp_avg_sq_dtype": "float32", "keeps": attribute}
        ops.adam(torch.zeros(1, 10), [torch.zeros(4)], [param], [low], *state, **attributes)

    with pytest.raises(ValueError, match=r"dtype with a remainder|only bfloat16 does"):
        call(torch.zeros(4), torch.zeros(4, dtype=torch.int16), "remainder")
    with pytest.raises(ValueError, match="is not int16, which a remainder is"):
        call(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), "remainder")
    with pytest.raises(ValueError, match="is not float32, which a master is"):
        call(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int16), "master")
