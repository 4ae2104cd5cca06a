"""The largest batch size with which a training step fits into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.distributed.abort import group_is_torn
from accel_callbacks.distributed.topology import resolve_topology
from accel_callbacks.memory import attempt, clear_device_cache
from accel_callbacks.tuning.trial import as_before, new_axes

__all__ = ["BatchSizeResult", "Trial", "find_batch_size"]


@dataclass(frozen=True)
class Trial:
    """One batch size that was tried.

    Attributes:
        batch_size: samples of this process.
        problem: what was said when memory ran out, ``None`` if it did not.
        seconds: of the quickest call of ``step`` with this size on this process, ``None`` if none
            came to its end.

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
        """Whether memory was enough on all processes."""
        return self.problem is None


@dataclass(frozen=True)
class BatchSizeResult:
    """What :func:`find_batch_size` found.

    Attributes:
        batch_size: the size to use, of one process.
        largest: the largest size that fitted, which is more where a margin was taken off.
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
        """A matplotlib ``Figure``: samples a second over the batch size, with the one found.

        Sizes that do not fit are marked at the bottom.

        Raises:
            ImportError: matplotlib is not installed.
        """
        axes = new_axes("look at the trials")
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
        axes.set_ylabel("samples a second")
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

    Lightning has this as its callback ``BatchSizeFinder``. Models and optimizers in ``restore`` and
    the random generators are as before afterwards. Call it before ``accel.run``, for steps of a
    prepared optimizer count as steps of the run that is open. On the CPU give a ``max``: many
    systems end a process that wants too much memory.

    With several processes all must call it, and they try the same sizes together: a size fits if it
    fits on all. Where it does not, the collectives that others wait in fail and the processes join
    a new group, as in :func:`find_executable_batch_size`: prepare model and data inside of
    ``step`` then, with ``accel.free_memory()`` first.

    Args:
        step: called with a batch size (of one process); trains one step on such a batch.
        start: the first size, 2 by default.
        max: the largest size to try, 8192 by default.
        mode: ``"power"`` (default): double the size until it does not fit. ``"binsearch"``: then
            halve the distance between the last that fitted and the first that did not.
        steps_per_trial: how often ``step`` is called for a size, 3 by default: a second step may
            need more than the first.
        margin: part that ``"binsearch"`` takes off the largest size, 0.05 by default, as the
            memory of later steps may be in smaller pieces.
        restore: models, optimizers and other objects with a state, put back at the end.

    Raises:
        ValueError: an argument that makes no sense.
        RuntimeError: not even ``start`` fits.
        RemoteError: a step has failed on another process, not for memory.

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
    with as_before(restore):
        fits, fails = search.double(start, limit)
        if fits == 0:
            raise RuntimeError(
                f"a batch of {start} does not fit into memory ({search.trials[-1].problem}): begin "
                "with a smaller start, or make the model or its inputs smaller."
            )
        if mode == "binsearch" and fails is not None:
            fits = search.halve(fits, fails)
        clear_device_cache(garbage_collection=True)
    taken_off = fits * margin if mode == "binsearch" and fails is not None else 0.0
    found = int(fits - taken_off) or 1
    return BatchSizeResult(found, fits, tuple(search.trials))


class _Search:
    """Tries sizes, and keeps what came of them."""

    def __init__(self, step: Callable[[int], Any], steps_per_trial: int) -> None:
        self.trials: list[Trial] = []
        self._step = step
        self._steps_per_trial = steps_per_trial
        self._quickest: float | None = None

    def double(self, start: int, limit: int) -> tuple[int, int | None]:
        """The largest size of this row that fits, 0 if none does, and the one that does not."""
        fits, size = 0, start
        while self._try(size):
            fits = size
            if size >= limit:
                return fits, None
            size = min(2 * size, limit)
        return fits, size

    def halve(self, fits: int, fails: int) -> int:
        """The largest size that fits, between one that does and one that does not."""
        while fails - fits > 1:
            size = (fits + fails) // 2
            if self._try(size):
                fits = size
            else:
                fails = size
        return fits

    def _try(self, size: int) -> bool:
        """Collective: whether this size fits on all processes."""
        clear_device_cache(garbage_collection=True)
        self._quickest = None
        _, problem = attempt(self._train, size, (), {})
        if group_is_torn():
            resolve_topology(anew=True)  # joins anew, with all processes
        self.trials.append(Trial(size, problem, self._quickest))
        return problem is None

    def _train(self, size: int) -> None:
        for _ in range(self._steps_per_trial):
            begun = time.perf_counter()
            self._step(size)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            spent = time.perf_counter() - begun
            self._quickest = spent if self._quickest is None else min(spent, self._quickest)


def _check(start: int, limit: int, mode: str, steps_per_trial: int, margin: float) -> None:
    if not 1 <= start <= limit:
        raise ValueError(f"start={start} must be from 1 to max={limit}.")
    if mode not in ("power", "binsearch"):
        raise ValueError(f"mode={mode!r} is unknown; use 'power' or 'binsearch'.")
    if steps_per_trial < 1:
        raise ValueError(f"steps_per_trial={steps_per_trial} must be at least 1.")
    if not 0 <= margin < 1:
        raise ValueError(f"margin={margin} must be from 0 to below 1.")
