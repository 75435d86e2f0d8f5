"""Pages of notebooks: Markdown with the stored outputs, pictures as files, and formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path

import latex2mathml.converter
import nbformat
from nbconvert import MarkdownExporter
from nbconvert.exporters.exporter import ResourcesDict

WIDGET = "application/vnd.jupyter.widget-view+json"
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|`[^`]*`", re.DOTALL)
"""A displayed formula, one in a line, or code, in which `$` is no formula."""


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
    pictures = {name: content for name, content in resources["outputs"].items()}
    return {f"{path.stem}.md": f"{heading}\n\n{note}\n{rest}", **pictures}


def _mathml(found: re.Match[str]) -> str:
    """A formula of LaTeX as MathML, which browsers show without a script."""
    if found[1]:
        return latex2mathml.converter.convert(found[1].strip(), display="block")
    return latex2mathml.converter.convert(found[2]) if found[2] else found[0]
