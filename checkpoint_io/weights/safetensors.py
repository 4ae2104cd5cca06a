"""Weights in safetensors files: read the headers, then only the bytes that are needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint_io.errors import CorruptCheckpointError
from checkpoint_io.format.safetensors import (
    Slot,
    as_bytes,
    dtype_of,
    header_bytes,
    parse_header,
)
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.local import LocalStore, local_folder
from checkpoint_io.storage.local_read import can_read_into
from checkpoint_io.storage.open import RangeReader
from checkpoint_io.threads import mapped
from checkpoint_io.weights.source import (
    STAGING,
    Destination,
    Wanted,
    WeightFile,
    WeightInfo,
    plain_bytes,
    shard_of_each,
)

_SPAN = 16 * 1024 * 1024  # most bytes of one request
_GAP = 64 * 1024  # unneeded bytes that are read along rather than split a request
_LOCAL_SPAN = 4 * 1024 * 1024  # of a file on this machine: enough for a disk
_MOST_VIEWS = 512  # places in memory that one request fills; Linux takes 1024
_AT_ONCE = 8


@dataclass
class _Read:
    """Bytes of a file to read into memory, and what to call once they are there."""

    begin: int
    end: int
    memory: torch.Tensor
    on_read: Callable[[], None] | None = None


class SafetensorsSource:
    """The tensors of some safetensors files.

    Args:
        url: of the files, for messages.
        files: the files; their headers are read immediately.
        weight_map: names to labels of files, from an index.

    Raises:
        CorruptCheckpointError: a header is damaged, or none has a tensor that the index names.
    """

    def __init__(
        self, url: str, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.where = url
        self.files = files
        self._slots: dict[str, tuple[int, Slot]] = {}
        self.tied: dict[str, str] = {}
        # at once where each read is a round trip
        local = files and local_folder(files[0].store) is not None
        headers = mapped(read_header, files, 1 if local else _AT_ONCE)
        labels, stored = [file.label for file in files], [slots for _, slots in headers]
        for key, number in shard_of_each(url, labels, stored, weight_map).items():
            self._slots[key] = (number, stored[number][key])
        for metadata, slots in headers:
            # `save_model` notes tied names as metadata; any other text there names no tensor
            self.tied.update((k, kept) for k, kept in metadata.items() if kept in slots)
        self.tied = {
            key: kept
            for key, kept in self.tied.items()
            if kept in self._slots and key not in self._slots and key != "format"
        }
        self.infos = {
            key: WeightInfo(dtype_of(slot.dtype, key), slot.shape)
            for key, (_, slot) in self._slots.items()
        }

    def slot(self, key: str) -> tuple[int, Slot]:
        """Return the number of the file that holds a tensor, and where it is in that file."""
        return self._slots[key]

    def local_bytes(self) -> dict[str, tuple[str, int]] | None:
        """Return path and first byte of each tensor; None unless all files are local."""
        folders = [local_folder(file.store) for file in self.files]
        if any(folder is None for folder in folders):
            return None
        paths = [
            os.path.join(folder or "", file.name)
            for folder, file in zip(folders, self.files, strict=True)
        ]
        return {key: (paths[number], slot.begin) for key, (number, slot) in self._slots.items()}

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Read file by file; stage, in blocks, what cannot be read directly into its target."""
        by_file: dict[int, list[tuple[Slot, str, torch.Tensor]]] = {}
        for key, target in wanted:
            number, slot = self._slots[key]
            by_file.setdefault(number, []).append((slot, key, target))
        for number in sorted(by_file):
            batch: list[_Read] = []
            staged = 0
            for slot, key, target in sorted(by_file[number], key=lambda item: item[0].begin):
                for read in self._reads(slot, key, target):
                    batch.append(read)
                    staged += read.end - read.begin if read.on_read else 0
                    if staged >= 2 * STAGING:
                        _transfer(self.files[number], batch, progress)
                        batch, staged = [], 0
            _transfer(self.files[number], batch, progress)

    def _reads(self, slot: Slot, key: str, target: torch.Tensor) -> Iterator[_Read]:
        """Yield the reads that fill the target of one tensor."""
        memory = plain_bytes(target, self.infos[key].dtype)
        if memory is not None:
            yield _Read(slot.begin, slot.end, memory)
            return
        destination = Destination(self.infos[key], target)
        width = destination.row_bytes
        memory = destination.direct()
        if memory is not None:
            first, last = destination.rows()
            yield _Read(slot.begin + first * width, slot.begin + last * width, memory)
            return
        for rows in destination.blocks():
            host = destination.host(rows)
            yield _Read(
                slot.begin + rows.first * width,
                slot.begin + rows.last * width,
                as_bytes(host),
                lambda rows=rows, host=host: destination.put(rows, host),  # type: ignore[misc]
            )


def read_header(file: WeightFile) -> tuple[dict[str, str], dict[str, Slot]]:
    """Read and check the header of one safetensors file."""
    with file.open() as reader:
        return header_of(reader, file.where)


def header_of(reader: RangeReader, location: str) -> tuple[dict[str, str], dict[str, Slot]]:
    """Read and check the header of an open file."""
    if not (header := header_bytes(reader)):
        raise CorruptCheckpointError(f"{location}: its header does not fit the file")
    return parse_header(header, reader.size, location)


def _transfer(file: WeightFile, reads: Sequence[_Read], progress: TransferProgress) -> None:
    """Fetch the spans of some reads, and call their `on_read`."""
    reads = [read for read in reads if read.end > read.begin or read.on_read is not None]
    if isinstance(file.store, LocalStore) and can_read_into():
        _read_into(file.store, file.name, reads, progress)
    else:
        _fetch(file, reads, progress)
    for read in reads:
        if read.on_read is not None:
            read.on_read()


def _read_into(
    store: LocalStore, name: str, reads: Sequence[_Read], progress: TransferProgress
) -> None:
    """Read straight into the targets, without a buffer of a store in between."""
    spans, shares = _plan(name, reads, min(_SPAN, _LOCAL_SPAN), 0)
    views = [[_part(read, low, high) for read, low, high in share] for share in shares]
    store.fetch_into(
        spans, views, lambda index: progress.add(spans[index].end - spans[index].begin)
    )


def _part(read: _Read, low: int, high: int) -> memoryview[int]:
    """Return the memory for some of the bytes of a read."""
    memory: memoryview[int] = read.memory.numpy().data
    return memory[low - read.begin : high - read.begin]


def _fetch(file: WeightFile, reads: Sequence[_Read], progress: TransferProgress) -> None:
    """Copy from the buffers of a store into the targets."""
    spans, shares = _plan(file.name, reads, _SPAN, _GAP)

    def deliver(index: int, data: memoryview[int]) -> None:
        start = spans[index].begin
        source = np.frombuffer(data, dtype=np.uint8)
        for read, low, high in shares[index]:
            target = read.memory.numpy()
            target[low - read.begin : high - read.begin] = source[low - start : high - start]
            progress.add(high - low)

    if spans:
        file.store.fetch(spans, deliver)


def _plan(
    name: str, reads: Sequence[_Read], most: int, gap: int
) -> tuple[list[Span], list[list[tuple[_Read, int, int]]]]:
    """Join byte ranges that are `gap` bytes apart or less; cut them into spans of `most` bytes."""
    spans: list[Span] = []
    shares: list[list[tuple[_Read, int, int]]] = []
    for read in sorted(reads, key=lambda read: read.begin):
        low = read.begin
        while low < read.end:
            last = spans[-1] if spans else None
            room = 0 if last is None or len(shares[-1]) >= _MOST_VIEWS else last.begin + most - low
            if last is None or room <= 0 or not 0 <= low - last.end <= gap:
                spans.append(Span(name, low, low))
                shares.append([])
                room = most
            high = min(read.end, low + room)
            spans[-1] = Span(name, spans[-1].begin, high)
            shares[-1].append((read, low, high))
            low = high
    return spans, shares
