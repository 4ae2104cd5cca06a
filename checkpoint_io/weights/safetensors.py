"""Weights in safetensors files: their headers, then exactly the bytes that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint_io.errors import CheckpointError, CorruptCheckpointError
from checkpoint_io.format.safetensors import DTYPES, MAX_HEADER, Slot, as_bytes, parse_header
from checkpoint_io.progress import TransferProgress
from checkpoint_io.storage.base import Span
from checkpoint_io.storage.open import RangeReader
from checkpoint_io.weights.source import (
    STAGING,
    Wanted,
    WeightFile,
    WeightInfo,
    landing_for,
    plain_bytes,
)

_SPAN = 16 * 1024 * 1024
_GAP = 64 * 1024
_AT_ONCE = 8


@dataclass
class _Move:
    """Bytes of a file that go into memory, and what to do with them once they are there."""

    begin: int
    end: int
    memory: torch.Tensor
    land: Callable[[], None] | None = None


class SafetensorsSource:
    """The tensors of some safetensors files.

    Args:
        where: what to call all of it in messages.
        files: the files; their headers are read at once.
        weight_map: names to labels of files, if an index says so; other tensors are left out.

    Raises:
        CorruptCheckpointError: a header is damaged, or does not hold what the index says.
    """

    def __init__(
        self, where: str, files: Sequence[WeightFile], weight_map: Mapping[str, str] | None = None
    ) -> None:
        self.where = where
        self._files = files
        self._slots: dict[str, tuple[int, Slot]] = {}
        self.tied: dict[str, str] = {}
        for number, (metadata, slots) in enumerate(_headers(files)):
            label = files[number].label
            for key, slot in slots.items():
                if weight_map is None or weight_map.get(key) == label:
                    self._slots[key] = (number, slot)
            self.tied.update((k, kept) for k, kept in metadata.items() if kept in slots)
        if absent := (weight_map or {}).keys() - self._slots.keys():
            raise CorruptCheckpointError(
                f"{where}: the shards do not hold {', '.join(sorted(absent)[:3])}, though the "
                "index says so; save the model again"
            )
        self.tied = {
            key: kept
            for key, kept in self.tied.items()
            if kept in self._slots and key not in self._slots and key != "format"
        }
        self.infos = {
            key: WeightInfo(_dtype(slot.dtype, key), slot.shape)
            for key, (_, slot) in self._slots.items()
        }

    def read(self, wanted: Wanted, progress: TransferProgress) -> None:
        """Read file by file; what cannot go straight into its target is staged, block by block."""
        by_file: dict[int, list[tuple[Slot, str, torch.Tensor]]] = {}
        for key, target in wanted:
            number, slot = self._slots[key]
            by_file.setdefault(number, []).append((slot, key, target))
        for number in sorted(by_file):
            batch: list[_Move] = []
            staged = 0
            for slot, key, target in sorted(by_file[number], key=lambda item: item[0].begin):
                for move in self._moves(slot, key, target):
                    batch.append(move)
                    staged += move.end - move.begin if move.land else 0
                    if staged >= 2 * STAGING:
                        _transfer(self._files[number], batch, progress)
                        batch, staged = [], 0
            _transfer(self._files[number], batch, progress)

    def _moves(self, slot: Slot, key: str, target: torch.Tensor) -> Iterator[_Move]:
        """Plan how the bytes of one tensor get to their target."""
        memory = plain_bytes(target, self.infos[key].dtype)
        if memory is not None:
            yield _Move(slot.begin, slot.end, memory)
            return
        landing = landing_for(self.infos[key], target)
        width = landing.row_bytes
        memory = landing.direct()
        if memory is not None:
            first, last = landing.rows()
            yield _Move(slot.begin + first * width, slot.begin + last * width, memory)
            return
        for rows in landing.blocks():
            host = landing.host(rows)
            yield _Move(
                slot.begin + rows.first * width,
                slot.begin + rows.last * width,
                as_bytes(host),
                lambda rows=rows, host=host: landing.put(rows, host),  # type: ignore[misc]
            )


def _dtype(name: str, key: str) -> torch.dtype:
    """Return torch's dtype for a name of the format."""
    if name not in DTYPES:
        raise CheckpointError(f"tensor {key!r}: torch {torch.__version__} has no dtype for {name}")
    return DTYPES[name]


def _headers(files: Sequence[WeightFile]) -> Iterable[tuple[dict[str, str], dict[str, Slot]]]:
    """Read all headers; several at a time where each costs a round trip."""
    if len(files) < 2 or files[0].store.can_rename:
        return [read_header(file) for file in files]
    with ThreadPoolExecutor(min(_AT_ONCE, len(files)), "checkpoint-headers") as pool:
        return list(pool.map(read_header, files))


def read_header(file: WeightFile) -> tuple[dict[str, str], dict[str, Slot]]:
    """Read and check the header of one safetensors file."""
    with file.open() as reader:
        return parse_header(_header_bytes(reader, file.where), reader.size, file.where)


def _header_bytes(reader: RangeReader, where: str) -> bytes:
    """Read the JSON at the start of a file."""
    length = int.from_bytes(bytes(reader.read(0, min(8, reader.size))), "little")
    if length > min(MAX_HEADER, reader.size - 8):
        raise CorruptCheckpointError(f"{where}: its header does not fit the file")
    return bytes(reader.read(8, 8 + length))


def _transfer(file: WeightFile, moves: Sequence[_Move], progress: TransferProgress) -> None:
    """Fetch what some moves need, and land them."""
    spans, shares = _plan(file.name, [move for move in moves if move.end > move.begin])

    def deliver(index: int, data: memoryview[int]) -> None:
        start = spans[index].begin
        source = np.frombuffer(data, dtype=np.uint8)
        for move, low, high in shares[index]:
            target = move.memory.numpy()
            target[low - move.begin : high - move.begin] = source[low - start : high - start]
            progress.add(high - low)

    if spans:
        file.store.fetch(spans, deliver)
    for move in moves:
        if move.land is not None:
            move.land()


def _plan(
    name: str, moves: Sequence[_Move]
) -> tuple[list[Span], list[list[tuple[_Move, int, int]]]]:
    """Join neighbouring byte ranges, and cut large ones, into spans of limited size."""
    spans: list[Span] = []
    shares: list[list[tuple[_Move, int, int]]] = []
    for move in sorted(moves, key=lambda move: move.begin):
        low = move.begin
        while low < move.end:
            last = spans[-1] if spans else None
            room = 0 if last is None else last.begin + _SPAN - low
            if last is None or room <= 0 or not 0 <= low - last.end <= _GAP:
                spans.append(Span(name, low, low))
                shares.append([])
                room = _SPAN
            high = min(move.end, low + room)
            spans[-1] = Span(name, spans[-1].begin, high)
            shares[-1].append((move, low, high))
            low = high
    return spans, shares
