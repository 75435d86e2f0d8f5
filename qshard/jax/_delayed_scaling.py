"""Delayed scaling: the state of a `linear`, the amaxes in its cotangent, and the update of a whole model.

Amaxes leave a differentiated function in the cotangent of the state, in the field `observed`; the other fields of the
cotangent are zeros, and `observed` is zeros in the state itself. Cotangents get summed: by JAX if one state serves two
calls, by users over microbatches. A sum of amaxes is not an amax, so each amax has a *seal*, a hash of its bits. A sum,
mean or multiple of sealed amaxes has a wrong seal, unless it leaves the amax unchanged, as adding a zero does.
`update_delayed` raises on a wrong seal; `merge_observed` and `spread_states` take maxima, with correct seals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from qshard._core.validation import quote
from qshard.jax._ops import bind as ops
from qshard.jax._ops.amaxes import as_bits, as_float, max_over
from qshard.jax._ops.mesh import AxisName, types_tell
from qshard.jax._ops.validation import as_axes
from qshard.jax._sharding import partitionable_ops
from qshard.jax._sharding.vmap_rows import refuse
from qshard.recipes import DelayedScaling, RecipeLike, Role, as_delayed


@functools.partial(jax.tree_util.register_dataclass, data_fields=["amax", "seal"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class Observed:
    """The amax of one tensor in one step, with its seal. Zeros in a state; the amax is in the cotangent.

    Attributes:
      amax: float32 `[]`, or with the leading axes of the state.
      seal: float32, same shape: a hash of the bits of `amax`; 0 for an amax of 0.
    """

    amax: jax.Array
    seal: jax.Array

    @property
    def is_sealed(self) -> jax.Array:
        return self.seal == _hash(self.amax)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scale", "amax_history", "observed"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class TensorState:
    """Scale and amax history of one tensor.

    Attributes:
      scale: float32 `[]`. 0 before the first update: the tensor is then scaled by its own amax.
      amax_history: float32 `[recipe.history]`, the oldest first.
      observed: zeros in the state. In the gradient with respect to the state, the amax of the step; the other fields
        are zeros there.
    """

    scale: jax.Array
    amax_history: jax.Array
    observed: Observed


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "activation", "gradient"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class LinearState:
    """The delayed scaling state of one `linear`: a `TensorState` for each role."""

    weight: TensorState
    activation: TensorState
    gradient: TensorState


def init_delayed(recipe: RecipeLike, shape: Sequence[int] = ()) -> LinearState:
    """Create the delayed scaling state of a `linear`, with scales and histories of 0.

    A scale of 0 means "no history": until the first update, each tensor is scaled by its own amax, as in current
    scaling, less the margin.

    Args:
      recipe: a `DelayedScaling`, or its name. It gives the length of the history.
      shape: leading axes of every array, such as `(layers,)` for `lax.scan` over layers.

    Returns:
      A `LinearState` of float32 zeros: scales of `shape`, histories of `(*shape, recipe.history)`.

    Raises:
      TypeError: `recipe` is not a `DelayedScaling`, or `shape` is not a tuple.
      ValueError: no recipe has this name.

    >>> init_delayed(DelayedScaling(history=4), shape=(12,)).weight.amax_history.shape
    (12, 4)
    """
    recipe = as_delayed(recipe, "init_delayed")
    if not isinstance(shape, tuple | list):
        raise TypeError(f"init_delayed: shape ({quote(shape)}) is not a tuple; pass one, such as (layers,)")
    shapes = {name: (*shape, *own) for name, own in recipe.state_shapes.items()}

    def tensor() -> TensorState:
        scale, history = jnp.zeros(shapes["scale"], jnp.float32), jnp.zeros(shapes["amax_history"], jnp.float32)
        return TensorState(scale, history, Observed(jnp.zeros_like(scale), jnp.zeros_like(scale)))

    return LinearState(tensor(), tensor(), tensor())


def check_shared(op: str, axis_name: Any, name: str = "state", known: tuple[str, ...] = ()) -> None:
    """Raise ValueError if it is unknown which devices share a state or a probe.

    Types under `shard_map(check_vma=False)` do not show it, so `axis_name` is required there, unless all mesh axes are
    `known`. Without it, the amax of one device would be returned as the amax of all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in mesh.manual_axes if mesh.shape[axis] > 1 and axis not in known)
    if axis_name is not None or types_tell(axes):
        return
    raise ValueError(
        f"{op}: check_vma=False hides which devices share {name}; pass as axis_name the axes of {axes} that shard x, w "
        f"or dy, pass () for one {name} per device, or leave check_vma on"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def require_gradient(op: str, w: jax.Array, state: LinearState) -> tuple[jax.Array, LinearState]:
    """Return `w` and `state`. Raise ValueError at lowering if only `w` is differentiated.

    Without the gradient with respect to `state` no amaxes are returned, and every step would scale by its own amaxes,
    as current scaling does. Frozen weights need no amaxes.
    """
    return w, state


def _require_gradient_fwd(op: str, w: Any, state: Any) -> tuple[Any, None]:
    is_input = _is(CustomVJPPrimal)
    inputs = [jax.tree.leaves(tree, is_leaf=is_input) for tree in (w, state)]
    learns, observes = (any(each.perturbed for each in leaves) for leaves in inputs)
    w, state = jax.tree.map(lambda leaf: leaf.value, (w, state), is_leaf=is_input)
    if learns and not observes:
        error = ValueError(
            f"{op}: state is not differentiated, but its gradient is what brings the new amaxes; differentiate it too "
            "(nnx: wrt=nnx.DiffState(0, nnx.Any(nnx.Param, ScalingState))), and call update_delayed"
        )
        w, state = refuse((w, state), error)  # Both: the gradient of w may not read w, but it reads scales.
    return (w, state), None


def _require_gradient_bwd(op: str, _: None, gradients: tuple[Any, Any]) -> tuple[Any, Any]:
    is_zero = _is(SymbolicZero)
    made: tuple[Any, Any] = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if is_zero(leaf) else leaf, gradients, is_leaf=is_zero
    )
    return made


require_gradient.defvjp(_require_gradient_fwd, _require_gradient_bwd, symbolic_zeros=True)


def observe(state: TensorState, amax: jax.Array, axes: tuple[str, ...] = ()) -> TensorState:
    """Compute the cotangent of `state` that carries `amax`, reduced over the devices that share the state.

    Types give these devices: the mesh axes over which the amax varies and the state does not. With `check_vma=False`,
    `axes` gives them.
    """
    own, shared = (jax.typeof(a).manual_axis_type.varying for a in (amax, state.scale))
    amax = max_over(tuple(sorted(own - shared)) if types_tell() else axes)(amax)
    seen = Observed(amax, _hash(amax))
    return TensorState(jnp.zeros_like(state.scale), jnp.zeros_like(state.amax_history), seen)


def observe_all(
    state: LinearState,
    weight: jax.Array | None,
    activation: jax.Array | None,
    gradient: jax.Array | None,
    axes: tuple[str, ...],
) -> LinearState:
    """Compute the cotangent of `state` that carries three amaxes; None for a weight that was passed as codes."""
    assert activation is not None
    assert gradient is not None
    if weight is None:
        weight = jnp.zeros_like(state.weight.observed.amax)
    return LinearState(
        weight=observe(state.weight, weight, axes),
        activation=observe(state.activation, activation, axes),
        gradient=observe(state.gradient, gradient, axes),
    )


def update_delayed(states: Any, amaxes: Any, recipe: DelayedScaling | str, *, axis_name: AxisName = None) -> Any:
    """Compute the delayed scaling states of the next step. One kernel call updates all tensors of an element format.

    An amax of 0 leaves the history and scale of its tensor unchanged. Any other amax replaces the oldest one of the
    history, and `scale = element.max * 2**-margin / max(history)`, or `/ amax` with `algorithm="most_recent"`. A scale
    that would be infinite or NaN keeps its old value.

    Args:
      states: a pytree of `LinearState`s.
      amaxes: the gradient with respect to `states`, of one step or merged with `merge_observed`.
      recipe: the `DelayedScaling` that the calls of `linear` had, or its name.
      axis_name: in `shard_map`, mesh axes over which to reduce amaxes, in one all-reduce. Needed only if states vary
        over them: `linear` reduces over the devices that share a state.

    Returns:
      `states` for the next step.

    Raises:
      TypeError: `recipe` is not a `DelayedScaling`.
      ValueError: the trees differ, the history has another length, or an amax was summed, averaged, scaled or rounded.
        Under `jit` the latter cannot raise: the scale becomes NaN, and so does all that it scales.

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
    recipe, axes = as_delayed(recipe, "update_delayed"), as_axes("update_delayed", axis_name)
    structures: list[Any] = [jax.tree.structure(tree) for tree in (states, amaxes)]
    if structures[0] != structures[1]:
        raise ValueError(
            "update_delayed: amaxes do not have the structure of states; pass the gradient with respect to states"
        )
    if not all(isinstance(leaf, LinearState) for leaf in jax.tree.leaves(states, is_leaf=_is(LinearState))):
        raise ValueError("update_delayed: states has leaves that are not LinearStates; pass LinearStates only")
    tensors, structure = jax.tree.flatten(states, is_leaf=_is(TensorState))
    for length in {tensor.amax_history.shape[-1] for tensor in tensors} - {recipe.history}:
        raise ValueError(
            f"update_delayed: states (history of {length}) do not match the recipe (history={recipe.history}); pass "
            "the recipe given to init_delayed"
        )
    seen = [tensor.observed for tensor in jax.tree.leaves(amaxes, is_leaf=_is(TensorState))]
    # The tensors of a LinearState are in the order of `Role`.
    elements = [recipe.format(role).element.name for role in Role] * (len(tensors) // len(Role))
    new: dict[int, TensorState] = {}
    for element in dict.fromkeys(elements):
        chosen = [i for i, each in enumerate(elements) if each == element]
        pairs = [(tensors[i], seen[i]) for i in chosen]
        states, sealed = _update(pairs, element, recipe, axes)
        if not isinstance(sealed, jax.core.Tracer) and not sealed:
            raise ValueError(
                "update_delayed: amaxes were summed, averaged, scaled or rounded; merge microbatches with "
                "merge_observed, and copy a state that several calls share with spread_states"
            )
        new |= zip(chosen, states, strict=True)
    return jax.tree.unflatten(structure, [new[i] for i in range(len(tensors))])


def merge_observed(a: Any, b: Any) -> Any:
    """Merge the amaxes of two microbatches: the elementwise maximum, where NaN wins. Never add them.

    Args:
      a: a gradient with respect to states. `jax.tree.map(jnp.zeros_like, states)` starts a loop.
      b: another gradient with respect to the same states.

    Returns:
      A gradient of the same structure, for `update_delayed`. The amax is NaN if a seal of `a` or `b` is wrong.

    Elementwise, so any sharding is kept.

    >>> recipe = DelayedScaling(history=2)
    >>> states = init_delayed(recipe)
    >>> zeros = jax.tree.map(jnp.zeros_like, states)
    >>> merge_observed(zeros, zeros).weight.observed.amax
    Array(0., dtype=float32)
    """
    return jax.tree.map(_larger, a, b, is_leaf=_is(Observed))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread_states(states: Any, copies: int) -> Any:
    """Copy states along a new first axis, one copy per call of `linear`. The gradient merges the amaxes of all copies.

    Use it if a weight is used twice in a differentiated function, or in a loop over microbatches inside of it. JAX
    would sum the amaxes of calls that share a state, and `update_delayed` would raise.

    Args:
      states: a pytree of `LinearState`s.
      copies: the number of copies.

    Returns:
      `states` with a new leading axis of size `copies` on every array.

    >>> states = spread_states(init_delayed(DelayedScaling()), 3)
    >>> states.weight.scale.shape
    (3,)
    """
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (copies, *leaf.shape)), states)


def _merge_copies(copies: int, _: None, amaxes: Any) -> tuple[Any]:
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], amaxes) for i in range(copies)]
    return (functools.reduce(merge_observed, parts),)


spread_states.defvjp(lambda states, copies: (spread_states(states, copies), None), _merge_copies)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, kind)


def _hash(amax: jax.Array) -> jax.Array:
    """Hash the bits of an amax to 23 bits, exact as float32. 0 hashes to 0, so that a zero cotangent is sealed."""
    bits = lax.bitcast_convert_type(amax, jnp.uint32)
    mixed = bits * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA77)
    return jnp.where(bits == 0, 0, 1 + (mixed >> 9)).astype(jnp.float32)


def _larger(a: Any, b: Any) -> Any:
    if not isinstance(a, Observed):
        return a  # A scale or a history: zeros in a gradient.
    first = as_bits(a.amax) >= as_bits(b.amax)
    larger = Observed(jnp.where(first, a.amax, b.amax), jnp.where(first, a.seal, b.seal))
    # A wrong seal must stay wrong.
    sealed = a.is_sealed & b.is_sealed
    return Observed(jnp.where(sealed, larger.amax, jnp.nan), jnp.where(sealed, larger.seal, -1.0))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _update(
    pairs: list[tuple[TensorState, Observed]], element: str, recipe: DelayedScaling, axes: tuple[str, ...]
) -> tuple[list[TensorState], jax.Array]:
    """Update states of one element format. Also return whether all amaxes are sealed."""

    def joined(arrays: Iterable[jax.Array], *axes: int) -> jax.Array:
        return partitionable_ops.concatenate([array.reshape(-1, *axes) for array in arrays])

    scale = joined(state.scale for state, _ in pairs)
    history = joined((state.amax_history for state, _ in pairs), recipe.history)
    amax = joined(seen.amax for _, seen in pairs)
    sealed = joined(seen.is_sealed for _, seen in pairs)
    # The bits of a NaN that no amax has. As the largest integer, they survive the maximum over devices.
    broken = np.int32(0x7FFFFFFF)
    amax = max_over(axes)(as_float(jnp.where(sealed, as_bits(amax), broken)))
    sealed = as_bits(amax) != broken
    most_recent = recipe.algorithm == "most_recent"
    history, scale, _ = ops.update_delayed_scale(
        amax, history, scale, element=element, margin=recipe.margin, most_recent=most_recent
    )
    scale = jnp.where(sealed, scale, jnp.nan)
    sizes = np.cumsum([state.scale.size for state, _ in pairs])[:-1]
    parts = zip(jnp.split(scale, sizes), jnp.split(history, sizes), strict=True)
    states = [
        TensorState(s.reshape(state.scale.shape), h.reshape(state.amax_history.shape), state.observed)
        for (state, _), (s, h) in zip(pairs, parts, strict=True)
    ]
    return states, jnp.all(sealed)
