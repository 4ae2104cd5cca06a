"""Checksums taken while bytes are written, one for each part of a file's head or of a chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import xxhash

Write = Callable[["memoryview[int]"], object]


def checksums_of(data: memoryview[int], part_size: int) -> tuple[str, ...]:
    """Return the checksums of bytes in memory."""
    if len(data) <= part_size:
        return (xxhash.xxh3_64_hexdigest(data),) if len(data) else ()
    return tuple(
        xxhash.xxh3_64_hexdigest(data[begin : begin + part_size])
        for begin in range(0, len(data), part_size)
    )


class HashingWriter:
    """Writes bytes in pieces of at most one part, with a checksum for each part."""

    def __init__(self, write: Write, part_size: int) -> None:
        self._write = write
        self._part_size = part_size
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._checksums: list[str] = []

    def write(self, data: memoryview[int]) -> None:
        """Hash and write some bytes."""
        # One part at a time: it is still in the cache of the CPU when it is written.
        for begin, end in self._cuts(len(data)):
            piece = data[begin:end]
            self._hash.update(piece)
            self._write(piece)
            self._filled += end - begin
            if self._filled == self._part_size:
                self._finish_part()

    def _cuts(self, length: int) -> list[tuple[int, int]]:
        """Split a number of bytes where parts end."""
        edges = [0, *range(self._part_size - self._filled, length, self._part_size), length]
        return [(low, high) for low, high in itertools.pairwise(edges) if low < high]

    def _finish_part(self) -> None:
        """Close the current part."""
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()
        self._filled = 0

    def checksums(self) -> tuple[str, ...]:
        """Return the checksums of all parts; call once, after the last byte."""
        if self._filled:
            self._finish_part()
        return tuple(self._checksums)
