"""What a search for a learning rate has measured, and what it suggests."""

from __future__ import annotations

import csv
import math
import os
from dataclasses import dataclass
from typing import Any

from accel_callbacks.tuning.drawing import new_axes

__all__ = ["LRResult"]


@dataclass(frozen=True)
class LRResult:
    """What :func:`find_learning_rate` measured.

    Attributes:
        lrs: the learning rates tried, of the optimizer's first group.
        losses: the loss with each, the mean of all processes.
        smoothed: the losses, averaged over earlier ones.
        mode: ``"exponential"`` or ``"linear"``, how the learning rate grew.

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
        """The learning rate at which the smoothed loss falls most steeply.

        ``None`` if it falls nowhere, or if there are less than three points.

        Args:
            skip_begin: points to leave out at the beginning, 10 by default.
            skip_end: points to leave out at the end, 1 by default.
        """
        points = [
            (lr if self.mode == "linear" else math.log(lr), loss, lr)
            for lr, loss in zip(self.lrs, self.smoothed, strict=True)
        ][skip_begin : max(len(self.lrs) - skip_end, 0)]
        points = [point for point in points if math.isfinite(point[1])]
        slopes = [
            ((right[1] - left[1]) / (right[0] - left[0]), here[2])
            for left, here, right in zip(points, points[1:], points[2:], strict=False)
        ]
        slope, lr = min(slopes, default=(0.0, 0.0))
        return lr if slope < 0 else None

    def plot(self) -> Any:
        """A matplotlib ``Figure``: loss over learning rate, with the suggestion.

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
