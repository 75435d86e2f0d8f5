"""`DotGeneral` and `einsum`: quantized products of activations and a weight of any shape, as flax calls them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.operands import operand_planes
from qshard._core.validation import closest, quote
from qshard.jax._delayed_scaling import LinearState
from qshard.jax._nn.dimension_numbers import MatrixAxes, Terms, entries_of, replace_entries
from qshard.jax._nn.linear import linear
from qshard.jax._ops.mesh import Spec, mesh_of
from qshard.jax._ops.validation import Seed, as_names, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._quantized.weight_scales import WeightScales
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
    """A `jax.lax.dot_general` of activations and a weight in the formats of a recipe, differentiable as `linear` is.

    Flax takes it as `dot_general=`, or `functools.partial(DotGeneral, recipe)` as `dot_general_cls=`. It has no state
    and draws no random numbers. Recipes that need them have the modules `qshard.jax.nnx.DotGeneral` and
    `qshard.jax.linen.DotGeneral`.

    The second operand is the weight, as in `dot_general(inputs, kernel, ...)` of flax. Its contracted axes are K, the
    others N. If they are the first or the last axes, as in `[K, N]`, `[N, K]`, `[D, H, Dh]` and `[H, Dh, D]`, the
    weight is not transposed, and the result equals `linear` bit for bit. Other weights, such as `[H, D, Dh]` with D
    contracted, are transposed first.

    Args:
      recipe: the recipe, or its name, such as "MXFP8".
      otherwise: what to do with a product that cannot be quantized: one with batch axes, as in attention scores, or K
        or N that is not whole blocks. "raise" raises; "plain" multiplies in the dtype of `x`.
      options: options of `linear`, such as `gather_axis`. `weight_spec` names the axes of the weight before folding,
        and may shard any of them. If several axes fold into K or N, shards of all but the first must be whole blocks;
        then codes are as on one device. Stochastic rounding draws other random numbers there than one device would.

    Raises:
      TypeError: an option is not one of `linear`, or has the wrong type.
      ValueError: `otherwise` is not "raise" or "plain", or no recipe has this name.

    Objects with equal recipe and options are equal and have equal hashes, so `jit` traces once for them.

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
        # Lists of mesh axes have no hash.
        self.options: dict[str, Any] = {
            name: tuple(given) if isinstance(given, list) else given for name, given in options.items()
        }

    def with_options(self, **options: Any) -> DotGeneral:
        """Copy this object with some options replaced.

        Args:
          options: options of `linear`.

        Returns:
          A new `DotGeneral`.

        Raises:
          TypeError: as for `DotGeneral`.

        >>> DotGeneral("CurrentScaling").with_options(grad_dtype="float32").options
        {'grad_dtype': 'float32'}
        """
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
        """Multiply `x` by `w`, contracting the axes in `dimension_numbers`.

        Args:
          x: activations; float32, bfloat16 or float16.
          w: the weight; float32, bfloat16 or float16.
          dimension_numbers: as for `jax.lax.dot_general`.
          precision: None or the default precision of XLA: the recipe sets the precision.
          preferred_element_type: the dtype of the result; None: the dtype of `x`.
          out_sharding: the sharding of the result, on Explicit meshes.
          per_call: `seed`, `state` and `weight_scales` of `linear`.

        Returns:
          The product: the free axes of `x`, then the free axes of `w`.

        Raises:
          TypeError, ValueError: as for `linear`; or the product cannot be quantized and `otherwise` is "raise".
        """
        result_options = (precision, preferred_element_type, out_sharding)
        return self._product("dot_general", x, w, dimension_numbers, *result_options, per_call)

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
        """Compute `qshard.jax.einsum` with this recipe and these options. `nnx.Einsum` takes it as `einsum_op=`.

        Args:
          subscripts: two operands and a result, such as "btd,dhk->bthk".
          x: activations; float32, bfloat16 or float16.
          w: the weight; float32, bfloat16 or float16.
          precision: None or the default precision of XLA.
          preferred_element_type: the dtype of the result; None: the dtype of `x`.
          out_sharding: the sharding of the result, on Explicit meshes.
          per_call: `seed`, `state` and `weight_scales` of `linear`.

        Returns:
          The product, with the axes of the result term.

        Raises:
          TypeError, ValueError: as for `einsum`.

        >>> DotGeneral("CurrentScaling").einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 8))).shape
        (2, 3, 4, 8)
        """
        _check_operands("einsum", x, w)
        terms = Terms.of(subscripts, x, w)
        shared = [label for label in terms.w if label in terms.x]
        batch, contracted = ([each for each in shared if (each in terms.out) == left] for left in (True, False))
        made = (*batch, *(label for term in terms[:2] for label in term if label not in shared))
        if out_sharding is not None:
            entries = entries_of(out_sharding, len(made))
            out_sharding = replace_entries(out_sharding, [entries[terms.out.index(label)] for label in made])
        pairs, batch_axes = (
            tuple(tuple(map(term.index, labels)) for term in terms[:2]) for labels in (contracted, batch)
        )
        result_options = (precision, preferred_element_type, out_sharding)
        y = self._product("einsum", x, w, (pairs, batch_axes), *result_options, per_call)
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
        _check_operands(op, x, w)
        if precision is not None and precision not in DEFAULT_PRECISIONS:
            raise ValueError(
                f"{op}: precision ({quote(precision)}) does not apply to {type(self.recipe).__name__}; leave precision "
                "out, or leave this layer unquantized"
            )
        result = jnp.dtype(x.dtype if preferred is None else preferred)
        (x_axes, w_axes), batch = (tuple(tuple(map(int, axes)) for axes in pair) for pair in dimension_numbers)
        matrix = MatrixAxes.of(x.ndim, w.ndim, x_axes, w_axes)
        if (why := self._refusal(x, w, x_axes, batch, matrix)) is not None:
            if self.otherwise == "raise":
                raise ValueError(f"{op}: {why}; compute it another way, or pass otherwise='plain'")
            dims: Any = ((x_axes, w_axes), batch)
            return lax.dot_general(
                x, w.astype(x.dtype), dims, precision, preferred_element_type=result, out_sharding=out_sharding
            )
        options = dict(self.options)
        spec, gathers = options.pop("weight_spec", None), as_names(op, "gather_axis", options.get("gather_axis"))
        check_spec_fits(op, "weight_spec", spec, mesh_of(w, spec), w.ndim)
        parts = matrix.parts(op, x, w, spec, gathers, self.recipe)
        sizes = matrix.sizes(x, w, parts)
        if out_sharding is not None:
            lead = len(matrix.x) - 1
            groups = (*((axis,) for axis in range(lead)), tuple(range(lead, len(sizes))))
            out_sharding = replace_entries(out_sharding, matrix.spec(entries_of(out_sharding, len(sizes)), groups))
        if spec is not None:
            options["weight_spec"] = replace_entries(spec, matrix.spec(entries_of(spec, w.ndim), matrix.w))
        # The wider dtype holds x exactly, and the product is not rounded to less than the requested dtype.
        x = x.astype(jnp.promote_types(x.dtype, result))
        y = linear(
            matrix.fold(x, matrix.x, parts.x),
            matrix.fold(w, matrix.w, parts.w),
            self.recipe,
            weight_layout=matrix.layout,
            out_sharding=out_sharding,
            **options,
            **per_call,
        )
        return matrix.unfold(y, sizes, parts).astype(result)

    def _refusal(self, x: jax.Array, w: jax.Array, x_axes: Sequence[int], batch: Any, matrix: MatrixAxes) -> str | None:
        """The reason why a product cannot be quantized; None if it can, or if `linear` will raise the error."""
        what = f"the product of x {x.shape} and w {w.shape}"
        if any(batch):
            return f"{what} has batch axes {batch}, so w is not one weight matrix"
        if not x_axes:
            return f"{what} has no contracted axis"
        if self.otherwise == "raise":
            return None  # linear raises for broken blocks.
        k, n = (math.prod(w.shape[axis] for axis in matrix.w[matrix.layout.index(each)]) for each in "KN")
        why = broken_blocks(self.recipe, k, n)
        return None if why is None else f"{what} has {why}"


def _check_operands(op: str, x: Any, w: Any) -> None:
    for name, operand in (("x", x), ("w", w)):
        check_array(op, name, operand)
        check_dtype(op, name, operand)


def broken_blocks(recipe: Recipe, k: int, n: int) -> str | None:
    """Describe the blocks that a weight of this K and N breaks in any of the three products; None if all are whole."""
    # Rows are padded, so only K and N can break blocks.
    shapes = {Role.WEIGHT: (n, k), Role.ACTIVATION: (0, k), Role.GRADIENT: (0, n)}
    for role, fmt, usage in operand_planes(recipe):
        if any(size % unit for size, unit in zip(shapes[role], whole_units(fmt, source(fmt, usage)), strict=True)):
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
    """Compute `jnp.einsum` of activations and a weight in the formats of a recipe. Differentiable, as `linear` is.

    Args:
      subscripts: two operands and a result, such as "btd,dhk->bthk". Labels that only x and w have are contracted. An
        ellipsis may stand for axes of x.
      x: activations; float32, bfloat16 or float16.
      w: the weight; float32, bfloat16 or float16.
      recipe: the recipe, or its name, such as "MXFP8".
      precision: None or the default precision of XLA: the recipe sets the precision.
      preferred_element_type: the dtype of the result; None: the dtype of `x`.
      out_sharding: the sharding of the result, on Explicit meshes.
      seed: the seed of stochastic rounding, as for `linear`.
      state: the state of delayed scaling, as for `linear`.
      weight_scales: the scales of `w`, as for `linear`.
      otherwise: what to do with a product that cannot be quantized, "raise" or "plain", as for `DotGeneral`.
      options: options of `DotGeneral`.

    Returns:
      The product, with the axes of the result term.

    Raises:
      TypeError, ValueError: as for `DotGeneral`; or an axis is repeated, or is not in two of the three terms.

    Shardings are as for `DotGeneral` and `linear`.

    >>> from qshard.recipes import CurrentScaling
    >>> einsum("btd,dhk->bthk", jnp.ones((2, 3, 16)), jnp.ones((16, 4, 8)), CurrentScaling()).shape
    (2, 3, 4, 8)
    >>> einsum("...hk,hkd->...d", jnp.ones((2, 3, 4, 8)), jnp.ones((4, 8, 16)), "CurrentScaling").shape
    (2, 3, 16)
    """
    result_options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
        "out_sharding": out_sharding,
    }
    given: dict[str, Any] = {"seed": seed, "state": state, "weight_scales": weight_scales}
    return DotGeneral(recipe, otherwise=otherwise, **options).einsum(subscripts, x, w, **result_options, **given)
