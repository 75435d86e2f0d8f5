"""What docs/fsdp1_ddp.md says: its code as one script."""

from support.pages import Page, run_as_told

PAGE = Page("docs/fsdp1_ddp.md")


def test_its_code_runs(tmp_path):
    assert run_as_told(PAGE, tmp_path) == []
