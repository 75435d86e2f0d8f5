"""How train_jax.py runs over devices (`--mode`), and which of them have parts of a weight (`--mesh`).

    shard_map  the program is that of one device, which gathers and reduces by name
    auto       the program is that of one large device; XLA cuts it, as shardings of arrays ask for
    explicit   likewise, and types say how every array is cut: what they leave open is an error

All three gather the same codes. `Device` and `Whole` are what the model asks for in the first and in the two others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import options
import qshard.jax as qshard
from gpt import is_stacked
from qshard.recipes import Recipe

MODES = ("shard_map", "auto", "explicit")
KINDS = ("shard", "primary")
# Under tensor parallelism: layers whose results, or whose inputs, two devices share.
COLUMNS, ROWS = ("qkv.weight", "up.weight"), ("projection.weight", "down.weight")


def refusal(arguments: Any) -> str | None:
    """Say why this mode cannot do what is asked, if it cannot."""
    if arguments.mode == "shard_map" and arguments.mesh == "fsdp,tp":
        return "--mesh fsdp,tp is not for --mode shard_map, whose program would have to say it; give --mode auto"
    if arguments.mode == "explicit" and arguments.experts:
        return (
            f"--experts {arguments.experts} is not for --mode explicit: JAX types no ragged product; give --mode auto"
        )
    return None


def make_mesh(name: str, mode: str, devices: list[jax.Device]) -> Mesh:
    """Arrange the devices as `--mesh` says."""
    axes = options.MESHES[name]
    kinds = (AxisType.Explicit if mode == "explicit" else AxisType.Auto,) * len(axes)
    return jax.make_mesh(options.mesh_shape(name, len(devices)), axes, axis_types=kinds, devices=devices)


def spec_of(mesh: Mesh, name: str) -> P:
    """Return how a weight is cut: by rows, and under tensor parallelism by what two devices share of a layer first."""
    if is_stacked(name):
        return P(None, "fsdp")
    if "tp" in mesh.axis_names and name.endswith(COLUMNS):
        return P(("tp", "fsdp"))
    return P("fsdp", "tp") if "tp" in mesh.axis_names and name.endswith(ROWS) else P("fsdp")


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes over which a batch is cut."""
    return tuple(axis for axis in mesh.axis_names if axis != "tp")


@dataclass(frozen=True)
class Device:
    """`shard_map`: arrays are what one device has."""

    mesh: Mesh

    def over_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Run `function` on every device's part of the arguments."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def gather(self, name: str, shard: jax.Array) -> jax.Array:
        """Return all of a weight that one device has a part of. Bits travel as uint16, or XLA's CPU backend widens."""
        bits = jax.lax.bitcast_convert_type(shard.astype(jnp.bfloat16), jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, "fsdp", tiled=True), jnp.bfloat16)

    def scatter(self, name: str, gradient: jax.Array) -> jax.Array:
        """Return this device's rows of the sum of all devices' gradients, in float32."""
        mine = jax.lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", tiled=True)
        return jax.lax.psum(mine, "replicate") if "replicate" in self.mesh.axis_names else mine

    def weight_gradient(self, name: str, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Return `dy.T @ x` of what this device has."""
        return jnp.einsum("btn,btk->nk", dy, x)

    def linear(self, x: jax.Array, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> jax.Array:
        """Return `x @ w.T` in the formats of the recipe."""
        return qshard.linear(x, shard, recipe, gather_axis="fsdp", **given)

    def gathered_weight(self, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> Any:
        """Return what `linear` multiplies with."""
        return qshard.gathered_weight(shard, recipe, gather_axis="fsdp", **given)

    def rows(self, x: jax.Array) -> jax.Array:
        """Return activations cut by batch alone; here they are."""
        return x

    def take(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return rows of an embedding."""
        return weight[tokens]

    def mean(self, loss: jax.Array) -> jax.Array:
        """Return the mean over all devices."""
        return jax.lax.pmean(loss, batch_axes(self.mesh))

    def key(self, key: jax.Array) -> jax.Array:
        """Return a key for random numbers that other devices do not draw."""
        for axis in batch_axes(self.mesh):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return key

    def scales(self, weights: dict[str, jax.Array], recipe: Recipe) -> dict[str, Any]:
        """Return what all weights need reduced, from one all-reduce."""
        scales: dict[str, Any] = qshard.compute_scales(weights, recipe, axis_name="fsdp")
        return scales


@dataclass(frozen=True)
class Whole:
    """Auto and Explicit meshes: arrays are whole, and devices have parts of them."""

    mesh: Mesh

    def over_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """XLA runs it on all devices."""
        return function

    def cut(self, x: jax.Array, spec: P) -> jax.Array:
        """Return `x`, cut as `spec` says."""
        if self.mesh.explicit_axes:
            return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gather(self, name: str, shard: jax.Array) -> jax.Array:
        """Return a weight without its cut along "fsdp". Held on both sides, or XLA would move the gather elsewhere."""
        bits = jax.lax.bitcast_convert_type(shard.astype(jnp.bfloat16), jnp.uint16)
        bits = self.cut(self.cut(bits, spec_of(self.mesh, name)), self._gathered(name))
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)

    def scatter(self, name: str, gradient: jax.Array) -> jax.Array:
        """Return a gradient in float32, cut as its weight is."""
        return self.cut(gradient.astype(jnp.float32), spec_of(self.mesh, name))

    def weight_gradient(self, name: str, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Return `dy.T @ x`."""
        typed = {"out_sharding": NamedSharding(self.mesh, self._gathered(name))} if self.mesh.explicit_axes else {}
        return jnp.einsum("btn,btk->nk", dy, x, **typed)

    def linear(self, x: jax.Array, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> jax.Array:
        """Return `x @ w.T` in the formats of the recipe."""
        return qshard.linear(x, shard, recipe, out_sharding=self.result_of(name), **self._cut_of(name), **given)

    def gathered_weight(self, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> Any:
        """Return what `linear` multiplies with."""
        return qshard.gathered_weight(shard, recipe, **self._cut_of(name), **given)

    def rows(self, x: jax.Array) -> jax.Array:
        """Return activations cut by batch alone."""
        return self.cut(x, P(batch_axes(self.mesh), None, None))

    def take(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return rows of an embedding."""
        if self.mesh.explicit_axes:
            rows: jax.Array = weight.at[tokens].get(out_sharding=P(batch_axes(self.mesh), None, None))
            return rows
        return self.rows(weight[tokens])

    def mean(self, loss: jax.Array) -> jax.Array:
        """Return the mean; it is of all devices already."""
        return loss

    def key(self, key: jax.Array) -> jax.Array:
        """Return a key for random numbers, which are those of whole arrays."""
        return key

    def scales(self, weights: dict[str, jax.Array], recipe: Recipe) -> dict[str, Any]:
        """Return what all weights need reduced; XLA combines what it can."""
        return {
            name: qshard.compute_scales(weight, recipe, spec=spec_of(self.mesh, name))
            for name, weight in weights.items()
        }

    def result_of(self, name: str) -> P | None:
        """Return how the result of a layer is cut, where types leave it open: two devices have sums of a part."""
        return P(batch_axes(self.mesh), None, None) if self.mesh.explicit_axes and name.endswith(ROWS) else None

    def _gathered(self, name: str) -> P:
        rows, *columns = spec_of(self.mesh, name)
        return P("tp" if "tp" in rows else None, *columns)

    def _cut_of(self, name: str) -> dict[str, Any]:
        return {"weight_spec": spec_of(self.mesh, name), "gather_axis": "fsdp"}


Layout = Device | Whole


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(layout: Layout, name: str, shard: jax.Array) -> jax.Array:
    """Return the whole weight as bfloat16. Its gradient is summed over the devices, and cut again, in float32."""
    return layout.gather(name, shard)


gather.defvjp(
    lambda layout, name, shard: (gather(layout, name, shard), None),
    lambda layout, name, _, gradient: (layout.scatter(name, gradient),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bf16_linear(layout: Layout, name: str, x: jax.Array, shard: jax.Array) -> jax.Array:
    """Return `x @ w.T`, for a shard of `w`. Backward gathers `w` again: keeping it would undo what FSDP saves."""
    typed = {} if isinstance(layout, Device) else {"out_sharding": layout.result_of(name)}
    return jnp.einsum("btk,nk->btn", x, gather(layout, name, shard).astype(x.dtype), **typed)


def _bf16_linear_backward(
    layout: Layout, name: str, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, shard = kept
    dw = layout.weight_gradient(name, dy, x).astype(jnp.bfloat16)
    typed = {"out_sharding": jax.typeof(x).sharding} if jax.typeof(x).sharding.mesh.explicit_axes else {}
    dx = jnp.einsum("btn,nk->btk", dy, gather(layout, name, shard).astype(dy.dtype), **typed)
    return dx, layout.scatter(name, dw)


bf16_linear.defvjp(
    lambda layout, name, x, shard: (bf16_linear(layout, name, x, shard), (x, shard)), _bf16_linear_backward
)
