"""What griffe, which reads the sources for mkdocstrings, calls: docstrings are rewritten as they are read."""

from __future__ import annotations

from typing import Any

import griffe
from site_docstrings import as_markdown


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each module, class, function and attribute, once."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
