"""Compiles JAX programs for eight H100s on a machine without a GPU and prints what they do, as JSON.

Run by tests/cpu/test_jax_h100.py, in a process of its own because it needs JAX's CUDA plugin, from the folder given as
the first argument if it is not installed. Nothing is run, so the handlers of the CPU may stand for those of CUDA.
"""

import json
import os
import re
import sys
from functools import partial

if len(sys.argv) > 1:
    sys.path.append(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# XLA chooses between its own GEMMs and cuBLASLt's by running both; without a GPU it would take its own.
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import _ffi
from qshard.formats import FP8_E4M3, MXFP8_32x32, Usage
from qshard.jax import compute_scales, gather, init_delayed, linear, ops, quantize
from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling
from support.hlo import collectives

# What XLA asks of a device. It only makes FP8 matmuls where it knows the versions of CUDA.
H100 = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32  clock_rate_ghz: 1.98
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448  shared_memory_per_core: 233472
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  device_memory_size: 84942979072  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
DEVICES = np.array(topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x8").devices)
RECIPE = CurrentScaling()
if not _ffi.cuda_built:  # Nothing is run, so any handler will do.
    ops.register_handlers("CUDA", _ffi.handlers("cpu"))


def mesh_of(kind):
    return Mesh(DEVICES, ("fsdp",), axis_types=(kind,))


def argument(mesh, shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def step(ws, x, recipe=RECIPE, **options):
    """Two layers and all their gradients: five GEMMs, as x has none."""

    def loss(ws):
        h = x
        for seed, w in enumerate(ws):
            options_of_w = options | {"weight_spec": P("fsdp", None), "gather_axis": "fsdp", "seed": seed}
            h = jax.nn.gelu(linear(h, w, recipe, **options_of_w))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss)(ws)


def delayed_step(ws, states, x):
    """`step` with delayed scaling, and the amaxes it brings."""

    def loss(ws, states):
        h = x
        for w, state in zip(ws, states, strict=True):
            own = {"weight_spec": P("fsdp", None), "gather_axis": "fsdp", "state": state}
            h = jax.nn.gelu(linear(h, w, DelayedScaling(), **own))
        return jnp.mean(h.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))(ws, states)


def cut_blocks(w):
    """A weight of 240 rows a device, so 7.5 blocks."""
    return gather(quantize(w, MXFP8_32x32, spec=P("fsdp")), "fsdp", spec=P("fsdp"))


def scanned_step(ws, x):
    """Layers in a loop, their forward computed again in the backward pass; scales from before the loop."""
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


def local_step(ws, x, recipe=RECIPE):
    loss, grads = step(ws, x, recipe, axis_name="fsdp")
    return jax.lax.pmean(loss, "fsdp"), grads


def programs():
    """(name, function, arguments)."""
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
    yield "step, shard_map", jax.shard_map(local_step, mesh=auto, in_specs=specs, out_specs=(P(), P("fsdp"))), (ws, x)
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
    yield "cut blocks", cut_blocks, (argument(auto, (1920, 2048), jnp.float32, P("fsdp")),)
    yield "scales", lambda ws: compute_scales(ws, RECIPE), (ws,)
    stacked = argument(auto, (4, 2048, 2048), jnp.float32, P(None, "fsdp"))
    yield "step, scan and remat", scanned_step, (stacked, x)


def describe(compiled):
    text = compiled.as_text()
    return {
        "collectives": collectives(compiled),
        "calls": re.findall(r'custom_call_target="([^"]+)"', text),
        # Of matrices: the zeros that are the gradient of a history, one of 16 numbers, are copied for each result.
        "ops": sorted(set(re.findall(r"\d,\d+\]\S* (dot|transpose|copy|convolution)\(", text))),
    }


def main():
    described = {}
    for name, function, arguments in programs():
        mesh = jax.tree.leaves(arguments)[0].sharding.mesh
        with jax.set_mesh(mesh):
            described[name] = describe(jax.jit(function).lower(*arguments).compile())
    print(json.dumps(described))


main()
