"""Rank 0 reads for all ranks, and sends each rank its part of every batch.

A batch travels as a header of fixed size (broadcast), its structure without the tensors (scattered
as objects, only if it differs from that of the batch before), and the bytes of the tensors (sent
point to point). So a steady loop costs one small broadcast and one send per rank and batch. Ranks
that share a model get the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from accel_callbacks.collectives.nested import leaves, map_leaves, map_tensors
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.order import Record
from accel_callbacks.data.shard import ShareSource
from accel_callbacks.data.sources import Delivery, Setting, Source
from accel_callbacks.data.stream import StreamSource
from accel_callbacks.errors import RemoteError
from accel_callbacks.errors.text import published_text

__all__ = [
    "AlreadySent",
    "CollatePieces",
    "DataLoaderDispatcher",
    "Receiver",
    "Sender",
    "WholeShares",
]

_ALIGNED = 16  # bytes; a tensor of any dtype can start at a multiple
_HEAD = 6  # integers in a header, before one for each part: kind, new structure, four numbers
_BATCH, _END = 0, 1
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


def _signature(layout: Any) -> Any:
    """Return a value that is equal for equal layouts; raise TypeError for other objects."""
    # An object of another type is sent with each batch: one that a receiver keeps would be shared
    # by its batches, and a script may change it in place.
    kind = type(layout)
    if layout is None or kind in (_Slot, str, bytes, bool, int):
        return kind, layout
    if kind is float:  # repr, because nan != nan and 0.0 == -0.0
        return kind, repr(layout)
    if kind in (list, tuple) or hasattr(layout, "_fields"):
        return kind, tuple(_signature(item) for item in layout)
    if kind is dict:
        return kind, tuple((key, _signature(item)) for key, item in layout.items())
    raise TypeError(kind)


class Sender:
    """The sending end, on rank 0; its calls and those of :class:`Receiver` pair up in order.

    Args:
        copies: number of neighboring ranks that get the same piece.
    """

    def __init__(self, copies: int = 1) -> None:
        self._copies = copies
        self._known: Any = None  # signatures of the structures that the receivers have

    def batch(self, pieces: list[Any], numbers: list[int], kept: list[int]) -> None:
        """Send each rank its piece; there is a piece, and a number in ``kept``, a data rank."""
        wire = _wire()
        packed = [(layout, data.to(wire)) for layout, data in map(_pack, pieces)]
        packed = [piece for piece in packed for _ in range(self._copies)]
        layouts = [layout for layout, _ in packed]
        try:
            # Without that of rank 0, which keeps its piece and is sent none.
            known: Any = [_signature(layout) for layout in layouts[1:]]
        except TypeError:
            known = None
        news = known is None or known != self._known
        self._known = known
        self._head(_BATCH, news, numbers, kept)
        if news:
            self._structures(layouts)
        parts = [(rank, data) for rank, (_, data) in enumerate(packed) if rank]
        # All at once: one rank that is slow to receive does not keep the others waiting.
        pending = [dist.isend(data, rank) for rank, data in parts if data.numel()]
        for work in pending:
            if work is not None:
                work.wait()

    def end(self) -> None:
        """Send the end of the pass."""
        self._head(_END, False, [0, 0, 0, 0], [0] * (dist.get_world_size() // self._copies))

    def failure(self, report: str) -> None:
        """Send an error in place of the next batch."""
        self._known = None
        world = dist.get_world_size()
        self._head(_BATCH, True, [0, 0, 0, 0], [0] * (world // self._copies))
        self._structures([_Failure(report)] * world)

    def _head(self, kind: int, news: bool, numbers: list[int], kept: list[int]) -> None:
        head = torch.tensor([kind, int(news), *numbers, *kept], dtype=torch.int64, device=_wire())
        dist.broadcast(head, src=0)

    def _structures(self, layouts: list[Any]) -> None:
        """Send the structures; if one cannot be pickled, send that error in their place.

        The other ranks are waiting for the scatter, and would wait for ever otherwise.
        """
        received: list[Any] = [None]
        try:
            dist.scatter_object_list(received, layouts, src=0)
        except Exception as problem:
            self._known = None
            failed = _Failure(f"a batch cannot be sent to the other processes: {problem!r}")
            dist.scatter_object_list(received, [failed] * len(layouts), src=0)
            raise AlreadySent(problem) from problem


class AlreadySent(Exception):
    """A failure that the other ranks have received already."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem


class Receiver:
    """The receiving end, on all ranks but rank 0.

    Args:
        pinned: receive into pinned memory, so that copies to the device are asynchronous.
        copies: number of neighboring ranks that get the same piece.
    """

    def __init__(self, pinned: bool = False, copies: int = 1) -> None:
        self._pinned = pinned
        self._copies = copies
        self._layout: Any = None

    def batch(self) -> tuple[Any, list[int], list[int]] | None:
        """Return (this rank's piece, numbers, kept) as they were sent, None at the end.

        Raises:
            RemoteError: rank 0 failed.
        """
        wire = _wire()
        parts = dist.get_world_size() // self._copies
        head = torch.empty(_HEAD + parts, dtype=torch.int64, device=wire)
        dist.broadcast(head, src=0)
        kind, news, *numbers = head.tolist()
        if kind == _END:
            return None
        if news:
            received: list[Any] = [None]
            dist.scatter_object_list(received, None, src=0)
            self._layout = received[0]
        if isinstance(self._layout, _Failure):
            report, self._layout = self._layout.report, None
            raise RemoteError(rank=0, where="reading the data", details=report)
        size = max((leaf.value.end for leaf in leaves(self._layout, _is_slot)), default=0)
        pinned = self._pinned and wire.type == "cpu"
        data = torch.empty(size, dtype=torch.uint8, device=wire, pin_memory=pinned)
        if size:
            dist.recv(data, src=0)
        return _unpack(self._layout, data.cpu()), numbers[:4], numbers[4:]


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
        sender = Sender(self._copies)
        try:
            if self._problem is not None:
                raise self._problem
            for number, (item, delivery) in enumerate(self._source.deliver(items), start=1):
                pieces = self._pieces(item)
                ended = delivery.is_last(number)
                last = -1 if ended is None else int(ended)
                kept = [0] * self._world if delivery.kept is None else list(delivery.kept)
                numbers = [delivery.real, delivery.padded, last, delivery.kept is not None]
                sender.batch(pieces, [int(number) for number in numbers], kept)
                yield pieces[0], delivery
        except AlreadySent as sent:
            raise sent.problem from None
        except Exception as problem:
            with suppress(Exception):  # the others may be gone; this error is the one to be seen
                sender.failure(published_text(problem))
            raise
        sender.end()

    def _receive(self) -> Iterator[tuple[Any, Delivery]]:
        receiver = Receiver(self._pinned, self._copies)
        delivery: Delivery | None = None
        while (received := receiver.batch()) is not None:
            piece, (real, padded, last, counted), kept = received
            known = None if last < 0 else bool(last)
            counts = Delivery(real, padded, known, kept if counted else None)
            if delivery is None or counts != delivery:  # batches that are alike share one
                delivery = counts
            yield piece, delivery

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
