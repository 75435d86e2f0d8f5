"""Updates of primary weights: the new codes, which `optax.apply_updates` puts in the place of the old ones.

The optimizer changes masters and casts them. A transform of optax after it would change codes alone, and codes would
differ from masters. So each array of codes has a *seal* beside it, a key of `jax.random`. Keys pass `jit`, `cond`,
`where` and `device_put`. JAX refuses arithmetic on keys while it traces, and its error names their dtype, which says
what to do. `jnp.zeros_like` does accept keys (`optax.set_to_zero`): a seal that is 0 raises, or under `jit` makes the
weight NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as jax_random

from qshard._core.validation import quote
from qshard.jax._quantized.operators import NoArithmetic
from qshard.jax._quantized.primary import PrimaryWeight

_REMEDY = "pass other transforms to qshard.jax.optimizer as inner"
_SEAL = np.array([0x51534844], np.uint32)


def _no_numbers(*_: Any) -> NoReturn:
    raise TypeError(f"CodesUpdate: a transform used it as a random key; {_REMEDY}")


_SEALS = jax_random.define_prng_impl(
    key_shape=_SEAL.shape,
    seed=_no_numbers,
    split=_no_numbers,
    random_bits=_no_numbers,
    fold_in=_no_numbers,
    name="qshard.CodesUpdate",
    tag=f"new codes of a PrimaryWeight: {_REMEDY}",
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["seal", "codes"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class CodesUpdate(NoArithmetic):
    """The update of one array of a primary weight: `old + update` is the new codes, whatever `old` has been.

    Attributes:
      seal: a key, for which JAX has no arithmetic. It has as many axes as the codes, so masks by `ndim` choose both.
      codes: the new array; None: the old one stays, as a guard does.
    """

    seal: jax.Array
    codes: jax.Array | None
    _REMEDY = f"supported on new codes; {_REMEDY}"

    @classmethod
    def of(cls, weight: PrimaryWeight) -> PrimaryWeight:
        """Updates of any primary weight to this one."""

        def update(codes: jax.Array | None, ndim: int) -> CodesUpdate:
            seal = jnp.asarray(_SEAL.reshape((1,) * (ndim + 1)))
            made = cls(jax.random.wrap_key_data(seal, impl=_SEALS), codes)
            # A function of trees makes other objects: only for these is the seal read.
            object.__setattr__(made, "_untouched", True)
            return made

        arrays = dataclasses.replace(weight, guard=None)
        updates: PrimaryWeight = jax.tree.map(lambda codes: update(codes, codes.ndim), arrays)
        guard: Any = None if weight.guard is None else update(None, weight.guard.ndim)
        return dataclasses.replace(updates, guard=guard)

    def __add__(self, old: Any) -> jax.Array:
        if not isinstance(old, jax.Array | np.ndarray):
            self._refuse("+")
        codes = jnp.asarray(old) if self.codes is None else self.codes
        if (old.dtype, old.shape) != (codes.dtype, codes.shape):
            raise ValueError(
                f"apply_updates: the update of a PrimaryWeight ({quote(codes)}) does not fit params ({quote(old)}): "
                f"params are not those of the update, or a transform changed it; {_REMEDY}"
            )
        return codes if getattr(self, "_untouched", False) else self._sealed(codes)

    __radd__ = __add__

    def _sealed(self, codes: jax.Array) -> jax.Array:
        sealed = jnp.all(jax.random.key_data(self.seal) == _SEAL[0])
        if not isinstance(sealed, jax.core.Tracer) and not sealed:
            raise ValueError(f"apply_updates: a transform changed the update of a PrimaryWeight; {_REMEDY}")
        if self.codes is None:
            return codes
        # All bits set are NaN in each dtype of scales.
        return jnp.where(sealed, codes, np.array(np.iinfo(codes.dtype).max, codes.dtype))
