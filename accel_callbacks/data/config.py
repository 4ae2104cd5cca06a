"""The options of prepared loaders."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accel_callbacks.errors import nearest

__all__ = ["DataLoaderConfiguration", "checked_config", "checked_rng_types"]

_SWITCHES = (
    "split_batches",
    "even_batches",
    "use_seedable_sampler",
    "non_blocking",
    "use_stateful_dataloader",
)


@dataclass(frozen=True)
class DataLoaderConfiguration:
    """Options of all prepared loaders: how they share their data among the processes.

    Args:
        split_batches: the batch size of a loader is that of all processes together, and must be
            a multiple of their number. Off by default: it is that of one process.
        dispatch_batches: only the main process reads, and sends each process its part. ``None``
            (default) is ``False``: each process reads its own part.
        even_batches: fill the last batch of an epoch up with samples of its start, so that all
            processes get the same number of samples. On by default. If off, no sample is read
            twice: the last samples are split as evenly as possible, and if they are fewer than the
            processes they join the batch before, so that all processes still take the same
            number of steps. Streams that are sharded at the source are always filled up, because
            their shards are uneven and would lose samples otherwise.
        use_seedable_sampler: ``shuffle=True`` gives the orders of
            :class:`accel_callbacks.SeedableRandomSampler`, which are those of Hugging Face
            Accelerate, a function of seed and epoch. Off by default.
        data_seed: the seed of orders that are a function of seed and epoch. Giving it turns
            ``seeded_order`` on, unless ``use_seedable_sampler`` is. ``None`` is torch's seed.
        non_blocking: do not wait for copies from pinned memory to the device. On by default; has
            no effect on a device without streams, nor on MPS.
        use_stateful_dataloader: resume a stream from its ``state_dict``, if it has one (default).
            If off, the stream is read again up to its position, which is also exact for what such
            a state lacks: that of a Hugging Face dataset does not hold the samples in its shuffle
            buffer.
        seeded_order: any sampler gives an order that is a function of seed and epoch, independent
            of every other draw, and nothing is drawn from the program's generators. ``None``
            (default) is ``False`` without a ``data_seed``: the sampler draws as in a plain loop.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: the seed is negative.

    Example:
        >>> from accel_callbacks.data.config import DataLoaderConfiguration
        >>> config = DataLoaderConfiguration(even_batches=False, data_seed=7)
        >>> config.split_batches, config.even_batches
        (False, False)
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = True
    use_stateful_dataloader: bool = True
    seeded_order: bool | None = None

    @property
    def seeds_orders(self) -> bool:
        """True if orders are a function of seed and epoch for any sampler."""
        if self.seeded_order is None:
            return self.data_seed is not None and not self.use_seedable_sampler
        return self.seeded_order

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            self._check(name, bool, "True or False")
        for name in ("dispatch_batches", "seeded_order"):
            if getattr(self, name) is not None:
                self._check(name, bool, "True, False or None")
        if self.data_seed is not None:
            self._check("data_seed", int, "a whole number or None")
            if self.data_seed < 0:
                raise ValueError(f"data_seed={self.data_seed} must not be negative.")

    def _check(self, name: str, kind: type, allowed: str) -> None:
        value = getattr(self, name)
        # isinstance(True, int) is true, but a bool is no seed.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{name}={value!r} must be {allowed}.")


def checked_config(config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Return the given configuration, or the default one.

    Raises:
        TypeError: it is no :class:`DataLoaderConfiguration`.
    """
    if config is None:
        return DataLoaderConfiguration()
    if not isinstance(config, DataLoaderConfiguration):
        raise TypeError(
            f"dataloader_config={config!r} must be a DataLoaderConfiguration(...) of "
            "accel_callbacks, not of another library."
        )
    return config


def checked_rng_types(rng_types: Iterable[Any] | None) -> tuple[Any, ...]:
    """Return the random generators to synchronize, none for ``None``.

    Raises:
        TypeError: a single name instead of a list.
        ValueError: an unknown name.

    Example:
        >>> from accel_callbacks.data.config import checked_rng_types
        >>> checked_rng_types(["torch"]), checked_rng_types(None)
        (('torch',), ())
    """
    if rng_types is None:
        return ()
    from accel_callbacks.distributed.rng import RNGType

    if isinstance(rng_types, str):
        raise TypeError(f"rng_types={rng_types!r} must be a list: [{rng_types!r}].")
    known = [kind.value for kind in RNGType]
    chosen = tuple(rng_types)
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"{name!r} in rng_types is unknown; use {known}.{nearest(str(name), known)}"
            )
    return chosen
