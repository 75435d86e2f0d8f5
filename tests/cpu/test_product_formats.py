"""Formats of single products: each product has the bits that the recipe of its formats gives it."""

import dataclasses

import numpy as np
import pytest

from qshard.recipes import NVFP4, CurrentScaling, Product

SEED = 7
RECIPES = [
    NVFP4(wgrad="bf16"),
    NVFP4(forward="bf16"),
    NVFP4(forward="MXFP8", dgrad="bf16", wgrad="MXFP6"),
    CurrentScaling(dgrad=CurrentScaling(gradient="FP8_E4M3")),
]


def operands():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in ((48, 64), (32, 64), (48, 32))]


def products_of(front, recipe, layout):
    """Return y, dx and dw."""
    x, w, dy = operands()
    if front.name == "jax":
        import jax

        from qshard.jax import linear

        def products(x, w, dy):
            y, pull = jax.vjp(lambda x, w: linear(x, w, recipe, seed=SEED, weight_layout=layout), x, w)
            return y, *pull(dy)

        return [np.asarray(each) for each in jax.jit(products)(x, w if layout == "NK" else w.T, dy)]
    import torch

    from qshard.torch_bridge import linear

    x, w = torch.tensor(x, requires_grad=True), torch.tensor(w if layout == "NK" else w.T.copy())
    w = torch.nn.Parameter(w)
    y = linear(x, w, None, recipe, seed=SEED, weight_layout=layout)
    y.backward(torch.tensor(dy))
    return [each.detach().numpy() for each in (y, x.grad, w.grad)]


def in_bfloat16(layout):
    import ml_dtypes

    x, w, dy = (each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in operands())
    dw = dy.T @ x
    return x @ w.T, dy @ w, dw if layout == "NK" else dw.T


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_product_has_its_own_formats(front, recipe, layout):
    made = products_of(front, recipe, layout)
    for product, got in zip(Product, made, strict=True):
        own = recipe.of(product)
        if own is None:
            # Products of bfloat16 are exact in float32; sums of at most 64 of them have rounding errors of 2^-24 each.
            np.testing.assert_allclose(got, in_bfloat16(layout)[[*Product].index(product)], rtol=0, atol=64 * 2e-6)
        else:
            plain = dataclasses.replace(own, forward=None, dgrad=None, wgrad=None)
            np.testing.assert_array_equal(got, products_of(front, plain, layout)[[*Product].index(product)])
