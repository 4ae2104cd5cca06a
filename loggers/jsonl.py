"""The reference tracker: one append-only file of strict JSON lines, no package needed."""

from __future__ import annotations

import json
import math
import os
import time as clock
from collections.abc import Mapping
from typing import Any

from loggers.base import RunInfo, Scalar, Status, check_status
from loggers.config import plain_config
from loggers.resumable import ResumableTracker


class JSONLTracker(ResumableTracker):
    """Writes ``<logging_dir>/metrics.jsonl``; read it back with `read_jsonl`.

    Lines are buffered until `flush` (a hub calls it about every second) or until 64 KiB have
    gathered, then written with one append of whole lines. So a killed process leaves at most one
    torn line, at the end; the next start closes it and readers skip it. A full disk loses nothing
    that a later flush can still write.

    Args:
        filename: name of the file, default "metrics.jsonl". Ranks above 0 add ``-rank<r>``.
        all_ranks: log on every process rather than on the main one only.

    Raises:
        ValueError: from `start`, when ``logging_dir`` is a remote URL: objects in a store cannot
            be appended to.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> tracker = JSONLTracker()
    >>> tracker.start(RunInfo("digits", folder, "a1"))
    >>> tracker.log({"loss": float("nan")}, step=1)
    >>> tracker.finish("success")
    >>> [(row["step"], row["values"]) for row in read_jsonl(f"{folder}/metrics.jsonl")]
    [(1, {'loss': nan})]
    """

    name = "jsonl"

    def __init__(self, filename: str = "metrics.jsonl", *, all_ranks: bool = False) -> None:
        super().__init__(all_ranks=all_ranks)
        self._filename = filename
        self._fd: int | None = None
        self._pending = b""
        self.path: str | None = None
        """Path of the file, known once started."""

    def start(self, run: RunInfo) -> None:
        """Open the file for appending and queue the ``run`` record."""
        folder = _local_path(run.logging_dir)
        os.makedirs(folder, exist_ok=True)
        stem, suffix = os.path.splitext(self._filename)
        rank = f"-rank{run.rank}" if run.rank else ""
        self.path = os.path.join(folder, f"{stem}{rank}{suffix}")
        self._run_id = self._run_id or run.run_id
        if _is_torn(self.path):
            self._pending = b"\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._fd = os.open(self.path, flags, 0o644)
        self._add(
            type="run",
            run_id=self._run_id,
            name=run.name,
            time=clock.time(),
            resumed_step=run.resumed_step,
        )

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the ``config`` record."""
        self._add(type="config", config=plain_config(config))
        self.flush()

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Add a ``metrics`` record; it reaches the file at the next flush."""
        when = clock.time() if time is None else time
        self._add(type="metrics", step=step, time=when, values=dict(scalars))
        self._last_step = step
        if len(self._pending) >= 65536:
            self.flush()

    def flush(self) -> None:
        """Append the pending lines; what an error kept from being written stays pending."""
        while self._pending:
            written = os.write(self._opened(), self._pending)
            self._pending = self._pending[written:]  # a disk that is nearly full writes less

    def finish(self, status: Status = "success") -> None:
        """Write the ``finish`` record, force the file to disk and close it."""
        check_status(status)
        if self._fd is None:
            return
        self._add(type="finish", status=status, time=clock.time())
        try:
            self.flush()
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = None

    @property
    def raw(self) -> Any:
        """The file descriptor, or None before `start` and after `finish`."""
        return self._fd

    def _opened(self) -> int:
        """Return the descriptor, or say that there is none."""
        if self._fd is None:
            raise RuntimeError("the JSONL tracker is not open: call start(run) before logging")
        return self._fd

    def _add(self, **record: Any) -> None:
        """Queue one record as a line."""
        self._opened()
        line = json.dumps(_strict(record), allow_nan=False, separators=(",", ":"))
        self._pending += line.encode() + b"\n"


_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the metrics of the newest run in a file that `JSONLTracker` wrote.

    Torn lines are skipped. Rows that a killed process logged after the checkpoint it was resumed
    from are dropped, because the resumed process logged those steps again: the history is the one
    an uninterrupted run would have left. "NaN", "Infinity" and "-Infinity" become floats.

    Args:
        path: the file.

    Returns:
        One ``{"type": "metrics", "step": int, "time": Unix seconds, "values": {name: value}}`` per
        call of ``log``, in order.

    Raises:
        FileNotFoundError: there is no such file.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
    >>> with open(path, "w") as file:
    ...     _ = file.write('{"type":"run","resumed_step":null}\\n')
    ...     _ = file.write('{"type":"metrics","step":7,"time":0.0,"values":{"a":"Infinity"}}\\n')
    ...     _ = file.write('{"type":"met')
    >>> read_jsonl(path)
    [{'type': 'metrics', 'step': 7, 'time': 0.0, 'values': {'a': inf}}]
    """
    rows: list[dict[str, Any]] = []
    with open(path, "rb") as file:
        for line in file:
            record = _parse(line)
            if record.get("type") == "run":
                resumed = record.get("resumed_step")
                rows = [] if resumed is None else [row for row in rows if row["step"] <= resumed]
            elif record.get("type") == "metrics":
                values = record["values"]
                record["values"] = {
                    key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
                    for key, value in values.items()
                }
                rows.append(record)
    return rows


def _parse(line: bytes) -> dict[str, Any]:
    """Return the record on a line, or an empty one for a line that a crash left torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _strict(value: Any) -> Any:
    """Replace NaN and the infinities, which JSON has no numbers for, by strings."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _local_path(logging_dir: str) -> str:
    """Return ``logging_dir`` as a path of this machine, or raise ValueError."""
    scheme, separator, path = logging_dir.partition("://")
    if not separator:
        return logging_dir
    if scheme in ("file", "local"):
        return path
    raise ValueError(
        f"the JSONL tracker appends to a file, which {scheme}:// cannot do: set logging_dir to a "
        "local path (and copy the file afterwards), or leave 'jsonl' out"
    )


def _is_torn(path: str) -> bool:
    """Say whether a crash left the last line without its end."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no such file, or an empty one
        return False
