"""Reading the files of `JSONLTracker`, and what of them belongs to a run that is resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from loggers.trackers.line_file import LineFile, read_lines

__all__ = ["cut_back", "read_jsonl"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_jsonl(path: str | os.PathLike[str], *, kind: str = "metrics") -> list[dict[str, Any]]:
    """Return the metrics of the newest run in a file that `JSONLTracker` wrote.

    Torn lines are skipped. Rows that a killed process logged after the checkpoint it was resumed
    from are left out, because the resumed process logged those steps again: the history is the one
    an uninterrupted run would have left. "NaN", "Infinity" and "-Infinity" become floats.

    Args:
        path: the file, or its fsspec URL.
        kind: the ``type`` of the records, default "metrics"; or "table", "text", "histogram",
            "images", "audio", "video", "figure".

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
    runs: dict[Any, list[dict[str, Any]]] = {}
    newest = None
    for line in read_lines(path):
        record = _parse(line)
        if record.get("type") == "run":
            newest, keep = record.get("run_id"), _kept_step(record)
            runs[newest] = [row for row in runs.get(newest, []) if row["step"] <= keep]
        elif record.get("type") == kind and "step" in record:
            if kind == "metrics":
                record["values"] = _finite_or_not(record["values"])
            runs.setdefault(newest, []).append(record)
    return runs.get(newest, [])


def cut_back(file: LineFile, run_id: str, keep: int) -> None:
    """Remove what the run logged above step ``keep``; every other line stays as it is."""
    begin = _begin_of(file.lines(), run_id)
    if any(gone for _, gone in _marked(file.lines(), run_id, keep, begin)):
        marked = _marked(file.lines(), run_id, keep, begin)
        file.rewrite(line for line, gone in marked if not gone)


def _begin_of(lines: Iterable[bytes], run_id: str) -> int:
    """Number of the line on which a run began afresh the last time; an id may be used again."""
    begin = 0
    for number, line in enumerate(lines):
        record = _parse(line) if b'"run"' in line else {}
        if record.get("type") == "run" and record.get("run_id") == run_id:
            begin = number if record.get("resumed_step") is None else begin
    return begin


def _marked(
    lines: Iterable[bytes], run_id: str, keep: int, begin: int
) -> Iterator[tuple[bytes, bool]]:
    """Each line, and whether it is a step of the run that is above ``keep``."""
    ours = False
    for number, line in enumerate(lines):
        record = _parse(line)
        if record.get("type") == "run":
            ours = number >= begin and record.get("run_id") == run_id
        step = record.get("step")
        yield line, ours and isinstance(step, int) and step > keep


def _kept_step(record: dict[str, Any]) -> float:
    """The last step that a ``run`` record leaves of what its run logged before."""
    kept = record.get("kept_step", record.get("resumed_step"))
    return -math.inf if kept is None else float(kept)


def _finite_or_not(values: dict[str, Any]) -> dict[str, Any]:
    """Read the three floats that JSON does not have."""
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in values.items()
    }


def _parse(line: bytes) -> dict[str, Any]:
    """Return the record on a line, or an empty one for a line that a crash left torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
