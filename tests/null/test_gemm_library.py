"""The choice of cuBLASLt for grouped products: its files, errors, and what `qshard info` says."""

import re

import pytest

from qshard._core import environment

VARIABLE = environment.GROUPED_VARIABLE
NAME = "cu13/lib/libcublasLt.so.13"


@pytest.fixture
def folders(tmp_path):
    """Two folders of NVIDIA's packages, of which the second has a library."""
    file = tmp_path / "second" / NAME
    file.parent.mkdir(parents=True)
    file.touch()
    return [str(tmp_path / "first"), str(tmp_path / "second")]


def test_files_of_packages(folders):
    assert environment.package_files(folders, NAME) == [f"{folders[1]}/{NAME}"]
    assert environment.grouped_library_files({}, folders) == ([f"{folders[1]}/{NAME}"], False)


def test_the_variable_names_the_only_file(folders, tmp_path):
    own = tmp_path / "libcublasLt.so.13"
    own.touch()
    assert environment.grouped_library_files({VARIABLE: str(own)}, folders) == ([str(own)], True)


def test_a_variable_that_names_no_file(folders, tmp_path):
    path = str(tmp_path / "nothing.so")
    error = f"QSHARD_CUBLASLT ({path}) is not a file; set it to a libcublasLt.so.13, or unset it"
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        environment.grouped_library_files({VARIABLE: path}, folders)


def test_how_to_get_a_library():
    said = environment.describe_library(0, "")
    assert said.startswith("none: they need cuBLASLt 13.5 or newer; pip install 'qshard[cublas]'")
    assert VARIABLE in said


def test_a_build_without_cuda(monkeypatch):
    if pytest.importorskip("qshard._ffi").cuda_built:
        pytest.skip("this build has CUDA kernels")
    monkeypatch.setenv(VARIABLE, "/nothing")
    assert environment.grouped_library_version() == environment.library_version() == 0
    assert environment.describe_grouped() == "none: this build has no CUDA kernels"
