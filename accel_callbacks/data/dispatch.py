"""The main rank reads for all."""

from __future__ import annotations

import traceback
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
from accel_callbacks.data.shard import ShareSource
from accel_callbacks.data.sources import Delivery, Setting
from accel_callbacks.data.stream import State, StatefulSource, StreamSource
from accel_callbacks.errors import RemoteError

__all__ = [
    "AlreadyTold",
    "CollatePieces",
    "DataLoaderDispatcher",
    "DispatchSource",
    "Receiver",
    "Sender",
    "WholeShares",
]

_ALIGNED = 16  # so that a tensor of any type can begin there
_HEAD = 6  # of a header, before what each process keeps
_BATCH, _END = 0, 1


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a structure, and in the bytes that are sent."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next tensor may begin."""
        return self.start + -(-self.size // _ALIGNED) * _ALIGNED


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is no more than its numbers, one after the other."""
    odd = tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided
    return type(tensor) is torch.Tensor and not odd


def _is_slot(item: Any) -> bool:
    return isinstance(item, _Slot)


@dataclass(frozen=True)
class _Failed:
    """Sent instead of a structure."""

    report: str


def _wire() -> torch.device:
    """Where tensors travel: a user's own group may be NCCL alone."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _packed(batch: Any) -> tuple[Any, torch.Tensor]:
    """(the structure with slots for tensors, the bytes of the tensors)."""
    tensors: list[tuple[_Slot, torch.Tensor]] = []
    end = 0

    def slot(tensor: torch.Tensor) -> Any:
        nonlocal end
        if not _is_plain(tensor):
            return tensor  # travels with the structure
        place = _Slot(end, tensor.dtype, tuple(tensor.shape))
        tensors.append((place, tensor))
        end = place.end
        return place

    layout = map_tensors(batch, slot)
    data = torch.empty(end, dtype=torch.uint8)
    for place, tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        data[place.start : place.start + place.size] = flat
    return layout, data


def _unpacked(layout: Any, data: torch.Tensor) -> Any:
    def tensor(slot: _Slot) -> torch.Tensor:
        flat = data[slot.start : slot.start + slot.size]
        return flat.view(slot.dtype).reshape(slot.shape)

    return map_leaves(layout, tensor, _is_slot)


def _bytes_of(layout: Any) -> int:
    """Length of the data that belongs to a layout."""
    return max((leaf.value.end for leaf in leaves(layout, _is_slot)), default=0)


def _signature(layout: Any) -> Any:
    """Something equal for equal layouts; raises TypeError where that cannot be told."""
    kind = type(layout)
    if layout is None or kind in (_Slot, str, bytes, bool, int):
        return kind, layout
    if kind is float:
        return kind, repr(layout)
    if kind in (list, tuple) or hasattr(layout, "_fields"):
        return kind, tuple(_signature(item) for item in layout)
    if kind is dict:
        return kind, tuple((key, _signature(item)) for key, item in layout.items())
    raise TypeError(kind)


class Sender:
    """The main process's end. What it sends is what :class:`Receiver` waits for, call by call."""

    def __init__(self) -> None:
        self._known: Any = None

    def batch(self, pieces: list[Any], numbers: list[int], kept: list[int]) -> None:
        """Send each process its piece; ``kept`` has an entry for each process."""
        packed = [_packed(piece) for piece in pieces]
        layouts = [layout for layout, _ in packed]
        try:
            known: Any = [_signature(layout) for layout in layouts[1:]]
        except TypeError:
            known = None
        news = known is None or known != self._known
        self._known = known
        self._head(_BATCH, news, numbers, kept)
        if news:
            self._structures(layouts)
        wire = _wire()
        parts = [(rank, data.to(wire)) for rank, (_, data) in enumerate(packed) if rank]
        pending = [dist.isend(data, rank) for rank, data in parts if data.numel()]
        for work in pending:
            if work is not None:
                work.wait()

    def end(self) -> None:
        """Tell that the pass is over."""
        self._head(_END, False, [0, 0, 0, 0], [0] * dist.get_world_size())

    def failure(self, report: str) -> None:
        """Tell that there will be no further batch, and why."""
        self._known = None
        world = dist.get_world_size()
        self._head(_BATCH, True, [0, 0, 0, 0], [0] * world)
        self._structures([_Failed(report)] * world)

    def _head(self, kind: int, news: bool, numbers: list[int], kept: list[int]) -> None:
        head = torch.tensor([kind, int(news), *numbers, *kept], dtype=torch.int64, device=_wire())
        dist.broadcast(head, src=0)

    def _structures(self, layouts: list[Any]) -> None:
        """Send what is no tensor. What cannot be pickled releases the others with an error."""
        own: list[Any] = [None]
        try:
            dist.scatter_object_list(own, layouts, src=0)
        except Exception as problem:
            self._known = None
            failed = _Failed(f"a batch cannot be sent to the other processes: {problem!r}")
            dist.scatter_object_list(own, [failed] * len(layouts), src=0)
            raise AlreadyTold(problem) from problem


class AlreadyTold(Exception):
    """The other processes know of this failure."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem


class Receiver:
    """The end of the other processes.

    Args:
        pinned: receive into pinned memory, so that copies to the device need not be waited for.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._layout: Any = None

    def batch(self) -> tuple[Any, list[int], list[int]] | None:
        """(this process's piece, numbers, kept) as they were sent; None at the end.

        Raises:
            RemoteError: the main process failed.
        """
        wire = _wire()
        head = torch.empty(_HEAD + dist.get_world_size(), dtype=torch.int64, device=wire)
        dist.broadcast(head, src=0)
        kind, news, *numbers = head.tolist()
        if kind == _END:
            return None
        if news:
            own: list[Any] = [None]
            dist.scatter_object_list(own, None, src=0)
            self._layout = own[0]
        if isinstance(self._layout, _Failed):
            report, self._layout = self._layout.report, None
            raise RemoteError(rank=0, where="reading the data", details=report)
        size = _bytes_of(self._layout)
        data = torch.empty(size, dtype=torch.uint8, device=wire, pin_memory=self._pins(wire))
        if size:
            dist.recv(data, src=0)
        return _unpacked(self._layout, data.cpu()), numbers[:4], numbers[4:]

    def _pins(self, wire: torch.device) -> bool:
        return self._pinned and wire.type == "cpu"


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared loader whose dataset is read by the main process only, for all processes.

    Made by ``Accelerator.prepare`` where ``DataLoaderConfiguration(dispatch_batches=True)`` says
    so. It gives each process the samples that it would have read itself, and resumes alike. It
    is meant for data that only one process can reach: reading takes as long as for one process,
    and each batch is sent.

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


class CollatePieces:
    """Collate the part of each process by itself, as each process would have done.

    Args:
        collate_fn: the user's.
        whole: collate the parts together, as one batch to be sliced, and tell their sizes.

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
        """The batch of each process, or (one batch, the sizes of the parts)."""
        if self.whole:
            return self.collate_fn(list(chain(*pieces))), [len(piece) for piece in pieces]
        return [self.collate_fn(piece) for piece in pieces]


class _PieceReader(Dataset[Any]):
    """Reads a list of indices for each process from the user's dataset."""

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
    """The parts of all processes of each global batch of a map-style dataset.

    Args:
        source: the part of one process.
        setting: how many processes there are.
    """

    def __init__(self, source: ShareSource, setting: Setting) -> None:
        super().__init__(source._loader, source._plan, source.sampler, source._batched)
        self._world = setting.world_size
        whole = setting.slice_fn is not None and self._batched
        self._collate = CollatePieces(self._loader.collate_fn, whole=whole)

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read the parts of all processes."""
        reader = _PieceReader(self._loader.dataset, self._batched)
        options = {"dataset": reader, "sampler": self, "batch_size": None}
        return options | {"collate_fn": self._collate}

    def __iter__(self) -> Iterator[Any]:
        plans = [replace(self._current, rank=rank) for rank in range(self._world)]
        parts = (plan.shares(self._order, self._position) for plan in plans)
        for shares in zip(*parts, strict=True):
            self._shares.append(shares[0])
            yield [share.indices if self._batched else share.indices[0] for share in shares]


class DispatchSource(StatefulSource):
    """Deliver what the main process reads for this process.

    Args:
        inner: yields the parts of all processes (:class:`WholeShares`, or a stream that was
            opened for every rank); read in the main process.
        loader: the user's.
        setting: which process this is.

    Raises:
        ValueError: the setting is not about the processes that there are.
    """

    def __init__(
        self, inner: WholeShares | StreamSource, loader: DataLoader[Any], setting: Setting
    ) -> None:
        there = dist.get_world_size() if dist.is_initialized() else 1
        if setting.world_size != there:
            raise ValueError(
                f"dispatch_batches=True sends batches to the {there} processes that there are: "
                f"leave num_processes={setting.world_size} out."
            )
        self._inner = inner
        self._rank, self._world = setting.rank, setting.world_size
        # Ready batches are not cut.
        self._slice = None if loader.batch_sampler is None else setting.slice_fn
        self._pinned = loader.pin_memory and torch.accelerator.is_available()
        self._problem: Exception | None = None
        self._position = 0

    @property
    def _reads(self) -> bool:
        return self._rank == 0

    @property
    def sampler(self) -> Any:
        """What the order comes from, ``None`` for a stream."""
        return getattr(self._inner, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        """Take the order from another one, from the next pass on."""
        self._inner.sampler = sampler  # type: ignore[union-attr]

    @property
    def even_batches(self) -> bool:
        """Fill the tail up with repetitions, from the next pass on."""
        return self._inner.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self._inner.even_batches = even

    @property
    def fresh_workers(self) -> bool:  # type: ignore[override]
        """Whether workers of the last pass cannot be used for this one."""
        return isinstance(self._inner, StatefulSource) and self._inner.fresh_workers

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch."""
        return self._inner.total_batch_size

    @property
    def remainder(self) -> int:
        """Samples of an epoch over its full global batches; -1 if unknown or dropped."""
        return self._inner.remainder

    def loader_options(self) -> dict[str, Any]:
        """The arguments for a torch loader; those of the other processes read nothing."""
        options = self._inner.loader_options()
        if self._reads:
            return options
        idle: dict[str, Any] = dict.fromkeys(
            ("worker_init_fn", "multiprocessing_context", "prefetch_factor")
        )
        idle |= {"num_workers": 0, "timeout": 0, "persistent_workers": False, "pin_memory": False}
        return options | idle

    def steps(self) -> int:
        """Batches of a whole epoch; TypeError if that cannot be known."""
        return self._inner.steps()

    def remaining(self) -> int | None:
        """Batches left in the epoch that was begun, ``None`` if unknown."""
        return None if self._problem else self._inner.remaining()

    def begun(self) -> int:
        """Batches of this epoch before the position that was begun at."""
        if isinstance(self._inner, StreamSource):  # which has begun in the main process only
            return self._position // self._inner.total_batch_size
        return 0 if self._problem else self._inner.begun()

    def position_of(self, batches: int) -> int:
        """Global samples before this batch of the epoch that was begun."""
        return 0 if self._problem else self._inner.position_of(batches)

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """What the random generators of loader workers are seeded with."""
        return self._inner.worker_seed(seed, epoch, position)

    def restore(self, state: State | None) -> None:
        """Remember where to go on; ``None`` is the beginning."""
        if isinstance(self._inner, StatefulSource):
            self._inner.restore(state)

    def problem(self, state: State | None) -> str | None:
        """Why a resume from this state cannot be exact, ``None`` if it is."""
        if isinstance(self._inner, StatefulSource):
            return self._inner.problem(state)
        return None

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Get ready; a stream is not touched in the other processes."""
        self._problem, self._position = None, position
        if self._world > 1 and not self._reads and isinstance(self._inner, StreamSource):
            return
        try:
            self._inner.begin(seed, epoch, position)
        except Exception as problem:
            if self._world == 1:
                raise
            self._problem = problem  # the other processes wait for a batch, and get this

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """This process's part of each batch, with its counts."""
        if self._world == 1:
            for item, delivery in self._inner.deliver(items):
                yield self._pieces(item)[0], delivery
        elif self._reads:
            yield from self._send(items)
        else:
            yield from self._receive()

    def _send(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        sender = Sender()
        try:
            if self._problem is not None:
                raise self._problem
            for item, delivery in self._inner.deliver(items):
                pieces = self._pieces(item)
                last = -1 if delivery.last is None else int(delivery.last)
                kept = [0] * self._world if delivery.kept is None else list(delivery.kept)
                numbers = [delivery.real, delivery.padded, last, delivery.kept is not None]
                sender.batch(pieces, [int(number) for number in numbers], kept)
                yield pieces[0], delivery
        except AlreadyTold as told:
            raise told.problem from None
        except Exception as problem:
            with suppress(Exception):  # the others may be gone; the first error is the one to see
                sender.failure("".join(traceback.format_exception(problem)))
            raise
        sender.end()

    def _receive(self) -> Iterator[tuple[Any, Delivery]]:
        receiver = Receiver(self._pinned)
        while (received := receiver.batch()) is not None:
            piece, (real, padded, last, counted), kept = received
            known = None if last < 0 else bool(last)
            yield piece, Delivery(real, padded, known, kept if counted else None)

    def _pieces(self, item: Any) -> list[Any]:
        """The part of each process, sliced from one batch if the user does that."""
        if self._slice is None:
            return list(item)
        batch, sizes = item
        ends = [sum(sizes[: rank + 1]) for rank in range(self._world)]
        return [
            self._slice(
                batch, slice(end - size, end), process_index=rank, num_processes=self._world
            )
            for rank, (end, size) in enumerate(zip(ends, sizes, strict=True))
        ]
