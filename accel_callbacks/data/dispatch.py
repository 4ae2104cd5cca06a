"""Rank 0 reads for all ranks, and sends each rank its part of every batch.

A batch travels as a message with its counts and its structure without the tensors (scattered as
objects), and the bytes of the tensors (sent point to point). Ranks that share a model get the same
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_callbacks.collectives.nested import map_leaves, map_tensors
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.order import Record
from accel_callbacks.data.shard import ShareSource
from accel_callbacks.data.sources import Delivery, Setting, Source
from accel_callbacks.data.stream import StreamSource
from accel_callbacks.errors import RemoteError
from accel_callbacks.errors.text import published_text

__all__ = [
    "CollatePieces",
    "DataLoaderDispatcher",
    "WholeShares",
]

_ALIGNED = 16  # bytes; a tensor of any dtype can start at a multiple
# The options of torch's loader on ranks that read nothing.
_IDLE: dict[str, Any] = {
    **dict.fromkeys(("worker_init_fn", "multiprocessing_context", "prefetch_factor")),
    **{"num_workers": 0, "timeout": 0, "persistent_workers": False, "pin_memory": False},
}


@dataclass(frozen=True)
class _Slot:
    """A placeholder for a tensor in a structure, with its position in the bytes."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First aligned position after the tensor."""
        return self.start + -(-self.size // _ALIGNED) * _ALIGNED


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is fully described by its elements in order."""
    odd = tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided
    return type(tensor) is torch.Tensor and not odd


def _is_slot(item: Any) -> bool:
    return isinstance(item, _Slot)


@dataclass(frozen=True)
class _Failure:
    """An error of rank 0, sent in place of a structure."""

    report: str


def _wire() -> torch.device:
    """Return the device of tensors to send: a group made by the user may be NCCL only."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _pack(batch: Any) -> tuple[Any, torch.Tensor]:
    """Return (the structure with slots for tensors, the bytes of the tensors)."""
    tensors: list[tuple[_Slot, torch.Tensor]] = []
    end = 0

    def slot(tensor: torch.Tensor) -> Any:
        nonlocal end
        if not _is_plain(tensor):
            return tensor  # pickled with the structure
        place = _Slot(end, tensor.dtype, tuple(tensor.shape))
        tensors.append((place, tensor))
        end = place.end
        return place

    layout = map_tensors(batch, slot)
    data = torch.empty(end, dtype=torch.uint8, device="cpu")
    for place, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        data[place.start : place.start + place.size] = flat
    return layout, data


def _unpack(layout: Any, data: torch.Tensor) -> Any:
    def tensor(slot: _Slot) -> torch.Tensor:
        flat = data[slot.start : slot.start + slot.size]
        return flat.view(slot.dtype).reshape(slot.shape)

    return map_leaves(layout, tensor, _is_slot)


class _Message(NamedTuple):
    """What a rank is told of a batch before the bytes of its tensors; in place of it, None ends."""

    layout: Any
    size: int  # bytes of the tensors
    counts: Delivery


def _scatter(messages: list[Any]) -> None:
    """Send each rank its message; if one cannot be pickled, send that error in their place.

    The other ranks are waiting for the scatter, and would wait for ever otherwise.
    """
    received: list[Any] = [None]
    try:
        dist.scatter_object_list(received, messages, src=0)
    except Exception as problem:
        failed = _Failure(f"a batch cannot be sent to the other processes: {problem!r}")
        dist.scatter_object_list(received, [failed] * len(messages), src=0)
        raise _AlreadySent(problem) from problem


def _send_batch(pieces: list[Any], counts: Delivery) -> None:
    """Send each rank its piece, from rank 0."""
    wire = _wire()
    packed = [(layout, data.to(wire)) for layout, data in map(_pack, pieces)]
    _scatter([_Message(layout, data.numel(), counts) for layout, data in packed])
    # All at once: one rank that is slow to receive does not keep the others waiting.
    parts = [(rank, data) for rank, (_, data) in enumerate(packed) if rank and data.numel()]
    pending = [dist.isend(data, rank) for rank, data in parts]
    for work in pending:
        if work is not None:
            work.wait()


def _receive_batch(pinned: bool) -> tuple[Any, Delivery] | None:
    """Return this rank's piece with the counts of its batch, None at the end.

    Args:
        pinned: receive into pinned memory, so that copies to the device are asynchronous.

    Raises:
        RemoteError: rank 0 failed.
    """
    received: list[Any] = [None]
    dist.scatter_object_list(received, None, src=0)
    message = received[0]
    if message is None:
        return None
    if isinstance(message, _Failure):
        raise RemoteError(rank=0, where="reading the data", details=message.report)
    wire = _wire()
    pinned = pinned and wire.type == "cpu"
    data = torch.empty(message.size, dtype=torch.uint8, device=wire, pin_memory=pinned)
    if message.size:
        dist.recv(data, src=0)
    return _unpack(message.layout, data.cpu()), message.counts


class _AlreadySent(Exception):
    """A failure that the other ranks have received already."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem


class CollatePieces:
    """Collate the part of each rank separately, as that rank itself would have done.

    Args:
        collate_fn: the user's.
        whole: collate the parts together, as one batch to be sliced, and return their sizes.

    Example:
        >>> from accel_callbacks.data.dispatch import CollatePieces
        >>> CollatePieces(sum, whole=False)([[1, 2], [3]])
        [3, 3]
        >>> CollatePieces(sum, whole=True)([[1, 2], [3]])
        (6, [2, 1])
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, whole: bool) -> None:
        self.collate_fn = collate_fn
        self.whole = whole

    def __call__(self, pieces: list[Any]) -> Any:
        """Return the batch of each rank, or (one batch, the sizes of the parts)."""
        if self.whole:
            return self.collate_fn(list(chain(*pieces))), [len(piece) for piece in pieces]
        return [self.collate_fn(piece) for piece in pieces]


class _PieceReader(Dataset[Any]):
    """Read a list of indices for each rank from the user's dataset."""

    def __init__(self, dataset: Any, batched: bool) -> None:
        self.dataset = dataset
        self.batched = batched

    def __getitem__(self, pieces: Any) -> list[Any]:
        if not self.batched:
            return [self.dataset[index] for index in pieces]
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            return [many(piece) for piece in pieces]
        return [[self.dataset[index] for index in piece] for piece in pieces]

    def __len__(self) -> int:
        return len(self.dataset)


class WholeShares(ShareSource):
    """The parts of all ranks of each global batch of a map-style dataset.

    Args:
        *args: those of a :class:`ShareSource`, of any rank.
        slices: the part of each rank is sliced from one batch.
    """

    def __init__(self, *args: Any, slices: bool) -> None:
        super().__init__(*args)
        whole = slices and self._batched  # ready batches are not sliced
        self._collate = CollatePieces(self._loader.collate_fn, whole=whole)

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads the parts of all ranks."""
        reader = _PieceReader(self._loader.dataset, self._batched)
        options = {"dataset": reader, "sampler": self, "batch_size": None}
        return options | {"collate_fn": self._collate}

    def _indices(self) -> Iterator[Any]:
        ranks = range(self._current.world_size)
        plans = [replace(self._current, rank=rank) for rank in ranks]
        parts: Any = (self._next_shares(),)
        if self._order is not None:
            parts = (plan.shares(self._order, self._position) for plan in plans)
        for shares in zip(*parts, strict=True):
            self._note(shares[0])
            yield [share.indices if self._batched else share.indices[0] for share in shares]


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared loader whose dataset is read by the main process only, for all processes.

    Made by ``Accelerator.prepare`` with ``DataLoaderConfiguration(dispatch_batches=True)``. It
    gives each process the samples that it would have read itself, and resumes in the same way. It
    is meant for data that only one process can reach: reading is as slow as on one process, and
    every batch is sent.

    Args:
        source: yields the parts of all ranks (:class:`WholeShares`, or a stream opened for every
            rank); a stream is read on rank 0 only.
        setting: the rank and the options.
        origin: the user's loader.
        **options: those of a :class:`DataLoaderShard`.

    Raises:
        ValueError: the setting has another number of processes than the process group.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import Accelerator, DataLoaderConfiguration
        >>> from accel_callbacks.data.dispatch import DataLoaderDispatcher
        >>> config = DataLoaderConfiguration(dispatch_batches=True)
        >>> accel = Accelerator(cpu=True, dataloader_config=config)
        >>> loader = accel.prepare(DataLoader(range(3), batch_size=2))
        >>> isinstance(loader, DataLoaderDispatcher), [batch.tolist() for batch in loader]
        (True, [[0, 1], [2]])
    """

    def __init__(
        self, source: Source, *, setting: Setting, origin: DataLoader[Any], **options: Any
    ) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if setting.world_size * setting.copies != world:
            raise ValueError(
                f"dispatch_batches=True sends batches to the {world} processes that there are: "
                f"leave num_processes={setting.world_size} out."
            )
        self._world, self._copies = setting.world_size, setting.copies
        self._alone = world == 1
        # Not the rank of the setting: all ranks of the first model have its 0.
        self._reads = self._alone or dist.get_rank() == 0
        # Ready batches are not sliced.
        self._slice_fn = None if origin.batch_sampler is None else setting.slice_fn
        self._pinned = origin.pin_memory and torch.accelerator.is_available()
        self._problem: Exception | None = None  # of the start of a pass, sent with its first batch
        # Ranks that read nothing start no workers.
        super().__init__(source, origin=origin, **(options if self._reads else options | _IDLE))

    def _start_source(
        self, moves_on: bool, start: int | None, record: Record | None, workers_start: bool
    ) -> None:
        self._problem = None
        if not self._reads and isinstance(self._source, StreamSource):
            # Its dataset may be out of reach here: only the position is followed.
            if moves_on:
                self.epoch += 1
                self.position = 0
            if start is not None:
                self.position = self._source.position_of(start)
            return
        try:
            super()._start_source(moves_on, start, record, workers_start)
        except Exception as problem:
            if self._alone:
                raise
            self._problem = problem  # the other ranks wait for a batch, so _send() tells them

    def _extent(self) -> tuple[int | None, int]:
        if self._problem is not None:
            return None, 0
        if isinstance(self._source, StreamSource):
            return None, self.position // self._source.total_batch_size
        return super()._extent()

    def _deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        if self._alone:
            for item, delivery in self._source.deliver(items):
                yield self._pieces(item)[0], delivery
        elif self._reads:
            yield from self._send(items)
        else:
            yield from self._receive()

    def _send(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        try:
            if self._problem is not None:
                raise self._problem
            for number, (item, delivery) in enumerate(self._source.deliver(items), start=1):
                pieces = self._pieces(item)
                counts = delivery._replace(last=delivery.is_last(number), state=None)
                _send_batch([piece for piece in pieces for _ in range(self._copies)], counts)
                yield pieces[0], delivery
        except _AlreadySent as sent:
            raise sent.problem from None
        except Exception as problem:
            with suppress(Exception):  # the others may be gone; this error is the one to be seen
                _scatter([_Failure(published_text(problem))] * dist.get_world_size())
            raise
        _scatter([None] * dist.get_world_size())

    def _receive(self) -> Iterator[tuple[Any, Delivery]]:
        known: Delivery | None = None
        while (received := _receive_batch(self._pinned)) is not None:
            piece, counts = received
            if known is None or counts != known:  # batches that are alike share one
                known = counts
            yield piece, known

    def _pieces(self, item: Any) -> list[Any]:
        """Return the part of each rank, sliced from one batch if there is a ``slice_fn``."""
        if self._slice_fn is None:
            return list(item)
        batch, sizes = item
        ends = [sum(sizes[: rank + 1]) for rank in range(self._world)]
        return [
            self._slice_fn(
                batch, slice(end - size, end), process_index=rank, num_processes=self._world
            )
            for rank, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]
