"""docs/numerics.md: its programs run alone, and the last block reads the log of the PyTorch block."""

import pytest

from support.pages import Page, modules, run

pytest.importorskip("rich")
PAGE = Page("docs/numerics.md")


def python(code, folder):
    (folder / "page.py").write_text(code)
    result = run(folder / "page.py", ["python", "-P", "page.py"])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


def test_its_programs_run_alone(tmp_path):
    *blocks, of_log = PAGE.python
    programs = {"numpy": [], "torch": [], "jax": []}
    for code in blocks:
        framework = next((name for name in ("torch", "jax") if name in modules(code)), "numpy")
        programs[framework].append(code)
    for name, codes in programs.items():
        pytest.importorskip(name)
        python("\n".join(codes), tmp_path)
    python(of_log, tmp_path)
