"""Adam and AdamW as optax transformations, on the kernel of `qshard.torch_bridge.Adam` and `AdamW`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.optimizers.adam import BLOCK, SCALED, check_setting, check_state_dtype, settings
from qshard._core.validation import quote
from qshard.formats import FLOATS_16
from qshard.jax._ops import bind as ops
from qshard.jax._ops.mesh import count_shards, may_be_sharded, names_of, reshape
from qshard.jax._ops.validation import check_array, check_dtype
from qshard.jax._sharding.partitionable_ops import reshape_as, split_rows
from qshard.op_table import OpSpec, multi_table


class Transformation(NamedTuple):
    """A pair of functions, which optax accepts as a `GradientTransformation`."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class ScaledState(NamedTuple):
    """A moment in float16 or FP8, with scales.

    Attributes:
      data: the codes, in the shape of the parameter.
      scale_inv: float32 `[*lead, blocks]`, the decode scale of every 128 elements of a row.
    """

    data: jax.Array
    scale_inv: jax.Array


class AdamState(NamedTuple):
    """The state of `adam`. `mu`, `nu` and `master` are trees like the parameters.

    Attributes:
      count: int32, the number of steps so far.
      mu: first moments, arrays or `ScaledState`s.
      nu: second moments, arrays or `ScaledState`s.
      master: float32 masters of 16-bit parameters, or None.
    """

    count: jax.Array  # type: ignore[assignment]  # The name in optax. Tuples have a method of this name.
    mu: Any
    nu: Any
    master: Any


def adam(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    *,
    mu_dtype: Any = "float32",
    nu_dtype: Any = "float32",
    masters: bool = False,
) -> Transformation:
    """Create Adam with low-precision states, and with float32 masters of 16-bit parameters; otherwise `optax.adam`.

        m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g g
        the update is -lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    All arithmetic is float32, in the order that NUMERICS.md states. So every device, and `qshard.torch_bridge.Adam`,
    gives the same bits. Updates are float32. A state in float16 or FP8 has one float32 scale, a power of two, for every
    128 elements of the last axis. A state of zeros stays zeros, and a second moment that is not 0 never becomes 0.
    Parameters with fewer than two axes have float32 states instead.

    With masters, an update moves a parameter to its rounded master: `optax.apply_updates` gives the rounded master
    exactly, unless that is smaller than 2^-15 of the old parameter. The next update corrects the difference, because
    only masters carry over. It also undoes the changes of later transformations in a chain, such as weight decay or a
    schedule: put those before this one, or in `learning_rate`.

    Args:
      learning_rate: a number, an array `[]`, or a function of the number of earlier steps.
      b1: decay of the first moment: a number, or a float32 array `[]`. `optax.inject_hyperparams` passes arrays;
        for 16-bit parameters set its `hyperparam_dtype=jnp.float32`.
      b2: decay of the second moment, like `b1`.
      eps: the term that is added to the denominator, like `b1`.
      mu_dtype: the dtype of first moments: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
      nu_dtype: the dtype of second moments, one of the same.
      masters: whether to keep float32 masters of 16-bit parameters.

    Returns:
      A pair `(init, update)`, for optax or for direct use. optax need not be installed.

    Raises:
      TypeError: a dtype is not one of these, or `b1` or `b2` is a 16-bit array.

    It works in `shard_map`, and under `jit` with arrays that are sharded along any axes, without communication; shards
    of the last axis must be whole blocks of 128 if a state has scales. Each array takes one kernel. Donated states are
    updated in place on one device and in `shard_map`.

    >>> weights = {"w": jnp.ones((2, 256), jnp.bfloat16)}
    >>> optimizer = adam(0.25, mu_dtype=jnp.float8_e4m3fn, masters=True)
    >>> state = optimizer.init(weights)
    >>> updates, state = optimizer.update(weights, state, weights)
    >>> float(updates["w"][0, 0]), state.mu["w"].scale_inv.shape
    (-0.25, (2, 2))

    Sources: Kingma and Ba, arXiv:1412.6980; optax, `adam`.
    """
    return _transformation("adam", learning_rate, b1, b2, eps, 0.0, (mu_dtype, nu_dtype), masters)


def adamw(
    learning_rate: Any,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-4,
    *,
    mu_dtype: Any = "float32",
    nu_dtype: Any = "float32",
    masters: bool = False,
) -> Transformation:
    """Create `adam` with decoupled weight decay; otherwise `optax.adamw`, with the same defaults.

        the update is -lr (u + weight_decay p), where -lr u is the update of `adam`

    `torch.optim.AdamW` and `qshard.torch_bridge.AdamW` have another default, 0.01. The op is the same.

    Weight decay that is added to gradients, as in `torch.optim.Adam`, is a separate transformation in optax:
    `optax.chain(optax.add_decayed_weights(decay), adam(...))`.

    Args:
      learning_rate: as for `adam`.
      b1: as for `adam`.
      b2: as for `adam`.
      eps: as for `adam`.
      weight_decay: a number, or an array `[]`.
      mu_dtype: as for `adam`.
      nu_dtype: as for `adam`.
      masters: as for `adam`.

    Returns:
      A pair `(init, update)`. `update` needs the parameters.

    Raises:
      TypeError: a dtype is not one that `adam` names, or `b1` or `b2` is a 16-bit array.

    On sharded arrays it behaves as `adam` does.

    >>> optimizer = adamw(0.5, weight_decay=0.25)
    >>> weights = jnp.ones(4)
    >>> updates, _ = optimizer.update(jnp.zeros(4), optimizer.init(weights), weights)
    >>> updates
    Array([-0.125, -0.125, -0.125, -0.125], dtype=float32)

    Sources: Loshchilov and Hutter, arXiv:1711.05101; optax, `adamw`.
    """
    return _transformation("adamw", learning_rate, b1, b2, eps, weight_decay, (mu_dtype, nu_dtype), masters)


def check_beta(op: str, name: str, value: Any) -> None:
    """Raise unless a decay of moments is a number from 0 up to 1, or an array of more than 16 bits.

    0.999 is 1 in bfloat16, the dtype that `optax.inject_hyperparams` takes from parameters.
    """
    check_setting(op, name, value, is_beta=True)
    if getattr(value, "dtype", None) in (jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"{op}: {name} ({quote(value)}) has too few bits for a decay close to 1; pass it in float32, or "
            "hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        )


def _transformation(
    op: str,
    learning_rate: Any,
    b1: Any,
    b2: Any,
    eps: Any,
    weight_decay: Any,
    state_dtypes: tuple[Any, Any],
    masters: bool,
) -> Transformation:
    if not callable(learning_rate):
        check_setting(op, "learning_rate", learning_rate)
    for name, value in (("b1", b1), ("b2", b2), ("eps", eps), ("weight_decay", weight_decay)):
        (check_beta if name in ("b1", "b2") else check_setting)(op, name, value)
    dtypes = [_state_dtype(op, name, d) for name, d in zip(("mu_dtype", "nu_dtype"), state_dtypes, strict=True)]
    decay = "none" if isinstance(weight_decay, int | float) and weight_decay == 0 else "decoupled"

    def init(params: Any) -> AdamState:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            name = f"params{jax.tree_util.keystr(path)}"
            check_array(op, name, p)
            check_dtype(op, name, p)

        def master(p: jax.Array) -> jax.Array | None:
            return p.astype(jnp.float32) if masters and str(p.dtype) in FLOATS_16 else None

        mu, nu = (jax.tree.map(functools.partial(_zeros, dtype=dtype), params) for dtype in dtypes)
        return AdamState(jnp.zeros((), jnp.int32), mu, nu, jax.tree.map(master, params))

    def update(updates: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        if not isinstance(state, AdamState):
            raise TypeError(
                f"{op}: state ({quote(state)}) is not an AdamState; pass the result of init or of the last update"
            )
        count = jnp.where(state.count < jnp.iinfo(jnp.int32).max, state.count + 1, state.count)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        numbers = settings(rate, b1, b2, eps, weight_decay)
        hyper = jnp.stack([jnp.asarray(number, jnp.float32).reshape(()) for number in numbers])
        constants = ops.adam_constants(count.astype(jnp.float32), hyper)
        tree: Any
        leaves, tree = jax.tree.flatten(updates)
        trees = [[_moment(each) for each in tree.flatten_up_to(part)] for part in (state.mu, state.nu)]
        trees.append(tree.flatten_up_to(state.master))
        old = [None] * len(leaves) if params is None else tree.flatten_up_to(params)
        steps = [_step(op, constants, decay, *parts) for parts in zip(leaves, old, *trees, strict=True)]
        made = [tree.unflatten([step[i] for step in steps]) for i in range(4)]
        return made[0], AdamState(count, *made[1:])

    return Transformation(init, update)


def _state_dtype(op: str, name: str, dtype: Any) -> str:
    try:
        found = str(jnp.dtype(dtype))
    except TypeError:
        found = ""
    check_state_dtype(op, name, dtype, found)
    return found


def _zeros(p: jax.Array, dtype: str) -> Any:
    if dtype not in SCALED:
        return jnp.zeros_like(p, dtype=dtype)
    if p.ndim < 2:
        return jnp.zeros_like(p, dtype=jnp.float32)
    # A slice of the parameter, so that the scales have its sharding.
    return ScaledState(jnp.zeros_like(p, dtype=dtype), jnp.ones_like(p[..., ::BLOCK], dtype=jnp.float32))


def _moment(moment: Any) -> Any:
    """Return a moment of the state. `nnx.Optimizer` turns a `ScaledState` into a mapping in its first update."""
    return ScaledState(**moment) if isinstance(moment, Mapping) and set(moment) == set(ScaledState._fields) else moment


def _step(
    op: str, constants: jax.Array, decay: str, grad: Any, param: Any, mu: Any, nu: Any, master: Any
) -> tuple[jax.Array, Any, Any, Any]:
    low = "none" if master is None else "master"
    if param is None and (decay != "none" or low != "none"):
        raise ValueError(f"{op}: params (None) are needed for weight decay or master weights; pass them to update")
    check_array(op, "updates", grad)
    check_dtype(op, "updates", grad)
    shape = jnp.shape(mu.data if isinstance(mu, ScaledState) else mu)
    if jnp.shape(grad) != shape:
        raise ValueError(
            f"{op}: updates {jnp.shape(grad)} do not fit the state {shape}; pass the gradients of the parameters given "
            "to init"
        )
    if grad.size == 0:
        return jnp.zeros_like(grad, dtype=jnp.float32), mu, nu, master
    plain = decay == "none" and low == "none"
    given = {"grad": grad, "param": None if plain else param, "low": master}
    for name, moment in (("exp_avg", mu), ("exp_avg_sq", nu)):
        given[name], given[f"{name}_scale_inv"] = moment if isinstance(moment, ScaledState) else (moment, None)
    given = _shard_alike({name: array for name, array in given.items() if array is not None})
    dtypes = {name: str(array.dtype) for name, array in given.items()}
    views, spread = _views(given, constants)
    results = _op(tuple(dtypes.items()))(
        spread,
        *views.values(),
        decay=decay,
        exp_avg_dtype=dtypes["exp_avg"],
        exp_avg_sq_dtype=dtypes["exp_avg_sq"],
        keeps=low,
        update=True,
    )
    made = dict(zip(_results(dtypes), results, strict=True))
    shaped = {name: reshape_as(y, given["grad" if name == "update" else name]) for name, y in made.items()}

    def joined(name: str) -> Any:
        scale_inv = shaped.get(f"{name}_scale_inv")
        return shaped[name] if scale_inv is None else ScaledState(shaped[name], scale_inv)

    return shaped["update"], joined("exp_avg"), joined("exp_avg_sq"), shaped.get("low")


def _results(operands: Iterable[str]) -> tuple[str, ...]:
    return ("update", *(name for name in operands if name not in ("grad", "param")))


@functools.cache
def _op(dtypes: tuple[tuple[str, str], ...]) -> ops.Op:
    """Return the op `adam` on one tensor, with constants and scales for each index of the leading axes.

    XLA can partition the op in this form.
    """
    kinds = {**dict(dtypes), "update": "float32"}

    def operand(name: str) -> str:
        return f"{name}: {kinds[name]} *batch {'*blocks' if name.endswith('scale_inv') else '*run'}"

    names = [name for name, _ in dtypes]
    results = _results(names)
    operands = ", ".join(["constants: float32 *batch 10", *map(operand, names)])
    row = f"{operands} -> {', '.join(map(operand, results))}"
    spec = OpSpec("adam", row, multi_table()["adam"].attribute_types)
    in_place = {names.index(name) + 1: i for i, name in enumerate(results) if name in names}
    return ops.Op(spec, in_place)


def _shard_alike(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """On an Explicit mesh, reshard every array like the state."""
    sharding = jax.typeof(given["exp_avg"]).sharding
    if not sharding.mesh.explicit_axes:
        return given
    return {
        name: array if name.endswith("scale_inv") else jax.sharding.reshard(array, sharding)
        for name, array in given.items()
    }


def _views(given: dict[str, jax.Array], constants: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return operands with leading axes that XLA may shard, and the constants repeated over these axes."""
    if not may_be_sharded(given["grad"]):
        return given, constants
    scaled = any(name.endswith("scale_inv") for name in given)

    def view(name: str, x: jax.Array) -> jax.Array:
        if not scaled:
            return split_rows(x)
        return x if name.endswith("scale_inv") or given["grad"].shape[-1] % BLOCK else _blocks(x)

    views = {name: view(name, array) for name, array in given.items()}
    sharding, lead = jax.typeof(views["grad"]).sharding, max(0, views["grad"].ndim - 1)
    by_row = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:lead], None))
    shape = (*views["grad"].shape[:lead], constants.shape[-1])
    explicit = by_row if sharding.mesh.explicit_axes else None
    return views, lax.broadcast_in_dim(constants, shape, (lead,), out_sharding=explicit)


def _blocks(x: jax.Array) -> jax.Array:
    sharding = jax.typeof(x).sharding
    shards = count_shards(sharding.mesh.shape, names_of(sharding.spec[-1]))
    if x.shape[-1] // BLOCK % shards:
        raise ValueError(
            f"adam: parameter {x.shape} (last axis in {shards} shards) is not sharded on blocks of {BLOCK}, as scaled "
            "FP8 states need; shard another axis, or keep states in bfloat16"
        )
    return reshape(x, (*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK), (*sharding.spec, None))
