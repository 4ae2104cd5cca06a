"""The read engine: fetch byte ranges of a checkpoint, verify them, write them into tensors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.manifest import Manifest
from checkpoint_io.loader.files import in_tensors
from checkpoint_io.progress import TransferProgress
from checkpoint_io.sharding.boxes import Axes, Axis, Shape, blocks, intersect, merge, volume
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.open import Store

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

GAP_BYTES = 64 << 10  # unneeded bytes that are read along rather than split a span
_STAGE_BYTES = 16 << 20
# numpy has no bfloat16 and the like: elements are copied as integers of the same size
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_NUMPY_HAS = frozenset((torch.float32, torch.float64, torch.float16, torch.int64, torch.int32))


class Sink(Protocol):
    """A destination for verified bytes of one chunk (or of a file's head).

    Called on any thread, with the parts in any order.
    """

    def take(self, offset: int, data: Bytes) -> None:
        """Store the bytes that start `offset` bytes after the start of the chunk."""


class Want(NamedTuple):
    """A read of checksummed bytes of a file: a chunk, or the head that a file entry covers.

    `label` is the tensor's key ("" for a head). Without a sink the bytes are only verified. `parts`
    are the numbers of the needed parts; None means all.
    """

    file: int
    begin: int
    end: int
    checksums: Sequence[str]
    label: str
    sink: Sink | None = None
    parts: Iterable[int] | None = None


class _Part(NamedTuple):
    """One checksummed part of a file, and its sinks."""

    begin: int
    end: int
    checksum: str
    label: str
    offset: int
    sinks: list[Sink]


class Transfer:
    """Reads each wanted part of one checkpoint once, and passes it to its sinks when verified.

    Attributes:
        nbytes: number of bytes to read.
        touched: whether a sink has received bytes yet.
    """

    def __init__(
        self, store: Store, manifest: Manifest, wants: Iterable[Want], check: bool = True
    ) -> None:
        self._store, self._manifest, self._check = store, manifest, check
        self._spans: list[Span] = []
        self._contents: list[list[_Part]] = []
        for file, parts in sorted(self._collect(wants).items()):
            self._form_spans(manifest.files[file].name, [parts[at] for at in sorted(parts)])
        self.nbytes = sum(span.end - span.begin for span in self._spans)
        self.touched = False
        self._waiting = bytearray(b"\1") * len(self._spans)
        self._guard = threading.Lock()
        self._damages: list[CorruptCheckpointError] = []  # their messages name the tensor
        self._progress: TransferProgress | None = None

    def _collect(self, wants: Iterable[Want]) -> dict[int, dict[int, _Part]]:
        """Return the parts by file and first byte; a part with several sinks appears once."""
        size = self._manifest.part_size
        files: dict[int, dict[int, _Part]] = {}
        for file, begin, end, checksums, label, sink, numbers in wants:
            parts = files.setdefault(file, {})
            # fast path of small tensors, of which there may be tens of thousands
            if numbers is None and len(checksums) == 1 and begin not in parts:
                sinks = [] if sink is None else [sink]
                parts[begin] = _Part(begin, end, checksums[0], label, 0, sinks)
                continue
            for number in range(len(checksums)) if numbers is None else numbers:
                offset = number * size
                at = begin + offset
                part = parts.get(at)
                if part is None:
                    stop = at + size
                    part = _Part(
                        at, stop if stop < end else end, checksums[number], label, offset, []
                    )
                    parts[at] = part
                if sink is not None:
                    part.sinks.append(sink)
        return files

    def _form_spans(self, name: str, parts: list[_Part]) -> None:
        """Join parts of a file that are close to each other into spans of limited size."""
        contents: list[_Part] = []
        for part in parts:
            full = contents and part.end - contents[0].begin > self._store.span_bytes
            if contents and (full or part.begin - contents[-1].end > GAP_BYTES):
                self._add_span(name, contents)
                contents = []
            contents.append(part)
        if contents:
            self._add_span(name, contents)

    def _add_span(self, name: str, contents: list[_Part]) -> None:
        self._spans.append(Span(name, contents[0].begin, contents[-1].end))
        self._contents.append(contents)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return the wanted parts as file, first and last byte (exclusive); neighbors joined."""
        numbers = {entry.name: number for number, entry in enumerate(self._manifest.files)}
        ranges: list[tuple[int, int, int]] = []
        for span, contents in zip(self._spans, self._contents, strict=True):
            file = numbers[span.name]
            for part in contents:
                if ranges and ranges[-1][0] == file and ranges[-1][2] == part.begin:
                    ranges[-1] = (file, ranges[-1][1], part.end)
                else:
                    ranges.append((file, part.begin, part.end))
        return ranges

    def run(self, progress: TransferProgress | None = None) -> None:
        """Read everything; raise the first error, after which some sinks may hold bytes."""
        if not self._spans:
            return
        self._progress = progress
        try:
            self._store.fetch(self._spans, self._deliver)
        except CorruptCheckpointError as error:
            if any(error is named for named in self._damages):
                raise
            raise self._with_labels(error) from error
        if any(self._waiting):
            missed = self._spans[self._waiting.index(1)]
            raise CheckpointError(
                f"{self._store.url}/{missed.name}: bytes {missed.begin} to {missed.end} were never "
                "delivered by the store; load again"
            )

    def _deliver(self, index: int, data: memoryview[int]) -> None:
        """Verify the parts of one span and pass them to their sinks."""
        span = self._spans[index]
        if len(data) != span.end - span.begin:
            raise CorruptCheckpointError(
                f"{self._store.url}/{span.name}: {len(data)} bytes came for {span.begin} "
                f"to {span.end}"
            )
        # A second delivery would count its elements again, and a staged target be copied too early.
        with self._guard:
            if not self._waiting[index]:
                raise CheckpointError(f"{self._store.url}/{span.name}: a span was delivered twice")
            self._waiting[index] = 0
        source: Bytes = np.frombuffer(data, dtype=np.uint8)
        # part by part, so that no byte reaches a tensor before its own checksum is verified
        base, check, digest = span.begin, self._check, xxhash.xxh3_64_hexdigest
        for part in self._contents[index]:
            piece = source[part.begin - base : part.end - base]
            if check and digest(piece) != part.checksum:  # type: ignore[arg-type]
                piece = self._read_again(span.name, part)
            for sink in part.sinks:
                self.touched = True
                sink.take(part.offset, piece)
        if self._progress is not None:
            self._progress.add(len(data))

    def _read_again(self, name: str, part: _Part) -> Bytes:
        """Return a part that came with another checksum from a second read; raise if it is bad."""
        # bits can flip on the way here (network, memory): damage is what a second read finds too
        self._store.forget(name)
        self._store.reconnect()  # what flips them may sit in the way of one connection alone
        read: list[Bytes] = []
        self._store.fetch(
            [Span(name, part.begin, part.end)],
            lambda _, data: read.append(np.frombuffer(bytes(data), dtype=np.uint8)),
        )
        if read and xxhash.xxh3_64_hexdigest(read[0]) == part.checksum:  # type: ignore[arg-type]
            return read[0]
        raise self._damage(name, part)

    def _damage(self, name: str, part: _Part) -> CorruptCheckpointError:
        """Return the error for a part whose checksum differs, with its tensor."""
        owner = f", in tensor {part.label}" if part.label else ""
        error = CorruptCheckpointError(
            f"{self._store.url}/{name}: bytes {part.begin} to {part.end} are not the ones saved "
            f"(checksum differs){owner}; copy the file again or load an older checkpoint"
        )
        self._damages.append(error)
        return error

    def _with_labels(self, error: CorruptCheckpointError) -> CorruptCheckpointError:
        """Return an error of the store with the tensors of the file that it names."""
        labels = [
            part.label
            for span, contents in zip(self._spans, self._contents, strict=True)
            if span.name in str(error)
            for part in contents
        ]
        return CorruptCheckpointError(f"{error}{in_tensors(labels)}")


def sinks_for(
    shape: Shape, axes: Axes, dtype: torch.dtype, target: torch.Tensor
) -> Iterator[tuple[Axes, Sink]]:
    """Yield the sinks that fill `target` with a box of a chunk, each with its part of the box."""
    if not is_plain_memory(target) or target.dtype != dtype:
        limit = max(1, _STAGE_BYTES // dtype.itemsize)
        for piece, place in _pieces(axes, limit):
            yield piece, Staged(shape, piece, dtype, target[place])
        return
    merged = merge(shape, axes)[1]
    if len(merged) == 1 and merged[0].step == 1 and target.is_contiguous():
        yield axes, Flat(flat_bytes(target), merged[0].start * dtype.itemsize)
        return
    yield axes, Boxed(shape, axes, target)


def is_plain_memory(target: torch.Tensor) -> bool:
    """Return whether numpy can write into the tensor's memory."""
    return target.is_cpu and not target.is_conj() and not target.is_neg()


def flat_bytes(target: torch.Tensor) -> Bytes:
    """Return a view of a contiguous CPU tensor as bytes."""
    if target.requires_grad:
        target = target.detach()
    if target.dtype not in _NUMPY_HAS:
        target = target.view(-1).view(torch.uint8)
    array: Bytes = target.numpy()
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


def _pieces(axes: Axes, limit: int) -> Iterator[tuple[Axes, tuple[slice, ...]]]:
    """Cut a box into boxes of at most `limit` elements; yield each with its index in the box."""
    total = volume(axes)
    dim = next((n for n, axis in enumerate(axes) if axis.length > 1), None)
    if total <= limit or dim is None:
        yield axes, tuple(slice(0, axis.length) for axis in axes)
        return
    axis = axes[dim]
    rows = max(1, limit // (total // axis.length))
    for first in range(0, axis.length, rows):
        count = min(rows, axis.length - first)
        part = Axis(axis.start + first * axis.step, count, axis.step)
        for piece, place in _pieces((*axes[:dim], part, *axes[dim + 1 :]), limit):
            inner = place[dim]
            moved = slice(first + inner.start, first + inner.stop)
            yield piece, (*place[:dim], moved, *place[dim + 1 :])


class Flat:
    """Contiguous memory that holds the chunk's bytes from `start` on."""

    __slots__ = ("_memory", "_start")

    def __init__(self, memory: Bytes, start: int = 0) -> None:
        self._memory = memory
        self._start = start

    def take(self, offset: int, data: Bytes) -> None:
        """Copy the bytes that lie in this memory."""
        memory, at = self._memory, offset - self._start
        if at == 0 and data.size == memory.size:
            memory[:] = data
            return
        stop = min(at + data.size, memory.size)
        if at < 0:
            data, at = data[-at:], 0
        if stop > at:
            memory[at:stop] = data[: stop - at]


class Boxed:
    """Strided CPU memory for a box of a chunk."""

    def __init__(self, shape: Shape, axes: Axes, target: torch.Tensor) -> None:
        self._shape, self._axes = shape, axes
        self._itemsize = target.element_size()
        raw = (target if target.dim() else target.reshape(1)).view(_RAW[self._itemsize])
        # Dimensions that lie together are joined: fewer blocks, and longer runs for numpy to copy.
        merged_shape, merged = merge(shape, axes)
        try:
            raw = raw.view(tuple(axis.length for axis in merged))
            self._shape, self._axes = merged_shape, merged
        except RuntimeError:  # the target's strides do not allow it
            pass
        self._array = raw.numpy()

    def take(self, offset: int, data: Bytes) -> None:
        """Copy the elements of the box that lie in these bytes."""
        self.count(offset, data)

    def count(self, offset: int, data: Bytes) -> int:
        """Copy the elements of the box that lie in these bytes; return their number."""
        items = data.view(_NUMPY[self._itemsize])
        first, at, copied = offset // self._itemsize, 0, 0
        for offsets, lengths in blocks(self._shape, first, first + items.size):
            size = math.prod(lengths)
            common = intersect(self._axes, offsets, lengths)
            if common is not None:
                piece = items[at : at + size].reshape(lengths)[common[0]]
                self._array[common[1]] = piece
                copied += piece.size
            at += size
        return copied


class Staged:
    """A target on another device or of another dtype: a host buffer, then one copy."""

    def __init__(self, shape: Shape, axes: Axes, dtype: torch.dtype, target: torch.Tensor) -> None:
        self._shape, self._axes, self._dtype, self._target = shape, axes, dtype, target
        self._missing = volume(axes)
        self._guard = threading.Lock()
        self._buffer: torch.Tensor | None = None
        self._box: Boxed | None = None

    def take(self, offset: int, data: Bytes) -> None:
        """Fill the buffer; with the last bytes, copy it to the target and free it."""
        with self._guard:
            if self._box is None:
                extent = [axis.length for axis in self._axes]
                pinned = self._target.is_cuda
                self._buffer = torch.empty(
                    extent, dtype=self._dtype, device="cpu", pin_memory=pinned
                )
                self._box = Boxed(self._shape, self._axes, self._buffer)
            box = self._box
        copied = box.count(offset, data)
        # Parts come in any order and on several threads; the one that brings the last elements
        # copies.
        with self._guard:
            self._missing -= copied
            if self._missing:
                return
            buffer, self._buffer, self._box = self._buffer, None, None
        assert buffer is not None
        self._target.copy_(buffer)
