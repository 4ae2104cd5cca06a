"""JSONLTracker and read_jsonl: a file of JSON lines, with media files next to it."""

from __future__ import annotations

import json
import math
import os
import time as clock
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from checkpoint_io.local_files import base_name
from loggers.base import RunInfo, Scalar, Status
from loggers.multimedia.encode import figure_png, histogram, png, video_file, wav
from loggers.multimedia.files import MediaFolder
from loggers.trackers.line_file import LineFile, read_lines
from loggers.trackers.tool import LineTracker, Recorded
from loggers.values import plain_config, stored_config

if TYPE_CHECKING:
    import numpy as np

__all__ = ["JSONLTracker", "read_jsonl"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_METRICS = b'{"type":"metrics",'
_WITH_VALUES = ("metrics", "text", "histogram", "images", "audio", "video", "figure")
_OF_STEPS: dict[str, Any] = {"step": int, "time?": (int, float)}
_OF_RUNS = dict.fromkeys(("resumed_step", "kept_step"), (int, NoneType))
#: Fields of the records that are read back, by type.
_FIELDS: dict[str, dict[str, Any]] = {
    "run": {"run_id": (str, NoneType), **_OF_RUNS},
    "table": {**_OF_STEPS, "name": str, "columns": list, "rows": list},
    **{kind: {**_OF_STEPS, "values": dict} for kind in _WITH_VALUES},
}
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class JSONLTracker(LineTracker):
    """Writes ``<logging_dir>/metrics.jsonl``; read it back with `read_jsonl`.

    Lines are buffered until `flush` (a hub calls it about twice a second) or up to 64 KiB, then
    written with one append of complete lines. A killed process thus loses less than a second, and
    leaves at most one incomplete line, at the end; the next start ends it with a newline and
    readers skip it. No row is dropped: a loop that logs faster waits. A full disk loses
    nothing that a later flush can still write. A resume removes what this run logged above the
    resumed step, and values that are logged again at that step are not repeated.

    Secrets in the config are replaced, as in the journal of a run, and the file is created for its
    user alone (mode 0600).

    Tables, texts and histograms are records; images (PNG), audio (WAV), videos (GIF with Pillow,
    else NumPy) and figures (PNG) are files in ``metrics-media/`` next to it, listed in a record. Of
    an artifact only the path is recorded.

    In a store (``s3://...``) the file is an object that is rewritten at most every 30 seconds, at
    each checkpoint and at the end. It is kept in memory meanwhile.

    Args:
        filename: name of the file, default "metrics.jsonl". Ranks above 0 add ``-rank<r>``.
        all_ranks: log on every rank, not only on the main one.

    Example:
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
    _private = True  # it holds the config

    def __init__(self, filename: str = "metrics.jsonl", *, all_ranks: bool = False) -> None:
        super().__init__(filename, all_ranks=all_ranks)
        self._media: MediaFolder | None = None

    def start(self, run: RunInfo) -> None:
        """Open the file, truncate it to the resumed step, and queue the ``run`` record."""
        keep = self._begin(run)
        run_id = str(self._run_id)
        self._file, stem = self._open_lines(run)
        self._media = MediaFolder(run.logging_dir, f"{stem}-media", run_id)
        if keep is not None:
            _truncate(self._file, run_id, keep)
            _read_recorded(self._file, run_id, {keep, run.resumed_step}, self._recorded)
        if self._file.is_truncated():
            self._file.add(b"\n")
        resumed = {"resumed_step": run.resumed_step}
        if keep != run.resumed_step:
            resumed["kept_step"] = keep
        self._add("run", run_id=run_id, name=run.name, time=clock.time(), **resumed)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the ``config`` record, without secrets."""
        self._add("config", config=stored_config(config))
        self.flush()

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Add a ``metrics`` record; it reaches the file at the next flush."""
        self._target().make_room()  # before adding, because a call that fails is retried
        self._log(scalars, step, time)

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> None:
        """Add a ``metrics`` record for each row; they reach the file at the next flush."""
        self._target().make_room()
        for row in rows:
            self._log(*row)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Add a ``table`` record."""
        cells = plain_config({"rows": rows})["rows"]
        self._add_step("table", step, name=name, columns=list(columns), rows=cells)

    def log_text(self, texts: Mapping[str, str], step: int) -> None:
        """Add a ``text`` record."""
        self._add_step("text", step, values=dict(texts))

    def log_histogram(self, histograms: Mapping[str, np.ndarray], step: int) -> None:
        """Add a ``histogram`` record: 64 bins of equal width, and summary statistics."""
        self._add_step("histogram", step, values={k: histogram(v) for k, v in histograms.items()})

    def log_images(
        self,
        images: Mapping[str, np.ndarray],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Write one PNG per image, and an ``images`` record with their paths."""
        files = {
            name: [self._save("images", name, step, ".png", png(a), i) for i, a in enumerate(all_)]
            for name, all_ in images.items()
        }
        texts = {name: list(text) for name, text in (captions or {}).items()}
        self._add_step("images", step, values=files, captions=texts)

    def log_audio(self, audio: Mapping[str, np.ndarray], step: int, *, sample_rate: int) -> None:
        """Write one WAV per clip, and an ``audio`` record with their paths."""
        files = {
            name: self._save("audio", name, step, ".wav", wav(samples, sample_rate))
            for name, samples in audio.items()
        }
        self._add_step("audio", step, values=files, sample_rate=sample_rate)

    def log_video(self, videos: Mapping[str, np.ndarray], step: int, *, fps: int = 4) -> None:
        """Write one GIF per video (without Pillow its frames as ``.npy``), and a record."""
        files = {
            name: self._save("video", name, step, *video_file(frames, fps))
            for name, frames in videos.items()
        }
        self._add_step("video", step, values=files, fps=fps)

    def log_figure(self, figures: Mapping[str, Any], step: int) -> None:
        """Write one PNG per figure, and a ``figure`` record with their paths."""
        files = {
            name: self._save("figure", name, step, ".png", figure_png(figure))
            for name, figure in figures.items()
        }
        self._add_step("figure", step, values=files)

    def log_artifact(self, path: str, *, name: str | None = None, kind: str = "file") -> None:
        """Add an ``artifact`` record with the path, without a copy."""
        shown = name or base_name(path)
        self._add("artifact", name=shown, kind=kind, path=path, time=clock.time())

    def log_graph(self, model: Any, inputs: Any = None) -> None:
        """Add a ``graph`` record with ``str(model)``."""
        self._add("graph", model=str(model), time=clock.time())

    def finish(self, status: Status = "success") -> None:
        """Write the ``finish`` record, sync the file to disk and close it."""
        self._end(status)
        if self._file is None:
            return
        self._add("finish", status=status, time=clock.time())
        self._close()

    def _save(
        self, kind: str, name: str, step: int, suffix: str, data: bytes, number: int = 0
    ) -> str:
        """Write one media file; return its path below ``logging_dir``."""
        self._target()
        assert self._media is not None
        return self._media.save(kind, name, step, number, suffix, data)

    def _add_step(self, type_: str, step: int, time: float | None = None, **fields: Any) -> None:
        """Queue a record with step and time."""
        self._add(type_, step=step, time=clock.time() if time is None else time, **fields)
        self._note_step(step)

    def _add(self, type_: str, **fields: Any) -> None:
        """Queue one record as a line."""
        self._target().add(_line({"type": type_, **fields}).encode() + b"\n")

    def _log(self, scalars: Mapping[str, Scalar], step: int, time: float | None) -> None:
        """Queue a ``metrics`` record of what was not recorded before a resume."""
        new = self._drop_recorded(scalars, step, _line)
        if new or not scalars:
            self._add_step("metrics", step, time, values=new)
        else:
            self._note_step(step)


def read_jsonl(
    path: str | os.PathLike[str], *, kind: str = "metrics", run_id: str | None = None
) -> list[dict[str, Any]]:
    """Return the metrics of one run in a file that `JSONLTracker` wrote.

    Incomplete lines, and records without the fields of their type, are skipped. Rows that a killed
    process logged after the checkpoint it was resumed from are omitted, because the resumed process
    logged those steps again: the history is that of an uninterrupted run. "NaN", "Infinity" and
    "-Infinity" become floats.

    Args:
        path: the file, or its fsspec URL.
        kind: the ``type`` of the records, default "metrics"; or "table", "text", "histogram",
            "images", "audio", "video", "figure".
        run_id: of the run; the newest one if ``None``.

    Returns:
        One ``{"type": "metrics", "step": int, "time": Unix seconds, "values": {name: value}}`` per
        call of ``log``, in order.

    Raises:
        FileNotFoundError: there is no such file.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"type":"run","resumed_step":null}\\n')
        ...     _ = file.write(
        ...         '{"type":"metrics","step":7,"time":0.0,"values":{"a":"Infinity"}}\\n'
        ...     )
        ...     _ = file.write('{"type":"met')
        >>> read_jsonl(path)
        [{'type': 'metrics', 'step': 7, 'time': 0.0, 'values': {'a': inf}}]
    """
    runs: dict[Any, list[dict[str, Any]]] = {}
    newest = None
    for line in read_lines(path):
        record = _parse(line)
        if record.get("type") == "run":
            newest, keep = record.get("run_id"), _step_to_keep(record)
            runs[newest] = [row for row in runs.get(newest, []) if row["step"] <= keep]
        elif record.get("type") == kind:
            if kind == "metrics":
                record["values"] = _parse_floats(record["values"])
            runs.setdefault(newest, []).append(record)
    return runs.get(newest if run_id is None else run_id, [])


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether a record has the fields of its type, which a file from elsewhere may lack."""
    fields = _FIELDS.get(str(record.get("type")), {})
    return all(
        isinstance(value, kinds) and not (isinstance(value, bool) or _is_huge(value))
        for name, kinds in fields.items()
        for value in [record.get(name.rstrip("?"), 0.0 if name == "time?" else None)]
    )


def _is_huge(value: Any) -> bool:
    """Return whether a value is a number that no clock and no counter has."""
    return isinstance(value, (int, float)) and not abs(value) < 2**63


def _read_recorded(
    file: LineFile, run_id: str, steps: Collection[int | None], recorded: Recorded
) -> None:
    """Read the values that the run has at some steps, which may be logged again."""
    newest = None
    marks = [b'"step":%d,' % step for step in steps if step is not None]
    for line in file.lines():
        # Most lines are metrics of other steps, and parsing takes the time.
        if line.startswith(_METRICS) and not any(mark in line for mark in marks):
            continue
        record = _parse(line)
        if record.get("type") == "run":
            newest = record.get("run_id")
        elif newest == run_id and record.get("type") == "metrics" and record["step"] in steps:
            for name, value in record["values"].items():
                recorded.add(record["step"], name, _line(value))


def _line(value: Any) -> str:
    """Return a record, or a value of one, as it is in the file."""
    try:
        return _encode(value)
    except ValueError:  # it has a NaN or an infinity
        return _encode(_encode_floats(value))


def _truncate(file: LineFile, run_id: str, keep: int) -> None:
    """Remove what the run logged above step ``keep``."""
    begin = _begin_of(file.lines(), run_id)
    if any(drop for _, drop in _mark_lines(file.lines(), run_id, keep, begin)):
        marked = _mark_lines(file.lines(), run_id, keep, begin)
        file.rewrite(line for line, drop in marked if not drop)


def _begin_of(lines: Iterable[bytes], run_id: str) -> int:
    """Return the line number at which the run last started anew; ids may be reused."""
    begin = 0
    for number, line in enumerate(lines):
        record = _parse(line) if b'"run"' in line else {}
        if record.get("type") == "run" and record.get("run_id") == run_id:
            begin = number if record.get("resumed_step") is None else begin
    return begin


def _mark_lines(
    lines: Iterable[bytes], run_id: str, keep: int, begin: int
) -> Iterator[tuple[bytes, bool]]:
    """Yield each line, and whether it is a step of the run above ``keep``."""
    ours = False
    for number, line in enumerate(lines):
        record = _parse(line)
        if record.get("type") == "run":
            ours = number >= begin and record.get("run_id") == run_id
        step = record.get("step")
        yield line, ours and isinstance(step, int) and step > keep


def _step_to_keep(record: dict[str, Any]) -> float:
    """Return the last step that a ``run`` record keeps of what its run logged before."""
    step = record.get("kept_step", record.get("resumed_step"))
    return -math.inf if step is None else float(step)


def _parse_floats(values: dict[str, Any]) -> dict[str, Any]:
    """Convert "NaN", "Infinity" and "-Infinity" to floats."""
    return {
        key: _NON_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in values.items()
    }


def _parse(line: bytes) -> dict[str, Any]:
    """Return the record on a line, or an empty one for a line that is incomplete after a crash."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and _is_whole(record) else {}


def _encode_floats(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, by strings."""
    if isinstance(value, dict):
        return {key: _encode_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encode_floats(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
