"""Checksums by part: taken while a file is written, verified before a byte of it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import xxhash

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.store import RangeReader


class HashingWriter:
    """Passes bytes on in pieces of at most one part, and keeps a checksum for each part."""

    def __init__(self, write: Callable[[memoryview[int]], object], part_size: int) -> None:
        self._write = write
        self._part_size = part_size
        self._hash = xxhash.xxh3_64()
        self._filled = 0
        self._checksums: list[str] = []
        self.size = 0

    def write(self, data: memoryview[int]) -> None:
        """Write some bytes."""
        view = memoryview(data)
        while view:
            piece = view[: self._part_size - self._filled]
            self._hash.update(piece)
            self._write(piece)
            self.size += len(piece)
            self._filled += len(piece)
            if self._filled == self._part_size:
                self._finish_part()
            view = view[len(piece) :]

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


def verified_parts(
    reader: RangeReader,
    name: str,
    size: int,
    part_size: int,
    checksums: Sequence[str],
    inside: Callable[[int, int], str] = lambda begin, end: "",
) -> Iterator[tuple[int, memoryview[int]]]:
    """Yield each part with its offset once its checksum is right; `inside` names what it holds."""
    check_size(reader, name, size)
    for number, expected in enumerate(checksums):
        begin = number * part_size
        end = min(begin + part_size, size)
        part = reader.read(begin, end)
        if xxhash.xxh3_64_hexdigest(part) != expected:
            raise CorruptCheckpointError(
                f"{name}: bytes {begin} to {end} are not the ones saved (checksum differs)"
                f"{inside(begin, end)}; copy the file again or load an older checkpoint"
            )
        yield begin, part


def check_size(reader: RangeReader, name: str, size: int) -> None:
    """Refuse a file that is longer or shorter than it was."""
    if reader.size != size:
        raise CorruptCheckpointError(
            f"{name}: {reader.size} bytes long, {size} were saved (truncated or replaced)"
        )


class Scatter:
    """Copies the bytes of wanted ranges, out of parts that come in file order, into tensors."""

    def __init__(self, ranges: Sequence[tuple[int, int, torch.Tensor]]) -> None:
        # an empty tensor has no bytes to wait for
        self._ranges = sorted((r for r in ranges if r[1] > r[0]), key=lambda r: r[0])
        self._next = 0

    def feed(self, offset: int, part: memoryview[int]) -> None:
        """Take one part."""
        end = offset + len(part)
        source = _view(part)
        for index in range(self._next, len(self._ranges)):
            begin, stop, target = self._ranges[index]
            if begin >= end:
                break
            low, high = max(begin, offset), min(stop, end)
            target[low - begin : high - begin] = source[low - offset : high - offset]
            if stop <= end:
                self._next = index + 1


def _view(part: memoryview[int]) -> torch.Tensor:
    """Look at a buffer as a tensor of bytes; torch has none that is read-only, so copy that."""

    array = np.frombuffer(part, dtype=np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)
