"""`Policy`: the recipe and the sharding of every weight of a pytree, given once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.layer_recipes import RecipesLike, Rules, check_function, list_layers
from qshard.formats import FLOATS
from qshard.jax._nn.dot_general import DotGeneral
from qshard.jax._nn.linear import linear
from qshard.jax._ops.mesh import AxisName, spec_of
from qshard.jax._ops.validation import check_spec, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._quantized.operators import NoArithmetic
from qshard.jax._quantized.primary import PrimaryWeight
from qshard.jax._sharding.inference import MeshAxisRoles, local_shape, sharding_of
from qshard.recipes import Recipe

_CODED = (QuantizedArray, CodedWeight, PrimaryWeight)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["name", "dot_general"])
@dataclass(frozen=True, eq=False)
class Weight(NoArithmetic):
    """A weight with its recipe and sharding, which a `Policy` puts in place of an array.

    `x @ weight` multiplies by a weight `[K, N]`, `weight.linear(x)` by one of `[N, K]`, and `weight.einsum` by any.
    `weight @ x` is for layers written for one example, as in equinox: x is a vector, the weight `[N, K]`, and `vmap`
    adds rows of one matrix (`vmap_as_rows` of `linear`). A `Weight` is not an array, so other operations raise instead
    of leaving a product unquantized.

    Attributes:
      array: the weight.
      name: its path in the pytree.
      dot_general: its recipe and options.
    """

    array: jax.Array
    name: str
    dot_general: DotGeneral

    @property
    def T(self) -> Any:
        raise AttributeError(f"Weight: {self.name} {self.shape} has no T; for x @ w.T write weight.linear(x)")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def __matmul__(self, x: jax.Array) -> jax.Array:
        if self.ndim != 2 or jnp.ndim(x) != 1:
            raise ValueError(
                f"Weight: {self.name} {self.shape} @ x {jnp.shape(x)} is not a matrix [N, K] and a vector; write "
                "weight.linear(x) for rows of x"
            )
        return self.linear(x, vmap_as_rows=True)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        if self.ndim != 2:
            raise ValueError(f"Weight: {self.name} {self.shape} is not a matrix [K, N]; call weight.einsum")
        return self.linear(x, weight_layout="KN")

    def linear(self, x: jax.Array, **options: Any) -> jax.Array:
        """Compute `x @ weight.T` for a weight `[N, K]`, or `x @ weight` with `weight_layout="KN"`.

        Args:
          x: float32, bfloat16 or float16, `[*lead, K]`.
          options: options of `linear`, which override the policy's options.

        Returns:
          `[*lead, N]` in the dtype of `x`.

        Raises:
          TypeError, ValueError: as for `qshard.jax.linear`.

        >>> params = {"up": jnp.ones((32, 16))}
        >>> weights = Policy.of(params, "CurrentScaling")(params)
        >>> weights["up"].linear(jnp.ones((2, 16))).shape
        (2, 32)
        """
        own = self._own()
        return linear(x, self.array, own.recipe, **(own.options | options))

    def einsum(self, subscripts: str, x: jax.Array, **per_call: Any) -> jax.Array:
        """Compute `einsum(subscripts, x, weight)`.

        Args:
          subscripts: such as "btd,dhk->bthk".
          x: float32, bfloat16 or float16.
          per_call: `seed`, `state` and `weight_scales`.

        Returns:
          The product, in the dtype of `x`.

        Raises:
          TypeError, ValueError: as for `qshard.jax.einsum`.

        >>> params = {"up": jnp.ones((16, 4, 8))}
        >>> weights = Policy.of(params, "CurrentScaling")(params)
        >>> weights["up"].einsum("btd,dhk->bthk", jnp.ones((2, 3, 16))).shape
        (2, 3, 4, 8)
        """
        return self._own().einsum(subscripts, x, self.array, **per_call)

    def _own(self) -> DotGeneral:
        """Its `DotGeneral`, with the sharding of the axes that are left after `scan` or `vmap` removed leading ones."""
        spec: Any = self.dot_general.options.get("weight_spec")
        taken = 0 if spec is None else len(spec.spec) - self.ndim
        if taken <= 0:
            return self.dot_general
        if any(entry is not None for entry in spec.spec[:taken]):
            raise ValueError(
                f"Weight: {self.name} {self.shape} has lost stacked axes that are sharded ({spec.spec}); shard the "
                "other axes, so that each device has a shard of every layer"
            )
        return self.dot_general.with_options(weight_spec=NamedSharding(spec.mesh, PartitionSpec(*spec.spec[taken:])))

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"Weight: {self.name} {self.shape} is used other than as the weight of a product; leave it out of the "
            "policy"
        )


class Policy:
    """The recipe of all weights of a pytree and the sharding of each, given once instead of at every layer.

    Calling a policy replaces each weight of a pytree by a `Weight`, to multiply with. Call it inside of the
    differentiated function, so that gradients are with respect to the arrays:

        policy = Policy.of(params, "MXFP8", gather_axis="fsdp")        # once, from sharded arrays

        def loss(params, x):
            weights = policy(params)
            return jnp.mean((jax.nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2)

    Mistakes raise when the policy is created or a call is traced: a weight sharded along an axis without a role, a
    `gather_axis` that shards no weight, a mesh or spec that does not fit, or a pytree with other names or shapes. Calls
    also check the sharding of arrays where it is known: for concrete arrays, by the types of Explicit meshes, and in
    `shard_map` by the shapes of shards. Under `jit` on Auto meshes it is unknown. There, let JAX check each call by
    `jax.jit(step, in_shardings=policy.shardings(params))`, or call the policy once outside of `jit`.

    Args:
      recipe: the recipe, or its name. Or a mapping from patterns of names to recipes, such as
        `{"*.experts.*": "BlockScaling", "layers[-15%:].*": None, "*": "MXFP8"}`, as for `convert`; None leaves arrays
        as they are.
      specs: a pytree like the weights, with a PartitionSpec or NamedSharding for each weight, and None elsewhere.
      mesh: the mesh of the PartitionSpecs; None: the mesh of `jax.set_mesh`.
      gather_axis: the mesh axis along which FSDP shards weights: their codes are gathered.
      kept_axes: mesh axes along which weights stay sharded, as in tensor parallelism.
      options: options of `DotGeneral`, for all weights.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: one of the mistakes above, a pattern without a weight, or a weight without a pattern.

    >>> params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16)), "scale": jnp.ones(16)}
    >>> policy = Policy.of(params, "CurrentScaling")
    >>> weights = policy(params)
    >>> (jnp.ones((2, 16)) @ weights["up"] @ weights["down"] * weights["scale"]).shape
    (2, 16)
    >>> weights["up"].name, type(weights["scale"]).__name__
    ('up', 'ArrayImpl')
    """

    def __init__(
        self,
        recipe: RecipesLike,
        specs: Any,
        *,
        mesh: Any = None,
        gather_axis: AxisName = None,
        kept_axes: AxisName = None,
        **options: Any,
    ) -> None:
        mesh = jax.sharding.get_mesh() if mesh is None else mesh
        given = {}
        leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        for path, spec in leaves:
            name = _name(path)
            check_spec("Policy", f"specs[{name}]", spec)
            on = spec.mesh if isinstance(spec, NamedSharding) else mesh
            check_spec_fits("Policy", f"specs[{name}]", spec, on, len(spec_of(spec, None)))
            given[name] = (None, NamedSharding(on, spec_of(spec, None)), len(spec_of(spec, None)))
        self._begin(recipe, given, given, gather_axis, kept_axes, options)

    @classmethod
    def of(
        cls,
        params: Any,
        recipe: RecipesLike,
        *,
        filter: Callable[[Any, str], bool] | None = None,
        gather_axis: AxisName = None,
        kept_axes: AxisName = None,
        **options: Any,
    ) -> Policy:
        """Create a policy from the shapes and shardings of arrays. Call it outside of `jit`.

        Args:
          params: a pytree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
          recipe: the recipe, its name, or a mapping from patterns, as for `Policy`.
          filter: a function of an array and its name, such as "layers.0.up", that returns False for arrays that are not
            weights. None: every float array with two axes or more is a weight. Leave out arrays that are indexed, such
            as embedding tables.
          gather_axis: the mesh axis along which FSDP shards weights.
          kept_axes: mesh axes along which weights stay sharded.
          options: options of `DotGeneral`.

        Returns:
          The policy.

        Raises:
          TypeError, ValueError: as for `Policy`; or an array is traced, so that its sharding is unknown.
        """
        if filter is not None:
            check_function("Policy", "filter", filter, "an array and its name")
        given = {}
        leaves = _leaves_by_name(params)[0]
        for name, leaf in leaves.items():
            if not _is_matrix(leaf) or (filter is not None and not filter(leaf, name)):
                continue
            if (
                isinstance(leaf, jax.core.Tracer)
                and sharding_of(leaf) is None
                and not jax.typeof(leaf).sharding.mesh.empty
            ):
                raise ValueError(
                    f"Policy: {name} is traced on an Auto mesh, where its sharding is unknown; make the policy outside "
                    "jit, or pass specs"
                )
            given[name] = (tuple(leaf.shape), sharding_of(leaf), leaf.ndim)
        policy = cls.__new__(cls)
        policy._begin(recipe, leaves, given, gather_axis, kept_axes, options)
        return policy

    def _begin(
        self,
        recipe: RecipesLike,
        names: Iterable[str],
        given: dict[str, Any],
        gather_axis: AxisName,
        kept_axes: AxisName,
        options: dict[str, Any],
    ) -> None:
        if not given:
            raise ValueError(
                "Policy: params have no weight of two or more axes that filter= selects; pass a pytree that has one"
            )
        rules = Rules.of(recipe, "Policy", names)
        rules.check_used([(name,) for name in given])
        patterns = {name: rules.pattern_of(name) for name in given}
        if left := [name for name, pattern in patterns.items() if pattern is None]:
            raise ValueError(
                f"Policy: recipe has no pattern for {list_layers(dict.fromkeys(left, 'a weight'))}; add one, such as "
                "'*', with None to leave them unquantized"
            )
        recipes = {name: own for name, each in patterns.items() if (own := rules.recipes[str(each)]) is not None}
        given = {name: given[name] for name in recipes}
        meaning = MeshAxisRoles.of("Policy", gather_axis, kept_axes)
        placed = {name: meaning.options(name, sharding, ndim) for name, (_, sharding, ndim) in given.items()}
        meaning.check_used(placed)
        self._products = {name: DotGeneral(recipes[name], **options, **placed[name]) for name in given}
        self._placed = self._products  # The options of each weight, also when it has no recipe.
        # None, if the policy was made from specs: any shape that the sharding fits.
        self._shapes: dict[str, tuple[int, ...] | None] = {name: shape for name, (shape, _, _) in given.items()}

    def with_recipe(self, recipe: RecipesLike | None) -> Policy:
        """Create a policy with other recipes for the same weights, shardings and options.

        `switch_recipe(policy, recipe)` calls it.

        Args:
          recipe: a recipe for all weights, or its name; None: `params` stay arrays. Or a mapping from patterns of names
            to recipes or None; weights without a pattern keep their recipe.

        Returns:
          The policy.

        Raises:
          TypeError: a recipe has the wrong type.
          ValueError: a pattern matches no weight.

        >>> params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        >>> policy = Policy.of(params, "NVFP4").with_recipe({"up": "MXFP8"})
        >>> weights = policy(params)
        >>> weights["up"].dot_general.recipe, weights["down"].dot_general.recipe
        (MXFP8(), NVFP4())
        """
        rules = Rules.of(recipe, "switch_recipe", self._placed, may_be_none=True)
        rules.check_used([(name,) for name in self._placed])
        policy = copy.copy(self)
        policy._products = {}
        for name, placed in self._placed.items():
            old, pattern = self._products.get(name), rules.pattern_of(name)
            own = (None if old is None else old.recipe) if pattern is None else rules.recipes[pattern]
            if own is not None:
                policy._products[name] = DotGeneral(own, otherwise=placed.otherwise, **placed.options)
        return policy

    def __repr__(self) -> str:
        return f"Policy({self.recipes})"

    @property
    def recipes(self) -> dict[str, Recipe | None]:
        """The recipe of each weight, by name; None if `switch_recipe` has removed it.

        >>> params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
        >>> Policy.of(params, "NVFP4").with_recipe({"down": None}).recipes
        {'down': None, 'up': NVFP4()}
        """
        return {name: None if (own := self._products.get(name)) is None else own.recipe for name in self._placed}

    def __call__(self, params: Any) -> Any:
        """Replace each weight of `params` by a `Weight`.

        Args:
          params: a pytree with the names and shapes that the policy was created for.

        Returns:
          `params`, with a `Weight` in place of each weight.

        Raises:
          ValueError: a weight is missing, or has another shape or sharding.
        """
        found, structure = _leaves_by_name(params)
        if missing := [name for name in self._products if name not in found]:
            raise ValueError(
                f"Policy: params have no {', '.join(missing[:3])}, which the policy was made for; pass a pytree that "
                "has it, or make a new policy"
            )
        for name in self._products:
            _check(name, found[name], self._shapes[name], self._sharding(name))
        made = [
            Weight(leaf, name, self._products[name]) if name in self._products else leaf for name, leaf in found.items()
        ]
        return jax.tree.unflatten(structure, made)

    def shardings(self, params: Any) -> Any:
        """The sharding of each weight, for `in_shardings` of `jax.jit`.

        Args:
          params: a pytree with the names that the policy was created for.

        Returns:
          A pytree of the structure of `params`: a NamedSharding for each sharded weight, None elsewhere.

        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> specs = {"up": PartitionSpec("fsdp"), "scale": None}
        >>> policy = Policy("CurrentScaling", specs, mesh=mesh, gather_axis="fsdp")
        >>> params = {"up": jnp.ones((16, 32)), "scale": jnp.ones(16)}
        >>> shardings = policy.shardings(params)
        >>> tuple(shardings["up"].spec), shardings["scale"]
        (('fsdp',), None)
        """
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self._sharding(name) if (name := _name(path)) in self._products else None, params
        )

    def _sharding(self, name: str) -> NamedSharding | None:
        sharding: NamedSharding | None = self._products[name].options.get("weight_spec")
        return sharding


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves_by_name(params: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by name, and its structure. Quantized weights are leaves."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, _CODED))
    return {_name(path): leaf for path, leaf in leaves}, structure


def _is_matrix(leaf: Any) -> bool:
    if isinstance(leaf, _CODED) or not hasattr(leaf, "dtype"):
        return False
    return str(leaf.dtype) in FLOATS and leaf.ndim > 1


def _check(name: str, array: Any, whole: tuple[int, ...] | None, expected: NamedSharding | None) -> None:
    """Raise ValueError if an array has another shape, or another known sharding, than the policy expects."""
    shape = jnp.shape(array)
    if whole is not None:
        want = whole if expected is None else local_shape(whole, expected)
        if shape != want:
            raise ValueError(
                f"Policy: {name} {shape} does not have the shape {want} that the policy was made for; pass such a "
                "weight, or make a new policy"
            )
    elif expected is not None:
        check_spec_fits("Policy", f"specs[{name}]", expected, expected.mesh, len(shape))
    lies = sharding_of(array)
    if lies is None or lies.mesh.axis_types and jax.sharding.get_abstract_mesh().manual_axes:
        return
    spec = PartitionSpec() if expected is None else expected.spec
    if not NamedSharding(lies.mesh, spec).is_equivalent_to(lies, len(shape)):
        raise ValueError(
            f"Policy: {name} is sharded as {lies.spec}, but the policy was made for {spec}; shard it like that, or "
            "make a new policy"
        )
