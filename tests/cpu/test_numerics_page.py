"""What docs/numerics.md says: its blocks as one script."""

import pytest

from support.pages import Page, run

pytest.importorskip("torch")
pytest.importorskip("jax")
pytest.importorskip("rich")


def test_its_code_runs(tmp_path):
    page = Page("docs/numerics.md")
    script = tmp_path / "page.py"
    script.write_text("\n".join(page.python))
    result = run(script, ["python", "-P", script.name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
