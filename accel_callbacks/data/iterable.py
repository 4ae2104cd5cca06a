"""Shard iterable datasets: every rank reads the whole stream and keeps its own pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_callbacks.data.sampler import call_set_epoch, mix_seed
from accel_callbacks.data.shard import fill_up, split_evenly
from accel_callbacks.data.stream_checks import checksum, may_divide
from checkpoint_io.warning import warn

__all__ = ["CollateShare", "IterableDatasetShard", "IterableShards", "Part", "Piece", "has_state"]


@dataclass(frozen=True)
class Part:
    """What is known of one rank's part of a global batch.

    Args:
        real: samples of the global batch, each counted once (ready batches count as one).
        padded: the same with the repetitions.
        worker: index of the worker process that read it, 0 without workers.
        ended: the stream has no more.
        state: the dataset's own after the batch, if it has one.
        checksum: of the samples of the first global batch, before its division, of a dataset that
            may read a part by itself; else ``None``.
    """

    real: int
    padded: int
    worker: int = 0
    ended: bool = False
    state: Any = None
    checksum: int | None = None


#: The samples of this rank, collated later, and what is known of them. For a reader of all ranks'
#: parts, a list of the samples of each.
Piece = tuple[Any, Part]


class IterableShards(IterableDataset["Piece | None"]):
    """A dataset that reads the whole stream and yields this rank's piece of each global batch.

    The tail is filled up with its own samples, so that it is the same after a resume. If not
    ``even``, it is split as evenly as possible, and joins the batch before it if it has fewer
    samples than there are ranks.

    Args:
        dataset: the user's.
        batch_size: samples of one rank; ``None`` if the dataset yields ready batches, of which
            each rank then gets one.
        drop_last: drop a tail that does not fill a global batch.
        rank: of this process.
        world_size: number of processes.
        every_rank: yield the pieces of all ranks, as a list.
        stateful: take the state of the dataset after each batch.

    Attributes:
        may_divide: the dataset may read a part for its rank by itself.

    Example:
        >>> from accel_callbacks.data.iterable import IterableShards
        >>> shards = IterableShards(range(5), batch_size=2, drop_last=False, rank=1, world_size=2)
        >>> [(batch, part.real, part.ended) for batch, part in shards]
        [([2, 3], 4, False), ([4], 1, True)]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        world_size: int,
        every_rank: bool = False,
        stateful: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.every_rank = every_rank
        self.stateful = stateful
        self.may_divide = world_size > 1 and not every_rank and may_divide(dataset)
        self.resume: Mapping[str, Any] | None = None  # where the next pass begins
        # (epoch, seed, even) in shared memory: persistent workers keep their copy of this object
        # over epochs, and would not see a plain attribute change.
        self._pass = torch.tensor([0, 0, 1], device="cpu")
        self._pass.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def even(self) -> bool:
        """True if the tail is filled up with repetitions."""
        return bool(self._pass[2])

    @even.setter
    def even(self, even: bool) -> None:
        self._pass[2] = even

    @property
    def size(self) -> int:
        """Items of the dataset in a full global batch."""
        return (self.batch_size or 1) * self.world_size

    def set_pass(self, seed: int, epoch: int) -> None:
        """Set the epoch of the next pass, and the seed of the dataset's generator in it."""
        self._pass[0], self._pass[1] = epoch, mix_seed(seed, epoch)

    def __len__(self) -> int:
        """Samples of the whole stream; TypeError if the dataset has no length."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Piece | None]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        set_dataset_epoch(self.dataset, int(self._pass[0]), int(self._pass[1]))
        # Used once: a persistent worker starts its next pass at the beginning of the stream.
        resume, self.resume = self.resume, None
        mark: Mapping[str, Any] = {"read": 0, "ended": False, "state": None}
        if resume is not None:
            mark = resume["workers"][worker]
            if worker < resume["turn"]:
                # torch asks the workers in turn, from worker 0 on. The next batch is that of
                # worker ``turn``, so those before it yield a placeholder first.
                yield None
        if mark["ended"]:
            if mark["state"] is not None and self.stateful:  # for the next pass
                self.dataset.load_state_dict(mark["state"])  # type: ignore[attr-defined]
            return
        stream, fresh = self._continue_from(mark), mark["read"] == 0
        batches = self._batches(stream)
        if self.world_size > 1 and self.batch_size is not None and not self.even:
            batches = self._join_short_tail(batches, fresh)
        alone = self.world_size == 1 and self.batch_size is not None and not self.every_rank
        size, known = self.size, None
        for items, state in batches:
            # Hot path: full batches share one part, by which the loader knows them.
            part = known
            if part is None or state is not None or len(items) != size:
                part = self._part(items, worker, state)
                if fresh and self.may_divide:
                    part = replace(part, checksum=checksum(items))
                elif info is None and state is None:
                    known = part
                fresh = False
            yield items if alone else self._share(items), part

    def _continue_from(self, mark: Mapping[str, Any]) -> Iterator[Any]:
        """Iterate the stream from a mark: by the dataset's state, else by reading up to it."""
        if mark["state"] is not None and self.stateful:
            dataset: Any = self.dataset
            fresh = None
            try:
                fresh = deepcopy(dataset.state_dict())
                dataset.load_state_dict(mark["state"])
                stream = iter(dataset)
                # Some datasets apply the state only with their first item, so one is read within
                # the try block.
                return chain(list(islice(stream, 1)), stream)
            except Exception as problem:
                with suppress(Exception):
                    dataset.load_state_dict(fresh)
                warn(
                    f"{type(self.dataset).__name__} does not take its saved state ({problem!r}): "
                    f"its first {mark['read']} samples are read and dropped instead.",
                )
        stream = iter(self.dataset)
        if mark["read"]:
            _drop(stream, mark["read"])
        return stream

    def _batches(self, stream: Iterator[Any]) -> Iterator[tuple[list[Any], Any]]:
        """Yield the items of each global batch, with the state of the dataset after it."""
        size, drop_last, stateful, state = self.size, self.drop_last, self.stateful, None
        while items := list(islice(stream, size)):
            if drop_last and len(items) < size:
                return
            if stateful:
                # Taken before the next items are read, which changes it. Not at the end, where the
                # dataset may have reset itself for its next pass.
                ended = len(items) < size
                state = None if ended else deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
            yield items, state

    def _join_short_tail(
        self, batches: Iterator[tuple[list[Any], Any]], fresh: bool
    ) -> Iterator[tuple[list[Any], Any]]:
        """Join a tail of fewer samples than ranks with the batch before it.

        Args:
            batches: the items of each, and the state after it.
            fresh: they are all of the pass.
        """
        held: tuple[list[Any], Any] | None = None
        for items, state in batches:
            if held is None:
                held = items, state
            elif len(items) < self.world_size:
                held = held[0] + items, state
            else:
                yield held
                held, fresh = (items, state), False
        if held is None:
            return
        # An error only if the full pass is that short. The short rest of a resumed pass is filled
        # up instead, because it would be lost otherwise.
        if len(held[0]) < self.world_size and fresh:
            raise ValueError(
                f"a pass over {type(self.dataset).__name__} has {len(held[0])} samples (of one "
                f"worker, where there are workers) for {self.world_size} processes, and with "
                "even_batches=False none is read twice: leave even_batches on for this loader, "
                "or use fewer workers or processes."
            )
        yield held

    def _part(self, items: list[Any], worker: int, state: Any) -> Part:
        real = padded = len(items)
        if self.world_size > 1 and (self.even or self.batch_size is None or real < self.world_size):
            padded = -(-real // self.world_size) * self.world_size
        return Part(real, padded, worker, real != self.size, state)

    def _share(self, items: list[Any]) -> Any:
        """Return the samples of this rank, or a list of those of each."""
        if self.every_rank:
            return [self._piece(items, rank) for rank in range(self.world_size)]
        return self._piece(items, self.rank)

    def _piece(self, items: list[Any], rank: int) -> Any:
        if self.batch_size is None:
            return items[rank % len(items)]
        if self.even or len(items) < self.world_size:
            return fill_up(items, items, rank, self.world_size)
        return split_evenly(items, rank, self.world_size)


class CollateShare:
    """Collate the samples of a :data:`Piece`, and keep what is known of them.

    Args:
        collate_fn: the user's, or one that calls it for each rank.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, piece: Piece | None) -> Piece | None:
        """Return the piece with its samples collated."""
        if piece is None:
            return None
        samples, part = piece
        try:
            return self.collate_fn(samples), part
        except StopIteration as stop:  # torch takes it for the end of the stream
            raise RuntimeError(
                "the collate_fn raised StopIteration, which would end the epoch here in silence: "
                "give its next(...) a default."
            ) from stop


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, one by one; every rank iterates the whole dataset.

    It is for loaders that are built by hand; ``Accelerator.prepare`` needs no such wrapper.

    Args:
        dataset: any iterable; its ``set_epoch`` is called with the epoch, or else its
            ``generator`` is seeded with it.
        batch_size: samples of a batch of one rank, or with ``split_batches`` of a global batch.
        drop_last: drop a tail that does not fill a batch on all ranks.
        num_processes: number of processes that share the dataset.
        process_index: index of this process among them.
        split_batches: see ``batch_size``.
        even_batches: fill the last batch up with the first samples. If False, its samples are
            split as evenly as possible, and none is yielded twice.

    Raises:
        ValueError: ``split_batches``, and the batch size is no multiple of ``num_processes``.

    Example:
        >>> from accel_callbacks.data.iterable import IterableDatasetShard
        >>> list(IterableDatasetShard(range(7), 2, num_processes=2, process_index=1))
        [2, 3, 6, 0]
        >>> [*IterableDatasetShard(range(7), 2, num_processes=2, even_batches=False)]
        [0, 1, 4, 5]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        if split_batches and batch_size % num_processes:
            raise ValueError(
                f"split_batches=True splits a batch of {batch_size} over {num_processes} "
                f"processes: make batch_size a multiple of {num_processes}."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.epoch = 0

    @property
    def _size(self) -> int:
        """Samples of a global batch."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch
        set_dataset_epoch(self.dataset, epoch, epoch)

    def __len__(self) -> int:
        """Samples of this rank; TypeError if the dataset has no length."""
        full, tail = divmod(len(self.dataset), self._size)
        return full * self._share(self._size) + (0 if self.drop_last else self._share(tail))

    def _share(self, samples: int) -> int:
        """Return how many samples of such a batch this rank yields."""
        if samples and self.even_batches:
            samples = self._size
        return len(split_evenly(range(samples), self.process_index, self.num_processes))

    def __iter__(self) -> Iterator[Any]:
        set_dataset_epoch(self.dataset, self.epoch, self.epoch)
        stream = iter(self.dataset)
        opening: list[Any] = []
        while batch := list(islice(stream, self._size)):
            opening = opening or batch
            if len(batch) < self._size:
                if self.drop_last:
                    return
                if self.even_batches:
                    batch += islice(cycle(list(opening)), self._size - len(batch))
            yield from split_evenly(batch, self.process_index, self.num_processes)


def _drop(stream: Iterator[Any], count: int) -> None:
    """Read samples and drop them, with the generators of this process as they were."""
    from accel_callbacks.distributed.rng import capture_rng, restore_rng

    # The draws for these samples are in the restored state already. A worker's generators start
    # from their seed, and have to draw them again.
    cpu = torch.device("cpu")
    drawn = capture_rng(cpu) if get_worker_info() is None else None
    deque(islice(stream, count), maxlen=0)
    if drawn is not None:
        restore_rng(drawn, cpu)


def set_dataset_epoch(dataset: Any, epoch: int, seed: int) -> None:
    """Set the epoch of a dataset with ``set_epoch``, else seed its generator if it has one."""
    if call_set_epoch(dataset, epoch):
        return
    generator = getattr(dataset, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)


def has_state(dataset: Any) -> bool:
    """Return whether a dataset has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
