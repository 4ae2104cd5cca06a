"""CSVTracker."""

from __future__ import annotations

import os
import re
import time as clock
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from loggers.base import RunInfo, Scalar, Status
from loggers.trackers.line_file import LineFile, open_lines, read_lines
from loggers.trackers.tool import ContinuingTracker, opened

__all__ = [
    "AXES",
    "CSVTracker",
    "cell",
    "column_names",
    "header_line",
    "read_csv",
    "row_line",
    "run_and_step",
]

AXES = ("step", "time", "run")
_FULL = 4096  # rows held before a log writes them; a hub flushes about every second anyway
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


_BEGINNING = ",".join(AXES).encode()
_GROW_SHARE = 20  # rewriting for new columns takes at most a twentieth of the time


class CSVTracker(ContinuingTracker):
    """Writes ``<logging_dir>/metrics.csv``; read it with `read_csv`, pandas or a spreadsheet.

    The columns are ``step``, ``time`` (Unix seconds), ``run`` (the id), then one a metric. A new
    metric adds a column: the file is written again, crash-safely, and older rows get an empty
    cell. A file that is large is written again less often, and rows with new columns wait for
    that. Strings are quoted, NaN is ``nan``. Nothing is ever deleted but what a resume logs
    again: rows of this run above the resumed step. Runs that begin afresh are added below.

    In a store (``s3://...``) the file is an object that is written whole: at most every 30
    seconds, at each checkpoint and at the end. All of it is kept in memory until then.

    Args:
        filename: name of the file, default "metrics.csv". Ranks above 0 add ``-rank<r>``.
        all_ranks: log on every process rather than on the main one only.
        max_columns: metrics that have a column; further ones are left out with one warning.
            Default 1000.

    Raises:
        ValueError: from `start`, when the file exists and another program wrote it.

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
        super().__init__(all_ranks=all_ranks)
        self._filename = filename
        self._max_columns = max_columns
        self._file: LineFile | None = None
        self._reset()
        self.path: str | None = None
        """Path or URL of the file, known once started."""

    def start(self, run: RunInfo) -> None:
        """Open the file, read its columns, and cut it back to the resumed step."""
        keep = self._begin(run)
        stem, suffix = os.path.splitext(self._filename)
        rank = f"-rank{run.rank}" if run.rank else ""
        file = open_lines(run.logging_dir, f"{stem}{rank}{suffix}")
        self._reset()
        self.path = file.path
        self._read_header(file)
        self._mend(file, keep)
        if keep is None:
            self._run_id = _unused(str(self._run_id), file)
        self._file = file

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Add a row; it reaches the file at the next flush."""
        self._opened()
        if len(self._rows) >= _FULL:  # before adding: a call that fails is made again
            self.flush()
        self._rows.append((step, clock.time() if time is None else time, dict(scalars)))
        self._seen(step)

    def flush(self) -> None:
        """Append the rows; ones with new columns wait while rewriting would cost too much."""
        self._flush(force=False)

    def state_dict(self) -> dict[str, Any]:
        """Write all rows, to a store too, and return the run id and the last step."""
        if self._file is not None:
            self._flush(force=True)
        return super().state_dict()

    def finish(self, status: Status = "success") -> None:
        """Write all rows, force the file to disk and close it."""
        self._end(status)
        if self._file is None:
            return
        try:
            self._flush(force=True)
        finally:
            file, self._file = self._file, None
            file.close()

    @property
    def raw(self) -> Any:
        """The file's writer, with its ``path``, or None before `start` and after `finish`."""
        return self._file

    def _opened(self) -> LineFile:
        """Return the file, or say that there is none."""
        return opened(self._file, "CSV")

    def _reset(self) -> None:
        """Forget the file and the rows of the run before."""
        self._rows: list[tuple[int, float, dict[str, Scalar]]] = []
        self._names: dict[str, None] = {}  # in order
        self._has_header = self._too_wide = False
        self._grow_due = 0.0

    def _read_header(self, file: LineFile) -> None:
        """Take the columns that the file has; refuse one of somebody else."""
        header = next(file.lines(), b"")
        names = column_names(header) if header.endswith(b"\n") else []
        if names is None or not _BEGINNING.startswith(header[: len(_BEGINNING)]):
            raise ValueError(
                f"{file.path} was not written by this tracker: give CSVTracker another filename, "
                "or move that file away"
            )
        self._has_header = header.endswith(b"\n")
        self._names = dict.fromkeys(names)

    def _mend(self, file: LineFile, keep: int | None) -> None:
        """Remove a torn last row, and what a resume will log again."""
        gone = (None, 0) if keep is None else (self._run_id, keep)

        def marked() -> Iterator[tuple[bytes, bool]]:
            for line in file.lines():
                run, step = run_and_step(line) or (None, 0)
                ours = run is not None and run == gone[0]
                yield line, (ours and step > gone[1]) or not line.endswith(b"\n")

        if file.is_torn() or (keep is not None and any(bad for _, bad in marked())):
            file.rewrite(line for line, bad in marked() if not bad)

    def _flush(self, force: bool) -> None:
        """Write the rows, after growing the header if they need it."""
        file = self._opened()
        new = self._new_names()
        if new and not force and self._has_header and clock.monotonic() < self._grow_due:
            return
        if new or (self._rows and not self._has_header):
            self._grow(file, new)
        run, names = str(self._run_id), list(self._names)
        file.add(b"".join(row_line(s, t, run, values, names) for s, t, values in self._rows))
        self._rows = []
        file.flush(force)

    def _new_names(self) -> list[str]:
        """Names in the rows that have no column yet, as many as there is room for."""
        new = dict.fromkeys(n for *_, row in self._rows for n in row if n not in self._names)
        room = max(self._max_columns - len(self._names), 0)
        if len(new) > room and not self._too_wide:
            self._too_wide = True
            lost = next(islice(new, room, None))
            warnings.warn(
                f"{self.path} has {self._max_columns} columns, so {lost!r} and later names are "
                "left out (said once). Use the same names at each step, or raise max_columns",
                UserWarning,
                stacklevel=2,
            )
        return list(islice(new, room))

    def _grow(self, file: LineFile, new: list[str]) -> None:
        """Write the header, or all of the file again under a wider one."""
        begin, header = clock.monotonic(), header_line([*self._names, *new])
        if self._has_header:
            file.flush()
            file.rewrite(_widened(file, header, len(new)))
        else:
            file.add(header)
        self._names.update(dict.fromkeys(new))
        self._has_header = True
        now = clock.monotonic()
        self._grow_due = now + _GROW_SHARE * (now - begin)


def _widened(file: LineFile, header: bytes, more: int) -> Iterator[bytes]:
    """The lines of a file under another header, each with some empty cells more."""
    cells = b"," * more + b"\n"
    yield header
    for line in islice(file.lines(), 1, None):
        yield line.rstrip(b"\r\n") + cells


def _unused(run_id: str, file: LineFile) -> str:
    """A name for a fresh run by which its rows differ from those that are in the file."""
    known = {found[0] for found in map(run_and_step, file.lines()) if found is not None}
    others = (f"{run_id}-{number}" for number in range(2, len(known) + 3))
    return run_id if run_id not in known else next(name for name in others if name not in known)
