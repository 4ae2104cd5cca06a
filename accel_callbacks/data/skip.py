"""Start in the middle of an epoch, for scripts that count their own steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_callbacks.data.loader import DataLoaderShard
from checkpoint_io.warning import warn

__all__ = ["LOADER_OPTIONS", "SkipBatchSampler", "SkipDataLoader", "skip_first_batches"]

_AGAIN = (
    "the view of skip_first_batches is trained on in a second epoch, which begins without its "
    "first {} batches too: iterate the view in the epoch that is resumed, and the prepared loader "
    "itself in those after it."
)
#: Arguments of torch's DataLoader that a loader of the same samples takes over.
LOADER_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
)


class SkipBatchSampler(BatchSampler):
    """A batch sampler (or sampler) without its first batches.

    Args:
        batch_sampler: any iterable of batches of indices, or of indices.
        skip_batches: how many to leave out.

    Example:
        >>> from accel_callbacks.data.skip import SkipBatchSampler
        >>> sampler = SkipBatchSampler([[0, 1], [2, 3], [4]], 2)
        >>> list(sampler), len(sampler)
        ([[4]], 1)
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", batch_sampler)
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches with those that are left out."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batch_sampler, self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class SkipDataLoader(DataLoader[Any]):
    """A view of a loader whose passes start at a later batch of the epoch.

    Made by :func:`skip_first_batches`. It has all attributes of its loader.

    Args:
        loader: prepared or not.
        skip_batches: number of batches to skip at the start of the epoch.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks.data.skip import SkipDataLoader
        >>> [batch.tolist() for batch in SkipDataLoader(DataLoader(range(5), 2), 2)]
        [[4]]
    """

    def __init__(self, loader: DataLoader[Any], skip_batches: int = 0) -> None:
        # Without DataLoader.__init__, because all but the first batches is that of the loader.
        self.loader = loader
        self.skip_batches = skip_batches
        self._trained = 0  # passes

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        loader = self.loader
        if not isinstance(loader, DataLoaderShard):
            yield from _rest_of(loader, self.skip_batches)
            return
        # Set when the pass starts, so that no other pass over the loader uses it.
        loader.start_at(self.skip_batches)
        if self._trained == 1 and self.skip_batches:
            warn(_AGAIN.format(self.skip_batches))
        try:
            yield from loader
            self._trained += loader.trained
        finally:
            loader.start_at(None)

    def __len__(self) -> int:
        return max(len(self.loader) - self.skip_batches, 0)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # an empty copy (of pickle, copy) would recurse
            raise AttributeError(name)
        return getattr(self.loader, name)


def _rest_of(loader: DataLoader[Any], batches: int) -> Iterator[Any]:
    """Iterate a plain loader from this batch on; a map-style dataset is not read before it."""
    if isinstance(loader.dataset, IterableDataset):
        return islice(loader, batches, None)
    options = {name: getattr(loader, name) for name in LOADER_OPTIONS}
    if loader.batch_sampler is None:
        options |= {"sampler": SkipBatchSampler(loader.sampler, batches), "batch_size": None}
    else:
        options["batch_sampler"] = SkipBatchSampler(loader.batch_sampler, batches)
    return iter(DataLoader(loader.dataset, **options))


def skip_first_batches(
    dataloader: DataLoader[Any] | SkipDataLoader, num_batches: int = 0
) -> SkipDataLoader:
    """Return a view of a loader that skips the first batches of an epoch.

    Batches are counted from the start of the epoch. So the usual recipe is exact: after
    ``load_state``, a pass over the view is the rest of the interrupted epoch, and a pass over the
    loader itself is then the next one. (It is not needed: a prepared loader continues without it.)
    Without ``load_state``, a pass over the view is the next epoch without its first batches. The
    loader advances with its view: its epoch, its position and its end are those of the view.

    Args:
        dataloader: prepared or not, with any dataset. Skipped samples of a map-style one are not
            read.
        num_batches: number of batches to skip; a larger number than there are leaves none.

    Returns:
        The view. Its length is the number of batches left, if the loader has a length.

    Raises:
        ValueError: ``num_batches`` is negative.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks import Accelerator, skip_first_batches
        >>> loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
        >>> view = skip_first_batches(loader, 2)
        >>> len(view), [batch.tolist() for batch in view]
        (1, [[4, 5]])
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} must be 0 or more.")
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader(dataloader.loader, dataloader.skip_batches + num_batches)
    return SkipDataLoader(dataloader, num_batches)
