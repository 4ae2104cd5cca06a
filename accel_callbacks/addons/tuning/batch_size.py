"""find_batch_size: find the largest batch size with which a training step fits into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.tuning.executable_batch_size import attempt
from accel_callbacks.addons.tuning.trial import new_axes, restored
from accel_callbacks.distributed.abort import group_is_aborted
from accel_callbacks.distributed.topology import resolve_topology
from accel_callbacks.memory import clear_device_cache

__all__ = ["BatchSizeResult", "Trial", "find_batch_size"]


@dataclass(frozen=True)
class Trial:
    """One batch size that was tried.

    Attributes:
        batch_size: samples of this rank.
        problem: the message of the out-of-memory error, ``None`` without one.
        seconds: of the fastest call of ``step`` with this size on this rank, ``None`` if none was
            completed.

    Example:
        >>> from accel_callbacks.tuning import Trial
        >>> Trial(64, None).fits
        True
    """

    batch_size: int
    problem: str | None
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """True if memory was sufficient on all ranks."""
        return self.problem is None


@dataclass(frozen=True)
class BatchSizeResult:
    """The result of :func:`find_batch_size`.

    Attributes:
        batch_size: the size to use, of one rank.
        largest: the largest size that fit, without the margin.
        trials: all sizes tried, in order.

    Example:
        >>> from accel_callbacks.tuning import find_batch_size
        >>> find_batch_size(lambda size: None, start=8, max=32)
        BatchSizeResult(batch_size=32, largest=32, trials=3)
    """

    batch_size: int
    largest: int
    trials: tuple[Trial, ...]

    def plot(self) -> Any:
        """Return a matplotlib ``Figure`` of samples per second over the batch size.

        It marks the size found, and at the bottom the sizes that do not fit.

        Raises:
            ImportError: matplotlib is not installed.
        """
        axes = new_axes("read the trials")
        fitting = sorted(
            (t for t in self.trials if t.fits and t.seconds), key=lambda trial: trial.batch_size
        )
        sizes = [trial.batch_size for trial in fitting]
        axes.plot(sizes, [t.batch_size / (t.seconds or 1) for t in fitting], "o-", label="fits")
        too_large = [trial.batch_size for trial in self.trials if not trial.fits]
        if too_large:
            axes.plot(too_large, [0] * len(too_large), "x", color="tab:red", label="does not fit")
        axes.axvline(self.batch_size, color="tab:green", linestyle="--", label=f"{self.batch_size}")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size of a process")
        axes.set_ylabel("samples per second")
        axes.legend()
        return axes.figure

    def __repr__(self) -> str:
        sizes = f"batch_size={self.batch_size}, largest={self.largest}"
        return f"BatchSizeResult({sizes}, trials={len(self.trials)})"


def find_batch_size(
    step: Callable[[int], Any],
    *,
    start: int = 2,
    max: int = 8192,
    mode: str = "power",
    steps_per_trial: int = 3,
    margin: float = 0.05,
    restore: Sequence[Any] = (),
) -> BatchSizeResult:
    """Try larger and larger batches until memory runs out, and return the largest that fits.

    This is the counterpart of Lightning's callback ``BatchSizeFinder``. The objects in ``restore``
    and the random generators are restored at the end. Call it before ``accel.run``: steps of a
    prepared optimizer count as steps of the current run. On the CPU pass a ``max``: many systems
    kill a process that allocates too much memory.

    With several processes all ranks must call it, and try the same sizes together: a size fits if
    it fits on all of them. If it does not, pending collectives of the other ranks fail and the
    ranks join a new process group, as in :func:`find_executable_batch_size`: in this case prepare
    model and data inside ``step``, after ``accel.free_memory()``.

    Args:
        step: called with a batch size (of one rank); trains one step on such a batch.
        start: the first size, 2 by default.
        max: the largest size to try, 8192 by default.
        mode: ``"power"`` (default): double the size until it does not fit. ``"binsearch"``: then
            bisect between the last size that fit and the first that did not.
        steps_per_trial: number of calls of ``step`` for a size, 3 by default: the second step may
            need more memory than the first.
        margin: fraction that ``"binsearch"`` subtracts from the largest size, 0.05 by default,
            because memory may be more fragmented in later steps.
        restore: models, optimizers and other objects with a state, restored at the end.

    Raises:
        ValueError: an argument is invalid.
        RuntimeError: not even ``start`` fits.
        RemoteError: a step failed on another rank, for another reason than memory.

    Example:
        >>> import torch
        >>> from accel_callbacks.tuning import find_batch_size
        >>> def step(batch_size):
        ...     if batch_size > 100:
        ...         raise torch.OutOfMemoryError("out of memory")
        >>> find_batch_size(step).batch_size
        64
        >>> find_batch_size(step, mode="binsearch")
        BatchSizeResult(batch_size=95, largest=100, trials=13)
    """
    _check(start, max, mode, steps_per_trial, margin)
    start, limit = collectives.broadcast_object((start, max))

    search = _Search(step, steps_per_trial)
    with restored(restore):
        fits, fails = search.double(start, limit)
        if fits == 0:
            raise RuntimeError(
                f"a batch of {start} does not fit into memory ({search.trials[-1].problem}): use a "
                "smaller start, or a smaller model or inputs."
            )
        if mode == "binsearch" and fails is not None:
            fits = search.halve(fits, fails)
        clear_device_cache(garbage_collection=True)
    subtracted = fits * margin if mode == "binsearch" and fails is not None else 0.0
    largest = int(fits - subtracted) or 1
    return BatchSizeResult(largest, fits, tuple(search.trials))


class _Search:
    """Try sizes, and record the trials."""

    def __init__(self, step: Callable[[int], Any], steps_per_trial: int) -> None:
        self.trials: list[Trial] = []
        self._step = step
        self._steps_per_trial = steps_per_trial
        self._fastest: float | None = None

    def double(self, start: int, limit: int) -> tuple[int, int | None]:
        """Double the size; returns the largest that fits (or 0) and the first that does not."""
        fits, size = 0, start
        while self._try(size):
            fits = size
            if size >= limit:
                return fits, None
            size = min(2 * size, limit)
        return fits, size

    def halve(self, fits: int, fails: int) -> int:
        """Bisect between a size that fits and one that does not; returns the largest that fits."""
        while fails - fits > 1:
            size = (fits + fails) // 2
            if self._try(size):
                fits = size
            else:
                fails = size
        return fits

    def _try(self, size: int) -> bool:
        """Return whether a size fits on all ranks. Collective."""
        clear_device_cache(garbage_collection=True)
        self._fastest = None
        _, problem = attempt(self._train, size, (), {})
        if group_is_aborted():
            resolve_topology(anew=True)  # all ranks join a new process group
        self.trials.append(Trial(size, problem, self._fastest))
        return problem is None

    def _train(self, size: int) -> None:
        for _ in range(self._steps_per_trial):
            started = time.perf_counter()
            self._step(size)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            elapsed = time.perf_counter() - started
            self._fastest = elapsed if self._fastest is None else min(elapsed, self._fastest)


def _check(start: int, limit: int, mode: str, steps_per_trial: int, margin: float) -> None:
    if not 1 <= start <= limit:
        raise ValueError(f"start={start} must be from 1 to max={limit}.")
    if mode not in ("power", "binsearch"):
        raise ValueError(f"mode={mode!r} is unknown; use 'power' or 'binsearch'.")
    if steps_per_trial < 1:
        raise ValueError(f"steps_per_trial={steps_per_trial} must be at least 1.")
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} must be from 0 to below 1.")
