"""Every public function of `qshard.jax` (tests/support/jax_calls.py) in every mode and transform of JAX.

Each cell has the bits of the plain call, or raises the error named here. Modes that change only tracing compare the
program, without compiling.
"""

import contextlib
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from support.awkward import assert_bits_equal
from support.jax_calls import NO_ROW, ROWS, rows_with_gradients

WITH_GRADIENTS = rows_with_gradients()


def test_every_public_name_has_a_row():
    named = {name for row in ROWS.values() for name in row.of}
    assert named | set(NO_ROW) == set(qj.__all__)
    assert not named & set(NO_ROW)


@functools.cache
def plain(name, is_jitted):
    call, args = WITH_GRADIENTS[name].call, WITH_GRADIENTS[name].args
    return jax.tree.map(np.asarray, (jax.jit(call) if is_jitted else call)(*args))


def assert_same(made, want):
    assert jax.tree.structure(made) == jax.tree.structure(want)
    for (path, got), expected in zip(jax.tree_util.tree_leaves_with_path(made), jax.tree.leaves(want), strict=True):
        assert_bits_equal(np.asarray(got), np.asarray(expected), jax.tree_util.keystr(path))


@contextlib.contextmanager
def config(**values):
    before = {name: getattr(jax.config, name) for name in values}
    try:
        for name, value in values.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


TRACED = {
    "rank_promotion": lambda: config(jax_numpy_rank_promotion="raise"),
    "dtype_promotion": lambda: config(jax_numpy_dtype_promotion="strict"),
    "tracer_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "debug_nans": lambda: config(jax_debug_nans=True),
    "debug_infs": lambda: config(jax_debug_infs=True),
}


@contextlib.contextmanager
def all_modes():
    with contextlib.ExitStack() as stack:
        for context in TRACED.values():
            stack.enter_context(context())
        yield


@pytest.mark.parametrize("modes", ["all", pytest.param("each", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ROWS)
def test_modes_of_tracing(name, modes):
    """All modes together, and each, give the same program as JAX without them, and so its bits."""
    call, args = WITH_GRADIENTS[name].call, WITH_GRADIENTS[name].args
    want = jax.jit(lambda *args: call(*args)).lower(*args).as_text()
    assert jax.eval_shape(call, *args) is not None
    for mode, context in (TRACED if modes == "each" else {"all": all_modes}).items():
        with context():
            assert jax.jit(lambda *args: call(*args)).lower(*args).as_text() == want, mode


def closed(call, args):
    """Close over all arguments except the first, so that XLA does not fold the call to a constant."""
    return jax.jit(lambda first: call(first, *args[1:]))(args[0])


def loops(call, args):
    """Call under checkpoint in a branch of `cond`, in a scan, in a loop."""
    shapes = jax.eval_shape(call, *args)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def scanned(_, args):
        again = jax.checkpoint(call)
        return _, jax.lax.cond(args[0].size > 0, again, lambda *_: nothing, *args)

    def body(state):
        _, made = jax.lax.scan(scanned, 0, jax.tree.map(lambda a: a[None], args))
        return state[0] + 1, jax.tree.map(lambda leaf: leaf[0], made)

    return jax.jit(lambda *args: jax.lax.while_loop(lambda state: state[0] < 1, body, (0, nothing))[1])(*args)


def compiled(call, args):
    """Compile ahead of time, with a donated argument, on another device than the first."""
    with jax.default_device(jax.devices()[-1]):
        args = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), args)
        lowered = jax.jit(call, donate_argnums=0).lower(*args)
        return lowered.compile()(*args)


def guarded(call, args):
    """Call with arrays on the device: there is no transfer, NaN or inf."""
    with jax.transfer_guard("disallow"), config(jax_debug_nans=True, jax_debug_infs=True):
        return jax.jit(call)(*args)


def exported(call, args):
    run = jax.jit(lambda *args: jax.tree.leaves(call(*args)))
    saved = jax.export.export(run, disabled_checks=qj.disabled_checks())(*args).serialize()
    structure = jax.tree.structure(jax.eval_shape(call, *args))
    return jax.tree.unflatten(structure, jax.export.deserialize(saved).call(*args))


def mapped(call, args):
    """Map the call over examples."""
    stacked = jax.tree.map(lambda a: jnp.stack([0 * a, a]), args)
    return jax.tree.map(lambda leaf: leaf[1], jax.jit(jax.vmap(call))(*stacked))


def mapped_over_devices(call, args):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        stacked = jax.device_put(jax.tree.map(lambda a: np.stack([a, a]), args), NamedSharding(mesh, P("data")))
        made = jax.jit(jax.vmap(call))(*stacked)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[1], made)


def wide(call, args):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(call)(*args))


def unjitted(call, args):
    with jax.disable_jit():
        return jax.jit(call)(*args)


RUN = [closed, loops, compiled, guarded, exported, mapped, mapped_over_devices, wide, unjitted]
OFTEN = ("quantize", "linear", "cross_entropy", "swiglu")
CELLS = [
    pytest.param(
        name,
        mode,
        marks=[] if name in OFTEN else pytest.mark.slow,
    )
    for name in ROWS
    for mode in RUN
]
# XLA sums float32 products in another order within loops.
IN_ANOTHER_ORDER = {(loops, "grouped_mlp"), (loops, "linear_cross_entropy")}
NO_VMAP = (NotImplementedError, "vmap is only supported for the ffi_call primitive when")
NO_EXPLICIT = (ValueError, "ragged_dot: JAX has no ragged product for Explicit mesh axes")
REFUSED = {
    (mapped, "master"): NO_VMAP,
    (mapped_over_devices, "master"): NO_VMAP,
    (mapped_over_devices, "grouped_mlp"): (ValueError, "moe_permutation: JAX does not sort over Explicit mesh axes"),
    (mapped_over_devices, "ragged_dot"): NO_EXPLICIT,
    (mapped_over_devices, "ragged_dot of values"): NO_EXPLICIT,
}


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # JAX's, where no result has their shape.
@pytest.mark.parametrize(("name", "mode"), CELLS, ids=lambda of: getattr(of, "__name__", of))
def test_modes_of_running(name, mode):
    call, args = WITH_GRADIENTS[name].call, WITH_GRADIENTS[name].args
    if (mode, name) in REFUSED:
        kind, text = REFUSED[mode, name]
        with pytest.raises(kind, match=text):
            mode(call, args)
        return
    made, want = mode(call, args), plain(name, mode is not unjitted)
    if (mode, name) in IN_ANOTHER_ORDER:
        jax.tree.map(lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6), made, want)
    else:
        assert_same(made, want)


NOT_SYMBOLIC = r": \w+.* \[.*b.*\] has a symbolic size, but blocks need known sizes; export one program per shape"


@pytest.mark.parametrize("name", ROWS)
def test_symbolic_shapes_are_refused(name):
    call, args = ROWS[name].call, ROWS[name].args
    (b,) = jax.export.symbolic_shape("b")
    of_symbols = [jax.ShapeDtypeStruct((32 * b, *a.shape[1:]) if a.ndim == 2 else a.shape, a.dtype) for a in args]
    with pytest.raises(ValueError, match=NOT_SYMBOLIC):
        jax.export.export(jax.jit(call), disabled_checks=qj.disabled_checks())(*of_symbols)


NO_FORWARD_MODE = r"can't apply forward-mode|has no derivative; |are not supported; |cannot be differentiated"


@pytest.mark.parametrize("name", [name for name in ROWS if name != "gathered_weight"])  # Its gradient is 0.
def test_forward_mode_is_refused(name):
    call, args = ROWS[name].call, ROWS[name].args
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=NO_FORWARD_MODE):
        jax.jit(lambda *args: jax.jvp(call, args, args)).lower(*args)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=NO_FORWARD_MODE):
        jax.jit(lambda *args: jax.linearize(call, *args)[1](*args)).lower(*args)
