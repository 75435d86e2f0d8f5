"""Format choices in the report: measured formats, recommendations for a budget, and the plot."""

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import ml_dtypes
import numpy as np
import pytest

from qshard.formats import FORMATS
from support.checkpoints import numbers, ok, reported, small_model, write

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
    assert found["tradeoff"]["curve"][-1]["harm"] == 0
    text = ok("report", path)
    assert "no error is measured" in text
    assert "unknown" in text
    found = reported(path, "--layers", "all", "--formats", "FP8_E4M3", "--budget", "2")
    assert (found["recommendation"], len(found["notes"])) == (None, 1)
    assert "the smallest choice with known harm takes 4.0000 bytes" in found["notes"][0]


def test_the_recommendation_is_the_best_there_is(tmp_path):
    """Of every mix, at the budgets that points of the curve have; between those no worse than the last point."""
    arrays = {f"w{i}": numbers((32, 32 * (i + 1)), i) * np.exp(i * numbers((32, 1), 9)) for i in range(4)}
    path = write(tmp_path / "a.safetensors", arrays)
    found = reported(path, "--formats", "FP8_E4M3,MXFP4_32x32,NVFP4_16x16")
    elements = sum(x.size for x in arrays.values())
    choices = []
    for layer in found["layers"]:
        size = math.prod(layer["shape"])
        own = [(4 * size, 0.0)]
        choices.append(own + [(row["bits_per_element"] * size / 8, row["harm"]) for row in layer["formats"]])
    mixes = [(sum(b for b, _ in mix), sum(h for _, h in mix)) for mix in itertools.product(*choices)]
    curve = found["tradeoff"]["curve"]
    assert len(curve) > 6
    assert [point["harm"] for point in curve] == sorted((point["harm"] for point in curve), reverse=True)
    for point in curve:
        least = min(harm for size, harm in mixes if size <= point["bytes_per_element"] * elements * (1 + 1e-12))
        assert 4 * point["harm"] == pytest.approx(least, rel=1e-9)
    for budget in (0.55, 0.8, curve[2]["bytes_per_element"], 1.5, 3.0, 100.0):
        chosen = reported(path, "--formats", "FP8_E4M3,MXFP4_32x32,NVFP4_16x16", "--budget", budget)["recommendation"]
        assert chosen["bytes_per_element"] <= budget
        least = min(harm for size, harm in mixes if size <= budget * elements)
        assert 4 * chosen["harm"] == pytest.approx(least, rel=1e-9)
    arguments = ("--formats", "FP8_E4M3,MXFP4_32x32,NVFP4_16x16", "--budget")
    assert reported(path, *arguments, f"{elements * 0.8 / 1000} kB")["recommendation"] == {
        **reported(path, *arguments, "0.8")["recommendation"],
        "budget": pytest.approx(0.8),
    }
    uniform = found["tradeoff"]["uniform"]
    assert uniform.keys() == {"FP8_E4M3", "MXFP4_32x32", "NVFP4_16x16", "as they are"}
    assert uniform["as they are"] == {"bytes_per_element": 4, "harm": 0}


@pytest.mark.parametrize("few", [False, True])
def test_recommendations_against_all_mixes(few, monkeypatch):
    """Random choices, some of equal size or harm, some of unknown harm: the best of all mixes is found.

    If few mixes are kept, the result fits the budget and is no worse than the curve.
    """
    from types import SimpleNamespace

    from qshard._cli import allocation
    from qshard._cli.layers import Choice

    if few:
        monkeypatch.setattr(allocation, "MOST_MIXES", 2)
    rng = np.random.default_rng(0)
    for _ in range(150):
        layers = []
        for i in range(rng.integers(1, 6)):
            made = [
                Choice(f"{j}", int(rng.integers(1, 30)), None if rng.random() < 0.1 else float(rng.integers(1, 40)))
                for j in range(rng.integers(0, 6))
            ]
            choices = {choice.name: choice for choice in [*made, Choice("own", 40, 0.0)]}
            layers.append(
                SimpleNamespace(entry=SimpleNamespace(name=f"w{i}", elements=10, dtype="own"), choices=choices)
            )
        known = [[each for each in layer.choices.values() if each.harm is not None] for layer in layers]
        mixes = [(sum(c.nbytes for c in mix), sum(c.harm for c in mix)) for mix in itertools.product(*known)]
        curve = allocation.tradeoff(layers).curve
        for size in range(0, 40 * len(layers) + 2):
            found = allocation.recommend(layers, size / (10 * len(layers)))
            fitting = [harm for nbytes, harm in mixes if nbytes <= size]
            assert (found is None) == (not fitting)
            if found is None:
                continue
            nbytes = sum(choice.nbytes for choice in found.choices.values())
            harm = sum(choice.harm for choice in found.choices.values())
            assert nbytes <= size
            assert list(found.choices) == [layer.entry.name for layer in layers]
            assert found.point.bytes_per_element == nbytes / (10 * len(layers))
            if few:
                on_curve = [p.harm for p in curve if p.bytes_per_element * 10 * len(layers) <= size * (1 + 1e-9)]
                assert harm <= min(on_curve) * len(layers) * (1 + 1e-9)
            else:
                assert harm == min(fitting)
                assert nbytes == min(b for b, h in mixes if h == harm)


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
    assert points == sorted(points)  # More bytes, less noise: down to the right.
    assert [y for _, y in points] == sorted(y for _, y in points)
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


def test_text_says_what_its_numbers_are_and_what_else_there_is(model):
    """SQNR and the noise-to-signal ratio in dB have opposite signs, so both are named."""
    hint = "--budget 0.8 recommends a format per layer"
    text = ok("report", model, "--formats", "NVFP4")
    assert re.search(r"^layer +noise dB$", text, re.MULTILINE)
    assert re.search(r"^formats +bytes +noise dB +more noise, longer bar", text, re.MULTILINE)
    assert text.splitlines()[-1].startswith(hint)
    assert hint not in ok("report", model, "--formats", "NVFP4", "--budget", "2")
