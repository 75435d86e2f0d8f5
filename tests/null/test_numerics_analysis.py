"""histogram, gemm_error and sensitivity of functions, beside numbers made by hand or by the reference; logs; frames."""

import importlib.util
import io
import itertools
import math
import sys

import numpy as np
import pytest

from qshard import reference
from qshard._core.placement import Box
from qshard.formats import FORMATS, Usage
from qshard.numerics import gemm_error, histogram, read_log, sensitivity, write_log
from qshard.numerics._arrays import of_shards
from qshard.numerics._training_steps import StepStats, Totals, layer_stats
from qshard.recipes import Role
from support.awkward import TAME, awkward_values
from support.formats import VARIANTS
from support.stats import exponent


@pytest.mark.parametrize("fmt", VARIANTS, ids=str)
def test_histogram_counts_every_element(fmt):
    x = awkward_values((64, 96), 2, kinds=TAME)
    for usage in Usage.BOTH.planes:
        if usage is Usage.COLUMNWISE and fmt.scaling.global_scale == "row":
            continue
        found = histogram(x, fmt, usage, seed=3)
        quantized = reference.quantize(x, fmt, usage, seed=3)
        given = np.abs(reference.tensor_of_plane(x, fmt, usage).astype(np.float64))
        values, counts = np.unique(np.abs(quantized.elements(usage).astype(np.float64)), return_counts=True)
        assert found.codes == dict(zip(values.tolist(), counts.tolist(), strict=True))
        shown = exponent(given[given > 0])
        assert found.given == {int(e): int(np.sum(shown == e)) for e in np.unique(shown)}
        assert (found.zeros_given, found.nonfinite_given) == (np.sum(given == 0), 0)


def test_histogram_of_pieces_and_of_what_is_not_finite():
    x = awkward_values((48, 80), 2)
    cuts = [0, 7, 33, 48]
    parts = [(x[a:b], Box(x.shape, (a, 0), (b - a, 80))) for a, b in itertools.pairwise(cuts)]
    made = of_shards(x.shape, "float32", parts, None, "histogram")
    for fmt in ("FP8_E4M3", "FP8_128x128", "NVFP4_16x16"):
        whole, pieces = histogram(x, fmt), histogram(made, fmt)
        assert (whole.given, whole.codes, whole.zeros_given) == (pieces.given, pieces.codes, pieces.zeros_given)
        assert sum(whole.given.values()) + whole.zeros_given + whole.nonfinite_given == x.size
        assert whole.nonfinite_given == np.sum(~np.isfinite(x))


def test_gemm_error_is_that_of_the_reference():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((64, 64)), rng.standard_normal((32, 64))
    a, b = a.astype(np.float32), b.astype(np.float32)
    y = a.astype(np.float64) @ b.T.astype(np.float64)
    for name in FORMATS:
        values = [reference.quantize(x, FORMATS[name], Usage.ROWWISE).dequantize(np.float32) for x in (a, b)]
        z = values[0].astype(np.float64) @ values[1].T.astype(np.float64)
        found = gemm_error(a, b, name, name)
        assert found.sqnr_db == pytest.approx(10 * math.log10(np.sum(y**2) / np.sum((z - y) ** 2)), rel=1e-9)
        assert found.max_error == pytest.approx(np.abs(z - y).max() / np.sqrt(np.mean(y**2)), rel=1e-9)
        assert found.predicted_db == pytest.approx(found.sqnr_db, abs=1)  # Errors of the two are independent.
        alone = gemm_error(a, b, name)
        assert (alone.of_b_db, alone.sqnr_db) == (math.inf, pytest.approx(found.of_a_db, rel=1e-12))


def test_stochastic_rounding_has_less_bias():
    """Of elements that all lie at one place between two codes. Nearest rounds them all one way."""
    a = np.full((64, 256), 1.1, np.float32)
    a[:, ::16] = 6.0
    b = np.ones((16, 256), np.float32)
    fmt = FORMATS["NVFP4"]
    nearest, drawn = (gemm_error(a, b, fmt.with_options(rounding=r)).mean_error for r in ("nearest", "stochastic"))
    assert abs(drawn) < abs(nearest) / 4


def test_mistakes():
    with pytest.raises(ValueError, match=r"gemm_error: a \(2, 3\) and b \(2, 4\) have different last axes \(K\)"):
        gemm_error(np.ones((2, 3)), np.ones((2, 4)), "FP8_E4M3")
    with pytest.raises(ValueError, match=r"gemm_error: b \(2, 3\) is not a whole number of 1x32 blocks"):
        gemm_error(np.ones((2, 3)), np.ones((2, 3)), None, "MXFP8_E4M3")
    parts = [(np.ones((1, 4)), Box((2, 4), (row, 0), (1, 4))) for row in range(2)]
    with pytest.raises(ValueError, match=r"gemm_error: a \(2, 4\) is sharded"):
        gemm_error(of_shards((2, 4), "float64", parts, None, "x"), np.ones((2, 4)), "FP8_E4M3")
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module; pass one, or pass a function with params="):
        sensitivity(lambda x: x, (1,))
    with pytest.raises(ValueError, match="sensitivity: none of 1 weights fits MXFP8_E4M3; pass other"):
        sensitivity(lambda w, x: x @ w[0].T, (np.ones((2, 3)),), "MXFP8_E4M3", params=[np.ones((2, 3), np.float32)])


def test_sensitivity_of_a_function():
    """One weight at a time, and only it; nothing stays changed."""
    rng = np.random.default_rng(0)
    params = {
        "up": rng.standard_normal((96, 64)).astype(np.float32),
        "rest": [np.ones(4, np.float32)],
        "down": rng.standard_normal((32, 96)).astype(np.float32),
    }
    kept = {"up": params["up"].copy(), "down": params["down"].copy()}
    x = rng.standard_normal((16, 64)).astype(np.float32)

    def model(w, x, *, power=2):
        return {"loss": np.mean(np.abs(np.tanh(x @ w["up"].T / 8) @ w["down"].T) ** power)}

    found = sensitivity(model, (x,), ["FP8_E4M3", "NVFP4"], params=params, layers=lambda name: name != "rest.0")
    assert found.loss == pytest.approx(float(model(params, x)["loss"]))
    assert len(found.rows) == 4
    for row in found.rows:
        value = reference.quantize(kept[row.layer], FORMATS[row.format], Usage.ROWWISE).dequantize(np.float32)
        assert row.loss == pytest.approx(float(model({**params, row.layer: value}, x)["loss"]), rel=1e-12)
        assert row.change == row.loss - found.loss
    changes = [abs(row.change) for row in found.rows]
    assert changes == sorted(changes, reverse=True)
    assert all(np.array_equal(params[name], kept[name]) for name in kept)
    many = sensitivity(lambda w, x: (x @ w["up"].T, x), {"x": x}, "FP8_E4M3", params={"up": params["up"]})
    assert math.isnan(many.loss)
    assert 20 < many.rows[0].output_db < 60


def rows(*, amax=2.0, noise=0.04):
    total = Totals(amax=amax, signal=4.0, noise=noise, elements=8, zeros_made=2, calls=1)
    return StepStats(tuple(layer_stats("up", role, FORMATS["FP8_E4M3"], total) for role in Role))


def test_a_log_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "log.jsonl"
    with path.open("w") as file:
        for step in range(3):
            write_log(file, step, rows(amax=1.0 + step, noise=0.0), run="fp8", loss=3.0 - step)
        file.write('{"step": 3, "layer"')  # as a run that was stopped leaves it
    log = read_log(path)
    assert log.series("amax", "up", Role.GRADIENT, run="fp8") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert log.series("sqnr_db", "up", "weight")[0] == math.inf
    assert math.isnan(log.series("scale_low", "up", "weight")[2])
    assert log.series("loss", "up", "weight") == {0: 3.0, 1: 2.0, 2: 1.0}
    assert (log.layers, len(log.records())) == (("up",), 9)
    with pytest.raises(KeyError, match="no 'amax' of"):
        log.series("amax", "up", "weight", run="bf16")
    path.write_text('{"step": 3, "layer"\n{}')
    with pytest.raises(ValueError, match=r"read_log: line 1 .* is not a record"):
        read_log(path)


def test_a_log_of_runs_that_diverge():
    """A loss that is not finite is a number again. Two runs do not become one series, and no field is lost."""
    file = io.StringIO()
    for run, losses in {"fp8": (3.0, math.inf, math.nan), "bf16": (2.0, 1.0)}.items():
        for step, loss in enumerate(losses):
            write_log(file, step, rows(amax=loss), run=run, loss=loss)
    write_log(file, 1, rows(), run="bf16", loss=0.5)  # as a resumed run logs a step again
    with pytest.raises(TypeError, match="write_log: amax is a field of each record already"):
        write_log(file, 3, rows(), amax=1.0)
    log = read_log(file.getvalue().splitlines(keepends=True))
    assert str(log.series("loss", "up", "weight", run="fp8")) == "{0: 3.0, 1: inf, 2: nan}"
    assert log.series("loss", "up", "weight", run="bf16") == {0: 2.0, 1: 0.5}
    with pytest.raises(ValueError, match="step 0 has records of run='fp8' and 'bf16'; pass run= to select one"):
        log.series("amax", "up", "weight")


def results():
    w = {"up": np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)}
    x = np.ones((4, 32), np.float32)
    return [
        rows(),
        rows(noise=0.0),
        histogram(w["up"], "NVFP4"),
        gemm_error(x, w["up"], "FP8_E4M3", "MXFP4"),
        sensitivity(lambda w, x: (x @ w["up"].T).mean(), (x,), params=w),
        read_log(['{"step": 0, "layer": "<up>", "role": "gradient", "amax": "nan"}']),
    ]


def test_results_have_records_html_and_plots():
    for result in results():
        page = result._repr_html_()
        assert page.count("<tr>") == len(result.records()) + 1
        assert "<up>" not in page
        assert len(str(result).split("\n")) == len(result.records()) + 1
        if importlib.util.find_spec("matplotlib"):
            assert result.plot().get_axes()


def test_results_are_frames_of_pandas():
    pytest.importorskip("pandas")
    for result in results():
        frame, records = result.to_pandas(), result.records()
        assert list(frame.columns) == list(dict.fromkeys(name for record in records for name in record))
        for (_, row), record in zip(frame.iterrows(), records, strict=True):
            for name, value in record.items():
                assert row[name] == value or (row[name] != row[name] and value != value), name


def test_without_pandas_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for result in results():
        with pytest.raises(ImportError, match="to_pandas: pandas is not installed; pip install pandas"):
            result.to_pandas()
