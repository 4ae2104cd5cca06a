"""The progress bar drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.progress_bar import Bar, Pass, ProgressBar, Screen

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["RichProgressBar"]


class RichProgressBar(ProgressBar):
    """:class:`ProgressBar`, drawn by rich on a terminal: ``pip install rich``.

    It shows the same, and plain lines where there is no terminal. What is printed meanwhile appears
    above the bar.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: where to write; standard error if ``None``.

    Raises:
        ImportError: rich is not installed.

    Example:
        >>> import sys, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import RichProgressBar
        >>> accel = Accelerator(cpu=True, callbacks=[RichProgressBar(file=sys.stdout)])
        >>> data = accel.prepare(torch.utils.data.DataLoader(range(6), batch_size=2))
        >>> for batch in data:
        ...     accel.log({"train/loss": 0.5})
        epoch 1: 3/3 batches, ... train/loss=0.5
    """

    def __init__(
        self,
        refresh_every: float = 0.2,
        seconds_between_lines: float = 10.0,
        file: TextIO | None = None,
    ) -> None:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "RichProgressBar needs rich: pip install rich, or take ProgressBar."
            ) from error
        super().__init__(refresh_every, seconds_between_lines, file)
        self._shared: list[Progress] = []  # what the outer bar is drawn with, for the inner one

    def _terminal(self, file: TextIO) -> Screen:
        return _RichScreen(file, self.refresh_every, self._shared)


class _RichScreen:
    """Bars of rich; an inner one joins the drawing of the outer one."""

    shows_end = True

    def __init__(self, file: TextIO, seconds: float, shared: list[Progress]) -> None:
        self.seconds = seconds
        self._file, self._shared = file, shared

    def begin(self, about: Pass) -> Bar:
        """A bar, below the other one if it is an inner one."""
        if about.inner and self._shared:
            return _RichBar(self._shared[-1], about, [])
        self._shared.append(_drawing(self._file))
        self._shared[-1].start()
        return _RichBar(self._shared[-1], about, self._shared)


class _RichBar:
    def __init__(self, drawing: Progress, about: Pass, owned: list[Progress]) -> None:
        self._drawing, self._about, self._owned = drawing, about, owned
        options: dict[str, Any] = {"count": about.of(about.first), "values": ""}
        self._task = drawing.add_task(
            about.title, total=about.total, completed=about.first, **options
        )
        drawing.refresh()

    def show(self, done: int, values: str) -> None:
        count = self._about.of(done)
        self._drawing.update(self._task, completed=done, count=count, values=values)
        self._drawing.refresh()

    def close(self) -> None:
        if self._owned:
            self._owned.remove(self._drawing)
            self._drawing.stop()
        else:
            self._drawing.remove_task(self._task)


def _drawing(file: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}", markup=False),
        console=Console(file=file),
        auto_refresh=False,  # drawn when batches are counted, without a thread
    )
