"""Which source an iterable dataset is read through, and who reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch.utils.data import DataLoader

from accel_callbacks.data.dispatch import CollatePieces, DispatchSource, WholeShares
from accel_callbacks.data.huggingface import can_shard, own_shards
from accel_callbacks.data.iterable import IterableShards, has_state
from accel_callbacks.data.shares import ShareSource
from accel_callbacks.data.sources import Setting, Source
from accel_callbacks.data.stream import StreamSource, check_even

__all__ = ["dispatched", "open_stream"]


def open_stream(loader: DataLoader[Any], batch_size: int | None, setting: Setting) -> Source:
    """The source of an iterable dataset.

    Args:
        loader: the user's.
        batch_size: samples of one process; ``None`` if the dataset yields ready batches.
        setting: which process this is, and the options.

    Raises:
        ValueError: ready batches cannot be split, or the dataset is sharded already.
    """
    config, dataset = setting.config, cast(Iterable[Any], loader.dataset)
    if batch_size is None and config.split_batches:
        raise ValueError(
            "a loader with batch_size=None reads ready batches, and split_batches=True cannot "
            "split them: give it a batch_size."
        )
    check_even(config.even_batches, batch_size)
    every_rank = bool(config.dispatch_batches)
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
        return StreamSource(loader, shards)
    whole = setting.slice_fn is not None and batch_size is not None
    stream = StreamSource(loader, shards, CollatePieces(loader.collate_fn, whole=whole))
    return DispatchSource(stream, loader, setting)


def dispatched(source: ShareSource, loader: DataLoader[Any], setting: Setting) -> Source:
    """The same source, read by the main process for all, if the options say so."""
    if not setting.config.dispatch_batches:
        return source
    return DispatchSource(WholeShares(source, setting), loader, setting)
