"""The text both frameworks train on: a train part, a held-out tail, and batches that depend on the step alone."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT = 0.05  # the last part of the text is never trained on
Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """A text as bytes (uint8, `[length]`), cut once into `train` and the `held_out` tail."""

    name: str
    train: np.ndarray
    held_out: np.ndarray

    def batch(self, step: int, size: int, context: int) -> Batch:
        """Return (tokens, targets) of `step`, int32 `[size, context]`: the same in every framework and on every rank.

        The generator is seeded with the step, so no state has to be carried, saved or kept in step over ranks.
        """
        starts = np.random.default_rng((1, step)).integers(0, len(self.train) - context, size)
        return _windows(self.train, starts, context)

    def validation(self, size: int, context: int) -> list[Batch]:
        """Return the held-out tail as batches of windows without overlap; what does not fill a batch is left out."""
        starts = np.arange(0, len(self.held_out) - context, context)
        batches = [starts[i : i + size] for i in range(0, len(starts) - size + 1, size)]
        return [_windows(self.held_out, batch, context) for batch in batches]


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]  # the target of a byte is the byte after it


def load(path: Path | None, size: int, context: int) -> Corpus:
    """Read `path`, or the Python language's own help texts where it is None, for batches of `size` windows.

    Raises:
      ValueError: the file is no text, or too short for one training window and one validation batch.
      OSError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics  # what help("with") prints, in every CPython

        # Topics quote each other at length. Each paragraph is kept once, or much of the held-out tail would be known.
        paragraphs = "\n\n".join(topics[topic] for topic in sorted(topics)).split("\n\n")
        name, text = "pydoc_data.topics", "\n\n".join(dict.fromkeys(paragraphs)).encode()
    else:
        name, text = str(path), path.read_bytes()
        _check(name, text)
    data = np.frombuffer(text, np.uint8)
    corpus = Corpus(name, *np.split(data, [len(data) - int(len(data) * HELD_OUT)]))
    if not corpus.validation(size, context):
        needed = int((size * context + 1) / HELD_OUT) + 1
        raise ValueError(f"--text {name} has {len(data)} bytes; {needed} are needed to hold out one batch of {size}")
    return corpus


def _check(name: str, text: bytes) -> None:
    """The model would learn any bytes; a loss on those of a picture or an archive says nothing."""
    if not text:
        raise ValueError(f"--text {name} is empty; give a file of text")
    try:
        text.decode()
        place = text.find(0)
    except UnicodeDecodeError as error:
        place = error.start
    if place >= 0:
        raise ValueError(f"--text {name} is not UTF-8 text (byte 0x{text[place]:02x} at {place}); give a file of text")


def text_file(value: str) -> Path:
    """Check `--text` when it is parsed, so that a mistake costs no start-up time."""
    path = Path(value)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{value} is not a file")
    return path
