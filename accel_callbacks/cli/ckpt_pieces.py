"""The bytes of one file of a checkpoint, in order, each verified before it is handed out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from checkpoint_io.loader.source import Source
from checkpoint_io.loader.transfer import Bytes, Want

WINDOW = 32 << 20


class _Run(NamedTuple):
    """Bytes that have checksums of their own: the head of a file, or a chunk of a tensor."""

    begin: int
    end: int
    checksums: tuple[str, ...]
    label: str


class _Shifted:
    """Puts the bytes of a run where they belong in a window of the file."""

    def __init__(self, window: Bytes, shift: int) -> None:
        self._window, self._shift = window, shift

    def take(self, offset: int, data: Bytes) -> None:
        """Copy the bytes that start `offset` bytes after the start of the run."""
        at = self._shift + offset
        self._window[at : at + data.size] = data


class Pieces:
    """Iterates over a file; the next piece is read while one is being written."""

    def __init__(self, source: Source, index: int) -> None:
        self._source, self._index = source, index

    def __iter__(self) -> Iterator[memoryview[int]]:
        windows = list(self._windows())
        with ThreadPoolExecutor(1) as pool:
            ahead = [pool.submit(self._read, window) for window in windows[:1]]
            for number in range(len(windows)):
                data = ahead.pop().result()
                if number + 1 < len(windows):
                    ahead.append(pool.submit(self._read, windows[number + 1]))
                yield data.data

    def _runs(self) -> list[_Run]:
        """List what the file consists of, in its order."""
        manifest, index = self._source.manifest, self._index
        entry = manifest.files[index]
        head = _Run(0, entry.covered, entry.checksums, "")
        chunks = [
            _Run(chunk.begin, chunk.end, chunk.checksums, key)
            for key, chunk in manifest.tensors_of_file(index)
            if chunk.end > chunk.begin
        ]
        return [head, *chunks]

    def _windows(self) -> Iterator[list[tuple[_Run, range]]]:
        """Cut the file, at the edges of parts, into windows of some size."""
        size = self._source.manifest.part_size
        room = max(1, WINDOW // size)
        window: list[tuple[_Run, range]] = []
        held = 0
        for run in self._runs():
            done = 0
            while done < len(run.checksums):
                count = min(room - held, len(run.checksums) - done)
                window.append((run, range(done, done + count)))
                done, held = done + count, held + count
                if held >= room:
                    yield window
                    window, held = [], 0
        if window:
            yield window

    def _read(self, window: list[tuple[_Run, range]]) -> Bytes:
        """Read and verify one window."""
        size = self._source.manifest.part_size
        first, parts = window[0]
        last, tail = window[-1]
        begin = first.begin + parts.start * size
        end = min(last.end, last.begin + tail.stop * size)
        data = np.empty(end - begin, dtype=np.uint8)
        wants = [
            Want(
                *(self._index, run.begin, run.end, run.checksums, run.label),
                sink=_Shifted(data, run.begin - begin),
                parts=numbers,
            )
            for run, numbers in window
        ]
        self._source.transfer(wants)
        return data


def pieces_of(source: Source, index: int) -> Iterator[memoryview[int]]:
    """Yield the verified bytes of a file, in order."""
    return iter(Pieces(source, index))
