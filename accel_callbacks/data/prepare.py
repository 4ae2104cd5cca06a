"""Turn a torch DataLoader into a prepared one: pick its source by dataset and sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from accel_callbacks import collectives
from accel_callbacks.data.config import DataLoaderConfiguration, checked_rng_types
from accel_callbacks.data.device import Feed, device_feed
from accel_callbacks.data.loader import (
    LOADER_OPTIONS,
    DataLoaderShard,
    LoopEvents,
    NoEvents,
    SkipDataLoader,
    skip_first_batches,
    stop_workers,
)
from accel_callbacks.data.sampler import BatchSamplerShard, SeedableRandomSampler, mix_seed
from accel_callbacks.data.shard import BatchPlan, SamplePlan, ShareSource
from accel_callbacks.data.sources import Setting, Source, check_even, split_size

if TYPE_CHECKING:
    from accel_callbacks.strategy.data_ranks import DataRanks

__all__ = ["Loaders", "order_seed", "prepare_data_loader", "prepare_loader", "share_of"]


class Loaders:
    """Prepares loaders, and keeps those that are prepared.

    Args:
        config: how loaders share their data among the ranks.
        rng_types: random generators that each pass synchronizes.
        feed: called with ``non_blocking`` for each loader; returns what moves its batches to the
            device.
        ranks: which ranks read different data.
        events: adds the hooks around batches.
        prepared: the prepared loaders, a list that grows.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> [batch.tolist() for batch in accel.prepare_data_loader(DataLoader(range(3), 2))]
        [[0, 1], [2]]
    """

    def __init__(
        self,
        config: DataLoaderConfiguration,
        rng_types: Sequence[Any],
        feed: Callable[[bool], Feed | None],
        *,
        ranks: DataRanks,
        events: LoopEvents,
        prepared: list[DataLoaderShard],
    ) -> None:
        self.config = config
        self.prepared = prepared
        self._rng_types = rng_types
        self._feed = feed
        self._ranks = ranks
        self._events = events

    def prepare(
        self,
        data_loader: DataLoader[Any] | SkipDataLoader,
        device_placement: bool = True,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader; see ``Accelerator.prepare_data_loader``."""
        if isinstance(data_loader, SkipDataLoader):
            inner = self.prepare(data_loader.loader, device_placement, slice_fn_for_dispatch)
            return skip_first_batches(inner, data_loader.skip_batches)
        origin = data_loader
        if isinstance(data_loader, DataLoaderShard):
            origin = data_loader if data_loader.origin is None else data_loader.origin
        # A loader has one position in its data: whoever prepares it again gets the same one.
        for known in self.prepared:
            if origin is known.origin or data_loader is known:
                return known
        config, ranks = self.config, self._ranks
        loader = prepare_loader(
            origin,
            Setting(ranks.rank, ranks.world, config, slice_fn_for_dispatch, ranks.copies),
            events=self._events,
            feed=self._feed(config.non_blocking) if device_placement else None,
            seed=order_seed(origin, config, len(self.prepared)),
            rng_types=self._rng_types,
        )
        self.prepared.append(loader)
        return loader

    def set_even_batches(self, even: bool) -> None:
        """Fill the last batch of all loaders up with repetitions, or not; for the next passes.

        Raises:
            ValueError: ``False``, and a prepared loader cannot do without; nothing is changed.
        """
        config = replace(self.config, even_batches=even)
        before = [loader.even_batches for loader in self.prepared]
        try:
            for loader in self.prepared:
                loader.even_batches = even
        except ValueError:
            for loader, value in zip(self.prepared, before, strict=True):
                loader.even_batches = value
            raise
        self.config = config

    @contextmanager
    def even_batches(self, even: bool | None) -> Iterator[None]:
        """Set ``even_batches`` for the passes in a block; None leaves it as it is."""
        if even is None:
            yield
            return
        before = self.config.even_batches
        self.set_even_batches(even)
        try:
            yield
        finally:
            self.set_even_batches(before)

    def clear(self) -> None:
        """Stop the workers of all loaders, and forget the loaders."""
        for loader in self.prepared:
            stop_workers(loader)
        self.prepared.clear()


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = True,
    use_stateful_dataloader: bool = True,
) -> DataLoaderShard:
    """Return a prepared loader without an Accelerator; no hooks fire around its batches.

    With several processes it is a collective, which all must call. For the options that are not
    explained here, see :class:`accel_callbacks.DataLoaderConfiguration`.

    Args:
        dataloader: any torch loader.
        device: the device of the batches, with ``put_on_device``.
        num_processes: number of processes that share the data; by default those of the process
            group, else 1.
        process_index: index of this process among them; by default its rank, else 0.
        split_batches: the batch size is that of all processes together.
        put_on_device: move batches to ``device``; off by default.
        rng_types: random generators that each pass sets to their state on the main process.
        dispatch_batches: the main process reads for all.
        even_batches: fill the last batch up with repetitions.
        slice_fn_for_dispatch: slices the part of one process from a batch that is dispatched.
        use_seedable_sampler: shuffle as :class:`accel_callbacks.SeedableRandomSampler` does.
        data_seed: the seed of the order.
        non_blocking: do not wait for copies from pinned memory.
        use_stateful_dataloader: resume a stream from its own state, if it has one.

    Raises:
        ValueError: the loader shards already or cannot be sharded with these options, or
            ``put_on_device`` without a device.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import prepare_data_loader
        >>> loader = prepare_data_loader(DataLoader(range(8), 2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7]]
    """
    if put_on_device and device is None:
        raise ValueError("put_on_device=True needs a device: pass device= too.")
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    world = collectives.world_size() if num_processes is None else num_processes
    rank = collectives.rank() if process_index is None else process_index
    if not 0 <= rank < world:
        raise ValueError(f"process_index={rank} must be below num_processes={world}, from 0 on.")
    feed = device_feed(torch.device(device), non_blocking) if put_on_device and device else None
    return prepare_loader(
        dataloader,
        Setting(rank, world, config, slice_fn_for_dispatch),
        events=NoEvents(),
        feed=feed,
        seed=order_seed(dataloader, config, 0),
        rng_types=checked_rng_types(rng_types),
    )


def prepare_loader(
    loader: DataLoader[Any],
    setting: Setting,
    *,
    events: LoopEvents,
    feed: Feed | None,
    seed: int,
    rng_types: Sequence[Any] = (),
    shards_itself: bool = False,
) -> DataLoaderShard:
    """Rebuild a torch DataLoader as a :class:`DataLoaderShard` for this process.

    Args:
        loader: the user's.
        setting: the rank that it reads for.
        events: the loop around its batches.
        feed: the copies to the device, if any.
        seed: of seeded orders and of workers.
        rng_types: the random generators that each pass synchronizes.
        shards_itself: its sampler may be that of one rank; ``setting`` is that of a single process.

    Raises:
        ValueError: the loader shards already, or cannot be sharded with these options.
    """
    options = {name: getattr(loader, name) for name in (*LOADER_OPTIONS, "persistent_workers")}
    options |= {"origin": loader, "rng_types": rng_types}
    if not shards_itself:
        _refuse_sharded(loader)
    source = _source_of(loader, setting)
    kind: type[DataLoaderShard] = DataLoaderShard
    if setting.config.dispatch_batches:
        from accel_callbacks.data.dispatch import DataLoaderDispatcher

        kind = DataLoaderDispatcher
        options["setting"] = setting
    if type(loader).__iter__ is not DataLoader.__iter__:
        from accel_callbacks.data.own_iter import class_with_iter

        kind = class_with_iter(kind, loader, setting.world_size * setting.copies)
    return kind(source, events=events, feed=feed, seed=seed, **options)


def _source_of(loader: DataLoader[Any], setting: Setting) -> Source:
    """Return the source that the prepared loader reads from."""
    stream = isinstance(loader.dataset, IterableDataset)
    ready = loader.batch_size is None if stream else loader.batch_sampler is None
    if ready and setting.config.split_batches:
        raise ValueError(
            "a loader with batch_size=None reads ready batches, and split_batches=True cannot "
            "split them: give it a batch_size."
        )
    return _open_stream(loader, setting) if stream else _open_shares(loader, setting)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    inside = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.batch_sampler, loader.sampler, inside):
        if isinstance(sampler, (DistributedSampler, BatchSamplerShard)):
            raise ValueError(
                f"the loader has a {type(sampler).__name__}, and prepare() shards too: drop the "
                "sampler and pass shuffle=True instead."
            )


def _open_shares(loader: DataLoader[Any], setting: Setting) -> Source:
    """Return the source of a map-style dataset: ready batches, samples, or a custom sampler's."""
    config, rank, world = setting.config, setting.rank, setting.world_size
    batches: Any = loader.batch_sampler
    size = share_of(getattr(batches, "batch_size", None), setting)
    if batches is None:  # each item of the dataset is a ready batch, and counts as one sample
        plan: Any = SamplePlan(1, False, rank, world)
        sampler: Any = loader.sampler
    elif type(batches) is BatchSampler:
        plan = SamplePlan(size or 1, batches.drop_last, rank, world)
        sampler = batches.sampler
    else:  # a class of the user's may choose what goes together: its batches stay whole
        plan = BatchPlan(rank, world, split=config.split_batches, batch_size=size)
        sampler = batches
    parts = world if config.split_batches else 1
    seeded = config.seeds_orders
    order = _seedable(sampler, config), batches is not None, seeded, setting.copies, parts
    if not config.dispatch_batches:
        source = ShareSource(loader, plan, *order)
        source.even_batches = config.even_batches
        return source
    from accel_callbacks.data.dispatch import WholeShares

    shares = WholeShares(loader, plan, *order, slices=setting.slice_fn is not None)
    shares.even_batches = config.even_batches
    return shares


def _open_stream(loader: DataLoader[Any], setting: Setting) -> Source:
    """Return the source of an iterable dataset, of samples or of ready batches."""
    # Imported here, because most datasets are map-style.
    from accel_callbacks.data.iterable import IterableShards, has_state
    from accel_callbacks.data.sharded_stream import can_shard, own_shards
    from accel_callbacks.data.stream import StreamSource

    batch_size = share_of(loader.batch_size, setting)
    config, dataset = setting.config, cast(Iterable[Any], loader.dataset)
    check_even(config.even_batches, ready=batch_size is None)
    every_rank = bool(config.dispatch_batches)
    # One rank reads for all, or each its own shards: a stream is divided once.
    if can_shard(dataset, setting.world_size) and not every_rank:
        return own_shards(loader, batch_size, setting)
    shards = IterableShards(
        dataset,
        batch_size=batch_size,
        drop_last=loader.drop_last,
        rank=setting.rank,
        world_size=setting.world_size,
        every_rank=every_rank,
        stateful=config.use_stateful_dataloader and has_state(dataset),
    )
    shards.even = config.even_batches
    if not every_rank:
        return StreamSource(loader, shards, seeded=config.seeds_orders, copies=setting.copies)
    from accel_callbacks.data.dispatch import CollatePieces

    whole = setting.slice_fn is not None and batch_size is not None
    collate = CollatePieces(loader.collate_fn, whole=whole)
    return StreamSource(loader, shards, collate, config.seeds_orders, setting.copies)


def share_of(batch_size: int | None, setting: Setting) -> int | None:
    """Return the batch size of one rank for a loader of this batch size.

    Raises:
        ValueError: with ``split_batches``, if it cannot be split evenly.

    Example:
        >>> from accel_callbacks.data.config import DataLoaderConfiguration
        >>> from accel_callbacks.data.prepare import share_of
        >>> from accel_callbacks.data.sources import Setting
        >>> share_of(8, Setting(0, 2, DataLoaderConfiguration(split_batches=True)))
        4
    """
    if batch_size is None or not setting.config.split_batches:
        return batch_size
    return split_size(batch_size, setting.world_size)


def _seedable(sampler: Any, config: DataLoaderConfiguration) -> Any:
    """Return the sampler with a SeedableRandomSampler for a RandomSampler, if that is set."""
    if not config.use_seedable_sampler:
        return sampler
    if type(sampler) is RandomSampler:
        return SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,
            data_seed=config.data_seed,
        )
    if type(getattr(sampler, "sampler", None)) is RandomSampler:
        sampler = copy(sampler)  # the user's own is not changed
        sampler.sampler = _seedable(sampler.sampler, config)
    return sampler


def order_seed(loader: DataLoader[Any], config: DataLoaderConfiguration, number: int) -> int:
    """Collective: return the seed of a loader's order, the same on all ranks.

    Generators may be seeded differently on each rank; the seed of rank 0 is used.

    Args:
        loader: the loader to be prepared.
        config: may hold the seed.
        number: index of this loader among the prepared ones, so that each is shuffled
            independently.
    """
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        sampler = _seedable(sampler, config)
        if isinstance(sampler, SeedableRandomSampler):
            seed = sampler.initial_seed if config.data_seed is None else config.data_seed
            return collectives.broadcast_object(seed)
    if config.data_seed is not None:
        seed = config.data_seed
    else:
        generator = getattr(loader, "generator", None)
        seeds = [generator.initial_seed()] if isinstance(generator, torch.Generator) else []
        seed = mix_seed(torch.initial_seed(), *seeds)
    return mix_seed(collectives.broadcast_object(seed), number)
