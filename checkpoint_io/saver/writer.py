"""Write the files of one rank, with checksums taken on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypedDict

import torch
import xxhash

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.manifest import PART_SIZE, FileEntry
from checkpoint_io.format.safetensors import NAMES, box_name, host_pieces, layout, view_of
from checkpoint_io.sharding.local_tensors import WriteBox
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused, for_each

Write = Callable[["memoryview[int]"], object]
_THREADS = 4  # files written at a time; each needs up to about 64 MiB of buffers
_SMALL = 256 * 1024  # bytes; smaller tensors are copied to the host in batches
_BATCH = 4 * 1024 * 1024


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
        while data:
            piece = data[: self._part_size - self._filled]
            self._hash.update(piece)
            self._write(piece)
            self._filled += len(piece)
            if self._filled == self._part_size:
                self._finish_part()
            data = data[len(piece) :]

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


class RankReport(TypedDict):
    """The files that one rank wrote, in plain values, which any process group can carry.

    `chunks` are (key, dtype, full shape, row as in the manifest); rows count files from the first
    one of this rank. `tied` are keys of tied tensors, to those under which they are stored.
    """

    files: list[dict[str, Any]]
    chunks: list[tuple[Any, ...]]
    tied: dict[str, str]


class RankWriter:
    """Writes the files of one rank, and removes them if the save fails."""

    def __init__(
        self, store: Store, save_id: str, rank: int, on_written: Callable[[int], None]
    ) -> None:
        self._store = store
        self._save_id = save_id
        self._rank = rank
        self._on_written = on_written
        self._created: list[str] = []
        self._stopped = threading.Event()

    def write_objects(self, name: str, data: bytes) -> dict[str, Any]:
        """Write one JSON file; return its entry in the manifest."""
        self._created.append(name)
        view = memoryview(data)
        with self._store.create(name, len(data)) as write:
            self._watch_writes(write)(view)
        sums = checksums_of(view, PART_SIZE)
        return FileEntry(name, len(data), "objects", self._rank, len(data), sums).to_json()

    def write_tensors(
        self, files: Sequence[tuple[str, Sequence[WriteBox]]], labels: dict[str, str]
    ) -> RankReport:
        """Write tensor files, several at a time."""
        # Before the first byte, so that `undo` covers files that failed midway.
        self._created += [name for name, _ in files]
        written: dict[int, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {}

        def write(number: int) -> None:
            try:
                written[number] = self._write_file(number, *files[number], labels)
            except BaseException:
                self.stop()
                raise

        for_each(write, range(len(files)), _THREADS, self.stop)
        report = RankReport(files=[], chunks=[], tied={})
        for number in range(len(files)):
            entry, chunks = written[number]
            report["files"].append(entry)
            report["chunks"] += chunks
        return report

    def _write_file(
        self, number: int, name: str, boxes: Sequence[WriteBox], labels: dict[str, str]
    ) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """Stream one tensor file; return its entry in the manifest, and its chunks."""
        with collector_paused():
            # `layout` keeps the order of the boxes: the plan has sorted them as it does.
            named = [
                (box.key if box.whole else box_name(box.key, box.offsets), box.tensor)
                for box in boxes
            ]
            header, _, spans = layout(named, {"format": "pt", **labels})
        size = spans[-1][1] if spans else len(header)
        head = memoryview(header)
        sums: list[tuple[str, ...]] = []
        with self._store.create(name, size) as write:
            watched = self._watch_writes(write)
            for begin in range(0, len(head), PART_SIZE):
                watched(head[begin : begin + PART_SIZE])
            for batch in _batches([box.tensor for box in boxes]):
                sums += _write_batch(watched, batch)
        entry = FileEntry(
            name, size, "tensors", self._rank, len(header), checksums_of(head, PART_SIZE)
        )
        # Tuples of plain values: there may be very many, and the garbage collector untracks them.
        chunks = [
            (
                box.key,
                NAMES[box.tensor.dtype],
                box.shape,
                (number, *span, "".join(parts), *box.place),
            )
            for box, span, parts in zip(boxes, spans, sums, strict=True)
        ]
        return entry.to_json(), chunks

    def _watch_writes(self, write: Write) -> Write:
        """Count written bytes, and stop if another file has failed."""

        def watched(data: memoryview[int]) -> None:
            if self._stopped.is_set():
                raise CheckpointError("stopped, because another file could not be written")
            write(data)
            self._on_written(len(data))

        return watched

    def stop(self) -> None:
        """Stop the other threads at their next piece."""
        self._stopped.set()

    def undo(self) -> None:
        """Remove the written files, as far as possible."""
        with suppress(Exception):
            # Last written first: rank 0 removes the objects file that names the run at the end, so
            # that the next save of the run can still remove what an interruption leaves.
            self._store.remove_many(self._created[::-1])
        with suppress(Exception):
            self._store.abort_uploads(self._save_id)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group small neighbors that can be copied in one batch."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        fits = batch and tensor.dtype == batch[0].dtype and tensor.device == batch[0].device
        if not fits or nbytes > _SMALL or size + nbytes > _BATCH:
            if batch:
                yield batch
            batch, size = [], 0
        batch.append(tensor)
        # A larger tensor forms a batch alone.
        size += nbytes if nbytes <= _SMALL else _BATCH + 1
    if batch:
        yield batch


def _write_batch(write: Write, tensors: Sequence[torch.Tensor]) -> list[tuple[str, ...]]:
    """Write some tensors and return the checksums of each."""
    if len(tensors) == 1:
        hashing = HashingWriter(write, PART_SIZE)
        for piece in host_pieces(tensors[0]):
            hashing.write(piece)
        return [hashing.checksums()]
    view = view_of(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    sums = []
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        sums.append(checksums_of(view[begin:end], PART_SIZE))
        begin = end
    for begin in range(0, len(view), PART_SIZE):
        write(view[begin : begin + PART_SIZE])
    return sums
