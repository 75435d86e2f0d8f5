"""What shows of an infinity or a NaN: the option `nonfinite` of formats, from single ops to a step of training.

The bits of every format with either value of the option are under every test that runs over `support.formats`; here
are those of a scale that is given, where elements and no scale must show it.
"""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import qshard.jax as qj
from qshard import reference
from qshard.formats import E2M1, E4M3, E5M2, FP8_E4M3, FP8_E5M2, Format
from qshard.recipes import CurrentScaling, Role
from qshard.torch_bridge import convert
from support.awkward import BFLOAT16, DTYPES, assert_bits_equal, awkward_values
from support.formats import RECIPES
from support.op_calls import call
from support.products import operands

ROWS, K, N = 32, 64, 96
OPTIONS = ("saturate", "nan")


def products(front, recipe, x, w, dy):
    """y, dx and dw; under delayed scaling of a second step, with scales of a first whose numbers were finite."""
    if not recipe.stateful:
        return front.linear(x, w, dy, recipe, seed=1)
    states = {role: (1.0, np.zeros(recipe.state_shapes["amax_history"])) for role in Role}
    finite = tuple(np.nan_to_num(a.astype(np.float32), nan=1, posinf=1, neginf=1).astype(a.dtype) for a in (x, w, dy))
    _, _, states = front.delayed_step([finite], recipe, states)
    made, _, _ = front.delayed_step([(x, w, dy)], recipe, states)
    return made[0]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_bad_number_reaches_all_that_depends_on_it(front, recipe):
    """One of the first rows and columns, as blocks hold it together with others; what does not depend on it is finite."""
    for bad, place in itertools.product((np.inf, -np.inf, np.nan), range(3)):
        x, w, dy = operands((ROWS, K), N, BFLOAT16)
        (x, w, dy)[place][3, 5] = bad
        y, dx, dw = (~np.isfinite(a.astype(np.float32)) for a in products(front, recipe, x, w, dy))
        shown, hidden = [
            ([y[3, :], dw[:, 5]], dx),
            ([y[:, 3], dx[:, 5]], dw),
            ([dx[3, :], dw[5, :]], y),
        ][place]
        assert all(part.all() for part in shown), "xwd"[place]
        assert not hidden.any(), "xwd"[place]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_for_training_show(recipe):
    assert {recipe.format(role).nonfinite for role in Role} == {"nan"}
    described = recipe.format(Role.WEIGHT)
    assert str(described).endswith("nonfinite=nan]")
    assert Format.of(described.description) == described


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"nonfinite \('inf'\) must be 'saturate' or 'nan'"):
        FP8_E4M3.with_options(nonfinite="inf")


# --- ops, against the reference ---


def amaxes(count=600):
    """Of blocks: bells, subnormals, the largest number, and some zeros, infinities and NaN."""
    amax = np.abs(awkward_values((6, count), 3, np.float32)).reshape(-1)
    amax[::7] = np.array([0, np.inf, np.nan, np.finfo(np.float32).max, 1e-45], np.float32)[
        np.arange(len(amax[::7])) % 5
    ]
    return amax


@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_scales_of_amaxes(nonfinite):
    amax = amaxes()
    for element, pow2, eps in itertools.product((E4M3, E5M2), (False, True), (0.0, 0.5)):
        options = {"pow2": pow2, "eps": eps, "nonfinite": nonfinite}
        got, want = (
            call("scale_from_amax", amax, element=element.name, **options),
            reference.scale_from_amax(amax, element, **options),
        )
        for a, b in zip(got, want, strict=True):
            assert_bits_equal(a, b, f"scale_from_amax {element} {options}")
        assert np.isnan(got[0]).any() == (nonfinite == "nan")
    shown = reference.shown_amax(amax, nonfinite)
    for element, rounding in itertools.product((E4M3, E5M2), ("up", "floor")):
        _, codes = call("scale_e8m0", amax, element=element.name, rounding=rounding, nonfinite=nonfinite)
        assert_bits_equal(codes, reference.e8m0_from_amax(shown, element, rounding=rounding), f"scale_e8m0 {rounding}")
    for whole in (np.float32(3), np.float32(np.inf)):
        got = call("scale_nvfp4", amax, whole, scale_max=448.0, nonfinite=nonfinite)
        want = call("scale_nvfp4", shown, whole, scale_max=448.0)
        for a, b in zip(got, want, strict=True):
            assert_bits_equal(a, b, f"scale_nvfp4 {whole}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_casts_under_a_scale_of_earlier_steps(nonfinite, dtype):
    """Infinite elements alone become NaN; the bits of finite ones, zeros with their signs among them, do not change."""
    for fmt, shape in itertools.product((FP8_E4M3, FP8_E5M2), [(1, 1), (31, 37), (130, 72), (256, 384)]):
        x = awkward_values(shape, 1, dtype)
        x.flat[:: max(1, x.size // 50)] = np.inf
        x.flat[1 :: max(1, x.size // 40)] = -np.inf
        for scale in (np.float32(1.7), np.float32(1e-30), np.float32(1e30)):
            chosen = fmt.with_options(nonfinite=nonfinite)
            want = reference.quantize(x, chosen, scale=scale).rowwise.data
            options = {"element": fmt.element.name, "nonfinite": nonfinite, "lead": 0}
            data, amax = call("cast_amax", x, scale, **options)
            assert_bits_equal(data, want, f"cast_amax {chosen} {shape} {scale}")
            assert_bits_equal(amax, reference.amax(x), "amax")
            data, data_t, amax = call("cast_transpose_amax", x, scale, batch=0, **options)
            assert_bits_equal(data, want, f"cast_transpose_amax {chosen} {shape} {scale}")
            assert_bits_equal(data_t, np.ascontiguousarray(want.T), "transposed")
            assert_bits_equal(amax, reference.amax(x), "amax")
            infinite = np.isinf(x.astype(np.float32))
            assert (want[infinite] == fmt.element.nan_code).all() == (nonfinite == "nan")


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=str)
@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_slices_under_a_scale_of_earlier_steps(nonfinite, element):
    """Slices that begin and end amid a byte; ones long enough for every way through the kernel."""
    rows, cols = 40, 130
    for start, length in [(0, rows * cols), (3, 20), (131, 4001), (2, 1)]:
        x = awkward_values((1, length), start, np.float32).reshape(-1)
        x[::3], x[1::7] = np.inf, -np.inf
        scaled = np.where(np.isinf(x) & (nonfinite == "nan"), np.float32(np.nan), x * np.float32(1.7))
        want = np.zeros(rows * cols, np.uint8)
        want[start : start + length] = reference.encode(scaled, element)
        want = reference.pack(want) if element is E2M1 else want
        data = torch.zeros(len(want), dtype=torch.uint8)
        torch.ops.qshard.cast_slices(
            torch.tensor([[start, 0]], dtype=torch.int32),
            torch.tensor([1.7]),
            [torch.from_numpy(x)],
            [data],
            block_rows=0,
            block_cols=0,
            element=element.name,
            nonfinite=nonfinite,
            pieces=False,
            rounded_to="float32",
            shapes=[rows, cols],
        )
        assert_bits_equal(data.numpy(), want, f"{element} {start} {length}")


# --- what looks for it in training ---


def test_grad_scaler_skips_the_step():
    """A loss scale of 2^127 overflows the gradient of y. Without quantizing, PyTorch skips as well."""
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), CurrentScaling())
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for skips in (True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).sum() * 4
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(new_scale=1.0)
        changed = any(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
        assert changed != skips


def test_apply_if_finite_skips_the_step():
    optimizer = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=3)
    w = jnp.ones((32, 32))
    state = optimizer.init(w)
    for dy, skips in [(jnp.inf, True), (1.0, False)]:
        _, vjp = jax.vjp(lambda w: qj.linear(jnp.ones((4, 32)), w, CurrentScaling()), w)
        grad = vjp(jnp.ones((4, 32)).at[1, 2].set(dy))[0]
        updates, state = optimizer.update(grad, state, w)
        assert bool((updates == 0).all()) == skips
        assert int(state.notfinite_count) == skips
