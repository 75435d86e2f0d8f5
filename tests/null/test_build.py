"""What ffi/cmake decides about a build: CUDA or not, the version, and what may be taken from an older build."""

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "ffi/cmake"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plan(monkeypatch):
    """`plan(wanted, cuda=, gpu=)` on a machine with the nvcc of a release, or none, and with a GPU or none."""
    module = load(SCRIPTS / "qshard_plan.py")

    def plan(wanted: str, cuda: str | None, gpu: bool, folder: Path):
        nvcc = folder / "nvcc"
        if cuda:
            nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {cuda}, V{cuda}.88'\n")
            nvcc.chmod(0o755)
        monkeypatch.setattr(module, "has_gpu", lambda: gpu)
        return module.plan(wanted, {"CUDACXX": str(nvcc), "PATH": ""})

    return plan


@pytest.mark.parametrize(
    ("wanted", "cuda", "gpu", "label", "reason"),
    [
        ("AUTO", "13.0", True, "cu130", ""),
        ("", "13.1", True, "cu131", ""),
        ("AUTO", "13.0", False, "cpu", "no GPU here; QSHARD_CUDA=ON builds it"),
        ("AUTO", None, True, "cpu", "no nvcc here; to build it, put nvcc on PATH or set CUDACXX"),
        ("AUTO", "12.4", True, "cpu", "is of CUDA 12.4, older than 13.0"),
        ("ON", "13.0", False, "cu130", ""),
        ("on", "13.0", False, "cu130", ""),
        ("OFF", "13.0", True, "cpu", "QSHARD_CUDA=OFF"),
    ],
)
def test_cuda_is_built_where_nvcc_and_a_gpu_are(plan, tmp_path, wanted, cuda, gpu, label, reason):
    chosen = plan(wanted, cuda, gpu, tmp_path)
    assert chosen.label == label
    assert reason in chosen.reason
    assert chosen.cuda == ("" if label == "cpu" else cuda)
    assert bool(chosen.reason) == (label == "cpu")


@pytest.mark.parametrize(
    ("wanted", "cuda", "error"),
    [
        ("ON", None, "qshard: QSHARD_CUDA=ON, but no nvcc here; put nvcc on PATH"),
        ("ON", "12.4", "older than 13.0; install CUDA 13.0"),
        ("maybe", "13.0", "qshard: QSHARD_CUDA (maybe) is not AUTO, ON or OFF"),
    ],
)
def test_cuda_that_cannot_be_built_is_an_error(plan, tmp_path, wanted, cuda, error):
    with pytest.raises(SystemExit) as raised:
        plan(wanted, cuda, True, tmp_path)
    assert error in str(raised.value)


def test_sdists_have_no_label(tmp_path, monkeypatch):
    """pip refuses a package whose version is not that of the sdist it is built from."""
    module = load(SCRIPTS / "qshard_plan.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QSHARD_CUDA", "OFF")

    def version(state: str) -> str:
        provider = module.Provider()
        provider.build_state(state)
        return provider.dynamic_metadata({"version": "1.2"}, {})["version"]

    assert [version(state) for state in ("metadata_wheel", "wheel", "editable")] == ["1.2+cpu"] * 3
    assert version("sdist") == "1.2"
    (tmp_path / "PKG-INFO").touch()
    assert version("wheel") == "1.2"


@pytest.fixture
def sources(tmp_path):
    """A small tree with a copy of the script, which takes its own folder for ffi/cmake: (script, description)."""
    (tmp_path / "ffi/cmake").mkdir(parents=True)
    (tmp_path / "ffi/core").mkdir()
    script = shutil.copy(SCRIPTS / "qshard_kept.py", tmp_path / "ffi/cmake")
    (tmp_path / "ffi/core/a.h").write_text("int a;\n")
    (tmp_path / "ffi/b.cc").write_text('#include "core/a.h"\n')
    description = tmp_path / "description.txt"
    description.write_text(f"-O3\n[files]\n{tmp_path}/ffi/core\n{tmp_path}/ffi/b.cc")
    return load(Path(script)), description


def test_key_is_of_all_that_is_read_and_of_nothing_else(sources, tmp_path):
    kept, description = sources
    ffi, keys = tmp_path / "ffi", [kept.key(description)]
    for change in (
        lambda: (ffi / "core/a.h").write_text("int b;\n"),
        lambda: (ffi / "core/a.h").rename(ffi / "core/c.h"),
        lambda: (ffi / "core/new.inc").touch(),
        lambda: description.write_text(description.read_text().replace("-O3", "-O2")),
    ):
        change()
        keys.append(kept.key(description))
    assert len(set(keys)) == len(keys)
    (ffi / "core/script.py").touch()
    (ffi / "core/notes.md").touch()
    os.utime(ffi / "b.cc", (0, 0))
    assert kept.key(description) == keys[-1]

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(ffi, elsewhere / "ffi")
    moved = elsewhere / "description.txt"
    moved.write_text(description.read_text().replace(str(tmp_path), str(elsewhere)))
    assert load(elsewhere / "ffi/cmake/qshard_kept.py").key(moved) == keys[-1]


def test_key_refuses_a_source_that_reads_what_it_does_not_see(sources, tmp_path):
    kept, description = sources
    (tmp_path / "ffi/other.h").touch()
    (tmp_path / "ffi/core/a.h").write_text('#include "other.h"\n')
    with pytest.raises(SystemExit, match=r"a\.h includes .*other\.h, which no key sees"):
        kept.key(description)


def test_what_was_built_while_a_source_was_edited_is_not_kept(sources, tmp_path):
    kept, description = sources
    built, place = tmp_path / "built.so", tmp_path / "kept/_ffi-key"
    built.write_bytes(b"code")
    key = kept.key(description)
    kept.keep(description, key, built, place)
    assert place.read_bytes() == b"code"
    assert [path.name for path in place.parent.iterdir()] == ["_ffi-key"]
    place.unlink()
    (tmp_path / "ffi/core/a.h").write_text("int b;\n")
    kept.keep(description, key, built, place)
    assert not place.exists()


def test_what_was_used_longest_ago_goes_first(sources, tmp_path):
    kept, _ = sources
    folder = tmp_path / "kept"
    folder.mkdir()
    for age, name in enumerate(["new", "middle", "old"]):
        (folder / name).write_bytes(bytes(10))
        os.utime(folder / name, (1000 - age, 1000 - age))
    kept.prune(folder, limit=25)
    assert sorted(path.name for path in folder.iterdir()) == ["middle", "new"]
    kept.prune(folder, limit=5)
    assert [path.name for path in folder.iterdir()] == ["new"], "what was just built stays, however large"
