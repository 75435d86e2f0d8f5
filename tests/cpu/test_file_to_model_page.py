"""docs/file_to_model.md: its programs run in order, and its table has the formats of the recipes."""

import re

import pytest

from qshard.recipes import NAMED, Role
from support.checkpoints import qshard
from support.pages import Page, run

PAGE = Page("docs/file_to_model.md")
pytest.importorskip("torch")
for _name in ("jax", "click", "rich", "safetensors"):
    pytest.importorskip(_name)


def python(code, folder, name):
    (folder / name).write_text(code)
    result = run(folder / name, ["python", "-P", name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


def test_a_file_becomes_a_model(tmp_path):
    blocks = {code.split("\n")[0].split()[1].strip(":"): code for code in PAGE.python}
    python(blocks.pop("make_model.py"), tmp_path, "make_model.py")
    (command,) = [words for words in PAGE.commands if words[0] == "qshard"]
    assert qshard(*command[1:], cwd=tmp_path).returncode == 0
    for name in ("load_torch.py", "load_jax.py"):
        assert "MXFP8_32x32" in python(blocks.pop(name), tmp_path, name)
    python(blocks.pop("freeze_torch.py"), tmp_path, "freeze_torch.py")
    assert not blocks


def test_formats_are_those_of_the_recipes():
    said = {
        name: row["`--format`"].strip("`") for row in PAGE.rows("recipe") for name in re.findall(r"\w+", row["recipe"])
    }
    weights = {name: recipe.format(Role.WEIGHT) for name, recipe in NAMED.items()}
    assert said == {name: str(fmt.with_options(nonfinite="saturate")) for name, fmt in weights.items()}
