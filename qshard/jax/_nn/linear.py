"""`linear`: a linear layer as three quantized GEMMs, with a weight that FSDP or ZeRO may shard.

Arguments are checked here. `operands` finds how the weight is sharded; `linear_vjp` has the passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from qshard._core.operands import two_formats_error
from qshard._core.validation import WeightLayout, as_layout, as_wire_format, quote
from qshard.formats import FORMATS, Format
from qshard.jax import _probes as probes
from qshard.jax._delayed_scaling import LinearState, check_shared, require_gradient
from qshard.jax._nn.linear_parallel import TensorParallelOptions
from qshard.jax._nn.linear_vjp import folding_product, product
from qshard.jax._nn.operands import CallArrays, Config, whole_weight
from qshard.jax._ops.mesh import AxisName, Spec, explicit_sharding, mesh_of, names_of, spec_of, vary_alike
from qshard.jax._ops.validation import (
    Seed,
    as_axes,
    as_float_name,
    as_names,
    as_seed,
    check_array,
    check_dtype,
    check_spec,
    check_spec_fits,
    is_staged,
)
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._quantized.primary import CODED, PrimaryWeight, open_weight
from qshard.jax._quantized.weight_scales import WeightScales, as_scales
from qshard.jax._sharding.shard_spec import matrix_of, unfold
from qshard.recipes import Recipe, RecipeLike, as_recipe

_Arguments = ParamSpec("_Arguments")


def _refuse_bias(function: Callable[_Arguments, jax.Array]) -> Callable[_Arguments, jax.Array]:
    """Add an error for calls in PyTorch's argument order, (x, weight, bias, recipe)."""

    @functools.wraps(function)
    def checked(*args: _Arguments.args, **options: _Arguments.kwargs) -> jax.Array:
        if "bias" in options or (len(args) == 3 and "recipe" in options) or len(args) > 3:
            bias = options["bias"] if "bias" in options else args[2]
            if bias is None or hasattr(bias, "dtype"):
                raise TypeError(
                    f"linear: bias ({quote(bias)}) is not an argument in JAX; pass linear(x, w, recipe), and add the "
                    "bias to the result"
                )
        return function(*args, **options)

    return checked


@_refuse_bias
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
    local_axes: AxisName = None,
    gather_rows: str | None = None,
    scatter_rows: str | None = None,
    overlap: bool = False,
    out_sharding: Spec = None,
    grad_dtype: Any = None,
    vmap_as_rows: bool = False,
    seed: Seed = None,
    state: LinearState | None = None,
    probe: probes.Probe | None = None,
) -> jax.Array:
    """Compute `y = x @ w.T` with x, w and the gradient of y quantized. Differentiable.

    With Q the cast by role, `y = Q(x) @ Q(w).T`, `dx = Q(dy) @ Q(w)` and `dw = Q(dy).T @ Q(x)`. Blocks run along the
    axis that a product contracts. A random Hadamard transform of both `dy` and `x` cancels in `dw`. Products accumulate
    in fp32. Codes of formats with one scale are multiplied directly. Block formats are dequantized to bfloat16 first,
    unless the GPU has tensor cores for their codes.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      w: `[N, K]` of one of these dtypes; fp32 master weights need no cast. Or codes in the recipe's format for weights:
        a frozen `QuantizedArray`; a `PrimaryWeight`, which `value_and_grad` differentiates; or a `CodedWeight`, which
        says where its gradient goes. A frozen `[N, K]` may have blocks of one row, as engines write them, where the
        recipe has 2-D blocks: `dx` then multiplies its values.
      recipe: the recipe, or its name, such as "MXFP8".
      weight_layout: "NK", or "KN" for a `w` of `[K, N]` as in flax: `y = x @ w`, with the same bits and as many GEMMs
        and gathers. Codes that are passed as `w` have this layout too.
      weight_spec: the sharding of `w` and of its gradient. Explicit meshes do not need it. In `shard_map` the default
        is rows along `gather_axis`, and one scale serves all shards along the mesh axes named here.
      gather_axis: the mesh axis, or axes, along which FSDP shards `w`. Shards are quantized, then their codes gathered.
      reshard_after_forward: True saves the codes of the local shard for backward and gathers them again there. False
        saves the gathered codes: one gather less, more memory. Under `jax.checkpoint` False costs no memory, since the
        recomputed forward pass gathers anyway.
      weight_scales: the scales of `w`, from `compute_scales`. None: this call reduces the amaxes of `w`.
      axis_name: in `shard_map`, the mesh axes along which leading axes of `x` are sharded. One scale then serves all of
        x, and shards draw the random numbers of the whole, as if all of these mesh axes sharded the first axis.
        `P("data", "seq")` says which shards which axis. None: each device has its own scale, which needs no
        communication, and results depend on how `x` is sharded. Blocks end at shard boundaries either way. With
        `check_vma=False` this also says which devices share a `state`, and is required with one; `()` means none.
      local_axes: outside of `shard_map`, mesh axes along which the first axis of `x` is sharded. Each device then has
        its own scale for its rows of x and dy, and all draw the same random numbers, as in `shard_map` without
        `axis_name`. This saves two all-reduces that GEMMs wait for. None: one scale serves all of x.
      gather_rows: in `shard_map`, the mesh axis of tensor and sequence parallelism that shards the rows of `x` and the
        N of `w`. Codes of x are gathered; y has all rows and a shard of N; dx is reduce-scattered. One scale serves all
        of x, w and dy. The axis shards the last leading axis of x, unless a spec in `axis_name` names another. A
        `weight_spec` must name it along N.
      scatter_rows: the reverse, for the next layer: the mesh axis shards the K of `x` and `w`, and the rows of y, which
        is reduce-scattered; codes of dy are gathered. Partial products are sent in the dtype of x, in float32 for
        float16, and added in float32 in a fixed order.
      overlap: with `gather_rows` or `scatter_rows`, send the rows or products of one device while others are
        multiplied. The bits are the same.
      out_sharding: the sharding of y, on Explicit meshes where K is sharded, so that `x` and `w` leave it open.
      grad_dtype: float32 or bfloat16, to compute and reduce-scatter the gradient of `w` in; None: the dtype of `w`. The
        gradient is returned in the dtype of `w`. float32 sends 4 bytes an element. bfloat16 sends 2, and rounds each
        device's gradient and the sums to 8 bits. "MXFP8_E4M3" and "MXFP8_E5M2" send 8.25 bits an element and add in
        float32, in the order of devices, for a `w` with `gather_axis` in `shard_map`. Each device's gradient g is then
        off by at most `max(|g| / 16, amax / 229376)` (E4M3; E5M2: `|g| / 8`), amax of 32 elements, once for each array
        axis that is sharded. Infinities and NaN arrive.
      vmap_as_rows: treat the examples of a `vmap` over `x` alone as rows of one matrix, bit for bit. Use it for models
        written for one example, as in equinox. False: each example is a tensor with its own scales and blocks, and `dw`
        is a sum of as many products. Gradients of `w` for single examples, as in `vmap(grad(f))`, cost a product of all
        rows for each example.
      seed: seed of stochastic rounding: an integer, a uint64 as two uint32 (`[2]`, low first) or a `jax.random` key.
        Pass a new one for each call and step, such as `jax.random.fold_in(key, layer)`: equal seeds draw equal numbers.
      state: the state of delayed scaling, from `init_delayed` and `update_delayed`. The gradient with respect to it is
        the amaxes of this call, reduced over all shards.
      probe: a probe of `init_numerics`, for this call alone. The gradient with respect to it is the statistics of the
        call's operands and of dy, for `numerics_of`. No bit of the result changes.

    Returns:
      `[*lead, N]` in the dtype of `x`. `gather_rows` multiplies the sharded leading axis by the size of the mesh axis,
      `scatter_rows` divides it.

    Raises:
      TypeError: an operand does not have a float dtype, or another argument has the wrong type.
      ValueError: shapes do not match each other or the formats; with `gather_rows` or `scatter_rows`, a device does not
        have whole blocks of rows or columns; the recipe needs a seed or a state; or `gather_axis` is not in the mesh or
        `weight_spec`. MX formats and NVFP4 need whole blocks along K, and along N for gradients. They also need whole
        blocks of rows where a mesh may shard them, outside of `shard_map`; elsewhere rows are padded with zeros.

    Works under `jit` on Auto and Explicit meshes, and in `shard_map`, where `w` is the local shard. With `gather_axis`,
    the weight is gathered as codes in the forward and again in the backward pass: a byte or half a byte an element,
    plus the scales that shards do not share. The gradient of `w` has its dtype, and is reduce-scattered to
    `weight_spec`.

    Any axes of `x` may be sharded, batch and sequence at once. Each device multiplies its own rows, and communicates no
    more than for a bfloat16 product, except for amaxes. On Explicit meshes, devices share the amaxes of partial blocks.
    On Auto meshes only the sharding of K and N is known, from `weight_spec`; XLA gathers operands if shards break
    blocks.

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
    tensor_parallel = None
    if gather_rows is not None or scatter_rows is not None or overlap:
        tensor_parallel = TensorParallelOptions.of("linear", gather_rows, scatter_rows, overlap, vmap_as_rows)
    if state is not None:
        check_shared("linear", names)
    arrays = check_arguments("linear", w, weight_spec, weight_scales, seed, state)
    gather_axes = as_names("linear", "gather_axis", gather_axis)
    staged = is_staged((x, w, arrays))
    if staged:  # No nested jit: it would be lowered separately, and could not share a quantized x with other calls.
        x, w, arrays = jax.tree.map(jnp.asarray, (x, w, arrays))
    if probe is not None:
        apart = local_axes is not None or tensor_parallel is not None or vmap_as_rows
        probes.check_probe("linear", probe, apart)
        check_shared("linear", names, "probe")
        how = probes.ProbeOptions(as_recipe(recipe, "linear", by_product=False), as_axes("linear", names), rows)
        x = jnp.asarray(x)
        if not isinstance(w, CODED):
            whole = gathered_weight(
                w,
                recipe,
                weight_layout=weight_layout,
                weight_spec=weight_spec,
                gather_axis=gather_axes,
                weight_scales=weight_scales,
                seed=seed,
                state=state,
            )
            x = probes.observe_weight(x, w, whole, probe, weight_spec, gather_axes)
        x = probes.observe_activation(how, x, probe, arrays.seed, state)
    wire_dtype, wire_format = _as_wire(grad_dtype)
    call = functools.partial(
        _checked_linear if staged else _jitted_linear,
        recipe=as_recipe(recipe, "linear"),  # Before jit, so that a recipe and its name share a compiled program.
        layout=as_layout("linear", weight_layout),
        gather_axes=gather_axes,
        axes=as_axes("linear", names),
        rows=rows,
        tensor_parallel=tensor_parallel,
        reshard_after_forward=reshard_after_forward,
        out_sharding=out_sharding,
        grad_dtype=wire_dtype,
        grad_format=wire_format,
        vmap_as_rows=vmap_as_rows,
    )
    if local_axes is not None:
        return _in_shard_map(call, x, w, arrays, weight_spec, gather_axes, local_axes)
    y: jax.Array = call(x, w, arrays, weight_spec=weight_spec)
    return y if probe is None else probes.observe_gradient(how, y, probe.gradient, arrays.seed, state)


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
    """Gather the quantized weight that `linear` multiplies with in its forward pass.

    `linear` runs the same code. If one program calls both, XLA may merge the two gathers. Not differentiable.

    Args:
      w: the weight, as for `linear`.
      recipe: the recipe, or its name.
      weight_layout: the layout of `w`, "NK" or "KN".
      weight_spec: the sharding of `w`.
      gather_axis: the mesh axis, or axes, along which FSDP shards `w`.
      weight_scales: the scales of `w`, from `compute_scales`.
      seed: the seed of stochastic rounding.
      state: the state of delayed scaling.

    Returns:
      The gathered weight, with the plane that forward reads: the rowwise one, except for a `w` of `[K, N]` in a format
        of 1-D blocks, which run along K.

    Raises:
      TypeError, ValueError: as for `linear`.

    In `shard_map`, `w` is the local shard. Along mesh axes other than `gather_axis`, the result is sharded as `w` is.

    >>> from qshard.recipes import CurrentScaling
    >>> gathered_weight(jnp.full((3, 16), 0.875), CurrentScaling()).rowwise.data.shape
    (3, 16)
    """
    recipe = as_recipe(recipe, "gathered_weight")
    if not recipe.has_one_weight:
        raise two_formats_error("gathered_weight", "w")
    w, arrays = lax.stop_gradient((w, check_arguments("gathered_weight", w, weight_spec, weight_scales, seed, state)))
    axes = as_names("gathered_weight", "gather_axis", gather_axis)
    options = {"recipe": recipe, "weight_spec": weight_spec, "gather_axes": axes}
    whole: QuantizedArray = _checked_weight(w, arrays, layout=as_layout("gathered_weight", weight_layout), **options)
    return whole


def check_arguments(op: str, w: Any, weight_spec: Any, weight_scales: Any, seed: Any, state: Any) -> CallArrays:
    """Check the types of arguments that `jit` would reject or misread."""
    if not isinstance(w, CODED):
        check_array(op, "w", w)
    check_spec(op, "weight_spec", weight_spec)
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(
            f"{op}: state ({quote(state)}) is not a LinearState; pass the state of this layer from init_delayed"
        )
    scales = None if weight_scales is None else as_scales(op, "weight_scales", weight_scales)
    return CallArrays(scales, as_seed(op, seed), state)


def _in_shard_map(
    call: Callable[..., jax.Array],
    x: jax.Array,
    w: Any,
    arrays: CallArrays,
    weight_spec: Spec,
    gather_axes: tuple[str, ...],
    local_axes: AxisName,
) -> jax.Array:
    """Run `call` in a `shard_map` over `local_axes` and `gather_axes`. Other mesh axes stay as they are."""
    axes = as_names("linear", "local_axes", local_axes)
    mesh = mesh_of(x, weight_spec)
    free = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    for axis in axes:
        if axis not in free:
            raise ValueError(
                f"linear: local_axes ({axis!r}) is not an axis of the mesh {free}; leave local_axes out inside "
                "shard_map"
            )
    if isinstance(w, CODED):
        raise TypeError(f"linear: w ({type(w).__name__}) is already quantized; pass an array with local_axes")
    names = dict.fromkeys((*axes, *gather_axes))
    check_spec_fits("linear", "weight_spec", weight_spec, mesh, jnp.ndim(w))
    entries = [names_of(entry) for entry in spec_of(weight_spec, gather_axes or None)]
    spec = PartitionSpec(*(tuple(name for name in entry if name in names) or None for entry in entries))
    inside = jax.shard_map(
        functools.partial(call, weight_spec=spec),
        mesh=mesh,
        in_specs=(PartitionSpec(axes), spec, PartitionSpec()),
        out_specs=PartitionSpec(axes),
        axis_names=set(names),
    )
    return inside(x, w, arrays)


def _as_wire(dtype: Any) -> tuple[str | None, Format | None]:
    """Return the dtype or the format that the argument `grad_dtype` names; the other is None."""
    if isinstance(dtype, Format) or (isinstance(dtype, str) and dtype in FORMATS):
        return None, as_wire_format(dtype, "linear", "grad_dtype")
    name = None if dtype is None else as_float_name("linear", dtype, "grad_dtype")
    if name == "float16":
        raise TypeError("linear: grad_dtype (float16) overflows where gradients are summed; pass bfloat16 or float32")
    return name, None


def _checked_linear(
    x: jax.Array,
    w: Any,
    arrays: CallArrays,
    *,
    recipe: Recipe,
    weight_spec: Spec,
    gather_axes: tuple[str, ...],
    vmap_as_rows: bool,
    tensor_parallel: TensorParallelOptions | None,
    **options: Any,
) -> jax.Array:
    check_dtype("linear", "x", x)
    check_spec_fits("linear", "axis_name", options["rows"], mesh_of(x, None), x.ndim - 1)
    lead = x.shape[:-1]
    if isinstance(w, CODED):
        w, amax = open_weight(w)
        arrays = arrays._replace(weight_amax=amax)
    if tensor_parallel is not None:
        weight_spec = tensor_parallel.weight_spec("linear", options["layout"], gather_axes, weight_spec)
        parallel = tensor_parallel.parallel("linear", x, w, arrays, recipe, options["axes"], options["rows"])
        options |= {"parallel": parallel, "axes": tuple(dict.fromkeys((*options["axes"], parallel.axis)))}
    if vmap_as_rows:
        x = matrix_of(x)
    config, weight = Config.of(
        "linear", w, arrays, recipe, weight_spec, gather_axes, x_type=explicit_sharding(x), **options
    )
    if arrays.state is not None and weight.sink is not None:
        array, state = require_gradient("linear", weight.sink, arrays.state)
        weight, arrays = CodedWeight(weight.codes, array, weight.shards), arrays._replace(state=state)
    # In shard_map, cast an operand to vary over more axes outside of the custom_vjp: there JAX sums its gradient.
    x, *sink = vary_alike(x, *jax.tree.leaves(weight.sink))
    weight = CodedWeight(weight.codes, sink[0] if sink else None, weight.shards)
    if vmap_as_rows:
        y = folding_product(config, x, weight, arrays)
        return unfold(y, (*lead, y.shape[-1]))
    return product(config, x, weight, arrays)


# For eager callers, also of gradients: one dispatch, and checks run once per shape.
_jitted_linear = jax.jit(
    _checked_linear,
    static_argnames=(
        *("recipe", "layout", "weight_spec", "gather_axes", "axes", "rows"),
        "tensor_parallel",
        *("reshard_after_forward", "out_sharding", "grad_dtype", "grad_format", "vmap_as_rows"),
    ),
    inline=True,
)


@functools.partial(jax.jit, static_argnames=("recipe", "layout", "weight_spec", "gather_axes"), inline=True)
def _checked_weight(
    w: Any,
    arrays: CallArrays,
    *,
    recipe: Recipe,
    layout: WeightLayout,
    weight_spec: Spec,
    gather_axes: tuple[str, ...],
) -> QuantizedArray:
    w = open_weight(w)[0] if isinstance(w, CODED) else w
    config, weight = Config.of("gathered_weight", w, arrays, recipe, weight_spec, gather_axes, layout=layout)
    return whole_weight(config, weight, arrays)
