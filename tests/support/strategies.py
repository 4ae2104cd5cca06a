"""An Accelerator on a strategy of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accel_callbacks.engines import Strategy, register_engine


@contextmanager
def strategy(kind: type[Strategy]) -> Iterator[None]:
    """Accelerators made in the block on several processes use this strategy."""
    handle = register_engine(kind, when=lambda run: run.topology.world_size > 1)
    try:
        yield
    finally:
        handle.remove()
