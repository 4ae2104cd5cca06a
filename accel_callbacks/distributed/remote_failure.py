"""The error of another rank for which this process was aborted, until its training thread knows.

After an abort the kernels of NCCL end, and ``.item()`` and ``synchronize()`` return without an
error. Only the next collective raises, so the training thread would step with gradients that were
never summed. The watch notes the error here, and the calls of a training step look at it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

from accel_callbacks.collectives import default_group
from accel_callbacks.errors import RemoteError

__all__ = ["RemoteFailure", "remote_failure"]


class RemoteFailure:
    """The error for which a watch has aborted this process.

    Attributes:
        pending: returns the error to raise in the method that it is given; None without an abort.
            The hot path reads only this attribute.
    """

    __slots__ = ("_group", "pending")

    def __init__(self) -> None:
        self.pending: Callable[[str], RemoteError] | None = None
        self._group: ReferenceType[Any] | None = None

    def note(self, error: Callable[[str], RemoteError]) -> None:
        """Note the error, of the default group; the first one counts.

        Called on the thread of a watch, before it aborts.

        Args:
            error: makes the error for the method that raises it.
        """
        group = default_group()
        if group is None or self._is_of(group):
            return
        self._group = ref(group)
        self.pending = error

    def forget(self) -> None:
        """Forget the error, because the training thread has one: what comes now follows from it."""
        group = default_group()
        self.pending, self._group = None, None if group is None else ref(group)

    def raise_in(self, method: str) -> None:
        """Raise the error, unless it is of a process group that is gone.

        Args:
            method: the public method that was called.

        Raises:
            RemoteError: another rank has failed, or was lost.
        """
        error = self.pending
        if error is None:
            return
        if not self._is_of(default_group()):
            self.pending = None
            return
        raise error(method)

    def _is_of(self, group: Any) -> bool:
        return group is not None and self._group is not None and self._group() is group


#: Of the default group. Global, as the default group is.
remote_failure = RemoteFailure()
