"""What was done up to a step, and how fast between two of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from accel_callbacks.utils.operations import find_batch_size

__all__ = ["Mark", "first_dimension", "speed_between"]


class Mark(NamedTuple):
    """What a process has done up to a step; counts may be tensors on the device.

    Attributes:
        seconds: of training.
        waited: seconds of it that went into waiting for the loader.
    """

    seconds: float = 0.0
    waited: float = 0.0
    steps: Any = 0
    batches: Any = 0
    samples: Any = 0
    tokens: Any = 0
    flops: Any = 0.0


def speed_between(first: Mark, last: Mark) -> Mark:
    """Each count per second of training, and ``waited`` as a part of the time.

    Example:
        >>> from accel_callbacks.callbacks.throughput_marks import Mark, speed_between
        >>> speed_between(Mark(seconds=1.0, steps=2), Mark(seconds=3.0, steps=8)).steps
        3.0
    """
    seconds = max(last.seconds - first.seconds, 1e-9)
    speeds = [(after - before) / seconds for before, after in zip(first, last, strict=True)]
    return Mark(*speeds)._replace(seconds=seconds)


def first_dimension(batch: Any) -> int | None:
    """The samples of a batch; of usual ones without looking at all that is in it.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.throughput_marks import first_dimension
        >>> first_dimension({"x": torch.ones(4, 2)}), first_dimension(["a text"])
        (4, None)
    """
    item = batch
    while isinstance(item, (list, tuple, dict)) and item:
        item = item[0] if isinstance(item, (list, tuple)) else next(iter(item.values()))
    usual = isinstance(item, torch.Tensor) and item.dim() > 0
    return int(item.shape[0]) if usual else find_batch_size(batch)
