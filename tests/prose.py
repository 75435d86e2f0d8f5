"""Finds docstrings and comments that need reading twice; fails where there are more than in well-kept projects.

    python tests/prose.py [FILE...]     every finding; without files, of all sources

A finding is a place to read again. Write the thing's name first, then what it does; CONTRIBUTING.md has pairs.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("qshard", "torch_bridge", "ffi", "examples", "benchmarks")
LIMIT = 5.0
"""Findings allowed for each 1,000 lines of docstrings and comments: optax, flax and FSDP2 have 4."""
OPENER = re.compile(r"(What|Whose|Who|Of|Those|That|As|Where|Which|Whether|How|The same|All that)\b")
PHRASES = {
    "of which|in which|those of|that of|whose": "a short sentence that repeats the noun",
    "what (?:is|was|a|an|the|has|have|it|they)": "the noun",
    "nobody(?:'s)?|no one|whoever|anyone|for whom": "the part that acts, or `padding`, `unused`",
    "travels?|on its way": "is sent, is gathered",
    "(?:is|are) (?:asked|told)|asks? (?:for|back|how)": "is requested, takes, returns",
    "looks? on": "a tracer, mode or hook is active",
    "but for|so many|else (?:is|are|tries)": "except, that number of, otherwise",
}
RULES = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), write) for pattern, write in PHRASES.items()]


def python_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Line number, text, and whether a docstring begins there; without the examples in docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                prose = docstring.partition(">>>")[0]
                for offset, line in enumerate(prose.splitlines()):
                    yield node.body[0].lineno + offset, line.strip(), offset == 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def cpp_lines(text: str) -> Iterator[tuple[int, str, bool]]:
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.search(r"//+\s*(.*)", line):
            yield number, comment[1], False


def read(name: str, text: str) -> Iterator[tuple[int, str, bool]]:
    """Prose of a source, in the form of `python_lines`; none of a file that is neither Python nor C++."""
    if name.endswith(".py"):
        return python_lines(text)
    return cpp_lines(text) if name.endswith((".h", ".cc", ".cu", ".cuh", ".inc", ".def")) else iter(())


def advice(line: str, opens: bool) -> str | None:
    """What to write instead, for a line that needs reading twice."""
    if opens and OPENER.match(line):
        return "begin with the noun, or with an imperative"
    for rule, write in RULES:
        if hit := rule.search(line):
            return f"`{hit[0]}`: write {write}"
    return None


def main() -> int:
    named = sys.argv[1:] or [f"{folder}/" for folder in FOLDERS]
    listed = subprocess.run(["git", "ls-files", *named], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    lines = found = 0
    for name in listed.stdout.split():
        if "third_party" in name or (REPOSITORY / name).is_symlink():
            continue
        for number, line, opens in read(name, (REPOSITORY / name).read_text()):
            lines += 1
            if (write := advice(line, opens)) is not None:
                found += 1
                print(f"{name}:{number}: {write}")
    rate = 1000 * found / max(lines, 1)
    print(f"{found} findings in {lines} lines of docstrings and comments: {rate:.1f} for each 1,000, at most {LIMIT:g}")
    return int(rate > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
