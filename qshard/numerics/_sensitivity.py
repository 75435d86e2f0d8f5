"""Sensitivity of a model to the format of each weight."""

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
    """Effect on a model of quantizing one weight alone.

    Attributes:
      layer, format: the name of the weight, and its format.
      loss: with it; NaN if the model gives no single number.
      change: of the loss, from that without it.
      output_db: SQNR of all outputs; a loss is an output.
    """

    layer: str
    format: str
    loss: float
    change: float
    output_db: float


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Frame):
    """Result of `sensitivity`: `rows`, the most harmful first, and the loss of the model as it is."""

    loss: float
    rows: tuple[LayerSensitivity, ...]

    def records(self) -> list[dict[str, Any]]:
        return [dict(vars(row)) for row in self.rows]

    def plot(self) -> Figure:
        """Change of the loss, and SQNR of outputs, of each layer.

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
    """Measures how the outputs of a model change when one weight is quantized and the others are not: a run for each.

    Args:
      model: a `torch.nn.Module`, or, with `params`, a function `model(params, *batch)`, as of JAX. It gives a loss, or
        any tree of arrays. Modules run as they are, in the mode that they are in, without gradients.
      batch: arguments of the model: a tuple, or a dict of keywords; anything else is one argument.
      formats: of the rowwise plane of a weight, or their names.
      params: a pytree of JAX arrays. Arrays of two or more axes are weights.
      layers: of names of weights, such as "blocks.0.up.weight", those to quantize; by default all of two or more axes
        that the format can hold.
      seed: of stochastic rounding.

    Returns:
      A row for each weight and format, the largest change of the loss first, else the least SQNR. Weights that a
      format cannot hold are left out.

    Raises:
      TypeError: `model` is neither.
      ValueError: no weight is left; or a weight is sharded over processes, or is of a converted layer, which quantizes
        it already.

    A weight is put back as it was before the next one, also where an error ends it. Arrays of JAX may be sharded over
    the devices of one process, and go back as they were cut; models under FSDP2 are refused: give the model before it
    is sharded.

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
    """The values that are stored of a weight; None if the format cannot hold it."""
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
    """A model with weights that can be replaced."""

    def names(self) -> list[str]:
        """Names of the weights of two or more axes."""

    def weight(self, name: str) -> NDArray[Any]:
        """The values of one."""

    def replaced(self, name: str, value: NDArray[np.float32]) -> contextlib.AbstractContextManager[None]:
        """A context in which a weight has other values."""

    def run(self, batch: Any) -> Outputs:
        """All outputs that are real numbers."""


def model_of(model: Any, params: Any, op: str) -> Model:
    """A module, or a function and its parameters."""
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


class FunctionModel:
    """A function `model(params, *batch)`; parameters in dicts, lists and tuples of arrays."""

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
        made = call_with_batch(self._model, batch, self._params)
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
