"""The tracker that writes a journal: rows as bytes, marks as JSON lines, on the hub's threads."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import time as clock
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from accel_callbacks.addons.journal.format import (
    UNKNOWN,
    Header,
    pack_header,
    pack_row,
)
from accel_callbacks.addons.journal.marks import pack_mark, plain_mark
from accel_callbacks.checkpoint.project import path_in
from checkpoint_io.local_files import advised, base_name, local_path
from loggers import RunInfo, Scalar, Status, Tracker
from loggers.trackers.line_file import PRIVATE, LineFile, filesystem, open_lines

__all__ = ["JournalWriter", "attempt_names", "next_attempt"]

_MARKS = "attempt-{:04}.jsonl"
_ROWS = "attempt-{:04}-rank-{:05}.rows"
_MOST_ATTEMPTS = 9999
_BLOCK = 512  # rows that are packed together
_MOST_WAITING = 1 << 17  # rows that are not packed yet: more than a full disk lets wait as bytes
_COMPILED = "_compile.compile_inner"  # torch's name of all that torch.compile does


class JournalWriter(Tracker):
    """Writes the rows of this rank, and on rank 0 the marks, of one attempt of a run.

    A hub reads values from their devices, calls it on a thread of its own about twice a second, and
    keeps its errors from the run.

    Args:
        folder: of the run's journal, path or URL.
        header: of the file of rows.
        facts: returns what is told of the start, on rank 0; it may take some seconds.

    Attributes:
        began: when the span of the first row begins, in Unix seconds.
        waiting: rows whose values are all on the host, which its thread packs: step, epoch, batch,
            position, seconds of data, saves and evaluations so far, time, time of the last
            backward, learning rates, states of generators, losses, norm, flags.
    """

    name = "journal"
    main_process_only = False
    lossless = owns_files = True

    def __init__(
        self, folder: str, header: Header, facts: Callable[[], Mapping[str, Any]] | None
    ) -> None:
        self._folder = folder
        self._header = header
        self._facts = facts
        self._rows: LineFile | None = None
        self._marks: LineFile | None = None
        self._checksum = 0  # of the last mark
        self._totals: Sequence[float] = (
            0.0,
            0.0,
            0.0,
        )  # seconds of data, saves and evaluations so far
        self._compiled = self._compiled_before = 0.0
        self.began = header.time
        self.waiting: deque[tuple[Any, ...]] = deque(maxlen=_MOST_WAITING)

    @property
    def unflushed(self) -> bool:
        """True while it is open: rows may wait, of which the hub does not know."""
        return self._rows is not None

    def start(self, run: RunInfo) -> None:
        """Create the files, which an attempt has for itself."""
        rows, marks = attempt_names(self._header.attempt, self._header.rank)
        self._rows = open_lines(self._folder, rows)
        self._rows.add(pack_header(self._header))
        self._compiled = self._compiled_before = _compile_seconds()
        if self._header.rank == 0:
            self._marks = open_lines(self._folder, marks, private=True)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the mark of the start, with facts that take longer than a step."""
        if self._facts is not None:
            self._mark({**config, **self._facts()})
            self.flush()

    def log(self, scalars: Mapping[str, Scalar], step: int, *, time: float | None = None) -> None:
        """Add one row."""
        self.log_rows([(scalars, step, clock.time() if time is None else time)])

    def log_rows(self, rows: Sequence[tuple[Mapping[str, Scalar], int, float]]) -> None:
        """Add rows with values of a device, after those that waited; and marks, which are JSON.

        They reach the files at the next flush.
        """
        self._pack_waiting()
        assert self._rows is not None
        self._rows.make_room()  # before adding, because a call that fails is retried
        self._add([_read(values) for values, _, _ in rows if "mark" not in values])
        for values, _, _ in rows:
            if "mark" in values:
                self._mark(json.loads(str(values["mark"])))

    def _pack_waiting(self) -> None:
        """Add the rows that wait, which reach the file at the next flush."""
        while self.waiting:
            assert self._rows is not None
            self._rows.make_room()
            count = min(len(self.waiting), _BLOCK)
            self._add([self.waiting.popleft() for _ in range(count)])

    def _add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        assert self._rows is not None
        self._rows.add(b"".join(map(self._pack, rows)))

    def flush(self) -> None:
        """Append what is pending."""
        self._note_compiled()
        self._pack_waiting()
        for file in self._files():
            file.flush()

    def finish(self, status: Status = "success") -> None:
        """Append the rest, sync and close."""
        self._note_compiled()
        try:
            self._pack_waiting()
        finally:
            files, self._rows, self._marks = self._files(), None, None
            for file in files:
                file.close()

    def _files(self) -> list[LineFile]:
        return [file for file in (self._rows, self._marks) if file is not None]

    def _mark(self, facts: Mapping[str, Any]) -> None:
        if self._marks is not None:
            line, self._checksum = pack_mark(plain_mark(facts), self._checksum)
            self._marks.add(line)

    def _pack(self, row: tuple[Any, ...]) -> bytes:
        *known, rates, states, losses, norm, flags = row
        step, epoch, batch, position, *totals, time, met = known
        digest = host_digest = 0
        if states:
            generators, host_generators = states
            digest = _digest(b"".join(state.numpy() for state in generators))
            if host_generators:
                host_digest = _digest(b"".join(map(_state_bytes, host_generators)))
        # A run that starts over counts from zero again.
        pairs = zip(totals, self._totals, strict=True)
        spent = [now - before if now >= before else now for now, before in pairs]
        began = self.began + sum(spent)
        step_s, forward_s = max(time - began, 0.0), max(met - began, 0.0)
        self._totals, self.began = totals, time
        return pack_row(
            (
                *(step, max(epoch, 0), max(batch, 0)),
                UNKNOWN if position is None else position,
                sum(losses) / len(losses) if losses else math.nan,
                math.nan if norm is None else norm,
                rates[0] if rates else math.nan,
                time,
                _digest(struct.pack(f"<{len(losses)}d", *losses)),
                _digest(struct.pack(f"<{len(rates)}d", *rates)),
                digest,
                host_digest,
                *(*spent, step_s, min(forward_s, step_s)),
                min(len(losses), 65535),
                flags,
            )
        )

    def _note_compiled(self) -> None:
        """Mark how long torch.compile has taken so far, if that has grown."""
        total = _compile_seconds()
        if total > self._compiled:
            self._compiled = total
            seconds = total - self._compiled_before
            self._mark({"kind": "compile", "time": clock.time(), "seconds": seconds})


def _compile_seconds() -> float:
    """Return the seconds that torch.compile has taken in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    metrics = getattr(dynamo, "compilation_time_metrics", None) or {}
    return math.fsum(list(metrics.get(_COMPILED, ())))


def _read(values: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return a row with the numbers that a hub has read from a device."""
    *known, losses, _, flags = values["row"]
    numbers = [values.get(index, math.nan) for index in range(len(losses))]
    return (*known, numbers, values.get("norm"), flags)


def _digest(data: bytes) -> int:
    """Return the xxh32 of bytes; never 0, which says that there were none."""
    return xxhash.xxh32_intdigest(data) or 1


def _state_bytes(state: Any) -> bytes:
    return repr(state).encode()


def attempt_names(attempt: int, rank: int = 0) -> tuple[str, str]:
    """Return the names of the files of rows and of marks of an attempt."""
    return _ROWS.format(attempt, rank), _MARKS.format(attempt)


def next_attempt(folder: str) -> int:
    """Create the file of marks of a new attempt on rank 0, and return its number.

    Raises:
        OSError: the folder cannot be written.
    """
    local = local_path(folder)
    if local is None:
        fs, key = filesystem(folder)
        taken = set(map(base_name, fs.ls(key, False))) if fs.exists(key) else set()
        return next(n for n in range(1, _MOST_ATTEMPTS) if attempt_names(n)[1] not in taken)
    with advised(local):
        os.makedirs(local, exist_ok=True)
    for attempt in range(1, _MOST_ATTEMPTS):
        try:
            # Exclusively: another process may start the same run.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            os.close(os.open(path_in(local, attempt_names(attempt)[1]), flags, PRIVATE))
        except FileExistsError:
            continue
        return attempt
    raise OSError(f"{folder} holds {_MOST_ATTEMPTS} attempts: move it away")
