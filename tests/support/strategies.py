"""An Accelerator on a strategy of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accel_callbacks import DistributedType
from accel_callbacks import engines as strategies


@contextmanager
def strategy(kind: type[strategies.Strategy]) -> Iterator[None]:
    """Accelerators made in the block on several CPU processes use this strategy."""
    registry = strategies._REGISTRY
    before = registry[DistributedType.MULTI_CPU]
    registry[DistributedType.MULTI_CPU] = "OfTest"
    vars(strategies)["OfTest"] = kind
    try:
        yield
    finally:
        registry[DistributedType.MULTI_CPU] = before
        del vars(strategies)["OfTest"]
