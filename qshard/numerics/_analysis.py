"""Where values lie on a format's grid, what a format does to a product, and what a layer's formats do to a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape, plane
from qshard.numerics._arrays import Whole, whole_of
from qshard.numerics._frames import Frame
from qshard.numerics._measures import decibels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Histogram(Frame):
    """How the elements of a tensor lie on the grid of a format; what `histogram` returns.

    Attributes:
      format, usage: of the plane.
      given: `floor(log2 |x|)` -> number of finite elements other than 0.
      zeros_given, nonfinite_given: numbers of elements that are 0, or infinite or NaN.
      codes: magnitude of a code, as the number that it stands for before scales -> number of elements. NaN is left
        out, where the element format has it; else it has the code of the largest.
      error: mean relative error of the elements of that size, by exponent, as `Stats.error_by_exponent`.
    """

    format: Format
    usage: Usage
    given: Mapping[int, int]
    zeros_given: int
    nonfinite_given: int
    codes: Mapping[float, int]
    error: Mapping[int, float]

    def records(self) -> list[dict[str, Any]]:
        """A row for each exponent."""
        return [
            {"exponent": e, "elements": count, "mean_relative_error": self.error.get(e, math.nan)}
            for e, count in self.given.items()
        ]

    def plot(self) -> Figure:
        """Elements by exponent, and by code.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from qshard.numerics._drawn import columns_of

        codes = {f"{value:g}": count for value, count in self.codes.items()}
        given = {str(e): count for e, count in self.given.items()}
        return columns_of({"elements by floor(log2 |x|)": given, f"elements by code of {self.format}": codes})


@np.errstate(all="ignore")
def histogram(x: Any, fmt: FormatLike, usage: Usage = Usage.ROWWISE, *, seed: int = 0) -> Histogram:
    """How many elements of `x` have each exponent, and how many are stored as each code of a format.

    Args:
      x, usage, seed: as for `stats`.
      fmt: the format, or its name.

    Returns:
      Counts, exact: `sum(given.values()) + zeros_given + nonfinite_given` is the number of elements. A rotated plane is
      that of the rotated tensor, in all of it.

    Raises:
      TypeError, ValueError: as for `stats`.

    Sharded arrays: as for `stats`; counts are of the whole array, and every process has them.

    >>> found = histogram([1.0, -1.0, 0.5, 0.0], "FP8_E4M3")
    >>> found.given, found.zeros_given, found.codes
    ({-1: 1, 0: 2}, 1, {0.0: 1, 224.0: 1, 448.0: 2})
    """
    from qshard.numerics._pieces import compared
    from qshard.numerics._sums import LEAST, Sums, exponent_counts, magnitudes

    fmt, whole = as_format(fmt, "histogram"), whole_of(x, "histogram")
    codes, total = np.zeros(256, np.int64), Sums()
    given: dict[int, int] = {}
    zeros = 0
    for piece in compared(whole, fmt, usage, seed, "histogram"):
        total += piece.sums(lambda elements: None)
        own = magnitudes(piece.parts.data, fmt)
        rows, columns = piece.own or (slice(None), slice(None))
        codes += np.bincount(own[rows, columns].reshape(-1), minlength=codes.size)
        size = np.abs(piece.x.astype(np.float32))
        zeros += int(np.count_nonzero(size == 0)) - (own.size - own[rows, columns].size)
        for e, count in exponent_counts(size).items():
            given[e] = given.get(e, 0) + count
    merged, found, all_zeros, all_codes = Sums(), dict[int, int](), 0, np.zeros_like(codes)
    for part, part_given, part_zeros, part_codes in whole.gathered((total, given, zeros, codes)):
        merged += part
        all_zeros += part_zeros
        all_codes += part_codes
        for e, count in part_given.items():
            found[e] = found.get(e, 0) + count
    errors = {i + LEAST: float(merged.errors[i] / merged.counts[i]) for i in np.flatnonzero(merged.counts).tolist()}
    element = fmt.element
    return Histogram(
        format=fmt,
        usage=usage,
        given=dict(sorted(found.items())),
        zeros_given=all_zeros,
        nonfinite_given=merged.nonfinite_given,
        codes={_value(element, code): int(all_codes[code]) for code in range(element.max_code + 1) if all_codes[code]},
        error=errors,
    )


def _value(element: Any, code: int) -> float:
    """What a code without sign stands for."""
    field, mantissa = divmod(code, 2**element.mantissa_bits)
    if not field:
        return math.ldexp(mantissa, 1 - element.bias - element.mantissa_bits)
    return math.ldexp(2**element.mantissa_bits + mantissa, field - element.bias - element.mantissa_bits)


@dataclass(frozen=True, kw_only=True)
class GemmError(Frame):
    """What formats of the operands do to `a @ b.T`; what `gemm_error` returns.

    Attributes:
      format_a, format_b: of the operands; None for one that stays as it is.
      sqnr_db: `10 * log10(sum(y**2) / sum((z - y)**2))`, where `y = a @ b.T` and z is of quantized operands, both in
        float64.
      of_a_db, of_b_db: the same where that operand alone is quantized; infinity for one that stays as it is.
      max_error: the largest `|z - y|`, divided by the root mean square of y.
      mean_error: the mean of `z - y`, divided by the same: a bias, which stochastic rounding has none of.
      predicted_db: what independent errors would give: their noises added.
    """

    format_a: Format | None
    format_b: Format | None
    sqnr_db: float
    of_a_db: float
    of_b_db: float
    max_error: float
    mean_error: float
    predicted_db: float

    def records(self) -> list[dict[str, Any]]:
        named = {"format_a": str(self.format_a), "format_b": str(self.format_b)}
        return [{**vars(self), **named}]

    def plot(self) -> Figure:
        """SQNR of both, of each alone, and predicted.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from qshard.numerics._drawn import bars_of

        names = ["both", f"a alone: {self.format_a}", f"b alone: {self.format_b}", "predicted"]
        return bars_of(names, {"SQNR in dB": [self.sqnr_db, self.of_a_db, self.of_b_db, self.predicted_db]})


@np.errstate(all="ignore")
def gemm_error(
    a: Any, b: Any, fmt_a: FormatLike | None, fmt_b: FormatLike | None = None, *, seed: int = 0
) -> GemmError:
    """The error of `a @ b.T` where operands are quantized, against the product in float64.

    Args:
      a: `[*lead, K]`, `b`: `[*lead, K]`, real numbers; seen as matrices.
      fmt_a, fmt_b: formats of their rowwise planes, whose blocks run along K, or their names; None: not quantized.
      seed: of stochastic rounding; `b` draws with the next one.

    Returns:
      Errors of the operands' formats alone: products and sums are in float64, whatever a device would do.

    Raises:
      TypeError: an operand does not hold real numbers.
      ValueError: their K differ, a format cannot hold an operand, or one is sharded over processes or devices.

    Elements that are not finite, as given or as stored, count as 0 in both products. Sharded arrays are refused: pass
    what one device has, or some of their rows.

    >>> found = gemm_error(np.eye(2), [[448.0, 17.0]], None, "FP8_E4M3")  # 17 becomes 16
    >>> round(found.of_b_db, 2), found.of_a_db
    (53.03, inf)

    Sources: the prediction is that of independent errors, NUMERICS.md has what products on devices lose beside it.
    """
    fmt_a, fmt_b = (None if fmt is None else as_format(fmt, "gemm_error") for fmt in (fmt_a, fmt_b))
    wholes = [_one_piece(x, name) for x, name in ((a, "a"), (b, "b"))]
    if wholes[0].shape[-1:] != wholes[1].shape[-1:]:
        raise ValueError(
            f"gemm_error: a {wholes[0].shape} and b {wholes[1].shape} do not end in one K; give b as [N, K]"
        )
    pairs = []
    for whole, fmt, name, own in zip(wholes, (fmt_a, fmt_b), "ab", (seed, seed + 1), strict=True):
        given = whole.pieces[0].array.astype(np.float64)
        value = given if fmt is None else _stored(whole, fmt, own, name)
        counted = np.isfinite(given) & np.isfinite(value)
        pairs.append((np.where(counted, given, 0), np.where(counted, value, 0)))
    (exact_a, stored_a), (exact_b, stored_b) = pairs
    y = exact_a @ exact_b.T
    signal = float(np.sum(y * y))
    error = stored_a @ stored_b.T - y
    noises = [
        float(np.sum(np.square(part)))
        for part in (error, (stored_a - exact_a) @ exact_b.T, exact_a @ (stored_b - exact_b).T)
    ]
    rms = math.sqrt(signal / y.size) if y.size else 0.0
    return GemmError(
        format_a=fmt_a,
        format_b=fmt_b,
        sqnr_db=decibels(signal, noises[0]),
        of_a_db=decibels(signal, noises[1]),
        of_b_db=decibels(signal, noises[2]),
        max_error=float(np.abs(error).max()) / rms if rms else math.nan,
        mean_error=float(error.mean()) / rms if rms else math.nan,
        predicted_db=decibels(signal, noises[1] + noises[2]),
    )


def _one_piece(x: Any, name: str) -> Whole:
    whole = whole_of(x, "gemm_error")
    if not whole.is_one:
        raise ValueError(f"gemm_error: {name} {whole.shape} is sharded; pass some of its rows as a plain array")
    return whole


def _stored(whole: Whole, fmt: Format, seed: int, name: str) -> NDArray[np.float64]:
    """The values of the rowwise plane of a matrix."""
    from qshard._core import quantize_steps
    from qshard.numerics import _kernels as kernels

    matrix = np.ascontiguousarray(whole.pieces[0].array)
    plane(fmt, matrix_shape(whole.shape), Usage.ROWWISE, op="gemm_error", name=name)
    draws = kernels.draws("gemm_error", seed) if fmt.stochastic else None
    parts = quantize_steps.quantize(kernels.ops, matrix, fmt, Usage.ROWWISE, draws=draws)[Usage.ROWWISE]
    value: NDArray[np.float32] = quantize_steps.dequantize(kernels.ops, parts, fmt, Usage.ROWWISE, "float32")
    return value.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class LayerSensitivity:
    """What quantizing one layer alone does to a model.

    Attributes:
      layer, format: what was quantized, and to what.
      loss: with it; NaN if the model gives no single number.
      change: of the loss, from that without it.
      output_db: SQNR of all outputs, of which a loss is one.
    """

    layer: str
    format: str
    loss: float
    change: float
    output_db: float


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Frame):
    """What `sensitivity` returns: `rows`, the most harmful first, and the loss of the model as it is."""

    loss: float
    rows: tuple[LayerSensitivity, ...]

    def records(self) -> list[dict[str, Any]]:
        return [dict(vars(row)) for row in self.rows]

    def plot(self) -> Figure:
        """Change of the loss, and SQNR of outputs, of each layer.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from qshard.numerics._drawn import bars_of

        names = [f"{row.layer}, {row.format}" for row in self.rows]
        parts = {"change of the loss": [row.change for row in self.rows]}
        return bars_of(names, {**parts, "SQNR of outputs, dB": [row.output_db for row in self.rows]})


def sensitivity(
    model: Any,
    batch: Any,
    formats: Iterable[FormatLike] | FormatLike = "NVFP4",
    *,
    params: Any = None,
    layers: Callable[[str], bool] | None = None,
    seed: int = 0,
) -> Sensitivity:
    """What the format of one weight does to the outputs of a model, all others being as they are: for each, a run.

    Args:
      model: a `torch.nn.Module`, or, with `params`, a function `model(params, *batch)`, as of JAX. It gives a loss, or
        any tree of arrays. Modules run as they are, in the mode that they are in, without gradients.
      batch: what is given to it: a tuple, or a dict of keywords; anything else is one argument.
      formats: of the rowwise plane of a weight, or their names.
      params: a pytree of JAX arrays. Weights are those of two or more axes.
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
    from qshard._core.validation import as_formats
    from qshard.numerics._models import model_of

    chosen = as_formats(formats, "sensitivity")
    target = model_of(model, params, "sensitivity")
    names = [name for name in target.names() if layers is None or layers(name)]
    exact = target.run(batch)
    loss, rows = _loss(exact), []
    for name in names:
        weight = target.weight(name)
        for fmt in chosen:
            value = _quantized(weight, fmt, seed)
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
            f"sensitivity: no weight is left of {len(target.names())} that {', '.join(map(str, chosen))} can hold; "
            "pass other formats, or layers that choose some"
        )
    order = sorted(rows, key=lambda row: (-abs(row.change) if math.isfinite(row.change) else 0.0, row.output_db))
    return Sensitivity(loss=loss, rows=tuple(order))


def _quantized(weight: NDArray[Any], fmt: Format, seed: int) -> NDArray[np.float32] | None:
    """The values that are stored of a weight; None if the format cannot hold it."""
    from qshard.numerics._arrays import of_floats
    from qshard.numerics._floats import as_float

    whole = of_floats(as_float(weight, "sensitivity"))
    try:
        plane(fmt, matrix_shape(whole.shape), Usage.ROWWISE)
    except ValueError:
        return None
    return _stored(whole, fmt, seed, "weight").astype(np.float32).reshape(whole.shape)


def _loss(outputs: list[NDArray[np.float64]]) -> float:
    return float(outputs[0].reshape(())) if len(outputs) == 1 and outputs[0].size == 1 else math.nan


def _output_db(exact: list[NDArray[np.float64]], outputs: list[NDArray[np.float64]]) -> float:
    signal = sum(float(np.sum(np.square(part))) for part in exact)
    noise = sum(float(np.sum(np.square(b - a))) for a, b in zip(exact, outputs, strict=True))
    return decibels(signal, noise)
