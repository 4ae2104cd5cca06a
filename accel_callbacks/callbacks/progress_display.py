"""Where progress is shown: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

__all__ = ["Bar", "Counter", "LineScreen", "Pass", "Screen", "TqdmScreen", "as_text"]

# For terminals that do not say: columns and rows.
_USUAL_SIZE = (80, 24)


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
        >>> from accel_callbacks.callbacks.progress_display import Counter, LineScreen, Pass
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
