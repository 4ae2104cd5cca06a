"""ConsoleTracker: a table of the latest values on standard error."""

from __future__ import annotations

import math
import sys
import time as clock
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import IO, Any

from loggers.base import RunInfo, Scalar, Status, Tracker, check_status

__all__ = ["ConsoleTracker"]

_MIN_WIDTH = 10  # characters of a column
_HEADER_EVERY = 25  # lines
_MAX_COLUMNS = 12  # if none are selected


class ConsoleTracker(Tracker):
    """Prints a line of the latest values every few seconds, in aligned columns.

    The header is repeated when a column is added, and every 25 lines. Progress bars of tqdm and
    rich stay intact. Strings are shown only in columns that are selected by name.

    Args:
        every_s: seconds between lines, default 10; 0 prints each row. The last one is printed at
            the end.
        columns: names or patterns (``"val/*"``) to show, in this order; the first 12 numbers that
            are logged if None.
        file: a text stream, ``sys.stderr`` if None.

    Raises:
        ValueError: ``every_s`` is negative.
        TypeError: ``columns`` is one string.

    >>> import sys
    >>> tracker = ConsoleTracker(0, file=sys.stdout)
    >>> tracker.start(RunInfo("digits", "runs", "a1"))
    >>> tracker.log({"train/loss": 0.51237, "lr": 1e-3}, step=20)
          step  train/loss          lr
            20      0.5124       0.001
    >>> tracker.finish()
    """

    name = "console"

    def __init__(
        self,
        every_s: float = 10.0,
        columns: Sequence[str] | None = None,
        *,
        file: IO[str] | None = None,
    ) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s={every_s!r} must be 0 or more seconds")
        if isinstance(columns, str):
            raise TypeError(f"columns is a list of names: write [{columns!r}]")
        self._every_s = every_s
        self._patterns = None if columns is None else list(columns)
        self._file = file
        self._open = False
        self._reset()

    def start(self, run: RunInfo) -> None:
        """Start a new table."""
        self._reset()
        self._open = True

    def log(self, scalars: Mapping[str, Scalar], step: int) -> None:
        """Update the values; print a line if one is due."""
        if not self._open:
            raise RuntimeError("the console tracker is not open: call start(run) before logging")
        for name, value in scalars.items():
            self._update(name, value)
        self._step, self._new = step, True
        if clock.monotonic() >= self._due:
            self._print()

    def finish(self, status: Status = "success") -> None:
        """Print the last row, unless it is printed already."""
        check_status(status)
        if self._open and self._new:
            self._print()
        self._open = False

    def _reset(self) -> None:
        self._values: dict[str, Scalar] = {}
        self._columns: list[str] = []
        self._step, self._new = 0, False
        self._lines, self._due = 0, 0.0

    def _update(self, name: str, value: Scalar) -> None:
        """Store a value that has a column; a new name may get one."""
        if name not in self._values:
            selected = self._patterns is not None
            fits = self._rank(name) is not None if selected else len(self._columns) < _MAX_COLUMNS
            if not fits or (isinstance(value, str) and not selected):
                return
            self._columns = sorted([*self._columns, name], key=lambda one: self._rank(one) or 0)
            self._lines = 0
        self._values[name] = value

    def _rank(self, name: str) -> int | None:
        """Return the index of the first pattern that a name matches, or None."""
        if self._patterns is None:
            return 0
        return next((i for i, one in enumerate(self._patterns) if fnmatchcase(name, one)), None)

    def _print(self) -> None:
        """Print one row, and the header if it is due."""
        if not self._columns:
            return
        names = ["step", *self._columns]
        cells = [str(self._step), *(_format(self._values[name]) for name in self._columns)]
        widths = [max(len(name), _MIN_WIDTH) for name in names]
        lines = [_aligned(cells, widths)]
        if self._lines % _HEADER_EVERY == 0:
            lines.insert(0, _aligned(names, widths))
        _write("\n".join(lines), self._file if self._file is not None else sys.stderr)
        self._lines, self._new = self._lines + 1, False
        self._due = clock.monotonic() + self._every_s


def _aligned(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _format(value: Scalar) -> str:
    """Return a number with four digits, an integer in full, a text on one line."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"


def _write(text: str, file: IO[str]) -> None:
    """Print complete lines, above progress bars of tqdm if there are any."""
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(text, file=file, flush=True)
        return
    bars.write(text, file=file)
    file.flush()
