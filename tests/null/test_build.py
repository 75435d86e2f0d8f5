"""What ffi/cmake decides about a build: CUDA or not, the version, and the readme of the package index."""

import importlib.util
import re
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
def plan():
    """`plan(wanted, cuda=, gpu=)` on a machine with the nvcc of a release, or none, and with a GPU or none."""
    module = load(SCRIPTS / "qshard_plan.py")

    def plan(wanted: str, cuda: str | None, gpu: bool, folder: Path):
        nvcc = folder / "nvcc"
        if cuda:
            nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {cuda}, V{cuda}.88'\n")
            nvcc.chmod(0o755)
        devices = folder / "dev"
        devices.mkdir()
        if gpu:
            (devices / "nvidia0").touch()
        return module.plan(wanted, {"CUDACXX": str(nvcc), "PATH": ""}, str(devices))

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


def test_readme_of_the_index_has_no_dead_links():
    """Without the URL of a repository links become their text, and with it absolute. Code stays as it is."""
    standalone = load(SCRIPTS / "qshard_readme.py").standalone
    text = (SCRIPTS.parents[1] / "README.md").read_text()
    relative = re.compile(r"\]\((?!https?:|#)\S+\)")
    assert len(relative.findall(text)) > 9
    alone, linked = standalone(text), standalone(text, "https://example.org/qshard/")
    assert relative.findall(alone) == relative.findall(linked) == []
    assert "[docs/install.md](https://example.org/qshard/blob/main/docs/install.md)" in linked
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(alone) == code.findall(linked) == code.findall(text)
