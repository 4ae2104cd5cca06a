"""What one rank writes: its tensor files and its JSON, with checksums taken on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint_io.errors import CheckpointError
from checkpoint_io.format.checksum import HashingWriter, Write, checksums_of
from checkpoint_io.format.manifest import PART_SIZE, FileEntry
from checkpoint_io.format.safetensors import NAMES, host_pieces, layout, view_of
from checkpoint_io.sharding.local_tensors import WriteBox
from checkpoint_io.storage.open import Store
from checkpoint_io.threads import collector_paused, for_each

# Each file keeps at most about 64 MiB in buffers on its way.
_THREADS = 4
_SMALL = 256 * 1024
_BATCH = 4 * 1024 * 1024


@dataclass
class RankReport:
    """What one rank wrote, in plain values, which any process group can carry.

    `chunks` are rows as in the manifest (`Chunk`), each after its key, dtype and full shape; they
    count files from this rank's first.
    """

    files: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[tuple[Any, ...]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return it as a dict."""
        return {"files": self.files, "chunks": self.chunks, "tied": self.tied}


class RankWriter:
    """Writes the files of one rank and can take them back."""

    def __init__(self, store: Store, save_id: str, rank: int, moved: Callable[[int], None]) -> None:
        self._store = store
        self._save_id = save_id
        self._rank = rank
        self._moved = moved
        self._created: list[str] = []
        self._stopped = threading.Event()

    def write_objects(self, name: str, data: bytes) -> RankReport:
        """Write one JSON file."""
        self._created.append(name)
        view = memoryview(data)
        with self._store.create(name, len(data)) as write:
            self._watched(write)(view)
        sums = checksums_of(view, PART_SIZE)
        entry = FileEntry(name, len(data), "objects", self._rank, len(data), sums)
        return RankReport([entry.to_json()])

    def write_tensors(
        self, files: Sequence[tuple[str, Sequence[WriteBox]]], labels: dict[str, str]
    ) -> RankReport:
        """Write tensor files, several at a time."""
        self._created += [name for name, _ in files]
        done: list[RankReport | None] = [None] * len(files)

        def one(number: int) -> None:
            try:
                done[number] = self._write_file(number, *files[number], labels)
            except BaseException:
                self.stop()
                raise

        for_each(one, range(len(files)), _THREADS, self.stop)
        report = RankReport()
        for part in filter(None, done):
            report.files += part.files
            report.chunks += part.chunks
        return report

    def _write_file(
        self, number: int, name: str, boxes: Sequence[WriteBox], labels: dict[str, str]
    ) -> RankReport:
        """Stream one tensor file."""
        with collector_paused():
            places = [box.place for box in boxes]
            named = [
                (_name_of(box, place), box.tensor) for box, place in zip(boxes, places, strict=True)
            ]
            header, _, spans = layout(named, {"format": "pt", **labels})
        size = spans[-1][1] if spans else len(header)
        head = memoryview(header)
        sums: list[tuple[str, ...]] = []
        with self._store.create(name, size) as write:
            watched = self._watched(write)
            for begin in range(0, len(head), PART_SIZE):
                watched(head[begin : begin + PART_SIZE])
            for batch in _batches([box.tensor for box in boxes]):
                sums += _write_batch(watched, batch)
        entry = FileEntry(
            name, size, "tensors", self._rank, len(header), checksums_of(head, PART_SIZE)
        )
        # tuples of plain values: there may be very many, and the garbage collector skips them
        chunks = [
            (
                box.key,
                NAMES[box.tensor.dtype],
                box.shape,
                (number, *span, "".join(parts), *box.place),
            )
            for box, span, parts in zip(boxes, spans, sums, strict=True)
        ]
        return RankReport([entry.to_json()], chunks)

    def _watched(self, write: Write) -> Write:
        """Count what is written, and give up when another file has failed."""

        def watched(data: memoryview[int]) -> None:
            if self._stopped.is_set():
                raise CheckpointError("stopped, because another file could not be written")
            write(data)
            self._moved(len(data))

        return watched

    def stop(self) -> None:
        """Let the other threads give up at their next piece."""
        self._stopped.set()

    def undo(self) -> None:
        """Remove what was written, as far as that is possible; last, what says whose it is."""
        with suppress(Exception):
            self._store.remove_many(self._created[::-1])
        with suppress(Exception):
            self._store.abort_uploads(self._save_id)


def _name_of(box: WriteBox, place: tuple[tuple[int, ...], ...]) -> str:
    """Name a box in the header of its file: the key if it is the tensor, else with its place."""
    if not place:
        return box.key
    return f"{box.key}~@{','.join(map(str, place[0]))}"  # "~@" is no escape, so no key has it


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Put together small neighbours that can be copied in one go."""
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
        # one that is not small stays alone
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
