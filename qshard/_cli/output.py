"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qshard._cli.errors import Misuse, shown


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file, open for reading and writing, that takes its name once all went well; else nothing is left of it.

    Raises:
      Misuse: the folder is not there, or not for writing, or `path` is a folder.
    """
    if path.is_dir():
        raise Misuse(f"{shown(path)} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise Misuse(f"{shown(path.parent)} is not a folder; make it first")
    path = path.resolve()  # What a link points to is what is written.
    try:
        handle, temporary = tempfile.mkstemp(prefix=".qshard.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise Misuse(f"{shown(path.parent)} takes no new file: {error.strerror}; write to another folder") from None
    os.close(handle)
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), _mode(path))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _mode(path: Path) -> int:
    """That of the file it replaces, or what a new one gets."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
