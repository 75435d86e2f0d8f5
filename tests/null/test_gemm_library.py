"""The choice of cuBLASLt for grouped products, with an extension that says what it was asked."""

import re
from types import SimpleNamespace

import pytest

from qshard._core import environment


class Extension(SimpleNamespace):
    """Records the files, and gives versions."""

    def set_gemm_library_paths(self, paths):
        self.paths = paths

    def gemm_library_version(self):
        return 130100

    def set_grouped_gemm_library(self, paths, required):
        self.grouped, self.required = paths, required

    def grouped_gemm_library_version(self):
        return self.version

    def grouped_gemm_library_path(self):
        return self.grouped[0]


@pytest.fixture
def extension(monkeypatch, tmp_path):
    """Two places of NVIDIA's packages, of which the second has a library."""
    file = tmp_path / "second" / "cu13" / "lib" / "libcublasLt.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    spec = SimpleNamespace(submodule_search_locations=folders)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.delenv(environment.GROUPED_VARIABLE, raising=False)
    made = Extension(cuda_built=True, version=130802, file=str(file))
    monkeypatch.setattr(environment, "_ffi", made)
    return made


def test_files_of_packages(extension):
    assert environment.grouped_library_version() == 130802
    assert extension.paths == extension.grouped == [extension.file]
    assert not extension.required
    assert environment.describe_grouped() == f"cuBLASLt 13.8.2, {extension.file}"


def test_the_variable_names_the_only_file(extension, monkeypatch, tmp_path):
    own = tmp_path / "libcublasLt.so.13"
    own.touch()
    monkeypatch.setenv(environment.GROUPED_VARIABLE, str(own))
    assert environment.grouped_library_version() == 130802
    assert extension.grouped == [str(own)]
    assert extension.required
    assert extension.paths == [extension.file]


def test_a_variable_that_names_no_file(extension, monkeypatch, tmp_path):
    path = str(tmp_path / "nothing.so")
    monkeypatch.setenv(environment.GROUPED_VARIABLE, path)
    error = f"QSHARD_CUBLASLT ({path}) is not a file; set it to a libcublasLt.so.13, or unset it"
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        environment.grouped_library_version()
    assert environment.describe_grouped() == f"none: {error}"


def test_how_to_get_a_library(extension):
    extension.version = 0
    said = environment.describe_grouped()
    assert said.startswith("none: they need cuBLASLt 13.5 or newer; pip install 'qshard[cublas]'")
    assert "QSHARD_CUBLASLT" in said


def test_a_build_without_cuda(extension, monkeypatch):
    extension.cuda_built = False
    monkeypatch.setenv(environment.GROUPED_VARIABLE, "/nothing")
    assert environment.grouped_library_version() == environment.library_version() == 0
    assert environment.describe_grouped() == "none: this build has no CUDA kernels"
