"""Muon for hidden matrices and AdamW for the other parameters, as an optax transformation on sharded arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from qshard._core.optimizers import muon as core
from qshard._core.optimizers.adam import check_setting, settings
from qshard._core.validation import quote
from qshard.jax._ops import bind as ops
from qshard.jax._ops.mesh import AxisName, Spec, spec_of
from qshard.jax._ops.validation import as_axes, check_array, check_dtype, check_spec, check_spec_fits
from qshard.jax._optim.adam import AdamState, Transformation, adamw, check_beta
from qshard.jax._optim.newton_schulz import NewtonSchulz
from qshard.jax._optim.orthogonalize import orthogonalize, orthogonalize_shards
from qshard.jax._optim.rounding import round_product
from qshard.jax._sharding.shard_spec import ShardSpec

_OP = "muon"


class MuonState(NamedTuple):
    """The state of `muon`: a pytree of arrays.

    Attributes:
      count: int32, the number of steps so far.
      mu: a tree like the parameters: the float32 momentum of each matrix, and None for other parameters.
      adamw: the state of AdamW. Its trees have None for matrices.
    """

    count: jax.Array  # type: ignore[assignment]  # The name in optax. Tuples have a method of this name.
    mu: Any
    adamw: AdamState


def muon(
    learning_rate: Any,
    ns_coeffs: Sequence[float] = core.COEFFICIENTS,
    ns_steps: int = core.STEPS,
    beta: Any = 0.95,
    eps: float = 1e-8,
    weight_decay: Any = 0.0,
    *,
    nesterov: bool = True,
    ns_fp8_steps: int = 0,
    ns_fp8_min_side: int = core.FP8_MIN_SIDE,
    consistent_rms: float | None = None,
    output_axis: int = -2,
    adam_learning_rate: Any = None,
    adam_b1: Any = 0.9,
    adam_b2: Any = 0.999,
    adam_weight_decay: Any = 0.0,
    rules: Mapping[str, str] | None = None,
    spec: Spec | Callable[[str, Any], Spec] = None,
    axis_name: AxisName = None,
) -> Transformation:
    """Create Muon for hidden matrices, and AdamW for the other parameters; otherwise `optax.contrib.muon`.

        M = beta M + (1 - beta) G                              G: gradient, M: momentum; t: step, from 1
        U = beta M / (1 - beta^(t+1)) + (1 - beta) G / (1 - beta^t) with nesterov, else M / (1 - beta^t)
        X = bfloat16(U) / (|U| + eps); ns_steps times: A = X X^T; X = a X + (b A + c A A) X
        the update is -lr (scale X + weight_decay P)

    `|U|` is the Frobenius norm, and a matrix with more rows than columns is transposed before and after. Newton-Schulz
    runs in bfloat16, or in FP8, with float32 sums; all other arithmetic is float32. Updates are float32.

    Args:
      learning_rate: a number, an array `[]`, or a function of the number of earlier steps.
      ns_coeffs: (a, b, c) of Newton-Schulz.
      ns_steps: steps of Newton-Schulz.
      beta: decay of the momentum: a number, or a float32 array `[]`.
      eps: the term that is added to the norm, and to the denominator of AdamW.
      weight_decay: decoupled weight decay of matrices: a number, or an array `[]`.
      nesterov: whether to use Nesterov momentum. AdamW has none.
      ns_fp8_steps: the first steps of Newton-Schulz that multiply in FP8, at most `ns_steps`. 3 of 5 add little to the
        error of bfloat16, and 4 or 5 are coarse: docs/muon.md has errors and times.
      ns_fp8_min_side: the smallest side of a matrix that multiplies in FP8. Smaller matrices stay in bfloat16, which is
        at least as fast for them on an H200. So do matrices with a side that 16 does not divide.
      consistent_rms: None: `scale` is `sqrt(max(1, outputs / inputs))`. A number: it is
        `consistent_rms sqrt(max(outputs, inputs))`; 0.2 fits learning rates of AdamW.
      output_axis: the axis of outputs: -2 for weights `[N, K]` of `linear`, -1 for kernels `[K, N]` of flax.
      adam_learning_rate: learning rate of AdamW. None: `learning_rate`.
      adam_b1: decay of the first moment of AdamW, like `beta`.
      adam_b2: decay of its second moment.
      adam_weight_decay: its weight decay.
      rules: algorithms, "muon" or "adamw", by pattern of the name of a parameter, such as `{"*.router.*": "adamw"}`.
        The first that fits counts. Without a rule, Muon updates matrices and stacks `[E, N, K]`, except for embeddings
        and heads.
      spec: in `shard_map`, the sharding of all matrices, or a function of the name and the local shard that returns
        it. Elsewhere it is not needed.
      axis_name: in `shard_map`, the mesh axes that shard the first axis of all matrices, unless `spec` says otherwise.

    Returns:
      A pair `(init, update)`, for optax or for direct use. `update` needs the parameters for weight decay.

    For `optax.inject_hyperparams`, name the settings that must be numbers: `static_args=("ns_steps", "eps",
    "ns_fp8_steps", "ns_fp8_min_side", "consistent_rms", "output_axis")`.

    Raises:
      TypeError: a setting, a parameter or the state has a wrong type.
      ValueError: a setting is out of range, or a rule fits no parameter.

    Each matrix has one owner among the devices, which gets its momentum in bfloat16, runs Newton-Schulz once, and
    returns the parts of the result. Owners have about equal work. Experts of a stack are orthogonalized in batches of
    8. Products do not depend on the mesh, so updates have the same bits for every number of devices and every
    sharding. In `shard_map`, devices with equal shards each compute the result.

    >>> params = {"up": jnp.ones((2, 4)), "norm": jnp.ones(4)}
    >>> optimizer = muon(0.02, adam_learning_rate=1e-3)
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(params, state, params)
    >>> state.mu["up"].shape, state.mu["norm"], updates["norm"]
    ((2, 4), None, Array([-0.001, -0.001, -0.001, -0.001], dtype=float32))

    Sources: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982; optax,
    `contrib.muon`.
    """
    _check_static(
        ns_steps=ns_steps,
        eps=eps,
        ns_fp8_steps=ns_fp8_steps,
        ns_fp8_min_side=ns_fp8_min_side,
        consistent_rms=consistent_rms,
        output_axis=output_axis,
    )
    if not callable(learning_rate):
        check_setting(_OP, "learning_rate", learning_rate)
    core.check_settings(_OP, 0.0, nesterov, ns_coeffs, ns_steps, eps, ns_fp8_steps, ns_fp8_min_side)
    _check_settings(beta, weight_decay, consistent_rms, output_axis)
    if not callable(spec):
        check_spec(_OP, "spec", spec)
    a, b, c = map(float, ns_coeffs)
    newton_schulz = NewtonSchulz((a, b, c), ns_steps, float(eps), ns_fp8_steps, ns_fp8_min_side)
    chosen = {} if rules is None else rules
    others = adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate, adam_b1, adam_b2, eps, adam_weight_decay
    )

    def init(params: Any) -> MuonState:
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            check_array(_OP, f"params{jax.tree_util.keystr(path)}", p)
            check_dtype(_OP, f"params{jax.tree_util.keystr(path)}", p)
        matrices, rest = _split(params, params, chosen)
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), matrices)
        return MuonState(jnp.zeros((), jnp.int32), mu, others.init(rest))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        if not isinstance(state, MuonState):
            raise TypeError(
                f"{_OP}: state ({quote(state)}) is not a MuonState; pass the result of init or of the last update"
            )
        has_decay = not (isinstance(weight_decay, int | float) and weight_decay == 0)
        if params is None and has_decay:
            raise ValueError(f"{_OP}: params (None) are needed for weight decay; pass them to update")
        grads, other_grads = _split(updates, updates, chosen)
        values, other_values = (None, None) if params is None else _split(updates, params, chosen)
        changes, adam_state = others.update(other_grads, state.adamw, other_values)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        constants = _constants(state.count, rate, beta, weight_decay, nesterov)
        structure: Any
        named, structure = jax.tree_util.tree_flatten_with_path(grads)
        moments = structure.flatten_up_to(state.mu)
        names, given = [_name_of(path) for path, _ in named], [grad for _, grad in named]
        for name, grad, mu in zip(names, given, moments, strict=True):
            _check_gradient(name, grad, mu)
        moments = [_momentum(constants, grad, mu) for grad, mu in zip(given, moments, strict=True)]
        inputs = [_input(constants, grad, mu, nesterov) for grad, mu in zip(given, moments, strict=True)]
        specs = _specs(names, inputs, spec, axis_name)
        if specs is None:
            directions = orthogonalize(inputs, state.count, newton_schulz=newton_schulz)
        else:
            directions = orthogonalize_shards(inputs, specs, state.count, newton_schulz=newton_schulz)
        old = structure.flatten_up_to(values) if has_decay else [None] * len(given)
        wholes = [x.shape if specs is None else specs[i].whole(x.shape) for i, x in enumerate(inputs)]
        scales = [_scale(shape, output_axis, consistent_rms) for shape in wholes]
        steps = [_step(constants, *parts) for parts in zip(directions, scales, old, strict=True)]
        both = (structure.unflatten(steps), changes)
        merged = jax.tree.map(lambda a, b: b if a is None else a, *both, is_leaf=lambda x: x is None)
        count = jnp.where(state.count < jnp.iinfo(jnp.int32).max, state.count + 1, state.count)
        return merged, MuonState(count, structure.unflatten(moments), adam_state)

    return Transformation(init, update)


class _Constants(NamedTuple):
    """float32 `[]`: the settings of a step. `of_momentum` and `of_grad` make the input of Newton-Schulz."""

    rate: jax.Array
    decay: jax.Array
    beta: jax.Array
    rest: jax.Array  # 1 - beta
    of_momentum: jax.Array
    of_grad: jax.Array


def _constants(count: jax.Array, rate: Any, beta: Any, decay: Any, nesterov: bool) -> _Constants:
    """Return the constants of a step, from the op of Adam: XLA's own powers would depend on the program."""
    numbers = settings(rate, beta, beta, 0.0, decay)
    hyper = jnp.stack([jnp.asarray(number, jnp.float32).reshape(()) for number in numbers])
    step = count.astype(jnp.float32) + 1
    now = ops.adam_constants(step, hyper)
    rate, _, decay, _, beta, rest, unbias = (now[i] for i in range(7))
    if not nesterov:
        return _Constants(rate, decay, beta, rest, unbias, unbias)
    after = ops.adam_constants(step + 1, hyper)[6]
    return _Constants(rate, decay, beta, rest, _round_product(beta * after), _round_product(rest * unbias))


@jax.custom_vjp
def _round_product(product: jax.Array) -> jax.Array:
    return round_product(product)


def _no_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        f"{_OP}: update has no derivative; call jax.lax.stop_gradient on gradients and parameters"
    )


_round_product.defvjp(_no_derivative, _no_derivative)


def _momentum(constants: _Constants, grad: jax.Array, mu: jax.Array) -> jax.Array:
    return _round_product(constants.beta * mu) + _round_product(constants.rest * grad.astype(jnp.float32))


def _input(constants: _Constants, grad: jax.Array, mu: jax.Array, nesterov: bool) -> jax.Array:
    made = _round_product(constants.of_momentum * mu)
    if nesterov:
        made = made + _round_product(constants.of_grad * grad.astype(jnp.float32))
    return made.astype(jnp.bfloat16)


def _step(constants: _Constants, direction: jax.Array, scale: float, param: jax.Array | None) -> jax.Array:
    made = _round_product(direction.astype(jnp.float32) * np.float32(scale))
    if param is not None:
        made = made + _round_product(constants.decay * param.astype(jnp.float32))
    return _round_product(-constants.rate * made)


def _split(like: Any, tree: Any, rules: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the leaves of `tree` for Muon, and the others, as trees with None in other places.

    `like` gives the names and shapes.
    """
    structure: Any
    named, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [_name_of(path) for path, _ in named]
    checked = core.check_rules(_OP, rules, names)
    chosen = [core.algorithm_of(_OP, n, jnp.shape(x), checked) for n, (_, x) in zip(names, named, strict=True)]
    pairs = list(zip(structure.flatten_up_to(tree), chosen, strict=True))
    trees = [structure.unflatten([x if own == kept else None for x, own in pairs]) for kept in core.ALGORITHMS]
    return trees[0], trees[1]


def _name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _scale(shape: Sequence[int], output_axis: int, consistent_rms: float | None) -> float:
    fan_out, fan_in = (shape[-2], shape[-1]) if output_axis == -2 else (shape[-1], shape[-2])
    if 0 in (fan_out, fan_in):
        return 1.0
    if consistent_rms is None:
        return core.update_scale(_OP, None, fan_out, fan_in)
    return consistent_rms * math.sqrt(max(fan_out, fan_in))


def _specs(
    names: Sequence[str], matrices: Sequence[jax.Array], spec: Any, axis_name: AxisName
) -> list[ShardSpec] | None:
    """Return the sharding of each matrix in `shard_map`, or None outside of it."""
    axes, mesh = as_axes(_OP, axis_name), jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return None
    made = []
    for name, x in zip(names, matrices, strict=True):
        given: Spec = spec(name, x) if callable(spec) else spec
        check_spec(_OP, "spec", given)
        varying = jax.typeof(x).manual_axis_type.varying
        if given is None and not axes and varying:
            raise ValueError(
                f"{_OP}: the gradient of {name} {x.shape} may differ over mesh axes {tuple(sorted(varying))}; pass "
                "axis_name or spec for shards, or spec=P() for equal gradients"
            )
        given = spec_of(given, axes)
        check_spec_fits(_OP, f"spec of {name}", given, mesh, x.ndim)
        made.append(ShardSpec.of(x, tuple(mesh.manual_axes), given))
    return made


def _check_gradient(name: str, grad: Any, mu: Any) -> None:
    check_array(_OP, f"updates of {name}", grad)
    check_dtype(_OP, f"updates of {name}", grad)
    if mu is None or jnp.shape(grad) != jnp.shape(mu):
        raise ValueError(
            f"{_OP}: updates {jnp.shape(grad)} of {name} do not fit the state {None if mu is None else jnp.shape(mu)}; "
            "pass the gradients of the parameters given to init"
        )


def _check_static(**settings: Any) -> None:
    """Raise TypeError if a setting that the program depends on is an array, as from `optax.inject_hyperparams`."""
    for name, value in settings.items():
        if isinstance(value, jax.core.Tracer if name == "eps" else jax.Array):
            raise TypeError(
                f"{_OP}: {name} ({quote(value)}) is an array, and must be a number; pass static_args={(*settings,)} to "
                "optax.inject_hyperparams"
            )


def _check_settings(beta: Any, decay: Any, rms: Any, output_axis: Any) -> None:
    check_beta(_OP, "beta", beta)
    check_setting(_OP, "weight_decay", decay)
    if rms is not None:
        check_setting(_OP, "consistent_rms", rms)
        if not isinstance(rms, Real):
            raise TypeError(f"{_OP}: consistent_rms ({quote(rms)}) is not None or a number; pass 0.2, for example")
    if output_axis not in (-2, -1):
        raise ValueError(
            f"{_OP}: output_axis ({quote(output_axis)}) is not -2 or -1; pass -2 for weights [outputs, inputs], -1 for "
            "kernels [inputs, outputs]"
        )
