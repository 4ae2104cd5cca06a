"""The prepared loader: sharded, resumable at any sample, and aware of its own padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from accel_callbacks.data.iterable import IterableShards
from accel_callbacks.data.order import mix_seed
from accel_callbacks.data.plan import BatchPlan, SamplePlan
from accel_callbacks.data.shares import ShareSource
from accel_callbacks.data.sources import Source
from accel_callbacks.data.streams import StreamSource
from accel_callbacks.state import Topology

__all__ = ["DataLoaderShard", "loader_seed", "prepare_loader"]


class LoopEvents(Protocol):
    """Who is told about iteration: it adds the hooks around the batches."""

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        """Iterate ``loader.batches()``, with everything that belongs around it."""


class DataLoaderShard(DataLoader[Any]):
    """A torch DataLoader that reads this process's share, in an order it can return to.

    Made by ``Accelerator.prepare``. Each ``for`` over it is one epoch; the order is a function
    of the seed and the epoch, and the position is a count of global samples, so that a resume
    continues at the exact sample, on the same or another number of processes.

    Attributes:
        epoch: index of the current pass, -1 before the first.
        position: samples of this epoch delivered so far, over all processes.
        real: samples of the current global batch, each counted once.
        padded: samples of the current global batch as read, repetitions included.
        kept: see :class:`accel_callbacks.data.sources.Delivery`.
        left: batches left in the epoch with the current one, ``None`` if unknown.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator, DataLoaderShard
        >>> loader = torch.utils.data.DataLoader(range(5), batch_size=2)
        >>> prepared = Accelerator(cpu=True).prepare(loader)
        >>> isinstance(prepared, DataLoaderShard), [batch.tolist() for batch in prepared]
        (True, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        source: Source,
        *,
        events: LoopEvents,
        move: Callable[[Any], Any] | None,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__(**source.loader_options(), **options)
        self._source = source
        self._events = events
        self._move = move
        self.seed = seed
        self.epoch = -1
        self.position = 0
        self.finished = False
        self.real = self.padded = 0
        self.kept: Sequence[int] | None = None
        self.left: int | None = None
        self.on_last = False
        self.batch_index = 0
        self.trained = False  # the last pass was a training pass
        self.passes = 0
        self._continue = False
        self._skip_pass = False
        self._next_epoch: int | None = None
        self._before: tuple[int, int, bool, int | None, bool] = (-1, 0, False, None, False)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._events.iterate(self)

    def __len__(self) -> int:
        """Batches of a whole epoch on this process."""
        return self._source.steps()

    @property
    def total_batch_size(self) -> int | None:
        """Samples of a full global batch, ``None`` where batches vary."""
        return self._source.total_batch_size

    def batches(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of the one that was resumed, on the device."""
        if self._skip_pass:
            self._skip_pass = False
            return
        self._begin()
        self.left = self._source.remaining()
        self.batch_index = self._source.begun()
        assert isinstance(self.generator, torch.Generator)
        self.generator.manual_seed(self._source.worker_seed(self.seed, self.epoch, self.position))
        move = self._move
        for item, delivery in self._source.deliver(super().__iter__()):
            if move is not None:
                item = move(item)
            self.real, self.padded, self.kept = delivery.real, delivery.padded, delivery.kept
            self.position += delivery.real
            self.on_last = self.left == 1 if delivery.last is None else delivery.last
            yield item
            self.batch_index += 1
            if self.left is not None:
                self.left -= 1
        self.finished = True

    def _begin(self) -> None:
        self._before = (self.epoch, self.position, self._continue, self._next_epoch, self.finished)
        if not self._continue:
            self.epoch = self.epoch + 1 if self._next_epoch is None else self._next_epoch
            self.position = 0
        self._continue, self._next_epoch, self.finished = False, None, False
        self._source.begin(self.seed, self.epoch, self.position)

    def set_epoch(self, epoch: int) -> None:
        """Use this epoch's order in the next pass; without it, passes count up from 0."""
        if epoch != self.epoch:
            self._continue = False
        self._next_epoch = epoch

    def end_pass(self) -> None:
        """The loop over this epoch was left: the next pass is a new epoch."""
        self.finished = True
        self._continue = False

    def rewind(self) -> None:
        """Begin again with the first epoch."""
        self.end_pass()
        self.epoch = -1

    def undo_pass(self) -> None:
        """It was only a look at the first batch: the next pass is this one again."""
        self.epoch, self.position, self._continue, self._next_epoch, self.finished = self._before

    def skip_next_pass(self) -> None:
        """Deliver nothing in the next pass: the resumed run had read this epoch to its end."""
        self._skip_pass = True

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, and how many global samples of it were delivered."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "finished": self.finished,
            "trained": self.trained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, with the next ``for``."""
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        self.position = state["position"]
        self.finished = state["finished"]
        self.trained = state["trained"]
        # An evaluation is not continued, it is run again.
        self._continue = self.epoch >= 0 and self.trained and not self.finished


_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def loader_seed(loader: DataLoader[Any]) -> int:
    """What this process would seed the order with: torch's seed and that of its own generator."""
    own = getattr(loader, "generator", None)
    seeds = [own.initial_seed()] if isinstance(own, torch.Generator) else []
    return mix_seed(torch.initial_seed(), *seeds)


def prepare_loader(
    loader: DataLoader[Any],
    *,
    topology: Topology,
    events: LoopEvents,
    move: Callable[[Any], Any] | None,
    seed: int,
) -> DataLoaderShard:
    """Rebuild a torch DataLoader as a :class:`DataLoaderShard` for this process.

    Raises:
        ValueError: the loader shards already, or cannot be sharded.
    """
    options = {name: getattr(loader, name) for name in _KEPT}
    options["generator"] = torch.Generator()  # so that the program's own generator is left alone
    rank, world = topology.rank, topology.world_size
    source = _source_of(loader, rank, world)
    return DataLoaderShard(source, events=events, move=move, seed=seed, **options)


def _source_of(loader: DataLoader[Any], rank: int, world: int) -> Source:
    sampler = loader.sampler
    inside = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) or isinstance(inside, DistributedSampler):
        raise ValueError(
            "the loader has a DistributedSampler, and prepare() shards too: drop the sampler "
            "and pass shuffle=True instead."
        )
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise ValueError(
                "an iterable dataset with batch_size=None cannot be sharded: let it yield "
                "samples and give the loader a batch_size."
            )
        shards = IterableShards(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            rank=rank,
            world_size=world,
        )
        return StreamSource(loader, shards)
    if loader.batch_sampler is None:  # batch_size=None: each index is a batch of its own
        return ShareSource(loader, SamplePlan(1, False, rank, world), sampler, batched=False)
    if type(loader.batch_sampler) is BatchSampler:
        batches = loader.batch_sampler
        plan = SamplePlan(batches.batch_size, batches.drop_last, rank, world)
        return ShareSource(loader, plan, batches.sampler, batched=True)
    return ShareSource(loader, BatchPlan(rank, world), loader.batch_sampler, batched=True)
