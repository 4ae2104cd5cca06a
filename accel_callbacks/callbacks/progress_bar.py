"""ProgressBar: show progress and logged values on a terminal or as lines of text."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.progress_display import Display, Line, display_on
from accel_callbacks.terminal_text import printable

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["LoaderPass", "MetricText", "ProgressBar", "RichProgressBar"]

_STALL_FRACTION = 0.1  # of the time spent waiting for data, above which the bar shows it
_MIN_SECONDS = 1.0  # before which that fraction is not significant
_BAR_SHARE = 8  # of the columns of the terminal, one eighth is the bar's
_BAR_COLUMNS = (10, 40)
_INDENT = "  "  # of the second line of a pass
_NAME_LIMITS = (24, 16)  # characters of a long name, where not all metrics fit otherwise
_LEAST_NAME = 10  # where not even one fits otherwise


class ProgressBar(Callback):
    """Show epoch, batches, speed, time and the last logged values, on the main process only.

    On a terminal it is a bar, with a second one below it during an evaluation: drawn by rich where
    that is installed, else by tqdm. Elsewhere (a file, a CI log, a terminal that cannot move its
    cursor) it prints one line every ``seconds_between_lines`` and one at the end of each epoch. If
    training waits for its data for more than a tenth of the time, the bar shows that. A loop over
    data of its own, without ``run.epochs``, has one bar for all of its batches.

    Columns keep their places. Metrics follow the bar: those of the loop before those of callbacks,
    on a second line where the first is full, with long names shortened in the middle. ``+3`` at the
    end counts those without room. Where there is no terminal, lines are at most ``COLUMNS`` wide,
    100 by default.

    Args:
        refresh_every: seconds between updates of the bar, 0.2 by default.
        seconds_between_lines: seconds between lines where there is no terminal, 10 by default.
        file: to write to; standard error if ``None``.
        metrics: names or patterns (``"val/*"``) of the metrics to show, in this order; all if
            ``None``.
        rich: draw with rich on a terminal; if it is installed where ``None``.

    Raises:
        ImportError: ``rich=True``, and rich is not installed.

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
        rich: bool | None = None,
    ) -> None:
        if isinstance(metrics, str):
            raise TypeError(f"metrics is a list of names: write metrics=[{metrics!r}]")
        installed = find_spec("rich") is not None
        if rich and not installed:
            raise ImportError("rich=True needs rich: pip install rich, or leave rich=True out.")
        self.refresh_every = refresh_every
        self.seconds_between_lines = seconds_between_lines
        self._file = file
        self._patterns = None if metrics is None else list(metrics)
        self._rich = installed if rich is None else rich
        self._display: Display | None = None
        self._training: LoaderPass | None = None
        self._evaluation: LoaderPass | None = None
        self._evaluated_loader = 0
        self._waited = 0.0
        self._value_widths: dict[str, int] = {}

    # --- training -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Start the bar with the first batch of an epoch, or of the rest of a resumed one."""
        if self._training is None and run.is_global_zero:
            self._waited = run.data_wait_s
            title = _epoch(run) if run.epoch_open else "training"
            self._training = LoaderPass(title, _total_of(run.num_training_batches), batch_idx)
            self._start(self._training)

    def on_train_batch_end(
        self, run: TrainingRun, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch."""
        if self._training is not None and self._is_due(self._training, batch_idx + 1):
            self._draw(self._training, self._metrics(run))

    def on_train_epoch_end(self, run: TrainingRun, model: Any) -> None:
        """Show the end of the epoch, with the values logged by its validation."""
        if self._training is not None:
            self._draw(self._training, self._metrics(run))
            self._close()

    on_train_end = on_train_epoch_end  # of a training without epochs

    def _metrics(self, run: TrainingRun) -> MetricText:
        assert self._training is not None
        spent = self._training.seconds
        waited = min(1.0, (run.data_wait_s - self._waited) / max(spent, 1e-9))
        stalled = spent > _MIN_SECONDS and waited > _STALL_FRACTION
        note = f"(waits for data {waited:.0%})" if stalled else ""
        return MetricText(self._select_metrics(run), note, self._value_widths)

    def _select_metrics(self, run: TrainingRun) -> dict[str, Any]:
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
        self._start_evaluation(run, "validation", run.num_val_batches, batch_idx, dataloader_idx)

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
        if self._evaluation is not None and self._is_due(self._evaluation, batch_idx + 1):
            self._draw(self._evaluation, MetricText())

    def on_validation_end(self, run: TrainingRun, model: Any) -> None:
        """Finish the bar of the evaluation."""
        self._finish_evaluation()

    def on_test_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Start a bar for each loader of the test."""
        self._start_evaluation(run, "test", run.num_test_batches, batch_idx, dataloader_idx)

    on_test_batch_end, on_test_end = on_validation_batch_end, on_validation_end

    def _start_evaluation(
        self, run: TrainingRun, stage: str, totals: Any, batch_idx: int, loader: int
    ) -> None:
        started = self._evaluation is not None and self._evaluated_loader == loader
        if started or not run.is_global_zero:
            return
        self._finish_evaluation()
        self._evaluated_loader = loader
        total = _total_of(totals[loader]) if loader < len(totals) else None
        title = stage if self._training is None else f"{_epoch(run)}, {stage}"
        self._evaluation = LoaderPass(title, total, batch_idx)
        self._start(self._evaluation)

    def _finish_evaluation(self) -> None:
        evaluation, display = self._evaluation, self._display
        if evaluation is None or display is None:
            return
        if self._training is None:
            self._draw(evaluation, MetricText())
            self._close()
        else:  # the end of an evaluation between lines of the training is no line of its own
            if display.redraws:
                self._draw(evaluation, MetricText())
            self._evaluation = None

    # --- drawing ------------------------------------------------------------------------------

    def _start(self, loader_pass: LoaderPass) -> None:
        if self._display is None:
            file = self._file or sys.stderr
            self._display = display_on(
                file, self.refresh_every, self.seconds_between_lines, self._rich
            )
        if self._display.redraws:
            self._draw(loader_pass, MetricText())

    def _is_due(self, loader_pass: LoaderPass, done: int) -> bool:
        """Set the number of batches done, and return whether it is time to draw."""
        loader_pass.done = done
        now = time.monotonic()
        assert self._display is not None
        if now - loader_pass.drawn_at < self._display.seconds:
            return False
        loader_pass.drawn_at = now
        return True

    def _draw(self, loader_pass: LoaderPass, metrics: MetricText) -> None:
        assert self._display is not None
        bar = self._display.bar
        loader_pass.lines = loader_pass.compose(self._display.width(), bar, metrics)
        passes = (self._training, self._evaluation)
        self._display.draw([each.lines for each in passes if each is not None])

    # --- the end ------------------------------------------------------------------------------

    def on_exception(self, run: TrainingRun, model: Any, exception: BaseException) -> None:
        """Restore the terminal."""
        self._close()

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Restore the terminal."""
        self._close()

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
        self._display = self._training = self._evaluation = None


#: Lightning's name of it. There is one bar: with rich where it is installed.
RichProgressBar = ProgressBar


def _epoch(run: TrainingRun) -> str:
    total = f"/{run.max_epochs}" if run.max_epochs else ""
    return f"epoch {run.current_epoch + 1}{total}"


def _total_of(batches: int | float) -> int | None:
    return None if math.isinf(batches) else int(batches)


def _rank(name: str, patterns: Sequence[str] | None) -> int | None:
    """Return the index of the first pattern that a name matches, or None."""
    if patterns is None:
        return 0
    return next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), None)


class LoaderPass:
    """One pass over a loader, and its lines of text.

    Args:
        title: such as ``"epoch 1/3"``.
        total: batches, ``None`` if unknown.
        first: batches done by the run that this one resumes.

    Attributes:
        done: batches so far.
        drawn_at: when it was drawn, by the monotonic clock.
        lines: those last drawn.
    """

    def __init__(self, title: str, total: int | None, first: int = 0) -> None:
        self.title, self.total = title, total
        self.done = self._first = first
        self._started = self.drawn_at = time.monotonic()
        self.lines: list[Line] = []

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self._started

    def compose(self, width: int, bar: tuple[str, str] | None, metrics: MetricText) -> list[Line]:
        """Return one line, and a second one where the metrics need it.

        Args:
            width: columns of a line.
            bar: characters of the done and of the open part of a bar; ``None`` for no bar.
            metrics: the values to show.
        """
        head = self._sentence() if bar is None else self._columns(width, *bar)
        used = sum(len(text) for text, _ in head)
        first, *rest = metrics.fit(width - used - 1, width - len(_INDENT))
        lines = [[*head, (f" {first}", "")] if first else head]
        return lines + [[(_INDENT + text, "")] for text in rest]

    def _sentence(self) -> Line:
        """Return what a log shows, where nothing is drawn again."""
        counted = f"{self._count_text()} batches, {self._speed_text():>10}, {self._clock_text()}"
        return [(f"{self.title}: {counted}", "")]

    def _columns(self, width: int, done_character: str, open_character: str) -> Line:
        """Return what stands before the metrics on a terminal, all of a constant width."""
        least, most = _BAR_COLUMNS
        length = min(most, max(least, width // _BAR_SHARE))
        full = min(length, length * self.done // self.total) if self.total else 0
        columns: Line = [
            (self.title, "bold"),
            (f" {done_character * full}", "bar.complete"),
            (open_character * (length - full), "bar.back"),
            (f" {self._count_text()}", "progress.download"),
            (f" {self._speed_text():>10}", "progress.data.speed"),
            (f" {self._clock_text()}", "progress.elapsed"),
        ]
        if self.total is None:
            del columns[1:3]
        # A terminal narrower than that loses the clock first, and the title last.
        while len(columns) > 1 and sum(len(text) for text, _ in columns) > width:
            columns.pop()
        return [(columns[0][0][:width], "bold"), *columns[1:]]

    def _count_text(self) -> str:
        """Return ``" 3/10"``, or ``"3"`` if the total is unknown."""
        if self.total is None:
            return f"{self.done}"
        return f"{self.done:>{len(str(self.total))}}/{self.total}"

    def _speed_text(self) -> str:
        """Return batches a second, or seconds a batch where that is the larger number."""
        speed = (self.done - self._first) / max(self.seconds, 1e-9)
        if 0 < speed < 1:
            return f"{_three_digits(1 / speed)}s/batch"
        return f"{_three_digits(speed)}/s"

    def _clock_text(self) -> str:
        """Return the time so far, and what is left of it if the total is known."""
        elapsed = self.seconds
        if self.total is None:
            return _duration(elapsed)
        done = self.done - self._first
        left = _duration(elapsed / done * (self.total - self.done)) if done else "-:--:--"
        return f"{_duration(elapsed)}<{left}"


def _three_digits(number: float) -> str:
    return f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


class MetricText:
    """Metrics as text that fits into the room of some lines.

    Formatting a tensor waits for its device, so make one only when a bar is drawn.

    Args:
        metrics: the values by name, the most important first.
        note: shown after those of the first line, whatever the room.
        widths: the widest text of each value so far, to which later ones are padded; updated.

    Example:
        >>> from accel_callbacks.callbacks.progress_bar import MetricText
        >>> text = MetricText(
        ...     {"loss": 0.25, "gradients/layers.11.attention.weight": 1.5, "lr": 0.1}
        ... )
        >>> text.fit(80)
        ['loss=0.25 gradients/layers.11.attention.weight=1.5 lr=0.1']
        >>> text.fit(20, 50)
        ['loss=0.25', 'gradients/layers.11.attention.weight=1.5 lr=0.1']
        >>> text.fit(50)
        ['loss=0.25 gradients/l..tion.weight=1.5 lr=0.1']
        >>> text.fit(16)
        ['loss=0.25 +2']
    """

    def __init__(
        self,
        metrics: Mapping[str, Any] | None = None,
        note: str = "",
        widths: MutableMapping[str, int] | None = None,
    ) -> None:
        self._values = {name: _format_value(value) for name, value in (metrics or {}).items()}
        self._note = note
        if widths is not None:
            for name, text in self._values.items():
                widths[name] = max(len(text), widths.get(name, 0))
                self._values[name] = text.ljust(widths[name])

    def fit(self, *rooms: int) -> list[str]:
        """Return a text for each line that is needed, the first even if it is empty.

        Names are shortened where not all metrics fit, then the last ones are left out and counted.

        Args:
            rooms: characters that each line has.
        """
        first, *others = rooms
        rooms = (first - len(self._note) - 1 if self._note else first, *others)
        lines: list[str] = []
        for limit in (None, *_NAME_LIMITS, _LEAST_NAME):
            parts = self._parts(limit)
            lines, left_out = _pack(parts, rooms)
            some = left_out < len(parts)
            if not left_out or (some and limit == _NAME_LIMITS[-1]):
                break
        lines[0] = " ".join(text for text in (lines[0], self._note) if text)
        return lines

    def _parts(self, limit: int | None) -> list[str]:
        """Return ``name=value`` of each metric, with names of at most ``limit`` characters."""
        names = {name: name if limit is None else _shorten(name, limit) for name in self._values}
        short = list(names.values())
        return [
            f"{name if short.count(names[name]) > 1 else names[name]}={value}"
            for name, value in self._values.items()
        ]


def _format_value(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return printable(" ".join(str(value).split()))  # on one line


def _shorten(name: str, limit: int) -> str:
    """Cut the middle out of a long name: its ends tell it from others."""
    if len(name) <= limit:
        return name
    end = (limit - 2) // 2
    return f"{name[: limit - 2 - end]}..{name[-end:]}"


def _pack(parts: Sequence[str], rooms: Sequence[int]) -> tuple[list[str], int]:
    """Fill lines with the first parts, and count those without room at the end of the last line."""
    for count in range(len(parts), 0, -1):
        left = [f"+{len(parts) - count}"] if count < len(parts) else []
        lines = _fill_lines([*parts[:count], *left], rooms)
        if lines is not None:
            return lines, len(parts) - count
    counted = _fill_lines([f"+{len(parts)}"], rooms) if parts else None
    return counted or [""], len(parts)


def _fill_lines(words: Sequence[str], rooms: Sequence[int]) -> list[str] | None:
    """Break words into lines of given rooms, or return None where they do not fit."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        while len(longer.rstrip()) > rooms[len(lines) - 1]:
            if len(lines) == len(rooms):
                return None
            lines.append("")
            longer = word
        lines[-1] = longer
    return [line.rstrip() for line in lines]
