"""RichProgressBar: the progress bar drawn by rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.progress_bar import Bar, BarSpec, Display, ProgressBar

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["RichProgressBar"]


class RichProgressBar(ProgressBar):
    """:class:`ProgressBar`, drawn by rich on a terminal: ``pip install rich``.

    The content is the same, with plain lines where there is no terminal. Printed output appears
    above the bar.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: to write to; standard error if ``None``.

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
                "RichProgressBar needs rich: pip install rich, or use ProgressBar."
            ) from error
        super().__init__(refresh_every, seconds_between_lines, file)
        self._shared: list[Progress] = []  # display of the outer bar, which inner bars join

    def _terminal_display(self, file: TextIO) -> Display:
        return _RichDisplay(file, self.refresh_every, self._shared)


class _RichDisplay:
    """Draw bars with rich; an inner bar joins the display of the outer one."""

    shows_end = True

    def __init__(self, file: TextIO, seconds: float, shared: list[Progress]) -> None:
        self.seconds = seconds
        self._file, self._shared = file, shared

    def start(self, spec: BarSpec) -> Bar:
        """Start a bar, below the outer one if it is an inner one."""
        if spec.inner and self._shared:
            return _RichBar(self._shared[-1], spec, [])
        self._shared.append(_new_progress(self._file))
        self._shared[-1].start()
        return _RichBar(self._shared[-1], spec, self._shared)


class _RichBar:
    def __init__(self, progress: Progress, spec: BarSpec, owned: list[Progress]) -> None:
        self._progress, self._spec, self._owned = progress, spec, owned
        options: dict[str, Any] = {"count": spec.count_text(spec.first), "values": ""}
        self._task = progress.add_task(
            spec.title, total=spec.total, completed=spec.first, **options
        )
        progress.refresh()

    def show(self, done: int, values: str) -> None:
        count = self._spec.count_text(done)
        self._progress.update(self._task, completed=done, count=count, values=values)
        self._progress.refresh()

    def close(self) -> None:
        if self._owned:
            self._owned.remove(self._progress)
            self._progress.stop()
        else:
            self._progress.remove_task(self._task)


def _new_progress(file: TextIO) -> Progress:
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
        auto_refresh=False,  # refreshed as batches are counted, without a thread
    )
