"""Monitor: read a logged metric, and compare its values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from accel_callbacks.distributed.topology import process_rank
from accel_callbacks.errors import nearest
from checkpoint_io.warning import warn

__all__ = ["Monitor"]

#: Words in the names of metrics that are better if they are larger.
_LARGER = {
    *("acc", "accuracy", "auc", "auprc", "auroc", "bleu", "dice", "f1", "fscore", "iou", "jaccard"),
    *("kappa", "map", "mcc", "miou", "mrr", "ndcg", "precision", "psnr", "r2", "recall", "rouge"),
    *("rougel", "sensitivity", "specificity", "ssim"),
}
#: Words with which such a name means something else.
_NOT_LARGER = {
    *("ce", "distance", "drop", "ece", "eer", "entropy", "err", "error", "fid", "fnr", "fpr"),
    *("gap", "inverse", "loss", "mae", "minus", "mse", "neg", "negative", "nll", "one", "regret"),
    *("rmse", "size", "std", "step", "steps", "time", "var", "variance"),
}


class Monitor:
    """The name of a logged metric and the direction in which it improves.

    Args:
        name: as given to ``accel.log``.
        mode: ``"min"`` or ``"max"``; ``None`` is ``"min"``, with a warning if the name says that
            larger is better.
        min_delta: smallest change that counts as better, at least 0.

    Raises:
        ValueError: an unknown mode or a negative ``min_delta``.

    Example:
        >>> from accel_callbacks.callbacks.monitor import Monitor
        >>> Monitor("val/loss").is_better(0.5, than=0.7)
        True
    """

    def __init__(self, name: str, mode: str | None = None, min_delta: float = 0.0) -> None:
        if mode is None:
            mode = "min"
            if _is_larger_better(name) and process_rank()[0] == 0:
                warn(
                    f"monitor={name!r} is treated as lower-is-better because no mode was given: "
                    'pass mode="max" if larger is better, or mode="min" if it is not.'
                )
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r} is unknown; use 'min' or 'max'.")
        if min_delta < 0:
            raise ValueError(f"min_delta={min_delta} must not be negative.")
        self.name = name
        self.mode = mode
        self.min_delta = min_delta

    def read(self, metrics: Mapping[str, Any]) -> float | None:
        """Return the value as a float, ``None`` if it was not logged. Waits for the device."""
        value = metrics.get(self.name)
        return None if value is None else float(value)

    def is_better(self, value: float, *, than: float | None) -> bool:
        """Return whether ``value`` improves on ``than``; NaN never does."""
        if math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        gain = than - value if self.mode == "min" else value - than
        return gain > self.min_delta

    def missing_text(self, owner: str, logged: Collection[str]) -> str:
        """Return that the metric was not logged, what was, and the nearest name.

        Args:
            owner: the class of the callback.
            logged: names of the logged metrics.
        """
        names = sorted(logged)
        listed = f"only {', '.join(map(repr, names))}" if names else "nothing"
        return (
            f"{owner} watches {self.name!r}, but {listed} was logged by the end of an epoch."
            f"{nearest(self.name, names)}"
        )

    def is_misspelt(self, logged: Collection[str]) -> bool:
        """Return whether a logged name differs only in case or punctuation."""
        return self.name not in logged and _letters(self.name) in map(_letters, logged)


def _is_larger_better(name: str) -> bool:
    words = re.split(r"[^a-z0-9]+", name.lower())
    stems = {*words, *(word.rstrip("0123456789") for word in words)}  # acc5, recall@10
    return bool(stems & _LARGER) and not stems & _NOT_LARGER and words[0] not in ("", "1")


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
