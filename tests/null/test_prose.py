"""`tests/prose.py` finds sentences that need reading twice, and leaves examples and code alone."""

import importlib.util
from pathlib import Path

import pytest

PROSE = Path(__file__).parents[1] / "prose.py"


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", PROSE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(prose, name, text):
    return [number for number, line, opens in prose.read(name, text) if prose.advice(line, opens) is not None]


@pytest.mark.parametrize(
    "line",
    [
        "What a device has of the whole.",
        "Codes that travel.",
        "A tensor of which the last axis is padded.",
        "Rows of nobody.",
    ],
)
def test_a_docstring_that_puzzles_is_found(prose, line):
    assert found(prose, "a.py", f'def f():\n    """{line}"""\n') == [2]


def test_plain_sentences_code_and_examples_are_not(prose):
    text = '"""Cast a shard.\n\n>>> print("What")\nWhat\n"""\nwhat_it = "those of"  # The scale is cached.\n'
    assert found(prose, "a.py", text) == []


def test_comments_of_both_languages_are_read(prose):
    assert found(prose, "a.py", "x = 1  # those of nobody\n") == [1]
    assert found(prose, "a.cu", "int x;  // those of nobody\n// The scale of a block.\n") == [1]
    assert found(prose, "a.csv", "# those of nobody\n") == []
