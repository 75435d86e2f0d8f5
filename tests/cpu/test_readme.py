"""What README.md tells people to run, runs: each Python block as pasted, and what shell blocks name exists."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from support.pages import REPOSITORY, Page, run

README = Page("README.md")
PYTHON, COMMANDS = README.python, README.commands
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DOCS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md"))
TARGETS = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def modules(code: str) -> set[str]:
    return set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE))


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: re.findall(r"^(?:import|from) (.+)", code, re.M)[0])
def test_python_runs_as_pasted(code, tmp_path):
    """In a process of its own; a block that names its file is run as the shell block says that has the file."""
    for name in modules(code) - {"qshard"}:
        pytest.importorskip(name)
    named = re.match(r"# (\w+\.py)\n", code)
    script = tmp_path / (named[1] if named else "pasted.py")
    script.write_text(code)
    command = ["python", script.name]
    if named:
        (command,) = [words for words in COMMANDS if words[-1] == script.name]
    result = run(script, command)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert result.stdout
    assert losses == [] or losses[-1] < losses[0] / 1.5, result.stdout


def test_there_is_a_training_step_in_each_framework():
    for front_end in ("qshard.torch_bridge", "qshard.jax"):
        assert any(f"{front_end} " in code or f"{front_end}\n" in code for code in PYTHON)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_what_commands_name_exists(words, tmp_path):
    while "=" in words[0]:  # variables
        words = words[1:]
    program, *arguments = words
    if program == "make":
        variables = [word.partition("=")[0] for word in arguments if "=" in word]
        assert {word for word in arguments if "=" not in word} <= TARGETS
        assert all(f"$({name})" in (REPOSITORY / "Makefile").read_text() for name in variables)
    elif program == "pip":
        extras = re.findall(r"\w[\w-]*", "".join(re.findall(r"\[(.*?)\]", " ".join(arguments))))
        assert arguments[0] == "install"
        assert set(extras) <= set(PROJECT["optional-dependencies"])
    elif program == "jupyter":
        assert (REPOSITORY / arguments[-1]).is_file()
    elif program == "python" and arguments[0] == "-c":
        result = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    elif program.endswith("bin/python"):
        options = {word for word in arguments if word.startswith("--")}
        said = subprocess.run([sys.executable, arguments[0], "--help"], cwd=REPOSITORY, capture_output=True, text=True)
        assert options <= set(re.findall(r"--[a-z]+", said.stdout))
    elif program == "torchrun":
        assert any(code.startswith(f"# {arguments[-1]}\n") for code in PYTHON)
    else:
        assert program in ("git", "cd", "export", "source"), f"what is {program}?"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", *DOCS])
def test_targets_in_the_text_exist(page):
    assert set(re.findall(r"`make ([a-z]+)", (REPOSITORY / page).read_text())) <= TARGETS


@pytest.mark.parametrize("name", sorted(path.name for path in (REPOSITORY / "notebooks").glob("*.ipynb")))
def test_notebooks_import_what_their_extra_brings(name):
    """Also what it imports of the examples, in turn."""
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *extras["notebooks"], *extras["torch"], *extras["jax"]]
    assert "qshard[jax,torch]" in named
    brought = {re.match(r"[\w-]+", requirement)[0] for requirement in named}
    assert "jupyterlab" in brought
    cells = json.loads((REPOSITORY / "notebooks" / name).read_text())["cells"]
    imported = modules("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    at_once = r"^(?:import|from) (\w+)"  # Not what a function imports once it is called.
    examples = {
        path.stem: set(re.findall(at_once, path.read_text(), re.MULTILINE))
        for path in (REPOSITORY / "examples").glob("*.py")
    }
    while more := {name for example in imported & set(examples) for name in examples[example]} - imported:
        imported |= more
    assert imported - set(examples) - set(sys.stdlib_module_names) <= brought
