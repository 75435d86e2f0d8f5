"""Training text of both scripts: a train part, a held-out tail, and batches that depend only on the step."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT = 0.05  # fraction at the end of the text that is never trained on
Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Corpus:
    """A text as bytes (uint8, `[length]`), split into `train` and the `held_out` tail."""

    name: str
    train: np.ndarray
    held_out: np.ndarray

    def batch(self, step: int, size: int, context: int) -> Batch:
        """Return (tokens, targets) of `step`, int32 `[size, context]`, identical in every framework and on every rank.

        The generator is seeded with the step, so no generator state has to be saved or synchronized.
        """
        starts = np.random.default_rng((1, step)).integers(0, len(self.train) - context, size)
        return _windows(self.train, starts, context)

    def validation(self, size: int, context: int) -> list[Batch]:
        """Return the held-out tail as batches of windows without overlap. An incomplete last batch is dropped."""
        starts = np.arange(0, len(self.held_out) - context, context)
        batches = [starts[i : i + size] for i in range(0, len(starts) - size + 1, size)]
        return [_windows(self.held_out, batch, context) for batch in batches]


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]  # the target of a byte is the byte after it


def load(path: Path | None, size: int, context: int) -> Corpus:
    """Read the text for batches of `size` windows.

    Args:
      path: a file, or None for the help texts of the Python language.
      size: windows per batch.
      context: tokens per window.

    Returns:
      The corpus.

    Raises:
      ValueError: the file is not text, or too short for one training window and one validation batch.
      OSError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics  # the text of help("with") and the like, in every CPython

        # Topics quote each other at length. Keep each paragraph once, or the held-out tail would contain training text.
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
    """Refuse bytes that are not text: the model would learn them, but their loss would mean nothing."""
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
    """Check `--text` during parsing, so that a mistake costs no start-up time."""
    path = Path(value)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{value} is not a file")
    return path
