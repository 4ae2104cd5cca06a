"""A progress bar for training, or plain lines where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.base import Callback

if TYPE_CHECKING:
    from accel_callbacks.run import TrainingRun

__all__ = ["ProgressBar"]

# For terminals that do not say: columns and rows.
_USUAL_SIZE = (80, 24)


class ProgressBar(Callback):
    """Shows epoch, batches, speed and the last logged values, on the main process only.

    On a terminal it is a tqdm bar; elsewhere (a file, a CI log) one line every
    ``seconds_between_lines`` and one at the end of each epoch.

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
        self._bar: Any = None
        self._begun = False
        self._started_at = self._shown_at = 0.0
        self._first = self._done = 0

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Open the display with the first batch of an epoch, resumed ones included."""
        if not self._begun and run.is_global_zero:
            self._begun = True
            self._first = self._done = batch_idx
            self._started_at = self._shown_at = time.monotonic()
            self._open(run)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; draw, if it is time to."""
        if not self._begun:
            return
        self._done = batch_idx + 1
        now = time.monotonic()
        wait = self.refresh_every if self._bar is not None else self.seconds_between_lines
        if now - self._shown_at >= wait:
            self._shown_at = now
            self._show(run)

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Show the epoch's last state, with what its validation logged."""
        if self._begun:
            self._show(run)
        self._close()

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Leave the terminal as it was."""
        self._close()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Leave the terminal as it was."""
        self._close()

    @property
    def _stream(self) -> TextIO:
        return self._file or sys.stderr

    def _title(self, run: TrainingRun) -> str:
        total = f"/{run.max_epochs}" if run.max_epochs else ""
        return f"epoch {run.current_epoch + 1}{total}"

    def _open(self, run: TrainingRun) -> None:
        if not self._stream.isatty():
            return
        from tqdm import tqdm

        known = run.num_training_batches != float("inf")
        knows_size = _knows_size(self._stream)
        columns, rows = (None, None) if knows_size else _USUAL_SIZE
        self._bar = tqdm(
            desc=self._title(run),
            total=int(run.num_training_batches) if known else None,
            initial=self._first,
            file=self._stream,
            dynamic_ncols=knows_size,
            ncols=columns,
            nrows=rows,
            mininterval=0,
        )

    def _show(self, run: TrainingRun) -> None:
        values = _shown(run.callback_metrics)
        if self._bar is not None:
            self._bar.set_postfix_str(values, refresh=False)
            self._bar.update(self._done - self._bar.n)
            return
        known = run.num_training_batches != float("inf")
        of = f"/{int(run.num_training_batches)}" if known else ""
        speed = (self._done - self._first) / max(time.monotonic() - self._started_at, 1e-9)
        line = f"{self._title(run)}: {self._done}{of} batches, {speed:.1f}/s {values}"
        print(line.rstrip(), file=self._stream, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._begun = None, False


def _knows_size(terminal: TextIO) -> bool:
    """Whether a terminal says how large it is; in some containers it reports 0 by 0."""
    try:
        return all(os.get_terminal_size(terminal.fileno()))
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return False


def _shown(metrics: Mapping[str, Any]) -> str:
    """Values as text; this waits for the device, so it is only done when something is drawn."""
    parts = []
    for name, value in metrics.items():
        try:
            parts.append(f"{name}={float(value):.4g}")
        except (TypeError, ValueError):
            parts.append(f"{name}={value}")
    return " ".join(parts)
