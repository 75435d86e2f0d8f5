"""Progress bars of a training script."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import interrupt


class TrainingProgress:
    """Shows one bar per training, and a line for each validation loss."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(soft_wrap=True),
        )

    def __enter__(self) -> Self:
        self._bars.start()
        interrupt.clean_up.append(self._bars.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()  # also after Ctrl-C, to show the cursor again
        interrupt.clean_up.remove(self._bars.stop)

    def start(self, name: str) -> None:
        """Add the bar of the next training."""
        self._name = name
        self._bar = self._bars.add_task(self._name, total=self._steps, loss="compiling")

    def step(self, loss: float) -> None:
        """Advance the bar by one step."""
        self._bars.update(self._bar, advance=1, loss=f"loss {loss:.3f}")

    def validation(self, step: int, loss: float) -> None:
        """Print a validation loss above the bars."""
        self._bars.console.print(f"{self._name}: step {step}, validation loss {loss:.4f}", highlight=False)
