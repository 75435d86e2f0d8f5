"""What docs/tensor_parallel.md says: its PyTorch code as one script."""

import re

from support.pages import Page, run

PAGE = Page("docs/tensor_parallel.md")


def test_its_code_runs(tmp_path):
    """Started as it says."""
    (command,) = re.findall(r"`(torchrun .*)`$", PAGE.text, re.MULTILINE)
    script = tmp_path / command.split()[-1]
    script.write_text("\n".join(code for code in PAGE.python if "jax" not in code))
    result = run(script, command.split())
    assert result.returncode == 0, result.stderr
