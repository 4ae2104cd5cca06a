"""ProgressBar: show progress and logged values on a terminal or as lines of text."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from accel_callbacks.callbacks.base import Callback

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "Bar",
    "BarSpec",
    "BatchCounter",
    "Display",
    "LineDisplay",
    "ProgressBar",
    "TqdmDisplay",
    "as_text",
]

_DEFAULT_SIZE = (80, 24)  # columns and rows of terminals that do not report theirs
_STALL_FRACTION = 0.1  # of the time spent waiting for data, above which the bar shows it
_MIN_SECONDS = 1.0  # before which that fraction is not significant


class ProgressBar(Callback):
    """Show epoch, batches, speed and the last logged values, on the main process only.

    On a terminal it is a tqdm bar, with a second one below it during an evaluation; elsewhere (a
    file, a CI log) it prints one line every ``seconds_between_lines`` and one at the end of each
    epoch. If training waits for its data for more than a tenth of the time, the bar shows that. A
    loop over data of its own, without ``run.epochs``, has one bar for all of its batches.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: to write to; standard error if ``None``.

    Example:
        >>> import sys, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import ProgressBar
        >>> accel = Accelerator(cpu=True, callbacks=[ProgressBar(file=sys.stdout)])
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
        self.refresh_every = refresh_every
        self.seconds_between_lines = seconds_between_lines
        self._file = file
        self._bar: BatchCounter | None = None
        self._inner: BatchCounter | None = None
        self._inner_loader = 0
        self._started = self._waited = 0.0

    # --- training -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the bar with the first batch of an epoch, or of the rest of a resumed one."""
        if self._bar is None and run.is_global_zero:
            self._started, self._waited = time.monotonic(), run.data_wait_s
            title = _epoch(run) if run.epoch_open else "training"
            spec = BarSpec(title, _known(run.num_training_batches), first=batch_idx)
            self._bar = BatchCounter(self._new_display(), spec)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        if self._bar is not None:
            self._bar.count(batch_idx + 1, lambda: self._values(run))

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Show the end of the epoch, with the values logged by its validation."""
        self._finish_bar(run)

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Show the end of a training without epochs."""
        self._finish_bar(run)

    def _finish_bar(self, run: TrainingRun) -> None:
        if self._bar is not None:
            self._bar.finish(lambda: self._values(run))
            self._bar = None

    def _values(self, run: TrainingRun) -> str:
        values = as_text(run.callback_metrics)
        spent = time.monotonic() - self._started
        waited = min(1.0, (run.data_wait_s - self._waited) / max(spent, 1e-9))
        stalled = spent > _MIN_SECONDS and waited > _STALL_FRACTION
        return f"{values} (waits for data {waited:.0%})".lstrip() if stalled else values

    # --- evaluations --------------------------------------------------------------------------

    def on_validation_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start a bar for each loader of the validation."""
        self._start_inner(run, "validation", run.num_val_batches, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        self._count_inner(batch_idx)

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Finish the bar of the evaluation."""
        self._finish_inner()

    def on_test_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start a bar for each loader of the test."""
        self._start_inner(run, "test", run.num_test_batches, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        self._count_inner(batch_idx)

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """Finish the bar of the evaluation."""
        self._finish_inner()

    def _start_inner(
        self, run: TrainingRun, stage: str, totals: Any, batch_idx: int, loader: int
    ) -> None:
        if not run.is_global_zero or (self._inner is not None and self._inner_loader == loader):
            return
        self._finish_inner()
        self._inner_loader = loader
        total = _known(totals[loader]) if loader < len(totals) else None
        inner = self._bar is not None
        title = f"{_epoch(run)}, {stage}" if inner else stage
        self._inner = BatchCounter(
            self._new_display(), BarSpec(title, total, first=batch_idx, inner=inner)
        )

    def _count_inner(self, batch_idx: int) -> None:
        if self._inner is not None:
            self._inner.count(batch_idx + 1, str)

    def _finish_inner(self) -> None:
        if self._inner is not None:
            self._inner.finish(str)
            self._inner = None

    # --- the end ------------------------------------------------------------------------------

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Restore the terminal."""
        self._close()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restore the terminal."""
        self._close()

    def _close(self) -> None:
        for counter in (self._inner, self._bar):
            if counter is not None:
                counter.close()
        self._bar = self._inner = None

    def _new_display(self) -> Display:
        file = self._file or sys.stderr
        if file.isatty():
            return self._terminal_display(file)
        return LineDisplay(file, self.seconds_between_lines)

    def _terminal_display(self, file: TextIO) -> Display:
        return TqdmDisplay(file, self.refresh_every)


def _epoch(run: TrainingRun) -> str:
    total = f"/{run.max_epochs}" if run.max_epochs else ""
    return f"epoch {run.current_epoch + 1}{total}"


def _known(batches: int | float) -> int | None:
    return None if math.isinf(batches) else int(batches)


def as_text(metrics: Mapping[str, Any]) -> str:
    """Format values as text; waits for the device, so call it only when a bar is drawn."""
    parts = []
    for name, value in metrics.items():
        try:
            parts.append(f"{name}={float(value):.4g}")
        except (TypeError, ValueError):
            parts.append(f"{name}={value}")
    return " ".join(parts)


class BatchCounter:
    """Count the batches of one pass, and update its bar at the display's interval.

    Args:
        display: draws the bar.
        spec: of the bar.

    Example:
        >>> import sys
        >>> from accel_callbacks.callbacks.progress_bar import BatchCounter, LineDisplay, BarSpec
        >>> counter = BatchCounter(LineDisplay(sys.stdout, 0.0), BarSpec("epoch 1", 3))
        >>> counter.count(1, lambda: "loss=0.5")
        epoch 1: 1/3 batches, ... loss=0.5
    """

    def __init__(self, display: Display, spec: BarSpec) -> None:
        self._display, self._spec = display, spec
        self._bar = display.start(spec)
        self._done = spec.first
        self._shown_at = time.monotonic()

    def count(self, done: int, values: Callable[[], str]) -> None:
        """Set the number of batches done; ``values`` is only called if the bar is drawn."""
        self._done = done
        now = time.monotonic()
        if now - self._shown_at >= self._display.seconds:
            self._shown_at = now
            self._bar.show(done, values())

    def finish(self, values: Callable[[], str]) -> None:
        """Draw the end of the pass, and close the bar."""
        if self._display.shows_end or not self._spec.inner:
            self._bar.show(self._done, values())
        self.close()

    def close(self) -> None:
        """Close the bar."""
        self._bar.close()


@dataclass(frozen=True)
class BarSpec:
    """The title and the range of a bar.

    Args:
        title: such as ``"epoch 1/3"``.
        total: batches, ``None`` if unknown.
        first: batches done by the run that this one resumes.
        inner: inside another bar.
    """

    title: str
    total: int | None
    first: int = 0
    inner: bool = False

    def count_text(self, done: int) -> str:
        """Return ``"3/10"``, or ``"3"`` if the total is unknown."""
        return f"{done}" if self.total is None else f"{done}/{self.total}"


class Bar(Protocol):
    """The bar of one pass over a loader."""

    def show(self, done: int, values: str) -> None:
        """Draw the batches done so far, and the last logged values."""

    def close(self) -> None:
        """Restore the terminal."""


class Display(Protocol):
    """Draw bars."""

    seconds: float  # between two updates
    shows_end: bool  # draw an inner bar once more when it ends

    def start(self, spec: BarSpec) -> Bar:
        """Start the bar of a pass."""


class LineDisplay:
    """Print plain lines where there is no terminal.

    Args:
        file: to print to.
        seconds: between two lines.
    """

    shows_end = False

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file

    def start(self, spec: BarSpec) -> Bar:
        """Start the lines of a pass."""
        return _Lines(self._file, spec)


class _Lines:
    def __init__(self, file: TextIO, spec: BarSpec) -> None:
        self._file, self._spec = file, spec
        self._started = time.monotonic()

    def show(self, done: int, values: str) -> None:
        speed = (done - self._spec.first) / max(time.monotonic() - self._started, 1e-9)
        line = f"{self._spec.title}: {self._spec.count_text(done)} batches, {speed:.1f}/s {values}"
        print(line.rstrip(), file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: lines need no end."""


class TqdmDisplay:
    """Draw bars with tqdm.

    Args:
        file: a terminal.
        seconds: between two updates.
    """

    shows_end = True

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file

    def start(self, spec: BarSpec) -> Bar:
        """Start a bar, below the outer one if it is an inner one."""
        return _TqdmBar(self._file, spec)


class _TqdmBar:
    def __init__(self, file: TextIO, spec: BarSpec) -> None:
        from tqdm import tqdm

        has_size = _has_size(file)
        columns, rows = (None, None) if has_size else _DEFAULT_SIZE
        self._bar = tqdm(
            desc=spec.title,
            total=spec.total,
            initial=spec.first,
            file=file,
            dynamic_ncols=has_size,
            ncols=columns,
            nrows=rows,
            mininterval=0,
            position=1 if spec.inner else None,
            leave=not spec.inner,
        )

    def show(self, done: int, values: str) -> None:
        self._bar.set_postfix_str(values, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _has_size(terminal: TextIO) -> bool:
    """Return whether a terminal reports its size; in some containers it reports 0 by 0."""
    try:
        return all(os.get_terminal_size(terminal.fileno()))
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return False
