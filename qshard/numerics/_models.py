"""Models whose weights are changed one by one: of functions here, of modules in their front end."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qshard._core.validation import shown

Outputs = list[NDArray[np.float64]]


class Model(Protocol):
    """What `sensitivity` runs."""

    def names(self) -> list[str]:
        """Of the weights, those of two or more axes."""

    def weight(self, name: str) -> NDArray[Any]:
        """The values of one."""

    def replaced(self, name: str, value: NDArray[np.float32]) -> contextlib.AbstractContextManager[None]:
        """A context in which it has other values."""

    def run(self, batch: Any) -> Outputs:
        """All outputs that are real numbers."""


def model_of(model: Any, params: Any, op: str) -> Model:
    """A module, or a function and its parameters."""
    if params is not None:
        if not callable(model):
            raise TypeError(f"{op}: model ({shown(model)}) is not a function; with params pass model(params, *batch)")
        return OfFunction(model, params, op)
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            made: Model = importlib.import_module("qshard.torch_bridge._numerics").OfModule(model, op)
            return made
    raise TypeError(f"{op}: model ({shown(model)}) is not a torch.nn.Module; or pass a function, and its params=")


def called(function: Callable[..., Any], batch: Any, *first: Any) -> Any:
    """A function of a batch: of keywords, of several arguments, or of one."""
    if isinstance(batch, Mapping):
        return function(*first, **batch)
    return function(*first, *(batch if isinstance(batch, tuple) else (batch,)))


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The arrays of nested dicts, lists and tuples, with their paths."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


class OfFunction:
    """A function `model(params, *batch)`; parameters in dicts, lists and tuples of arrays."""

    def __init__(self, model: Callable[..., Any], params: Any, op: str):
        self._model, self._params, self._op = model, params, op
        found = dict(leaves(params))
        self._paths = {".".join(map(str, path)): path for path, leaf in found.items() if getattr(leaf, "ndim", 0) > 1}
        if not self._paths:
            raise ValueError(f"{op}: params ({shown(params)}) has no array of two axes or more; pass dicts of them")

    def names(self) -> list[str]:
        return list(self._paths)

    def weight(self, name: str) -> NDArray[Any]:
        return np.asarray(_at(self._params, self._paths[name]))

    @contextlib.contextmanager
    def replaced(self, name: str, value: NDArray[np.float32]) -> Iterator[None]:
        before, path = self._params, self._paths[name]
        self._params = _with(before, path, _like(_at(before, path), value))
        try:
            yield
        finally:
            self._params = before

    def run(self, batch: Any) -> Outputs:
        made = called(self._model, batch, self._params)
        return [np.asarray(leaf, np.float64) for _, leaf in leaves(made)]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another leaf."""
    if not path:
        return value
    key, *rest = path
    made = _with(tree[key], tuple(rest), value)
    if isinstance(tree, Mapping):
        return type(tree)({**tree, key: made})  # type: ignore[call-arg]
    items = [made if i == key else each for i, each in enumerate(tree)]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _like(leaf: Any, value: NDArray[np.float32]) -> Any:
    """Values as an array of the kind of a leaf: its dtype, and where JAX has it."""
    made = value.astype(leaf.dtype)
    if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return importlib.import_module("qshard.jax._numerics").placed_like(leaf, made)
    return made
