"""`make test` collects the tests of every folder."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_folder_is_skipped(pytestconfig):
    """Pytest's default `norecursedirs` has `dist`, so `pytest tests` would skip tests/dist without a message."""
    folders = {file.parent.relative_to(TESTS.parent) for file in TESTS.rglob("test_*.py")}
    patterns = pytestconfig.getini("norecursedirs")
    assert Path("tests/dist") in folders
    assert not [f for f in folders if any(fnmatch(part, pattern) for part in f.parts for pattern in patterns)]
