"""Journal: reads the attempts of a run, their rows and marks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath, listdir, path
from typing import Any

import numpy as np

from accel_callbacks.checkpoint.project import path_in
from accel_callbacks.journal.format import (
    FIELDS,
    HEADER_SIZE,
    MAGIC,
    ROW_SIZE,
    SKIPPED,
    Header,
    JournalError,
    row_is_whole,
    unpack_header,
)
from accel_callbacks.local_files import base_name, local_path

__all__ = ["Attempt", "Journal"]

_ROW = np.dtype(list(FIELDS))
_READ = np.dtype([*FIELDS, ("attempt", "<u4"), ("repeated", "?")])
_MOST_BYTES = 1 << 34  # of one file: larger ones are no journal


@dataclass(frozen=True)
class Attempt:
    """One start of a run, which ended by itself or was killed.

    Attributes:
        number: from 1.
        world_size: number of ranks.
        marks: what rank 0 noted, in order: dicts with ``kind``, ``time`` and more.
        files: of rows, by rank.

    Example:
        >>> from accel_callbacks.journal import Attempt
        >>> Attempt(1, 1, ({"kind": "start", "step": 0},), {}).start["step"]
        0
    """

    number: int
    world_size: int
    marks: tuple[dict[str, Any], ...]
    files: dict[int, str]

    @property
    def start(self) -> dict[str, Any]:
        """The mark of the start, empty if the process was killed before it was written."""
        return next(self.marks_of("start"), {})

    def marks_of(self, *kinds: str) -> Iterator[dict[str, Any]]:
        """Yield the marks of some kinds."""
        return (mark for mark in self.marks if mark.get("kind") in kinds)


class Journal:
    """The journal of one run.

    Args:
        folder: of the run's journal, path or URL.
        attempts: in order.

    Example:
        >>> import tempfile, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.journal import Journal
        >>> folder = tempfile.mkdtemp()
        >>> accel = Accelerator(cpu=True, project_dir=folder)
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = accel.prepare(torch.optim.SGD([weight], lr=0.5))
        >>> with accel.run("demo"):
        ...     for _ in range(2):
        ...         accel.backward((weight * 3).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> rows = Journal.read(folder).rows()
        >>> rows["step"].tolist(), rows["loss"].tolist(), rows["learning_rate"].tolist()
        ([1, 2], [3.0, -1.5], [0.5, 0.5])
    """

    def __init__(self, folder: str, attempts: Sequence[Attempt]) -> None:
        self.folder = folder
        self.attempts = tuple(attempts)

    @classmethod
    def read(cls, folder: str | PathLike[str], run_id: str | None = None) -> Journal:
        """Read the journal of a run.

        Args:
            folder: the project folder, its folder ``journal``, or that of one run in it; a path or
                an fsspec URL.
            run_id: of the run; the newest one if ``None``.

        Raises:
            JournalError: there is none, or its files are damaged.
        """
        place = fspath(folder)
        root = path_in(place, "journal")
        root = root if _names(root) else place
        if not _attempts(_names(root)):
            runs = [name for name in _names(root) if _attempts(_names(path_in(root, name)))]
            if run_id is not None and run_id not in runs:
                listed = ", ".join(sorted(runs)) or "none"
                raise JournalError(f"{root} has no run {run_id!r}: it has {listed}.")
            if not runs:
                raise JournalError(_ABSENT.format(place))
            chosen = run_id or max(runs, key=lambda name: _began(path_in(root, name)))
            root = path_in(root, chosen)
        numbers = _attempts(_names(root))
        return cls(root, [_read_attempt(root, number) for number in numbers])

    @cached_property
    def marks(self) -> tuple[dict[str, Any], ...]:
        """The marks of all attempts, in order, each with its ``attempt``."""
        return tuple(
            {**mark, "attempt": attempt.number}
            for attempt in self.attempts
            for mark in attempt.marks
        )

    @property
    def name(self) -> str:
        """The name of the run, an empty string if no attempt came so far."""
        return next((str(mark["name"]) for mark in self.marks if "name" in mark), "")

    def rows(self, rank: int = 0, *, repeated: bool = True) -> np.ndarray[Any, Any]:
        """Return the rows of a rank as a structured array, a field for each column.

        ``attempt`` says which start wrote a row, and ``repeated`` that a later one took the step
        again, after a resume or a load.

        Args:
            rank: whose rows.
            repeated: with the rows of steps that were taken again.

        Raises:
            JournalError: a file is damaged before its end.
        """
        parts = []
        for attempt in self.attempts:
            if rank in attempt.files:
                rows = _read_rows(attempt.files[rank], rank)
                part = np.zeros(len(rows), _READ)
                for name, _ in FIELDS:
                    part[name] = rows[name]
                part["attempt"] = attempt.number
                parts.append(part)
        rows = np.concatenate(parts) if parts else np.zeros(0, _READ)
        rows["repeated"] = _superseded(rows)
        return rows if repeated else rows[~rows["repeated"]]


_ABSENT = (
    "{} has no journal. It is written by accel.run(...) of an Accelerator(project_dir=...); give "
    "that folder, or its `journal` folder."
)


def _superseded(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return which rows are of steps that a later row took again."""
    if not len(rows):
        return np.zeros(0, bool)
    # A step that was left out has the number of the one before it, and takes none again.
    taken = np.where(rows["flags"] & SKIPPED, np.uint64(2**64 - 1), rows["step"])
    later = np.minimum.accumulate(taken[::-1])[::-1]
    following = np.append(later[1:], np.uint64(2**64 - 1))
    return np.asarray(rows["step"] >= following)


def _read_attempt(folder: str, number: int) -> Attempt:
    start = f"attempt-{number:04}-rank-"
    files: dict[int, str] = {}
    world_size = 1
    for name in _names(folder):
        rank = name.removeprefix(start).removesuffix(".rows")
        if name.startswith(start) and name.endswith(".rows") and rank.isdecimal():
            files[int(rank)] = path_in(folder, name)
    for file in files.values():
        if len(data := _bytes(file)[:HEADER_SIZE]) == HEADER_SIZE:
            world_size = unpack_header(data, file).world_size
            break
    marks = tuple(_read_marks(path_in(folder, f"attempt-{number:04}.jsonl")))
    return Attempt(number, world_size, marks, files)


def _read_marks(file: str) -> Iterator[dict[str, Any]]:
    lines = _bytes(file).split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            mark = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            if number == len(lines):  # a kill has cut the last line
                return
            raise JournalError(f"{file}: line {number} is damaged. Restore the file.") from None
        if isinstance(mark, dict):
            yield mark


def _read_rows(file: str, rank: int) -> np.ndarray[Any, Any]:
    """Return the rows of a file; a torn end is left out, as a kill or a power cut leaves it."""
    data = _bytes(file)
    if len(data) < HEADER_SIZE and MAGIC.startswith(data[: len(MAGIC)]):
        return np.zeros(0, _ROW)  # killed as it began
    header: Header = unpack_header(data, file)
    if header.rank != rank:
        raise JournalError(f"{file} holds the rows of rank {header.rank}: it was renamed.")
    body = memoryview(data)[HEADER_SIZE:]
    count = len(body) // ROW_SIZE
    whole = [row_is_whole(body[i * ROW_SIZE : (i + 1) * ROW_SIZE]) for i in range(count)]
    good = next((index for index in range(count, 0, -1) if whole[index - 1]), 0)
    if not all(whole[:good]):
        bad = whole.index(False)
        raise JournalError(
            f"{file}: row {bad} is damaged, and whole rows follow it. Restore the file from a "
            "backup, or remove it to read the other attempts."
        )
    return np.frombuffer(body[: good * ROW_SIZE], _ROW)


def _attempts(names: Sequence[str]) -> list[int]:
    """Return the numbers of the attempts among the names of a folder."""
    parts = (name.removeprefix("attempt-").removesuffix(".jsonl") for name in names)
    pairs = zip(names, parts, strict=True)
    return sorted(int(part) for name, part in pairs if name != part and part.isdecimal())


def _began(folder: str) -> float:
    """Return when the newest attempt of a folder began, for a choice between runs."""
    newest = _read_attempt(folder, _attempts(_names(folder))[-1])
    return float(newest.start.get("time", 0.0))


def _names(folder: str) -> list[str]:
    """Return the names in a folder, none if there is no such folder."""
    local = local_path(folder)
    if local is not None:
        try:
            return sorted(listdir(local))
        except (FileNotFoundError, NotADirectoryError):
            return []
    from loggers.trackers.line_file import filesystem

    fs, key = filesystem(folder)
    try:
        return sorted({base_name(str(entry)) for entry in fs.ls(key, False)})
    except (FileNotFoundError, NotADirectoryError):
        return []


def _bytes(file: str) -> bytes:
    """Return the content of a file, nothing if there is none."""
    local = local_path(file)
    try:
        if local is None:
            from loggers.trackers.line_file import filesystem

            fs, key = filesystem(file)
            return bytes(fs.cat_file(key))
        if path.getsize(local) > _MOST_BYTES:
            raise JournalError(f"{file} is too large for a journal.")
        with open(local, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return b""
