"""What docs/experts.md says: its code as one script."""

from support.pages import Page, run


def test_its_code_runs(tmp_path):
    script = tmp_path / "experts.py"
    script.write_text("\n".join(Page("docs/experts.md").python))
    result = run(script, ["python", script.name])
    assert result.returncode == 0, result.stderr
