"""Format choices in the report: measured formats, recommendations for a budget, and the plot."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import ml_dtypes
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
    """Well formed, with the curve, a dot for each format that fits all, and the ring; it loads nothing."""
    page = tmp_path / "a.html"
    ok("report", model, "--formats", "FP8_E4M3,FP8_128x128,NVFP4", "--html", page, "--budget", "0.8")
    html = page.read_text()
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    kinds = [each.get("class") for each in svg]
    assert kinds.count("curve") == 1
    assert kinds.count("uniform") == 3
    assert kinds.count("chosen") == 1
    _, _, width, height = map(float, svg.get("viewBox").split())
    curve = next(each for each in svg if each.get("class") == "curve")
    points = [tuple(map(float, point.split(","))) for point in curve.get("points").split()]
    assert points == sorted(points)  # More bytes, more SQNR: up to the right.
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 < x < width and 0 < y < height for x, y in points)
    assert not re.search(r"(src|href)=|url\(|@import", html)
    for name in ("layers.0.w", "odd", "norm", "FP8_128x128"):
        assert name in html
    exact = write(tmp_path / "b.safetensors", {"w": np.ones((32, 32), np.float32)})
    ok("report", exact, "--html", page)
    assert "No choice has any noise" in page.read_text()


def test_names_in_the_picture(tmp_path):
    """Where most formats have a byte an element: no two over each other, and none outside."""
    from qshard._cli.render import HEIGHT, LETTER, LINE, WIDTH

    page = tmp_path / "a.html"
    path = write(tmp_path / "a.safetensors", {"w": numbers((128, 128)).astype(ml_dtypes.bfloat16)})
    ok("report", path, "--formats", "all", "--html", page)
    html = page.read_text()
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    names = [each for each in svg if each.tag == "text" and each.text in FORMATS]
    assert len(names) == len(FORMATS)
    boxes = []
    for each in names:
        x, y, width = float(each.get("x")), float(each.get("y")), LETTER * len(each.text)
        x -= width if each.get("text-anchor") == "end" else 0
        assert x > 0
        assert x + width < WIDTH
        assert LINE < y < HEIGHT
        boxes.append((x, x + width, y))
    for one, other in itertools.combinations(boxes, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= LINE - 0.1  # As it is rounded.


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
