"""Checkpoint metadata of trees with quantized arrays, and their handlers for `flax.serialization`.

A checkpoint stores the arrays of a tree by name. Without a target it restores them as dicts and lists. `describe` puts
formats and places of quantized arrays into one string for the checkpoint's metadata, and `rebuild` applies it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Format
from qshard.jax._delayed_scaling import LinearState, Observed, TensorState
from qshard.jax._jax_internals import when_imported
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.primary import PrimaryWeight

KEY = "qshard.tree"
"""The key of the description in the metadata of a checkpoint."""
VERSION = 1
_Keys = tuple[str, ...]
_FIELDS: dict[type, dict[str, type | None]] = {
    QuantizedArray: {"rowwise": Plane, "columnwise": Plane},
    PrimaryWeight: dict.fromkeys(("data", "scale_inv", "global_scale_inv", "amax", "guard")),
    Plane: dict.fromkeys(Plane._fields),
    LinearState: dict.fromkeys(("weight", "activation", "gradient"), TensorState),
    TensorState: {"scale": None, "amax_history": None, "observed": Observed},
    Observed: {"amax": None, "seal": None},
}
"""The fields of each node type of this package: None for an array, else the type of the nested node."""
_CODES = (QuantizedArray, PrimaryWeight)
_ROOTS = (*_CODES, LinearState, TensorState)


def describe(tree: Any) -> dict[str, str]:
    """Describe the quantized arrays of a tree, their places and formats, for the metadata of a checkpoint.

    Args:
      tree: any pytree: parameters, or a whole training state. Its leaves are not read, so the result of
        `jax.eval_shape` works too.

    Returns:
      A dict with one string, under a key of qshard. Merge it with your own metadata: `{**describe(tree), ...}`.

    >>> from qshard.jax import quantize
    >>> tree = {"w": quantize(jnp.ones((32, 32)), "MXFP8_32x32"), "b": jnp.ones(32)}
    >>> metadata = describe(tree)
    >>> w = {"data": tree["w"].rowwise.data, "scale_inv": tree["w"].rowwise.scale_inv, "global_scale_inv": None}
    >>> dicts = {"w": {"rowwise": w, "columnwise": None}, "b": tree["b"]}  # as a checkpoint restores it
    >>> print(rebuild(dicts, metadata)["w"])
    QuantizedArray(MXFP8_32x32, float32, rowwise)

    With orbax: `checkpointer.save(path, tree, custom_metadata=describe(tree))`.
    """
    nodes = [
        {"at": _keys(path), "is": type(node).__name__, **(_terms(node) if isinstance(node, _CODES) else {})}
        for path, node in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_ours)[0]
        if _is_ours(node)
    ]
    return {KEY: json.dumps({"version": VERSION, "nodes": nodes})}


def rebuild(tree: Any, metadata: Mapping[str, Any] | None) -> Any:
    """Restore the quantized arrays of a tree that a checkpoint returned as dicts and lists.

    Args:
      tree: dicts and lists. Quantized arrays and the states of delayed scaling are dicts too. Leaves are arrays, or
        descriptions of arrays. Quantized arrays that are already there, as after a restore with a target,
        are checked against the metadata.
      metadata: the whole metadata of the same checkpoint.

    Returns:
      The tree with quantized arrays and states in their places, and everything else unchanged.

    Raises:
      ValueError: the metadata is not from `describe`, or is of a later version; or the tree does not match it, for
        example because codes have another format.

    Nothing is moved or computed: sharded arrays stay sharded.

    >>> from qshard.jax import quantize
    >>> tree = {"w": quantize(jnp.ones((32, 32)), "MXFP8_32x32")}
    >>> print(rebuild(tree, describe(tree))["w"])
    QuantizedArray(MXFP8_32x32, float32, rowwise)

    With orbax, without a target: `rebuild(checkpointer.restore(path), checkpointer.metadata(path).custom_metadata)`. To
    restore onto another mesh, `rebuild` the tree `checkpointer.metadata(path).item_metadata.tree`, give its leaves
    shardings, and pass it as the target.
    """
    text = (metadata or {}).get(KEY)
    if text is None:
        raise ValueError(
            f"rebuild: metadata ({quote(metadata)}) has no {KEY!r}; save the result of describe(tree) with it"
        )
    for at, make in _nodes(text):
        tree = _replace(tree, at, make, at)
    return tree


def _is_ours(node: Any) -> bool:
    return isinstance(node, _ROOTS)


def _keys(path: Sequence[Any]) -> _Keys:
    """Return a path as a checkpoint names it: dict keys, field names and list indices, as strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _terms(q: QuantizedArray | PrimaryWeight) -> dict[str, Any]:
    return {"format": q.format.description, "dtype": np.dtype(q.dtype).name, "axes": list(q.axes)}


def _static(terms: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": Format.of(terms["format"]),
        "dtype": jnp.dtype(terms["dtype"]),
        "axes": tuple(terms["axes"]),
    }


def _nodes(text: str) -> list[tuple[_Keys, Callable[[Any, str], Any]]]:
    """Return the path of each described node, with the function that rebuilds it."""
    try:
        read = json.loads(text)
    except (TypeError, ValueError):
        read = None
    if not isinstance(read, dict) or "version" not in read:
        raise ValueError(
            f"rebuild: metadata ({str(text)[:40]!r}) is not from describe; pass the metadata of the checkpoint"
        )
    if read["version"] != VERSION:
        raise ValueError(
            f"rebuild: version ({read['version']!r}) is not {VERSION}, which this version of qshard reads; read it "
            "with a newer one"
        )
    kinds = {kind.__name__: kind for kind in _ROOTS}
    try:
        return [
            (
                tuple(node["at"]),
                functools.partial(_make, kinds[node["is"]], _static(node) if "format" in node else {}),
            )
            for node in read["nodes"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rebuild: metadata ({text[:40]!r}) is unknown to this version of qshard: {error}") from None


def _replace(tree: Any, keys: _Keys, make: Callable[[Any, str], Any], at: _Keys) -> Any:
    """Return the tree with the node at `keys` replaced by `make(node, name)`."""
    where = "/".join(at) or "tree"
    if not keys:
        return make(tree, where)
    first, *rest = keys
    if isinstance(tree, Mapping):
        key: Any = next((key for key in tree if str(key) == first), None)
        if key is not None:
            return _like(tree, {**tree, key: _replace(tree[key], tuple(rest), make, at)})
    elif isinstance(tree, list | tuple) and first.isdecimal() and int(first) < len(tree):
        parts = [_replace(part, tuple(rest), make, at) if str(i) == first else part for i, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    elif hasattr(tree, first):  # A node of the user's, from a restore with a target: check its fields and keep it.
        _replace(getattr(tree, first), tuple(rest), make, at)
        return tree
    raise ValueError(f"rebuild: tree has nothing at {where} ({first} is absent); pass the restored tree unchanged")


def _like(tree: Any, items: dict[Any, Any]) -> Any:
    return items if type(tree) is dict else type(tree)(items)


def _make(kind: type, static: Mapping[str, Any], node: Any, where: str) -> Any:
    """Rebuild a node of type `kind` from the dict of its fields, or check a node that exists."""
    if isinstance(node, kind):
        for name, value in static.items():
            if getattr(node, name) != value:
                raise ValueError(
                    f"rebuild: {where} ({name} {getattr(node, name)}) was saved with {name} {value}; restore it into a "
                    "target that has it"
                )
        return node
    below = _FIELDS[kind]
    if not isinstance(node, Mapping) or not set(node) <= set(below):
        given = ", ".join(map(str, node)) if isinstance(node, Mapping) else type(node).__name__
        raise ValueError(f"rebuild: {where} ({given}) was saved as a {kind.__name__}; pass the whole restored tree")

    def part(name: str) -> Any:
        value, of = node.get(name), below[name]
        return value if of is None or value is None else _make(of, {}, value, f"{where}/{name}")

    return kind(**static, **{name: part(name) for name in below})


# `flax.serialization` has a registry of handlers by type. Our handlers are registered once both libraries are imported,
# in any order, so users need not import a module for its side effects.


def _to_state(serialization: ModuleType, node: Any) -> dict[str, Any]:
    state = {name: serialization.to_state_dict(getattr(node, name)) for name in _FIELDS[type(node)]}
    return state | ({"of": json.dumps(_terms(node))} if isinstance(node, _CODES) else {})


def _from_state(serialization: ModuleType, target: Any, state: Any) -> Any:
    kind = type(target)
    names = set(_FIELDS[kind]) | ({"of"} if kind in _CODES else set())
    if not isinstance(state, Mapping) or set(state) != names:
        given = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"from_state_dict: state ({given}) is not the state of a {kind.__name__}; pass a target like the saved tree"
        )
    static = {}
    if kind in _CODES:
        static = _static(json.loads(state["of"]))
        for name, value in static.items():
            if getattr(target, name) != value:
                raise ValueError(
                    f"from_state_dict: target ({name} {getattr(target, name)}) does not have the {name} of the state, "
                    f"{value}; pass a target like the saved tree"
                )
    fields = {name: serialization.from_state_dict(getattr(target, name), state[name], name) for name in _FIELDS[kind]}
    return kind(**static, **fields)


def _register(serialization: ModuleType) -> None:
    for kind in _FIELDS:
        if kind is not Plane:  # A named tuple, which flax knows.
            serialization.register_serialization_state(
                kind, functools.partial(_to_state, serialization), functools.partial(_from_state, serialization)
            )


when_imported("flax.serialization", _register)
