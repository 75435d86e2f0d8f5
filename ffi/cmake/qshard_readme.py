"""README.md for a package index, where links to other files of the repository are dead."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


def standalone(text: str, source: str = "") -> str:
    """Return Markdown with its relative links made absolute.

    Args:
      text: Markdown.
      source: URL of the repository, or "": links become their text.

    >>> standalone("See [install](docs/install.md).")
    'See install.'
    >>> standalone("See [install](docs/install.md).", "https://example.org/qshard")
    'See [install](https://example.org/qshard/blob/main/docs/install.md).'
    """
    return RELATIVE_LINK.sub(rf"[\1]({source.rstrip('/')}/blob/main/\2)" if source else r"\1", text)


class Provider:
    """Readme provider of scikit-build-core. The URL is `Source` in pyproject.toml's `[project.urls]`."""

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        """Return the readme."""
        source = project.get("urls", {}).get("Source", "")
        text = standalone(Path("README.md").read_text(encoding="utf-8"), source)
        return {"readme": {"content-type": "text/markdown", "text": text}}
