"""ProgressBar: show progress and logged values on a terminal or as lines of text."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
    "MetricText",
    "ProgressBar",
    "TqdmDisplay",
]

_DEFAULT_SIZE = (80, 24)  # columns and rows of terminals that do not report theirs
_STALL_FRACTION = 0.1  # of the time spent waiting for data, above which the bar shows it
_MIN_SECONDS = 1.0  # before which that fraction is not significant
_LINE_WIDTH = 100  # where there is no terminal, and no COLUMNS
_NAME_LIMITS = (24, 16)  # characters of a long name, where not all metrics fit otherwise
_LEAST_NAME = 10  # where not even one fits otherwise


class ProgressBar(Callback):
    """Show epoch, batches, speed and the last logged values, on the main process only.

    On a terminal it is a tqdm bar, with a second one below it during an evaluation; elsewhere (a
    file, a CI log) it prints one line every ``seconds_between_lines`` and one at the end of each
    epoch. If training waits for its data for more than a tenth of the time, the bar shows that. A
    loop over data of its own, without ``run.epochs``, has one bar for all of its batches.

    The bar, epoch, count and speed come first, and metrics take what is left of the line: those of
    the loop before those of callbacks, with long names shortened in the middle. ``+3`` at the end
    counts those without room. Lines are at most ``COLUMNS`` wide, 100 by default.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: to write to; standard error if ``None``.
        metrics: names or patterns (``"val/*"``) of the metrics to show, in this order; all if
            ``None``.

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
        metrics: Sequence[str] | None = None,
    ) -> None:
        if isinstance(metrics, str):
            raise TypeError(f"metrics is a list of names: write metrics=[{metrics!r}]")
        self.refresh_every = refresh_every
        self.seconds_between_lines = seconds_between_lines
        self._file = file
        self._patterns = None if metrics is None else list(metrics)
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

    def _values(self, run: TrainingRun) -> MetricText:
        spent = time.monotonic() - self._started
        waited = min(1.0, (run.data_wait_s - self._waited) / max(spent, 1e-9))
        stalled = spent > _MIN_SECONDS and waited > _STALL_FRACTION
        note = f"(waits for data {waited:.0%})" if stalled else ""
        return MetricText(self._chosen(run), note)

    def _chosen(self, run: TrainingRun) -> dict[str, Any]:
        """Return the metrics to show, in their order."""
        metrics, origins = run.callback_metrics, run.metric_origins
        ranks = {name: _rank(name, self._patterns) for name in metrics}
        shown = [name for name in metrics if ranks[name] is not None]
        shown.sort(key=lambda name: (ranks[name], origins.get(name) == "callback"))
        return {name: metrics[name] for name in shown}

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
            self._inner.count(batch_idx + 1, MetricText)

    def _finish_inner(self) -> None:
        if self._inner is not None:
            self._inner.finish(MetricText)
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


def _rank(name: str, patterns: Sequence[str] | None) -> int | None:
    """Return the index of the first pattern that a name matches, or None."""
    if patterns is None:
        return 0
    return next((i for i, one in enumerate(patterns) if fnmatchcase(name, one)), None)


class MetricText:
    """Metrics as text that fits into a width.

    Formatting a tensor waits for its device, so make one only when a bar is drawn.

    Args:
        metrics: the values by name, the most important first.
        note: shown after them, whatever the width.

    Example:
        >>> from accel_callbacks.callbacks.progress_bar import MetricText
        >>> text = MetricText(
        ...     {"loss": 0.25, "gradients/layers.11.attention.weight": 1.5, "lr": 0.1}
        ... )
        >>> text.fit(80)
        'loss=0.25 gradients/layers.11.attention.weight=1.5 lr=0.1'
        >>> text.fit(50)
        'loss=0.25 gradients/l..tion.weight=1.5 lr=0.1'
        >>> text.fit(16)
        'loss=0.25 +2'
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None, note: str = "") -> None:
        self._values = {name: _formatted(value) for name, value in (metrics or {}).items()}
        self._note = note

    def fit(self, width: int) -> str:
        """Return what fits: names are shortened first, then the last metrics are left out."""
        room = width - len(self._note) - 1 if self._note else width
        parts = self._parts(None)
        for limit in _NAME_LIMITS:
            if len(" ".join(parts)) <= room:
                break
            parts = self._parts(limit)
        if parts and not _first_that_fit(parts, room).startswith(parts[0]):
            parts = self._parts(_LEAST_NAME)
        return " ".join(part for part in (_first_that_fit(parts, room), self._note) if part)

    def _parts(self, limit: int | None) -> list[str]:
        """Return ``name=value`` of each metric, with names of at most ``limit`` characters."""
        names = {name: name if limit is None else _shortened(name, limit) for name in self._values}
        short = list(names.values())
        return [
            f"{name if short.count(names[name]) > 1 else names[name]}={value}"
            for name, value in self._values.items()
        ]


def _formatted(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return " ".join(str(value).split())  # on one line


def _shortened(name: str, limit: int) -> str:
    """Cut the middle out of a long name: its ends tell it from others."""
    if len(name) <= limit:
        return name
    end = (limit - 2) // 2
    return f"{name[: limit - 2 - end]}..{name[-end:]}"


def _first_that_fit(parts: Sequence[str], room: int) -> str:
    """Join the first parts as far as there is room, and count the others."""
    for count in range(len(parts), 0, -1):
        left = [f"+{len(parts) - count}"] if count < len(parts) else []
        text = " ".join([*parts[:count], *left])
        if len(text) <= room:
            return text
    return f"+{len(parts)}" if parts and room > len(f"+{len(parts)}") else ""


class BatchCounter:
    """Count the batches of one pass, and update its bar at the display's interval.

    Args:
        display: draws the bar.
        spec: of the bar.

    Example:
        >>> import sys
        >>> from accel_callbacks.callbacks.progress_bar import (
        ...     BarSpec,
        ...     BatchCounter,
        ...     LineDisplay,
        ...     MetricText,
        ... )
        >>> counter = BatchCounter(LineDisplay(sys.stdout, 0.0), BarSpec("epoch 1", 3))
        >>> counter.count(1, lambda: MetricText({"loss": 0.5}))
        epoch 1: 1/3 batches, ... loss=0.5
    """

    def __init__(self, display: Display, spec: BarSpec) -> None:
        self._display, self._spec = display, spec
        self._bar = display.start(spec)
        self._done = spec.first
        self._shown_at = time.monotonic()

    def count(self, done: int, values: Callable[[], MetricText]) -> None:
        """Set the number of batches done; ``values`` is only called if the bar is drawn."""
        self._done = done
        now = time.monotonic()
        if now - self._shown_at >= self._display.seconds:
            self._shown_at = now
            self._bar.show(done, values())

    def finish(self, values: Callable[[], MetricText]) -> None:
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

    def show(self, done: int, values: MetricText) -> None:
        """Draw the batches done so far, and the last logged values as far as there is room."""

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

    def show(self, done: int, values: MetricText) -> None:
        speed = (done - self._spec.first) / max(time.monotonic() - self._started, 1e-9)
        line = f"{self._spec.title}: {self._spec.count_text(done)} batches, {speed:.1f}/s"
        fitting = values.fit(_line_width() - len(line) - 1)
        print(f"{line} {fitting}".rstrip(), file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: lines need no end."""


def _line_width() -> int:
    """Return the width of lines that no terminal limits."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else _LINE_WIDTH


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
            bar_format=_layout(spec, columns or _LINE_WIDTH, ""),
        )
        self._spec = spec

    def show(self, done: int, values: MetricText) -> None:
        state = {**self._bar.format_dict, "n": done}
        columns = state.pop("ncols") or _DEFAULT_SIZE[0]
        plain = _layout(self._spec, columns, "")
        # Without a width, tqdm draws a bar of ten columns: what is left of the line is for metrics.
        rest = self._bar.format_meter(**{**state, "bar_format": plain})
        self._bar.bar_format = _layout(self._spec, columns, values.fit(columns - len(rest) - 1))
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._bar.close()


def _layout(spec: BarSpec, columns: int, values: str) -> str:
    """Return tqdm's template of a line: metrics at its end, so that they are what is cut."""
    counted = "{n_fmt}it" if spec.total is None else "{bar} {n_fmt}/{total_fmt}"
    clock = "{elapsed}" if spec.total is None or columns >= _LINE_WIDTH else ""
    clock += "" if spec.total is None else "<{remaining}"
    shown = values.replace("{", "{{").replace("}", "}}")
    return f"{{desc}}: {counted} [{clock}, {{rate_fmt}}] {shown}".rstrip()


def _has_size(terminal: TextIO) -> bool:
    """Return whether a terminal reports its size; in some containers it reports 0 by 0."""
    try:
        return all(os.get_terminal_size(terminal.fileno()))
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return False
