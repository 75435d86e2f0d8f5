"""`optimizer`: runs an optax optimizer on the float32 masters of primary weights, and casts them to new codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard import layout
from qshard._core.layer_recipes import check_function
from qshard._core.operands import OperandSpec
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.jax._delayed_scaling import LinearState
from qshard.jax._ops.mesh import AxisName, Spec, names_of, spec_of
from qshard.jax._ops.validation import as_axes, check_array, check_dtype, check_spec
from qshard.jax._optim.updates import CodesUpdate
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.primary import PrimaryWeight, is_primary
from qshard.jax._quantized.quantize import quantize, quantize_shard
from qshard.jax._quantized.weight_scales import WeightScales, compute_scales
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe

Specs = Spec | Callable[[str, Any], Spec]


class PrimaryState(NamedTuple):
    """The state of `optimizer`: a pytree of arrays.

    Attributes:
      masters: a tree like the parameters: the float32 values of each primary weight, and None for other parameters.
      inner: the state of the inner optimizer, which sees masters as parameters.
    """

    masters: Any
    inner: Any


@dataclass(frozen=True)
class PrimaryOptimizer:
    """An optimizer of primary weights, from `optimizer`. Static.

    `init` and `update` have the signatures of an optax `GradientTransformation`.

    Attributes:
      inner: the inner optimizer.
      recipe: the recipe. Masters are cast to its weight format.
      filter: whether a parameter is a primary weight, given its path and value.
      spec: the sharding of the weights, or a function that returns it.
      axis_name: in `shard_map`, the mesh axes that shard the weights.
    """

    inner: Any
    recipe: Recipe
    filter: Callable[[str, Any], bool]
    spec: Specs
    axis_name: AxisName

    def init(self, params: Any) -> PrimaryState:
        """Create the state from float parameters. Call `recast` next to quantize them.

        Args:
          params: a tree of float arrays.

        Returns:
          A state with a float32 copy of each primary weight, sharded like it.

        Raises:
          TypeError: a parameter is already quantized, so that its values are gone, or is not an array.
          ValueError: the filter selects a parameter that cannot be quantized.
        """
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_codes)
        masters: list[jax.Array | None] = []
        for path, p in paths:
            name = jax.tree_util.keystr(path)
            if _is_codes(p):
                raise TypeError(
                    f"optimizer: params{name} ({p}) is already quantized, without its master; pass init the float "
                    "weight, or its dequantize() to start from rounded values"
                )
            if not self.filter(name, p):
                masters.append(None)
                continue
            check_array("optimizer", f"params{name}", p)
            check_dtype("optimizer", f"params{name}", p)
            if jnp.ndim(p) < 2:
                raise ValueError(
                    f"optimizer: params{name} {jnp.shape(p)} has fewer than two axes, so it is not a weight [N, K]; "
                    "exclude it with filter="
                )
            masters.append(_copy(p))
        leaves = [p if master is None else master for (_, p), master in zip(paths, masters, strict=True)]
        return PrimaryState(structure.unflatten(masters), self.inner.init(structure.unflatten(leaves)))

    def recast(self, state: PrimaryState, params: Any, *, states: Any = None) -> Any:
        """Return parameters with the codes of the masters.

        Args:
          state: the state with the masters, from `init` or from a checkpoint.
          params: a tree with all other parameters. In the places of primary weights, values or codes are not read.
          states: under `DelayedScaling`, the scales that the next step reads codes with: a tree like `params` with a
            `LinearState` for each primary weight, and anything, such as None, in other places.

        Returns:
          The tree with a `PrimaryWeight` for each master.

        Raises:
          TypeError: `state` is not a PrimaryState, or `states` has no `LinearState` for a primary weight.
          ValueError: `states` is missing under `DelayedScaling`.

        In `shard_map` it is collective: all weights with the same leading axes and `spec` share one max-reduction.
        """
        names, leaves, masters, structure = self._flat(state, params)
        made = iter(self._cast(names, masters, self._scales(structure, masters, states)))
        return structure.unflatten([p if m is None else next(made) for p, m in zip(leaves, masters, strict=True)])

    def update(
        self, grads: Any, state: PrimaryState, params: Any = None, *, states: Any = None, **extra: Any
    ) -> tuple[Any, PrimaryState]:
        """Update the masters, and cast them to new codes.

        Args:
          grads: gradients from `qshard.jax.value_and_grad`.
          state: the state from `init`, or from the last update.
          params: parameters with primary weights.
          states: under `DelayedScaling`, the result of `update_delayed` for this step, as for `recast`.
          extra: passed to the inner optimizer.

        Returns:
          The updates for `optax.apply_updates`, which must not be changed, and the next state. The update of a primary
          weight is a `PrimaryWeight` of `CodesUpdate`s, and sets its codes. Arithmetic on it raises, because codes
          would then differ from masters.

        Raises:
          TypeError: a primary weight in `params` is not quantized yet, or another argument has the wrong type.
          ValueError: `params` is missing, or a gradient does not have the shape of its weight.

        In `shard_map` it is collective, like `recast`.
        """
        if params is None:
            raise ValueError("optimizer: params (None) are required; pass them to update")
        names, leaves, masters, structure = self._flat(state, params)
        given = structure.flatten_up_to(grads)
        for name, p, master, grad in zip(names, leaves, masters, given, strict=True):
            if master is not None and not is_primary(p):
                raise TypeError(
                    f"optimizer: params{name} ({quote(p)}) is not quantized yet; call recast(state, params) first"
                )
            if master is not None and (_is_codes(grad) or jnp.shape(grad) != jnp.shape(master)):
                raise ValueError(
                    f"optimizer: grads{name} ({quote(grad)}) is not the gradient of a weight {master.shape}; use "
                    "qshard.jax.value_and_grad"
                )
        scales = self._scales(structure, masters, states)
        values = structure.unflatten([p if m is None else m for p, m in zip(leaves, masters, strict=True)])
        updates, inner = self.inner.update(structure.unflatten(given), state.inner, values, **extra)
        changes = structure.flatten_up_to(updates)
        masters = [None if m is None else (m + u).astype(m.dtype) for m, u in zip(masters, changes, strict=True)]
        made = iter(self._cast(names, masters, scales))
        changes = [u if m is None else CodesUpdate.of(next(made)) for m, u in zip(masters, changes, strict=True)]
        return structure.unflatten(changes), PrimaryState(structure.unflatten(masters), inner)

    def specs(self, params: Any, mesh: Any = None) -> Any:
        """Return the shardings of parameters with primary weights, for `in_specs` and `out_specs` of `shard_map`.

        Args:
          params: whole parameters, or their shapes and dtypes, as passed to `init`.
          mesh: the mesh of `shard_map`. None: the mesh of the context, or of the NamedShardings of `spec`.

        Returns:
          A tree of `PartitionSpec`s, from `spec`, or by rows over `axis_name`. Scales are sharded if shards have whole
          blocks, and are replicated otherwise.
        """
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        made: list[Any] = []
        for path, p in paths:
            name = jax.tree_util.keystr(path)
            spec = self._spec(name, p)
            whole = spec_of(spec, self.axis_name if jnp.ndim(p) else ())  # type: ignore[arg-type]
            if not self.filter(name, p):
                made.append(whole)
                continue
            where = spec.mesh if isinstance(spec, NamedSharding) else mesh
            where = jax.sharding.get_abstract_mesh() if where is None else where
            entries = (*whole, *[None] * jnp.ndim(p))[: jnp.ndim(p)]
            made.append(_specs_of(jnp.shape(p), self.recipe, entries, where))
        return structure.unflatten(made)

    def _flat(self, state: PrimaryState, params: Any) -> tuple[list[str], list[Any], list[Any], Any]:
        """Return the name, the value and the master (or None) of each parameter, and the structure of the tree.

        A primary weight counts as one parameter.
        """
        if not isinstance(state, PrimaryState):
            raise TypeError(
                f"optimizer: state ({quote(state)}) is not a PrimaryState; pass the result of init or update, and "
                "restore checkpoints into jax.eval_shape(optimizer.init, float_params)"
            )
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_primary)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        masters = structure.flatten_up_to(state.masters)
        # optax.masked and optax.partition replace other parameters by nodes without arrays.
        masters = [m if jax.tree.leaves(m) else None for m in masters]
        return names, [p for _, p in paths], masters, structure

    def _spec(self, name: str, p: Any) -> Spec:
        spec: Spec = self.spec(name, p) if callable(self.spec) else self.spec
        check_spec("optimizer", "spec", spec)
        return spec

    def _scales(self, structure: Any, masters: list[Any], states: Any) -> list[jax.Array] | None:
        """Return the scale of each primary weight under delayed scaling, else None."""
        if not self.recipe.stateful:
            return None
        if states is None:
            raise ValueError(
                "optimizer: DelayedScaling quantizes with the scales in `states`, which is None; pass a tree like "
                "params, with a LinearState for each primary weight"
            )
        of_masters = zip(structure.flatten_up_to(states), masters, strict=True)
        chosen = [state for state, master in of_masters if master is not None]
        if not all(isinstance(state, LinearState) for state in chosen):
            raise TypeError("optimizer: states lack a LinearState for a primary weight; pass a tree like params")
        return [state.weight.scale for state in chosen]

    def _cast(self, names: list[str], masters: list[Any], scales: list[jax.Array] | None) -> list[PrimaryWeight]:
        chosen = [(name, m) for name, m in zip(names, masters, strict=True) if m is not None]
        made: list[PrimaryWeight] = _cast_all(
            [m for _, m in chosen],
            scales,
            recipe=self.recipe,
            specs=tuple(_of_matrix(self._spec(name, m), m.ndim) for name, m in chosen),
            axes=as_axes("optimizer", self.axis_name),
        )
        return made


def optimizer(
    inner: Any,
    recipe: RecipeLike,
    *,
    filter: Callable[[str, Any], bool] | None = None,
    spec: Specs = None,
    axis_name: AxisName = None,
) -> PrimaryOptimizer:
    """Wrap an optax optimizer for primary weights: parameters are codes, and their float32 masters are in its state.

    A step gives the same bits as if the masters were the parameters and each call of `linear` quantized them. But codes
    are computed once a step, for any number of microbatches, and a gather needs neither a cast nor a reduction.

    Args:
      inner: a `GradientTransformation`. It sees masters in place of primary weights, and all other parameters
        unchanged. Put all transforms of gradients and updates here, such as `optax.chain(clip, adamw)`. A transform
        after this one raises, because it would change codes but not masters.
      recipe: the recipe of the calls of `linear`. Masters are cast to its weight format.
      filter: called with the path of a parameter, such as `"['up']['w']"`, and the parameter. Returns whether it is a
        primary weight. None: parameters with two axes or more, so exclude those that `linear` does not read, such as
        embeddings. The last two axes are `[N, K]`; earlier axes stack weights, and each weight has scales of its own.
      spec: the sharding of all weights, or a function with the arguments of `filter` that returns it. On Explicit
        meshes types give it.
      axis_name: in `shard_map`, the mesh axes that shard the weights: by rows, unless `spec` says otherwise.

    Returns:
      An object with `init` and `update`, for optax and for code that takes optax optimizers; with `recast`, which
      converts parameters to primary weights; and with `specs`, for `shard_map`.

    Raises:
      TypeError: `inner` is not such a pair, or another argument has the wrong type.
      ValueError: weights in the recipe's format cannot be gathered as codes.

    Masters and states are sharded like the parameters. State and parameters are pytrees of arrays, which may be donated
    and which orbax saves.

    >>> import optax
    >>> from qshard.jax import linear, value_and_grad
    >>> params, x = {"w": jnp.zeros((32, 32)), "b": jnp.zeros(32)}, jnp.ones((8, 32))
    >>> sgd = optimizer(optax.sgd(1.0), "MXFP8")
    >>> state = sgd.init(params)  # The float32 values are now masters,
    >>> params = sgd.recast(state, params)  # and the parameters are their codes.
    >>> loss = lambda params: jnp.mean((linear(x, params["w"], "MXFP8") + params["b"] - 1) ** 2)
    >>> value, grads = value_and_grad(loss)(params)
    >>> updates, state = sgd.update(grads, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params["w"], float(state.masters["w"][0, 0]), float(params["w"].dequantize()[0, 0]))
    PrimaryWeight(MXFP8_32x32[nonfinite=nan], (32, 32)) 0.0625 0.0625

    Sources: `qshard.torch_bridge.WithMasters`, its counterpart; optax (`GradientTransformation`).
    """
    recipe = as_recipe(recipe, "optimizer")
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(f"optimizer: inner ({quote(inner)}) has no init and update; pass an optax optimizer")
    if filter is not None:
        check_function("optimizer", "filter", filter, "a path and a parameter", "lambda path, p: p.ndim > 1")
    if (refusal := recipe.weight.gather_refusal) is not None:
        raise ValueError(
            f"optimizer: weights cannot be codes of {recipe.weight}: {refusal}; pass a recipe whose weight format has "
            "2-D blocks or a tensor scale"
        )
    if not callable(spec):
        check_spec("optimizer", "spec", spec)
    return PrimaryOptimizer(inner, recipe, filter or (lambda path, p: jnp.ndim(p) > 1), spec, axis_name)


def _is_codes(node: Any) -> bool:
    return isinstance(node, PrimaryWeight | QuantizedArray)


def _copy(p: Any) -> jax.Array:
    """Copy to float32 memory of its own, because both parameters and state may be donated."""
    return jnp.array(p, jnp.float32, copy=True)


def _of_matrix(spec: Spec, ndim: int) -> Spec:
    if spec is None or ndim == 2:
        return spec
    entries = PartitionSpec(*(*spec_of(spec, None), *[None] * ndim)[ndim - 2 : ndim])
    return NamedSharding(spec.mesh, entries) if isinstance(spec, NamedSharding) else entries


# Jitted for eager callers.
@functools.partial(jax.jit, static_argnames=("recipe", "specs", "axes"), inline=True)
def _cast_all(
    masters: list[jax.Array],
    scales: list[jax.Array] | None,
    *,
    recipe: Recipe,
    specs: tuple[Spec, ...],
    axes: tuple[str, ...],
) -> list[PrimaryWeight]:
    fmt, made = recipe.format(Role.WEIGHT), list[Any]([None] * len(masters))
    if recipe.stateful:
        operand = OperandSpec.of(recipe, Role.WEIGHT, Usage.ROWWISE, op="optimizer")

        def delayed(master: jax.Array, scale: jax.Array, *, spec: Spec) -> PrimaryWeight:
            return PrimaryWeight.of(
                *quantize_shard(master, operand, ShardSpec.of(master, axes, spec), WeightScales(scale))
            )

        assert scales is not None
        return [
            _stack(functools.partial(delayed, spec=spec), master.ndim - 2)(master, scale)
            for master, scale, spec in zip(masters, scales, specs, strict=True)
        ]
    kinds: dict[Any, list[int]] = {}  # Weights that share a reduction.
    for i, (master, spec) in enumerate(zip(masters, specs, strict=True)):
        kinds.setdefault((master.shape[:-2], spec), []).append(i)
    for (lead, spec), chosen in kinds.items():

        def cast(*some: jax.Array, spec: Spec = spec) -> list[PrimaryWeight]:
            options: dict[str, Any] = {"axis_name": axes or None, "spec": spec}
            shared = compute_scales(list(some), recipe, **options)
            codes = [quantize(m, fmt, scales=own, **options) for m, own in zip(some, shared, strict=True)]
            return [PrimaryWeight.of(q) for q in codes]

        for i, weight in zip(chosen, _stack(cast, len(lead))(*(masters[i] for i in chosen)), strict=True):
            made[i] = weight
    return made


def _stack(function: Callable[..., Any], axes: int) -> Callable[..., Any]:
    return functools.reduce(lambda inner, _: jax.vmap(inner), range(axes), function)


def _specs_of(shape: layout.Shape, recipe: Recipe, entries: tuple[Any, ...], mesh: Any) -> PrimaryWeight:
    """Return a primary weight with PartitionSpecs in place of arrays."""
    fmt = recipe.format(Role.WEIGHT)
    lead, own = entries[:-2], entries[-2:]
    where = layout.plane(fmt, shape[-2:], Usage.ROWWISE, op="optimizer", name="params")
    scale = PartitionSpec(*lead)
    if not fmt.per_tensor:
        shard_spec = ShardSpec(tuple(names_of(entry) for entry in own), mesh)
        shard = tuple(size // n for size, n in zip(shape[-2:], shard_spec.shards, strict=True))
        if all(
            n == 1 or size % unit == 0
            for n, size, unit in zip(shard_spec.shards, shard, fmt.block_shape(), strict=True)
        ):
            scale = PartitionSpec(*entries)
    whole = PartitionSpec(*lead)
    parts: dict[str, Any] = {
        "data": PartitionSpec(*entries),
        "scale_inv": scale,
        "global_scale_inv": None if where.global_scale_shape is None else whole,
        "amax": whole if recipe.stateful else None,
        "guard": whole,
    }
    return PrimaryWeight(
        **parts,
        format=fmt,
        dtype=jnp.dtype("float32"),
        axes=(None, None),
    )
