"""Keeps what a build made, to take it again where all that determines it is the same.

`pip install .` builds in a new environment each time, so CMake starts anew, and would compile everything again.

    qshard_kept.py key DESCRIPTION                    prints the key
    qshard_kept.py keep DESCRIPTION KEY BUILT KEPT    copies BUILT to KEPT, unless the key has changed since

DESCRIPTION is a file that CMake writes (kept.cmake): what is not a file, such as flags and versions, and after
`[files]` the files and folders that are read, one a line. A key is a hash of all that.
"""

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

KEPT_BYTES = 1 << 29
NOT_COMPILED = (".md", ".py", ".pyc")
SOURCES = (".cc", ".cu", ".cuh", ".h", ".inc")
INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def key(description: Path) -> str:
    """The hash of a description and of the content of its files, whatever their paths.

    Raises:
      SystemExit: a source includes a file that is not in the description, so that the key would not see it change.
    """
    text, _, listed = description.read_text().partition("[files]\n")
    ffi = Path(__file__).parents[1]
    digest, included, seen = hashlib.sha256(text.encode()), {}, set()
    for root in map(Path, listed.split("\n")):
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if not path.is_file() or path.suffix in NOT_COMPILED:
                continue
            data = path.read_bytes()
            name = path.relative_to(ffi) if path.is_relative_to(ffi) else path.relative_to(root)
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
            if path.is_relative_to(ffi) and path.suffix in SOURCES:
                seen.add(path)
                included |= {ffi / include.decode(): path for include in INCLUDE.findall(data)}
    for path, by in included.items():
        if path.is_file() and path not in seen and path.suffix in SOURCES:
            raise SystemExit(
                f"qshard: {by} includes {path}, which no key sees; give it to qshard_key in CMakeLists.txt"
            )
    return digest.hexdigest()[:32]


def keep(description: Path, expected: str, built: Path, kept: Path) -> None:
    if key(description) != expected:
        return  # A source was edited while the compiler ran: nobody knows what it read.
    partial = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(built, partial)
        partial.replace(kept)
        prune(kept.parent)
    except OSError as error:
        print(f"qshard: {kept} is not kept: {error}")


def prune(folder: Path, limit: int = KEPT_BYTES) -> None:
    """Removes what was used longest ago, until the rest is within the limit."""
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: -path.stat().st_mtime)
    for index, path in enumerate(files):
        limit -= path.stat().st_size
        if limit < 0 and index > 0:
            path.unlink(missing_ok=True)


def main(arguments: list[str]) -> None:
    if arguments[0] == "key":
        print(key(Path(arguments[1])))
    else:
        description, expected, built, kept = arguments[1:]
        keep(Path(description), expected, Path(built), Path(kept))


if __name__ == "__main__":
    main(sys.argv[1:])
