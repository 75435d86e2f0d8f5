"""docs/quickstart.md: each block is a whole script, and prints the losses of the page."""

import re

import pytest

from support.pages import Page, run

PAGE = Page("docs/quickstart.md")
PRINTED = dict(
    zip(
        re.findall(r"^`python (\w+\.py)` prints:$", PAGE.text, re.MULTILINE),
        re.findall(r"^```text\n(.*?)^```$", PAGE.text, re.MULTILINE | re.DOTALL),
        strict=True,
    )
)


def losses(text):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.mark.parametrize("code", PAGE.python, ids=lambda code: code.split()[1])
def test_a_block_is_a_script_that_learns(code, tmp_path):
    for module in set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)) - {"qshard"}:
        pytest.importorskip(module)
    name = code.split()[1]
    script = tmp_path / name
    script.write_text(code)
    result = run(script, ["python", name])
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    found = losses(result.stdout)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 20
    if name in PRINTED:
        assert found == pytest.approx(losses(PRINTED[name]), rel=0.05)


def test_it_shows_the_output_of_both_frameworks():
    assert set(PRINTED) == {"train.py", "train_jax.py"}
