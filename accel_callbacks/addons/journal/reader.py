"""Journal: reads the attempts of a run, their rows and marks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath, listdir, path
from typing import Any

import numpy as np

from accel_callbacks.addons.journal.format import (
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
from accel_callbacks.addons.journal.marks import unpack_marks
from accel_callbacks.checkpoint.project import path_in
from checkpoint_io.local_files import local_path

__all__ = ["Attempt", "Journal"]

_ROW = np.dtype(list(FIELDS))
_READ = np.dtype([*FIELDS, ("attempt", "<u4"), ("repeated", "?")])
_FILE = re.compile(r"attempt-([0-9]{4})(?:-rank-([0-9]{5,9})\.rows|\.jsonl)")


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
            if rank == 0 and attempt.marks and 0 not in attempt.files:
                raise JournalError(
                    f"{self.folder} has no rows of rank 0 of attempt {attempt.number}. Restore "
                    "them from a backup, or move the marks of the attempt away to read the others."
                )
            if rank in attempt.files:
                rows = _read_rows(attempt.files[rank], rank)
                part = np.zeros(len(rows), _READ)
                for name, _ in FIELDS:
                    part[name] = rows[name]
                part["attempt"] = attempt.number
                parts.append(part)
        rows = np.concatenate(parts) if parts else np.zeros(0, _READ)
        rows["repeated"] = _find_repeated(rows)
        return rows if repeated else rows[~rows["repeated"]]


_ABSENT = (
    "{} has no journal. It is written by accel.run(...) of an Accelerator(project_dir=...); give "
    "that folder, or its `journal` folder."
)


def _find_repeated(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return which rows are of steps that a later row took again."""
    if not len(rows):
        return np.zeros(0, bool)
    # A step that was left out has the number of the one before it, and takes none again.
    taken = np.where(rows["flags"] & SKIPPED, np.uint64(2**64 - 1), rows["step"])
    later = np.minimum.accumulate(taken[::-1])[::-1]
    following = np.append(later[1:], np.uint64(2**64 - 1))
    return np.asarray(rows["step"] >= following)


def _read_attempt(folder: str, number: int) -> Attempt:
    files, world_size = _files(folder, number), 1
    for file in files.values():
        if len(data := _bytes(file)[:HEADER_SIZE]) == HEADER_SIZE:
            world_size = unpack_header(data, file).world_size
            break
    name = f"attempt-{number:04}.jsonl"
    file = path_in(folder, name)
    # On a disk it is there before the rows; in a store, the rows of a killed run may be alone.
    if local_path(folder) is not None and name not in _names(folder):
        raise JournalError(f"{file} is missing, and its rows are there. Restore it from a backup.")
    return Attempt(number, world_size, unpack_marks(_bytes(file), file), files)


def _files(folder: str, number: int) -> dict[int, str]:
    """Return the files of rows of an attempt by rank."""
    files = {}
    for name in _names(folder):
        found = _FILE.fullmatch(name)
        if found is not None and found[2] is not None and int(found[1]) == number:
            files[int(found[2])] = path_in(folder, name)
    return files


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
    return sorted({int(found[1]) for found in map(_FILE.fullmatch, names) if found is not None})


def _began(folder: str) -> float:
    """Return when the newest attempt of a folder began, for a choice between runs.

    One whose marks are damaged hides no other run: its rows tell when it began.
    """
    newest = _attempts(_names(folder))[-1]
    with suppress(JournalError, OSError):
        if start := _read_attempt(folder, newest).start:
            return float(start["time"])
    for file in _files(folder, newest).values():
        with suppress(JournalError, OSError):
            return unpack_header(_bytes(file), file).time
    return 0.0


def _names(folder: str) -> list[str]:
    """Return the names in a folder, none if there is no such folder."""
    local = local_path(folder)
    try:
        if local is not None:
            return sorted(listdir(local))
        from loggers.trackers.line_file import list_names

        return list_names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _bytes(file: str) -> bytes:
    """Return the content of a file, nothing if there is none."""
    local = local_path(file)
    try:
        if local is None:
            from loggers.trackers.line_file import read_object

            return read_object(file)
        if path.isdir(local):
            raise JournalError(f"{file} is a folder, and no file of a journal: move it away.")
        with open(local, "rb") as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return b""
