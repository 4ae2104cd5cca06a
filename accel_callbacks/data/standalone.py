"""A prepared loader without an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks import collectives
from accel_callbacks.data.config import DataLoaderConfiguration, checked_rng_types
from accel_callbacks.data.device import device_feed
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.prepare import order_seed, prepare_loader
from accel_callbacks.data.sources import Setting

__all__ = ["prepare_data_loader"]


class _JustBatches:
    """Nothing happens around the batches."""

    def iterate(self, loader: DataLoaderShard) -> Iterator[Any]:
        return loader.batches()


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
    """A loader for one process, without an Accelerator: no hooks fire around its batches.

    With several processes, all must call it alike. For the options that are not explained here,
    see :class:`accel_callbacks.DataLoaderConfiguration`.

    Args:
        dataloader: any torch loader.
        device: where batches go, if they go somewhere.
        num_processes: how many share the data; those of the process group by default, else 1.
        process_index: which of them this is; likewise.
        split_batches: the batch size is that of all processes together.
        put_on_device: move batches to ``device``; off by default.
        rng_types: random generators that each pass takes over from the main process.
        dispatch_batches: the main process reads for all.
        even_batches: fill the last batch up with repetitions.
        slice_fn_for_dispatch: takes a process's part of a batch that is dispatched.
        use_seedable_sampler: shuffle as :class:`accel_callbacks.SeedableRandomSampler` does.
        data_seed: the seed of the order.
        non_blocking: do not wait for copies from pinned memory.
        use_stateful_dataloader: resume a stream through its own state, if it has one.

    Raises:
        ValueError: the loader shards already or cannot be sharded as the options say, or
            ``put_on_device`` without a device.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import prepare_data_loader
        >>> loader = prepare_data_loader(DataLoader(range(8), 2), num_processes=2, process_index=1)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [6, 7]]
    """
    if put_on_device and device is None:
        raise ValueError("put_on_device=True needs to know where: pass device= too.")
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
        events=_JustBatches(),
        feed=feed,
        seed=order_seed(dataloader, config, 0),
        rng_types=checked_rng_types(rng_types),
    )
