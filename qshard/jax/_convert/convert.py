"""`convert`: make the linear layers of an nnx model multiply in the formats of a recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from qshard._core.layer_recipes import (
    NO_PATTERN,
    RecipesLike,
    Rules,
    check_chosen,
    check_each,
    check_function,
    warn_of_rest,
)
from qshard._core.validation import quote
from qshard.jax._nn.dot_general import DotGeneral
from qshard.jax._ops.mesh import AxisName
from qshard.jax._sharding.inference import MeshAxisRoles
from qshard.recipes import Recipe


def convert(
    model: Any,
    recipe: RecipesLike,
    filter: Callable[[Any, str], bool] | None = None,
    *,
    gather_axis: AxisName = None,
    kept_axes: AxisName = None,
    einsums: Mapping[str, str] | None = None,
    rngs: Any = None,
    **options: Any,
) -> Any:
    """Make the linear layers of a flax nnx model multiply in the formats of a recipe, in place.

    Linear layers are `nnx.Linear`, `nnx.LinearGeneral` (also in `nnx.MultiHeadAttention`), `nnx.LoRALinear`,
    `nnx.Einsum`, and the experts of `qshard.jax.nnx.MoE`. Modules, names and parameters stay, so optimizer states and
    checkpoints do not change; only the `dot_general` of each layer is replaced. Under `DelayedScaling` a layer also
    gets a `qshard.jax.nnx.ScalingState`, and under a recipe with stochastic rounding a random stream.

    Kernels are quantized from their own dtype, not from the `dtype` that the layer computes in. Results keep their
    dtype. A layer that was converted before gets the new recipe.

    One warning lists all weights that stay in high precision, each with the reason and the remedy, except those that
    `filter` or a pattern leaves out. Linear layers stay if they override `__call__`, have a `dot_general` of the user,
    request a precision, or have a kernel with batch axes. Other modules are listed if they have a float `nnx.Param`
    with two or more axes; embeddings, norms and adapters are not. `einsums` converts modules with one einsum, as in
    tunix and gemma: each becomes an instance of a subclass of its class.

    Args:
      model: an `nnx.Module`, also an abstract one of `nnx.eval_shape`.
      recipe: the recipe, or its name, such as "CurrentScaling". Or a mapping from patterns of names to recipes, such as
        `{"*.experts.*": "BlockScaling", "layers[-15%:].*": None, "*": "MXFP8"}`, where None keeps layers in high
        precision. docs/quickstart.md has the patterns.
      filter: a function of a module with weights and its qualified name, such as "layers.0.attention.query". If it
        returns False, the module stays as it is and is not listed in the warning.
      gather_axis: the mesh axis along which FSDP shards the kernels: their codes are gathered. Shard the model first:
        the sharding of each kernel is read from its array, or from `out_sharding` in its metadata.
      kept_axes: mesh axes along which kernels stay sharded, as in tensor parallelism.
      einsums: equations by pattern of names, for modules with `jnp.einsum(equation, x, self.w)` in `__call__(x)`, or in
        `__call__(equation, x)`, such as `{"*.q_proj": "BTD,DNH->BTNH"}`; or the name of the attribute with the
        equation, such as `{"*": "einsum_str"}`. `convert` checks the equation against a trace of the module.
      rngs: an `nnx.Rngs` for recipes with stochastic rounding; seeds come from its stream "qshard", or "default".
      options: options of `DotGeneral`, such as `otherwise` or `reshard_after_forward`.

    Returns:
      `model`.

    Raises:
      TypeError: a kernel is not float32, bfloat16 or float16, or an argument has the wrong type.
      ValueError: there is nothing to convert; a kernel is not whole blocks of the formats; it is sharded along a mesh
        axis that is neither `gather_axis` nor in `kept_axes`, or no kernel is sharded along `gather_axis`; `rngs` is
        missing; a pattern matches no layer, or only layers that an earlier one matches, or has None for a converted
        layer; or a module computes another equation than `einsums` gives, or more than it. The model is unchanged then.

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
    every = nnx_model.names_of(model)
    rules = Rules.of(recipe, "convert", every)
    if filter is not None:
        check_function("convert", "filter", filter)
    _check_einsums(einsums)
    candidates = nnx_model.survey(model, einsums or {})
    rules.check_used([each.names for each in candidates.values()], every)
    now = {name: (each.layer.current, each.names) for name, each in candidates.items() if each.layer is not None}
    rules.check_kept({name: (found.recipe, names) for name, (found, names) in now.items() if found is not None})
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
    sharding_options = {name: layer.sharding_options(meaning, name) for name, layer in chosen.items()}
    meaning.check_used(sharding_options)
    multipliers = {each: DotGeneral(each, **options) for each in recipes.values()}
    check_each(
        {name: functools.partial(layer.check, name, multipliers[recipes[name]]) for name, layer in chosen.items()}
    )
    made = {
        name: layer.multiplier(recipes[name], rngs, options | sharding_options[name]) for name, layer in chosen.items()
    }
    warn_of_rest("convert", chosen, why)
    for name, layer in chosen.items():
        layer.install(made[name])
    return model


def _check_einsums(einsums: Any) -> None:
    if einsums is None:
        return
    if not isinstance(einsums, Mapping) or not all(isinstance(each, str) for pair in einsums.items() for each in pair):
        raise TypeError(
            f"convert: einsums ({quote(einsums)}) is not a dict of name patterns and equations; pass one, such as "
            "{'*.q_proj': 'BTD,DNH->BTNH'}"
        )
