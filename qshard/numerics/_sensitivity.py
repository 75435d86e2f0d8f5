"""Sensitivity of a model to the quantization of each weight."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qshard._core.validation import FormatLike, as_formats, quote
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape, plane
from qshard.numerics._arrays import of_floats
from qshard.numerics._display import Frame
from qshard.numerics._gemm_error import stored_values
from qshard.numerics._plots import bar_chart
from qshard.numerics._reductions import as_float
from qshard.numerics._statistics import decibels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """Effect on a model of quantizing one weight.

    Attributes:
      loss: loss with the quantized weight; NaN if the model does not return a single number.
      change: loss minus the loss of the unquantized model.
      output_db: SQNR over all outputs of the model, including a loss.
    """

    layer: str
    format: str
    loss: float
    change: float
    output_db: float


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Frame):
    """Result of `sensitivity`: rows ordered from the largest effect down, and the loss of the unquantized model."""

    loss: float
    rows: tuple[LayerSensitivity, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return one row per weight and format."""
        return [dict(vars(row)) for row in self.rows]

    def plot(self) -> Figure:
        """Plot the change of the loss and the SQNR of the outputs for each row.

        Raises:
          ImportError: matplotlib is not installed.
        """
        names = [f"{row.layer}, {row.format}" for row in self.rows]
        parts = {"change of the loss": [row.change for row in self.rows]}
        return bar_chart(names, {**parts, "SQNR of outputs, dB": [row.output_db for row in self.rows]})


def sensitivity(
    model: Any,
    batch: Any,
    formats: Iterable[FormatLike] | FormatLike = "NVFP4",
    *,
    params: Any = None,
    layers: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Sensitivity:
    """Measure how the outputs of a model change when a single weight is quantized, for each weight in turn.

    Args:
      model: a `torch.nn.Module`, or with `params` a function `model(params, *batch)`. It returns a loss or any tree of
        arrays. Modules run in their current mode, without gradients.
      batch: arguments of the model: a tuple, a dict of keyword arguments, or a single argument.
      formats: formats of the rowwise plane of a weight, or their names.
      params: a pytree of JAX arrays. Arrays with two or more axes are weights.
      layers: predicate on names of weights, such as "blocks.0.up.weight"; by default all weights with two or more axes.
      seed: seed of stochastic rounding.

    Returns:
      A row per weight and format, ordered by the size of the change of the loss, then from the lowest SQNR up. Weights
      are left out for formats that do not support their shape.

    Raises:
      TypeError: `model` is neither a module nor, with `params`, a function.
      ValueError: no weight is left; or a weight is sharded over processes, or belongs to a converted layer, which
        quantizes it already.

    Each weight is restored before the next one is quantized, even after an exception. JAX arrays may be sharded over
    the devices of one process and keep their sharding. FSDP2 models are not supported: pass the model before it is
    sharded.

    >>> w = {"up": np.float32([[448.0, 17.0]]), "down": np.float32([[1.0, 1.0]])}
    >>> found = sensitivity(lambda w, x: float((x @ w["up"].T).sum() + x.sum()), (np.ones((1, 2), np.float32),),
    ...     "FP8_E4M3", params=w)
    >>> found.loss, [(row.layer, row.change) for row in found.rows]
    (467.0, [('up', -1.0), ('down', 0.0)])
    """
    chosen = as_formats(formats, "sensitivity")
    target = model_of(model, params, "sensitivity")
    names = [name for name in target.names() if layers is None or layers(name)]
    exact = target.run(batch)
    loss, rows = _loss(exact), []
    for name in names:
        weight = target.weight(name)
        for fmt in chosen:
            value = _weight_values(weight, fmt, seed)
            if value is None:
                continue
            with target.replaced(name, value):
                outputs = target.run(batch)
            now = _loss(outputs)
            rows.append(
                LayerSensitivity(
                    layer=name, format=str(fmt), loss=now, change=now - loss, output_db=_output_db(exact, outputs)
                )
            )
    if not rows:
        raise ValueError(
            f"sensitivity: none of {len(target.names())} weights fits {', '.join(map(str, chosen))}; pass other "
            "formats, or another layers="
        )
    order = sorted(rows, key=lambda row: (-abs(row.change) if math.isfinite(row.change) else 0.0, row.output_db))
    return Sensitivity(loss=loss, rows=tuple(order))


def _weight_values(weight: NDArray[Any], fmt: Format, seed: int) -> NDArray[np.float32] | None:
    """Quantize a weight and return its values, or None if the format does not support its shape."""
    whole = of_floats(as_float(weight, "sensitivity"))
    try:
        plane(fmt, matrix_shape(whole.shape), Usage.ROWWISE)
    except ValueError:
        return None
    return stored_values(whole, fmt, seed, "weight").astype(np.float32).reshape(whole.shape)


def _loss(outputs: list[NDArray[np.float64]]) -> float:
    return float(outputs[0].reshape(())) if len(outputs) == 1 and outputs[0].size == 1 else math.nan


def _output_db(exact: list[NDArray[np.float64]], outputs: list[NDArray[np.float64]]) -> float:
    signal = sum(float(np.sum(np.square(part))) for part in exact)
    noise = sum(float(np.sum(np.square(b - a))) for a, b in zip(exact, outputs, strict=True))
    return decibels(signal, noise)


Outputs = list[NDArray[np.float64]]


class Model(Protocol):
    """A model with replaceable weights."""

    def names(self) -> list[str]:
        """Return the names of weights with two or more axes."""

    def weight(self, name: str) -> NDArray[Any]:
        """Return the values of a weight."""

    def replaced(self, name: str, value: NDArray[np.float32]) -> contextlib.AbstractContextManager[None]:
        """Replace the values of a weight within a context."""

    def run(self, batch: Any) -> Outputs:
        """Run the model, and return its real-valued outputs."""


def model_of(model: Any, params: Any, op: str) -> Model:
    """Wrap a torch module, or a function with its parameters."""
    if params is not None:
        if not callable(model):
            raise TypeError(
                f"{op}: model ({quote(model)}) is not a function; with params=, pass a function model(params, *batch)"
            )
        return FunctionModel(model, params, op)
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            made: Model = importlib.import_module("qshard.torch_bridge._numerics").OfModule(model, op)
            return made
    raise TypeError(f"{op}: model ({quote(model)}) is not a torch.nn.Module; pass one, or pass a function with params=")


def call_with_batch(function: Callable[..., Any], batch: Any, *first: Any) -> Any:
    """Call a function with a batch: a dict of keyword arguments, a tuple of arguments, or a single argument."""
    if isinstance(batch, Mapping):
        return function(*first, **batch)
    return function(*first, *(batch if isinstance(batch, tuple) else (batch,)))


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of nested dicts, lists and tuples with their paths."""
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


class FunctionModel:
    """A function `model(params, *batch)` with its parameters in nested dicts, lists and tuples."""

    def __init__(self, model: Callable[..., Any], params: Any, op: str):
        self._model, self._params, self._op = model, params, op
        found = dict(leaves(params))
        self._paths = {".".join(map(str, path)): path for path, leaf in found.items() if getattr(leaf, "ndim", 0) > 1}
        if not self._paths:
            raise ValueError(
                f"{op}: params ({quote(params)}) has no array with two or more axes; pass a pytree that has weights"
            )

    def names(self) -> list[str]:
        return list(self._paths)

    def weight(self, name: str) -> NDArray[Any]:
        return np.asarray(_get_leaf(self._params, self._paths[name]))

    @contextlib.contextmanager
    def replaced(self, name: str, value: NDArray[np.float32]) -> Iterator[None]:
        before, path = self._params, self._paths[name]
        self._params = _replace_leaf(before, path, _convert_like(_get_leaf(before, path), value))
        try:
            yield
        finally:
            self._params = before

    def run(self, batch: Any) -> Outputs:
        made = call_with_batch(self._model, batch, self._params)
        return [np.asarray(leaf, np.float64) for _, leaf in leaves(made)]


def _get_leaf(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _replace_leaf(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tree with one leaf replaced."""
    if not path:
        return value
    key, *rest = path
    made = _replace_leaf(tree[key], tuple(rest), value)
    if isinstance(tree, Mapping):
        return type(tree)({**tree, key: made})  # type: ignore[call-arg]
    items = [made if i == key else each for i, each in enumerate(tree)]
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _convert_like(leaf: Any, value: NDArray[np.float32]) -> Any:
    made = value.astype(leaf.dtype)
    if type(leaf).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return importlib.import_module("qshard.jax._numerics").placed_like(leaf, made)
    return made
