"""The prepared loaders of an Accelerator, and the options that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.device import device_feed
from accel_callbacks.data.loader import DataLoaderShard, LoopEvents, stop_workers
from accel_callbacks.data.prepare import order_seed, prepare_loader
from accel_callbacks.data.skip import SkipDataLoader, skip_first_batches
from accel_callbacks.data.sources import Setting

__all__ = ["Loaders"]


class Loaders:
    """Prepares loaders, and keeps those that are prepared.

    Args:
        config: how loaders share their data among the ranks.
        rng_types: random generators that each pass synchronises.
        device: the device of batches.
        device_placement: move batches to it.
        data_rank: rank among those that read different data.
        data_world: number of ranks that read different data.
        events: adds the hooks around batches.

    Attributes:
        prepared: the prepared loaders, in the order of ``prepare``.

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
        device: torch.device,
        *,
        device_placement: bool,
        data_rank: int,
        data_world: int,
        events: LoopEvents,
        prepared: list[DataLoaderShard],
    ) -> None:
        self.config = config
        self.prepared = prepared
        self._rng_types = rng_types
        self._device = device
        self._device_placement = device_placement
        self._data_rank = data_rank
        self._data_world = data_world
        self._events = events

    def prepare(
        self,
        data_loader: DataLoader[Any] | SkipDataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader; see ``Accelerator.prepare_data_loader``."""
        if isinstance(data_loader, SkipDataLoader):
            inner = self.prepare(data_loader.loader, device_placement, slice_fn_for_dispatch)
            return skip_first_batches(inner, data_loader.skip_batches)
        origin = data_loader
        if isinstance(data_loader, DataLoaderShard):
            origin = data_loader if data_loader.origin is None else data_loader.origin
        for known in self.prepared:
            if origin is known.origin or data_loader is known:
                return known
        place = self._device_placement if device_placement is None else device_placement
        config = self.config
        loader = prepare_loader(
            origin,
            Setting(self._data_rank, self._data_world, config, slice_fn_for_dispatch),
            events=self._events,
            feed=device_feed(self._device, config.non_blocking) if place else None,
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
