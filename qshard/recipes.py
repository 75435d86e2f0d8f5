"""Recipes: the format of each tensor of a linear layer. Recipes are frozen data and never read the environment.

Sources: arXiv:2209.05433 (E4M3 forward, E5M2 for gradients); arXiv:2412.19437 (128x128 weights, 1x128 the rest);
arXiv:2506.08027 (E4M3 for every tensor in MXFP8); OCP Microscaling Formats v1.0 (MXFP6, MXFP4); arXiv:2509.25149
(NVFP4: 16x16 weights, Hadamard transform of activations and gradients, stochastic rounding of gradients).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from qshard import formats
from qshard._core.validation import as_format, closest, quote
from qshard.formats import Format, Usage, constructor_call
from qshard.layout import has_row_blocks_of, plane, source, whole_units

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


ROLE_SEEDS = {Role.GRADIENT: 0, Role.ACTIVATION: 1 << 62, Role.WEIGHT: 1 << 63}
"""XOR masks that derive the seed of each tensor from the seed of its layer, so that no two tensors share random bits.

The masks set the highest bits, which seeds that count up with steps or ranks do not reach.
"""


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A format for each role of a linear layer.

    This class accepts any mix of formats with rotations that cancel. Named recipes accept one kind of format.

    In named recipes, weights by default have 2-D blocks or one scale, so that one plane serves forward and backward.
    Their default formats have `nonfinite="nan"`: an infinity or NaN in `x`, `w` or `dy` makes the results that depend
    on it NaN, so loss scaling, `optax.apply_if_finite` and the loss itself show it. Formats that you pass are used
    unchanged, and the formats of `qshard.formats` saturate.

    Attributes:
      weight: format of `w`, or its name. Formats may be passed by name for every role.
      activation: format of `x`.
      gradient: format of the gradient of `y`.
      accepts: a format of the kind that a named recipe accepts; None: any.

    Raises:
      ValueError: a format is not of the accepted kind; or one operand of a product would be rotated and the other not.
        Only both operands of `dw`, activation and gradient, may be rotated.

    >>> CurrentScaling(), CurrentScaling(gradient="FP8_E4M3")
    (CurrentScaling(), CurrentScaling(gradient=FP8_E4M3))
    >>> CurrentScaling().format(Role.GRADIENT).name
    'FP8_E5M2'
    >>> mix = Recipe(weight="NVFP4_16x16", activation="MXFP8_E4M3", gradient=formats.MXFP8_E5M2)
    >>> print(mix.format(Role.WEIGHT))
    NVFP4_16x16
    """

    weight: Format
    activation: Format
    gradient: Format
    accepts: ClassVar[Format | None] = None
    _contracted_unit: ClassVar[int]  # Computed once and not fields: every call of every layer reads them.
    _stochastic: ClassVar[bool]

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
        all_formats = (self.weight, self.activation, self.gradient)
        object.__setattr__(self, "_stochastic", any(fmt.stochastic for fmt in all_formats))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, so that unpickling validates them."""
        return _recipe, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})

    def __repr__(self) -> str:
        return constructor_call(self)

    def format(self, role: Role) -> Format:
        """Return the format of the tensor in `role`."""
        fmt: Format = getattr(self, role._value_)
        return fmt

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
        super().__post_init__()
        for option, legal, need in [
            ("history", isinstance(self.history, int) and self.history >= 1, "an integer of at least 1"),
            ("margin", isinstance(self.margin, int) and abs(self.margin) <= 64, "an integer from -64 to 64"),
            ("algorithm", self.algorithm in ("max", "most_recent"), "'max' or 'most_recent'"),
        ]:
            if not legal:
                raise ValueError(f"DelayedScaling: {option} ({getattr(self, option)!r}) must be {need}")

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


def as_recipe(value: Any, op: str, name: str = "recipe") -> Recipe:
    """Return the recipe that a caller of `op` passed as its argument `name`: a recipe, or a key of `NAMED`.

    Raises:
      TypeError: `value` is something else, such as a format, or a class without parentheses.
      ValueError: `NAMED` does not have this name.

    >>> as_recipe("MXFP8", "convert") == MXFP8()
    True
    >>> as_recipe(MXFP8, "convert")
    Traceback (most recent call last):
    TypeError: convert: recipe (the class MXFP8) is not an instance; pass MXFP8()
    """
    if isinstance(value, Recipe):
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
        raise ValueError(f"{what} is not a recipe name; {closest(value, NAMED, 'qshard.recipes.NAMED')}")
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


def check_state(
    op: str, name: str, given: object, recipe: Recipe, advice: str, *, layers: str = "", fits: bool = True
) -> None:
    """Raise ValueError unless state is passed exactly if the recipe keeps state. `advice` says what to pass.

    - `given`: description of the state that was passed; None if none was.
    - `layers`: description of the layers that the state is for.
    - `fits`: False if the state does not match the other arguments.
    """
    kind = type(recipe).__name__
    if recipe.stateful and given is None:
        raise ValueError(f"{op}: {kind} needs `{name}`; pass {advice}")
    if given is not None and not recipe.stateful:
        raise ValueError(f"{op}: {name} is for DelayedScaling, and the recipe is {kind}; leave it out")
    if not fits:
        raise ValueError(f"{op}: {name} ({given}) does not fit {layers or 'the other arguments'}; pass {advice}")


CAST_OPTIONS = ("nonfinite", "pow2", "eps")
"""Options that affect casts, but not the meaning of codes."""


def takes_frozen(fmt: Format, recipe: Recipe) -> bool:
    """Return whether codes of `fmt` can be a frozen weight though the recipe's weights have 2-D blocks.

    Engines store 1-D blocks along K, which the forward product contracts. Their columnwise plane has other codes, so
    the gradient of x multiplies dequantized values.

    >>> from qshard.formats import MXFP8_E4M3, NVFP4
    >>> [takes_frozen(MXFP8_E4M3, MXFP8()), takes_frozen(NVFP4, MXFP8())]
    [True, False]
    """
    return recipe.weight.transposes and has_row_blocks_of(fmt, recipe.weight)


def check_weight_format(op: str, name: str, fmt: Format, recipe: Recipe, *, frozen: bool = False) -> None:
    """Raise ValueError unless codes of `fmt` can be the weight of a layer with this recipe.

    `frozen` also accepts 1-D blocks (`takes_frozen`).
    """
    if frozen and takes_frozen(fmt, recipe):
        return
    own, wanted = fmt.options, recipe.weight.options
    same = {option: wanted[option] for option in CAST_OPTIONS if option in own and option in wanted}
    if fmt.with_options(**same) == recipe.weight:
        return
    what, remedy = "is not in the weight format of the recipe", f"quantize it to {recipe.weight}"
    if fmt.name == recipe.weight.name and own.keys() == wanted.keys():
        differ = [option for option in own if option not in CAST_OPTIONS and own[option] != wanted[option]]
        had, needed = (", ".join(f"{option}={of[option]}" for option in differ) for of in (own, wanted))
        what = f"has {had}, but the weight format of the recipe has {needed}"
    raise ValueError(f"{op}: {name} ({fmt}) {what}; {remedy}")


def check_weight_shape(op: str, name: str, recipe: Recipe, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight `[N, K]` and the tensors that multiply it have whole blocks."""
    for one in Usage.BOTH.planes:
        plane(recipe.weight, shape, one, op=op, name=name)
    for role, axis, size in ((Role.ACTIVATION, "columns", shape[1]), (Role.GRADIENT, "rows", shape[0])):
        unit = whole_units(recipe.format(role), Usage.ROWWISE)[1]
        if size % unit:
            raise ValueError(
                f"{op}: {name} {shape} does not fit the {role.value}s, which have blocks of {unit} "
                f"({recipe.format(role)}); pad the {axis} to {size + -size % unit}"
            )
