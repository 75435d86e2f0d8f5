"""Delayed scaling: state that `linear` reads, amaxes that its gradient brings, and one update for all of a model.

Amaxes leave a differentiated function as the cotangent of the state: with respect to a `LinearState`, the gradient of
anything is no derivative, but what was observed of each tensor, in the same structure. Cotangents are summed, by JAX
where one state serves two calls, by users over microbatches, and a sum of amaxes is no amax. So each one carries a
*seal*, a hash of its bits, in the first place of the history. Nothing linear takes a sum, a mean or a multiple of
sealed amaxes to a sealed one, but for what changes nothing, such as adding a zero. `update_delayed` refuses what is not
sealed. Where amaxes must be merged, `merge_observed` and `spread_states` do it, by a maximum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qshard.formats import E4M3
from qshard.jax import ops
from qshard.jax.cuts import vary_alike
from qshard.jax.steps import as_bits, as_float
from qshard.recipes import DelayedScaling, Role

__all__ = [
    "LinearState",
    "TensorState",
    "init_delayed",
    "merge_observed",
    "observed",
    "scale_inv_of",
    "spread_states",
    "update_delayed",
]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "amax_history"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TensorState:
    """What one tensor carries from step to step, or its cotangent: `scale` then is the amax of this step.

    Attributes:
      scale: float32 `[]`.
      amax_history: float32 `[recipe.history]`, the oldest first.
    """

    scale: jax.Array
    amax_history: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "activation", "gradient"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class LinearState:
    """The state of the tensors of one `linear`, by role."""

    weight: TensorState
    activation: TensorState
    gradient: TensorState


def init_delayed(recipe: DelayedScaling, shape: Sequence[int] = ()) -> LinearState:
    """The state of a `linear` before the first step: scales of 1, and histories of 0, which change nothing.

    Args:
      recipe: has the length of the history.
      shape: leading axes of every array, as of layers that are scanned over.

    >>> init_delayed(DelayedScaling(history=4), shape=(12,)).weight.amax_history.shape
    (12, 4)
    """
    shapes = recipe.state_shapes

    def tensor() -> TensorState:
        made = {name: jnp.zeros((*shape, *own), jnp.float32) for name, own in shapes.items()}
        return TensorState(**made | {"scale": jnp.ones((*shape, *shapes["scale"]), jnp.float32)})

    return LinearState(tensor(), tensor(), tensor())


def scale_inv_of(state: TensorState) -> jax.Array:
    """`1 / scale`, rounded as the update rule rounds it: by an update that changes nothing, of an amax of 0."""
    zero = jnp.zeros((1,), jnp.float32)
    options = {"element": E4M3.name, "margin": 0, "most_recent": False}
    _, _, scale_inv = ops.update_delayed_scale(zero, zero[:, None], state.scale[None], **options)
    return jnp.reshape(scale_inv, ())


def observed(state: TensorState, amax: jax.Array, axes: tuple[str, ...]) -> TensorState:
    """The cotangent of a state that brings this amax, reduced over all devices that share the state.

    Types tell which: mesh axes over which the amax varies, and the state does not. With `check_vma=False` types tell
    nothing: then these `axes`, where they are Manual.
    """
    kind = jax.typeof(amax)
    own, shared = (jax.typeof(a).manual_axis_type.varying for a in (amax, state.scale))
    manual = kind.sharding.mesh.manual_axes
    reduced = tuple(sorted(own - shared)) if own else tuple(axis for axis in axes if axis in manual)
    if reduced:
        amax = as_float(lax.pmax(as_bits(amax), reduced))
    history = jnp.zeros_like(state.amax_history).at[..., 0].set(_seal(amax))
    return TensorState(amax, history)


def update_delayed(states: Any, amaxes: Any, recipe: DelayedScaling, *, axis_name: str | Sequence[str] = ()) -> Any:
    """One step of delayed scaling for all tensors of a model, in one call of a kernel for each element format.

    A step whose amax is 0 changes nothing. Else the amax enters the history, the oldest leaves it, and `scale =
    element.max * 2**-margin / max(history)`, or over the amax itself (`algorithm="most_recent"`); it stays where that
    is infinite or NaN.

    Args:
      states: a pytree with `LinearState`s.
      amaxes: the gradient with respect to it: of one step, or merged by `merge_observed`.
      recipe: of the calls of `linear`.
      axis_name: in `shard_map`, mesh axes over which amaxes are still to be reduced, all in one all-reduce. `linear`
        has done that unless the states vary over them.

    Returns:
      `states` for the next step.

    Raises:
      TypeError: `recipe` is no `DelayedScaling`.
      ValueError: the two trees differ; or an amax has been summed, averaged, scaled or rounded. Under `jit`, where that
        is known too late, its scale becomes NaN, and with it all that it scales.

    >>> recipe = DelayedScaling(history=2)
    >>> states = init_delayed(recipe)
    >>> x, w = jnp.full((16, 16), 2.0), jnp.full((16, 16), 7.0)
    >>> from qshard.jax import linear
    >>> amaxes = jax.grad(lambda states: linear(x, w, recipe, state=states).sum())(states)
    >>> states = update_delayed(states, amaxes, recipe)
    >>> float(states.weight.scale), float(states.activation.amax_history[1])
    (64.0, 2.0)

    Sources: arXiv:2209.05433; TransformerEngine (`DelayedScaling`).
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"update_delayed: recipe ({recipe!r}) is not a DelayedScaling; give that of the linear layers")
    structures: list[Any] = [jax.tree.structure(tree) for tree in (states, amaxes)]
    if structures[0] != structures[1]:
        raise ValueError("update_delayed: amaxes do not have the structure of states; give the gradient by states")
    linears, structure = jax.tree.flatten(states, is_leaf=_is_linear)
    if not all(map(_is_linear, linears)):
        raise ValueError("update_delayed: states hold more than LinearStates; give those alone")
    seen = jax.tree.leaves(amaxes, is_leaf=_is_linear)
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    by_element: dict[str, list[Role]] = {}
    for role in Role:
        by_element.setdefault(recipe.format(role).element.name, []).append(role)
    new: dict[Role, list[TensorState]] = {}
    for element, roles in by_element.items():
        of_roles = [
            [(getattr(s, r.value), getattr(a, r.value)) for s, a in zip(linears, seen, strict=True)] for r in roles
        ]
        updated = _update([pair for pairs in of_roles for pair in pairs], element, recipe, axes)
        new |= {role: updated[i * len(linears) : (i + 1) * len(linears)] for i, role in enumerate(roles)}
    merged = [LinearState(**{role.value: new[role][i] for role in Role}) for i in range(len(linears))]
    return jax.tree.unflatten(structure, merged)


def merge_observed(a: Any, b: Any) -> Any:
    """The amaxes of two microbatches together: the larger of each, NaN above all. Never add them.

    Args:
      a, b: gradients with respect to states, as for `update_delayed`. Zeros, as of `jax.tree.map(jnp.zeros_like,
        states)`, are a start for a loop.

    Returns:
      Such a gradient.

    >>> recipe = DelayedScaling(history=2)
    >>> states = init_delayed(recipe)
    >>> zeros = jax.tree.map(jnp.zeros_like, states)
    >>> merge_observed(zeros, zeros).weight.scale
    Array(0., dtype=float32)
    """
    return jax.tree.map(_larger, a, b, is_leaf=lambda node: isinstance(node, TensorState))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread_states(states: Any, copies: int) -> Any:
    """States for calls of `linear` that share them: one for each, along a new first axis. Amaxes come back merged.

    For a weight that is used twice in a differentiated function, or a loop over microbatches inside it: without this,
    JAX would sum their amaxes, and `update_delayed` refuse them.

    Args:
      states: a pytree with `LinearState`s.
      copies: how many.

    >>> states = spread_states(init_delayed(DelayedScaling()), 3)
    >>> states.weight.scale.shape
    (3,)
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), states)


def _merged_copies(copies: int, _: None, amaxes: Any) -> tuple[Any]:
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], amaxes) for i in range(copies)]
    return (functools.reduce(merge_observed, parts),)


spread_states.defvjp(lambda states, copies: (spread_states(states, copies), None), _merged_copies)


def _is_linear(node: Any) -> bool:
    return isinstance(node, LinearState)


def _seal(amax: jax.Array) -> jax.Array:
    """23 bits of a hash of an amax as fp32, which holds them exactly; 0 of 0, so that a zero cotangent is sealed."""
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    mixed = bits * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
    return jnp.where(bits == 0, 0, 1 + (mixed >> 9)).astype(jnp.float32)


def _is_sealed(amax: TensorState) -> jax.Array:
    return amax.amax_history[..., 0] == _seal(amax.scale)


def _larger(a: TensorState, b: TensorState) -> TensorState:
    first = as_bits(a.scale) >= as_bits(b.scale)
    sealed = _is_sealed(a) & _is_sealed(b)
    amax = jnp.where(first, a.scale, b.scale)
    history = jnp.where(first[..., None], a.amax_history, b.amax_history)
    # What is broken stays broken.
    return TensorState(jnp.where(sealed, amax, jnp.nan), jnp.where(sealed[..., None], history, -1.0))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _updated(
    pairs: list[tuple[TensorState, TensorState]], element: str, recipe: DelayedScaling, axes: tuple[str, ...]
) -> tuple[list[TensorState], jax.Array]:
    """The new states, and whether each amax was sealed."""
    length = recipe.history
    scale = jnp.concatenate(vary_alike(*(state.scale.reshape(-1) for state, _ in pairs)))
    history = jnp.concatenate(vary_alike(*(state.amax_history.reshape(-1, length) for state, _ in pairs)))
    amax = jnp.concatenate(vary_alike(*(amax.scale.reshape(-1) for _, amax in pairs)))
    sealed = jnp.concatenate(vary_alike(*(_is_sealed(amax).reshape(-1) for _, amax in pairs)))
    # A mark that no amax has, and that an integer maximum keeps.
    marked = jnp.where(sealed, as_bits(amax), np.int32(0x7FFFFFFF))
    marked = lax.pmax(marked, axes) if axes else marked
    sealed = marked != np.int32(0x7FFFFFFF)
    history, scale, _ = ops.update_delayed_scale(
        as_float(marked),
        history,
        scale,
        element=element,
        margin=recipe.margin,
        most_recent=recipe.algorithm == "most_recent",
    )
    scale = jnp.where(sealed, scale, jnp.nan)
    sizes = np.cumsum([state.scale.size for state, _ in pairs])[:-1]
    parts = zip(jnp.split(scale, sizes), jnp.split(history, sizes), strict=True)
    states = [
        TensorState(s.reshape(state.scale.shape), h.reshape(state.amax_history.shape))
        for (state, _), (s, h) in zip(pairs, parts, strict=True)
    ]
    return states, jnp.all(sealed)


def _update(
    pairs: list[tuple[TensorState, TensorState]], element: str, recipe: DelayedScaling, axes: tuple[str, ...]
) -> list[TensorState]:
    if not pairs:
        return []
    states: list[TensorState]
    states, sealed = _updated(pairs, element, recipe, axes)
    if not isinstance(sealed, jax.core.Tracer) and not sealed:
        raise ValueError(
            "update_delayed: amaxes are not as linear gave them, but summed, averaged, scaled or rounded; "
            "merge those of microbatches with merge_observed, and give calls that share a state copies by spread_states"
        )
    return states
