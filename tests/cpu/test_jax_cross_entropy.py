"""Cross entropy in JAX: 16 bytes a row are sent in every mode; gradients, transforms and errors."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from support import hlo
from support.awkward import assert_bits_equal
from support.pairs import each_value, pairs

RULE = {"label_smoothing": 0.1, "z_loss": 1e-2}
ROWS, CLASSES = (8, 4), 1040
ROW_CUTS = {"outer": P("a"), "inner": P(None, "b"), "both": P("a", "b"), "two": P(("a", "b"))}
CLASS_CUTS = {"classes": P(None, None, "b"), "of two": P(None, None, ("b", "a")), "and rows": P("a", None, "b")}
MODES = ("Auto", "Explicit")


def drawn(dtype="float32"):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.normal(size=(*ROWS, CLASSES)), dtype)
    labels = rng.integers(0, CLASSES, ROWS).astype(np.int32)
    labels[0, 0], labels[1, 2] = -100, CLASSES - 1
    return np.array(logits), labels


def step(logits, labels, reduction="mean", **options):
    """Return the loss, and the gradient of half of it."""
    loss, back = jax.vjp(lambda x: qj.cross_entropy(x, labels, reduction=reduction, **RULE, **options), logits)
    return loss, back(jnp.full_like(loss, 0.5))[0]


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


def placed(mesh, cut, logits, labels):
    return (
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((logits, cut), (labels, P(*cut[: labels.ndim])))
    )


def moved(compiled):
    """Return collectives of arrays, without scalars."""
    found = [(kind, array) for kind, arrays in hlo.collectives(compiled) for array in arrays]
    return [(kind, array) for kind, array in found if not array.endswith("[]")]


@each_value(dtype=["float32", "bfloat16"], mode=[*MODES, "no context", "shard_map"], cut=ROW_CUTS)
def test_rows_stay_where_they_are(dtype, mode, cut):
    """Sharded rows have the bits of one device, without collectives, also in `shard_map` or without a mesh context."""
    arrays = drawn(dtype)
    run = functools.partial(step, reduction="none")
    want = run(*arrays)
    mesh = mesh_of(getattr(AxisType, mode, AxisType.Auto))
    there = list(placed(mesh, cut, *arrays))
    if mode == "shard_map":
        run = jax.shard_map(run, mesh=mesh, in_specs=(cut, cut), out_specs=(cut, cut))
    with jax.set_mesh(mesh) if mode != "no context" else contextlib.nullcontext():
        compiled = jax.jit(run).lower(*there).compile()
        assert moved(compiled) == []
        actual = compiled(*there)
    assert actual[1].sharding.is_equivalent_to(there[0].sharding, 3)
    for mine, other in zip(actual, want, strict=True):
        assert_bits_equal(mine, other)


@each_value(mode=MODES, cut=CLASS_CUTS, reduction=["mean", "none"])
def test_classes_stay_where_they_are(mode, cut, reduction):
    """Sharded classes gather 4 numbers a row and part. Sums have another order, so last bits may differ."""
    arrays = drawn()
    want = step(*arrays, reduction)
    with jax.set_mesh(mesh := mesh_of(getattr(AxisType, mode))):
        there = list(placed(mesh, cut, *arrays))
        compiled = jax.jit(step, static_argnums=2).lower(*there, reduction).compile()
        actual = compiled(*there)
    parts = np.prod([mesh.shape[name] for name in np.atleast_1d(cut[2])])
    rows = ROWS[0] // (4 if cut[0] else 1)
    assert moved(compiled) == [("all-gather", f"f32[{rows},{ROWS[1]},{parts},4]")]
    assert actual[1].sharding.is_equivalent_to(there[0].sharding, 3)
    assert_near(actual, want)


def assert_near(actual, want):
    for mine, other in zip(actual, want, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


@pairs(reduction=["mean", "none"], names=["b", ("b", "a")], check_vma=[True, False])
def test_axis_name_has_classes(reduction, names, check_vma):
    """Gradients are right around `shard_map`, and within it where types show that all devices share one loss."""
    arrays, cut = drawn(), P(None, None, names)
    want = step(*arrays, reduction)
    over = functools.partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), in_specs=(cut, P()), check_vma=check_vma)
    local = functools.partial(qj.cross_entropy, axis_name=names, reduction=reduction, **RULE)

    @jax.jit  # Outside jit, shard_map compiles each op alone.
    def around(logits, labels):
        loss, back = jax.vjp(lambda x: over(local, out_specs=P())(x, labels), logits)
        return loss, back(jnp.full_like(loss, 0.5))[0]

    assert_near(around(*arrays), want)
    within = over(functools.partial(step, reduction=reduction, axis_name=names), out_specs=(P(), cut))
    loss, d = jax.jit(within)(*arrays)
    devices = 1 if check_vma else 2 if names == "b" else 8  # As after `lax.psum`.
    assert_near((loss, d / devices), want)


@pytest.mark.parametrize("ignored", [-100, 0, 600, -1, -2])
def test_labels_of_other_devices(ignored):
    """An ignored label may be a class of any device, or the local index of another device's label."""
    logits, labels = drawn()
    labels[0, 1], labels[2, 0], labels[3, 3] = 0, 600, CLASSES
    labels = np.where(labels == -100, ignored, labels)
    run = functools.partial(step, reduction="none", ignore_index=ignored)
    want = jax.jit(run)(logits, labels)
    assert np.isnan(want[0][3, 3])
    assert np.isnan(want[1][3, 3]).all()
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit)):
        actual = jax.jit(run)(*placed(mesh, P(None, None, ("a", "b")), logits, labels))
    assert_near(actual, want)


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [P("a"), P(None, "a"), P("a", None, "b")], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_vmap_adds_rows(mode, cut):
    arrays = drawn()
    want = step(*arrays, "none")

    def run(logits, labels):
        mapped = jax.vmap(functools.partial(qj.cross_entropy, reduction="none", **RULE))
        loss, back = jax.vjp(lambda x: mapped(x, labels), logits)
        return loss, back(jnp.full_like(loss, 0.5))[0]

    with jax.set_mesh(mesh := mesh_of(getattr(AxisType, mode))):
        there = list(placed(mesh, cut, *arrays))
        compiled = jax.jit(run).lower(*there).compile()
        assert [kind for kind, _ in moved(compiled)] == ["all-gather"] * (len(cut) == 3)
        assert_near(compiled(*there), want)


def test_eager_calls_compile_once(caplog):
    logits, labels = drawn()
    x, w = logits[0, :, :64], logits[1].T[:96, :1] * np.ones((1, 64), np.float32)
    calls = [
        lambda: jax.grad(lambda logits: qj.cross_entropy(logits, labels))(logits),
        lambda: jax.grad(lambda x: qj.linear_cross_entropy(x, w, np.arange(4)))(x),
    ]
    for call in calls:
        call()
        with jax.log_compiles():
            call()
    assert not [each for each in caplog.messages if "Finished XLA compilation" in each]


def test_other_transforms():
    logits, labels = drawn()
    want = step(logits, labels)[1]
    loss = functools.partial(qj.cross_entropy, **RULE)
    shared = jax.vmap(loss, in_axes=(0, None))(logits[:, :1], labels[0, :1])
    assert_near(shared[1:2], [loss(logits[1, :1], labels[0, :1])])
    assert_bits_equal(jax.jit(jax.grad(jax.checkpoint(lambda x: 0.5 * loss(x, labels))))(logits), want)
    saved = jax.export.export(jax.jit(step), disabled_checks=qj.disabled_checks())(logits, labels)
    assert_bits_equal(jax.export.deserialize(saved.serialize()).call(logits, labels)[1], want)


def test_an_export_for_several_devices():
    logits, labels = drawn()
    want = step(logits, labels, "none")
    with jax.set_mesh(mesh := mesh_of(AxisType.Auto)):
        there = list(placed(mesh, P("a", "b"), logits, labels))
        run = jax.jit(functools.partial(step, reduction="none"))
        saved = jax.export.export(run, disabled_checks=qj.disabled_checks())(*there)
        for mine, other in zip(saved.call(*there), want, strict=True):
            assert_bits_equal(mine, other)


def test_a_second_derivative_raises():
    logits, labels = drawn()

    def slope(x):
        return jax.grad(lambda x: qj.cross_entropy(x, labels))(x).sum()

    for run in (jax.grad(slope), jax.jit(jax.grad(slope))):
        with pytest.raises(NotImplementedError, match=r"cross_entropy: second derivatives \(gradient penalty"):
            run(logits)


def test_labels_that_are_no_classes():
    """Invalid labels raise if the host knows them, and give NaN otherwise."""
    logits = np.zeros((2, 4), np.float32)
    for labels in (np.array([0, 4]), np.array([0, -1], np.int32), jnp.array([4, 0]), np.array([2**32, 0])):
        with pytest.raises(ValueError, match=r"cross_entropy: labels contain .*, which is neither a class \(0 to 3\)"):
            qj.cross_entropy(logits, labels)
    losses, d = jax.jit(functools.partial(step, reduction="none"))(logits, np.array([0, 4]))
    assert np.isnan(losses).tolist() == [False, True]
    assert np.isnan(d).any(axis=1).tolist() == [False, True]


def test_labels_of_64_bits_keep_them():
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(qj.cross_entropy, reduction="none"))
        losses = run(jnp.zeros((2, 4), jnp.float32), jnp.array([2**32, 1]))
    assert np.isnan(losses).tolist() == [True, False]


PADDED_CUTS = {"one device": None, "classes": P(None, None, ("a", "b"))}


@each_value(mode=[*MODES, "shard_map"], cut=PADDED_CUTS, num_classes=[1037, 3])
def test_padding_is_no_class(mode, cut, num_classes):
    """Loss and gradients are those of the classes alone; padding has gradient 0, also on devices with only padding."""
    logits, labels = drawn()
    logits[..., num_classes:] = 50.0  # Would change the loss if they were classes.
    labels = np.where(labels == -100, -100, labels % num_classes)
    labels[0, 1], labels[0, 2] = num_classes - 1, 0
    labels[3, 3], labels[3, 2] = num_classes, -1  # Not classes, and unknown to the host in `jit`.
    run = functools.partial(step, reduction="none")
    want = jax.jit(run)(logits[..., :num_classes], labels)
    options = {"num_classes": num_classes}
    if mode == "shard_map":
        mesh = mesh_of(AxisType.Auto)
        axes = P(None, None, None) if cut is None else cut
        local = functools.partial(run, axis_name=axes[2], **options)
        loss, d = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(axes, P()), out_specs=(P(), axes)))(logits, labels)
    else:
        with jax.set_mesh(mesh := mesh_of(getattr(AxisType, mode))):
            there = (logits, labels) if cut is None else placed(mesh, cut, logits, labels)
            loss, d = jax.jit(functools.partial(run, **options))(*there)
    loss, d = np.asarray(loss), np.asarray(d)
    assert np.isnan(loss[3, 2:]).all()
    assert np.isnan(d[3, 2:, :num_classes]).all()
    assert not d[..., num_classes:].any()
    assert_near((loss, d[..., :num_classes]), want)


def test_labels_of_padding_raise():
    logits, labels = np.zeros((2, 8), np.float32), np.array([0, 5], np.int32)
    assert qj.cross_entropy(logits, labels, num_classes=6) == pytest.approx(np.log(6))
    with pytest.raises(ValueError, match=r"cross_entropy: labels contain 5, which is neither a class \(0 to 4\)"):
        qj.cross_entropy(logits, labels, num_classes=5)


@pytest.mark.parametrize("mode", MODES)
def test_labels_that_are_no_classes_on_meshes(mode):
    """As on one device, invalid labels of sharded arrays raise if the host knows them; otherwise their rows are NaN."""
    logits, labels = drawn()
    labels[2, 1] = CLASSES
    with jax.set_mesh(mesh := mesh_of(getattr(AxisType, mode))):
        there = list(placed(mesh, P("a", None, "b"), logits, labels))
        with pytest.raises(ValueError, match=f"cross_entropy: labels contain {CLASSES}, which is neither a class"):
            qj.cross_entropy(*there)
        loss, d = jax.jit(functools.partial(step, reduction="none"))(*there)
    wrong = labels == CLASSES
    np.testing.assert_array_equal(np.isnan(loss), wrong)
    np.testing.assert_array_equal(np.isnan(d).all(-1), wrong)
    np.testing.assert_array_equal(np.isnan(d).any(-1), wrong)


def test_classes_that_a_mixed_mesh_cuts():
    logits, labels = drawn()
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit)):
        there = list(placed(mesh, P("a", None, "b"), logits, labels))
        local = jax.shard_map(
            lambda x, y: qj.cross_entropy(x, y, reduction="none"), in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )
        with pytest.raises(
            ValueError, match=r"cross_entropy: classes of \(2, 4, 1040\) are sharded over 'b' of a mesh"
        ):
            jax.jit(local)(*there)
