"""Registration of callbacks: what is accepted, and the options of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from accel_callbacks._lazy import foreign_name
from accel_callbacks.callbacks.base import HOOKS, Callback
from accel_callbacks.errors import nearest

__all__ = [
    "ON_ERROR",
    "Adapter",
    "Configured",
    "accepted",
    "as_tuple",
    "check_policy",
    "configured",
    "overrides",
    "saves",
]

_PREDICT = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
#: Hooks of Lightning that only its Trainer fires.
_TRAINER_ONLY = {
    "on_sanity_check_start",
    "on_sanity_check_end",
    *(f"on_predict_{edge}" for edge in _PREDICT),
}
ON_ERROR = ("raise", "warn", "disable")


Adapter = Callable[[Any], Any]
"""Returns what stands for a callback of another library; any other callback as it is."""


def accepted(callback: Any, adapters: Iterable[Adapter] = ()) -> Any:
    """Return the callback, or the adapter that stands for it.

    Args:
        callback: an object with hooks.
        adapters: recognize callbacks of other libraries.

    Raises:
        TypeError: a class, or a method that looks like a hook and is none.
    """
    if isinstance(callback, type):
        raise TypeError(f"{callback.__name__} is a class: pass an instance, {callback.__name__}().")
    for adapter in adapters:
        callback = adapter(callback)
    _check_hooks(callback)
    return callback


def _check_hooks(callback: Any) -> None:
    owner = type(callback).__qualname__
    for name in dir(callback):
        if not name.startswith("on_") or name in HOOKS or name == "on_error":
            continue
        if name in _TRAINER_ONLY:
            raise TypeError(
                f"{owner}.{name} would never be called: only the Trainer of Lightning fires it. "
                "Take the method out, or give it another name."
            )
        instead = foreign_name("HOOKS", name)
        hint = f" {instead}" if instead else nearest(name, HOOKS)
        raise TypeError(f"{owner}.{name} is no hook.{hint}")
    for name in HOOKS:
        if overrides(callback, name):
            _check_arguments(owner, name, getattr(callback, name))


def _check_arguments(owner: str, name: str, hook: Callable[..., Any]) -> None:
    """Raise TypeError for a hook that does not take the arguments that it is called with."""
    arguments = list(inspect.signature(getattr(Callback, name)).parameters.values())[1:]
    required = [argument.name for argument in arguments if argument.default is argument.empty]
    try:
        signature = inspect.signature(hook)
        signature.bind(*required)
    except ValueError:  # of a callable that does not tell
        return
    except TypeError:
        raise TypeError(
            f"{owner}.{name}{signature} is called with ({', '.join(required)}): give it these "
            "arguments, under names of your own, and a default to any other."
        ) from None


def overrides(callback: Any, hook: str, base: type = Callback) -> bool:
    """Return whether a callback defines a method, unlike the base class of its library."""
    if hook in getattr(callback, "__dict__", {}):
        return True
    method = getattr(type(callback), hook, None)
    return method is not None and method is not getattr(base, hook, None)


def saves(callback: Any) -> bool:
    """Return whether the callback saves checkpoints that a run can be resumed from."""
    return callable(getattr(callback, "resume_root", None))


@dataclass(frozen=True)
class Configured:
    """A callback with options; :func:`configured` makes it.

    Args:
        callback: the object with hooks.
        before: what it is called before.
        after: what it is called after.
        on_error: what its errors do; the callback's own ``on_error`` where ``None``.
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
        check_policy(on_error)
    if isinstance(callback, Configured):
        before = (*callback.before, *as_tuple(before))
        after = (*callback.after, *as_tuple(after))
        on_error = on_error or callback.on_error
        callback = callback.callback
    return Configured(callback, as_tuple(before), as_tuple(after), on_error)


def as_tuple(targets: Any) -> tuple[Any, ...]:
    """Return one target, several or None as a tuple."""
    if targets is None:
        return ()
    return tuple(targets) if isinstance(targets, tuple | list | set | frozenset) else (targets,)


def check_policy(on_error: Any) -> str:
    """Return the policy; raise ValueError for an unknown one."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is unknown; use 'raise', 'warn' or 'disable'.")
    return str(on_error)
