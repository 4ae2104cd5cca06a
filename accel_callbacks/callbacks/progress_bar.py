"""A progress bar for training, or plain lines where there is no terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.progress_display import (
    Counter,
    LineScreen,
    Pass,
    Screen,
    TqdmScreen,
    as_text,
)

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["ProgressBar"]

_STALL = 0.1  # the part of the time spent waiting for data that is worth a word
_SOON = 1.0  # seconds before which that part says nothing


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
