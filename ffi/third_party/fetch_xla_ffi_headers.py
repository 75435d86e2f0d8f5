"""Extract the XLA FFI headers that qshard compiles against: `python fetch_xla_ffi_headers.py FOLDER`.

They come from the jaxlib wheel that pyproject.toml pins as a build requirement, whatever jaxlib is there to run with.
With `QSHARD_XLA_FFI_INCLUDE=FOLDER/jaxlib/include`, `pip install --no-build-isolation .` needs no such jaxlib, and the
folder can be carried to a machine without network.
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

HEADERS = "jaxlib/include/xla/ffi/api/"


def pinned_jaxlib() -> str:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    return next(name for name in project["build-system"]["requires"] if name.startswith("jaxlib=="))


def fetch(folder: Path) -> None:
    requirement = pinned_jaxlib()
    done = folder / "requirement.txt"
    if done.exists() and done.read_text() == requirement:
        return
    with tempfile.TemporaryDirectory() as download:
        options = ["-q", "--no-input", "--no-deps", "--only-binary=:all:", "--dest", download]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(HEADERS)])
    done.write_text(requirement)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
