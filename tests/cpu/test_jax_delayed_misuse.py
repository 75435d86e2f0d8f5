"""A state of DelayedScaling that is not differentiated raises where its weight is, in every transform."""

import functools

import jax
import jax.numpy as jnp
import pytest

from qshard.jax import PrimaryWeight, init_delayed, linear, quantize, ragged_dot, spread_states, value_and_grad
from qshard.recipes import DelayedScaling

RECIPE = DelayedScaling(history=2)
X, W, STATE = jnp.ones((16, 32)), jnp.ones((16, 32)), init_delayed(RECIPE)
TEXT = "^linear: state is not differentiated, but its gradient is what brings the new amaxes; differentiate it"


def loss(w, state, x=X):
    return jnp.sum(linear(x, w, RECIPE, state=state))


def scanned(ws, states, x=X):
    """Return a loss of layers under `scan`."""
    return jnp.sum(
        jax.lax.scan(lambda x, given: (jnp.tanh(linear(x, given[0], RECIPE, state=given[1])), None), x, (ws, states))[0]
    )


def each(size, tree):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), tree)


CALLS = {
    "grad": loss,
    "jit inside": jax.jit(loss),
    "remat": jax.checkpoint(loss),
    "remat of jit": jax.checkpoint(jax.jit(loss)),
    "vmap over x": lambda w, state: jnp.sum(jax.vmap(functools.partial(loss, w, state))(each(3, X))),
    "spread": lambda w, state: jnp.sum(jax.vmap(loss, (None, 0))(w, spread_states(state, 3))),
    "cond": lambda w, state: jax.lax.cond(w[0, 0] > 0, loss, lambda w, state: 2 * loss(w, state), w, state),
    "rows by vmap": lambda w, state: jnp.sum(
        jax.vmap(lambda x: linear(x, w, RECIPE, state=state, vmap_as_rows=True))(each(3, X[0]))
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "outer", [pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow), pytest.param(jax.jit, id="jit")]
)
def test_a_state_that_is_not_differentiated(name, outer):
    call = CALLS[name]
    with pytest.raises(ValueError, match=TEXT):
        outer(jax.grad(call))(W, STATE)
    with pytest.raises(ValueError, match=TEXT):
        outer(jax.value_and_grad(lambda w: call(w, STATE)))(W)
    with pytest.raises(ValueError, match=TEXT):
        outer(jax.grad(lambda w, state: call(w, jax.lax.stop_gradient(state)), (0, 1)))(W, STATE)
    _, amaxes = outer(jax.grad(call, (0, 1)))(W, STATE)  # JAX's caches still work.
    assert float(amaxes.weight.observed.amax) > 0
    assert float(outer(call)(W, STATE)) != 0
    with pytest.raises(ValueError, match=TEXT):
        outer(jax.grad(call))(W, STATE)
    outer(jax.grad(call, (0, 1)))(W, STATE)


def test_scan_over_layers():
    ws, states = each(3, jnp.eye(32)), each(3, STATE)
    with pytest.raises(ValueError, match=TEXT):
        jax.jit(jax.grad(scanned))(ws, states)
    _, amaxes = jax.jit(jax.grad(scanned, (0, 1)))(ws, states)
    assert amaxes.weight.observed.amax.shape == (3,)


def test_frozen_weights_need_no_amaxes():
    """Adapters on a frozen weight, codes, gradients of inputs alone, and layers that are not trained."""
    jax.jit(jax.grad(lambda x: loss(W, STATE, x)))(X)
    a, b = jnp.ones((4, 32)), jnp.ones((16, 4))
    jax.jit(jax.grad(lambda ab: jnp.sum(linear(X, W, RECIPE, state=STATE) + X @ ab[0].T @ ab[1].T)))((a, b))
    codes = quantize(W, RECIPE.weight)
    jax.jit(jax.grad(lambda x: jnp.sum(linear(x, codes, RECIPE, state=STATE))))(X)
    jax.jit(jax.vmap(lambda x: linear(x, W, RECIPE, state=STATE)))(each(2, X))


def test_primary_weights_and_experts():
    primary = PrimaryWeight.of(quantize(W, RECIPE.weight))
    with pytest.raises(ValueError, match=TEXT):
        jax.jit(value_and_grad(loss))(primary, STATE)
    jax.jit(value_and_grad(loss, (0, 1)))(primary, STATE)
    ws, states, sizes = each(2, W), init_delayed(RECIPE, (2,)), jnp.array([8, 8])

    def run(ws, states):
        return jnp.sum(ragged_dot(X, ws, sizes, RECIPE, weight_layout="NK", state=states))

    with pytest.raises(ValueError, match=TEXT.replace("linear", "ragged_dot")):
        jax.jit(jax.grad(run))(ws, states)
    jax.jit(jax.grad(run, (0, 1)))(ws, states)


class TestFlax:
    """Default training loops of flax: nnx with `wrt=nnx.Param`, and linen with params alone."""

    nnx = pytest.importorskip("flax.nnx")

    def model(self):
        from qshard.jax import convert

        nnx = self.nnx
        return convert(
            nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 16, rngs=nnx.Rngs(1))), RECIPE
        )

    def test_nnx_optimizer(self):
        optax, nnx = pytest.importorskip("optax"), self.nnx
        from qshard.jax import nnx as qnnx
        from qshard.jax import update_delayed

        model = self.model()
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        own = lambda model: jnp.mean(model(X) ** 2)  # noqa: E731

        @nnx.jit
        def step(model, optimizer):
            optimizer.update(model, nnx.grad(own)(model))

        with pytest.raises(ValueError, match=TEXT):
            step(model, optimizer)

        @nnx.jit
        def right(model, optimizer):
            wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qnnx.ScalingState))
            grads, amaxes = nnx.split_state(nnx.grad(own, argnums=wrt)(model), nnx.Param, qnnx.ScalingState)
            optimizer.update(model, grads)
            nnx.update(model, update_delayed(nnx.state(model, qnnx.ScalingState), amaxes, RECIPE))

        for _ in range(2):
            right(model, optimizer)
        scales = [layer.dot_general.state.get_value().weight.scale for layer in model.layers]
        assert all(float(scale) > 0 for scale in scales)

    @pytest.mark.parametrize("remat", [False, True])
    def test_nnx_transforms(self, remat):
        nnx, model = self.nnx, self.model()
        call = nnx.remat(lambda model, x: model(x)) if remat else lambda model, x: model(x)
        with pytest.raises(ValueError, match=TEXT):
            nnx.value_and_grad(lambda model: jnp.sum(call(model, X)))(model)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        with pytest.raises(ValueError, match=TEXT):
            jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graph, params, rest)(X))))(params)
        assert nnx.jit(lambda model: call(model, X))(model).shape == (16, 16)

    def test_linen(self):
        nn = pytest.importorskip("flax.linen")
        from qshard.jax import linen

        layer = nn.Dense(16, dot_general_cls=functools.partial(linen.DotGeneral, RECIPE))
        variables = layer.init(jax.random.key(0), X)
        run = lambda params, states: layer.apply({"params": params, linen.STATES: states}, X).sum()  # noqa: E731
        with pytest.raises(ValueError, match=TEXT):
            jax.grad(run)(variables["params"], variables[linen.STATES])
        jax.grad(run, (0, 1))(variables["params"], variables[linen.STATES])
