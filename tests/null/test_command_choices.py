"""Format choices in the report: measured formats, recommendations for a budget, and the plot."""

import math
import re

import numpy as np
import pytest

from qshard import reference
from qshard.formats import FORMATS
from support.checkpoints import numbers, ok, read, reported, small_model, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")


@pytest.fixture
def model(tmp_path):
    return small_model(tmp_path / "model.safetensors")


def test_rotated_and_stochastic(model):
    found = reported(model, "--formats", "NVFP4,NVFP4_16x16", "--usage", "both", "--rotate", "--stochastic", "4")
    rows = {(row["format"], row["usage"]): row for row in found["layers"][0]["formats"]}
    assert rows.keys() == {
        ("NVFP4", "rowwise"),
        ("NVFP4", "columnwise"),
        ("NVFP4[hadamard=True]", "rowwise"),
        ("NVFP4[hadamard=True]", "columnwise"),
        ("NVFP4[rounding=stochastic]", "rowwise"),
        ("NVFP4[rounding=stochastic]", "columnwise"),
        ("NVFP4_16x16", "rowwise"),
        ("NVFP4_16x16[rounding=stochastic]", "rowwise"),
        ("NVFP4[hadamard=True, rounding=stochastic]", "rowwise"),
        ("NVFP4[hadamard=True, rounding=stochastic]", "columnwise"),
    }
    for row in rows.values():
        assert len(set(row["draws"])) == (4 if "stochastic" in row["format"] else 0)
    drawn = rows["NVFP4[rounding=stochastic]", "rowwise"]
    assert drawn["sqnr_db"] == pytest.approx(np.mean(drawn["draws"]), rel=1e-12)
    assert drawn["sqnr_db"] < rows["NVFP4", "rowwise"]["sqnr_db"]
    assert "NVFP4[rounding=stochastic]: the mean of 2 draws, of " in ok(
        "report", model, "--formats", "NVFP4", "--stochastic", "2"
    )


def test_what_is_rotated_is_a_choice_of_its_plane(model):
    """Only columnwise planes are rotated: rowwise, `convert` would write plain NVFP4; both planes count both sizes."""
    arguments = ("--formats", "NVFP4", "--rotate", "--layers", "layers.*", "--usage")
    for usage, planes in (
        ("rowwise", ["columnwise"]),
        ("columnwise", ["columnwise"]),
        ("both", ["rowwise", "columnwise"]),
    ):
        found = reported(model, *arguments, usage)
        assert [row["usage"] for row in found["layers"][0]["formats"] if "hadamard" in row["format"]] == planes
        names = {"NVFP4", "as they are"} | ({"NVFP4[hadamard=True]"} if usage != "rowwise" else set())
        uniform = found["tradeoff"]["uniform"]
        assert uniform.keys() == names
        assert len({uniform[name]["bytes_per_element"] for name in names - {"as they are"}}) == 1
        assert any("only for the columnwise plane" in note for note in found["notes"]) == (usage == "rowwise")
    alone = reported(model, "--formats", "NVFP4[hadamard=True]", "--layers", "layers.*")
    assert alone["ranking"] == {"format": "", "layers": []}


def test_nonfinite_and_zero_layers(tmp_path):
    nan, inf = numbers(), numbers()
    nan[3, 3], inf[5, 5] = math.nan, math.inf
    all_nan = np.full((32, 32), np.nan, np.float32)
    path = write(
        tmp_path / "a.safetensors", {"nan": nan, "inf": inf, "zero": 0 * numbers(), "all": all_nan, "w": numbers()}
    )
    found = reported(path, "--formats", "FP8_E4M3,MXFP4_32x32", "--budget", "4")
    harms = {layer["name"]: [row["harm"] for row in layer["formats"]] for layer in found["layers"]}
    assert harms["zero"] == [0, 0]
    assert harms["all"] == [None, None]
    assert None in harms["nan"]
    assert found["recommendation"]["formats"]["all"] == "F32"  # Nobody knows what else it may be.
    assert found["ranking"]["layers"][0]["harm"] is None
    assert 0 < found["tradeoff"]["curve"][-1]["harm"] < 1e-3
    text = ok("report", path)
    assert "no error is measured" in text
    assert "unknown" in text
    found = reported(path, "--layers", "all", "--formats", "FP8_E4M3", "--budget", "2")
    assert (found["recommendation"], len(found["notes"])) == (None, 1)
    assert "the smallest plan with known noise takes 4.0000 bytes" in found["notes"][0]


def test_the_page(model, tmp_path):
    """It has the picture and the text of the report, and loads nothing."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "a.html"
    text = ok("report", model, "--formats", "FP8_E4M3,FP8_128x128,NVFP4", "--html", page, "--budget", "0.8")
    html = page.read_text()
    assert html.count("data:image/png;base64,iVBOR") == 1
    assert not re.search(r"(?<!img )(src|href)=\"(?!data:)|url\(|@import", html)
    for line in (each.strip() for each in text.splitlines() if "SQNR dB" not in each):
        assert line.split("  ")[0] in html
    assert "--html report.html" not in text + html  # The hint has been taken.
    exact = write(tmp_path / "b.safetensors", {"w": np.ones((32, 32), np.float32)})
    ok("report", exact, "--html", page)
    assert "<img" not in page.read_text()  # No choice has any noise.


def test_the_picture():
    """The curve, a dot for each format, all in the legend and none like another, and the ring."""
    pytest.importorskip("matplotlib")
    from qshard.numerics._plots import tradeoff_chart

    curve, dots = [(0.5, 20.0), (1.0, 30.0)], {name: (i / 10, 20.0) for i, name in enumerate(FORMATS)}
    axes = tradeoff_chart("best", curve, dots, (0.5, 20.0)).axes[0]
    line, *others = axes.lines
    assert list(zip(*line.get_data(), strict=True)) == curve
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["best", *FORMATS, "the plan"]
    looks = {(each.get_marker(), each.get_color()) for each in others[:-1]}
    assert len(looks) == len(FORMATS)


def test_the_summary_comes_first(model):
    """One line per format by size, with how many layers it fits; then what else a report can do. SQNR has one sign."""
    hints = ("--budget 0.8 --plan plan.json plans a format per layer", "--html report.html plots the trade-off")
    lines = ok("report", model, "--formats", "NVFP4,FP8_E4M3").splitlines()
    assert lines[0] == f"{model}: 5 layers, 38514 elements, 154056 bytes"
    assert [line.split()[0] for line in lines[2:5]] == ["NVFP4", "FP8_E4M3", "as"]  # NVFP4 leaves one layer in float32
    assert lines[2].endswith(" 4 of 5")
    assert lines[3].endswith(" all")
    assert lines[5].startswith(hints[0])
    assert lines[6].startswith(hints[1])
    text = "\n".join(lines)
    assert re.search(r"^layer +SQNR dB$", text, re.MULTILINE)
    assert not re.search(r" -[0-9]+[.][0-9] *$", text, re.MULTILINE)
    assert "noise dB" not in text


def test_formats_that_fit_files_are_the_default(tmp_path):
    """A vocabulary that is no multiple of 32 has a number in every format, the rounding of the OCP scales too."""
    (layer,) = reported(write(tmp_path / "a.safetensors", {"embed": numbers((522, 64))}))["layers"]
    assert layer["left_out"] == {}
    names = [row["format"] for row in layer["formats"]]
    assert {"NVFP4", "MXFP4", "MXFP4[scale_rounding=floor]", "MXFP8_E4M3", "FP8_E4M3", "FP8_128x128"} < set(names)
    (layer,) = reported(tmp_path / "a.safetensors", "--formats", "MXFP8_32x32,NVFP4_16x16")["layers"]
    why = "shape (522, 64) is not a whole number of {} blocks; {} would fit"
    assert layer["left_out"] == {
        "MXFP8_32x32": why.format("32x32", "MXFP8_E4M3"),
        "NVFP4_16x16": why.format("16x16", "NVFP4"),
    }


def test_convolutions_are_folded(tmp_path):
    """Their blocks run over inputs and kernel: the codes are those of `[out, -1]`. Experts keep their three axes."""
    conv, experts = numbers((64, 16, 8, 1)), numbers((2, 32, 64), 1)
    path, out = write(tmp_path / "a.safetensors", {"conv": conv, "experts": experts}), tmp_path / "o.safetensors"
    found = {layer["name"]: layer for layer in reported(path, "--formats", "MXFP4")["layers"]}
    assert found["conv"]["remarks"] == ["a convolution, measured as 64 x 128"]
    assert found["experts"]["remarks"] == []
    assert "conv: a convolution, stored as 64 x 128" in ok("convert", path, out, "--format", "MXFP4")
    arrays = read(out)[0]
    expected = reference.quantize(conv.reshape(64, 128), "MXFP4").rowwise
    assert arrays["conv.rowwise.data"].tobytes() == expected.data.tobytes()
    assert arrays["conv.rowwise.scale_inv"].tobytes() == expected.scale_inv.tobytes()
    assert arrays["experts.rowwise.data"].shape == (2, 32, 32)
