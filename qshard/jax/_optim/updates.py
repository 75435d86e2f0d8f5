"""Updates of primary weights: the new codes, which `optax.apply_updates` puts in place of the old ones.

The optimizer updates masters and casts them. An optax transform after it would change the codes alone, so that codes
and masters would differ. To prevent that, each array of codes comes with a *seal*, a key of `jax.random`. Keys pass
through `jit`, `cond`, `where` and `device_put`. JAX refuses arithmetic on keys while it traces, and its error shows the
name of their dtype, which says what to do. `jnp.zeros_like` does accept keys (`optax.set_to_zero`): a seal that is 0
raises, or under `jit` makes the weight NaN.
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
    """The update of one array of a primary weight: `old + update` is the new array, for any `old`.

    Attributes:
      seal: a key, on which JAX has no arithmetic. It has as many axes as the codes, so masks by `ndim` select both.
      codes: the new array. None: the old array stays, which a guard does.
    """

    seal: jax.Array
    codes: jax.Array | None
    _REMEDY = f"supported on new codes; {_REMEDY}"

    @classmethod
    def of(cls, weight: PrimaryWeight) -> PrimaryWeight:
        """Return updates that set any primary weight to this one."""

        def update(codes: jax.Array | None, ndim: int) -> CodesUpdate:
            seal = jnp.asarray(_SEAL.reshape((1,) * (ndim + 1)))
            made = cls(jax.random.wrap_key_data(seal, impl=_SEALS), codes)
            # A tree function creates new objects without this mark. Only for those is the seal read.
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
        return codes if getattr(self, "_untouched", False) else self._check_seal(codes)

    __radd__ = __add__

    def _check_seal(self, codes: jax.Array) -> jax.Array:
        """Return `codes` if the seal is intact. Else raise, or under `jit` return all bits set: scales that are NaN."""
        sealed = jnp.all(jax.random.key_data(self.seal) == _SEAL[0])
        if not isinstance(sealed, jax.core.Tracer) and not sealed:
            raise ValueError(f"apply_updates: a transform changed the update of a PrimaryWeight; {_REMEDY}")
        if self.codes is None:
            return codes
        # All bits set mean NaN in every scale dtype.
        return jnp.where(sealed, codes, np.array(np.iinfo(codes.dtype).max, codes.dtype))
