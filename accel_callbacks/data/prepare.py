"""From a torch loader to a prepared one: what it reads from is chosen here."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from accel_callbacks import collectives
from accel_callbacks.data.batch_plan import BatchPlan
from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.device import Feed
from accel_callbacks.data.dispatch import DataLoaderDispatcher
from accel_callbacks.data.loader import DataLoaderShard, LoopEvents
from accel_callbacks.data.opening import dispatched, open_stream
from accel_callbacks.data.order import mix_seed
from accel_callbacks.data.sampler import BatchSamplerShard, SeedableRandomSampler
from accel_callbacks.data.shard import SamplePlan
from accel_callbacks.data.shares import ShareSource
from accel_callbacks.data.sources import Setting, Source

__all__ = ["order_seed", "prepare_loader", "share_of"]

_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def _own_seed(loader: DataLoader[Any]) -> int:
    """What this process would seed the order with: torch's seed and that of its own generator."""
    own = getattr(loader, "generator", None)
    seeds = [own.initial_seed()] if isinstance(own, torch.Generator) else []
    return mix_seed(torch.initial_seed(), *seeds)


def order_seed(loader: DataLoader[Any], config: DataLoaderConfiguration, number: int) -> int:
    """Collective: the seed of a loader's order, the same on all processes.

    A generator may be seeded otherwise on each process; the main one decides.

    Args:
        loader: what is going to be prepared.
        config: may name the seed.
        number: of this loader among those prepared, so that two are shuffled independently.
    """
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        sampler = _seedable(sampler, config)
        if isinstance(sampler, SeedableRandomSampler):
            own = sampler.initial_seed if config.data_seed is None else config.data_seed
            return collectives.broadcast_object(own)
    own = _own_seed(loader) if config.data_seed is None else config.data_seed
    return mix_seed(collectives.broadcast_object(own), number)


def prepare_loader(
    loader: DataLoader[Any],
    setting: Setting,
    *,
    events: LoopEvents,
    feed: Feed | None,
    seed: int,
    rng_types: Sequence[Any] = (),
) -> DataLoaderShard:
    """Rebuild a torch DataLoader as a :class:`DataLoaderShard` for this process.

    Raises:
        ValueError: the loader shards already, or cannot be sharded as the setting says.
    """
    options = {name: getattr(loader, name) for name in _KEPT}
    options["generator"] = torch.Generator()  # so that the program's own generator is left alone
    options |= {"origin": loader, "rng_types": rng_types}
    source = _source_of(loader, setting)
    kind = DataLoaderDispatcher if setting.config.dispatch_batches else DataLoaderShard
    return kind(source, events=events, feed=feed, seed=seed, **options)


def _source_of(loader: DataLoader[Any], setting: Setting) -> Source:
    """What the prepared loader reads from."""
    _refuse_sharded(loader)
    kind = _stream if isinstance(loader.dataset, IterableDataset) else _shares
    return kind(loader, setting)


def _refuse_sharded(loader: DataLoader[Any]) -> None:
    inside = getattr(loader.batch_sampler, "sampler", None)
    for one in (loader.batch_sampler, loader.sampler, inside):
        if isinstance(one, (DistributedSampler, BatchSamplerShard)):
            raise ValueError(
                f"the loader has a {type(one).__name__}, and prepare() shards too: drop the "
                "sampler and pass shuffle=True instead."
            )


def _stream(loader: DataLoader[Any], setting: Setting) -> Source:
    return open_stream(loader, share_of(loader.batch_size, setting), setting)


def _shares(loader: DataLoader[Any], setting: Setting) -> Source:
    """A map-style dataset: with batch_size=None, a batch size, or a batch sampler of its own."""
    config, rank, world = setting.config, setting.rank, setting.world_size
    batches: Any = loader.batch_sampler
    size = share_of(getattr(batches, "batch_size", None), setting)
    if batches is None:
        if config.split_batches:
            raise ValueError(
                "a loader with batch_size=None reads ready batches, and split_batches=True cannot "
                "split them: give it a batch_size."
            )
        plan: Any = SamplePlan(1, False, rank, world)
        source = ShareSource(loader, plan, _seedable(loader.sampler, config), batched=False)
    elif type(batches) is BatchSampler:
        plan = SamplePlan(size or 1, batches.drop_last, rank, world)
        source = ShareSource(loader, plan, _seedable(batches.sampler, config), batched=True)
    else:
        plan = BatchPlan(rank, world, split=config.split_batches, batch_size=size)
        source = ShareSource(loader, plan, _seedable(batches, config), batched=True)
    source.even_batches = config.even_batches
    return dispatched(source, loader, setting)


def _seedable(sampler: Any, config: DataLoaderConfiguration) -> Any:
    """The sampler (or batch sampler) with its random order one that can be compared."""
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
        sampler = copy(sampler)  # the program's own stays as it is
        sampler.sampler = _seedable(sampler.sampler, config)
    return sampler


def share_of(batch_size: int | None, setting: Setting) -> int | None:
    """The batch size of one process, where a loader was given this one.

    Raises:
        ValueError: it is that of all processes, and cannot be split.

    Example:
        >>> from accel_callbacks.data.config import DataLoaderConfiguration
        >>> from accel_callbacks.data.prepare import share_of
        >>> from accel_callbacks.data.sources import Setting
        >>> share_of(8, Setting(0, 2, DataLoaderConfiguration(split_batches=True)))
        4
    """
    if batch_size is None or not setting.config.split_batches:
        return batch_size
    if batch_size % setting.world_size:
        raise ValueError(
            f"split_batches=True splits a batch of {batch_size} over {setting.world_size} "
            f"processes: give the loader a multiple of {setting.world_size} as its batch_size."
        )
    return batch_size // setting.world_size
