"""`DotGeneral` and `einsum`: quantized products of activations with a weight of any shape, as flax calls them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.validation import closest, quote
from qshard.formats import Usage
from qshard.jax._delayed_scaling import LinearState
from qshard.jax._nn.dimension_numbers import MatrixAxes, Terms, entries_of, respec
from qshard.jax._nn.linear import linear
from qshard.jax._ops.mesh import Spec, mesh_of
from qshard.jax._ops.validation import Seed, as_names, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._quantized.quantize import WeightScales
from qshard.layout import source, whole_units
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe

Otherwise = Literal["raise", "plain"]
DEFAULT_PRECISIONS = ("default", lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
_PER_CALL = ("seed", "state", "weight_scales")
_OPTIONS = [
    name
    for name, parameter in inspect.signature(linear).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in (*_PER_CALL, "weight_layout", "out_sharding")
]


class DotGeneral:
    """`jax.lax.dot_general` of activations and a weight, in the formats of a recipe; differentiable, as `linear` is.

    What flax takes as `dot_general=`, and with `functools.partial(DotGeneral, recipe)` as `dot_general_cls=`. It has no
    state and draws nothing: for recipes that need a state or a seed there are modules, `qshard.jax.nnx.DotGeneral` and
    `qshard.jax.linen.DotGeneral`.

    The second operand is the weight, as in `dot_general(inputs, kernel, ...)` of flax. Its contracted axes are K, its
    others N. Where they are the first or the last ones, as in `[K, N]`, `[N, K]`, `[D, H, Dh]` and `[H, Dh, D]`, the
    weight is quantized as it lies, and the result is that of `linear` to the bit. Others, as `[H, D, Dh]` with D
    contracted, are transposed before.

    Args:
      recipe: the format of each role, or the name of a recipe, such as "MXFP8".
      otherwise: what to do with a product that no recipe can make: of batch axes, as the scores of attention are, or
        where K or N is no whole number of blocks. "raise" an error, or make a "plain" product, in the dtypes of the
        operands.
      options: of `linear`, such as `gather_axis`. `weight_spec` names the axes of the weight as it lies, and may cut
        any of them. Where several axes become K or N, shards of all but the first must hold whole blocks: codes are
        then equal to those of one device. Stochastic rounding draws other random numbers there than one device does.

    Raises:
      TypeError, ValueError: an argument is not what it has to be.

    Two of one recipe and options are equal and hash alike, so that `jit` takes them for the same.

    >>> from qshard.recipes import CurrentScaling
    >>> dot_general = DotGeneral(CurrentScaling())
    >>> x, w = jnp.ones((2, 16)), jnp.ones((16, 4, 8))
    >>> dot_general(x, w, (((1,), (0,)), ((), ()))).shape
    (2, 4, 8)
    >>> DotGeneral("CurrentScaling") == dot_general
    True
    """

    def __init__(self, recipe: RecipeLike, *, otherwise: Otherwise = "raise", **options: Any) -> None:
        self.recipe: Recipe = as_recipe(recipe, "DotGeneral")
        if otherwise not in get_args(Otherwise):
            raise ValueError(f"DotGeneral: otherwise ({quote(otherwise)}) is not 'raise' or 'plain'; pass one of them")
        for name in options:
            if name in _PER_CALL:
                raise TypeError(f"DotGeneral: {name} changes with every call; pass it to the call")
            if name not in _OPTIONS:
                raise TypeError(
                    f"DotGeneral: {name} is not an option of linear; {closest(name, _OPTIONS, 'its options')}"
                )
        check_spec("DotGeneral", "weight_spec", options.get("weight_spec"))
        self.otherwise: Otherwise = otherwise
        self.options: dict[str, Any] = options

    def with_options(self, **options: Any) -> DotGeneral:
        """With other options."""
        return DotGeneral(self.recipe, otherwise=self.otherwise, **(self.options | options))

    @property
    def _key(self) -> Any:
        return self.recipe, self.otherwise, tuple(sorted(self.options.items()))

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, DotGeneral) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        given = {"otherwise": self.otherwise} if self.otherwise != "raise" else {}
        return (
            f"DotGeneral({', '.join([repr(self.recipe), *(f'{k}={v!r}' for k, v in (given | self.options).items())])})"
        )

    def __call__(
        self,
        x: jax.Array,
        w: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Spec = None,
        **per_call: Any,
    ) -> jax.Array:
        """The product of `x` and `w` over the axes that `dimension_numbers` contracts: `x`'s other axes, then `w`'s.

        Args:
          x, w: activations and a weight; float32, bfloat16 or float16.
          dimension_numbers: as of `jax.lax.dot_general`.
          precision: None or that of XLA's default: the recipe says how precise a product is.
          preferred_element_type: of the result; None: the dtype of `x`.
          out_sharding: of the result, on Explicit meshes.
          per_call: `seed`, `state` and `weight_scales` of `linear`.

        Raises:
          TypeError, ValueError: as `linear` does, and for what `otherwise` says.
        """
        asked = (precision, preferred_element_type, out_sharding)
        return self._product("dot_general", x, w, dimension_numbers, *asked, per_call)

    def einsum(
        self,
        subscripts: str,
        x: jax.Array,
        w: jax.Array,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Spec = None,
        **per_call: Any,
    ) -> jax.Array:
        """`einsum` in this recipe, with these options. flax's `nnx.Einsum` takes it as `einsum_op=`.

        >>> DotGeneral("CurrentScaling").einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 8))).shape
        (2, 3, 4, 8)
        """
        terms = Terms.of(subscripts, x, w)
        shared = [label for label in terms.w if label in terms.x]
        batch, contracted = ([each for each in shared if (each in terms.out) == left] for left in (True, False))
        made = (*batch, *(label for term in terms[:2] for label in term if label not in shared))
        if out_sharding is not None:
            entries = entries_of(out_sharding, len(made))
            out_sharding = respec(out_sharding, [entries[terms.out.index(label)] for label in made])
        pairs, batch_axes = (
            tuple(tuple(map(term.index, labels)) for term in terms[:2]) for labels in (contracted, batch)
        )
        asked = (precision, preferred_element_type, out_sharding)
        y = self._product("einsum", x, w, (pairs, batch_axes), *asked, per_call)
        return lax.transpose(y, tuple(made.index(label) for label in terms.out))

    def _product(
        self,
        op: str,
        x: jax.Array,
        w: jax.Array,
        dimension_numbers: Any,
        precision: Any,
        preferred: Any,
        out_sharding: Spec,
        per_call: dict[str, Any],
    ) -> jax.Array:
        for name, operand in (("x", x), ("w", w)):
            check_array(op, name, operand)
            check_dtype(op, name, operand)
        if precision is not None and precision not in DEFAULT_PRECISIONS:
            raise ValueError(
                f"{op}: precision ({quote(precision)}) does not apply to {type(self.recipe).__name__}; leave precision "
                "out, or leave this layer unquantized"
            )
        result = jnp.dtype(x.dtype if preferred is None else preferred)
        (x_axes, w_axes), batch = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
        fold = MatrixAxes.of(x.ndim, w.ndim, x_axes, w_axes)
        if (why := self._refusal(x, w, x_axes, batch, fold)) is not None:
            if self.otherwise == "raise":
                raise ValueError(f"{op}: {why}; compute it another way, or pass otherwise='plain'")
            dims: Any = ((x_axes, w_axes), batch)
            return lax.dot_general(
                x, w.astype(x.dtype), dims, precision, preferred_element_type=result, out_sharding=out_sharding
            )
        options = dict(self.options)
        spec, gathers = options.pop("weight_spec", None), as_names(op, "gather_axis", options.get("gather_axis"))
        check_spec_fits(op, "weight_spec", spec, mesh_of(w, spec), w.ndim)
        parts = fold.parts(op, x, w, spec, gathers, self.recipe)
        sizes = fold.sizes(x, w, parts)
        if out_sharding is not None:
            lead = len(fold.x) - 1
            groups = (*((axis,) for axis in range(lead)), tuple(range(lead, len(sizes))))
            out_sharding = respec(out_sharding, fold.spec(entries_of(out_sharding, len(sizes)), groups))
        if spec is not None:
            options["weight_spec"] = respec(spec, fold.spec(entries_of(spec, w.ndim), fold.w))
        # In the wider dtype, which holds x exactly, so that a product is rounded to no less than is asked for.
        x = x.astype(jnp.promote_types(x.dtype, result))
        y = linear(
            fold.folded(x, fold.x, parts.x),
            fold.folded(w, fold.w, parts.w),
            self.recipe,
            weight_layout=fold.layout,
            out_sharding=out_sharding,
            **options,
            **per_call,
        )
        return fold.unfolded(y, sizes, parts).astype(result)

    def _refusal(self, x: jax.Array, w: jax.Array, x_axes: Sequence[int], batch: Any, fold: MatrixAxes) -> str | None:
        """Why this is no product that a recipe can make, as far as `otherwise` decides what to do about it."""
        what = f"the product of x {x.shape} and w {w.shape}"
        if any(batch):
            return f"{what} has batch axes {batch}, so w is not one weight matrix"
        if not x_axes:
            return f"{what} has no contracted axis"
        if self.otherwise == "raise":
            return None  # linear says what is wrong with blocks.
        k, n = (math.prod(w.shape[axis] for axis in fold.w[fold.layout.index(each)]) for each in "KN")
        why = broken_blocks(self.recipe, k, n)
        return None if why is None else f"{what} has {why}"


def broken_blocks(recipe: Recipe, k: int, n: int) -> str | None:
    """Which blocks a weight of this K and N breaks, in any of the three products."""
    many = 128  # Rows can be made whole blocks.
    planes = [(Role.WEIGHT, (n, k), usage) for usage in Usage.BOTH.planes]
    planes += [(Role.ACTIVATION, (many, k), Usage.ROWWISE), (Role.GRADIENT, (many, n), Usage.ROWWISE)]
    for role, shape, usage in planes:
        fmt = recipe.format(role)
        if any(size % unit for size, unit in zip(shape, whole_units(fmt, source(fmt, usage)), strict=True)):
            return f"K = {k} and N = {n}, which are no whole number of blocks of {fmt}"
    return None


def einsum(
    subscripts: str,
    x: jax.Array,
    w: jax.Array,
    recipe: RecipeLike,
    *,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Spec = None,
    seed: Seed = None,
    state: LinearState | None = None,
    weight_scales: WeightScales | None = None,
    otherwise: Otherwise = "raise",
    **options: Any,
) -> jax.Array:
    """`jnp.einsum` of activations and a weight, in the formats of a recipe; differentiable, as `linear` is.

    Args:
      subscripts: of two operands and a result, such as "btd,dhk->bthk". What x and w share is contracted, and an
        ellipsis may stand for axes of x.
      x, w: activations and a weight; float32, bfloat16 or float16.
      recipe: the format of each role, or the name of a recipe, such as "MXFP8".
      precision, preferred_element_type, out_sharding: as `DotGeneral` takes them.
      seed, state, weight_scales: as `linear` takes them.
      otherwise, options: of `DotGeneral`.

    Returns:
      Of the dtype of `x`, unless `preferred_element_type` says else.

    Raises:
      TypeError, ValueError: as `DotGeneral` does; or an axis is repeated, or not in two of the three terms.

    >>> from qshard.recipes import CurrentScaling
    >>> einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 8)), CurrentScaling()).shape
    (2, 3, 4, 8)
    >>> einsum("...hk,hkd->...d", jnp.ones((2, 3, 4, 8)), jnp.ones((4, 8, 16)), "CurrentScaling").shape
    (2, 3, 16)
    """
    asked: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    given: dict[str, Any] = {"seed": seed, "state": state, "weight_scales": weight_scales}
    return DotGeneral(recipe, otherwise=otherwise, **options).einsum(subscripts, x, w, **asked, **given)
