"""Compiles an MLP under tensor and sequence parallelism for 4 H100s and prints what travels behind what, as JSON.

Arguments: cases "recipe,mode". Modes are auto, explicit, and of `shard_map` plain and overlap.
"""

import dataclasses
import json
import sys

from support import h100

h100.prepare()

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import linear
from support.hlo import traffic

DEVICES, LENGTH, WIDTH, FFN = 4, 4096, 4096, 16384
ROWS, COLUMNS = P(None, "tp"), P(None, None, "tp")


def program(recipe, mode):
    inside = mode in ("plain", "overlap")
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = Mesh(h100.devices(DEVICES), ("tp",), axis_types=(kind,))
    specs = (ROWS, P("tp"), P(None, "tp"))
    shapes = ((1, LENGTH, WIDTH), (FFN, WIDTH), (WIDTH, FFN))

    def multiply(x, w, cut, side):
        if inside:
            return linear(x, w, recipe, seed=0, overlap=mode == "overlap", **{side: "tp"})
        cut = NamedSharding(mesh, cut)
        if kind is AxisType.Explicit:
            return linear(x, w, recipe, seed=0, out_sharding=cut)
        spec = P("tp", None) if side == "gather_rows" else P(None, "tp")
        return jax.lax.with_sharding_constraint(linear(x, w, recipe, seed=0, weight_spec=spec), cut)

    def step(x, up, down):
        def loss(*given):
            h = jax.nn.gelu(multiply(given[0], given[1], COLUMNS, "gather_rows"))
            y = multiply(h, given[2], ROWS, "scatter_rows")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        made = jax.grad(loss, argnums=(0, 1, 2))(x, up, down)
        if inside:
            return made
        pin = jax.sharding.reshard if kind is AxisType.Explicit else jax.lax.with_sharding_constraint
        return tuple(pin(a, NamedSharding(mesh, spec)) for a, spec in zip(made, specs, strict=True))

    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs) if inside else step
    given = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return run, given, mesh


def main():
    described = {}
    for case in sys.argv[1:]:
        run, given, mesh = program(*case.split(","))
        with jax.set_mesh(mesh):
            made = jax.jit(run).lower(*given).compile()
        described[case] = {"collectives": [dataclasses.asdict(each) for each in traffic(made)]}
    print(json.dumps(described))


main()
