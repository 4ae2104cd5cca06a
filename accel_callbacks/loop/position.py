"""TrainingPosition: the passes, epochs and evaluations that a loop is in, and their loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["LoaderProgress", "TrainingPosition", "UsedLoaders"]


class LoaderProgress:
    """Compares where the training loaders are with where they were at the last micro-batch."""

    __slots__ = ("_fresh", "_places")

    def __init__(self) -> None:
        self._places: dict[DataLoaderShard, tuple[int, int]] = {}
        self._fresh: list[DataLoaderShard] = []

    def remaining(
        self, active: Sequence[DataLoaderShard]
    ) -> tuple[int | None, Sequence[DataLoaderShard]]:
        """Return the number of micro-batches left, this one included, and who does not know it.

        Loaders iterated together, as by ``zip``, end with the shortest one. An outer loader that
        delivers only now and then does not count. The number is None where it is not known.

        Args:
            active: the loaders being iterated, the innermost last.
        """
        places = {loader: (loader.passes, loader.batch_index) for loader in active}
        fresh = [
            loader
            for loader in active
            if loader.trained and places[loader] != self._places.get(loader)
        ]
        chosen = set(active[-1:])
        if len(fresh) > 1:
            # Loaders that delivered in this and in the last micro-batch are iterated in lockstep.
            chosen.update(loader for loader in fresh if loader in self._fresh)
        self._places, self._fresh = places, fresh
        left = [loader.left for loader in chosen if loader.left is not None]
        return min(left, default=None), [loader for loader in chosen if loader.left is None]

    def clear(self) -> None:
        """Forget all loaders."""
        self._places.clear()
        self._fresh.clear()


class UsedLoaders:
    """The loader of the last training pass, and the loaders of validations and tests."""

    __slots__ = ("test", "training", "validation")

    def __init__(self) -> None:
        self.training: DataLoaderShard | None = None
        self.validation: list[DataLoaderShard] = []
        self.test: list[DataLoaderShard] = []

    def add_evaluated(self, loader: DataLoaderShard, stage: str) -> None:
        """Add a loader of a validation or test."""
        known = self.test if stage == "test" else self.validation
        if not any(loader is evaluated for evaluated in known):
            known.append(loader)

    def expected(self, loaders: Sequence[DataLoaderShard]) -> DataLoaderShard | None:
        """Return the loader that training uses; before its first pass, the one that looks like it.

        That is the only one that shuffles, or the only one, of those that no evaluation has used.

        Args:
            loaders: the prepared loaders.
        """
        if self.training is not None:
            return self.training
        evaluated = {id(loader) for loader in (*self.validation, *self.test)}
        left = [loader for loader in loaders if id(loader) not in evaluated]
        left = [loader for loader in left if _shuffles(loader)] or left
        return left[0] if len(left) == 1 else None

    def clear(self) -> None:
        """Forget all loaders."""
        self.training = None
        self.validation.clear()
        self.test.clear()


def _shuffles(loader: DataLoaderShard) -> bool:
    """Return whether the loader that was prepared draws its samples in a random order."""
    origin = loader.origin
    sampler = getattr(getattr(origin, "batch_sampler", None), "sampler", None)
    sampler = sampler or getattr(origin, "sampler", None)
    random = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return isinstance(sampler, random) or bool(getattr(sampler, "shuffle", False))


@dataclass(slots=True)
class TrainingPosition:
    """Where a loop is: which loaders it iterates, in which pass, epoch and evaluation.

    Attributes:
        outer: the loader of the training pass, None outside of one.
        active: loaders being iterated, the innermost last.
        stages: the open evaluations, the innermost last.
        eval_loaders: number of loaders that the open evaluation has iterated.
        epochs_counted: True inside of ``run.epochs``.
        cut_short: a stop came before the last batch of the epoch.
        ignores_stop: the stop came before this batch of a loop over data of its own.
        has_passes: a prepared loader was iterated.
        deferred: hooks to be fired by the next call of the script.
        progress: where training loaders were at the last micro-batch.
        used_loaders: the loaders of each phase.
        random_at_stop: the random generators where a stop cut an epoch short.
        random_after_step: the index of a batch, and the random generators after its step.

    Example:
        >>> import torch
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> data = accel.prepare(torch.utils.data.DataLoader(torch.ones(2, 1)))
        >>> [accel.loop.position.outer is data for batch in data], accel.loop.position.outer
        ([True, True], None)
    """

    outer: DataLoaderShard | None = None
    active: list[DataLoaderShard] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    eval_loaders: int = 0
    epochs_counted: bool = False
    cut_short: bool = False
    ignores_stop: bool = False
    has_passes: bool = False
    deferred: list[Callable[[], object]] = field(default_factory=list)
    progress: LoaderProgress = field(default_factory=LoaderProgress)
    used_loaders: UsedLoaders = field(default_factory=UsedLoaders)
    random_at_stop: Any = None
    random_after_step: tuple[int, Any] | None = None

    @property
    def between_passes(self) -> bool:
        """True if prepared loaders are used, and none is being iterated now."""
        return self.has_passes and not self.active

    def enter(self, loader: DataLoaderShard) -> int:
        """Note that a pass begins; return its number, for :meth:`leave`."""
        # An iterator that was kept and not read to its end is still active.
        if loader in self.active:
            self.active.remove(loader)
        self.active.append(loader)
        self.has_passes = True
        loader.passes += 1
        return loader.passes

    def leave(self, loader: DataLoaderShard, token: int) -> bool:
        """End a pass; return False if a newer pass over the same loader has replaced it."""
        if loader.passes != token:
            return False
        if self.outer is loader:
            self.outer = None
        if loader in self.active:
            self.active.remove(loader)
        return True

    def close(self) -> None:
        """Forget the open passes, evaluations and what they have deferred."""
        # The lists are emptied and not replaced: each batch asks the very same ones.
        self.outer = None
        self.cut_short, self.random_at_stop = False, None
        for group in (self.deferred, self.active, self.progress, self.stages):
            group.clear()
