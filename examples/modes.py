"""Parallel modes of train_jax.py (`--mode`) and the sharding of its weights (`--mesh`).

    shard_map  the program of one device, which gathers and reduces explicitly over named axes
    auto       the program of one large device, which XLA partitions by the shardings of arrays
    explicit   like auto, but types include shardings, and an ambiguous one is an error

All three gather the same codes. The model calls `Device` in shard_map mode, and `Whole` in the other two.
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
# Under tensor parallelism: layers sharded by output features, and layers sharded by input features.
COLUMNS, ROWS = ("qkv.weight", "up.weight"), ("projection.weight", "down.weight")


def refusal(arguments: Any) -> str | None:
    """Return why this mode does not support the arguments, or None."""
    if arguments.mode == "shard_map" and arguments.mesh == "fsdp,tp":
        return "--mesh fsdp,tp is not for --mode shard_map, whose program would have to say it; give --mode auto"
    if arguments.mode == "explicit" and arguments.experts:
        return (
            f"--experts {arguments.experts} is not for --mode explicit: JAX types no ragged product; give --mode auto"
        )
    return None


def make_mesh(name: str, mode: str, devices: list[jax.Device]) -> Mesh:
    """Arrange the devices in the mesh that `--mesh` names."""
    axes = options.MESHES[name]
    kinds = (AxisType.Explicit if mode == "explicit" else AxisType.Auto,) * len(axes)
    return jax.make_mesh(options.mesh_shape(name, len(devices)), axes, axis_types=kinds, devices=devices)


def spec_of(mesh: Mesh, name: str) -> P:
    """Return the sharding of a weight: by rows over "fsdp", and over "tp" by the features that two devices share."""
    if is_stacked(name):
        return P(None, "fsdp")
    if "tp" in mesh.axis_names and name.endswith(COLUMNS):
        return P(("tp", "fsdp"))
    return P("fsdp", "tp") if "tp" in mesh.axis_names and name.endswith(ROWS) else P("fsdp")


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that shard a batch."""
    return tuple(axis for axis in mesh.axis_names if axis != "tp")


@dataclass(frozen=True)
class Device:
    """`shard_map` mode: arrays are local shards."""

    mesh: Mesh

    def over_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Map `function` over the devices' shards of the arguments."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def gather(self, name: str, shard: jax.Array) -> jax.Array:
        """All-gather a weight in bfloat16. It is sent as uint16, because XLA's CPU backend would widen bfloat16."""
        bits = jax.lax.bitcast_convert_type(shard.astype(jnp.bfloat16), jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, "fsdp", tiled=True), jnp.bfloat16)

    def scatter(self, name: str, gradient: jax.Array) -> jax.Array:
        """Reduce-scatter a gradient in float32. Return this device's rows of the sum."""
        mine = jax.lax.psum_scatter(gradient.astype(jnp.float32), "fsdp", tiled=True)
        return jax.lax.psum(mine, "replicate") if "replicate" in self.mesh.axis_names else mine

    def weight_gradient(self, name: str, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Return `dy.T @ x` for the local batch."""
        return jnp.einsum("btn,btk->nk", dy, x)

    def linear(self, x: jax.Array, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> jax.Array:
        """Return `x @ w.T` in the recipe's formats."""
        return qshard.linear(x, shard, recipe, gather_axis="fsdp", **given)

    def gathered_weight(self, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> Any:
        """Return the gathered weight that `linear` multiplies with."""
        return qshard.gathered_weight(shard, recipe, gather_axis="fsdp", **given)

    def rows(self, x: jax.Array) -> jax.Array:
        """Return activations sharded by batch only, which they already are."""
        return x

    def take(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return rows of an embedding."""
        return weight[tokens]

    def mean(self, loss: jax.Array) -> jax.Array:
        """Return the mean over all devices."""
        return jax.lax.pmean(loss, batch_axes(self.mesh))

    def key(self, key: jax.Array) -> jax.Array:
        """Return a random key that differs between devices with different data."""
        for axis in batch_axes(self.mesh):
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return key

    def scales(self, weights: dict[str, jax.Array], recipe: Recipe) -> dict[str, Any]:
        """Return the scales of all weights, from one all-reduce."""
        scales: dict[str, Any] = qshard.compute_scales(weights, recipe, axis_name="fsdp")
        return scales


@dataclass(frozen=True)
class Whole:
    """Auto and explicit modes: arrays are global, and XLA shards them."""

    mesh: Mesh

    def over_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `function` itself: XLA runs it on all devices."""
        return function

    def constrain(self, x: jax.Array, spec: P) -> jax.Array:
        """Constrain the sharding of `x` to `spec`."""
        if self.mesh.explicit_axes:
            return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def gather(self, name: str, shard: jax.Array) -> jax.Array:
        """Gather a weight over "fsdp". Both sides are constrained, or XLA would move the gather elsewhere."""
        bits = jax.lax.bitcast_convert_type(shard.astype(jnp.bfloat16), jnp.uint16)
        bits = self.constrain(self.constrain(bits, spec_of(self.mesh, name)), self._gathered(name))
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)

    def scatter(self, name: str, gradient: jax.Array) -> jax.Array:
        """Return a gradient in float32, sharded like its weight."""
        return self.constrain(gradient.astype(jnp.float32), spec_of(self.mesh, name))

    def weight_gradient(self, name: str, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Return `dy.T @ x`."""
        typed = {"out_sharding": NamedSharding(self.mesh, self._gathered(name))} if self.mesh.explicit_axes else {}
        return jnp.einsum("btn,btk->nk", dy, x, **typed)

    def linear(self, x: jax.Array, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> jax.Array:
        """Return `x @ w.T` in the recipe's formats."""
        return qshard.linear(
            x, shard, recipe, out_sharding=self.result_of(name), **self._sharding_options(name), **given
        )

    def gathered_weight(self, shard: jax.Array, name: str, recipe: Recipe, given: dict[str, Any]) -> Any:
        """Return the gathered weight that `linear` multiplies with."""
        return qshard.gathered_weight(shard, recipe, **self._sharding_options(name), **given)

    def rows(self, x: jax.Array) -> jax.Array:
        """Return activations sharded by batch only."""
        return self.constrain(x, P(batch_axes(self.mesh), None, None))

    def take(self, weight: jax.Array, tokens: jax.Array) -> jax.Array:
        """Return rows of an embedding."""
        if self.mesh.explicit_axes:
            rows: jax.Array = weight.at[tokens].get(out_sharding=P(batch_axes(self.mesh), None, None))
            return rows
        return self.rows(weight[tokens])

    def mean(self, loss: jax.Array) -> jax.Array:
        """Return the loss, which is already the mean over all devices."""
        return loss

    def key(self, key: jax.Array) -> jax.Array:
        """Return the key itself: random numbers belong to global arrays."""
        return key

    def scales(self, weights: dict[str, jax.Array], recipe: Recipe) -> dict[str, Any]:
        """Return the scales of all weights. XLA combines their all-reduces where it can."""
        return {
            name: qshard.compute_scales(weight, recipe, spec=spec_of(self.mesh, name))
            for name, weight in weights.items()
        }

    def result_of(self, name: str) -> P | None:
        """Return the sharding of a layer's result if its type leaves it open, because two devices have partial sums."""
        return P(batch_axes(self.mesh), None, None) if self.mesh.explicit_axes and name.endswith(ROWS) else None

    def _gathered(self, name: str) -> P:
        rows, *columns = spec_of(self.mesh, name)
        return P("tp" if "tp" in rows else None, *columns)

    def _sharding_options(self, name: str) -> dict[str, Any]:
        return {"weight_spec": spec_of(self.mesh, name), "gather_axis": "fsdp"}


Layout = Device | Whole


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(layout: Layout, name: str, shard: jax.Array) -> jax.Array:
    """Return the whole weight in bfloat16. Its gradient is summed over devices and sharded again, in float32."""
    return layout.gather(name, shard)


gather.defvjp(
    lambda layout, name, shard: (gather(layout, name, shard), None),
    lambda layout, name, _, gradient: (layout.scatter(name, gradient),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bf16_linear(layout: Layout, name: str, x: jax.Array, shard: jax.Array) -> jax.Array:
    """Return `x @ w.T` for a shard of `w`. The backward pass gathers `w` again, to keep the memory savings of FSDP."""
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
