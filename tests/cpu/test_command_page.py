"""docs/command.md: its blocks run in order, and its options, keys and columns exist."""

import json
import re
import subprocess
import sys

import pytest

from support.checkpoints import qshard
from support.pages import REPOSITORY, Page

pytest.importorskip("torch")
pytest.importorskip("jax")
for _name in ("click", "matplotlib", "rich", "safetensors"):
    pytest.importorskip(_name)

PAGE = Page("docs/command.md")


def python(code, folder):
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_blocks_run_in_order(tmp_path):
    first, second = PAGE.python
    python(first, tmp_path)
    commands = [words for words in PAGE.commands if words[0] == "qshard"]
    assert len(commands) == 16
    for words in commands:
        if ">" in words:
            words, target = words[: words.index(">")], words[-1]
        else:
            target = None
        done = qshard(*words[1:], cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), words
        if target:
            (tmp_path / target).write_text(done.stdout)
    python(f"import numpy as np\n{second}", tmp_path)
    assert "<img" in (tmp_path / "report.html").read_text()
    said = {name for row in PAGE.rows("key") for cell in row.values() for name in re.findall(r"`(\w+)`", cell)}
    found = json.loads((tmp_path / "report.json").read_text())
    assert said == {
        *found,
        *found["layers"][0],
        *found["ranking"],
        *found["ranking"]["layers"][0],
        *found["tradeoff"],
        *found["tradeoff"]["curve"][0],
        "budget",
        "harm",
        "formats",
    }


def test_its_options_exist():
    options = set(re.findall(r"`?(--[a-z]+)", PAGE.text)) - {"--help"}
    there = "".join(qshard(command, "--help").stdout for command in ("report", "convert", "bench", "info"))
    found = set(re.findall(r"--[a-z]+", there)) - {"--help"}
    assert options <= found
    assert found - options == {"--threads"}


def test_the_extra_brings_what_it_needs():
    import tomllib

    from qshard._cli import NEEDS

    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.match(r"\w+", each)[0] for each in extras["cli"]} == {*NEEDS, "matplotlib"}  # For --html alone.


def test_its_columns_are_those_of_the_table(tmp_path):
    python(PAGE.python[0], tmp_path)
    text = qshard("report", "model.safetensors", "--layers", "layers.0.weight", cwd=tmp_path).stdout
    words = set(text.split("───")[0].split())
    for row in PAGE.rows("column"):
        assert set(row["column"].replace(",", "").split()) <= words
