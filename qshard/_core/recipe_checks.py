"""Checks of weights and states against the recipe of a layer."""

from __future__ import annotations

from qshard.formats import Format, Usage
from qshard.layout import has_row_blocks_of, plane, whole_units
from qshard.recipes import Recipe, Role


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
    if not recipe.has_one_weight:
        raise ValueError(
            f"{op}: {name} ({fmt}) is codes, but forward and dgrad of {recipe} need its values, for other formats; "
            "pass a weight in high precision, or a recipe that changes wgrad alone"
        )
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
    """Raise ValueError unless a weight `[N, K]` and the tensors that multiply it have whole blocks in all products."""
    for own in recipe.distinct:
        for one in Usage.BOTH.planes:
            plane(own.weight, shape, one, op=op, name=name)
        for role, axis, size in ((Role.ACTIVATION, "columns", shape[1]), (Role.GRADIENT, "rows", shape[0])):
            unit = whole_units(own.format(role), Usage.ROWWISE)[1]
            if size % unit:
                raise ValueError(
                    f"{op}: {name} {shape} does not fit the {role.value}s, which have blocks of {unit} "
                    f"({own.format(role)}); pad the {axis} to {size + -size % unit}"
                )
