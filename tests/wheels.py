"""Checks of built wheels, beyond those of twine and auditwheel: `python -P tests/wheels.py build/dist`.

An index accepts a wheel with a public version, a manylinux tag and at most 100 MB. The module may need symbols of
Python and of versioned libraries alone, and of Python only the stable ABI if its tag says so.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

LARGEST = 100e6
"""Bytes of the largest file that PyPI takes without asking."""
PYTHON_SYMBOL = re.compile(r"_?Py[A-Z_]")
LICENSES = {"LICENSE", "LICENSE.nanobind", "LICENSE.robin_map"}


def undefined(module: Path) -> list[str]:
    """Return the undefined symbols of a shared object that have no version, and are neither weak nor Python's."""
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split() for line in listing.splitlines()]
    return [name for kind, name in symbols if kind == "U" and "@" not in name and not PYTHON_SYMBOL.match(name)]


def check(path: Path) -> None:
    """Check a wheel, or raise AssertionError."""
    name, version, python, abi, platform = path.stem.split("-")
    assert name == "qshard", name
    assert "+" not in version, f"version {version} has a label, which indexes refuse"
    assert (python, abi) in {("cp311", "cp311"), ("cp312", "abi3")}, f"{python}-{abi}"
    assert "manylinux_2_28_" in platform, platform
    size = path.stat().st_size
    assert size <= LARGEST, f"{size / 1e6:.1f} MB"
    with zipfile.ZipFile(path) as wheel, tempfile.TemporaryDirectory() as folder:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        (metadata,) = (file for file in names if file.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(wheel.read(metadata).decode())
        assert headers["Version"] == version
        links = re.findall(r"\]\((?!https?:|#)\S+\)", headers.get_payload())
        assert not links, f"relative links, dead on an index: {links}"
        licenses = {Path(file).name for file in names if "/licenses/" in file}
        assert licenses == LICENSES, licenses
        (module,) = (file for file in names if file.startswith("qshard/_ffi.") and file.endswith(".so"))
        missing = undefined(Path(wheel.extract(module, folder)))
        assert not missing, f"{module} needs {missing}, which no library is known to define"
        assert not [file for file in names if file.startswith("qshard.libs/")]
    if abi == "abi3":
        subprocess.run([sys.executable, "-m", "abi3audit", "--strict", path], check=True)
    print(f"{path.name}: {size / 1e6:.1f} MB")


def main(folder: Path) -> None:
    """Check every wheel in a folder."""
    wheels = sorted(folder.glob("*.whl"))
    assert wheels, f"{folder} has no wheel"
    for wheel in wheels:
        check(wheel)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
