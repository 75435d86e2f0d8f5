"""README.md: each Python block runs as pasted, and files and modules in shell blocks exist."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.pages import REPOSITORY, Page, run

README = Page("README.md")
PYTHON, COMMANDS = README.python, README.commands
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DOCS = sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "docs").glob("*.md"))
TARGETS = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def modules(code: str) -> set[str]:
    return set(re.findall(r"^\s*(?:import|from) (\w+)", code, re.MULTILINE))


def patch(code: str, diff: str) -> str:
    """Applies a diff of README; its lines without a sign place the others, and need not be neighbours in `code`."""
    lines, at = code.splitlines(), 0
    for line in diff.splitlines():
        sign, text = line[0], line[1:]
        if sign == "+":
            lines.insert(at, text)
        else:
            at = lines.index(text, at)
            if sign == "-":
                del lines[at]
                continue
        at += 1
    return "\n".join(lines)


def patches() -> list[tuple[str, list[str]]]:
    """Each diff of README, applied to the last Python block before it, and the command that runs it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.text, re.MULTILINE | re.DOTALL)
    found, code = [], ""
    for index, (language, text) in enumerate(blocks):
        if language == "python":
            code = text
        elif language == "diff":
            following = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
            runs = following[0] == "" and following[1].startswith("torchrun")
            found.append((patch(code, text), following[1].split() if runs else ["python", "train.py"]))
    return found


def check_losses(code: str, command: list[str], folder: Path) -> list[float]:
    """Run a block of README in its own process. Return its losses, which fall, after a run without warnings."""
    for name in modules(code) - {"qshard"}:
        pytest.importorskip(name)
    script = folder / command[-1]
    script.write_text(code)
    result = run(script, command)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)]
    assert losses, result.stdout
    assert losses[-1] < losses[0] / 1.5, result.stdout
    return losses


@pytest.mark.parametrize("code", PYTHON, ids=lambda code: re.findall(r"^(?:import|from) (.+)", code, re.M)[0])
def test_python_runs_as_pasted(code, tmp_path):
    check_losses(code, ["python", "train.py"], tmp_path)


@pytest.mark.parametrize(("code", "command"), patches(), ids=["FSDP2", "JAX"])
def test_sharded_variants_have_the_losses_of_one_device(code, command, tmp_path, monkeypatch):
    """All devices train on the same rows, and codes are the same. Sums over ranks have an order of their own."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    sharded = check_losses(code, command, tmp_path)
    assert "fsdp" in code
    (alone,) = [block for block in PYTHON if modules(block) == modules(code)]
    assert sharded == pytest.approx(check_losses(alone, ["python", "alone.py"], tmp_path), rel=0.05)


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
    elif program == "qshard":
        said = subprocess.run(
            [sys.executable, "-m", "qshard", arguments[0], "--help"], capture_output=True, check=False
        )
        assert said.returncode == 0
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
