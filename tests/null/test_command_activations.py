"""Harm with the activations of a run: of the output, not of the weight."""

import io
import json
import zipfile

import numpy as np
import pytest

from qshard import reference
from qshard.numerics._gemm_error import ROWS, output_noise
from support.checkpoints import qshard, refused, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")


def numbers(shape, seed):
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def expected(x, w, fmt, seed=0):
    value = reference.quantize(w, fmt, seed=seed).dequantize(np.float32).astype(np.float64)
    counted = np.isfinite(value) & np.isfinite(w)
    exact, value = (np.where(counted, each, 0.0).reshape(-1, w.shape[-1]) for each in (w, value))
    x = x.reshape(-1, w.shape[-1]).astype(np.float64)
    return np.sum((x @ (value - exact).T) ** 2) / np.sum((x @ exact.T) ** 2)


@pytest.mark.parametrize("fmt", ["FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "NVFP4_16x16", "NVFP4[global_scale=row]"])
@pytest.mark.parametrize("shape", [(ROWS + 144, 64), (3, 16, 64), (48, 128)])
def test_of_the_output(fmt, shape):
    """Sums of float32: those of the products that cancel lose some."""
    w, x = numbers(shape, 0), numbers((2, 5, shape[-1]), 1)
    w[..., 7, 5] = np.inf
    assert output_noise(x, w, fmt) == pytest.approx(expected(x, w, fmt), rel=1e-4)


def test_of_stochastic_rounding():
    w, x, fmt = numbers((32, 64), 0), numbers((9, 64), 1), "NVFP4[rounding=stochastic]"
    found = [output_noise(x, w, fmt, seed=seed) for seed in range(3)]
    assert found == pytest.approx([expected(x, w, fmt, seed) for seed in range(3)], rel=1e-4)
    assert len(set(found)) == 3


def test_wrong_ones():
    with pytest.raises(ValueError, match=r"output_noise: x \(3, 5\) and w \(4, 8\) have different last axes \(K\)"):
        output_noise(np.ones((3, 5)), np.ones((4, 8)), "FP8_E4M3")
    with pytest.raises(ValueError, match=r"output_noise: w .* is not a whole number of"):
        output_noise(np.ones((3, 8)), np.ones((4, 8)), "NVFP4")
    with pytest.raises(TypeError, match="output_noise: x"):
        output_noise(np.array(["a"] * 8), np.ones((4, 8)), "FP8_E4M3")
    assert np.isnan(output_noise(np.zeros((3, 8)), np.ones((4, 8)), "FP8_E4M3"))
    assert np.isnan(output_noise(np.full((3, 8), 1e38), np.full((4, 8), 17.0), "FP8_E4M3"))  # The product is infinite.


def test_the_report_goes_by_the_output(tmp_path):
    """Layer b is alone in that its activations meet the column of an outlier: its weight is harmed as that of a."""
    w = numbers((64, 64), 0)
    w[:, 0] *= 40
    path = write(tmp_path / "m.safetensors", {"a.weight": w, "b.weight": w.copy(), "c.weight": w.copy(), "d": w.copy()})
    seen = numbers((32, 64), 1)
    blind = seen.copy()
    blind[:, 0] = 0
    np.savez(tmp_path / "x.npz", **{"a": blind, "b.weight": seen, "c": 0 * seen, "other": seen})
    arguments = ("report", path, "--formats", "NVFP4", "--activations", tmp_path / "x.npz")
    found = json.loads(qshard(*arguments, "--json").stdout)
    layers = {layer["name"]: layer for layer in found["layers"]}
    harms = {name: layer["formats"][0]["harm"] for name, layer in layers.items()}
    assert harms["a.weight"] == pytest.approx(expected(blind, w, "NVFP4"), rel=1e-4)
    assert harms["b.weight"] == pytest.approx(expected(seen, w, "NVFP4"), rel=1e-4)
    white = 10 ** (-layers["d"]["formats"][0]["sqnr_db"] / 10)
    assert harms["c.weight"] == harms["d"] == white
    assert found["ranking"]["layers"][0]["name"] == "a.weight"
    assert layers["d"]["remarks"] == ["no activations, so its harm is that for white noise"]
    assert "have no signal" in layers["c.weight"]["remarks"][0]
    assert found["notes"] == ["activations match no layer: other"]
    assert "SQNR of its output with its activations, in dB: NVFP4 " in qshard(*arguments).stdout


def test_files_that_are_none(tmp_path):
    path = write(tmp_path / "m.safetensors", {"w": numbers((32, 32), 0)})
    bad = tmp_path / "x.npz"
    said = {}
    bad.write_bytes(b"PK\x03\x04 and no more")
    said["is not a numpy.savez file"] = refused("report", path, "--activations", bad)
    np.savez(bad, v=np.ones(3))
    said["none with the name of a layer"] = refused("report", path, "--activations", bad)
    np.savez(bad, w=np.ones((3, 31)))
    said["w (3, 31) does not end in the (32,) of w (32, 32)"] = refused("report", path, "--activations", bad)
    np.savez(bad, w=np.array([{}] * 32, dtype=object))
    said["does not have real numbers"] = refused("report", path, "--activations", bad)
    np.savez(bad, w=np.ones((3, 32)))
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    assert "is not a numpy.savez file" in refused("report", path, "--activations", bad)
    for text, line in said.items():
        assert text in line
    refused("report", path, "--activations", tmp_path / "absent.npz", status=1)
    np.savez(bad, w=np.ones((1000, 32)))
    whole = bytearray(bad.read_bytes())
    whole[100_000] ^= 1  # Of the numbers, which are read last.
    bad.write_bytes(whole)
    assert "is not a numpy.savez file: w: Bad CRC" in refused("report", path, "--activations", bad)
    for way, why in ((zipfile.ZIP_BZIP2, "uses an unsupported compression"), (zipfile.ZIP_DEFLATED, "w: ")):
        with zipfile.ZipFile(bad, "w", way) as file:
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**50, 32)})
            file.writestr("w.npy", header.getvalue() + bytes(64))
        said = refused("report", path, "--activations", bad, status=2 if way == zipfile.ZIP_BZIP2 else 1)
        assert why in said or "out of memory" in said
    with zipfile.ZipFile(bad, "w") as file:
        file.writestr("w.npy", b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little") + bytes(64))
    assert "is not a numpy.savez file" in refused("report", path, "--activations", bad)
