"""Which loaders moved on between two micro-batches, and how much of the epoch is left of them."""

from __future__ import annotations

from accel_callbacks.data.loader import DataLoaderShard

__all__ = ["Deliveries"]


class Deliveries:
    """Notes of the training loaders that delivered a batch.

    Attributes:
        fresh: those that did since the last micro-batch began.

    Example:
        >>> from accel_callbacks.deliveries import Deliveries
        >>> Deliveries().remaining(None)
        (None, False)
    """

    __slots__ = ("_before", "fresh")

    def __init__(self) -> None:
        self.fresh: list[DataLoaderShard] = []
        self._before: list[DataLoaderShard] = []

    def note(self, loader: DataLoaderShard) -> None:
        """A loader moved on; in a loop without ``accumulate`` nobody ever takes the notes away."""
        if loader not in self.fresh:
            self.fresh.append(loader)

    def remaining(self, innermost: DataLoaderShard | None) -> tuple[int | None, bool]:
        """(micro-batches left with this one if known, whether this is the last).

        Loaders read side by side, as by ``zip``, end with the shortest; an outer loader that
        moves on only now and then does not count.

        Args:
            innermost: the loader whose loop was entered last.
        """
        now, self.fresh = self.fresh, []
        before, self._before = self._before, now
        if len(now) <= 1:
            return (None, False) if innermost is None else (innermost.left, innermost.on_last)
        chosen = {one for one in now if one in before} | ({innermost} if innermost else set())
        known = [one.left for one in chosen if one.left is not None]
        return min(known, default=None), any(one.on_last for one in chosen)

    def clear(self) -> None:
        """No loop is open any more."""
        self.fresh.clear()
        self._before.clear()
