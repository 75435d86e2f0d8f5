"""Malformed and hostile checkpoints: a one-line error each, bounded memory, and no leftover files."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from support.checkpoints import file_of, header_of, qshard, refused, sharded, write
from support.pairs import each_value

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")

W = np.ones((32, 32), np.float32)
DATA = W.tobytes()


def entry(**changes):
    return {"w": {"dtype": "F32", "shape": [32, 32], "data_offsets": [0, 4096]} | changes}


HOSTILE = {
    "empty": (b"", "longer than the file"),
    "three bytes": (b"abc", "longer than the file"),
    "length of 2**62": (file_of(entry(), DATA, 2**62), "longer than the file"),
    "length of 2**64 - 1": (file_of(entry(), DATA, 2**64 - 1), "longer than the file"),
    "length beyond the file": (file_of(entry(), length=10**6), "longer than the file"),
    "no data": (file_of(entry()), "its tensors have 4096 bytes, and its data 0"),
    "a byte less": (file_of(entry(), DATA[:-1]), "its tensors have 4096 bytes, and its data 4095"),
    "a byte more": (file_of(entry(), DATA + b"x"), "its tensors have 4096 bytes, and its data 4097"),
    "overlapping": (file_of(entry() | {"v": entry()["w"]}, DATA), "v does not begin where the tensor before it ends"),
    "a hole": (file_of(entry(data_offsets=[8, 4104]), DATA + b"x" * 8), "w does not begin where"),
    "backwards": (file_of(entry(data_offsets=[4096, 0]), DATA), "w does not begin where"),
    "beyond the end": (
        file_of(entry(data_offsets=[0, 2**60], shape=[2**58]), DATA),
        "its tensors have 1152921504606846976",
    ),
    "an unknown dtype": (file_of(entry(dtype="F99"), DATA), "F99"),
    "a dtype that is a number": (file_of(entry(dtype=7), DATA), "w lacks a dtype, a shape or two offsets"),
    "a negative size": (file_of(entry(shape=[-32, -32]), DATA), "w lacks a dtype, a shape or two"),
    "a size that is no integer": (file_of(entry(shape=[32, 32.0]), DATA), "w lacks a dtype, a shape or two"),
    "a size that overflows": (file_of(entry(shape=[2**40, 2**40]), DATA), "w has 4096 bytes, but shape"),
    "too small a size": (file_of(entry(shape=[32, 31]), DATA), r"w has 4096 bytes, but shape \(32, 31\)"),
    "a list": (file_of([1, 2]), "JSON"),
    "nested lists": (file_of(b"[" * 10**6), "recursion"),
    "nested objects": (file_of(b'{"w":' * 10**6), "recursion"),
    "no JSON": (file_of(b"{'w': 1}"), "property name"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "utf-8"),
    "metadata that are numbers": (file_of({"__metadata__": {"a": 1}} | entry(), DATA), "JSON"),
    "half a character": (file_of(b'{"\\ud800": {}}'), "surrogates"),
    "many axes": (file_of(entry(shape=[2**63] * 10**5), DATA), "w has 4096 bytes, but shape"),
    "two tensors of one name": (file_of(b'{"w": {}, "w": {}}'), "a key occurs twice"),
    "a name that writes to terminals": (file_of({"\x1b[2J": entry(data_offsets=[8, 0])["w"]}, DATA), r"\\x1b"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_whole_file(name, tmp_path):
    content, why = HOSTILE[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    for command in (("report", path), ("convert", path, tmp_path / "out.safetensors", "--format", "MXFP8_32x32")):
        said = refused(*command, status=1)
        assert "is not a complete safetensors file: " in said
        assert re.search(why, said), said
        assert said.endswith("; copy or save it again")
        assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == [path]


OTHERS = {
    "torch.save or numpy.savez": b"PK\x03\x04" + b"x" * 100,
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "GGUF": b"GGUF\x03\x00\x00\x00",
}


@pytest.mark.parametrize("name", OTHERS)
def test_checkpoints_of_others(name, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(OTHERS[name])
    assert f"looks like a file of {name}; save it with save_file" in refused("report", path, status=1)


def test_what_has_codes_already(tmp_path):
    path = tmp_path / "a.safetensors"
    codes = {"dtype": "F4", "shape": [32, 32], "data_offsets": [4096, 4608]}
    path.write_bytes(file_of(entry() | {"codes": codes}, DATA + b"\x12" * 512))
    assert "codes,,,,,,,,,,,,,,,,,,,,left out: F4: codes or scales already" in qshard("report", path, "--csv").stdout
    out = tmp_path / "out.safetensors"
    assert qshard("convert", path, out, "--format", "MXFP8_32x32").returncode == 0
    assert b"\x12" * 512 in out.read_bytes()


LIMITED = f"ulimit -v {3 * 2**20}"
"""Address space limit in KiB; Python, NumPy and OpenBLAS's threads reserve much and use little."""


BOMBS = {
    "lists": b'{"weight_map":[' + b"[]," * 2**22 + b"[]]}",
    "objects": b'{"weight_map":{' + b'"a":{},' * 2**21 + b'"b":{}}}',
    "deep": b"[" * 2**24,
    "text": b'"' + b"x" * 2**22,
    "numbers": b"[" + b"1.5," * 2**22 + b"1]",
    "not there": b"{}",
    "no names": b'{"weight_map": {"w": 1}}',
    "none": b'{"weight_map": {}}',
    "up": b'{"weight_map": {"w": "../w.safetensors"}}',
    "root": b'{"weight_map": {"w": "/etc/passwd"}}',
    "not UTF-8": b'{"weight_map": {"w": "\xff.safetensors"}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_no_index(name, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(BOMBS[name])
    said = refused("report", path, status=1, limits=LIMITED)
    assert "is not a safetensors index: " in said


def test_an_index_that_is_too_long(tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(2**33)  # Without its bytes.
    assert "is not a safetensors index: " in refused("report", path, status=1, limits=LIMITED)


@pytest.mark.parametrize("shape", [[0, 2**63], [0] * 10_000, [2**62, 0, 2**62]], ids=["wide", "axes", "both"])
def test_sizes_of_what_has_no_elements(shape, tmp_path):
    path = tmp_path / "a.safetensors"
    empty = {"dtype": "F32", "shape": shape, "data_offsets": [4096, 4096]}
    path.write_bytes(file_of(entry() | {"none": empty}, DATA))
    done = qshard("report", path, "--formats", "MXFP8_32x32", "--csv")
    assert done.returncode == 0, done.stderr
    assert "none,,,,,,,,,,,,,,,,,,,,left out: no elements" in done.stdout
    out = tmp_path / "out.safetensors"
    assert qshard("convert", path, out, "--format", "MXFP8_32x32").returncode == 0
    written = out.read_bytes()
    length = int.from_bytes(written[:8], "little")
    assert json.loads(written[8 : 8 + length])["none"]["shape"] == shape


def test_as_many_axes_as_one_likes(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(entry(shape=[1] * 98 + [32, 32]), DATA))
    assert "100 axes" in refused("report", path)


def test_ways_to_name_no_checkpoint(tmp_path):
    assert "does not exist" in refused("report", tmp_path / "absent.safetensors")
    assert "has no .safetensors file" in refused("report", tmp_path)
    for name in "abcd":
        write(tmp_path / f"{name}.safetensors", {"w": W})
    assert (
        "has more than one safetensors checkpoint: 4 (a.safetensors, b.safetensors, c.safetensors, ...); name a file"
        in refused("report", tmp_path)
    )
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refused("report", tmp_path / "pipe", status=1)


def test_shards_that_are_not_there(tmp_path):
    folder = sharded(tmp_path / "model", [{"a": W}, {"b": W}])
    (folder / "model-00002-of-00002.safetensors").rename(tmp_path / "elsewhere")
    said = refused("report", folder, status=1)
    assert "names 2 shards, 1 missing, such as model-00002-of-00002.safetensors; put them beside" in said
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "names 2 shards, 2 missing, such as" in refused("report", folder, status=1)
    folder = sharded(tmp_path / "other", [{"a": W}, {"b": W}], b="model-00001-of-00002.safetensors")
    assert "lists b in model-00001-of-00002.safetensors, which does not have it" in refused("report", folder, status=1)


def test_wrong_arguments(tmp_path):
    path, out = write(tmp_path / "a.safetensors", {"layers.0.w": W, "b": W[0]}), tmp_path / "out.safetensors"
    bias, odd = (write(tmp_path / f"{name}.safetensors", {name: x}) for name, x in (("b", W[0]), ("w", W[:3, :3])))
    said = {
        (
            "report",
            path,
            "--layers",
            "layer.*",
        ): "--layers: pattern 'layer.*' matches no tensor; the closest are 'layers.0.w', 'b'",
        ("report", path, "--formats", "nvfp4"): "--formats ('nvfp4') is not a format name; did you mean 'NVFP4'",
        ("report", path, "--formats", "MXFP8_E4M3,"): "--formats ('') is not a format name",
        ("report", path, "--json", "--csv"): "--json and --csv exclude each other",
        ("report", path, "--budget", "0.1"): "--budget 0.1 is too small: the formats take 544 bytes, 0.5313 an element",
        ("report", path, "--budget", "500 B"): "--budget 500 B is too small: the formats take 544 bytes",
        (
            "report",
            path,
            "--budget",
            "4gb",
        ): "'4gb' is not a number of bytes per element, such as 0.8, or in total, such as 4GB (B, kB, ",
        ("report", path, "--budget", "1e999"): "Invalid value for '--budget'",
        ("report", path, "--budget", "-1"): "Invalid value for '--budget'",
        ("report", path, "--budget", "0"): "Invalid value for '--budget'",
        ("report", path, "--budget", "nan"): "--budget",
        ("report", path, "--budget", "inf"): "Invalid value for '--budget'",
        ("report", path, "--formats", "MXFP4", "--rotate"): "--rotate applies to none of these formats",
        ("report", path, "--stochastic", "0"): "Invalid value for '--stochastic'",
        ("report", path, "--html", path): "does not end in .html",
        ("report", path, "--html", tmp_path / ".." / tmp_path.name): "does not end in .html",
        ("report", path, "--html", tmp_path / "no" / "a.html"): "is not a folder; create it first",
        ("report", path, "--html", "/proc/a.html"): "/proc cannot be written to",
        ("convert", path, "/proc/a.safetensors", "--format", "MXFP4_32x32"): "/proc cannot be written to",
        ("report", path, "--colour"): "No such option",
        ("report",): "Missing argument 'CHECKPOINT'",
        (
            "convert",
            path,
            out,
        ): "no format was given for it; give one by --format, such as --format NVFP4, or by --plan",
        ("convert", path, out, "--format", "E4M3"): "is not a format name",
        ("convert", path, path, "--format", "MXFP4"): "is a file of the checkpoint itself",
        ("convert", path, tmp_path / "a.bin", "--format", "MXFP4"): "does not end in .safetensors",
        ("convert", path, out, "--format", "MXFP4", "--keep", "c"): "--keep: pattern 'c' matches no tensor",
        ("convert", path, out, "--format", "MXFP4", "--keep", "*"): (
            "has nothing to quantize: layers.0.w: named by --keep; keep fewer"
        ),
        ("convert", bias, out, "--format", "MXFP4"): (
            "has nothing to quantize: b: fewer than 2 axes; use a checkpoint that has tensors of real numbers with 2"
        ),
        ("convert", odd, out, "--format", "MXFP4"): (
            "has nothing to quantize: w: MXFP4: shape (3, 3) is not a whole number of 1x32 blocks; FP8_E4M3 would "
            "fit; choose another format"
        ),
        ("convert", path, out, "--format", "NVFP4[hadamard=True]", "--usage", "neither"): "Invalid value for '--usage'",
        ("bench", "--size", "0"): "Invalid value for '--size'",
        ("nothing",): "No such command 'nothing'",
    }
    for arguments, text in said.items():
        assert text in refused(*arguments), arguments
    before = path.read_bytes()
    aside = tmp_path / "missing" / ".." / path.name
    assert "missing/.. is not a folder; create it first" in refused("convert", path, aside, "--format", "MXFP4")
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path, bias, odd]
    out.touch()
    assert "already exists" in refused("convert", path, out, "--format", "MXFP4")


def test_a_disk_that_is_full(tmp_path):
    """A limit on file sizes simulates a full disk."""
    path = write(tmp_path / "a.safetensors", {"w": np.ones((1024, 1024), np.float32)})
    small = "trap '' XFSZ && ulimit -f 64"  # KiB
    said = refused("convert", path, tmp_path / "o.safetensors", "--format", "MXFP4", status=1, limits=small)
    assert "File too large; no partial file was kept" in said
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint that takes seconds to read."""
    array = np.ones((512, 512), np.float32)
    return write(tmp_path_factory.mktemp("large") / "a.safetensors", {f"w{i}": array for i in range(400)})


STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.slow
@each_value(command=["convert", "report"], number=list(STATUS))
def test_interrupts(command, number, large, tmp_path):
    """Interrupted early or late, the command leaves no new files."""
    arguments = [large, tmp_path / "o.safetensors", "--format", "NVFP4_16x16"] if command == "convert" else [large]
    for wait in (0.7, 1.2):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qshard", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        said = process.communicate(timeout=60)[1].decode()
        if process.returncode == 0:  # It was done before.
            (tmp_path / "o.safetensors").unlink(missing_ok=True)
            continue
        if process.returncode == -number:  # Python itself was starting.
            continue
        assert (process.returncode, said) == (
            STATUS[number],
            "qshard: interrupted\n" if number == signal.SIGINT else "",
        )
        assert list(tmp_path.iterdir()) == []
        assert list(large.parent.iterdir()) == [large]


def test_a_reader_that_goes_away(tmp_path):
    path = write(tmp_path / "a.safetensors", {f"w{i}": W for i in range(50)})
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "qshard", "report", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process.stderr:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.wait() == 1


@pytest.mark.parametrize("command", ["info", "report"])
def test_where_output_goes_nowhere(command, tmp_path):
    path = write(tmp_path / "a.safetensors", {"w": W})
    line = f'"{sys.executable}" -P -m qshard {command} {path if command == "report" else ""}'
    for to, status in ((">&-", 0), ("2>&-", 0), ("</dev/null >/dev/full", 1)):
        done = subprocess.run(f"{line} {to}", shell=True, capture_output=True, text=True, check=False)
        said = "qshard: No space left on device; no partial file was kept\n"
        assert (done.returncode, done.stderr) == (status, said if status else "")
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_is_refused_first(tmp_path):
    """An unwritable page fails at once, before any tensor is read."""
    path = write(tmp_path / "a.safetensors", {"w": W})
    cut = path.read_bytes()[:-1]
    folder = tmp_path / "folder.html"
    folder.mkdir()
    assert "is a folder; name a file in it" in refused("report", path, "--html", folder)
    path.write_bytes(cut)
    page = tmp_path / "a.html"
    page.write_text("before")
    refused("report", path, "--html", page, status=1)
    assert page.read_text() == "before"


def test_what_changes_while_it_is_read(tmp_path):
    """A file truncated after its header was read is an error."""
    from qshard._files.checkpoint import CheckpointError, read_header

    path = write(tmp_path / "a.safetensors", {"w": W})
    entry = read_header(path).entries["w"]
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="ends within w, so it changed during the run; run again"):
        entry.read()


def test_what_is_not_installed(tmp_path):
    """A missing dependency is a one-line error, and `import qshard` works without it."""
    code = (
        "import importlib.util as u, sys; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('click', 'rich') else found(name, *a)\n"
        "import qshard._cli; status = qshard._cli.main(['info'])\n"
        "print(status, sorted({'click', 'rich', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "2 []\n"
    assert done.stderr == "qshard: click and rich not installed; pip install 'qshard[cli]'\n"


def test_headers_are_what_the_library_writes(tmp_path):
    """`file_of` writes valid files, so the errors above come from the modifications."""
    from safetensors.numpy import load_file

    path = write(tmp_path / "a.safetensors", {"w": W})
    assert header_of({"w": W}) == {"w": entry()["w"] | {"shape": (32, 32)}}
    assert load_file(path)["w"].tobytes() == DATA
