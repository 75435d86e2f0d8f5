"""What each op of `ffi/ops.def` gives, by `qshard.reference`: `oracle(call)` for a call of `support/draws.py`.

Functions have the names of the ops and take their operands and options.
"""

from __future__ import annotations

import numpy as np

from support import oracle_layers, oracle_lists, oracle_tensors
from support.draws import Call

FUNCTIONS = {**vars(oracle_tensors), **vars(oracle_layers), **vars(oracle_lists)}


def oracle(call: Call) -> list[np.ndarray]:
    """The results in order, those of lists one after the other. Operands stay as they are."""
    with np.errstate(all="ignore"):
        # What a call says of its operands changes nothing.
        options = {name: value for name, value in call.options.items() if name not in ("shared", "turned")}
        made = FUNCTIONS[call.spec.name](*call.operands, **options)
    return list(made) if isinstance(made, tuple | list) else [made]
