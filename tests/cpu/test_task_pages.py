"""Pages for one process: each program in them runs alone, and imports one framework."""

import pytest

from support.pages import Page, modules, run

PAGES = (
    "coming_from",
    "cross_entropy",
    "experts",
    "lora",
    "muon",
    "nvfp4",
    "optimizers",
    "troubleshooting",
    "weight_sync",
)
PROGRAMS = [(name, index) for name in PAGES for index in range(len(Page(f"docs/{name}.md").scripts))]


@pytest.mark.parametrize(("name", "index"), PROGRAMS)
def test_a_program_runs_alone(name, index, tmp_path):
    code = Page(f"docs/{name}.md").scripts[index]
    used = modules(code)
    assert not {"torch", "jax"} <= used, "one framework a program"
    for module in used - {"qshard"}:
        pytest.importorskip(module)
    script = tmp_path / "page.py"
    script.write_text(code)
    result = run(script, ["python", "-P", script.name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
