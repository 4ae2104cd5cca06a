"""A callback that is used for a second run begins there as it began the first."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["BeginningAnew"]


class BeginningAnew:
    """Notes a callback's attributes when its first run begins, and puts them back for the next.

    What the user sets between two runs stays.

    Args:
        callback: any object with a ``__dict__``.

    Example:
        >>> from types import SimpleNamespace
        >>> from accel_callbacks.callbacks.adapters.beginning_anew import BeginningAnew
        >>> callback = SimpleNamespace(patience=3, waited=0)
        >>> anew = BeginningAnew(callback)
        >>> anew.begin()
        >>> callback.waited = 2  # in the run
        >>> anew.end()
        >>> callback.patience = 5  # after it
        >>> anew.begin()
        >>> callback
        namespace(patience=5, waited=0)
    """

    _PLACE = "_accel_callbacks_anew"

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._first: dict[str, Any] | None = None
        self._last: dict[str, Any] | None = None

    @classmethod
    def of(cls, callback: Any) -> BeginningAnew:
        """That of a callback, which keeps it: the next run may have another Accelerator."""
        noted: BeginningAnew = vars(callback).setdefault(cls._PLACE, cls(callback))
        return noted

    def begin(self) -> None:
        """A run begins."""
        now = vars(self._callback)
        if self._first is not None and self._last is not None:
            for name in [name for name in now if name not in {*self._first, self._PLACE}]:
                del now[name]
            for name, value in self._first.items():
                if name in self._last and now.get(name) is self._last[name]:
                    now[name] = _copied(value)
        self._first = {name: _copied(value) for name, value in now.items() if name != self._PLACE}
        self._last = None

    def end(self) -> None:
        """The run is over."""
        self._last = dict(vars(self._callback))


def _copied(value: Any) -> Any:
    """Containers and tensors copied, everything else as it is."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, set, tuple):
        return type(value)(_copied(one) for one in value)
    return value
