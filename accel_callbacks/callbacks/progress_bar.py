"""ProgressBar."""

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

__all__ = ["Bar", "Counter", "LineScreen", "Pass", "ProgressBar", "Screen", "TqdmScreen", "as_text"]

# For terminals that do not say: columns and rows.
_USUAL_SIZE = (80, 24)
_STALL = 0.1  # the part of the time spent waiting for data that is worth a word
_SOON = 1.0  # seconds before which that part says nothing


@dataclass(frozen=True)
class Pass:
    """What a bar is about.

    Args:
        title: such as ``"epoch 1/3"``.
        total: batches, ``None`` if unknown.
        first: batches that were done before, by a run that this one resumes.
        inner: it is within another one.
    """

    title: str
    total: int | None
    first: int = 0
    inner: bool = False

    def of(self, done: int) -> str:
        """``"3/10"``, or ``"3"``."""
        return f"{done}" if self.total is None else f"{done}/{self.total}"


class Bar(Protocol):
    """One pass over a loader on a screen."""

    def show(self, done: int, values: str) -> None:
        """Draw the batches done so far, and the last logged values."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Screen(Protocol):
    """What bars are drawn on."""

    seconds: float  # between two drawings
    shows_end: bool  # draw an inner bar once more when it is over

    def begin(self, about: Pass) -> Bar:
        """A bar for a pass that begins."""


class Counter:
    """Counts the batches of one pass, and draws when it is time to.

    Args:
        screen: where.
        about: which pass.

    Example:
        >>> import sys
        >>> from accel_callbacks.callbacks.progress_bar import Counter, LineScreen, Pass
        >>> counter = Counter(LineScreen(sys.stdout, 0.0), Pass("epoch 1", 3))
        >>> counter.count(1, lambda: "loss=0.5")
        epoch 1: 1/3 batches, ... loss=0.5
    """

    def __init__(self, screen: Screen, about: Pass) -> None:
        self._screen, self._about = screen, about
        self._bar = screen.begin(about)
        self._done = about.first
        self._shown_at = time.monotonic()

    def count(self, done: int, values: Callable[[], str]) -> None:
        """So many are done; ``values`` is called if it is drawn."""
        self._done = done
        now = time.monotonic()
        if now - self._shown_at >= self._screen.seconds:
            self._shown_at = now
            self._bar.show(done, values())

    def finish(self, values: Callable[[], str]) -> None:
        """The pass is over: draw its end."""
        if self._screen.shows_end or not self._about.inner:
            self._bar.show(self._done, values())
        self.close()

    def close(self) -> None:
        """It is broken off, or drawn to its end."""
        self._bar.close()


class LineScreen:
    """Plain lines, where there is no terminal.

    Args:
        file: where to print them.
        seconds: between two lines.
    """

    shows_end = False

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file

    def begin(self, about: Pass) -> Bar:
        """Lines for one pass."""
        return _Lines(self._file, about)


class _Lines:
    def __init__(self, file: TextIO, about: Pass) -> None:
        self._file, self._about = file, about
        self._began = time.monotonic()

    def show(self, done: int, values: str) -> None:
        speed = (done - self._about.first) / max(time.monotonic() - self._began, 1e-9)
        line = f"{self._about.title}: {self._about.of(done)} batches, {speed:.1f}/s {values}"
        print(line.rstrip(), file=self._file, flush=True)

    def close(self) -> None:
        """Lines need no end."""


class TqdmScreen:
    """Bars of tqdm.

    Args:
        file: a terminal.
        seconds: between two drawings.
    """

    shows_end = True

    def __init__(self, file: TextIO, seconds: float) -> None:
        self.seconds = seconds
        self._file = file

    def begin(self, about: Pass) -> Bar:
        """A bar, below the other one if it is an inner one."""
        return _TqdmBar(self._file, about)


class _TqdmBar:
    def __init__(self, file: TextIO, about: Pass) -> None:
        from tqdm import tqdm

        knows_size = _knows_size(file)
        columns, rows = (None, None) if knows_size else _USUAL_SIZE
        self._bar = tqdm(
            desc=about.title,
            total=about.total,
            initial=about.first,
            file=file,
            dynamic_ncols=knows_size,
            ncols=columns,
            nrows=rows,
            mininterval=0,
            position=1 if about.inner else None,
            leave=not about.inner,
        )

    def show(self, done: int, values: str) -> None:
        self._bar.set_postfix_str(values, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _knows_size(terminal: TextIO) -> bool:
    """Whether a terminal says how large it is; in some containers it reports 0 by 0."""
    try:
        return all(os.get_terminal_size(terminal.fileno()))
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return False


def as_text(metrics: Mapping[str, Any]) -> str:
    """Values as text; this waits for the device, so it is only done when something is drawn."""
    parts = []
    for name, value in metrics.items():
        try:
            parts.append(f"{name}={float(value):.4g}")
        except (TypeError, ValueError):
            parts.append(f"{name}={value}")
    return " ".join(parts)


class ProgressBar(Callback):
    """Shows epoch, batches, speed and the last logged values, on the main process only.

    On a terminal it is a tqdm bar, with a second one below it in an evaluation; elsewhere (a file,
    a CI log) one line every ``seconds_between_lines`` and one at the end of each epoch. Where
    training waits for its data for more than a tenth of the time, it says so.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: where to write; standard error if ``None``.

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
        self._bar: Counter | None = None
        self._inner: Counter | None = None
        self._loader = 0
        self._began = self._waited = 0.0

    # --- training -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Open the display with the first batch of an epoch, resumed ones included."""
        if self._bar is None and run.is_global_zero:
            self._began, self._waited = time.monotonic(), run.data_wait_s
            about = Pass(_epoch(run), _known(run.num_training_batches), first=batch_idx)
            self._bar = Counter(self._screen(), about)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; draw, if it is time to."""
        if self._bar is not None:
            self._bar.count(batch_idx + 1, lambda: self._values(run))

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Show the epoch's last state, with what its validation logged."""
        if self._bar is not None:
            self._bar.finish(lambda: self._values(run))
            self._bar = None

    def _values(self, run: TrainingRun) -> str:
        values = as_text(run.callback_metrics)
        spent = time.monotonic() - self._began
        waited = min(1.0, (run.data_wait_s - self._waited) / max(spent, 1e-9))
        stalled = spent > _SOON and waited > _STALL
        return f"{values} (waits for data {waited:.0%})".lstrip() if stalled else values

    # --- evaluations --------------------------------------------------------------------------

    def on_validation_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Open a display for each loader of the validation."""
        self._begin_inner(run, "validation", run.num_val_batches, batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch; draw, if it is time to."""
        self._count_inner(batch_idx)

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Close it."""
        self._end_inner()

    def on_test_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Open a display for each loader of the test."""
        self._begin_inner(run, "test", run.num_test_batches, batch_idx, dataloader_idx)

    def on_test_batch_end(
        self,
        run: TrainingRun,
        model: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch; draw, if it is time to."""
        self._count_inner(batch_idx)

    def on_test_end(self, run: TrainingRun, model: Any) -> None:
        """Close it."""
        self._end_inner()

    def _begin_inner(
        self, run: TrainingRun, stage: str, totals: Any, batch_idx: int, loader: int
    ) -> None:
        if not run.is_global_zero or (self._inner is not None and self._loader == loader):
            return
        self._end_inner()
        self._loader = loader
        total = _known(totals[loader]) if loader < len(totals) else None
        inner = self._bar is not None
        title = f"{_epoch(run)}, {stage}" if inner else stage
        self._inner = Counter(self._screen(), Pass(title, total, first=batch_idx, inner=inner))

    def _count_inner(self, batch_idx: int) -> None:
        if self._inner is not None:
            self._inner.count(batch_idx + 1, str)

    def _end_inner(self) -> None:
        if self._inner is not None:
            self._inner.finish(str)
            self._inner = None

    # --- the end ------------------------------------------------------------------------------

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Leave the terminal as it was."""
        self._close()

    def _close(self) -> None:
        for counter in (self._inner, self._bar):
            if counter is not None:
                counter.close()
        self._bar = self._inner = None

    def _screen(self) -> Screen:
        file = self._file or sys.stderr
        if file.isatty():
            return self._terminal(file)
        return LineScreen(file, self.seconds_between_lines)

    def _terminal(self, file: TextIO) -> Screen:
        """What draws on a terminal."""
        return TqdmScreen(file, self.refresh_every)


def _epoch(run: TrainingRun) -> str:
    total = f"/{run.max_epochs}" if run.max_epochs else ""
    return f"epoch {run.current_epoch + 1}{total}"


def _known(batches: int | float) -> int | None:
    return None if math.isinf(batches) else int(batches)
