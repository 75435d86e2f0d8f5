"""docs/checkpoints.md: each program runs alone; the one that resumes runs on two numbers of ranks."""

import re

import pytest

from support.pages import Page, run

PAGE = Page("docs/checkpoints.md")
pytest.importorskip("torch")
for _name in ("jax", "optax", "orbax", "click", "rich", "safetensors"):
    pytest.importorskip(_name)


def program(first):
    """The program that has the line `first`."""
    (found,) = [code for code in PAGE.scripts if first in code.splitlines()]
    return found


def python(code, folder, name="page.py"):
    (folder / name).write_text(code)
    result = run(folder / name, ["python", "-P", name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


def test_one_process(tmp_path):
    python(program('torch.save(checkpoint, "checkpoint.pt")'), tmp_path)


def test_jax_on_half_of_the_devices(tmp_path):
    python(program("import orbax.checkpoint as ocp"), tmp_path)


def test_a_run_resumes_on_other_ranks(tmp_path):
    (block,) = [code for code in PAGE.python if code.startswith("# resume.py\n")]
    (tmp_path / "resume.py").write_text(block)
    losses = []
    commands = [words for words in PAGE.commands if words[0] == "torchrun"]
    assert len({words[2] for words in commands}) == 2
    for words in commands:
        result = run(tmp_path / "resume.py", words)
        assert result.returncode == 0, result.stderr
        losses += [float(loss) for loss in re.findall(r"^loss (\S+)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    # Without the checkpoint the second run would begin where the first did.
    assert losses[5] < losses[4] < losses[0]


def test_a_trained_model_as_codes(tmp_path):
    python(program("# save_codes.py"), tmp_path)
    assert (tmp_path / "codes.safetensors").is_file()
