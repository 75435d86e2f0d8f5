"""Compiles a step of two Llama layers for eight H100s, and prints the collectives that GEMMs overlap, as JSON.

Arguments: cases "recipe,mode,option,...". Modes: auto, explicit, shard_map. Recipe "bf16" is `x @ w.T`. Options:
  remat: recompute whole layers in the backward pass.
  kept: remat, and cache gathered codes from the recomputed forward to the backward pass.
  codes, products: remat with the policies of these names.
  apart: q, k, v and the two halves of the MLP as separate linears.
  local: activation scales per device.
"""

import dataclasses
import json
import re
import sys

from support import h100

h100.prepare()

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import init_delayed, linear, policies
from qshard.recipes import as_recipe
from support.hlo import traffic

LAYERS, WIDTH, FFN, HEAD, BATCH, LENGTH = 2, 4096, 14336, 128, 2, 2048
SHAPES = {"qkv": (3 * WIDTH, WIDTH), "o": (WIDTH, WIDTH), "up": (2 * FFN, WIDTH), "down": (WIDTH, FFN)}
POLICIES = {"codes": policies.codes_saveable, "products": policies.codes_and_products_saveable}
CUT = P("fsdp", None)


def argument(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def normed(x):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def attended(q, k, v):
    q, k, v = (x.reshape(*x.shape[:-1], -1, HEAD) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), v)
    return out.reshape(*out.shape[:-2], -1)


def layer(multiply, h, ws):
    def parts(x, name, count):
        if isinstance(ws[name], list):
            return [multiply(x, w) for w in ws[name]]
        return jnp.split(multiply(x, ws[name]), count, axis=-1)

    h = h + multiply(attended(*parts(normed(h), "qkv", 3)), ws["o"])
    gate, up = parts(normed(h), "up", 2)
    return h + multiply(jax.nn.silu(gate) * up, ws["down"])


def program(recipe, mode, *options):
    """Return the step and its abstract arguments."""
    inside = mode == "shard_map"
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = Mesh(h100.devices(), ("fsdp",), axis_types=(kind,))
    recipe = None if recipe == "bf16" else as_recipe(recipe, "program")
    given = {"gather_axis": "fsdp", "seed": 0, "reshard_after_forward": "kept" not in options}
    given |= {"axis_name": "fsdp"} if inside and "local" not in options else {}
    given |= {"local_axes": "fsdp"} if not inside and "local" in options else {}

    def weight(name, shape):
        count = {"qkv": 3, "up": 2}.get(name, 1) if "apart" in options else 1
        w = argument(mesh, (shape[0] // count, shape[1]), jnp.float32, CUT)
        state = init_delayed(recipe) if recipe is not None and recipe.stateful else None
        both = (w, jax.tree.map(lambda leaf: argument(mesh, leaf.shape, leaf.dtype, P()), state))
        return both if count == 1 else [both] * count

    def multiply(x, both):
        w, state = both
        if recipe is not None:
            return linear(x, w, recipe, weight_spec=CUT, state=state, **given)
        w = w.astype(x.dtype)
        if inside:
            w = jax.lax.all_gather(w, "fsdp", tiled=True)
        else:
            pin = jax.sharding.reshard if mode == "explicit" else jax.lax.with_sharding_constraint
            w = pin(w, NamedSharding(mesh, P()))
        return x @ w.T

    def loss(ws, x):
        def one(h, ws):
            return layer(multiply, h, ws)

        policy = next((POLICIES[name] for name in options if name in POLICIES), None)
        if policy or {"remat", "kept"} & set(options):
            one = jax.checkpoint(one, policy=policy)
        for each in ws:
            x = one(x, each)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(ws, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        # Weights are donated and updated in place; the gradients of states are their observed amaxes.
        updated = jax.tree.map(lambda w, grad: w - 1e-3 * grad if w.ndim == 2 else grad, ws, grads)
        return jax.lax.pmean(value, "fsdp") if inside else value, updated

    ws = [{name: weight(name, shape) for name, shape in SHAPES.items()}] * LAYERS
    x = argument(mesh, (8 * BATCH, LENGTH, WIDTH), jnp.bfloat16, P("fsdp"))
    if inside:
        specs = jax.tree.map(lambda leaf: CUT if leaf.ndim == 2 else P(), ws)
        step = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=(P(), specs))
    return step, (ws, x)


def main():
    described = {}
    for case in sys.argv[1:]:
        step, arguments = program(*case.split(","))
        with jax.set_mesh(arguments[1].sharding.mesh):
            made = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
        text = made.as_text()
        described[case] = {
            "collectives": [dataclasses.asdict(each) for each in traffic(text)],
            "calls": re.findall(r'custom_call_target="([^"]+)"', text),
            "peak": made.memory_analysis().peak_memory_in_bytes,
        }
    print(json.dumps(described))


main()
