"""find_learning_rate: train with a growing learning rate, and suggest one."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.tuning.trial import new_axes, restored
from accel_callbacks.distributed.failures import shared_failure

__all__ = ["LRResult", "find_learning_rate"]


@dataclass(frozen=True)
class LRResult:
    """The result of :func:`find_learning_rate`.

    Attributes:
        lrs: the learning rates tried, of the optimizer's first group.
        losses: the loss with each, the mean over all ranks.
        smoothed: the exponential moving average of the losses.
        mode: ``"exponential"`` or ``"linear"`` growth of the learning rate.

    Example:
        >>> from accel_callbacks.tuning import LRResult
        >>> lrs = [10.0**power for power in range(-5, 0)]
        >>> losses = [2.0, 1.9, 1.0, 0.9, 3.0]
        >>> LRResult(lrs, losses, losses).suggestion(skip_begin=0)
        0.001
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    mode: str = "exponential"

    def __repr__(self) -> str:
        return f"LRResult({len(self.lrs)} steps, suggestion={self.suggestion()})"

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the learning rate at which the smoothed loss decreases most steeply.

        ``None`` if it never decreases, or if there are fewer than three points.

        Args:
            skip_begin: points to skip at the beginning, 10 by default.
            skip_end: points to skip at the end, 1 by default.
        """
        points = [
            (lr if self.mode == "linear" else math.log(lr), loss, lr)
            for lr, loss in zip(self.lrs, self.smoothed, strict=True)
        ][skip_begin : max(len(self.lrs) - skip_end, 0)]
        points = [point for point in points if math.isfinite(point[1])]
        slopes = [
            ((right[1] - left[1]) / (right[0] - left[0]), middle[2])
            for left, middle, right in zip(points, points[1:], points[2:], strict=False)
        ]
        slope, lr = min(slopes, default=(0.0, 0.0))
        return lr if slope < 0 else None

    def plot(self) -> Any:
        """Return a matplotlib ``Figure`` of the loss over the learning rate, with the suggestion.

        Save it with ``figure.savefig("lr.png")``, or log it with ``accel.log_figure``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        axes = new_axes("write the numbers with save_csv(path)")
        axes.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        axes.plot(self.lrs, self.smoothed, label="smoothed")
        suggested = self.suggestion()
        if suggested is not None:
            label = f"suggestion {suggested:.2g}"
            axes.axvline(suggested, color="tab:red", linestyle="--", label=label)
        axes.set_xscale("linear" if self.mode == "linear" else "log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend()
        return axes.figure

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the columns ``lr``, ``loss`` and ``smoothed`` to a local file."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["lr", "loss", "smoothed"])
            rows.writerows(zip(self.lrs, self.losses, self.smoothed, strict=True))


def find_learning_rate(
    step: Callable[[], Any],
    optimizer: torch.optim.Optimizer,
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_steps: int = 100,
    mode: str = "exponential",
    early_stop: float | None = 4.0,
    smoothing: float = 0.9,
    restore: Sequence[Any] = (),
) -> LRResult:
    """Train with a learning rate that grows step by step, and suggest one.

    This is the counterpart of Lightning's callback ``LearningRateFinder``. The optimizer, the
    objects in ``restore`` and the random generators are restored at the end, bit by bit. Call it
    before ``accel.run``: steps of a prepared optimizer count as steps of the current run. Do not
    step schedulers in ``step``. With several processes all ranks must call it; the mean of their
    losses counts.

    Args:
        step: called without arguments; trains one optimizer step on a batch and returns the loss.
        optimizer: whose learning rates are set; groups keep their ratio to the first.
        min_lr: the first rate, 1e-8 by default.
        max_lr: the last rate, 1 by default.
        num_steps: number of steps, 100 by default.
        mode: ``"exponential"`` (default), the rate grows by the same factor each step, or
            ``"linear"``.
        early_stop: end when the smoothed loss exceeds the best one by this factor, 4 by default;
            never if ``None``. A loss that is not finite always ends it.
        smoothing: weight of the previous average in the smoothed loss, 0.9 by default.
        restore: models and other objects that ``step`` changes, such as ``[model]``.

    Raises:
        ValueError: an argument is invalid.
        TypeError: ``step`` returned no loss.
        RemoteError: a step failed on another rank.

    Example:
        >>> import torch
        >>> from accel_callbacks.tuning import find_learning_rate
        >>> weight = torch.tensor([3.0], requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     loss = weight.square().sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> result = find_learning_rate(step, optimizer, max_lr=10)
        >>> 0.01 < result.suggestion() < 2, optimizer.param_groups[0]["lr"]
        (True, 0.1)
    """
    _check(min_lr, max_lr, num_steps, mode, smoothing)
    sweep = _Sweep(optimizer, smoothing, LRResult([], [], [], mode))
    with restored([optimizer, *restore]), shared_failure("find_learning_rate"):
        for index in range(num_steps):
            lr = _rate(index / (num_steps - 1), min_lr, max_lr, mode)
            sweep.take_step(step, lr)
            if sweep.has_diverged(early_stop):
                break
    return sweep.result


class _Sweep:
    """Take the steps, and record their losses."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, smoothing: float, result: LRResult
    ) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._optimizer = optimizer
        self._ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
        self._smoothing = smoothing
        self._average = 0.0
        self._best = math.inf
        self.result = result

    def take_step(self, step: Callable[[], Any], lr: float) -> None:
        """Take one step with this rate. Collective."""
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio
        losses = collectives.all_objects(_as_number(step()))
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
        result, weight = self.result, self._smoothing
        self._average = weight * self._average + (1 - weight) * loss
        result.lrs.append(lr)
        result.losses.append(loss)
        # Correct the bias of the first averages toward their start at zero, as Adam does.
        result.smoothed.append(self._average / (1 - weight ** len(result.lrs)))

    def has_diverged(self, early_stop: float | None) -> bool:
        """Return whether the loss has diverged; the same on all ranks."""
        loss = self.result.smoothed[-1]
        if not math.isfinite(loss):
            return True
        self._best = min(self._best, loss)
        if early_stop is None or len(self.result.lrs) < 3:
            return False
        return loss - self._best > (early_stop - 1) * abs(self._best)


def _as_number(loss: Any) -> float:
    try:
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"step() must return the loss, one number, not {loss!r}.") from error


def _rate(fraction: float, low: float, high: float, mode: str) -> float:
    return low + (high - low) * fraction if mode == "linear" else low * (high / low) ** fraction


def _check(low: float, high: float, num_steps: int, mode: str, smoothing: float) -> None:
    if not 0 < low < high:
        raise ValueError(f"min_lr={low} must be above 0 and below max_lr={high}.")
    if num_steps < 2:
        raise ValueError(f"num_steps={num_steps} must be at least 2.")
    if mode not in ("exponential", "linear"):
        raise ValueError(f"mode={mode!r} is unknown; use 'exponential' or 'linear'.")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing={smoothing} must be from 0 to below 1.")
