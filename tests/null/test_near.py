"""`tests/near.py` on a small repository: the tests of a source are found by imports, by ops and by name."""

import importlib.util
import shutil
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "near.py"
FILES = {
    "qshard/__init__.py": "",
    "qshard/grid.py": "",
    "qshard/jax/__init__.py": "from qshard.jax._nn.linear import linear\nfrom qshard.jax._nn.norms import norm",
    "qshard/jax/_nn/linear.py": "from qshard.jax._nn import gemm",
    "qshard/jax/_nn/gemm.py": "from qshard.grid import plane",
    "qshard/jax/_nn/norms.py": "",
    "torch_bridge/__init__.py": "from qshard.torch_bridge._nn.linear import linear",
    "torch_bridge/_nn/linear.py": "",
    "tests/null/test_grid.py": "from qshard import grid",
    "tests/cpu/test_jax.py": "import qshard.jax as qj\nqj.linear()",
    "tests/cpu/test_fronts.py": "def test(front):\n    front.qshard.linear()",
    "tests/cpu/test_kernels_simd.py": "",
    "tests/cpu/test_twist.py": "ops = 'twist', 'amax'",
    "tests/dist/test_page.py": "'docs/page.md'",
    "docs/page.md": "",
    "ffi/core/half.h": "",
    "ffi/kernels/twist.h": "",
    "ffi/kernels/cpu/twist.cc": '#include "kernels/twist.h"\n#include "core/half.h"',
    "ffi/ops/twist.cc": '#include "kernels/twist.h"\n#include "core/op.h"\nQSHARD_DEFINE_OP(twist) {}',
    "ffi/ops/add.cc": "QSHARD_DEFINE_OP(amax) {}",
}


@pytest.fixture
def near(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    spec = importlib.util.spec_from_file_location("near", shutil.copy(SCRIPT, tmp_path / "tests/near.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda file: [Path(test).stem.removeprefix("test_") for test in module.near(file)]


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("qshard/grid.py", ["grid", "fronts", "jax"]),  # At first hand, then by `gemm` and `linear`.
        ("qshard/jax/_nn/linear.py", ["fronts", "jax"]),
        ("qshard/jax/_nn/gemm.py", ["fronts", "jax"]),
        ("qshard/jax/_nn/norms.py", []),
        ("torch_bridge/_nn/linear.py", ["fronts"]),
        ("tests/cpu/test_jax.py", ["jax"]),
        ("docs/page.md", ["page"]),
        ("ffi/core/half.h", ["kernels_simd", "twist"]),
        ("ffi/kernels/twist.h", ["kernels_simd", "twist"]),
        ("ffi/ops/add.cc", ["kernels_simd", "twist"]),
        ("no/file.py", []),
    ],
)
def test_near(near, file, tests):
    assert near(file) == tests


def test_tests_of_all_kernels_are_there():
    assert (SCRIPT.parents[1] / "tests/cpu/test_kernels_simd.py").is_file()
