"""Streams that are sharded at the source, as those of Hugging Face datasets are.

A dataset counts as one if it has ``num_shards`` and ``shard(num_shards=, index=)``. Each process
reads only its own shards. These may be uneven, so the processes tell each other with each batch
what they have, and go on together until all have come to their end: no sample is lost, whatever
``even_batches`` says, and no process waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.data.iterable import IterableShards, has_state
from accel_callbacks.data.sampler import mix_seed
from accel_callbacks.data.sources import Delivery, Setting
from accel_callbacks.data.stream import State, StatefulSource, StreamSource, leads_to, ready_kept
from accel_callbacks.distributed.failures import share_failure

__all__ = ["AgreedSource", "can_shard", "own_shards"]


def can_shard(dataset: Any, world_size: int) -> bool:
    """Whether each of so many processes can read shards of its own.

    Raises:
        ValueError: it is split over processes already.
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
    """The source of this process, for a dataset that :func:`can_shard`."""
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
    """Collective: the numbers of all processes, in rank order; the same many on each."""
    own = collectives.on_backend(torch.tensor(numbers))
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]


class AgreedSource(StatefulSource):
    """Batches of this process's own shards, in step with the other processes.

    A process that has run out repeats its last batch, of which then nothing is kept.

    Args:
        inner: this process's own shards, as a stream of one process.
        batch_size: samples of one process; ``None`` for ready batches, which count as one.
        setting: which process this is.
    """

    def __init__(self, inner: StreamSource, batch_size: int | None, setting: Setting) -> None:
        self._inner = inner
        self._size = (batch_size or 1) * setting.world_size
        self._ready = batch_size is None
        self._setting = setting
        self._drop_last = inner.drop_last
        self._restored: State | None = None
        self._begun: tuple[int, int] | None = None
        self._inner_position = self._skip = 0

    @property
    def even_batches(self) -> bool:
        """Always: where all samples are to be read, processes that run out need repetitions."""
        return True

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        """Accept any; see above."""

    @property
    def fresh_workers(self) -> bool:  # type: ignore[override]
        """Whether workers of the last pass cannot be used for this one."""
        return self._inner.fresh_workers

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch."""
        return self._size

    @property
    def remainder(self) -> int:
        """Unknown: shards may be uneven."""
        return -1

    def loader_options(self) -> dict[str, Any]:
        """The arguments that make a torch loader read from this source."""
        return self._inner.loader_options()

    def steps(self) -> int:
        """TypeError: the longest shards decide, and no process knows them all."""
        raise TypeError("a stream that is sharded at the source does not know its length.")

    def remaining(self) -> int | None:
        """Unknown, likewise."""
        return None

    def begun(self) -> int:
        """Full batches of this epoch before the position that was begun at."""
        return 0 if self._begun is None else self._begun[1] // self._size

    def position_of(self, batches: int) -> int:
        """Global samples before this batch of the epoch, as long as no process has run out."""
        return batches * self._size

    def worker_seed(self, seed: int, epoch: int, position: int) -> int:
        """Other noise on each rank, the same after a resume."""
        return mix_seed(seed, epoch, self._setting.rank)

    def restore(self, state: State | None) -> None:
        """Remember where to go on; ``None`` is the beginning."""
        self._restored, self._begun = state, None
        exact = state is not None and self.problem(state) is None
        self._inner.restore(state["stream"] if state is not None and exact else None)

    def problem(self, state: State | None) -> str | None:
        """Why a resume from this state cannot be exact, ``None`` if it is."""
        if state is None:
            return None
        own = state.get("own")
        if own is None:
            return "each process had read the whole stream, and now reads its own shards"
        if own["world"] != self._setting.world_size:
            return f"it was sharded over {own['world']} processes"
        if "stream" not in state:
            return "the state of this process's shards is missing"
        return self._inner.problem(state["stream"])

    def begin(self, seed: int, epoch: int, position: int) -> None:
        """Begin this process's shards, and note what the processes then drop together."""
        if self._begun != (epoch, position):
            self._begun = (epoch, position)
            self._inner_position, self._skip = self._way_to(epoch, position)
        self._inner.begin(seed, epoch, self._inner_position)

    def _way_to(self, epoch: int, position: int) -> tuple[int, int]:
        """(position in the own shards, global samples dropped after that)."""
        state = self._restored
        problem = self.problem(state)
        if state is not None and problem is None and leads_to(state, epoch, position):
            own = state["stream"]  # None where this process has had nothing yet
            return own["position"] if own else 0, position - state["position"]
        if position:
            self._inner.warn_of_skipping(position, problem)
        return 0, position

    def deliver(self, items: Iterator[Any]) -> Iterator[tuple[Any, Delivery]]:
        """Each batch with its counts, until all processes have come to their end."""
        assert self._begun is not None
        epoch, position = self._begun
        dropped = 0
        own = {"world": self._setting.world_size, "rank": self._setting.rank}
        for batch, delivery, stream in self._steps(self._inner.deliver(items)):
            if dropped + delivery.real <= self._skip:
                dropped += delivery.real
                continue
            position += delivery.real
            state = {"epoch": epoch, "position": position, "own": own, "stream": stream}
            yield batch, delivery._replace(state=state)

    def _steps(
        self, mine: Iterator[tuple[Any, Delivery]]
    ) -> Iterator[tuple[Any, Delivery, State | None]]:
        """What all processes deliver in one step, with the place in the own shards after it."""
        held: Any = None
        size = 0
        stream = self._place_at_rest()
        more = True
        while more:
            entry, failure = _next_or_error(mine)
            real = 0 if entry is None else entry[1].real
            goes_on = entry is not None and not entry[1].last
            table = _exchange(real, real or size, goes_on, failure is not None)
            if any(row[3] for row in table):
                _report_failure(failure)
            reals, sizes, others = ([row[i] for row in table] for i in range(3))
            if not any(reals) or (self._drop_last and not all(reals)):
                return
            if entry is not None:
                held, size, stream = entry[0], real, entry[1].state
            if not all(sizes):  # some process has never had a batch to repeat
                giver = next(rank for rank, count in enumerate(reals) if count)
                lent = collectives.broadcast_object(held, from_process=giver)
                held, size = (held, size) if size else (lent, reals[giver])
                sizes = [count or reals[giver] for count in sizes]
            more = all(others) if self._drop_last else any(others)
            yield held, self._delivery(reals, sizes, last=not more), stream

    def _place_at_rest(self) -> State | None:
        """Where a process goes on that has run out before the place that was restored."""
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


def _report_failure(failure: Exception | None) -> None:
    """Collective: raise the own failure, or the one of another process."""
    share_failure(failure, "reading the data")
    if failure is not None:
        raise failure
