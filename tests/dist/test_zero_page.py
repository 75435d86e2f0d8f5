"""What docs/zero.md says: its code as one script."""

from support.pages import Page, run_as_told

PAGE = Page("docs/zero.md")


def test_its_code_runs(tmp_path):
    """Started as it says, with one launcher's warnings at most."""
    assert run_as_told(PAGE, tmp_path) == []
