"""Loaders: prepared, with options, from any batch on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from accel_callbacks.data.config import DataLoaderConfiguration
from accel_callbacks.data.device import device_feed
from accel_callbacks.data.loader import DataLoaderShard
from accel_callbacks.data.prepare import order_seed, prepare_loader
from accel_callbacks.data.skip import SkipDataLoader, skip_first_batches
from accel_callbacks.data.sources import Setting
from accel_callbacks.facade.parts import Parts

__all__ = ["LoadingMethods"]


class LoadingMethods(Parts):
    """What makes loaders ready."""

    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    rng_types: Sequence[Any]

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads for all; ``None`` is no."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batch is filled up with repetitions; may be set, for the next passes.

        Raises:
            ValueError: set to ``False``, and a prepared loader cannot do without.
        """
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        config = replace(self.dataloader_config, even_batches=even)
        before = [loader.even_batches for loader in self.loaders]
        try:
            for loader in self.loaders:
                loader.even_batches = even
        except ValueError:
            for loader, value in zip(self.loaders, before, strict=True):
                loader.even_batches = value
            raise
        self.dataloader_config = config

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffled orders are those of ``SeedableRandomSampler``."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies from pinned memory to the device are not waited for."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether a stream that has a state of its own is resumed through it."""
        return self.dataloader_config.use_stateful_dataloader

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any] | SkipDataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader; see ``prepare``. With several processes, all must call it.

        Args:
            data_loader: any torch loader. One that another Accelerator has prepared is prepared
                anew, from the loader that it was made of.
            device_placement: overrides the Accelerator's for this loader.
            slice_fn_for_dispatch: takes a process's part of a batch, where batches are dispatched.

        Returns:
            A :class:`accel_callbacks.DataLoaderShard`; of a view by ``skip_first_batches``, a view.

        Raises:
            ValueError: it shards already, or cannot be sharded as the options say.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> [batch.tolist() for batch in accel.prepare_data_loader(DataLoader(range(3), 2))]
            [[0, 1], [2]]
        """
        if isinstance(data_loader, SkipDataLoader):
            inner = self.prepare_data_loader(
                data_loader.loader, device_placement, slice_fn_for_dispatch
            )
            return skip_first_batches(inner, data_loader.skip_batches)
        origin = data_loader
        if isinstance(data_loader, DataLoaderShard):
            origin = data_loader if data_loader.origin is None else data_loader.origin
        for known in self.loaders:
            if origin is known.origin or data_loader is known:
                return known
        place = self.device_placement if device_placement is None else device_placement
        topology, config = self.topology, self.dataloader_config
        prepared = prepare_loader(
            origin,
            Setting(topology.rank, topology.world_size, config, slice_fn_for_dispatch),
            events=self.loop,
            feed=device_feed(self.device, config.non_blocking) if place else None,
            seed=order_seed(origin, config, len(self.loaders)),
            rng_types=self.rng_types,
        )
        self.loaders.append(prepared)
        return prepared

    def skip_first_batches(
        self, dataloader: DataLoader[Any] | SkipDataLoader, num_batches: int = 0
    ) -> SkipDataLoader:
        """A view of a loader that leaves the first batches of an epoch out.

        See :func:`accel_callbacks.skip_first_batches`.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> from accel_callbacks import Accelerator
            >>> accel = Accelerator(cpu=True)
            >>> loader = accel.prepare(DataLoader(range(6), batch_size=2))
            >>> [batch.tolist() for batch in accel.skip_first_batches(loader, 2)]
            [[4, 5]]
        """
        return skip_first_batches(dataloader, num_batches)
