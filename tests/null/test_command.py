"""The command on valid files: reports and output for every dtype, for shards and for unusual names."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from qshard import formats, reference
from qshard._core.serialization import KEY, parse_metadata
from qshard.formats import FORMATS, Usage
from qshard.layout import matrix_shape, plane
from support.awkward import awkward_values
from support.checkpoints import DTYPES, numbers, ok, qshard, read, reported, sharded, small_model, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")

ODD_NAMES = [
    "λ/μ.ü",
    "a b",
    "x" * 3000,
    "[0]",
    "*",
    "../up",
    "<b>&amp;",
    "\x1b[2J",
    "new\nline",
    "data_offsets",
    '"data_offsets":',
    "",
    "w.0",
    "w.10",
    "w.9",
    "‮",
]


@pytest.fixture
def model(tmp_path):
    return small_model(tmp_path / "model.safetensors")


def test_info():
    from qshard import build_info

    text = ok("info")
    assert text.startswith(build_info())
    assert re.search(r"^libraries: click \S+, rich \S+, safetensors \S+$", text, re.MULTILINE)
    assert re.search(r"^grouped products: (none: .+|cuBLASLt \d+\.\d+\.\d+, /.+)$", text, re.MULTILINE)
    facts = json.loads(ok("info", "--json"))
    assert facts["build_info"] == build_info()
    assert facts["simd"] in facts["build"]["simd"].split(",")


def test_bench():
    made = json.loads(ok("bench", "--size", "100", "--rounds", "1", "--formats", "all", "--json"))
    rows = {row["name"]: row for row in made["timings"]}
    assert made["size"] == 128
    assert rows["copy float32"]["percent_of_copy"] == 100
    assert {f"quantize bfloat16 to {name}" for name in FORMATS} < rows.keys()
    assert all(row["us"] > 0 for row in rows.values())
    read, written = 128 * 128 * 2, 128 * 128 * 0.5 + 128 * 8 + 4
    row = rows["quantize bfloat16 to NVFP4"]
    assert row["gb_per_s"] * row["us"] * 1e3 == pytest.approx(read + written)
    assert "copy float32" in ok("bench", "--size", "128", "--rounds", "1", "--formats", "MXFP4")


def test_numbers_are_those_of_stats(model):
    from qshard.numerics import stats

    found = reported(model, "--formats", "NVFP4,FP8_E4M3", "--usage", "both")
    arrays = read(model)[0]
    assert [layer["name"] for layer in found["layers"]] == [f"layers.{i}.w" for i in range(4)] + ["odd"]
    for layer in found["layers"][:4]:
        rows = [(row["format"], row["usage"]) for row in layer["formats"]]
        assert rows == [("NVFP4", "rowwise"), ("NVFP4", "columnwise"), ("FP8_E4M3", "rowwise")]
        for row in layer["formats"]:
            expected = stats(arrays[layer["name"]], row["format"], Usage[row["usage"].upper()])
            for name in (
                "sqnr_db",
                "max_relative_error",
                "mean_relative_error",
                "zeros_made",
                "saturated",
                "subnormal",
            ):
                assert row[name] == getattr(expected, name)
            assert (row["worst_block_db"], tuple(row["worst_block"])) == (expected.worst_block_db, expected.worst_block)
            assert row["harm"] == 10 ** (-expected.sqnr_db / 10)
        x = arrays[layer["name"]].astype(np.float64)
        assert layer["outliers"] == np.mean(np.abs(x) > 6 * np.sqrt(np.mean(x**2)))
    assert (
        "shape (33, 50) is not a whole number of 1x16 blocks; FP8_E4M3 would fit"
        in found["layers"][4]["left_out"]["NVFP4"]
    )
    assert found["left_out"] == {"norm": "fewer than 2 axes", "ids": "I64: not of real numbers"}


def test_csv_has_the_same(model):
    arguments = (
        "--formats",
        "MXFP4_32x32,FP8_E5M2",
        "--layers",
        "layers.[13].w",
        "--layers",
        "norm",
        "--layers",
        "odd",
    )
    rows = list(csv.DictReader(io.StringIO(ok("report", model, "--csv", *arguments))))
    found = reported(model, *arguments)
    assert [row["layer"] for row in rows if row["bits_per_element"]] == [
        layer["name"] for layer in found["layers"] for _ in layer["formats"]
    ]
    assert {row["layer"] for row in rows} == {"layers.1.w", "layers.3.w", "norm", "odd"}
    flat = [(layer, row) for layer in found["layers"] for row in layer["formats"]]
    for line, (layer, row) in zip([row for row in rows if row["bits_per_element"]], flat, strict=True):
        assert (line["layer"], line["format"], line["sqnr_db"]) == (
            layer["name"],
            row["format"],
            str(row["sqnr_db"] or ""),
        )
    assert sum("left out: " in row["notes"] for row in rows) == 2


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name[0] in "FB" and name not in ("BOOL", "F8_E8M0")])
def test_every_dtype(dtype, tmp_path):
    """All dtypes are accepted; 8-bit values survive FP8 exactly, up to a power-of-two scale."""
    x = numbers().astype(DTYPES[dtype])
    path = write(tmp_path / "a.safetensors", {"w": x})
    (layer,) = reported(path, "--formats", "MXFP8_32x32")["layers"]
    wide = x.astype(np.float32)
    value = reference.quantize(wide, formats.MXFP8_32x32).dequantize(np.float32).astype(np.float64)
    harm = np.sum((value - wide.astype(np.float64)) ** 2) / np.sum(wide.astype(np.float64) ** 2)
    assert layer["formats"][0]["harm"] == pytest.approx(harm, rel=1e-9)
    assert layer["dtype"] == dtype
    out = tmp_path / "out.safetensors"
    ok("convert", path, out, "--format", "MXFP8_32x32")
    arrays, metadata = read(out)
    stored = reference.quantize(wide, formats.MXFP8_32x32).rowwise
    assert arrays["w.rowwise.data"].tobytes() == stored.data.tobytes()
    assert parse_metadata(metadata[KEY])["w"].dtype == {"F64": "float32", "F32": "float32", "F16": "float16"}.get(
        dtype, "bfloat16"
    )


def test_float64_beyond_float32(tmp_path):
    x = numbers().astype(np.float64)
    x[0, 0], x[1, 1] = 1e300, 1e-300
    path, out = write(tmp_path / "a.safetensors", {"w": x}), tmp_path / "o.safetensors"
    (row,) = reported(path, "--formats", "FP8_E4M3")["layers"][0]["formats"]
    assert row["beyond_float32"] == 2 / x.size
    assert "outside the range of float32" in " ".join(row["notes"])
    text = ok("convert", path, out, "--format", "FP8_E4M3")
    assert "w has 2 elements outside the range of float32" in text
    assert "w has infinities or NaN, stored by the rule nonfinite=saturate" in text


def test_shards_folders_and_files_are_alike(tmp_path):
    arrays = {f"layers.{i}.w": numbers((32, 64), i) for i in range(12)}
    whole = write(tmp_path / "whole.safetensors", arrays)
    items = list(arrays.items())
    folder = sharded(tmp_path / "model", [dict(items[:5]), dict(items[5:])])
    alone = tmp_path / "alone"
    alone.mkdir()
    write(alone / "model.safetensors", arrays)
    given = [whole, folder, folder / "model.safetensors.index.json", alone]
    found = [reported(path, "--formats", "MXFP4,NVFP4") | {"checkpoint": None} for path in given]
    assert all(each == found[0] for each in found)
    assert [layer["name"] for layer in found[0]["layers"]] == list(arrays)  # 2 before 10.
    written = []
    for i, path in enumerate(given):
        out = tmp_path / f"{i}.safetensors"
        ok("convert", path, out, "--format", "NVFP4")
        written.append(read(out))
    assert [metadata.get("format") for _, metadata in written] == [None, "pt", "pt", None]
    for made, metadata in written:
        assert parse_metadata(metadata[KEY]) == parse_metadata(written[0][1][KEY])
        assert {name: array.tobytes() for name, array in made.items()} == {
            name: array.tobytes() for name, array in written[0][0].items()
        }


def test_tensors_that_the_index_does_not_name(tmp_path):
    folder = sharded(tmp_path / "model", [{"a": numbers(), "b": numbers()}])
    index = folder / "model.safetensors.index.json"
    read_index = json.loads(index.read_text())
    del read_index["weight_map"]["b"]
    index.write_text(json.dumps(read_index))
    note = "not in the index, and ignored: 1 tensor, such as b"
    found = reported(folder)
    assert ([layer["name"] for layer in found["layers"]], found["notes"]) == (["a"], [note])
    assert note in ok("report", folder)
    assert note in ok("convert", folder, tmp_path / "o.safetensors", "--format", "MXFP4")


def test_odd_names(tmp_path):
    arrays = {name: numbers((32, 32), i) for i, name in enumerate(ODD_NAMES)}
    path, page, out = write(tmp_path / "a.safetensors", arrays), tmp_path / "a.html", tmp_path / "o.safetensors"
    found = reported(path, "--html", page, "--budget", "1")
    assert {layer["name"] for layer in found["layers"]} == set(ODD_NAMES)
    assert found["recommendation"]["formats"].keys() == set(ODD_NAMES)
    text = ok("report", path)
    assert "\x1b" not in text
    assert "‮" not in text
    assert "x" * 101 not in text
    for name in ("*", "[0]", "λ/μ.ü", ""):
        (layer,) = reported(path, "--layers", name)["layers"]  # The name itself, not what it matches.
        assert layer["name"] == name
    html = page.read_text()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;amp;" in html
    ok("convert", path, out, "--format", "FP8_E4M3", "--keep", "*")  # One tensor, of that name.
    made, metadata = read(out)
    assert parse_metadata(metadata[KEY]).keys() == set(ODD_NAMES) - {"*"}
    assert made["*"].tobytes() == arrays["*"].tobytes()
    for name, each in parse_metadata(metadata[KEY]).items():
        stored = each.take(made, name)[Usage.ROWWISE]
        assert stored.data.tobytes() == reference.quantize(arrays[name], formats.FP8_E4M3).rowwise.data.tobytes()


def test_empty_scalar_and_integer_tensors(tmp_path):
    arrays = {
        "empty": np.zeros((0, 64), np.float32),
        "scalar": np.array(3.0, np.float32),
        "integers": np.arange(12).reshape(3, 4),
        "flags": np.ones((2, 2), bool),
        "complex": np.ones((2, 2), np.complex64),
        "w": numbers(),
    }
    path, out = write(tmp_path / "a.safetensors", arrays), tmp_path / "o.safetensors"
    found = reported(path)
    assert [layer["name"] for layer in found["layers"]] == ["w"]
    assert found["left_out"] == {
        "empty": "no elements",
        "scalar": "fewer than 2 axes",
        "integers": "I64: not of real numbers",
        "flags": "BOOL: not of real numbers",
        "complex": "C64: not of real numbers",
    }
    assert reported(path, "--layers", "scalar", "--formats", "FP8_E4M3")["layers"][0]["shape"] == []
    ok("convert", path, out, "--format", "MXFP4_32x32")
    made = read(out)[0]
    for name in arrays.keys() - {"w"}:
        assert (made[name].dtype, made[name].shape) == (arrays[name].dtype, arrays[name].shape)
        assert made[name].tobytes() == arrays[name].tobytes()
    only = write(tmp_path / "b.safetensors", {"empty": arrays["empty"]})
    done = qshard("report", only)
    assert (done.returncode, "has no layer to measure: 1 tensor, such as empty (no elements)" in done.stderr) == (
        2,
        True,
    )
    nothing = write(tmp_path / "c.safetensors", {})
    assert "it has no tensors" in qshard("report", nothing).stderr
    assert "it has no tensors" in qshard("convert", nothing, tmp_path / "d.safetensors", "--format", "MXFP4").stderr


@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", [*FORMATS, "NVFP4[hadamard=True, rounding=stochastic]", "NVFP4[four_over_six=mse]"])
def test_codes_are_those_of_the_reference(name, usage, tmp_path):
    """Codes equal the reference for edge-case values in three axes, with the seed of the tensor's name."""
    from qshard._cli.conversion import plan_conversion, seed_of, write_file
    from qshard._cli.plan import Plan
    from qshard._core.validation import as_format
    from qshard._files.checkpoint import open_checkpoint

    fmt = as_format(name, "test")
    arrays = {
        f"w{i}": awkward_values((2, 64, 128), seed=i, dtype=dtype) for i, dtype in enumerate(("float32", "bfloat16"))
    }
    path, out = write(tmp_path / "a.safetensors", arrays), tmp_path / "o.safetensors"
    asked = Usage[usage.upper()]
    checkpoint = open_checkpoint(path)
    done = plan_conversion(checkpoint, Plan({}, fmt), asked, ())
    write_file(out, checkpoint, done, 7)
    assert done.nbytes == (sum(x.nbytes for x in arrays.values()), sum(x.nbytes for x in read(out)[0].values()))
    made, metadata = read(out)
    for each, what in parse_metadata(metadata[KEY]).items():
        expected = reference.quantize(arrays[each], fmt, asked, seed=seed_of(each, 7))
        assert (what.format, what.shape, what.planes) == (fmt, (2, 64, 128), asked.planes)
        for one, parts in what.take(made, each).items():
            of_it = expected.rowwise if one is Usage.ROWWISE else expected.columnwise
            for part, array in parts._asdict().items():
                wanted = getattr(of_it, part)
                assert (array is None) == (wanted is None)
                assert array is None or array.tobytes() == wanted.tobytes()


def test_what_is_kept_and_why(model, tmp_path):
    out = tmp_path / "o.safetensors"
    text = ok("convert", model, out, "--format", "NVFP4_16x16", "--keep", "layers.[01].*")
    assert "kept (named by --keep): 2: layers.0.w, layers.1.w" in text
    assert "16x16 blocks; FP8_E4M3 would fit): 1: odd" in text
    assert "kept (fewer than 2 axes): 1: norm" in text
    assert "2 tensors in NVFP4_16x16, 5 unchanged" in text
    before, (after, metadata) = read(model)[0], read(out)
    for name in ("layers.0.w", "layers.1.w", "norm", "odd", "ids"):
        assert after[name].tobytes() == before[name].tobytes()
    assert parse_metadata(metadata[KEY]).keys() == {"layers.2.w", "layers.3.w"}
    ok("convert", model, out, "--format", "FP8_E4M3", "--force")
    assert len(parse_metadata(read(out)[1][KEY])) == 5
    for command in (("convert", out, tmp_path / "p.safetensors", "--format", "FP8_E4M3"), ("report", out)):
        done = qshard(*command)
        assert (done.returncode, "is already quantized by qshard" in done.stderr) == (2, True)


def test_names_that_codes_would_take(tmp_path):
    arrays = {"w": numbers(), "w.rowwise.data": np.ones(3, np.float32)}
    path = write(tmp_path / "a.safetensors", arrays)
    done = qshard("convert", path, tmp_path / "o.safetensors", "--format", "FP8_E4M3")
    assert (done.returncode, "w.rowwise.data is also the name of the codes of" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(model, tmp_path):
    target, link = tmp_path / "target.safetensors", tmp_path / "link.safetensors"
    target.touch(mode=0o640)
    link.symlink_to(target)
    ok("convert", model, link, "--format", "FP8_E4M3", "--force")
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert KEY in read(target)[1]


def test_what_is_read_back_is_compared(tmp_path):
    """If the disk stores different bytes, the output is not renamed to its final name."""
    from qshard._cli.conversion import Writer, replacing
    from qshard._cli.errors import Failure

    def write():
        with replacing(tmp_path / "out.safetensors") as file:
            writer = Writer(file, Path(file.name), {"w": ("U8", (4,))}, {})
            writer.write("w", [b"abcd"])
            assert writer.check().entries.keys() == {"w"}
            file.seek(-1, 2)
            file.write(b"D")
            writer.check()

    with pytest.raises(Failure, match="was read back with other bytes than were written"):
        write()
    assert not list(tmp_path.iterdir())


def test_bytes_are_those_of_convert(model, tmp_path):
    """The bytes counted by the budget are the bytes written."""
    for usage in ("rowwise", "columnwise", "both"):
        for name in ("NVFP4", "FP8_1x128", "MXFP8_E4M3"):
            found = reported(model, "--formats", name, "--usage", usage, "--layers", "layers.2.w")
            bits = sum(row["bits_per_element"] for row in found["layers"][0]["formats"])
            array = read(model)[0]["layers.2.w"]
            parts = [plane(name, array.shape, each) for each in Usage[usage.upper()].planes]
            out = tmp_path / "o.safetensors"
            ok(
                "convert",
                model,
                out,
                "--format",
                name,
                "--usage",
                usage,
                "--keep",
                "layers.[013].w",
                "--keep",
                "odd",
                "--force",
            )
            codes = [x for key, x in read(out)[0].items() if key.startswith("layers.2.w.")]
            assert len(parts) * (3 if name == "NVFP4" else 2) == len(codes)
            assert bits * array.size / 8 == sum(x.nbytes for x in codes)
            assert matrix_shape(array.shape) == array.shape


@pytest.mark.parametrize("arguments", [(), ("--help",), ("report", "--help"), ("convert", "-h"), ("--version",)])
def test_help(arguments):
    done = qshard(*arguments)
    assert done.returncode == (2 if arguments == () else 0)
    assert (done.stdout + done.stderr).startswith(("Usage: qshard", "qshard "))
