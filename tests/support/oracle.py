"""Expected results of the ops of `ffi/ops.def`, by `qshard.reference`: `oracle(call)` for a call of `support/draws.py`.

The functions have the names, operands and options of the ops.
"""

from __future__ import annotations

import numpy as np

from support import oracle_layers, oracle_lists, oracle_products, oracle_tensors
from support.draws import Call

FUNCTIONS = {**vars(oracle_tensors), **vars(oracle_products), **vars(oracle_layers), **vars(oracle_lists)}


def oracle(call: Call) -> list[np.ndarray]:
    """Return the results in order, with lists flattened. Operands are not modified."""
    with np.errstate(all="ignore"):
        # Attributes that only describe the operands do not change results.
        options = {name: value for name, value in call.options.items() if name not in ("shared", "transposed")}
        made = FUNCTIONS[call.spec.name](*call.operands, **options)
    return list(made) if isinstance(made, tuple | list) else [made]
