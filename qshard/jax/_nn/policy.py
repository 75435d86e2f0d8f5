"""`Policy`: how the weights of a pytree are cut and multiplied, said once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.layer_recipes import RecipesLike, Rules, check_filter, list_layers
from qshard.formats import FLOATS
from qshard.jax._nn.dot_general import DotGeneral
from qshard.jax._nn.linear import linear
from qshard.jax._ops.mesh import spec_of
from qshard.jax._ops.validation import check_spec, check_spec_fits
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._quantized.primary import PrimaryWeight
from qshard.jax._sharding.inference import Axes, MeshAxisRoles, local_shape, sharding_of

_CODED = (QuantizedArray, CodedWeight, PrimaryWeight)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["name", "dot_general"])
@dataclass(frozen=True, eq=False)
class Weight:
    """A weight that knows its recipe and how it is cut: what a `Policy` puts in place of an array.

    `x @ weight` multiplies with a weight of `[K, N]`, `weight.linear(x)` with one of `[N, K]`, and `weight.einsum` with
    any. `weight @ x` is for layers that are written for one example, as those of equinox: x is a vector, the weight
    `[N, K]`, and what `vmap` adds are rows of one matrix (`vmap_as_rows` of `linear`). Nothing else takes it: it is no
    array, so no product is left out in silence.

    Attributes:
      array: the weight.
      name: where it is in the pytree.
      dot_general: its recipe and options.
    """

    array: jax.Array
    name: str
    dot_general: DotGeneral

    __array_ufunc__ = None  # NumPy leaves `x @ weight` to it.

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
        """`x @ weight.T`, of a weight `[N, K]`, or with `weight_layout="KN"` `x @ weight`; `options` as of `linear`."""
        own = self._own()
        return linear(x, self.array, own.recipe, **(own.options | options))

    def einsum(self, subscripts: str, x: jax.Array, **per_call: Any) -> jax.Array:
        """`einsum(subscripts, x, weight)`; `per_call` as of that: `seed`, `state`, `weight_scales`."""
        return self._own().einsum(subscripts, x, self.array, **per_call)

    def _own(self) -> DotGeneral:
        """Its `DotGeneral`, without axes in front that `scan` or `vmap` have taken off."""
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

    def __getitem__(self, _: Any) -> Any:
        raise TypeError(
            f"Weight: {self.name} {self.shape} is used other than as the weight of a product; leave it out of the "
            "policy"
        )


@dataclass(frozen=True)
class _WeightPlacement:
    shape: tuple[int, ...] | None
    dot_general: DotGeneral

    @property
    def sharding(self) -> NamedSharding | None:
        sharding: NamedSharding | None = self.dot_general.options.get("weight_spec")
        return sharding


class Policy:
    """The recipe of all weights of a pytree, and how each is cut: made once, so that no layer says it again.

    A call makes of the pytree one with a `Weight` in place of each weight, to multiply with. It is for inside of the
    function that is differentiated, so that gradients are those of the arrays:

        policy = Policy.of(params, "MXFP8", gather_axis="fsdp")        # once, from arrays that are sharded

        def loss(params, x):
            weights = policy(params)
            return jnp.mean((jax.nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2)

    What is wrong is an error when the policy is made, or when a call is traced: a weight that is cut along an axis
    without a meaning; a `gather_axis` that cuts nothing; a mesh or a spec that does not fit; a pytree whose weights
    have other names or shapes. How arrays lie is checked where they tell: arrays in hand, types of Explicit meshes, and
    in `shard_map` the shape of shards. Under `jit` on Auto meshes they do not tell; `jax.jit(step,
    in_shardings=policy.shardings(params))` makes JAX check it at each call, or call the policy once outside of `jit`.

    Args:
      recipe: the format of each role, or the name of a recipe. Or a mapping from patterns of names to recipes, such as
        `{"*.experts.*": "BlockScaling", "head": None, "*": "MXFP8"}`: the first pattern that matches the name of a
        weight decides, `*` also matches dots, and None leaves arrays as they are.
      specs: a pytree as the weights: of each a PartitionSpec, or a NamedSharding; None for what is no weight.
      mesh: of the PartitionSpecs; None: that of `jax.set_mesh`.
      gather_axis: the mesh axis along which FSDP has cut weights: their codes are gathered.
      kept_axes: mesh axes along which weights stay cut, as of tensor parallelism.
      options: of `DotGeneral`, for all of them.

    Raises:
      TypeError, ValueError: as above; or a pattern matches no weight, or a weight has no pattern.

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
        gather_axis: Axes = None,
        kept_axes: Axes = None,
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
        self._begin(recipe, given, gather_axis, kept_axes, options)

    @classmethod
    def of(
        cls,
        params: Any,
        recipe: RecipesLike,
        *,
        filter: Callable[[Any, str], bool] | None = None,
        gather_axis: Axes = None,
        kept_axes: Axes = None,
        **options: Any,
    ) -> Policy:
        """The policy of weights as they lie.

        Args:
          params: a pytree of arrays, also of `jax.ShapeDtypeStruct`s with a sharding. Outside of `jit`.
          filter: called with an array and its name, such as "layers.0.up"; those for which it is False are no weights.
            Without it, weights are all of a float dtype and two axes or more. What is indexed, as the table of an
            embedding, is to be left out.
          recipe, gather_axis, kept_axes, options: as of `Policy`.
        """
        check_filter("Policy", filter, "an array and its name")
        given = {}
        for name, leaf in _leaves_by_name(params)[0].items():
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
        policy._begin(recipe, given, gather_axis, kept_axes, options)
        return policy

    def _begin(
        self, recipe: RecipesLike, given: dict[str, Any], gather_axis: Axes, kept_axes: Axes, options: dict[str, Any]
    ) -> None:
        if not given:
            raise ValueError(
                "Policy: params have no weight of two or more axes that filter= selects; pass a pytree that has one"
            )
        rules = Rules.of(recipe, "Policy")
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
        self._places = {
            name: _WeightPlacement(shape, DotGeneral(recipes[name], **options, **placed[name]))
            for name, (shape, _, _) in given.items()
        }

    def __call__(self, params: Any) -> Any:
        """`params`, with a `Weight` in place of each weight."""
        found, structure = _leaves_by_name(params)
        if missing := [name for name in self._places if name not in found]:
            raise ValueError(
                f"Policy: params have no {', '.join(missing[:3])}, which the policy was made for; pass a pytree that "
                "has it, or make a new policy"
            )
        for name, place in self._places.items():
            _check(name, found[name], place)
        made = [
            Weight(leaf, name, self._places[name].dot_general) if name in self._places else leaf
            for name, leaf in found.items()
        ]
        return jax.tree.unflatten(structure, made)

    def shardings(self, params: Any) -> Any:
        """How the weights are to lie, for `in_shardings` of `jax.jit`; None for all else, and for what is not cut."""
        return jax.tree_util.tree_map_with_path(
            lambda path, _: place.sharding if (place := self._places.get(_name(path))) is not None else None, params
        )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _leaves_by_name(params: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by name, and its structure. What is codes already is a leaf, and no weight of a policy."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, _CODED))
    return {_name(path): leaf for path, leaf in leaves}, structure


def _is_matrix(leaf: Any) -> bool:
    if isinstance(leaf, _CODED) or not hasattr(leaf, "dtype"):
        return False
    return str(leaf.dtype) in FLOATS and leaf.ndim > 1


def _check(name: str, array: Any, place: _WeightPlacement) -> None:
    """Raises ValueError where an array tells that it is not what the policy was made for."""
    expected, shape = place.sharding, jnp.shape(array)
    if place.shape is not None:
        whole = place.shape
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
