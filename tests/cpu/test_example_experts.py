"""Experts of the two training scripts equal a loop over tokens, in both frameworks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from support.examples import example

T, E, WIDTH = 24, 3, 16


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(2, T // 2, WIDTH)).astype(np.float32),
        "router": rng.normal(size=(WIDTH, E)).astype(np.float32),
        "up": rng.normal(size=(E, 4 * WIDTH, WIDTH)).astype(np.float32) / 4,
        "down": rng.normal(size=(E, WIDTH, 4 * WIDTH)).astype(np.float32) / 8,
    }


@pytest.fixture(scope="module")
def wanted(given):
    """Return the loss with its balance term, and gradients, token by token, by the formula of gpt.py."""
    x, router, up, down = (torch.from_numpy(array).requires_grad_() for array in given.values())
    tokens = x.flatten(0, 1)
    p = torch.softmax(tokens @ router, -1)
    chosen = p.argmax(-1)
    y = [p[t, e] * (down[e] @ F.relu(up[e] @ tokens[t]).square()) for t, e in enumerate(chosen)]
    loss = torch.stack(y).square().mean()
    parts = torch.bincount(chosen, minlength=E) / T
    (loss + example("gpt").BALANCE * E * parts @ p.mean(0)).backward()
    assert len(set(chosen.tolist())) > 1
    return loss.item(), [leaf.grad.numpy() for leaf in (x, router, up, down)]


def assert_close(loss, grads, wanted):
    assert loss == pytest.approx(wanted[0], rel=1e-5)
    for got, want in zip(grads, wanted[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_in_pytorch(given, wanted):
    module = example("experts_torch")
    router, up = module.Router(WIDTH, E), module.Experts(E, WIDTH, 4 * WIDTH)
    down = module.Experts(E, 4 * WIDTH, WIDTH)
    x = torch.from_numpy(given["x"]).requires_grad_()
    with torch.no_grad():
        router.weight.copy_(torch.from_numpy(given["router"]))
        for layer, name in ((up, "up"), (down, "down")):
            for expert, weight in zip(layer.experts, given[name], strict=True):
                expert.weight.copy_(torch.from_numpy(weight))
    loss = module.routed(x, router, up, down).square().mean()
    loss.backward()
    grads = [torch.stack([expert.weight.grad for expert in layer.experts]).numpy() for layer in (up, down)]
    assert_close(loss.item(), [x.grad.numpy(), router.weight.grad.numpy(), *grads], wanted)


def test_in_jax(given, wanted):
    jax = pytest.importorskip("jax")
    module, balance = example("experts_jax"), example("gpt").BALANCE

    def loss_of(x, router, up, down):
        weights = {"up": up.swapaxes(1, 2), "down": down.swapaxes(1, 2)}
        y, uneven = module.routed(x, router, lambda x, sizes, name: jax.lax.ragged_dot(x, weights[name], sizes))
        return (y**2).mean() + balance * (uneven - jax.lax.stop_gradient(uneven))

    loss, grads = jax.value_and_grad(loss_of, argnums=(0, 1, 2, 3))(*given.values())
    assert_close(float(loss), grads, wanted)
