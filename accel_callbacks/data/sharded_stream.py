"""Read streams that are sharded at the source, such as those of Hugging Face datasets.

A dataset counts as one if it has ``num_shards`` and ``shard(num_shards=, index=)``. Each rank
reads only its own shards. These may be uneven, so the ranks exchange with each batch what they
have, and continue together until all have reached their end: no sample is lost, whatever
``even_batches`` is, and no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.data.iterable import IterableShards, has_state
from accel_callbacks.data.order import Generators, Record, seeded_generator
from accel_callbacks.data.sampler import mix_seed
from accel_callbacks.data.shard import ready_kept
from accel_callbacks.data.sources import Delivery, Setting, Source, State
from accel_callbacks.data.stream import StreamSource, leads_to
from accel_callbacks.distributed.failures import share_failure

__all__ = ["AgreedSource", "can_shard", "own_shards"]


def can_shard(dataset: Any, world_size: int) -> bool:
    """Return whether the dataset has shards for this number of ranks.

    Raises:
        ValueError: the dataset is split over processes already.
    """
    if world_size > 1 and getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            "the dataset is split over the processes already (split_dataset_by_node), and "
            "prepare() would split it again: give the loader the whole dataset."
        )
    shards = getattr(dataset, "num_shards", None)
    if not isinstance(shards, int) or not callable(getattr(dataset, "shard", None)):
        return False
    return 1 < world_size <= shards


def own_shards(loader: DataLoader[Any], batch_size: int | None, setting: Setting) -> AgreedSource:
    """Return the source of this rank, for a dataset that :func:`can_shard`."""
    whole: Any = loader.dataset
    dataset = whole.shard(num_shards=setting.world_size, index=setting.rank)
    shards = IterableShards(
        dataset,
        batch_size=batch_size,
        drop_last=loader.drop_last,
        rank=0,
        world_size=1,
        stateful=setting.config.use_stateful_dataloader and has_state(dataset),
    )
    return AgreedSource(StreamSource(loader, shards), batch_size, setting)


def _exchange(*numbers: int) -> list[list[int]]:
    """Collective: return the numbers of all ranks in rank order; equally many on each."""
    row = collectives.on_backend(torch.tensor(numbers, device="cpu"))
    table = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(table, row, group=collectives.group_for(row))
    return [row.tolist() for row in table]


class AgreedSource(Source):
    """Batches of this rank's own shards, in step with the other ranks.

    A rank that has run out repeats its last batch, of which no sample is then kept. Several ranks
    draw by seed and epoch, and the position is in the state of the stream: so there is no record,
    and no draw as in a plain loop.

    Args:
        inner: this rank's own shards, as a stream of a single rank.
        batch_size: samples of one rank; ``None`` for ready batches, which count as one.
        setting: the rank and the options.
    """

    def __init__(self, inner: StreamSource, batch_size: int | None, setting: Setting) -> None:
        self._inner = inner
        self._size = (batch_size or 1) * setting.world_size
        self._copies = setting.copies
        self._ready = batch_size is None
        self._setting = setting
        self._drop_last = inner.drop_last
        self._restored: State | None = None
        self._begun: tuple[int, int] | None = None
        self._inner_position = self._skip = self._seed = 0

    @property
    def even_batches(self) -> bool:
        """Always True: ranks that run out need repetitions until all samples are read."""
        return True

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        """Ignore the value."""

    @property
    def fresh_workers(self) -> bool:  # type: ignore[override]
        """True if persistent workers of the last pass cannot be used for this one."""
        return self._inner.fresh_workers

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch."""
        return self._size

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments with which a torch loader reads from this source."""
        return self._inner.loader_options()

    def steps(self) -> int:
        """Raise TypeError: the longest shards decide, and no rank knows them all."""
        raise TypeError("a stream that is sharded at the source has no known length.")

    def first_batch(self) -> int:
        """Return the index in the epoch of the first batch of this pass, by full batches."""
        return 0 if self._begun is None else self._begun[1] // self._size

    def position_of(self, batches: int) -> int:
        """Return the global samples before this batch, as long as no rank has run out."""
        return batches * self._size

    def worker_generator(self, seed: int, epoch: int, position: int) -> torch.Generator:
        """Return a generator that differs between ranks, and is the same after a resume."""
        return seeded_generator(mix_seed(seed, epoch, self._setting.rank))

    def restore(self, state: State | None) -> None:
        """Store where to resume; ``None`` is the beginning."""
        self._restored, self._begun = state, None
        exact = state is not None and self.problem(state) is None
        self._inner.restore(state["stream"] if state is not None and exact else None)

    def problem(self, state: State | None) -> str | None:
        """Return why a resume from this state cannot be exact, ``None`` if it is."""
        if state is None:
            return None
        sharding = state.get("own")
        if sharding is None:
            return "each process had read the whole stream, and now reads its own shards"
        if sharding["world"] != self._setting.world_size:
            return f"it was sharded over {sharding['world']} processes"
        if "stream" not in state:
            return "the state of this process's shards is missing"
        return self._inner.problem(state["stream"])

    @property
    def generators(self) -> Generators:
        """The generator of the loader."""
        return self._inner.generators

    def seek(self, position: int) -> None:
        """Start the pass that was just begun at another position."""
        assert self._begun is not None
        self.begin(self._seed, self._begun[0], position)

    def begin(
        self,
        seed: int,
        epoch: int,
        position: int,
        record: Record | None = None,
        workers_start: bool = True,
    ) -> None:
        """Prepare a pass over this rank's shards, and count what all ranks drop together first."""
        self._seed = seed
        if self._begun != (epoch, position):
            self._begun = (epoch, position)
            self._inner_position, self._skip = self._route_to(epoch, position)
        self._inner.begin(seed, epoch, self._inner_position)

    def _route_to(self, epoch: int, position: int) -> tuple[int, int]:
        """Return (position in this rank's shards, global samples dropped after that)."""
        state = self._restored
        problem = self.problem(state)
        if state is not None and problem is None and leads_to(state, epoch, position):
            stream = state["stream"]  # None if this rank has read nothing yet
            return stream["position"] if stream else 0, position - state["position"]
        if position:
            self._inner.warn_of_skipping(position, problem)
        return 0, position

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Yield each batch with its counts, until all ranks have reached their end."""
        assert self._begun is not None
        epoch, position = self._begun
        dropped = 0
        sharding = {"world": self._setting.world_size, "rank": self._setting.rank}
        for batch, delivery, stream in self._steps(self._inner.deliver(items)):
            if dropped + delivery.real <= self._skip:
                dropped += delivery.real
                continue
            position += delivery.real
            state = {"epoch": epoch, "position": position, "own": sharding, "stream": stream}
            yield batch, delivery._replace(state=state)

    def _steps(
        self, mine: Iterator[tuple[Any, Delivery]]
    ) -> Iterator[tuple[Any, Delivery, State | None]]:
        """Yield each step of all ranks, with the position in this rank's shards after it."""
        held: Any = None
        size = number = 0
        stream = self._place_at_rest()
        more = True
        while more:
            entry, failure = _next_or_error(mine)
            real = 0 if entry is None else entry[1].real
            number += entry is not None
            goes_on = entry is not None and not entry[1].is_last(number)
            # A rank that has run out repeats its last batch, which has this size.
            table = _exchange(real, real or size, goes_on, failure is not None)
            # The flag comes with the counts, so that a good step costs no extra collective.
            if any(row[3] for row in table):
                share_failure(failure, "reading the data")
                if failure is not None:
                    try:
                        raise failure
                    finally:
                        failure = None  # its traceback has this frame: a cycle
            table = table[:: self._copies]  # one of the ranks that read the same shards
            reals, sizes, others = ([row[i] for row in table] for i in range(3))
            # All ranks have the same table, and so they end at the same step.
            if not any(reals) or (self._drop_last and not all(reals)):
                return
            if entry is not None:
                held, size, stream = entry[0], real, entry[1].state_after(number)
            if not all(sizes):  # a rank without any batch yet borrows one to repeat
                giver = next(rank for rank, count in enumerate(reals) if count)
                source = giver * self._copies
                lent = collectives.broadcast_object(held, from_process=source)
                held, size = (held, size) if size else (lent, reals[giver])
                sizes = [count or reals[giver] for count in sizes]
            more = all(others) if self._drop_last else any(others)
            yield held, self._delivery(reals, sizes, last=not more), stream

    def _place_at_rest(self) -> State | None:
        """Return the restored position of a rank that had run out before it, None without one."""
        state, begun = self._restored, self._begun
        if state is None or begun is None or self.problem(state) is not None:
            return None
        return state["stream"] if state["epoch"] == begun[0] else None

    def _delivery(self, reals: list[int], sizes: list[int], *, last: bool) -> Delivery:
        real = sum(reals)
        if real == sum(sizes):
            return Delivery(real, real, last=last)
        if self._ready:
            kept = [ready_kept(count, 1)[0] for count in reals]
            return Delivery(real, len(sizes), last=last, kept=kept)
        return Delivery(real, sum(sizes), last=last, kept=reals)


def _next_or_error(
    mine: Iterator[tuple[Any, Delivery]],
) -> tuple[tuple[Any, Delivery] | None, Exception | None]:
    try:
        return next(mine, None), None
    except Exception as problem:
        return None, problem
