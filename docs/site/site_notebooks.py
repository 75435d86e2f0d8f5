"""Markdown pages of notebooks, with the stored outputs, pictures as files, and formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path

import latex2mathml.converter
import nbformat
from nbconvert import MarkdownExporter
from nbconvert.exporters.exporter import ResourcesDict

WIDE = "---\nhide: [toc]\n---\n\n"
"""Front matter without a table of contents: code of 100 columns needs its place."""
WIDGET = "application/vnd.jupyter.widget-view+json"
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|`[^`]*`", re.DOTALL)
"""A displayed formula, an inline formula, or code, where `$` begins no formula."""


def page(path: Path) -> dict[str, str | bytes]:
    """Convert a notebook to its page.

    Returns:
      Contents by name: the page, such as `01_formats.md`, and the pictures in `01_formats_files/`.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(_mathml, cell.source).replace(".ipynb)", ".md)")
        else:
            # Menus need a live notebook.
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
    resources = ResourcesDict(unique_key=path.stem, output_files_dir=f"{path.stem}_files")
    text, resources = MarkdownExporter().from_notebook_node(notebook, resources)
    heading, _, rest = text.partition("\n")
    note = f"*This page shows a notebook with its outputs. [Download it]({path.name}) to run it.*"
    return {f"{path.stem}.md": f"{WIDE}{heading}\n\n{note}\n{rest}", **resources["outputs"]}


def _mathml(found: re.Match[str]) -> str:
    """Convert a formula of LaTeX to MathML, which browsers show without a script."""
    if found[1]:
        return latex2mathml.converter.convert(found[1].strip(), display="block")
    return latex2mathml.converter.convert(found[2]) if found[2] else found[0]
