"""A callback with options that are not its own: where it stands, and what its errors do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ON_ERROR", "Configured", "as_tuple", "checked_policy", "configured"]

ON_ERROR = ("raise", "warn", "disable")


@dataclass(frozen=True)
class Configured:
    """What :func:`configured` returns; the Accelerator takes the callback out of it.

    Args:
        callback: the object with hooks.
        before: what it is called before.
        after: what it is called after.
        on_error: what its errors do; the callback's own ``on_error`` where ``None``.

    Example:
        >>> from accel_callbacks.callbacks import Callback
        >>> from accel_callbacks.callbacks.dispatch.registration import Configured
        >>> Configured(Callback(), on_error="warn").on_error
        'warn'
    """

    callback: Any
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    on_error: str | None = None


def configured(
    callback: Any, *, before: Any = (), after: Any = (), on_error: str | None = None
) -> Configured:
    """Give any callback a place among the others, and say what its errors do.

    Args:
        callback: an object with hooks.
        before: callbacks, their classes or state keys, that it is called before; one or a tuple.
            A class that no callback has means nothing.
        after: those that it is called after, likewise.
        on_error: ``"raise"`` ends the run, ``"warn"`` is a warning, ``"disable"`` a warning after
            which the callback is called no more; the callback's own ``on_error`` where ``None``.

    Raises:
        ValueError: ``on_error`` is none of these.

    Example:
        >>> from accel_callbacks import Accelerator, Callback
        >>> from accel_callbacks.callbacks import configured
        >>> class Shows(Callback):
        ...     def on_log(self, run, model, metrics, step):
        ...         print(metrics)
        >>> class Scores(Callback):
        ...     def on_validation_end(self, run, model):
        ...         run.accelerator.log({"score": 1.0})
        >>> scores = configured(Scores(), before=Shows, on_error="warn")
        >>> print(Accelerator(cpu=True, callbacks=[Shows(), scores]).describe_callbacks())
        callbacks
          1  Scores  on_error=warn
          2  Shows
        hooks
          on_log             Shows
          on_validation_end  Scores
    """
    if on_error is not None:
        checked_policy(on_error)
    if isinstance(callback, Configured):
        before = (*callback.before, *as_tuple(before))
        after = (*callback.after, *as_tuple(after))
        on_error = on_error or callback.on_error
        callback = callback.callback
    return Configured(callback, as_tuple(before), as_tuple(after), on_error)


def as_tuple(given: Any) -> tuple[Any, ...]:
    """One, several or None, as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, tuple | list | set | frozenset) else (given,)


def checked_policy(on_error: Any) -> str:
    """The policy, if it is one."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is unknown; use 'raise', 'warn' or 'disable'.")
    return str(on_error)
