"""Multi-tensor ops: one custom call on lists of arrays, for all weights of a model.

An op changes those operands in place that `ffi/ops.def` also names as results. XLA copies such an operand if it is
needed elsewhere, and otherwise reuses its memory, as for a donated argument.

The ops run on local arrays: eagerly, under `jit` on one device, and inside `shard_map`, where results vary over every
mesh axis that an operand varies over. XLA cannot partition them; under `jit` alone it would gather sharded operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qshard._core.validation import quote
from qshard.jax._ops.bind import encode_attribute, target_of
from qshard.jax._ops.mesh import vary_alike
from qshard.jax._ops.validation import check_array, check_sizes
from qshard.op_table import multi_table

__all__ = ["bind"]


@functools.cache
def bind(name: str) -> Callable[..., Any]:
    """Return the function of the multi-tensor op `name`, a key of `qshard.op_table.multi_table()`.

    It takes the operands, arrays or lists of arrays, and the attributes by keyword. It returns the changed operands: an
    array or a list for each result, as a tuple if there are several.
    """
    spec = multi_table()[name]

    def run(*operands: Any, **attributes: Any) -> Any:
        for o, operand in zip(spec.inputs, operands, strict=True):
            if o.many and not isinstance(operand, list | tuple):
                raise TypeError(f"{name}: {o.name} ({quote(operand)}) is not a list of arrays; pass one")
            for i, x in enumerate(operand if o.many else [operand]):
                check_array(name, f"{o.name}[{i}]" if o.many else o.name, x)
        lists = [
            [jnp.asarray(x) for x in operand] if o.many else [jnp.asarray(operand)]
            for o, operand in zip(spec.inputs, operands, strict=True)
        ]
        for o, arrays in zip(spec.inputs, lists, strict=True):
            for x in arrays:
                check_sizes(name, o.name, x.shape)
        flat = vary_alike(*(x for arrays in lists for x in arrays))
        spec.results([x.shape for x in flat], [str(x.dtype) for x in flat], attributes)  # Raises the errors of the op.
        begins = np.cumsum([0, *map(len, lists)])
        written = [next(i for i, o in enumerate(spec.inputs) if o.name == out.name) for out in spec.outputs]
        positions = [p for i in written for p in range(begins[i], begins[i + 1])]
        call = jax.ffi.ffi_call(
            target_of(name),
            [jax.typeof(flat[p]).update(weak_type=False) for p in positions],
            input_output_aliases={p: r for r, p in enumerate(positions)},
        )
        results = iter(call(*flat, **{key: _attribute(value) for key, value in attributes.items()}))
        changed = [[next(results) for _ in lists[i]] for i in written]
        made = [arrays if out.many else arrays[0] for out, arrays in zip(spec.outputs, changed, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    run.__name__ = name
    return run


def _attribute(value: Any) -> Any:
    return np.asarray(value, np.int64) if isinstance(value, tuple | list) else encode_attribute(value)
