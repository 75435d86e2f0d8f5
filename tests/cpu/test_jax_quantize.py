"""JAX-specific behaviour of `quantize`: one device, vmap, x64, given scales, pytrees, and errors while tracing.

The bits of every format and shape are in test_quantize.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qshard.jax as qj
from qshard import formats, reference
from qshard.formats import FP8_E4M3, FP8_E5M2, NVFP4, Usage
from qshard.jax import ops
from qshard.jax._ops.uint64 import add_uint64, multiply_uint64
from support import fronts
from support.awkward import BFLOAT16, DTYPES, TAME, assert_bits_equal, awkward_values
from support.formats import NAMED, VARIANTS, every_format, stochastic, usages_of

STOCHASTIC, ROWS = (NVFP4.with_options(**options) for options in ({"rounding": "stochastic"}, {"global_scale": "row"}))
SEED = 0x0123456789ABCDEF
assert_quantized = functools.partial(fronts.assert_quantized, fronts.JaxFront("cpu"))


def quantized(x, fmt, usage, batch_axes=0):
    """Return `x` quantized, with a tensor for each index of the batch, and the values of each plane."""

    @jax.jit
    def run(x):
        quantize = functools.partial(qj.quantize, fmt=fmt, usage=usage, seed=SEED)
        for _ in range(batch_axes):
            quantize = jax.vmap(quantize)
        q = quantize(x)
        return q, [q.dequantize(usage=each) for each in usage]

    return run(x)


@pytest.fixture
def one_device():
    """A mesh of one device: nothing is sharded."""
    with jax.set_mesh(jax.make_mesh((1,), ("alone",), devices=jax.devices()[:1])):
        yield


@every_format
@pytest.mark.usefixtures("one_device")
def test_one_device(fmt):
    """Ops see the array without factored axes."""
    x = awkward_values((1, 1, 96, 160), seed=1, dtype=DTYPES[VARIANTS.index(fmt) % 3])
    usage = usages_of(fmt)[-1]
    actual, values = quantized(x, fmt, usage)
    expected = reference.quantize(x, fmt, usage, seed=SEED)
    assert_quantized(actual, expected)
    for each, found in zip(usage, values, strict=True):
        assert_bits_equal(found, expected.dequantize(usage=each), f"values, {each}")


@pytest.mark.parametrize("fmt", ["FP8_E4M3", "FP8_1x128", "FP8_128x128"])
def test_a_scalar(fmt):
    x = np.float32(3.3)
    expected = reference.quantize(x, fmt, usage=Usage.BOTH)
    for usage in Usage.BOTH:
        found = quantized(x, fmt, Usage.BOTH)[0].dequantize(usage=usage)
        assert_bits_equal(found, expected.dequantize(usage=usage), f"values, {usage}")
    _, (values,) = quantized(np.full(3, x), fmt, Usage.ROWWISE, batch_axes=1)
    assert_bits_equal(values, np.full(3, expected.dequantize()), "values under vmap")


def primitives(jaxpr) -> set[str]:
    """Names of primitives, also inside `jit`: from JAX 0.11 on, a trace shows a function that is inlined later."""
    inner = [equation.params["jaxpr"].jaxpr for equation in jaxpr.eqns if equation.primitive.name == "jit"]
    own = {equation.primitive.name for equation in jaxpr.eqns} - {"jit"}
    return own.union(*map(primitives, inner))


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("fmt", [FP8_E4M3, NVFP4, ROWS], ids=str)
def test_one_device_runs_ops_alone(fmt):
    """An unmerged amax is passed on directly: XLA would launch a kernel for each extra step."""
    usage = usages_of(fmt)[-1]
    program = jax.make_jaxpr(lambda x: jax.tree.leaves(qj.quantize(x, fmt, usage=usage)))(np.ones((48, 32), np.float32))
    assert {name.partition("_")[0] for name in primitives(program.jaxpr)} == {"qshard"}


@pytest.mark.parametrize("fmt", [*NAMED, *(fmt for fmt in VARIANTS if stochastic(fmt))], ids=str)
def test_vmap(fmt):
    """Each slice is a separate tensor under two vmaps, and `dequantize` of the result is that of each slice."""
    x = awkward_values((2, 2, 64, 32), seed=4, kinds=TAME)
    usage = usages_of(fmt)[-1]
    q, values = jax.tree.map(np.asarray, quantized(x, fmt, usage, batch_axes=2))
    assert q.shape == x.shape
    for i in np.ndindex(2, 2):
        whole = reference.quantize(x[i], fmt, usage, seed=SEED)
        assert_quantized(jax.tree.map(lambda leaf, i=i: leaf[i], q), whole)
        for each, found in zip(usage, values, strict=True):
            assert_bits_equal(found[i], whole.dequantize(usage=each))


def test_large_indices():
    """Philox offsets of a shard far into the whole are 64 bits, as uint64 in two uint32."""
    for number in (3, 0x12345, 0xFFFFFFFF, 2**32, 0x123456789AB):
        a = np.array([0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF], np.uint32)
        low, high = add_uint64(multiply_uint64(jnp.asarray(a), number), (np.uint32(0xFFFFFFFF), np.uint32(1)))
        want = [(int(i) * number + 0x1FFFFFFFF) % 2**64 for i in a]
        assert [int(high_) << 32 | int(low_) for low_, high_ in zip(low, high, strict=True)] == want


@pytest.mark.parametrize("x64", [False, True])
def test_x64_changes_nothing(x64):
    x = awkward_values((16, 64), dtype=BFLOAT16)
    with jax.enable_x64(x64):
        fmt = FP8_E4M3.with_options(eps=0.1, pow2=True)
        actual = qj.quantize(x, fmt, usage=Usage.BOTH)
        assert_quantized(actual, reference.quantize(x, fmt, Usage.BOTH))
        assert_bits_equal(actual.dequantize(), reference.quantize(x, fmt).dequantize())


@pytest.mark.parametrize("usage", list(Usage.BOTH))
def test_given_scales(usage):
    """Given `scales` are used unchanged, so values may saturate."""
    x = awkward_values((16, 64), kinds=TAME)
    scale = np.float32(7.3)
    actual = qj.quantize(x, FP8_E4M3, usage=usage, scales=qj.WeightScales(scale, 1 / scale))
    assert_quantized(actual, reference.quantize(x, FP8_E4M3, usage, scale=scale))


def test_is_a_pytree():
    """Leaves may be anything: specs, None, new leading axes. The structure has the static fields."""
    q = qj.quantize(np.ones((4, 32), np.float32), FP8_E4M3, usage=Usage.BOTH)
    assert len(jax.tree.leaves(q)) == 4
    assert jax.tree.map(lambda leaf: None, q).rowwise.data is None
    specs = jax.tree.map(lambda leaf: jax.P(), q)
    assert jax.tree.structure(specs) == jax.tree.structure(q)
    assert hash(jax.tree.structure(q)) == hash(jax.tree.structure(specs))
    assert str(q) == str(specs) == "QuantizedArray(FP8_E4M3, float32, rowwise and columnwise)"
    assert q.global_scale_inv is None
    assert jax.tree.structure(q) != jax.tree.structure(qj.quantize(np.ones((4, 32), np.float32), FP8_E5M2))
    again = dataclasses.replace(q)
    assert all(getattr(again, field.name) is getattr(q, field.name) for field in dataclasses.fields(q))
    assert q.with_planes({}) is not q
    assert q.with_planes({}).rowwise is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.rowwise = None


X = np.ones((4, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: qj.quantize(X.astype(int), FP8_E4M3), TypeError, r"quantize: x \(int.*\) is not float32, bfloat16"),
        (lambda: qj.quantize(jnp.ones(4, "float8_e5m2"), FP8_E4M3), TypeError, r"quantize: x \(float8_e5m2\)"),
        (
            lambda: qj.quantize(X, "FP8"),
            ValueError,
            r"quantize: fmt \('FP8'\) is not a format name; did you mean 'FP8_E4M3', 'FP8_E5M2',",
        ),
        (lambda: qj.quantize(X, FP8_E4M3, usage="rowwise"), TypeError, r"quantize: usage \('rowwise'\)"),
        (lambda: qj.quantize(X, FP8_E4M3, usage=Usage(0)), TypeError, r"quantize: usage"),
        (
            lambda: qj.quantize(X, STOCHASTIC),
            ValueError,
            r"quantize: NVFP4\[rounding=stochastic\] uses stochastic rounding and needs `seed`",
        ),
        (
            lambda: qj.quantize(X, STOCHASTIC, seed=0.5),
            TypeError,
            r"quantize: seed \(0\.5\) is not an integer, a jax\.random",
        ),
        (lambda: qj.quantize(X, ROWS, usage=Usage.BOTH), ValueError, "has one scale per row, so it has no columnwise"),
        (lambda: qj.quantize(X[:, :31], formats.MXFP8_E4M3), ValueError, r"pad the columns to 32"),
        (
            lambda: qj.quantize(X, FP8_E4M3).dequantize(int),
            TypeError,
            r"dequantize: dtype \(the class int\) is not float32",
        ),
        (lambda: qj.quantize(X, FP8_E4M3).plane(Usage.COLUMNWISE), ValueError, r"plane: usage \(Usage.COLUMNWISE\)"),
        (
            lambda: ops.cast_tensor(X, X[0], element="float8_e4m3fn"),
            ValueError,
            r"scale \(32,\) does not match the leading axes",
        ),
        (lambda: ops.cast_tensor(X, X[:, 0]), TypeError, r"cast_tensor: attributes \(none\) .* pass exactly element"),
        (lambda: ops.cast_tensor(X, X[:, 0].astype("float16"), element="float8_e5m2"), TypeError, r"scale \(float16\)"),
        (lambda: ops.no_such_op, AttributeError, r"no_such_op"),
        (lambda: jax.grad(lambda x: qj.quantize(x, FP8_E4M3).dequantize().sum())(X), TypeError, r"has no derivative"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_errors_are_python_errors(call, error, text, jitted):
    """Errors are raised before anything runs, and under jit while tracing."""
    with pytest.raises(error, match=text):
        jax.jit(call)() if jitted else call()


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"quantize: x \(float64\) is not float32"):
        qj.quantize(np.ones(4), FP8_E4M3)
