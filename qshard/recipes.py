"""Recipes: the format of each tensor of a linear layer. Recipes are frozen data and never read the environment.

Sources: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients); arXiv:2412.19437 (128x128 weights, 1x128 the rest);
arXiv:2506.08027 (E4M3 for every tensor in MXFP8); OCP Microscaling Formats v1.0 (MXFP6, MXFP4); arXiv:2509.25149
(NVFP4: 16x16 weights, Hadamard transform of activations and gradients, stochastic rounding of gradients).
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple

from qshard import formats
from qshard._core.validation import as_format, closest, join_names, quote
from qshard.formats import Format, Usage, constructor_call
from qshard.layout import source, whole_units

__all__ = [
    "MXFP4",
    "MXFP6",
    "NVFP4",
    "ROLE_SEEDS",
    "MXFP8",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "NAMED",
    "Product",
    "Recipe",
    "Role",
]


def _with_nan(fmt: Format) -> Format:
    return fmt.with_options(nonfinite="nan")


class Role(enum.Enum):
    """The role of a tensor in a linear layer `y = x @ w.T`: weight, activation or gradient."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Product(enum.Enum):
    """A matrix product of a linear layer: `y = x @ w.T`, `dx = dy @ w` or `dw = dy.T @ x`."""

    FORWARD = "forward"
    DGRAD = "dgrad"
    WGRAD = "wgrad"

    @property
    def roles(self) -> tuple[Role, Role]:
        """The roles of the two operands."""
        return _OPERANDS[self]


_OPERANDS = {
    Product.FORWARD: (Role.ACTIVATION, Role.WEIGHT),
    Product.DGRAD: (Role.GRADIENT, Role.WEIGHT),
    Product.WGRAD: (Role.GRADIENT, Role.ACTIVATION),
}

BF16 = "bf16"
"""The value of a product of a recipe whose operands are rounded to bfloat16 instead of quantized."""


ROLE_SEEDS = {Role.GRADIENT: 0, Role.ACTIVATION: 1 << 62, Role.WEIGHT: 1 << 63}
"""XOR masks that derive the seed of each tensor from the seed of its layer, so that no two tensors share random bits.

The masks set the highest bits, which seeds that count up with steps or ranks do not reach.
"""


class ProductRecipes(NamedTuple):
    """For each product, the recipe with the formats of both operands, by role; None for bfloat16 operands."""

    forward: Recipe | None
    dgrad: Recipe | None
    wgrad: Recipe | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A format for each role of a linear layer, and optionally other formats for one of its products.

    This class accepts any mix of formats with rotations that cancel. Named recipes accept one kind of format.

    In named recipes, weights by default have 2-D blocks or one scale, so that one plane serves forward and backward.
    Their default formats have `nonfinite="nan"`: an infinity or NaN in `x`, `w` or `dy` makes the results that depend
    on it NaN, so loss scaling, `optax.apply_if_finite` and the loss itself show it. Formats that you pass are used
    unchanged, and the formats of `qshard.formats` saturate.

    `forward`, `dgrad` and `wgrad` choose the formats of both operands of one product: another recipe or its name gives
    them by role, and "bf16" rounds the operands to bfloat16. Without them the product has the formats of the roles.
    Layers that use a tensor in two formats quantize it twice.

    Attributes:
      weight: format of `w`, or its name. Formats may be passed by name for every role.
      activation: format of `x`.
      gradient: format of the gradient of `y`.
      forward: formats of the operands of `y = x @ w.T`: a recipe, its name or "bf16"; None: the formats of the roles.
      dgrad: likewise, for `dx = dy @ w`.
      wgrad: likewise, for `dw = dy.T @ x`.
      accepts: a format of the kind that a named recipe accepts; None: any.

    Raises:
      ValueError: a format is not of the accepted kind; or one operand of a product would be rotated and the other not.
        Only both operands of `dw`, activation and gradient, may be rotated. Or a product has a recipe that itself has
        products, or delayed scales, which belong to all products.

    >>> CurrentScaling(), CurrentScaling(gradient="FP8_E4M3")
    (CurrentScaling(), CurrentScaling(gradient=FP8_E4M3))
    >>> CurrentScaling().format(Role.GRADIENT).name
    'FP8_E5M2'
    >>> mix = Recipe(weight="NVFP4_16x16", activation="MXFP8_E4M3", gradient=formats.MXFP8_E5M2)
    >>> print(mix.format(Role.WEIGHT))
    NVFP4_16x16
    >>> late = NVFP4(wgrad="bf16", dgrad="MXFP8")
    >>> late, late.of(Product.DGRAD), late.of(Product.WGRAD)
    (NVFP4(dgrad=MXFP8(), wgrad='bf16'), MXFP8(), None)
    """

    weight: Format
    activation: Format
    gradient: Format
    forward: Recipe | str | None = None
    dgrad: Recipe | str | None = None
    wgrad: Recipe | str | None = None
    accepts: ClassVar[Format | None] = None
    _contracted_unit: ClassVar[int]  # Computed once and not fields: every call of every layer reads them.
    _stochastic: ClassVar[bool]
    _by_product: ClassVar[bool]
    _has_one_weight: ClassVar[bool]
    _distinct: ClassVar[tuple[Recipe, ...]]
    _products: ClassVar[ProductRecipes]
    _text: ClassVar[str | None]

    def __post_init__(self) -> None:
        for role in Role:
            given = getattr(self, role.value)
            object.__setattr__(self, role.value, as_format(given, type(self).__name__, role.value))
            if self.accepts is not None and self.format(role).kind != self.accepts.kind:
                raise ValueError(
                    f"{type(self).__name__}: {role.value} ({self.format(role)}) has another scaling method or element "
                    "type; choose another format, or use Recipe to mix formats"
                )
        weight, activation, gradient = (fmt.hadamard for fmt in (self.weight, self.activation, self.gradient))
        if weight or activation != gradient:
            raise ValueError(
                f"{type(self).__name__}: rotations (weight: {weight}, activation: {activation}, gradient: {gradient}) "
                "do not cancel in every product; rotate both activation and gradient, or none"
            )
        contracted = (whole_units(fmt, Usage.COLUMNWISE)[0] for fmt in (self.activation, self.gradient))
        object.__setattr__(self, "_contracted_unit", max(contracted))
        given = {each.value: self._as_product(each) for each in Product if getattr(self, each.value) is not None}
        object.__setattr__(self, "_by_product", bool(given))
        # The other products share one recipe.
        rest = replace(self, forward=None, dgrad=None, wgrad=None) if given else self
        products = {each.value: given.get(each.value, rest) for each in Product}
        alike = {own: own for own in products.values()}  # Equal recipes are one object, so `is` compares them.
        object.__setattr__(self, "_products", ProductRecipes(**{name: alike[own] for name, own in products.items()}))
        object.__setattr__(self, "_distinct", tuple(own for own in alike if own is not None))
        of_weight = (self.products.forward, self.products.dgrad)
        has_one = all(own is not None and own.weight == self.weight for own in of_weight)
        object.__setattr__(self, "_has_one_weight", has_one)
        used = ((own, role) for each in Product if (own := self.of(each)) is not None for role in each.roles)
        object.__setattr__(self, "_stochastic", any(own.format(role).stochastic for own, role in used))
        is_own = type(self).__module__ == __name__
        object.__setattr__(self, "_text", json.dumps(self.description) if is_own else None)

    def _as_product(self, product: Product) -> Recipe | None:
        """Replace a name in the field of a product by its recipe, and check it. Return None for "bf16"."""
        kind, name, given = type(self).__name__, product.value, getattr(self, product.value)
        if isinstance(given, str) and given not in NAMED and given not in formats.FORMATS and given != BF16:
            raise ValueError(
                f"{kind}: {name} ({quote(given)}) is not a recipe name or 'bf16'; {closest(given, [BF16, *NAMED], '')}"
            )
        own = None if given == BF16 else as_recipe(given, kind, name)
        if own is not None and own.by_product:
            raise ValueError(
                f"{kind}: {name} ({own}) has products of its own; pass a recipe with formats of roles only"
            )
        if self.stateful or (own is not None and own.stateful):
            raise ValueError(
                f"{kind}: {name} ({quote(given)}) does not go with delayed scales, which belong to all products; use "
                "CurrentScaling"
            )
        if own is not None:
            object.__setattr__(self, name, own)
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, so that unpickling validates them."""
        return _recipe, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})

    def __repr__(self) -> str:
        return constructor_call(self)

    @property
    def description(self) -> dict[str, Any]:
        """The class and the fields as JSON types, for files; formats are `Format.description`."""

        def plain(value: Any) -> Any:
            return value.description if isinstance(value, Format | Recipe) else value

        return {"recipe": type(self).__name__} | {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    @property
    def text(self) -> str | None:
        """`description` as JSON, from which compiled layers find the recipe; None for a class of the user's.

        Classes of the user's may share a name, as after a notebook cell ran twice.
        """
        return self._text

    def format(self, role: Role) -> Format:
        """Return the format of the tensor in `role`."""
        fmt: Format = getattr(self, role._value_)
        return fmt

    def of(self, product: Product) -> Recipe | None:
        """Return the recipe with the formats of both operands of a product, by role; None for bfloat16 operands.

        >>> [NVFP4(wgrad="bf16").of(each) for each in Product]
        [NVFP4(), NVFP4(), None]
        """
        own: Recipe | None = getattr(self.products, product._value_)
        return own

    @property
    def products(self) -> ProductRecipes:
        """The recipes of all products, by name."""
        return self._products

    @property
    def distinct(self) -> tuple[Recipe, ...]:
        """The different recipes of its products."""
        return self._distinct

    @property
    def by_product(self) -> bool:
        """True if a product has formats that differ from the formats of the roles."""
        return self._by_product

    @property
    def has_one_weight(self) -> bool:
        """True if forward and dgrad use the weight in the format `weight`, so that its codes can stand for it.

        >>> [NVFP4(wgrad="bf16").has_one_weight, NVFP4(dgrad="bf16").has_one_weight]
        [True, False]
        """
        return self._has_one_weight

    @property
    def stochastic(self) -> bool:
        """True if a format rounds stochastically, so that layers need a seed."""
        return self._stochastic

    @property
    def stateful(self) -> bool:
        """True if scales come from earlier steps, so that layers carry state that is updated every step."""
        return bool(self.state_shapes)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of the fp32 state that each quantized tensor carries from step to step."""
        return {}

    def added_rows(self, role: Role, usage: Usage, rows: int) -> int:
        """Return the number of zero rows to append to the matrix in `role`, so that blocks along its rows are whole.

        `dw` contracts the rows of activation and gradient, so both are padded to the larger of their two alignments, in
        the planes that `dw` may read. Zeros change no amax and add nothing to a product.

        Weights are not padded: the tensors that they multiply would have to grow too.

        >>> [MXFP8().added_rows(Role.ACTIVATION, usage, 40) for usage in (Usage.ROWWISE, Usage.BOTH)]
        [0, 24]
        """
        if role is Role.WEIGHT or (usage is Usage.ROWWISE and source(self.format(role), Usage.COLUMNWISE) is not usage):
            return 0
        return -rows % self._contracted_unit


def _recipe(kind: type[Recipe], options: dict[str, Any]) -> Recipe:
    return kind(**options)


@dataclass(frozen=True, kw_only=True, repr=False)
class CurrentScaling(Recipe):
    """Per-tensor FP8, scaled by the amax of the tensor itself."""

    accepts = formats.FP8_E4M3
    weight: Format = _with_nan(formats.FP8_E4M3)
    activation: Format = _with_nan(formats.FP8_E4M3)
    gradient: Format = _with_nan(formats.FP8_E5M2)


@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScaling(Recipe):
    """Per-tensor FP8, scaled by the amaxes of earlier steps, so that the cast reads `x` once.

    Attributes:
      history: number of past amaxes stored per tensor; 1 stores only the last step's.
      margin: headroom below `element.max`, in powers of two from -64 to 64.
      algorithm: compute the scale from the "max" of the stored amaxes, or from the "most_recent".

    >>> DelayedScaling(history=4).state_shapes
    {'scale': (), 'amax_history': (4,)}
    """

    accepts = formats.FP8_E4M3
    weight: Format = _with_nan(formats.FP8_E4M3)
    activation: Format = _with_nan(formats.FP8_E4M3)
    gradient: Format = _with_nan(formats.FP8_E5M2)
    history: int = 16
    margin: int = 0
    algorithm: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        for option, legal, need in [
            ("history", isinstance(self.history, int) and self.history >= 1, "an integer of at least 1"),
            ("margin", isinstance(self.margin, int) and abs(self.margin) <= 64, "an integer from -64 to 64"),
            ("algorithm", self.algorithm in ("max", "most_recent"), "'max' or 'most_recent'"),
        ]:
            if not legal:
                raise ValueError(f"DelayedScaling: {option} ({getattr(self, option)!r}) must be {need}")
        super().__post_init__()

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 state of each tensor: its scale and its amax history."""
        return {"scale": (), "amax_history": (self.history,)}


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockScaling(Recipe):
    """FP8 in blocks of 128 with fp32 scales: 2-D blocks for weights, 1-D blocks for activations and gradients."""

    accepts = formats.FP8_128x128
    weight: Format = _with_nan(formats.FP8_128x128)
    activation: Format = _with_nan(formats.FP8_1x128)
    gradient: Format = _with_nan(formats.FP8_1x128)


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP8(Recipe):
    """FP8 in blocks of 32 with power-of-two scales."""

    accepts = formats.MXFP8_E4M3
    weight: Format = _with_nan(formats.MXFP8_32x32)
    activation: Format = _with_nan(formats.MXFP8_E4M3)
    gradient: Format = _with_nan(formats.MXFP8_E4M3)


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP6(Recipe):
    """FP6 in blocks of 32 with power-of-two scales.

    Every tensor uses E2M3: with one scale for 32 elements, a third mantissa bit is worth more than a third exponent
    bit. The signal-to-noise ratio on normally distributed data is 31 dB with E2M3, 26 dB with E3M2 and 32 dB with
    MXFP8; on Student's t with 3 degrees of freedom it is 29 dB with E2M3 and 26 dB with E3M2. Use `formats.MXFP6_E3M2`
    for gradients with a wider spread within 32 elements. Each code is stored in a byte, so memory and time are the same
    as for MXFP8.
    """

    accepts = formats.MXFP6_E2M3
    weight: Format = _with_nan(formats.MXFP6_E2M3_32x32)
    activation: Format = _with_nan(formats.MXFP6_E2M3)
    gradient: Format = _with_nan(formats.MXFP6_E2M3)


@dataclass(frozen=True, kw_only=True, repr=False)
class MXFP4(Recipe):
    """FP4 in blocks of 32 with power-of-two scales.

    The coarsest recipe: elements have 3 bits of magnitude, and a scale may be up to twice what its block needs.
    """

    accepts = formats.MXFP4
    weight: Format = _with_nan(formats.MXFP4_32x32)
    activation: Format = _with_nan(formats.MXFP4)
    gradient: Format = _with_nan(formats.MXFP4)


@dataclass(frozen=True, kw_only=True, repr=False)
class NVFP4(Recipe):
    """FP4 in blocks of 16 with E4M3 scales and one fp32 scale per tensor.

    >>> print(NVFP4().gradient)
    NVFP4[hadamard=True, rounding=stochastic, nonfinite=nan]
    """

    accepts = formats.NVFP4
    weight: Format = _with_nan(formats.NVFP4_16x16)
    activation: Format = _with_nan(formats.NVFP4.with_options(hadamard=True))
    gradient: Format = _with_nan(formats.NVFP4.with_options(hadamard=True, rounding="stochastic"))


NAMED = {kind.__name__: kind() for kind in (CurrentScaling, DelayedScaling, BlockScaling, MXFP8, MXFP6, MXFP4, NVFP4)}
"""Every named recipe with its defaults, by name."""

RecipeLike = Recipe | str
"""A recipe, or a key of `NAMED`."""


def as_recipe(value: Any, op: str, name: str = "recipe", *, by_product: bool = True) -> Recipe:
    """Return the recipe that a caller of `op` passed as its argument `name`: a recipe, or a key of `NAMED`.

    `by_product=False`: `op` supports formats of roles only.

    Raises:
      TypeError: `value` is something else, such as a format, or a class without parentheses.
      ValueError: `NAMED` does not have this name.
      NotImplementedError: `op` does not support the formats of its products.

    >>> as_recipe("MXFP8", "convert") == MXFP8()
    True
    >>> as_recipe(MXFP8, "convert")
    Traceback (most recent call last):
    TypeError: convert: recipe (the class MXFP8) is not an instance; pass MXFP8()
    """
    if isinstance(value, Recipe):
        if value.by_product and not by_product:
            without = replace(value, forward=None, dgrad=None, wgrad=None)
            raise NotImplementedError(f"{op}: {name} ({value}) {NO_PRODUCTS}; pass one without, such as {without}")
        return value
    if isinstance(value, str) and value in NAMED:
        return NAMED[value]
    if isinstance(value, str) and value in formats.FORMATS:
        value = formats.FORMATS[value]
    if isinstance(value, Format):
        users = [f"{known}()" for known, recipe in NAMED.items() if getattr(recipe.accepts, "kind", None) == value.kind]
        raise TypeError(
            f"{op}: {name} (the format {value}) is not a recipe; pass a recipe that uses such a format: "
            f"{' or '.join(users)}"
        )
    what = f"{op}: {name} ({quote(value)})"
    if isinstance(value, str):
        # "FP8" is the beginning of format names, and "MXFP8" would be the closest recipe name.
        alike = [known for known, own in NAMED.items() if str(own.weight).startswith(f"{value.upper()}_")]
        similar = closest(value, NAMED, "qshard.recipes.NAMED")
        hint = f"did you mean {join_names(map(repr, alike))}?" if alike else similar
        raise ValueError(f"{what} is not a recipe name; {hint}")
    if isinstance(value, type) and issubclass(value, Recipe):
        call = f"{value.__name__}()" if value is not Recipe else "Recipe(weight=, activation=, gradient=)"
        raise TypeError(f"{what} is not an instance; pass {call}")
    raise TypeError(f"{what} is not a recipe or a recipe name; pass one of qshard.recipes, such as CurrentScaling()")


def as_delayed(value: Any, op: str) -> DelayedScaling:
    """Return the `DelayedScaling` recipe that a caller of `op` passed.

    Raises:
      TypeError: `value` is any other recipe, or none.
      ValueError: `NAMED` does not have this name.

    >>> as_delayed("CurrentScaling", "init_delayed")
    Traceback (most recent call last):
    TypeError: init_delayed: recipe (CurrentScaling) has no scaling state; pass DelayedScaling, the only recipe with one
    """
    recipe = as_recipe(value, op)
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"{op}: recipe ({type(recipe).__name__}) has no scaling state; pass DelayedScaling, the only recipe with "
            "one"
        )
    return recipe


NO_PRODUCTS = "has formats of single products (forward, dgrad, wgrad), which are not supported here"
"""Reason for leaving out a layer, or for an error."""
