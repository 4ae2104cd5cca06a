"""The batches of a loop that iterates no prepared loader: where they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["OwnBatches"]


def _ignore() -> None:
    """Do nothing."""


class OwnBatches:
    """Finds the batches of a loop over data of its own, such as random tensors or a cached list.

    With ``accumulate``, a batch is what happens inside of the block. Without it, a batch begins
    with the first backward or step, and ends once all prepared optimizers have stepped. In both
    cases the end waits for the prepared schedulers, whose step belongs to the batch, but not longer
    than until the next batch begins.

    Args:
        optimizers: the prepared optimizers, a list that grows.
        schedulers: the prepared schedulers, a list that grows.

    Attributes:
        is_open: a batch has begun and not ended.
        in_block: the batch is inside of ``accumulate``.

    Example:
        >>> from accel_callbacks.loop.own_batches import OwnBatches
        >>> batches = OwnBatches(["optimizer"], ["scheduler"])
        >>> batches.connect(begin=lambda: print("begins"), end=lambda: print("ends"))
        >>> batches.before_backward()
        begins
        >>> batches.note_call("optimizer")
        >>> batches.note_call("scheduler")
        ends
    """

    __slots__ = ("_begin", "_end", "_optimizers", "_schedulers", "_stepped", "in_block", "is_open")

    def __init__(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._begin: Callable[[], None] = _ignore
        self._end: Callable[[], None] = _ignore
        self.is_open = self.in_block = False
        self._stepped: dict[int, Any] = {}  # optimizers and schedulers that stepped in this batch

    def connect(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Call these where a batch begins and ends."""
        self._begin, self._end = begin, end

    def enter_block(self) -> None:
        """Begin the batch of an ``accumulate`` block; end the one before, if it waits."""
        self.finish()
        self.in_block = True
        if not self.is_open:
            self._open()

    def leave_block(self, *, stepped: bool) -> None:
        """End the batch of the block; after a step, once the schedulers have stepped too."""
        self.in_block = False
        if not stepped or self._is_complete():
            self.finish()

    def before_backward(self) -> None:
        """Begin a batch, unless one is open whose optimizers have not all stepped."""
        if self.is_open and not self.in_block and self._have_stepped(self._optimizers):
            self.finish()
        if not self.is_open:
            self._open()

    def before_step(self, optimizer: Any) -> None:
        """Begin a batch, also where this optimizer has stepped in the open one."""
        if not self.in_block and id(optimizer) in self._stepped:
            self.finish()
        if not self.is_open:
            self._open()

    def note_call(self, stepped: Any) -> None:
        """Note that an optimizer or scheduler was stepped; end the batch if it was the last."""
        if not self.is_open:
            return
        self._stepped[id(stepped)] = stepped
        if not self.in_block and self._is_complete():
            self.finish()

    def finish(self) -> None:
        """End the open batch, unless the block around it is still open."""
        if self.is_open and not self.in_block:
            self.drop()
            self._end()

    def drop(self) -> None:
        """Forget the open batch, without its end."""
        self.is_open = self.in_block = False
        self._stepped.clear()

    @property
    def stepped(self) -> list[Any]:
        """The optimizers and schedulers that stepped in the open batch."""
        return list(self._stepped.values())

    @property
    def waits(self) -> bool:
        """True if an optimizer has stepped in the open batch, and others have not yet."""
        return self.is_open and not self.in_block and bool(self._stepped)

    def _open(self) -> None:
        # Before the hooks, because one that logs or saves comes here again.
        self.is_open = True
        self._begin()

    def _is_complete(self) -> bool:
        return self._have_stepped(self._optimizers) and self._have_stepped(self._schedulers)

    def _have_stepped(self, members: Sequence[Any]) -> bool:
        return all(id(member) in self._stepped for member in members)
