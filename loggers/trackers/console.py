"""ConsoleTracker: a table of the latest values on standard error."""

from __future__ import annotations

import math
import os
import sys
import time as clock
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import IO, Any, NamedTuple

from loggers.base import RunInfo, Scalar, Status, Tracker, check_status

__all__ = ["ConsoleTracker"]

_MIN_WIDTH = 10  # characters of a column
_HEADER_EVERY = 25  # lines
_TEXT_WIDTH = 16  # least characters of a column of strings
_NAME_LIMITS = (24, 16)  # characters of a long name, where not all columns fit otherwise
_LINE_WIDTH = 100  # where there is no terminal, and no COLUMNS


class ConsoleTracker(Tracker):
    """Prints a line of the latest values every few seconds, in aligned columns.

    The header is repeated when the columns change, and every 25 lines. Progress bars of tqdm and
    rich stay intact. Strings are shown only in columns that are selected by name.

    A line fits the terminal; elsewhere it is at most ``COLUMNS`` wide, 100 by default. Long names
    are shortened in the middle, then the last columns are left out: those of ``run.secondary``
    first. ``+3`` at the end of the header counts them.

    Args:
        every_s: seconds between lines, default 10; 0 prints each row. The last one is printed at
            the end.
        columns: names or patterns (``"val/*"``) to show, in this order; all numbers, in the order
            in which they were first logged, if None.
        file: a text stream, ``sys.stderr`` if None.

    Raises:
        ValueError: ``every_s`` is negative.
        TypeError: ``columns`` is one string.

    Example:
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
        self._secondary: Collection[str] = ()
        self._reset()

    def start(self, run: RunInfo) -> None:
        """Start a new table."""
        self._reset()
        self._secondary = run.secondary
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
        self._header: list[str] = []
        self._step, self._new = 0, False
        self._lines, self._due = 0, 0.0

    def _update(self, name: str, value: Scalar) -> None:
        """Store a value that may have a column."""
        selected = self._patterns is not None
        if name in self._values or (
            self._rank(name) is not None and (selected or not isinstance(value, str))
        ):
            self._values[name] = value

    def _rank(self, name: str) -> int | None:
        """Return the index of the first pattern that a name matches, or None."""
        if self._patterns is None:
            return 0
        return next(
            (i for i, pattern in enumerate(self._patterns) if fnmatchcase(name, pattern)), None
        )

    def _print(self) -> None:
        """Print one row, and the header if it is due."""
        if not self._values:
            return
        file = self._file if self._file is not None else sys.stderr
        columns = _fit_columns(self._names_by_rank(), _width(file))
        header = [column.title for column in columns]
        if header != self._header:
            self._header, self._lines = header, 0
        widths = [_MIN_WIDTH, *(column.width for column in columns)]
        cells = [_format(self._values[column.name], column.width) for column in columns]
        lines = [_align([str(self._step), *cells], widths)]
        if self._lines % _HEADER_EVERY == 0:
            hidden = len(self._values) - len(columns)
            lines.insert(0, _align(["step", *header], widths) + (f"  +{hidden}" * bool(hidden)))
        _write("\n".join(lines), file)
        self._lines, self._new = self._lines + 1, False
        self._due = clock.monotonic() + self._every_s

    def _names_by_rank(self) -> list[tuple[str, int]]:
        """Return the names with the least widths of their columns, the most important first."""
        names = sorted(self._values, key=lambda name: (self._rank(name), name in self._secondary))
        texts = {name for name in names if isinstance(self._values[name], str)}
        return [(name, _TEXT_WIDTH if name in texts else _MIN_WIDTH) for name in names]


class _Column(NamedTuple):
    name: str
    title: str
    width: int


def _fit_columns(names: Sequence[tuple[str, int]], width: int) -> list[_Column]:
    """Return the columns that fit: names are shortened first, then the last are left out."""
    columns: list[_Column] = []
    for limit in (None, *_NAME_LIMITS):
        titles = [(name, _shorten(name, limit), least) for name, least in names]
        columns = [_Column(name, title, max(len(title), least)) for name, title, least in titles]
        if _total(columns) <= width:
            return columns
    while len(columns) > 1 and _total(columns) + len(f"  +{len(names)}") > width:
        columns.pop()
    return columns


def _total(columns: Iterable[_Column]) -> int:
    return _MIN_WIDTH + sum(2 + column.width for column in columns)


def _shorten(name: str, limit: int | None) -> str:
    """Cut the middle out of a long name: its ends tell it from others."""
    if limit is None or len(name) <= limit:
        return name
    end = (limit - 2) // 2
    return f"{name[: limit - 2 - end]}..{name[-end:]}"


def _width(file: IO[str]) -> int:
    """Return the width of a terminal, or that of lines which no terminal limits."""
    try:
        width = os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):  # not a terminal
        width = 0
    columns = os.environ.get("COLUMNS", "")
    return width or (int(columns) if columns.isdecimal() else 0) or _LINE_WIDTH


def _align(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _format(value: Scalar, width: int) -> str:
    """Return a number with four digits, an integer in full, a text on one line."""
    if isinstance(value, str):
        return _shorten(" ".join(value.split()), width)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) < 1e6):
        whole = str(int(value))
        return whole if len(whole) <= width else f"{value:.4g}"
    return f"{value:.4g}"


def _write(text: str, file: IO[str]) -> None:
    """Print complete lines, above progress bars of tqdm if there are any."""
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None:
        print(text, file=file, flush=True)
        return
    bars.write(text, file=file)
    file.flush()
