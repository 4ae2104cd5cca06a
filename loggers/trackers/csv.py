"""CSVTracker and read_csv: a CSV file whose columns are added as metrics appear."""

from __future__ import annotations

import os
import re
import time as clock
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from checkpoint_io.warning import warn
from loggers.base import RunInfo, Scalar, Status
from loggers.trackers.line_file import LineFile, read_lines
from loggers.trackers.tool import LineTracker

__all__ = ["CSVTracker", "read_csv"]

_AXES = ("step", "time", "run")  # the first columns; metrics follow, even one with such a name
_FULL = 4096  # buffered rows that `log` writes; a hub flushes about twice a second anyway

_CELL = re.compile(r'("(?:[^"]|"")*"|[^,]*)(,|$)')
_START = re.compile(rb'(-?\d+),[^,]*,("(?:[^"]|"")*"|[^,\r\n]*)')


class CSVTracker(LineTracker):
    """Writes ``<logging_dir>/metrics.csv``; read it with `read_csv`, pandas or a spreadsheet.

    The columns are ``step``, ``time`` (Unix seconds), ``run`` (the id), then one per metric. A new
    metric adds a column: the file is rewritten atomically, and older rows get an empty cell.
    Strings are quoted, NaN is ``nan``. No row is dropped: a loop that logs faster waits. A resume
    deletes the rows of this run above the resumed step, because they are logged again, and does not
    repeat values that are logged again at that step; nothing else is ever deleted. New runs are
    appended.

    In a store (``s3://...``) the file is an object that is rewritten at most every 30 seconds, at
    each checkpoint and at the end. It is kept in memory meanwhile.

    Args:
        filename: name of the file, default "metrics.csv". Ranks above 0 add ``-rank<r>``.
        all_ranks: log on every rank, not only on the main one.
        max_columns: maximum number of metrics; further ones are dropped with one warning.
            Default 1000.

    Raises:
        ValueError: from `start`, if the file exists and was written by another program.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> tracker = CSVTracker()
        >>> tracker.start(RunInfo("digits", folder, "a1"))
        >>> tracker.log({"loss": 0.5}, step=1)
        >>> tracker.log({"loss": 0.25, "note": "warm"}, step=2)
        >>> tracker.finish("success")
        >>> [row["values"] for row in read_csv(f"{folder}/metrics.csv")]
        [{'loss': 0.5}, {'loss': 0.25, 'note': 'warm'}]
    """

    name = "csv"

    def __init__(
        self,
        filename: str = "metrics.csv",
        *,
        all_ranks: bool = False,
        max_columns: int = 1000,
    ) -> None:
        super().__init__(filename, all_ranks=all_ranks)
        self._max_columns = max_columns
        self._reset()

    def start(self, run: RunInfo) -> None:
        """Open the file, read its columns, and truncate it to the resumed step."""
        keep = self._begin(run)
        file, _ = self._open_lines(run)
        self._reset()
        self._read_header(file)
        self._truncate(file, keep)
        if keep is not None:
            self._read_recorded(file, {keep, run.resumed_step})
        if keep is None:
            self._run_id = _free_id(str(self._run_id), file)
        self._file = file

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Add a row; it reaches the file at the next flush."""
        self._target().make_room()
        if len(self._rows) >= _FULL:  # before adding, because a call that fails is retried
            self.flush()
        new = self._drop_recorded(scalars, step, _cell)
        if new or not scalars:
            self._add(new, step, clock.time() if time is None else time)
        self._note_step(step)

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> None:
        """Add rows; they reach the file at the next flush."""
        self._target().make_room()
        if len(self._rows) >= _FULL:
            self.flush()
        for scalars, step, time in rows:
            new = self._drop_recorded(scalars, step, _cell)
            if new:
                self._add(new, step, time)
        self._note_step(max(step for _, step, _ in rows))

    @property
    def unflushed(self) -> bool:
        """Whether rows wait, as after an error, or for an upload to a store."""
        return super().unflushed or (self._file is not None and bool(self._rows))

    def finish(self, status: Status = "success") -> None:
        """Write all rows, sync the file to disk and close it."""
        self._end(status)
        if self._file is None:
            return
        try:
            self._write(self._file)
        finally:
            self._close()

    def _reset(self) -> None:
        """Clear the state of the previous run."""
        self._rows: list[tuple[int, float, dict[str, Scalar]]] = []
        self._names: dict[str, None] = {}  # an ordered set
        self._new: dict[str, None] = {}  # names in the rows that have no column yet
        self._has_header = self._warned_too_wide = False

    def _read_header(self, file: LineFile) -> None:
        """Read the columns of the file; raise ValueError if another program wrote it."""
        header = next(file.lines(), b"")
        names = _column_names(header) if header.endswith(b"\n") else []
        axes = ",".join(_AXES).encode()
        # A header without its newline, left by a crash, is compared as far as it goes.
        if names is None or not axes.startswith(header[: len(axes)]):
            raise ValueError(
                f"{file.path} was not written by this tracker; use another filename for CSVTracker "
                "or move that file away"
            )
        self._has_header = header.endswith(b"\n")
        self._names = dict.fromkeys(names)

    def _read_recorded(self, file: LineFile, steps: Collection[int | None]) -> None:
        """Read what the run has at some steps, which may be logged again."""
        for line in islice(file.lines(), 1, None):
            run, step = _run_and_step(line) or (None, 0)
            if run == self._run_id and step in steps:
                for name, cell in zip(self._names, _cells(line)[len(_AXES) :], strict=False):
                    self._recorded.add(step, name, cell)

    def _truncate(self, file: LineFile, keep: int | None) -> None:
        """Remove an incomplete last row, and the rows that a resumed run logs again."""

        def marked() -> Iterator[tuple[bytes, bool]]:
            for line in file.lines():
                run, step = _run_and_step(line) or (None, 0)
                repeated = keep is not None and run == self._run_id and step > keep
                yield line, repeated or not line.endswith(b"\n")

        if file.is_truncated() or (keep is not None and any(drop for _, drop in marked())):
            file.rewrite(line for line, drop in marked() if not drop)

    def _add(self, values: dict[str, Scalar], step: int, time: float) -> None:
        """Queue a row."""
        self._rows.append((step, time, values))
        if not values.keys() <= self._names.keys():
            self._new.update(dict.fromkeys(name for name in values if name not in self._names))

    def _write(self, file: LineFile, force: bool = False) -> None:
        """Append the rows, after a rewrite of the file if they have new columns."""
        new = self._new_names()
        if new or (self._rows and not self._has_header):
            self._grow(file, new)
        run, names = str(self._run_id), list(self._names)
        file.add("".join(_row_lines(self._rows, run, names)).encode(errors="backslashreplace"))
        self._rows, self._new = [], {}
        file.flush(force)

    def _new_names(self) -> list[str]:
        """Return names in the rows that have no column yet, up to ``max_columns``."""
        new = self._new
        room = max(self._max_columns - len(self._names), 0)
        if len(new) > room and not self._warned_too_wide:
            self._warned_too_wide = True
            lost = next(islice(new, room, None))
            warn(
                f"{self.path} has {self._max_columns} columns, so {lost!r} and later names are "
                "dropped (warned once). Use the same names at each step, or raise max_columns",
                UserWarning,
            )
        return list(islice(new, room))

    def _grow(self, file: LineFile, new: list[str]) -> None:
        """Write the header, or rewrite the file with a wider one."""
        header = _header_line([*self._names, *new])
        if self._has_header:
            file.flush()
            file.rewrite(_widen(file, header, len(new)))
        else:
            file.add(header)
        self._names.update(dict.fromkeys(new))
        self._has_header = True


def read_csv(path: str | os.PathLike[str], *, run: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of one run in a file that `CSVTracker` wrote.

    A last row that a crash left incomplete is skipped. Other tools can read the file too, e.g.
    ``pandas.read_csv(path)``.

    Args:
        path: the file, or its fsspec URL.
        run: id of the run; by default that of the last row.

    Returns:
        One ``{"step": int, "time": Unix seconds, "run": str, "values": {name: value}}`` per call
        of ``log``, in order; empty cells are omitted.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file was not written by `CSVTracker`.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "metrics.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write('step,time,run,loss,note\\n1,0.5,"a1",nan,"warm"\\n2,1.5,"a1",,')
        >>> read_csv(path)
        [{'step': 1, 'time': 0.5, 'run': 'a1', 'values': {'loss': nan, 'note': 'warm'}}]
    """
    lines = (line for line in read_lines(path) if line.endswith(b"\n"))
    header = next(lines, b"")
    names = _column_names(header) if header else []
    if names is None:
        raise ValueError(f"{path} was not written by CSVTracker: it begins with {header[:60]!r}")
    rows = [_row(line, names) for line in lines if _run_and_step(line) is not None]
    newest = run if run is not None or not rows else rows[-1]["run"]
    return [row for row in rows if row["run"] == newest]


def _widen(file: LineFile, header: bytes, more: int) -> Iterator[bytes]:
    """Yield the lines of a file with another header and ``more`` empty cells per row."""
    cells = b"," * more + b"\n"
    yield header
    for line in islice(file.lines(), 1, None):
        yield line.rstrip(b"\r\n") + cells


def _free_id(run_id: str, file: LineFile) -> str:
    """Return an id for a new run that no row in the file has."""
    known = {row[0] for row in map(_run_and_step, file.lines()) if row is not None}
    others = (f"{run_id}-{number}" for number in range(2, len(known) + 3))
    return run_id if run_id not in known else next(name for name in others if name not in known)


# --- the lines of the file ------------------------------------------------------------------------


def _cell(value: Scalar | None) -> str:
    """Return one value as text: strings quoted, None empty, NaN as ``nan``, infinities as ``inf``.

    Line breaks become a backslash and an n, so that each row is one line.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return repr(int(value) if isinstance(value, int) else float(value))
    plain = value.replace("\r\n", "\\n").replace("\n", "\\n").replace("\r", "\\n")
    return '"' + plain.replace('"', '""') + '"'


def _header_line(names: Sequence[str]) -> bytes:
    """Return the first line; names are quoted only if necessary."""
    quoted = (_cell(n) if re.search(r'[",\r\n]|^\s*$', n) else n for n in (*_AXES, *names))
    return ",".join(quoted).encode(errors="backslashreplace") + b"\n"


def _row_lines(
    rows: Iterable[tuple[int, float, dict[str, Scalar]]], run: str, names: Sequence[str]
) -> Iterator[str]:
    """Yield rows with a cell for each of ``names``; fast where all are there, and floats."""
    run_cell, columns = _cell(run), tuple(names)
    shape = f"%d,%r,{run_cell.replace('%', '%%')}" + ",%r" * len(names) + "\n"
    for step, time, values in rows:
        if tuple(values) == columns and set(map(type, values.values())) == {float}:
            yield shape % (step, time, *values.values())
        else:
            cells = [repr(step), repr(time), run_cell, *(_cell(values.get(name)) for name in names)]
            yield ",".join(cells) + "\n"


def _run_and_step(line: bytes) -> tuple[str, int] | None:
    """Return the run and step of a row, or None for a line that is not a row."""
    match = _START.match(line)
    if match is None:
        return None
    return str(_value(match[2].decode(errors="replace"))), int(match[1])


def _column_names(header: bytes) -> list[str] | None:
    """Return the names of the metrics in a header, or None if it is not one of this tracker."""
    names = [str(_text(cell)) for cell in _cells(header)]
    return names[len(_AXES) :] if tuple(names[: len(_AXES)]) == _AXES else None


def _row(line: bytes, names: Sequence[str]) -> dict[str, Any]:
    """Read one row."""
    step, time, run, *rest = _cells(line)
    read = zip(names, rest, strict=False)  # rows are not longer than the header
    values = {name: _value(cell) for name, cell in read if cell}
    return {"step": int(step), "time": float(time), "run": str(_value(run)), "values": values}


def _cells(line: bytes) -> list[str]:
    """Split a line into its cells, without unquoting them."""
    cells = []
    for match in _CELL.finditer(line.decode(errors="replace").rstrip("\r\n")):
        cells.append(match[1])
        if not match[2]:
            break
    return cells


def _text(cell: str) -> str:
    """Unquote a cell."""
    return cell[1:-1].replace('""', '"') if cell.startswith('"') else cell


def _value(cell: str) -> Scalar:
    """Parse a cell: quoted is text; unquoted is a number, or text written by another program."""
    if cell.startswith('"'):
        return _text(cell)
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
