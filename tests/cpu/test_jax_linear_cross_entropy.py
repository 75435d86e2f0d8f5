"""`linear_cross_entropy` in JAX, without whole logits: its memory, its collectives, and the gradients of two calls."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from support import hlo
from support.pairs import each_value, turns

RULE = {"label_smoothing": 0.1, "z_loss": 1e-3}
ROWS, K, CLASSES = (8, 4), 32, 208
OF_W, OF_X = f"f32[{CLASSES},{K}]", "f32[8,4,32]"
CUTS = {
    "rows": (P("a"), P(), [("all-reduce", OF_W)]),
    "both axes of rows": (P("a", "b"), P(), [("all-reduce", OF_W)]),
    "classes": (P(), P("b"), [("all-reduce", OF_X)]),
    "rows and classes": (P("a"), P("b"), [("all-reduce", "f32[104,32]"), ("all-reduce", "f32[2,4,32]")]),
    "fsdp": (P("a"), P("a"), [("all-gather", OF_W), ("reduce-scatter", "f32[52,32]")]),
    "fsdp along K": (P("a"), P(None, "a"), [("all-gather", OF_W), ("reduce-scatter", "f32[208,8]")]),
    "K of both": (P(None, None, "b"), P(None, "b"), [("all-gather", OF_W), ("all-gather", OF_X)]),
}
"""Shardings of x and w, and the collectives besides scalars and 16 bytes a row."""


def drawn(dtype="float32"):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*ROWS, K)), dtype)
    w = jnp.asarray(rng.normal(size=(CLASSES, K)) / 5, dtype)
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    labels[0, 0], labels[1, 2] = -100, CLASSES - 1
    return np.asarray(x), np.asarray(w), labels


def two_calls(x, w, labels, **options):
    return qj.cross_entropy(jnp.dot(x, w.T), labels, **options)


def step(x, w, labels, loss=qj.linear_cross_entropy, **options):
    """Return the loss, and the gradients of half of it."""
    loss, back = jax.vjp(functools.partial(loss, labels=labels, **RULE, **options), x, w)
    return loss, *back(jnp.full_like(loss, 0.5))


@functools.cache
def compiled_step(loss=qj.linear_cross_entropy, **options):
    """Return `step` for one device. An eager loop over chunks would be compiled in each call."""
    return jax.jit(functools.partial(step, loss=loss, **options))


def assert_near(actual, want, dtype="float32"):
    # Products of other rows may be summed in another order, so a logit may be rounded to its neighbour.
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-3}
    for mine, other in zip(actual, want, strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(other, np.float32), **close)


VMAP_CUTS = {
    "examples": (P("a"), P()),
    "rows": (P(None, "a"), P()),
    "examples and classes": (P("a"), P("b")),
    "classes that rows cut": (P(None, "b"), P("b")),
    "examples, rows and K": (P("a", "b"), P(None, "b")),
}


@turns(1, cut=VMAP_CUTS, reduction=["mean", "none"])
@pytest.mark.parametrize("mode", ["Explicit", pytest.param("Auto", marks=pytest.mark.slow)])
def test_vmap_over_arrays_that_are_cut(mode, cut, reduction):
    """`vmap` over examples that share w, and over heads with a w each, has the losses and gradients of two calls."""
    x, w, labels = drawn()
    options = {"reduction": reduction, **RULE}

    def run(x, w, labels, of_w, loss=qj.linear_cross_entropy):
        mapped = jax.vmap(functools.partial(loss, **options), in_axes=(0, of_w, 0))
        made, back = jax.vjp(lambda x, w: mapped(x, w, labels), x, w)
        return made, *back(jnp.full_like(made, 0.5))

    compiled = jax.jit(run, static_argnums=(3, 4))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, mode),) * 2)
    for of_w, weight, spec in ((None, w, cut[1]), (0, np.stack([w] * len(x)), P(cut[0][0], *cut[1]))):
        want = compiled(x, weight, labels, of_w, two_calls)
        with jax.set_mesh(mesh):
            there = (
                jax.device_put(each, NamedSharding(mesh, own))
                for each, own in ((x, cut[0]), (weight, spec), (labels, cut[0]))
            )
            actual = compiled(*there, of_w)
        assert_near(actual, want)


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_of_w_are_summed_over_devices_in_float32(devices):
    """Under `vmap` on an Auto mesh XLA may shard the rows of the only chunk. One device needs no sum."""
    shapes = (2, 16, 32), (2, 24, 32)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    labels = jax.ShapeDtypeStruct(shapes[0][:2], jnp.int32)
    mesh = jax.make_mesh((devices,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        text = jax.jit(jax.vmap(jax.grad(qj.linear_cross_entropy, argnums=1))).lower(x, w, labels).as_text()
    products = re.findall(r"dot_general.*-> tensor<2x24x32x(\w+)>", text)
    assert products == ["bf16" if devices == 1 else "f32"]


def test_vmap_of_vmap_on_an_explicit_mesh():
    x, w, labels = drawn()
    call = functools.partial(qj.linear_cross_entropy, **RULE)
    twice = jax.jit(jax.vmap(jax.vmap(call, in_axes=(0, None, 0)), in_axes=(0, None, 0)))
    want = twice(x[:, :, None], w, labels[:, :, None])
    with jax.set_mesh(mesh := jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
        cut = NamedSharding(mesh, P(None, "a"))
        there = jax.device_put(x[:, :, None], cut), jax.device_put(w, NamedSharding(mesh, P("b")))
        actual = twice(*there, jax.device_put(labels[:, :, None], cut))
    assert_near((actual,), (want,))


@each_value(mode=["one device", "Auto", "Explicit", "shard_map"], reduction=["mean", "none"], recipe=[None, "MXFP8"])
def test_padding_is_no_class(mode, reduction, recipe):
    """The loss is that of the classes alone; the gradient of padded rows of w is 0."""
    x, w, labels = drawn()
    classes = 192
    w = np.concatenate([w[:classes], np.full((64, K), 9, np.float32)])
    labels = np.where(labels == -100, -100, labels % classes)
    options = {"reduction": reduction, "chunk": 12, "recipe": recipe}
    if recipe is not None and mode in ("Auto", "Explicit"):
        return  # Recipes work on one device and in `shard_map`.
    want = compiled_step(**options)(x, w[:classes], labels)
    options["num_classes"] = classes
    if mode == "one device":
        loss, dx, dw = jax.jit(functools.partial(step, **options))(x, w, labels)
    elif mode == "shard_map":
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        local = functools.partial(step, axis_name="b", **options)
        run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("b"), P()), out_specs=(P(), P(), P("b")))
        loss, dx, dw = jax.jit(run)(x, w, labels)
    else:
        with jax.set_mesh(mesh := jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, mode),) * 2)):
            there = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, P("a")), (w, P("b")), (labels, P("a"))))
            loss, dx, dw = jax.jit(functools.partial(step, **options))(*there)
    dw = np.asarray(dw)
    assert not dw[classes:].any()
    # MXFP8 gradients have blocks of 32 classes, and so the same codes.
    assert_near((loss, dx, dw[:classes]), want)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_are_never_whole(reduction):
    """Neither the arrays nor the temporary memory of the compiled program hold whole logits."""
    rows, classes, k, chunk = 4096, 2048, 16, 128
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, k), (classes, k))]
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def program(loss, **options):
        return (
            jax.jit(functools.partial(step, loss=loss, reduction=reduction, **options)).lower(*given, labels).compile()
        )

    whole, mine = program(two_calls), program(qj.linear_cross_entropy, chunk=chunk)
    assert f"f32[{rows},{classes}]" in whole.as_text()
    assert f"f32[{rows},{classes}]" not in mine.as_text()
    assert f"f32[{chunk},{classes}]" in mine.as_text()
    size = 4 * classes * chunk
    assert whole.memory_analysis().temp_size_in_bytes >= 4 * classes * rows
    assert mine.memory_analysis().temp_size_in_bytes < 4 * size  # A chunk, and small arrays.


@each_value(reduction=["mean", "none"], mode=["Auto", "Explicit", "no context"], name=list(CUTS))
def test_rows_stay_where_they_are(reduction, mode, name):
    cut, arrays = CUTS[name], drawn()
    run = functools.partial(step, reduction=reduction, chunk=3)
    want = compiled_step(two_calls, reduction=reduction)(*arrays)
    mesh = jax.make_mesh(
        (4, 2), ("a", "b"), axis_types=(AxisType.Explicit if mode == "Explicit" else AxisType.Auto,) * 2
    )
    specs = (*cut[:2], P(*cut[0][:2]))
    with jax.set_mesh(mesh) if mode != "no context" else contextlib.nullcontext():
        there = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(run).lower(*there).compile()
        moved = [(kind, array) for kind, arrays in hlo.collectives(compiled) for array in arrays]
        actual = compiled(*there)
    assert sorted((kind, array) for kind, array in moved if not array.endswith(("[]", ",4]"))) == cut[2]
    assert ("all-gather", "f32[3,2,4]") in moved or "classes" not in name
    assert_near(actual, want)
    if mode == "Explicit":
        for mine, given in zip(actual[1:], there, strict=False):
            assert mine.sharding.is_equivalent_to(given.sharding, mine.ndim)


@pytest.mark.each_value
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_axis_name_has_classes(reduction, check_vma):
    """Rows are sharded over the other axis, where losses are summed."""
    x, w, labels = drawn()
    want = compiled_step(two_calls, reduction="sum")(x, w, labels)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def local(x, w, labels):
        options = {**RULE, "axis_name": "b", "chunk": 3, "reduction": reduction}
        loss = qj.linear_cross_entropy(x, w, labels, **options)
        summed = loss * (labels != -100).sum() if reduction == "mean" else loss.sum()
        return jax.lax.psum(summed, "a")

    specs = {"in_specs": (P("a"), P("b"), P("a")), "out_specs": P(), "check_vma": check_vma}

    @jax.jit  # Outside jit, shard_map compiles each op alone.
    def around(x, w, labels):
        loss, back = jax.vjp(lambda x, w: jax.shard_map(local, mesh=mesh, **specs)(x, w, labels), x, w)
        return loss, *back(jnp.float32(0.5))

    assert_near(around(x, w, labels), want)


@pytest.mark.parametrize("mode", ["Auto", "Explicit", "one device"])
def test_vmap_has_a_head_for_each_example(mode):
    x, w, labels = drawn()
    ws = np.stack([w * (1 + i / 8) for i in range(len(x))])
    run = jax.vmap(functools.partial(step, reduction="sum", chunk=3))
    alone = compiled_step(reduction="sum")
    want = [np.stack(each) for each in zip(*map(alone, x, ws, labels), strict=True)]
    mesh = jax.make_mesh(
        (1,) if mode == "one device" else (8,),
        ("a",),
        axis_types=(AxisType.Explicit if mode == "Explicit" else AxisType.Auto,),
    )
    with jax.set_mesh(mesh):
        there = [jax.device_put(a, NamedSharding(mesh, P())) for a in (x, ws, labels)]
        assert_near(jax.jit(run)(*there), want)
        shared = jax.vmap(functools.partial(step, reduction="sum"), in_axes=(0, None, 0))
        many = [np.stack(each) for each in zip(*map(alone, x, [w] * len(x), labels), strict=True)]
        assert_near(jax.jit(shared)(there[0], w, there[2]), many)


@pytest.mark.parametrize("mode", ["Auto", "Explicit"])
def test_arrays_that_no_mesh_has(mode):
    """Host arrays under a mesh are replicated."""
    arrays = drawn()
    want = compiled_step(two_calls)(*arrays)
    with jax.set_mesh(jax.make_mesh((8,), ("a",), axis_types=(getattr(AxisType, mode),))):
        assert_near(step(*arrays), want)
        assert_near(jax.jit(step)(*arrays), want)
        assert_near(jax.jit(functools.partial(step, loss=two_calls))(*arrays), want)


def test_transforms():
    x, w, labels = drawn()
    want = compiled_step()(x, w, labels)
    loss = jax.checkpoint(lambda x, w: 0.5 * qj.linear_cross_entropy(x, w, labels, **RULE))
    assert_near(jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w), want[1:])
    saved = jax.export.export(jax.jit(step), disabled_checks=qj.disabled_checks())(x, w, labels)
    assert_near(jax.export.deserialize(saved.serialize()).call(x, w, labels), want)
    with pytest.raises(NotImplementedError, match=r"linear_cross_entropy: second derivatives \(gradient penalty"):
        jax.grad(lambda x: jax.grad(lambda x: qj.linear_cross_entropy(x, w, labels))(x).sum())(x)


def test_an_export_for_several_devices():
    arrays = drawn()
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        there = [jax.device_put(a, NamedSharding(mesh, P("a"))) for a in arrays]
        saved = jax.export.export(jax.jit(step), disabled_checks=qj.disabled_checks())(*there)
        assert_near(saved.call(*there), compiled_step()(*arrays))


def test_a_label_that_is_no_class_is_nan_under_jit():
    x, w, labels = drawn()
    labels[2, 1] = CLASSES
    losses, dx, dw = jax.jit(functools.partial(step, reduction="none", chunk=4))(x, w, labels)
    assert np.isnan(losses).sum() == 1
    assert np.isnan(dx).any(axis=-1).sum() == 1
    assert np.isnan(dw).all()
