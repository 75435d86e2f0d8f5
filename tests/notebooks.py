"""Execute the notebooks and compare their outputs with those stored in them: `python tests/notebooks.py [--write]`.

`make notebooks` runs it. `--write` stores the new outputs instead. Pictures are only counted, text is compared word by
word, and numbers with a tolerance, because CPUs differ in the last digits of a training run.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parents[1] / "notebooks"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
RELATIVE, ABSOLUTE = 0.1, 0.06
"""Tolerances of numbers in text: losses and percentages of a short training run on another CPU."""
LARGEST = 600_000
"""Maximum bytes of a notebook with outputs; code hosts do not render larger ones."""
WIDGET = "application/vnd.jupyter.widget-view+json"


def executed(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in its folder, and drop all metadata that differs between two runs of the same code."""
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("NPROC", "16")  # As in conftest.py, for kernels with host devices of JAX.
    NotebookClient(notebook, timeout=900, store_widget_state=False, resources={"metadata": {"path": FOLDER}}).execute()
    notebook.metadata.pop("widgets", None)
    for index, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.metadata.pop("execution", None)
        cell.execution_count = index + 1
        cell.outputs = merged(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = index + 1
    return notebook


def merged(outputs: list[Any]) -> list[Any]:
    """Join consecutive parts of a stream, because their number depends on time, and drop standard error."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def small(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Store pictures with a palette of 64 colours, a third of the bytes, also those inside HTML."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        if "image/png" in data:
            data["image/png"] = with_palette(data["image/png"])
        if "text/html" in data:
            embedded = r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+"
            data["text/html"] = re.sub(embedded, lambda png: with_palette(png[0]), data["text/html"])
    return notebook


def with_palette(png: str) -> str:
    """Encode a PNG, in base64, with a palette."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64)
    file = io.BytesIO()
    picture.save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def texts(notebook: nbformat.NotebookNode) -> list[list[tuple[str, str]]]:
    """Return for each code cell the kind and the text of its outputs; for a picture, the kind alone."""
    found = []
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        outputs = []
        for output in cell.outputs:
            data = output.get("data", {})
            if WIDGET not in data:
                kind = "image" if "image/png" in data else output.output_type
                outputs.append((kind, output.get("text", "") if kind != "image" else ""))
        found.append(outputs)
    return found


def alike(text: str, other: str) -> bool:
    """Return whether two texts have the same words, and numbers within the tolerance."""
    if NUMBER.sub("#", text).split() != NUMBER.sub("#", other).split():
        return False
    pairs = zip(map(float, NUMBER.findall(text)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= ABSOLUTE + RELATIVE * max(abs(a), abs(b)) for a, b in pairs)


def differences(path: Path, new: nbformat.NotebookNode) -> list[str]:
    """Return a line for each cell with new outputs that differ from the stored ones."""
    lines = []
    for index, (stored, found) in enumerate(zip(texts(nbformat.read(path, 4)), texts(new), strict=True)):
        same = [kind for kind, _ in stored] == [kind for kind, _ in found]
        if not same or not all(alike(a, b) for (_, a), (_, b) in zip(stored, found, strict=True)):
            lines.append(f"{path.name}, code cell {index + 1}: {stored} stored, {found} now")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the new outputs")
    parser.add_argument("names", nargs="*", help="such as 01_formats; default: all")
    options = parser.parse_args()
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if not options.names or path.stem in options.names]
    failed = []
    for path in paths:
        begun = time.perf_counter()
        new = executed(path)
        print(f"{path.name}: {time.perf_counter() - begun:.0f} s", flush=True)
        if options.write:
            path.write_text(nbformat.writes(small(new)) + "\n")
        else:
            failed += differences(path, new)
        if path.stat().st_size > LARGEST:
            failed.append(f"{path.name} has {path.stat().st_size} bytes, more than {LARGEST}: draw smaller pictures")
    if failed:
        sys.exit("\n".join([*failed, "If that is right, run `make notebooks WRITE=1` and look at the pictures."]))


if __name__ == "__main__":
    main()
