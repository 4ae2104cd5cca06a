"""The tensors of a manifest, checked: boxes that fill their tensor, bytes that fill their file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from checkpoint_io.format.manifest import Chunk, FileEntry, TensorEntry
from checkpoint_io.layout.checks import (
    HEX16S,
    LIMIT,
    Bad,
    integers,
    joined_checksums,
    show,
    typed,
)
from checkpoint_io.layout.dtypes import ITEMSIZE
from checkpoint_io.sharding.boxes import overlapping

_MAX_CHUNKS = 65536


def parse_tensors(value: Any, files: Sequence[FileEntry], part_size: int) -> dict[str, TensorEntry]:
    """Check every tensor entry, and that each tensors file is filled without a hole."""
    parser = _Parser(files, part_size)
    tensors = {}
    for key, item in typed(value, dict, "tensors").items():
        try:
            tensors[key] = parser.tensor(item)
        except Bad as problem:
            raise Bad(f"tensor {key!r:.200}: {problem}") from None
    for entry, ranges in zip(files, parser.used, strict=True):
        _refuse_holes(entry, ranges)
    return tensors


class _Parser:
    """Checks tensors one after the other; `used` collects which bytes of each file they claim."""

    def __init__(self, files: Sequence[FileEntry], part_size: int) -> None:
        self._files = files
        self._part_size = part_size
        self.used: list[list[tuple[int, int]]] = [[] for _ in files]

    def tensor(self, value: Any) -> TensorEntry:
        """Check that a tensor's chunks are inside it, do not overlap and fill it."""
        entry = self._small(value)
        if entry is not None:
            return entry
        if type(value) is not list or not 3 <= len(value) <= _MAX_CHUNKS + 2:
            raise Bad(f"must be a dtype, a shape and 1 to {_MAX_CHUNKS} chunks")
        dtype = value[0]
        if type(dtype) is not str or dtype not in ITEMSIZE:
            raise Bad(f"unknown dtype {show(dtype)}")
        shape, itemsize = integers(value[1], "its shape"), ITEMSIZE[dtype]
        if math.prod([n or 1 for n in shape]) * itemsize > LIMIT:
            raise Bad("an absurd shape")
        if len(value) == 3:
            only = self._chunk(value[2], shape, itemsize)
            if only.shape != shape:
                raise Bad("its chunk does not cover it")
            return TensorEntry(dtype, shape, (only,))
        chunks = tuple([self._chunk(row, shape, itemsize) for row in value[2:]])
        volume = sum([math.prod(chunk.shape) for chunk in chunks])
        if volume != math.prod(shape) or overlapping(
            [(c.offsets, c.shape) for c in chunks if c.end > c.begin]
        ):
            raise Bad("its chunks do not cover it exactly once")
        return TensorEntry(dtype, shape, chunks)

    def _small(self, value: Any) -> TensorEntry | None:
        """Check the usual entry, one whole chunk of at most one part; None says: look closer."""
        try:
            dtype, dims, (index, begin, end, sums) = value
            entry, itemsize = self._files[index], ITEMSIZE[dtype]
        except (TypeError, ValueError, KeyError, IndexError):
            return None
        plain = type(dims) is list and type(sums) is str and len(sums) == 16 and len(dims) <= 4
        if not (plain and type(index) is type(begin) is type(end) is int and index >= 0):
            return None
        size = itemsize
        for n in dims:
            if type(n) is not int or not 0 < n <= self._part_size:
                return None
            size *= n
        inside = entry.kind == "tensors" and entry.covered <= begin < end <= entry.size
        if not inside or size != end - begin or size > self._part_size or not HEX16S(sums):
            return None
        self.used[index].append((begin, end))
        shape = tuple(dims)
        offsets = (0,) * len(shape)
        return TensorEntry(dtype, shape, (Chunk(index, offsets, shape, begin, end, (sums,)),))

    def _chunk(self, row: Any, shape: tuple[int, ...], itemsize: int) -> Chunk:
        """Check that a chunk lies inside its tensor and its bytes inside their file."""
        if type(row) not in (list, tuple) or len(row) not in (4, 6):
            raise Bad("a chunk that has not 4 or 6 fields")
        index, begin, end = row[0], row[1], row[2]
        # true and false are not numbers, so no isinstance
        if not (type(index) is type(begin) is type(end) is int and 0 <= index < len(self._files)):
            raise Bad("a chunk whose file, begin and end are not whole numbers, or not a file")
        entry = self._files[index]
        if entry.kind != "tensors" or not entry.covered <= begin <= end <= entry.size:
            raise Bad(f"bytes {show(begin)} to {show(end)} are not in {entry.name}")
        offsets, extent = ((0,) * len(shape), shape) if len(row) == 4 else _box(row, shape)
        size = end - begin
        if math.prod(extent) * itemsize != size:
            raise Bad(f"{size} bytes do not hold a chunk of shape {list(extent)}")
        if size:
            self.used[index].append((begin, end))
        sums = joined_checksums(row[3], size, self._part_size)
        return Chunk(index, offsets, extent, begin, end, sums)


def _box(row: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Check that a box lies inside its tensor."""
    at, lengths = integers(row[4], "its offsets"), integers(row[5], "the shape of a chunk")
    if not len(at) == len(lengths) == len(shape) or any(
        a + n > total for a, n, total in zip(at, lengths, shape, strict=True)
    ):
        raise Bad("a chunk that reaches outside its shape")
    return at, lengths


def _refuse_holes(entry: FileEntry, ranges: list[tuple[int, int]]) -> None:
    """Refuse bytes of a tensors file that two chunks claim, or none."""
    if entry.kind != "tensors":
        return
    position = entry.covered
    for begin, end in sorted(ranges):
        if begin < position:
            raise Bad(f"two tensors claim the same bytes of {entry.name}")
        if begin > position:
            break
        position = end
    if position != entry.size:
        raise Bad(f"no tensor claims byte {position} of {entry.name}")
