"""Batches of one replica among a number that changes: a share of what is not committed yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accel_callbacks.data.shard import ShareSource

if TYPE_CHECKING:
    from accel_callbacks.data.loader import DataLoaderShard
    from accel_callbacks.replicas.interface import ReplicaRounds

__all__ = ["replica_batches"]


def replica_batches(loader: DataLoaderShard, rounds: ReplicaRounds) -> Iterator[Any]:
    """Yield this replica's batches of the next epoch, or of the rest of a resumed one.

    Each gradient window begins with a quorum, before its first batch is taken. Where the replicas
    or this one's place among them change, and where a window was refused, the pass goes on as a
    resumed one would: from the samples that were committed, with the new number of shares. What
    was read ahead is dropped.

    Args:
        loader: iterated for training.
        rounds: the windows of the replicas.
    """
    source = loader.source
    if not isinstance(source, ShareSource):
        raise ValueError(
            "replicas share map-style datasets: the loader that is trained on has an iterable "
            "one, or dispatches its batches. Give it a dataset with __getitem__ and __len__, and "
            "leave dispatch_batches off."
        )
    while True:
        share = rounds.begin()
        source.process_index, source.num_processes = share
        batches = loader.batches()
        rounds.watch(None)
        again = False
        for batch in batches:
            rounds.watch(loader)
            yield batch
            if rounds.is_open:  # inside of a window, or nothing went backward
                continue
            if not rounds.refused:
                if loader.on_last:
                    continue
                if rounds.begin() == share:
                    continue
            again = True
            break
        if not again:
            return
        batches.close()  # type: ignore[attr-defined]
        loader.go_on()
