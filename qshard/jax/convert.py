"""`convert`: the linear layers of an nnx model multiply in the formats of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from qshard.jax.dot import DotGeneral
from qshard.jax.placement import Axes, Meaning
from qshard.names import shown
from qshard.recipes import RecipeLike

_SHOWN = 3
"""How many layers a warning names."""


def convert(
    model: Any,
    recipe: RecipeLike,
    filter: Callable[[Any, str], bool] | None = None,
    *,
    gather_axis: Axes = None,
    kept_axes: Axes = None,
    rngs: Any = None,
    **options: Any,
) -> Any:
    """Makes every linear layer of a flax nnx model multiply in a recipe, in place: same modules, names and values.

    Linear layers are `nnx.Linear`, `nnx.LinearGeneral`, so those of `nnx.MultiHeadAttention`, `nnx.LoRALinear` and
    `nnx.Einsum`. They stay what they are, and so do their parameters, what an optimizer holds and what a checkpoint
    has; only their `dot_general` becomes another. Under `DelayedScaling` each gets a `qshard.jax.nnx.ScalingState`
    beside its parameters, and under a recipe that rounds stochastically a stream of random numbers.

    A kernel is quantized as it is, not as what `dtype` of the layer would make of it; the result has the dtype that it
    had before. A layer that was converted before takes the new recipe.

    What it cannot convert it leaves as it is, with a warning that says why, unless `filter` leaves it out: layers with
    a `__call__` or a `dot_general` of their own, that ask for a precision, or whose kernel has batch axes.

    Args:
      model: an `nnx.Module`, also an abstract one of `nnx.eval_shape`.
      recipe: the format of each role, or the name of a recipe, such as "CurrentScaling".
      filter: called with a layer and its qualified name, such as "layers.0.attention.query"; layers for which it is
        False stay as they are.
      gather_axis: the mesh axis along which FSDP has cut the kernels: their codes are gathered. How each is cut is read
        off its array, or off the `out_sharding` of its metadata where it has none, so shard the model first.
      kept_axes: mesh axes along which kernels stay cut, as of tensor parallelism.
      rngs: an `nnx.Rngs`, of recipes that round stochastically; seeds are of its stream "qshard", or "default".
      options: of `DotGeneral`, such as `otherwise` or `reshard_after_forward`.

    Returns:
      `model`.

    Raises:
      TypeError: a kernel is not float32, bfloat16 or float16, or an argument is not of its type.
      ValueError: there is nothing to convert; a kernel is not whole blocks of the formats of the recipe; it is cut
        along a mesh axis that is neither `gather_axis` nor in `kept_axes`, or none is cut along `gather_axis`; or
        there is no `rngs`. Nothing has been changed then.

    >>> import jax
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 2, rngs=nnx.Rngs(1)))
    >>> model = convert(model, "CurrentScaling", filter=lambda layer, name: name != "layers.2")
    >>> type(model.layers[0].dot_general).__name__, model.layers[2].dot_general is jax.lax.dot_general
    ('DotGeneral', True)
    """
    from flax import nnx

    from qshard.jax import convert_nnx

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"convert: model ({shown(model)}) is not an nnx.Module; pass DotGeneral(recipe) to layers of linen, and "
            "make a Policy for pytrees and equinox"
        )
    if filter is not None and not callable(filter):
        raise TypeError(f"convert: filter ({shown(filter)}) is not a function; pass one of a layer and its name")
    layers = {name: layer for name, layer in convert_nnx.layers(model) if filter is None or filter(layer.module, name)}
    why = {name: reason for name, layer in layers.items() if (reason := layer.unfit) is not None}
    chosen = {name: layer for name, layer in layers.items() if name not in why}
    if not chosen:
        kind = type(model).__name__
        if why:
            raise ValueError(f"convert: model ({kind}) has nothing to convert: {_listed(why)}; pass one that has")
        raise ValueError(f"convert: model ({kind}) has no linear layer that filter= keeps; pass one that has")
    meaning = Meaning.of("convert", gather_axis, kept_axes)
    placed = {name: layer.placed(meaning, name) for name, layer in chosen.items()}
    meaning.check_used(placed)
    asked = DotGeneral(recipe, **options)
    for name, layer in chosen.items():
        layer.check(name, asked)
    made = {name: layer.multiplier(asked.recipe, rngs, options | placed[name]) for name, layer in chosen.items()}
    if why:
        warnings.warn(
            f"convert: {len(why)} of {len(layers)} linear layers stay as they are: {_listed(why)}; leave them out with "
            "filter= to say that they should",
            stacklevel=2,
        )
    for name, layer in chosen.items():
        layer.put(made[name])
    return model


def _listed(left: dict[str, str]) -> str:
    listed = [f"{name or 'it'} ({why})" for name, why in left.items()][:_SHOWN]
    return ", ".join(listed) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")
