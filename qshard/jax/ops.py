"""The ops of `ffi/ops.def` as functions of JAX arrays, such as `cast_tensor(x, scale, element="float8_e4m3fn")`.

An op works eagerly, under `jit` on Auto and Explicit meshes, in `shard_map`, under `vmap`, remat and export. The op's
row in `ffi/ops.def` defines its operands, results, dtypes, shapes and attributes (`qshard.op_table`).

>>> import jax.numpy as jnp
>>> from qshard.jax import ops
>>> ops.cast_tensor(jnp.array([0.3, 1000.0]), jnp.float32(2), element="float8_e4m3fn")
Array([0.625, 448], dtype=float8_e4m3fn)
"""

from qshard.jax._ops import bind as _bind
from qshard.jax._ops.bind import Op, disabled_checks, register_handlers

__all__ = ["Op", "disabled_checks", "register_handlers"]


def __getattr__(name: str) -> Op:
    op: Op = getattr(_bind, name)
    return op
