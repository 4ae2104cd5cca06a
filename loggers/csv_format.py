"""The CSV dialect of `CSVTracker`: one line a row, numbers bare, strings quoted."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loggers.base import Scalar
from loggers.trackers.line_file import read_lines

__all__ = ["AXES", "cell", "column_names", "header_line", "read_csv", "row_line", "run_and_step"]

AXES = ("step", "time", "run")
"""The first three columns; those of metrics follow, even where one has such a name."""

_CELL = re.compile(r'("(?:[^"]|"")*"|[^,]*)(,|$)')
_START = re.compile(rb'(-?\d+),[^,]*,("(?:[^"]|"")*"|[^,\r\n]*)')


def cell(value: Scalar | None) -> str:
    """Write one value: strings quoted, nothing for None, ``nan`` and ``inf`` as they are.

    Line breaks become a backslash and an n, so that a row is a line whatever was logged.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(int(value) if isinstance(value, int) else float(value))
    plain = value.replace("\r\n", "\\n").replace("\n", "\\n").replace("\r", "\\n")
    return '"' + plain.replace('"', '""') + '"'


def header_line(names: Sequence[str]) -> bytes:
    """Return the first line: names quoted only where they have to be."""
    quoted = (cell(n) if re.search(r'[",\r\n]|^\s*$', n) else n for n in (*AXES, *names))
    return ",".join(quoted).encode() + b"\n"


def row_line(
    step: int, time: float, run: str, values: Mapping[str, Scalar], names: Sequence[str]
) -> bytes:
    """Return a row with a cell for each of ``names``."""
    cells = [repr(step), repr(time), cell(run), *(cell(values.get(name)) for name in names)]
    return ",".join(cells).encode() + b"\n"


def run_and_step(line: bytes) -> tuple[str, int] | None:
    """Return what a row says of itself, or None for a line that is none."""
    match = _START.match(line)
    if match is None:
        return None
    return str(_value(match[2].decode(errors="replace"))), int(match[1])


def column_names(header: bytes) -> list[str] | None:
    """Return the names of the metrics in a first line, or None if it is not of this tracker."""
    names = [str(_text(one)) for one in _cells(header)]
    return names[len(AXES) :] if tuple(names[: len(AXES)]) == AXES else None


def read_csv(path: str | os.PathLike[str], *, run: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of one run in a file that `CSVTracker` wrote.

    A last row that a crash left torn is skipped. Any other tool reads the file too
    (``pandas.read_csv(path)``).

    Args:
        path: the file, or its fsspec URL.
        run: id of the run; that of the last row by default.

    Returns:
        One ``{"step": int, "time": Unix seconds, "run": str, "values": {name: value}}`` per call
        of ``log``, in order; empty cells are left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a file of this tracker.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.csv")
    >>> with open(path, "w") as file:
    ...     _ = file.write('step,time,run,loss,note\\n1,0.5,"a1",nan,"warm"\\n2,1.5,"a1",,')
    >>> read_csv(path)
    [{'step': 1, 'time': 0.5, 'run': 'a1', 'values': {'loss': nan, 'note': 'warm'}}]
    """
    lines = (line for line in read_lines(path) if line.endswith(b"\n"))
    header = next(lines, b"")
    names = column_names(header) if header else []
    if names is None:
        raise ValueError(f"{path} was not written by CSVTracker: it begins with {header[:60]!r}")
    rows = [_row(line, names) for line in lines if run_and_step(line) is not None]
    newest = run if run is not None or not rows else rows[-1]["run"]
    return [row for row in rows if row["run"] == newest]


def _row(line: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Read one row."""
    step, time, run, *rest = _cells(line)
    read = zip(names, rest, strict=False)  # rows are not longer than the header
    values = {name: _value(one) for name, one in read if one}
    return {"step": int(step), "time": float(time), "run": str(_value(run)), "values": values}


def _cells(line: bytes) -> list[str]:
    """Cut a line into its cells, as they stand there."""
    found = []
    for match in _CELL.finditer(line.decode(errors="replace").rstrip("\r\n")):
        found.append(match[1])
        if not match[2]:
            break
    return found


def _text(one: str) -> str:
    """Take the quotes off."""
    return one[1:-1].replace('""', '"') if one.startswith('"') else one


def _value(one: str) -> Scalar:
    """Read a cell: quoted is text; bare is a number, or text where another program wrote it."""
    if one.startswith('"'):
        return _text(one)
    for kind in (int, float):
        try:
            return kind(one)
        except ValueError:
            continue
    return one
