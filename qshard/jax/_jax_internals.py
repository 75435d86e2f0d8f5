"""Undocumented interfaces of JAX and flax. No other module of the front end uses one.

Each was checked with JAX 0.10.2 and 0.12.0.1, and flax 0.12.8 and 0.12.12. `tests/null/test_jax_internals.py` finds
uses elsewhere.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Hashable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from jax.extend.mlir import ir


def platforms_of(ctx: Any) -> Sequence[str]:
    """Return the platforms that a program is lowered for: `ctx.module_context` of `jax.interpreters.mlir`.

    If JAX removes it: return none. The missing target then raises when the program is compiled.
    """
    platforms: Sequence[str] = ctx.module_context.platforms
    return platforms


def device_count(ctx: Any) -> int:
    """Return the number of devices that a program is lowered for.

    If JAX removes it: return the number of devices in the mesh of the operands.
    """
    return getattr(ctx.module_context.axis_context, "num_devices", 1) or 1


def is_for_export(ctx: Any) -> bool:
    """True if `jax.export` lowers the program.

    If JAX removes it: return False, and refuse exports of programs with custom partitioning for several devices.
    """
    return bool(ctx.module_context.lowering_parameters.for_export)


def lower_once(ctx: Any, key: Hashable, values: Sequence[Any]) -> Sequence[Any]:
    """Return the values that were lowered first under `key` in the module, from JAX's cache of lowered primitives.

    If JAX removes it: every call returns its own values, so each `linear` quantizes the same x again, to the same bits.
    """
    cache = getattr(ctx.module_context, "cached_primitive_lowerings", None)
    first: Sequence[Any] = values if cache is None else cache.setdefault(key, values)
    return first


def partitioning_attributes(batch_dims: int, rule: str) -> dict[str, ir.Attribute]:
    """Return the attributes of a custom call that XLA partitions along its leading axes, with a Shardy rule.

    XLA reads the frontend attribute `num_batch_dims`; it also partitions JAX's own calls of LAPACK by it. Shardy reads
    `sdy.sharding_rule`. If they are removed: use `custom_partitioning`, which costs a Python callback for each op.
    """
    return {
        "mhlo.frontend_attributes": ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get(str(batch_dims))}),
        "sdy.sharding_rule": ir.Attribute.parse(rule),
    }


def wrapped_value(tracer: Any) -> Any:
    """Return the value that the tracer of a transformation wraps, or None if it shows none, like tracers of `jit`.

    If JAX removes it: return None. Eager gradients are then traced like programs, which is slower.
    """
    return getattr(tracer, "primal", getattr(tracer, "val", None))


def is_nnx_pytree(kind: Any) -> bool:
    """True if a class of nnx modules is a pytree. If flax removes it: return True, the default of flax."""
    is_pytree: bool = kind._pytree__is_pytree
    return is_pytree


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call `run` with a module as soon as the module is imported: now, if it is already.

    `flax.serialization` has a registry of types, which exists only once flax is imported. Importing flax here would add
    more than a second to each `import qshard.jax`.
    """
    if name in sys.modules:
        run(sys.modules[name])
    else:
        sys.meta_path.insert(0, _ImportHook(name, run))


class _ImportHook(MetaPathFinder):
    """An import finder that finds one module as Python does, and calls a function once the module has run."""

    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self._name, self._run = name, run

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._run(module)

            loader.exec_module = exec_module
        return spec


def vmapped_mesh_axes() -> tuple[str, ...]:
    """Return the Explicit mesh axes over which an enclosing `jax.vmap` maps.

    If JAX removes it: return none. `shard_map` there then raises an error of JAX.
    """
    from jax._src import core

    return tuple(sorted(core.get_axis_env().explicit_mesh_axis_names))
