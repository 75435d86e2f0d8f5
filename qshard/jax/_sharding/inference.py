"""How weights lie over a mesh, read off real arrays, and held against what a caller says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.jax._ops.mesh import Spec, explicit_sharding, names_of, spec_of
from qshard.jax._ops.validation import as_names

Axes = str | Sequence[str] | None


@dataclass(frozen=True)
class MeshAxisRoles:
    """The role of each mesh axis that shards weights. One without a role raises, instead of adding collectives.

    Attributes:
      op: who asks, for errors.
      gather_axis: what FSDP has cut weights along: their codes are gathered.
      kept_axes: along which weights stay cut, as of tensor parallelism.
    """

    op: str
    gather_axis: Any
    kept_axes: tuple[str, ...]

    @classmethod
    def of(cls, op: str, gather_axis: Axes, kept_axes: Axes) -> MeshAxisRoles:
        as_names(op, "gather_axis", gather_axis)
        given = gather_axis if gather_axis is None or isinstance(gather_axis, str) else tuple(gather_axis)
        return cls(op, given, as_names(op, "kept_axes", kept_axes))

    @property
    def gathered(self) -> tuple[str, ...]:
        return names_of(self.gather_axis)

    def options(self, name: str, sharding: Any, ndim: int) -> dict[str, Any]:
        """`weight_spec`, with an entry for each axis, and `gather_axis`, if that cuts it, for a weight that lies so."""
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
        """Raises ValueError where no weight at all is cut along `gather_axis`."""
        if self.gathered and not any("gather_axis" in options for options in weights.values()):
            cuts = {str(options["weight_spec"].spec) if options else "not sharded" for options in weights.values()}
            raise ValueError(
                f"{self.op}: gather_axis ({self.gather_axis!r}) shards none of the {len(weights)} weights "
                f"({', '.join(sorted(cuts)[:3])}); shard them first, or pass the axis that shards them"
            )


def sharding_of(x: Any) -> NamedSharding | None:
    """How an array lies, as far as it tells: one in hand does, its type on Explicit meshes does; else None."""
    if isinstance(x, jax.core.Tracer):
        return explicit_sharding(x)
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def local_shape(shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """Of an array so cut, as the code around sees it: in `shard_map`, of the shard."""
    mesh = jax.sharding.get_abstract_mesh()
    entries = [*spec_of(spec, None), *[None] * len(shape)]
    sizes = list(shape)
    for i, entry in enumerate(entries[: len(shape)]):
        for axis in names_of(entry):
            if axis in mesh.manual_axes:
                sizes[i] //= mesh.shape[axis]
    return tuple(sizes)
