"""mkdocs hooks: add the files of the repository to the site, draw pictures, and check that API pages are complete.

Notebooks are pages too, with the outputs that are stored in them.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import griffe
import site_notebooks
import site_ops
import site_pictures
from mkdocs.structure.files import File, Files
from mkdocstrings import Inventory

log = logging.getLogger("mkdocs.hooks.qshard")

REPOSITORY = Path(__file__).parents[2]
FILES = ("*.md", "*.cff", "docs/*.md", "docs/dev/*.md", "examples/*.*", "notebooks/*.ipynb")
"""Files with the same path in the site as in the repository, so that links between them work in both."""
HOME_PICTURE = "<!-- picture: cuts FP8_128x128 300 256 4 -->"
"""Shown on the home page before its first section. Code hosts do not draw it."""
MODULES = re.findall(r"api/([\w.]+)\.md", Path(__file__).with_name("mkdocs.yml").read_text())
"""Modules with an API page in the nav."""


def on_files(files: Files, config: Any) -> Files:
    for path in (path for pattern in FILES for path in REPOSITORY.glob(pattern)):
        files.append(File.generated(config, path.relative_to(REPOSITORY).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "ops.md", content=site_ops.page()))
    for path in sorted(REPOSITORY.glob("notebooks/*.ipynb")):
        for name, content in site_notebooks.page(path).items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    for module in MODULES:
        files.append(File.generated(config, f"api/{module}.md", content=f"# {module}\n\n::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Draw the pictures of a page, and link notebooks to their pages."""
    if page.file.src_uri == "README.md":
        markdown = markdown.replace("\n## ", f"\n{HOME_PICTURE}\n\n## ", 1)
    if not page.file.src_uri.startswith("notebooks/"):
        markdown = re.sub(r"(notebooks/\w+)\.ipynb(?=\))", r"\1.md", markdown)
    return site_pictures.draw_pictures(markdown)


def on_post_build(config: Any) -> None:
    """Warn about public names without a docstring: no page shows them."""
    with open(Path(config.site_dir) / "objects.inv", "rb") as file:
        shown = Inventory.parse_sphinx(file)
    loader = griffe.GriffeLoader(search_paths=[REPOSITORY / "build/tree"], allow_inspection=False)
    for module in MODULES:
        for name in loader.load(module, try_relative_path=False).exports or ():
            if f"{module}.{name}" not in shown and f"{module}.{name}" not in MODULES:
                log.warning(f"{module}.{name} is public and on no page: give it a docstring")
