"""Compiles JAX programs for eight H100s on a machine without a GPU, and prints their collectives and GEMMs as JSON.

Run by tests/cpu/test_jax_h100.py in a separate process, because `h100.prepare` changes the environment.
"""

import json
import re
from functools import partial

from support import h100

h100.prepare()

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.formats import FP8_E4M3, MXFP8_32x32, Usage
from qshard.gemm_dispatch import Gpu
from qshard.jax import compute_scales, gather, init_delayed, linear, linear_cross_entropy, muon, quantize, ragged_dot
from qshard.jax._gemm.target_gpu import Target, trace_for
from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling
from support.hlo import collectives

DEVICES = h100.devices()
RECIPE = CurrentScaling()


def mesh_of(kind):
    return Mesh(DEVICES, ("fsdp",), axis_types=(kind,))


def argument(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def step(ws, x, recipe=RECIPE, **options):
    """Run two layers forward and backward: five GEMMs, because x needs no gradient."""

    def loss(ws):
        h = x
        for seed, w in enumerate(ws):
            options_of_w = options | {"weight_spec": P("fsdp", None), "gather_axis": "fsdp", "seed": seed}
            h = jax.nn.gelu(linear(h, w, recipe, **options_of_w))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(ws)


def two_axes_step(w, x, recipe):
    """Run one layer, its weight sharded by FSDP along columns and by tensor parallelism along rows."""

    def loss(w, x):
        y = linear(x, w, recipe, weight_spec=P("tp", "fsdp"), gather_axis="fsdp", seed=0)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(w, x)


def delayed_step(ws, states, x):
    """Run `step` with delayed scaling, and return its amaxes too."""

    def loss(ws, states):
        h = x
        for w, state in zip(ws, states, strict=True):
            own = {"weight_spec": P("fsdp", None), "gather_axis": "fsdp", "state": state}
            h = jax.nn.gelu(linear(h, w, DelayedScaling(), **own))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(ws, states)


def bf16_step(ws, x):
    """Run `step` in bfloat16, with whole weights gathered."""

    def loss(ws):
        h = x
        for w in ws:
            whole = jax.lax.with_sharding_constraint(w.astype(jnp.bfloat16), P())
            h = jax.nn.gelu(jnp.einsum("bsk,nk->bsn", h, whole))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(ws)


def cut_blocks(w):
    """Gather a weight with partial blocks: 240 rows per device are 7.5 blocks."""
    return gather(quantize(w, MXFP8_32x32, spec=P("fsdp")), "fsdp", spec=P("fsdp"))


def scanned_step(ws, x):
    """Scan over layers with recomputation in the backward pass; scales are computed before the loop."""
    scales = jax.vmap(lambda w: compute_scales(w, RECIPE))(ws)

    @jax.checkpoint
    def layer(h, layer):
        w, scale = layer
        return jax.nn.gelu(
            linear(
                h,
                w,
                RECIPE,
                weight_spec=P("fsdp", None),
                gather_axis="fsdp",
                weight_scales=scale,
                reshard_after_forward=False,
            )
        ), None

    def loss(ws):
        return jnp.mean(jax.lax.scan(layer, x, (ws, scales))[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(ws)


def local_step(ws, x, recipe=RECIPE, **options):
    loss, grads = step(ws, x, recipe, axis_name="fsdp", **options)
    return jax.lax.pmean(loss, "fsdp"), grads


def experts_step(x, w, dy, sizes, recipe, **options):
    """Run a layer of experts forward and backward, on the tokens of a device. dy depends on y, as in a model."""
    y, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, recipe, weight_layout="NK", **options), x, w)
    return (y, *pull(dy * y))


def experts(mesh):
    """Yield programs of experts with grouped products: weights on the devices of their tokens, or gathered."""
    shapes = ((8 * 4096, 1024), P("fsdp")), ((64, 2048, 1024), P("fsdp")), ((8 * 4096, 2048), P("fsdp"))
    sizes = argument(mesh, (64,), jnp.int32, P("fsdp"))
    given = *(argument(mesh, shape, jnp.bfloat16, spec) for shape, spec in shapes), sizes
    specs = (P("fsdp"),) * 4, (P("fsdp"),) * 3
    for recipe in (CurrentScaling(), BlockScaling(), None):
        own = partial(experts_step, recipe=recipe)
        yield (
            f"experts, {type(recipe).__name__}",
            jax.shard_map(own, mesh=mesh, in_specs=specs[0], out_specs=specs[1]),
            given,
        )
    cut = P(None, "fsdp")
    w = argument(mesh, (8, 2048, 1024), jnp.bfloat16, cut)
    own = partial(experts_step, recipe=RECIPE, weight_spec=cut, gather_axis="fsdp")
    specs = (P("fsdp"), cut, P("fsdp"), P("fsdp")), (P("fsdp"), P("fsdp"), cut)
    run = jax.shard_map(own, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    yield "experts, gathered", run, (given[0], w, *given[2:])


def muon_step(mesh):
    """Return an update by Muon with steps of Newton-Schulz in FP8, and its arguments: a matrix and a stack."""
    shapes = {"w": (11008, 4096), "experts": (8, 4096, 4096)}
    optimizer = muon(0.02, ns_fp8_steps=3)
    grads = {name: argument(mesh, shape, jnp.float32, P("fsdp")) for name, shape in shapes.items()}
    state = jax.eval_shape(optimizer.init, grads)
    state = jax.tree.map(lambda x: argument(mesh, x.shape, x.dtype, P("fsdp") if x.ndim else P()), state)
    return optimizer.update, (grads, state)


def programs():
    """Yield (name, function, arguments)."""
    auto, explicit = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)
    for name, spec in (("rows", P("fsdp")), ("columns", P(None, "fsdp"))):
        x = argument(auto, (1024, 2048), jnp.bfloat16, spec)
        yield f"cast of {name}", lambda x: quantize(x, FP8_E4M3, usage=Usage.BOTH), (x,)
    for mesh in (auto, explicit):
        ws = [argument(mesh, (2048, 2048), jnp.float32, P("fsdp", None))] * 2
        x = argument(mesh, (64, 512, 2048), jnp.bfloat16, P("fsdp"))
        yield f"step, {mesh.axis_types[0].name}", step, (ws, x)
        yield f"step, {mesh.axis_types[0].name}, KN", partial(step, weight_layout="KN"), (ws, x)
    specs = (P("fsdp"), P("fsdp"))
    ws, x = [argument(auto, (2048, 2048), jnp.float32, P("fsdp"))] * 2, argument(auto, x.shape, x.dtype, P("fsdp"))
    yield "step, bfloat16 gradients", partial(step, grad_dtype="bfloat16"), (ws, x)
    yield "step, shard_map", jax.shard_map(local_step, mesh=auto, in_specs=specs, out_specs=(P(), P("fsdp"))), (ws, x)
    inside = partial(local_step, grad_dtype="MXFP8_E4M3")
    inside = jax.shard_map(inside, mesh=auto, in_specs=specs, out_specs=(P(), P("fsdp")))
    yield "step, codes of gradients", inside, (ws, x)
    for recipe in (BlockScaling(), MXFP8(), NVFP4()):
        name, inside = type(recipe).__name__, partial(local_step, recipe=recipe)
        x = argument(auto, x.shape, jnp.bfloat16, P("fsdp"))
        yield f"step, {name}, Auto", partial(step, recipe=recipe), (ws, x)
        inside = jax.shard_map(inside, mesh=auto, in_specs=specs, out_specs=(P(), P("fsdp")))
        yield f"step, {name}, shard_map", inside, (ws, x)
    states = [
        jax.tree.map(lambda leaf: argument(auto, leaf.shape, leaf.dtype, P()), init_delayed(DelayedScaling()))
    ] * 2
    yield "step, delayed", delayed_step, (ws, states, x)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = Mesh(DEVICES.reshape(2, 4), ("fsdp", "seq"), axis_types=(kind,) * 2)
        cut = [argument(mesh, (2048, 2048), jnp.float32, P("fsdp", None))] * 2
        rows = argument(mesh, (16, 4096, 2048), jnp.bfloat16, P("fsdp", "seq"))
        if kind is AxisType.Auto:
            yield "sequence, bfloat16", bf16_step, (cut, rows)
        for recipe in (CurrentScaling(), MXFP8()) if kind is AxisType.Auto else (CurrentScaling(), BlockScaling()):
            yield f"sequence, {type(recipe).__name__}, {kind.name}", partial(step, recipe=recipe), (cut, rows)
    yield "cut blocks", cut_blocks, (argument(auto, (1920, 2048), jnp.float32, P("fsdp")),)
    yield "scales", lambda ws: compute_scales(ws, RECIPE), (ws,)
    both = Mesh(DEVICES.reshape(2, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    cut = argument(both, (512, 128), jnp.float32, P("tp", "fsdp")), argument(both, (1024, 128), x.dtype, P("fsdp"))
    for recipe in (CurrentScaling(), NVFP4()):
        yield f"two axes, {type(recipe).__name__}", partial(two_axes_step, recipe=recipe), cut
    for mesh in (auto, explicit):
        rows, labels = argument(mesh, (8, 2048, 512), jnp.bfloat16, P("fsdp")), P("fsdp")
        labels = argument(mesh, (8, 2048), jnp.int32, labels)
        head = jax.value_and_grad(partial(linear_cross_entropy, chunk=512), argnums=(0, 1))
        w = argument(mesh, (4096, 512), jnp.bfloat16, P("fsdp"))
        yield f"head, {mesh.axis_types[0].name}", head, (rows, w, labels)
    stacked = argument(auto, (4, 2048, 2048), jnp.float32, P(None, "fsdp"))
    yield "step, scan and remat", scanned_step, (stacked, x)
    yield "muon", *muon_step(auto)
    with trace_for(Target(Gpu((9, 0), 130800, 130800))):
        yield from experts(auto)


def describe(compiled):
    text = compiled.as_text()
    return {
        "collectives": collectives(compiled),
        "gemms": re.findall(
            r'= \(?(\w+\[[\d,]*\])[^=]*?custom-call\(.*custom_call_target="(?:__cublas|qshard_gemm)', text
        ),
        "calls": re.findall(r'custom_call_target="([^"]+)"', text),
        # Matrices only: zero gradients of amax histories (16 numbers) are copied for each result.
        "ops": sorted(set(re.findall(r"\d,\d+\]\S* (dot|transpose|copy|convolution)\(", text))),
    }


def refusal_without_a_mesh():
    """Return the compile error for sharded arrays without a mesh, on a machine with one device."""
    cut = NamedSharding(mesh_of(AxisType.Auto), P("fsdp"))
    cast = jax.jit(lambda x: quantize(x, FP8_E4M3), in_shardings=cut)
    try:
        cast.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    except ValueError as error:
        return str(error)
    return ""


def main():
    described = {"no mesh": refusal_without_a_mesh()}
    for name, function, arguments in programs():
        mesh = jax.tree.leaves(arguments)[0].sharding.mesh
        with jax.set_mesh(mesh):
            described[name] = describe(jax.jit(function).lower(*arguments).compile())
    print(json.dumps(described))


main()
