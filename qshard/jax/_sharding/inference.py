"""Shardings of weights, inferred from arrays and checked against the mesh axes that a caller names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax._ops.mesh import AxisName, Spec, explicit_sharding, names_of, spec_of
from qshard.jax._ops.validation import as_names


@dataclass(frozen=True)
class MeshAxisRoles:
    """The role of each mesh axis that shards weights: gathered by FSDP, or kept, as in tensor parallelism.

    A mesh axis without a role raises, instead of silently adding collectives.
    """

    op: str
    gather_axis: Any
    kept_axes: tuple[str, ...]

    @classmethod
    def of(cls, op: str, gather_axis: AxisName, kept_axes: AxisName) -> MeshAxisRoles:
        """Check the mesh axes that a caller passed, and assign their roles."""
        as_names(op, "gather_axis", gather_axis)
        given = gather_axis if gather_axis is None or isinstance(gather_axis, str) else tuple(gather_axis)
        return cls(op, given, as_names(op, "kept_axes", kept_axes))

    @property
    def gathered(self) -> tuple[str, ...]:
        """The mesh axes of `gather_axis` as a tuple."""
        return names_of(self.gather_axis)

    def options(self, name: str, sharding: Any, ndim: int) -> dict[str, Any]:
        """Return the options of `linear` for the weight `name`.

        These are `weight_spec`, and `gather_axis` if it shards the weight. Empty if nothing shards the weight, or its
        sharding is not a NamedSharding. Raises ValueError if a mesh axis that shards the weight has no role.
        """
        if not isinstance(sharding, NamedSharding):
            return {}
        entries = [*sharding.spec, *[None] * ndim][:ndim]
        axes = [axis for entry in entries for axis in names_of(entry)]
        for axis in axes:
            if axis not in (*self.gathered, *self.kept_axes):
                raise ValueError(
                    f"{self.op}: {name} is sharded over {axis!r} ({sharding.spec}), which is neither gather_axis "
                    f"({self.gather_axis!r}) nor in kept_axes {self.kept_axes}; add it to one of them"
                )
        if not axes:
            return {}
        options: dict[str, Any] = {"weight_spec": NamedSharding(sharding.mesh, PartitionSpec(*entries))}
        if any(axis in self.gathered for axis in axes):
            options["gather_axis"] = self.gather_axis
        return options

    def check_used(self, weights: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ValueError if `gather_axis` shards none of the weights."""
        if self.gathered and not any("gather_axis" in options for options in weights.values()):
            shardings = {str(options["weight_spec"].spec) if options else "not sharded" for options in weights.values()}
            raise ValueError(
                f"{self.op}: gather_axis ({self.gather_axis!r}) shards none of the {len(weights)} weights "
                f"({', '.join(sorted(shardings)[:3])}); shard them first, or pass the axis that shards them"
            )


def sharding_of(x: Any) -> NamedSharding | None:
    """Return the sharding of an array, if a concrete array or a type on an Explicit mesh gives it; else None."""
    if isinstance(x, jax.core.Tracer):
        return explicit_sharding(x)
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def local_shape(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """Return the local shape of an array with this sharding in the enclosing `shard_map`; elsewhere, `shape`."""
    mesh = jax.sharding.get_abstract_mesh()
    entries = [*spec_of(spec, None), *[None] * len(shape)]
    sizes = list(shape)
    for i, entry in enumerate(entries[: len(shape)]):
        for axis in names_of(entry):
            if axis in mesh.manual_axes:
                sizes[i] //= mesh.shape[axis]
    return tuple(sizes)
