"""`convert`: the linear layers of an nnx model multiply in the formats of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qshard._core.layer_recipes import NO_PATTERN, RecipesLike, Rules, check_chosen, check_filter, warn_of_rest
from qshard._core.validation import quote
from qshard.jax._nn.dot_general import DotGeneral
from qshard.jax._sharding.inference import Axes, MeshAxisRoles
from qshard.recipes import Recipe


def convert(
    model: Any,
    recipe: RecipesLike,
    filter: Callable[[Any, str], bool] | None = None,
    *,
    gather_axis: Axes = None,
    kept_axes: Axes = None,
    einsums: Mapping[str, str] | None = None,
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

    One warning names all weights that stay in high precision, with the reason and what to do, unless `filter` or a
    pattern leaves them out. Linear layers stay if they override `__call__`, have a `dot_general` of the user, ask for a
    precision, or have a kernel with batch axes. Other modules stay if they have an `nnx.Param` of floats with two axes
    or more; embeddings, norms and adapters are not named. `einsums` converts modules with one einsum, such as those of
    tunix and gemma: they become instances of a subclass of their class.

    Args:
      model: an `nnx.Module`, also an abstract one of `nnx.eval_shape`.
      recipe: the format of each role, or the name of a recipe, such as "CurrentScaling". Or a mapping from patterns of
        names to recipes, such as `{"*.experts.*": "BlockScaling", "head": None, "*": "MXFP8"}`: the first pattern that
        matches the name of a layer decides, `*` also matches dots, and None keeps layers in high precision.
      filter: a function of a module with weights and its qualified name, such as "layers.0.attention.query". A module
        stays as it is, and is not named, if the function returns False.
      gather_axis: the mesh axis along which FSDP has cut the kernels: their codes are gathered. How each is cut is read
        off its array, or off the `out_sharding` of its metadata where it has none, so shard the model first.
      kept_axes: mesh axes along which kernels stay cut, as of tensor parallelism.
      einsums: equations by pattern of names, for modules with `jnp.einsum(equation, x, self.w)` in `__call__(x)`, or in
        `__call__(equation, x)`, such as `{"*.q_proj": "BTD,DNH->BTNH"}`; or the name of their attribute with the
        equation, such as `{"*": "einsum_str"}`. `convert` checks the equation against a trace of the module.
      rngs: an `nnx.Rngs`, of recipes that round stochastically; seeds are of its stream "qshard", or "default".
      options: of `DotGeneral`, such as `otherwise` or `reshard_after_forward`.

    Returns:
      `model`.

    Raises:
      TypeError: a kernel is not float32, bfloat16 or float16, or an argument is not of its type.
      ValueError: there is nothing to convert; a kernel is not whole blocks of the formats of the recipe; it is cut
        along a mesh axis that is neither `gather_axis` nor in `kept_axes`, or none is cut along `gather_axis`; there
        is no `rngs`; a pattern matches no layer, or only layers that an earlier one matches; or a module computes
        another equation than `einsums` gives, or more. Nothing has been changed then.

    >>> import jax
    >>> from flax import nnx
    >>> model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 2, rngs=nnx.Rngs(1)))
    >>> model = convert(model, "CurrentScaling", filter=lambda layer, name: name != "layers.2")
    >>> type(model.layers[0].dot_general).__name__, model.layers[2].dot_general is jax.lax.dot_general
    ('DotGeneral', True)
    """
    from flax import nnx

    from qshard.jax._convert import nnx_model

    if not isinstance(model, nnx.Module):
        raise TypeError(
            f"convert: model ({quote(model)}) is not an nnx.Module; pass DotGeneral(recipe) to linen layers, or use "
            "Policy for pytrees and equinox"
        )
    rules = Rules.of(recipe, "convert")
    check_filter("convert", filter)
    _check_einsums(einsums)
    candidates = nnx_model.survey(model, einsums or {})
    rules.check_used([each.names for each in candidates.values()], nnx_model.names_of(model))
    chosen: dict[str, nnx_model.Layer] = {}
    recipes: dict[str, Recipe] = {}
    why: dict[str, str] = {}
    modules = {name: (each.module, each.names, each.layer is not None) for name, each in candidates.items()}
    for name, own in rules.choose(modules, filter):
        layer = candidates[name].layer
        left = candidates[name].why if layer is None else layer.unfit
        if left is not None or layer is None or own is None:
            why[name] = left or NO_PATTERN
        else:
            chosen[name], recipes[name] = layer, own
    check_chosen("convert", model, chosen, why, "linear layer")
    meaning = MeshAxisRoles.of("convert", gather_axis, kept_axes)
    placed = {name: layer.placed(meaning, name) for name, layer in chosen.items()}
    meaning.check_used(placed)
    asked = {each: DotGeneral(each, **options) for each in recipes.values()}
    for name, layer in chosen.items():
        layer.check(name, asked[recipes[name]])
    made = {name: layer.multiplier(recipes[name], rngs, options | placed[name]) for name, layer in chosen.items()}
    warn_of_rest("convert", chosen, why)
    for name, layer in chosen.items():
        layer.put(made[name])
    return model


def _check_einsums(einsums: Any) -> None:
    if einsums is None:
        return
    if not isinstance(einsums, Mapping) or not all(isinstance(each, str) for pair in einsums.items() for each in pair):
        raise TypeError(
            f"convert: einsums ({quote(einsums)}) is not a dict of name patterns and equations; pass one, such as "
            "{'*.q_proj': 'BTD,DNH->BTNH'}"
        )
