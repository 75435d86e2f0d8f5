"""Training step of a Llama-like model under FSDP in JAX, for `bench_step_jax.py` and `bench_wire_jax.py`.

`model_shapes.py` has the shapes. By default: 8 layers of width 4096, FFN 14336, vocabulary 32000; 2 x 4096 tokens per
device. AdamW of optax. One program under `jit` on an Auto mesh: float32 weights, states and gradients are sharded along
their first axis. The recipe applies to the linear layers of the blocks. Embedding and head are bfloat16, and gradients
are reduced in bfloat16. `bf16` has bfloat16 linear layers everywhere. `naive` is per-tensor FP8 written by hand in jnp.
A kind is a recipe and options:

    kept     gathered codes are saved for backward; of the others only bf16 does that
    local    one scale per device for activations and their gradients, without reducing amaxes
    fused    qshard's norms and SwiGLU instead of jnp's, which XLA fuses with their neighbours
    loss     `linear_cross_entropy` instead of the head and optax's loss
    again    `jax.checkpoint` for each product with its operand: backward repeats norms, SwiGLU and casts
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qshard
from model_shapes import Shape
from qshard.recipes import DelayedScaling, Recipe

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import options

RECIPES: dict[str, Recipe | str | None] = {**options.RECIPES, "naive": "naive"}
"""Recipes of the linear layers of the blocks; None is bfloat16."""
AXIS = "data"
OPTIMIZER = optax.adamw(1e-4)

Tree = Any


def shapes(shape: Shape) -> Tree:
    block = {"attention_norm": (shape.width,), "ffn_norm": (shape.width,), **shape.linears}
    return {
        "embedding": (shape.vocabulary, shape.width),
        "blocks": [dict(block) for _ in range(shape.layers)],
        "norm": (shape.width,),
        "head": (shape.vocabulary, shape.width),
    }


def shardings_of(mesh: Mesh, tree: Tree) -> Tree:
    """Return shardings: arrays along their first axis, scalars replicated."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P(AXIS) if leaf.ndim else P()), tree)


def fresh(shape: Shape, kind: str) -> Tree:
    """Initialize weights, optimizer states, and states of delayed scaling if the recipe needs them."""
    given, structure = jax.tree.flatten(shapes(shape), is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(jax.random.key(0), len(given))
    values = [
        jnp.ones(sizes) if len(sizes) == 1 else jax.random.normal(key, sizes) * 0.02
        for key, sizes in zip(keys, given, strict=True)
    ]
    weights = jax.tree.unflatten(structure, values)
    recipe = recipe_of(kind)
    states = None
    if isinstance(recipe, DelayedScaling):
        states = [{name: qshard.init_delayed(recipe) for name in shape.linears} for _ in range(shape.layers)]
    return weights, OPTIMIZER.init(weights), states


def recipe_of(kind: str) -> Recipe | str | None:
    return RECIPES[kind.split()[0]]


def product(x: jax.Array, w: jax.Array, kind: str, state: Any, seed: jax.Array) -> jax.Array:
    recipe = recipe_of(kind)
    if recipe is None:
        return bf16_product(x, w)
    if recipe == "naive":
        return naive_product(x, w)
    again = "kept" not in kind.split()
    where = {"weight_spec": P(AXIS), "gather_axis": AXIS, "reshard_after_forward": again, "grad_dtype": jnp.bfloat16}
    own = {"local_axes": AXIS} if "local" in kind.split() else {}
    return qshard.linear(x, w, recipe, **where, **own, state=state, seed=seed)


def bf16_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("...k,nk->...n", x, w.astype(jnp.bfloat16))


def _scaled(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.where(amax > 0, float(jnp.finfo(dtype).max) / amax, 1.0)
    return (x * scale.astype(x.dtype)).astype(dtype), 1 / scale


@jax.custom_vjp
def naive_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return _naive_forward(x, w)[0]


def _naive_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    (xq, x_inv), (wq, w_inv) = _scaled(x, jnp.float8_e4m3fn), _scaled(w, jnp.float8_e4m3fn)
    y = jnp.einsum("...k,nk->...n", xq, wq, preferred_element_type=jnp.float32) * (x_inv * w_inv)
    return y.astype(x.dtype), (xq, x_inv, wq, w_inv)


def _naive_backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    xq, x_inv, wq, w_inv = kept
    dyq, dy_inv = _scaled(dy, jnp.float8_e5m2)
    dx = jnp.einsum("...n,nk->...k", dyq, wq, preferred_element_type=jnp.float32) * (dy_inv * w_inv)
    dw = jnp.einsum("...n,...k->nk", dyq, xq, preferred_element_type=jnp.float32) * (dy_inv * x_inv)
    return dx.astype(dy.dtype), dw.astype(jnp.bfloat16).astype(jnp.float32)


naive_product.defvjp(_naive_forward, _naive_backward)


def norm(x: jax.Array, weight: jax.Array, kind: str) -> jax.Array:
    if "fused" in kind.split():
        return qshard.rms_norm(x, weight, 1e-6)
    values = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + 1e-6)
    return (values * scale * weight).astype(x.dtype)


def block(
    x: jax.Array, weights: Tree, states: Tree, key: jax.Array, kind: str, shape: Shape, attention: str
) -> jax.Array:
    def layer(name: str, x: jax.Array) -> jax.Array:
        seed = jax.random.fold_in(key, list(shape.linears).index(name))
        return product(x, weights[name], kind, None if states is None else states[name], seed)

    def layers(names: Sequence[str], operand: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
        """Return a function that multiplies the result of `operand` by these weights."""

        def products(*of: jax.Array) -> list[jax.Array]:
            h = operand(*of)
            return [layer(name, h) for name in names]

        return jax.checkpoint(products) if "again" in kind.split() else products

    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    qkv = layers([*heads], lambda x: norm(x, weights["attention_norm"], kind))(x)
    pairs = zip(qkv, heads.values(), strict=True)
    q, k, v = (y.reshape(*y.shape[:-1], count, -1) for y, count in pairs)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    x = x + layers(["o"], lambda mixed: mixed)(mixed.reshape(x.shape))[0]
    gate, up = layers(["gate", "up"], lambda x: norm(x, weights["ffn_norm"], kind))(x)
    swiglu = qshard.swiglu if "fused" in kind.split() else lambda gate, up: jax.nn.silu(gate) * up
    return x + layers(["down"], swiglu)(gate, up)[0]


def loss_of(
    weights: Tree, states: Tree, tokens: jax.Array, key: jax.Array, kind: str, shape: Shape, attention: str
) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    whole = lax.with_sharding_constraint(weights["embedding"].astype(jnp.bfloat16), NamedSharding(mesh, P()))
    x = lax.with_sharding_constraint(whole[tokens[:, :-1]], NamedSharding(mesh, P(AXIS)))
    for i, of_block in enumerate(weights["blocks"]):
        own = None if states is None else states[i]
        x = block(x, of_block, own, jax.random.fold_in(key, i), kind, shape, attention)
    x, labels = norm(x, weights["norm"], kind), tokens[:, 1:]
    if "loss" in kind.split():
        return qshard.linear_cross_entropy(x, weights["head"].astype(x.dtype), labels)
    logits = bf16_product(x, weights["head"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels))


def step(
    weights: Tree, optimizer: Tree, states: Tree, tokens: jax.Array, key: jax.Array, *, kind: str, **given: Any
) -> tuple[Tree, Tree, Tree, jax.Array]:
    differentiate = jax.value_and_grad(partial(loss_of, kind=kind, **given), argnums=(0, 1))
    loss, (gradients, amaxes) = differentiate(weights, states, tokens, key)
    mesh = jax.sharding.get_abstract_mesh()
    gradients = lax.with_sharding_constraint(gradients, shardings_of(mesh, gradients))
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, weights)
    if states is not None:
        states = qshard.update_delayed(states, amaxes, recipe_of(kind))
    return optax.apply_updates(weights, updates), optimizer, states, loss


def lower(mesh: Mesh, kind: str, shape: Shape, attention: str) -> Any:
    """Lower the step for a mesh. Its devices need not exist."""
    with jax.set_mesh(mesh):
        trees = jax.eval_shape(partial(fresh, shape, kind))
        tokens = jax.ShapeDtypeStruct((shape.batch * mesh.size, shape.context + 1), jnp.int32)
        inputs = (*trees, tokens, jax.eval_shape(_key))
        places = (*(shardings_of(mesh, tree) if i < 2 else _everywhere(mesh, tree) for i, tree in enumerate(trees)),)
        places = (*places, NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P()))
        outs = (*places[:3], NamedSharding(mesh, P()))
        run = jax.jit(
            partial(step, kind=kind, shape=shape, attention=attention),
            in_shardings=places,
            out_shardings=outs,
            donate_argnums=(0, 1, 2),
        )
        return run.lower(*inputs)


def _key() -> jax.Array:
    return jax.random.key(0)


def _everywhere(mesh: Mesh, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P()), tree)


def start(mesh: Mesh, kind: str, shape: Shape) -> Tree:
    """Initialize the state that `lowered` takes, sharded."""
    with jax.set_mesh(mesh):
        trees = jax.eval_shape(partial(fresh, shape, kind))
        places = tuple(shardings_of(mesh, tree) if i < 2 else _everywhere(mesh, tree) for i, tree in enumerate(trees))
        return jax.jit(partial(fresh, shape, kind), out_shardings=places)()


def mesh_of(devices: Any) -> Mesh:
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))
