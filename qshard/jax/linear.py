"""`linear`: three quantized GEMMs, with a weight that FSDP or ZeRO may have cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard.formats import Usage
from qshard.jax.arguments import as_axes, as_names, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax.array import QuantizedArray
from qshard.jax.cuts import AxisName, Cut, Spec, cuts_rows, matrix_of, mesh_of, shaped, vary_alike
from qshard.jax.delayed import LinearState, TensorState, check_shared, observe
from qshard.jax.folding import folding
from qshard.jax.gather import CodedWeight, CutWeight, Shards, cut_of, not_before
from qshard.jax.gemm import gemm, row_product, stored_for
from qshard.jax.ops import names_of
from qshard.jax.primary import PrimaryWeight, opened
from qshard.jax.quantize import WeightScales, as_scales, quantized
from qshard.jax.words import Seed, seed_words, words_of
from qshard.layout import source
from qshard.names import seed_missing, shown
from qshard.recipes import ROLE_SEEDS, DelayedScaling, Recipe, RecipeLike, Role, as_recipe, check_weight_format

WeightLayout = Literal["NK", "KN"]
"""How a weight lies in memory. "NK": `[N, K]`, as in PyTorch and equinox; "KN": `[K, N]`, as in flax."""


@dataclass(frozen=True, kw_only=True)
class _Config:
    """What is static in a call of `linear`.

    Attributes:
      op: who is called, for errors.
      cut: how the weight is cut, if it is not codes yet.
      gathers: whether what one device has of its codes must be gathered.
      learns: whether it has a gradient.
      x_type, w_type: of the gradients, on Explicit meshes.
      axes: in `shard_map`, the mesh axes along which leading axes of x are cut.
      rows: which of them cut which axis; None: all cut the first.
      layout: of w, its gradient and its codes.
    """

    op: str
    recipe: Recipe
    shards: Shards
    cut: Cut
    gathers: bool
    learns: bool
    w_type: NamedSharding | None
    x_type: NamedSharding | None = None
    axes: tuple[str, ...] = ()
    rows: PartitionSpec | None = None
    reshard_after_forward: bool = True
    out_sharding: Spec = None
    layout: WeightLayout = "NK"

    @property
    def contracted(self) -> Usage:
        """The plane of w, as it lies, that forward contracts K of."""
        return Usage.ROWWISE if self.layout == "NK" else Usage.COLUMNWISE

    @property
    def contracted_back(self) -> Usage:
        """The plane of w, as it lies, that backward contracts N of."""
        return Usage.COLUMNWISE if self.layout == "NK" else Usage.ROWWISE

    def stored(self, usage: Usage) -> Usage:
        """The plane of w to quantize, gather and keep for one usage.

        Where both planes hold the same numbers that is the rowwise one, whose shards arrive in order where w is cut by
        rows. Those of a transposed plane would arrive as stripes, to be moved once more; a transpose of the gathered
        codes reads and writes each byte once. It is made in backward for `[N, K]`, and in forward for `[K, N]`.
        """
        return source(self.recipe.weight, usage)


class _Given(NamedTuple):
    scales: WeightScales | None
    seed: jax.Array | None
    state: LinearState | None
    weight_amax: jax.Array | None = None  # Of a primary weight, in delayed scaling.


class _Kept(NamedTuple):
    """What backward needs of forward.

    Attributes:
      x, w: planes that its GEMMs read, or what the codes of the whole w are gathered from.
      amaxes: of x and w, in delayed scaling, for the cotangent of the state.
    """

    x: QuantizedArray
    w: Any
    given: _Given
    amaxes: tuple[jax.Array | None, jax.Array | None]


def linear(
    x: jax.Array,
    w: jax.Array | QuantizedArray | PrimaryWeight | CodedWeight,
    recipe: RecipeLike,
    *,
    weight_layout: WeightLayout = "NK",
    weight_spec: Spec = None,
    gather_axis: str | Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    weight_scales: WeightScales | None = None,
    axis_name: AxisName | PartitionSpec = None,
    out_sharding: Spec = None,
    vmap_as_rows: bool = False,
    seed: Seed = None,
    state: LinearState | None = None,
) -> jax.Array:
    """`y = x @ w.T` in the formats of a recipe, differentiable.

    With Q the cast by role: `y = Q(x) @ Q(w).T`, `dx = Q(dy) @ Q(w)`, `dw = Q(dy).T @ Q(x)`, where blocks run along
    the axis that each contracts, and a random Hadamard transform of both `dy` and `x` leaves `dw` what it is. Products
    are accumulated in fp32. Codes of formats with one scale are multiplied as they are; those of blocks as bfloat16.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      w: of such a dtype, `[N, K]`; fp32 master weights may go in as they are. Or codes of the recipe's format for
        weights: a `QuantizedArray`, which is frozen; a `PrimaryWeight`, which `value_and_grad` differentiates; or a
        `CodedWeight`, which says where its gradient goes.
      recipe: the format of each role, or the name of a recipe, such as "MXFP8".
      weight_layout: "NK", or "KN" for a `w` of `[K, N]`, which flax has: `y = x @ w`, in the bits of `[N, K]`, and no
        slower. Codes of it lie as it does.
      weight_spec: how `w` is cut, and its gradient is to be. Types of Explicit meshes say it. In `shard_map`, by rows
        along `gather_axis` if not given; one scale serves all that the mesh axes named here cut.
      gather_axis: the mesh axis along which FSDP has cut `w`, or several: shards are quantized, then their codes
        gathered.
      reshard_after_forward: gather the codes of `w` again in the backward pass, and keep only the shard's until then.
        False keeps the gathered ones: under `jax.checkpoint` that costs nothing and saves a gather, as recomputing
        gathers them anyway.
      weight_scales: of `w`, from `compute_scales`; without it, this call reduces the amaxes of `w`.
      axis_name: in `shard_map`, mesh axes along which leading axes of `x` are cut: one scale then serves all of it, and
        shards draw the random numbers of the whole, as if all cut the first axis. `P("data", "seq")` says which axis
        each cuts. Without it, each device has a scale of its own, which costs no communication and makes the result
        depend on how `x` is cut. Blocks end where a shard ends, either way. With `check_vma=False` it also says which
        devices share a `state`, and is required with one; `()` is none.
      out_sharding: of the result, on Explicit meshes where `x` and `w` leave it open: K is cut.
      vmap_as_rows: what `vmap` over `x` alone adds to it are rows of one matrix, and the result is that of the matrix,
        to the bit: models that are written for one example, as those of equinox, want this. Otherwise each example is
        a tensor of its own, with its own scales and blocks, and `dw` is a sum of as many products.
      seed: of stochastic rounding, which recipes may ask for: an integer, two words (uint32 `[2]`, low first) or a
        `jax.random` key. A new one for each call and step, such as `jax.random.fold_in(key, layer)`: calls with one
        seed draw the same numbers.
      state: of delayed scaling, from `init_delayed` and `update_delayed`. The gradient with respect to it is the amaxes
        of this call, reduced over all shards.

    Returns:
      `[*lead, N]`, of the dtype of `x`.

    Raises:
      TypeError: an operand is not of a float dtype, or another argument not of its type.
      ValueError: shapes do not fit each other or the formats (of MX and NVFP4, all that is contracted must be whole
        blocks: K, and for gradients N; and the product of `lead` where a mesh may cut it, outside of `shard_map`: else
        rows of zeros make up for it); the recipe needs a seed or a state; or `gather_axis` is not in the mesh or
        `weight_spec`.

    Works under `jit` on Auto and Explicit meshes, and in `shard_map`, where `w` is the shard. With `gather_axis`, codes
    of the weight are gathered in the forward and again in the backward pass, a byte or half of one an element, with the
    scales that shards do not have in common. The gradient of `w` has its dtype, and is reduce-scattered to
    `weight_spec`.

    Any axes of `x` may be cut, batch and sequence at once: a device multiplies its own rows, and what a product of
    bfloat16 would not move stays, but for amaxes. On Explicit meshes devices share those of blocks that they cut. An
    Auto mesh does not say what it cuts; XLA gathers what it must, if that is not whole blocks of the last leading axis,
    of K and of N.

    >>> import jax.numpy as jnp
    >>> from qshard.recipes import CurrentScaling
    >>> linear(jnp.full((2, 16), 7.0), jnp.full((3, 16), 0.875), CurrentScaling())
    Array([[98., 98., 98.],
           [98., 98., 98.]], dtype=float32)

    Sources: arXiv:2209.05433 (formats by role); arXiv:2509.25149 (NVFP4); PyTorch FSDP2 (`reshard_after_forward`).
    """
    check_array("linear", "x", x)
    check_spec("linear", "out_sharding", out_sharding)
    rows, names = None, axis_name
    if isinstance(axis_name, PartitionSpec):
        rows, names = axis_name, tuple(name for entry in axis_name for name in names_of(entry))
    check_shared("linear", state, names)
    y: jax.Array = _checked_linear(
        x,
        w,
        _given("linear", w, weight_spec, weight_scales, seed, state),
        recipe=as_recipe(recipe, "linear"),  # Before jit, for a name to be the same call as its recipe.
        layout=_as_layout("linear", weight_layout),
        weight_spec=weight_spec,
        gather_axes=as_names("linear", "gather_axis", gather_axis),
        axes=as_axes("linear", names),
        rows=rows,
        reshard_after_forward=reshard_after_forward,
        out_sharding=out_sharding,
        vmap_as_rows=vmap_as_rows,
    )
    return y


def gathered_weight(
    w: jax.Array | QuantizedArray | PrimaryWeight | CodedWeight,
    recipe: RecipeLike,
    *,
    weight_layout: WeightLayout = "NK",
    weight_spec: Spec = None,
    gather_axis: str | Sequence[str] | None = None,
    weight_scales: WeightScales | None = None,
    seed: Seed = None,
    state: LinearState | None = None,
) -> QuantizedArray:
    """The whole weight that `linear` multiplies with in its forward pass, given the same arguments.

    Args:
      w, recipe, weight_layout, weight_spec, gather_axis, weight_scales, seed, state: as for `linear`.

    Returns:
      The plane that is gathered for it, on every device: the rowwise one, unless `w` is `[K, N]` and its format one of
      vectors, which run along K.

    Raises:
      TypeError, ValueError: as `linear` does.

    It is what `linear` itself calls. Where one program calls both, XLA may make one gather of the two. It has no
    gradient.

    >>> from qshard.recipes import CurrentScaling
    >>> gathered_weight(jnp.full((3, 16), 0.875), CurrentScaling()).rowwise.data.shape
    (3, 16)
    """
    recipe = as_recipe(recipe, "gathered_weight")
    w, given = lax.stop_gradient((w, _given("gathered_weight", w, weight_spec, weight_scales, seed, state)))
    axes = as_names("gathered_weight", "gather_axis", gather_axis)
    options = {"recipe": recipe, "weight_spec": weight_spec, "gather_axes": axes}
    whole: QuantizedArray = _checked_weight(w, given, layout=_as_layout("gathered_weight", weight_layout), **options)
    return whole


def _as_layout(op: str, layout: Any) -> WeightLayout:
    if layout not in get_args(WeightLayout):
        raise ValueError(
            f"{op}: weight_layout ({shown(layout)}) is not how w lies; pass 'NK' for [N, K] or 'KN' for [K, N]"
        )
    return cast(WeightLayout, layout)


def _given(op: str, w: Any, weight_spec: Any, weight_scales: Any, seed: Any, state: Any) -> _Given:
    """Checks the types of what `jit` does not take, or would take for something else."""
    if not isinstance(w, QuantizedArray | CodedWeight | PrimaryWeight):
        check_array(op, "w", w)
    check_spec(op, "weight_spec", weight_spec)
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(
            f"{op}: state ({shown(state)}) is not a LinearState; pass the one of init_delayed for this layer"
        )
    return _Given(as_scales(op, "weight_scales", weight_scales), seed_words(op, seed), state)


# Jitted for eager callers, gradients included: one dispatch, and all checks done once for a shape.
@functools.partial(
    jax.jit,
    static_argnames=(
        *("recipe", "layout", "weight_spec", "gather_axes", "axes", "rows"),
        *("reshard_after_forward", "out_sharding", "vmap_as_rows"),
    ),
    inline=True,
)
def _checked_linear(
    x: jax.Array,
    w: Any,
    given: _Given,
    *,
    recipe: Recipe,
    weight_spec: Spec,
    gather_axes: tuple[str, ...],
    vmap_as_rows: bool,
    **options: Any,
) -> jax.Array:
    check_dtype("linear", "x", x)
    check_spec_fits("linear", "axis_name", options["rows"], mesh_of(x, None), x.ndim - 1)
    w, amax = opened(w)
    given = given._replace(weight_amax=amax)
    lead = x.shape[:-1]
    if vmap_as_rows:
        x = matrix_of(x)
    config, weight = _configured(
        "linear", w, given, recipe, weight_spec, gather_axes, x_type=_explicit_type(x), **options
    )
    # In shard_map, an operand that varies over fewer axes is cast to vary out here, where JAX sums its gradient.
    x, *sink = vary_alike(x, *jax.tree.leaves(weight.sink))
    weight = CodedWeight(weight.codes, sink[0] if sink else None, weight.shards)
    if vmap_as_rows:
        y = _folding_linear(config, x, weight, given)
        return shaped(y, (*lead, y.shape[-1]))
    return _linear(config, x, weight, given)


@functools.partial(jax.jit, static_argnames=("recipe", "layout", "weight_spec", "gather_axes"), inline=True)
def _checked_weight(
    w: Any, given: _Given, *, recipe: Recipe, layout: WeightLayout, weight_spec: Spec, gather_axes: tuple[str, ...]
) -> QuantizedArray:
    config, weight = _configured(
        "gathered_weight", opened(w)[0], given, recipe, weight_spec, gather_axes, layout=layout
    )
    usage = config.stored(config.contracted)
    return _whole(config, _codes_of(config, weight, given, usage)[0], usage)


def _configured(
    op: str, w: Any, given: _Given, recipe: Recipe, weight_spec: Spec, gather_axes: tuple[str, ...], **options: Any
) -> tuple[_Config, CodedWeight]:
    """Decides where the weight is of a whole. An array becomes a weight without codes yet, and its own sink."""
    _check_given(op, recipe, given)
    names: dict[str, Any] = {"op": op, "name": "gather_axis", "spec_name": "weight_spec"}
    w_type, gathers, cut = None, bool(gather_axes), Cut()
    if isinstance(w, CodedWeight) and w.shards is not None:
        weight, gathers = w, not isinstance(w.codes, QuantizedArray)
    elif isinstance(w, CodedWeight | QuantizedArray):
        codes, sink = (w.codes, w.sink) if isinstance(w, CodedWeight) else (w, None)
        if gathers:
            cut = cut_of(codes, gather_axes, weight_spec, **names)
        elif sink is not None:
            cut = Cut.along(sink, (), weight_spec, **names)
        weight = CodedWeight(codes, sink, CutWeight(cut, gather_axes))
        w_type = None if sink is None else _explicit_type(sink)
    else:
        if jnp.ndim(w) != 2:
            raise ValueError(f"{op}: w {jnp.shape(w)} does not have two axes; give w as [N, K]")
        check_dtype(op, "w", w)
        check_spec_fits(op, "weight_spec", weight_spec, mesh_of(w, weight_spec), w.ndim)
        cut = Cut.along(w, gather_axes, weight_spec, **names)
        weight, w_type = CodedWeight(None, w, CutWeight(cut, gather_axes)), _explicit_type(w)
    learns = weight.sink is not None
    config = _Config(
        op=op, recipe=recipe, shards=weight.shards, cut=cut, gathers=gathers, learns=learns, w_type=w_type, **options
    )
    return config, weight


def _explicit_type(x: jax.Array) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def _check_given(op: str, recipe: Recipe, given: _Given) -> None:
    """Checks that do not depend on shapes of operands."""
    if given.seed is None and recipe.stochastic:
        raise ValueError(f"{seed_missing(op, type(recipe).__name__)}, such as jax.random.fold_in(key, layer)")
    if recipe.stateful != (given.state is not None) or (given.state and given.scales is not None):
        raise ValueError(
            f"{op}: state ({'given' if given.state else None}) is not what {type(recipe).__name__} takes; pass a state "
            "from init_delayed, and no weight_scales, with DelayedScaling, and none with other recipes"
        )
    for tensor in (given.state.weight, given.state.activation, given.state.gradient) if given.state else ():
        shapes = {"scale": tensor.scale.shape, "amax_history": tensor.amax_history.shape}
        if shapes != recipe.state_shapes:
            raise ValueError(f"{op}: state ({shapes}) is not of shapes {recipe.state_shapes}; pass that of one layer")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(config: _Config, x: jax.Array, w: CodedWeight, given: _Given) -> jax.Array:
    return _forward(config, x, w, given, Usage(0), Usage(0))[0]


def _forward(
    config: _Config, x: jax.Array, w: CodedWeight, given: _Given, x_kept: Usage, w_kept: Usage
) -> tuple[jax.Array, _Kept]:
    read = config.stored(config.contracted)
    xq, x_amax = _quantized(config, x, given, Role.ACTIVATION, Usage.ROWWISE | x_kept)
    wq, w_amax = _codes_of(config, w, given, read | w_kept)
    whole = _whole(config, wq, read)
    if not x.shape or len(whole.axes) != 2 or x.shape[-1] != whole.shape[config.layout.index("K")]:
        axes = ", ".join(config.layout)
        told = ", and say in weight_spec how w is cut" if config.gathers else ""
        raise ValueError(
            f"linear: w {whole.shape} does not fit x {x.shape}; give w as [{axes}] and x as [*lead, K]{told}"
        )
    kept_w = wq  # To keep the whole weights of all layers until backward would undo FSDP.
    if w_kept and config.gathers and not config.reshard_after_forward:
        kept_w = whole if w_kept is read else _whole(config, wq, w_kept)
    y = row_product(xq, whole, config.contracted, x.shape[:-1], precise=False, out_sharding=config.out_sharding)
    given = given._replace(scales=None)
    return y, _Kept(_only(xq, x_kept), _only(kept_w, w_kept), given, (x_amax, w_amax))


def _linear_fwd(config: _Config, x: jax.Array, w: CodedWeight, given: _Given) -> tuple[jax.Array, _Kept]:
    x_kept = stored_for(config.recipe.activation, config.recipe.gradient, Usage.COLUMNWISE)
    return _forward(config, x, w, given, x_kept if config.learns else Usage(0), config.stored(config.contracted_back))


def _linear_bwd(config: _Config, kept: _Kept, dy: jax.Array) -> tuple[jax.Array, CodedWeight, _Given]:
    recipe, xq, wq = config.recipe, kept.x, kept.w
    columns = Usage.COLUMNWISE
    if config.gathers and config.reshard_after_forward:
        # Without the barrier XLA sees one gather where two are written, and keeps its result from forward to backward.
        wq, dy = not_before(wq, dy)
        wq = _whole(config, wq, config.stored(config.contracted_back))
    read = stored_for(recipe.gradient, recipe.weight, Usage.ROWWISE)
    if config.learns:
        read |= stored_for(recipe.gradient, recipe.activation, columns)
    dyq, dy_amax = _quantized(config, dy, kept.given, Role.GRADIENT, read)
    dx = row_product(dyq, wq, config.contracted_back, dy.shape[:-1], precise=True, out_sharding=config.x_type)
    dw = None
    if config.learns:
        pair = (dyq, xq) if config.layout == "NK" else (xq, dyq)
        dw = gemm(pair[0], columns, pair[1], columns, wq.dtype, precise=True, out_sharding=config.w_type)
        dw = config.shards.scatter(dw)
    return dx, CodedWeight(None, dw, config.shards), _Given(None, None, _observed(config, kept, dy_amax))


_linear.defvjp(_linear_fwd, _linear_bwd)
_folding_linear = folding(_linear, _linear_fwd, _linear_bwd)


def _only(codes: Any, usage: Usage) -> Any:
    """The planes of a tensor that are in `usage`. What is no tensor yet stays as it is."""
    if not isinstance(codes, QuantizedArray):
        return codes
    return codes.with_planes({each: plane for each, plane in codes.planes.items() if each in usage})


def _quantized(
    config: _Config, x: jax.Array, given: _Given, role: Role, usage: Usage
) -> tuple[QuantizedArray, jax.Array | None]:
    """The codes of x, w or dy, and, of delayed scaling, the amax of it.

    Those of a matrix with more rows, where the recipe adds some and no mesh may cut them.
    """
    fmt, seed, weight = config.recipe.format(role), given.seed, role is Role.WEIGHT
    scales, margin = given.scales if weight else None, None
    if given.state is not None:
        state: TensorState = getattr(given.state, role.value)
        scales, margin = WeightScales(state.scale), cast(DelayedScaling, config.recipe).margin
    # Blocks of x and dy are those of a shard: what it multiplies is its own.
    cut = config.cut if weight else Cut.of(x, config.axes, config.rows, own_blocks=True)
    if seed is not None and fmt.stochastic:
        seed = seed ^ words_of(ROLE_SEEDS[role]).view(seed.dtype)
    added = config.recipe.added_rows(role, usage, math.prod(x.shape[:-1]))
    if added and cuts_rows(x, config.out_sharding):
        added = 0
    name = {Role.WEIGHT: "w", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}[role]
    turned = weight and config.layout == "KN"
    options: dict[str, Any] = {"margin": margin, "added_rows": added, "apart": not weight, "turned": turned}
    return quantized(x, fmt, usage, cut, scales, seed, op=config.op, name=name, **options)


def _codes_of(config: _Config, w: CodedWeight, given: _Given, usage: Usage) -> tuple[Any, jax.Array | None]:
    if w.codes is not None or w.sink is None:
        return w.codes, given.weight_amax
    return _quantized(config, w.sink, given, Role.WEIGHT, usage)


def _observed(config: _Config, kept: _Kept, dy_amax: jax.Array | None) -> LinearState | None:
    """The cotangent of the state: amaxes, reduced over the shards of each tensor."""
    state, (x_amax, w_amax) = kept.given.state, kept.amaxes
    if state is None or x_amax is None or dy_amax is None:
        return None
    if w_amax is None:  # Of codes that came as such.
        w_amax = jnp.zeros_like(state.weight.observed.amax)
    return LinearState(
        weight=observe(state.weight, w_amax, config.axes),
        activation=observe(state.activation, x_amax, config.axes),
        gradient=observe(state.gradient, dy_amax, config.axes),
    )


def _whole(config: _Config, codes: Any, usage: Usage) -> QuantizedArray:
    """One plane of the whole w, from the codes that one device has."""
    whole: QuantizedArray = config.shards.gather(_only(codes, usage)) if config.gathers else codes
    check_weight_format(config.op, "w", whole.format, config.recipe)
    return whole
