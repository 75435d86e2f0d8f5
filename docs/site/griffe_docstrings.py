"""A griffe extension that adapts docstrings to Python-Markdown and griffe's Google parser."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)(>>> .*(?:\n.*\S.*)*)", re.MULTILINE)
"""A doctest, up to the next empty line."""
SHARED = re.compile(r"^  ([a-z]\w*(?:, \w+)*), (\w+): ", re.MULTILINE)
"""Several arguments with one description. The parser takes one name an entry."""


class Docstrings(griffe.Extension):
    """Rewrite each docstring once, and drop docstrings of special methods, which are for maintainers."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.is_function and obj.name.startswith("__") and obj.name != "__init__":
            obj.docstring = None
        if obj.docstring:
            text = DOCTEST.sub(r"\1```pycon\n\1\2\n\1```", inspect.cleandoc(obj.docstring.value))
            obj.docstring.value = SHARED.sub(_entries, text)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Show the parameters of `__new__` where a class, such as a tensor subclass, has no `__init__`."""
        if "__new__" in cls.members and "__init__" not in cls.members:
            constructor = copy.copy(cls.members["__new__"])
            constructor.name = "__init__"
            cls.members["__init__"] = constructor


def _entries(names: re.Match[str]) -> str:
    """Rewrite `a, b: text` as `a: see b.` and `b: text`."""
    others = "".join(f"  {name}: see `{names[2]}`.\n" for name in names[1].split(", "))
    return f"{others}  {names[2]}: "
