"""RichProgressBar: the progress bar drawn by rich."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.progress_bar import Bar, BarSpec, Display, MetricText, ProgressBar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.measure import Measurement
    from rich.progress import Progress

__all__ = ["RichProgressBar"]

_BAR_SHARE = 8  # of the columns of the terminal, one eighth is the bar's
_BAR_COLUMNS = (10, 40)


class RichProgressBar(ProgressBar):
    """:class:`ProgressBar`, drawn by rich on a terminal: ``pip install rich``.

    The content is the same, with plain lines where there is no terminal. Printed output appears
    above the bar.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: to write to; standard error if ``None``.
        metrics: names or patterns (``"val/*"``) of the metrics to show, in this order; all if
            ``None``.

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
        metrics: Sequence[str] | None = None,
    ) -> None:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "RichProgressBar needs rich: pip install rich, or use ProgressBar."
            ) from error
        super().__init__(refresh_every, seconds_between_lines, file, metrics)
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
        self._started = time.monotonic()
        self._task = progress.add_task(
            spec.title,
            total=spec.total,
            completed=spec.first,
            count=spec.count_text(spec.first),
            rate="",
            values=_Fitted(MetricText()),
        )
        progress.refresh()

    def show(self, done: int, values: MetricText) -> None:
        speed = (done - self._spec.first) / max(time.monotonic() - self._started, 1e-9)
        options: dict[str, Any] = {
            "count": self._spec.count_text(done),
            "rate": f"{speed:.1f}/s",
            "values": _Fitted(values),
        }
        self._progress.update(self._task, completed=done, **options)
        self._progress.refresh()

    def close(self) -> None:
        if self._owned:
            self._owned.remove(self._progress)
            self._progress.stop()
        else:
            self._progress.remove_task(self._task)


class _Fitted:
    """Metrics that are cut to the width which the other columns leave."""

    def __init__(self, metrics: MetricText) -> None:
        self._metrics = metrics

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self._metrics.fit(options.max_width), no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        return Measurement(0, len(self._metrics.fit(options.max_width)))


def _own_width(file: TextIO) -> int | None:
    """Return the width of a terminal that is none of the standard streams, which rich asks."""
    try:
        number = file.fileno()
        return None if number <= 2 else os.get_terminal_size(number).columns or None
    except (OSError, ValueError):  # not a file of the operating system
        return None


def _new_progress(file: TextIO) -> Progress:
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    class Values(ProgressColumn):
        def render(self, task: Task) -> RenderableType:
            fitted: RenderableType = task.fields["values"]
            return fitted

    def whole() -> Column:
        return Column(no_wrap=True)  # such columns do not shrink: the one of the metrics does

    console = Console(file=file, width=_own_width(file))
    least, most = _BAR_COLUMNS
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=whole()),
        BarColumn(min(most, max(least, console.width // _BAR_SHARE)), table_column=whole()),
        TextColumn("{task.fields[count]}", markup=False, table_column=whole()),
        TextColumn("{task.fields[rate]}", markup=False, table_column=whole()),
        TimeElapsedColumn(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        Values(table_column=Column()),
        console=console,
        auto_refresh=False,  # refreshed as batches are counted, without a thread
    )
