"""Loader workers that outlive an epoch, and how they end."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["keep_workers", "stop_workers"]


def keep_workers(loader: DataLoader[Any]) -> None:
    """Let the persistent workers of a loader end with it, at once.

    A loader belongs to a circle of objects, and in one the queues to its workers may be closed
    before the workers are told to end: they then find out by themselves, seconds later.
    """
    iterator = getattr(loader, "_iterator", None)
    known: tuple[Any, Any] = getattr(loader, "_workers_end", (None, None))
    if iterator is None or (known[0] is not None and known[0]() is iterator):
        return
    end = weakref.finalize(loader, iterator._shutdown_workers)
    end.atexit = False  # torch has its own way out there
    loader._workers_end = weakref.ref(iterator), end


def stop_workers(loader: DataLoader[Any]) -> None:
    """End the workers now; the next pass starts others.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accel_callbacks.data.workers import stop_workers
        >>> stop_workers(DataLoader(range(4)))
    """
    known: tuple[Any, Any] = getattr(loader, "_workers_end", (None, None))
    if known[1] is not None:
        known[1]()
    loader._iterator = None
