"""Handles: what takes a callback out again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["CallbackHandle", "FunctionHandle"]


class CallbackHandle:
    """Takes a callback out again, by hand or at the end of a ``with`` block.

    Made by ``accel.add_callback``.

    Args:
        callback: the callback as it is registered.
        take_out: takes it out.

    Attributes:
        callback: the callback; for one of Lightning's the adapter around it.

    Example:
        >>> from accel_callbacks import Accelerator, Callback
        >>> accel = Accelerator(cpu=True)
        >>> with accel.add_callback(Callback()) as handle:
        ...     accel.callbacks == [handle.callback]
        True
        >>> accel.callbacks
        []
    """

    def __init__(self, callback: Any, take_out: Callable[[Any], None]) -> None:
        self.callback = callback
        self._take_out = take_out
        self._removed = False

    @property
    def removed(self) -> bool:
        """True after :meth:`remove`."""
        return self._removed

    def remove(self) -> None:
        """Take the callback out; a second time does nothing."""
        if not self._removed:
            self._removed = True
            self._take_out(self.callback)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class FunctionHandle(CallbackHandle):
    """The handle of a function that ``accel.on`` registered; calling it calls the function.

    Args:
        callback: the callback around the function.
        take_out: takes it out.
        function: what the user wrote.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> accel = Accelerator(cpu=True)
        >>> @accel.on("log")
        ... def double(metrics):
        ...     return {name: 2 * value for name, value in metrics.items()}
        >>> double({"loss": 1.5})
        {'loss': 3.0}
        >>> double.remove()
    """

    def __init__(
        self, callback: Any, take_out: Callable[[Any], None], function: Callable[..., Any]
    ) -> None:
        super().__init__(callback, take_out)
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, as if it were not registered."""
        return self._function(*args, **kwargs)
