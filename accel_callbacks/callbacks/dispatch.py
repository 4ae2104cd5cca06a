"""Dispatch: for each hook, the methods that somebody overrode, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS, Callback
from accel_callbacks.errors import nearest

__all__ = ["Dispatcher"]

Hook = Callable[..., Any]


class Dispatcher:
    """Holds the callbacks and a tuple of bound methods for each hook.

    Any object with methods of the right names is a callback; :class:`Callback` is not needed.

    Args:
        callbacks: in the order in which they are called; exit hooks run in reverse. Those with
            ``runs_last`` come after the others in every hook.

    Attributes:
        hooks: for each hook the methods to call, none where nobody overrides it.

    Raises:
        TypeError: a method begins with ``on_`` but is no hook.
        ValueError: two callbacks have one ``state_key``.

    Example:
        >>> from accel_callbacks.callbacks.dispatch import Dispatcher
        >>> class Hello:
        ...     def on_train_start(self, run, model):
        ...         print("hello")
        >>> dispatcher = Dispatcher([Hello()])
        >>> for hook in dispatcher.hooks["on_train_start"]:
        ...     hook(None, None)
        hello
        >>> dispatcher.hooks["on_train_end"]
        ()
    """

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self.callbacks: list[Any] = []
        self.hooks: dict[str, tuple[Hook, ...]] = {}
        self._unclaimed: dict[str, Any] = {}
        self.can_vote = False
        self.add(*callbacks)

    def add(self, *callbacks: Any) -> None:
        """Register more callbacks, after those that are there."""
        for callback in callbacks:
            _check(callback)
        self.callbacks += callbacks
        keys = [_key(callback) for callback in self.callbacks]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(
                    f"two callbacks save their state under {key!r}: give one of them another "
                    "`state_key`."
                )
        self.can_vote = any(getattr(c, "can_vote", False) for c in self.callbacks)
        first = [c for c in self.callbacks if not getattr(c, "runs_last", False)]
        last = [c for c in self.callbacks if getattr(c, "runs_last", False)]
        for hook in HOOKS:
            order = [*(reversed(first) if hook in EXIT_HOOKS else first), *last]
            self.hooks[hook] = tuple(getattr(c, hook) for c in order if _overrides(c, hook))

    @property
    def savers(self) -> list[Any]:
        """The callbacks that save, and know where a run can be resumed from."""
        return [callback for callback in self.callbacks if _saves(callback)]

    def check_alike(self) -> None:
        """Collective: callbacks that meet the other processes must be there on all of them.

        Raises:
            ValueError: a callback that votes or saves is missing on some.
        """
        names = [_name(c) for c in self.callbacks if getattr(c, "can_vote", False) or _saves(c)]
        first, *others = collectives.all_objects(names)
        for rank, here in enumerate(others, start=1):
            if here != first:
                raise ValueError(
                    "callbacks that vote or save must be given on all processes, in one order: "
                    f"process 0 has {first}, process {rank} has {here}."
                )

    def state_dict(self) -> dict[str, Any]:
        """The state of each callback by name, and what was loaded for callbacks not here."""
        states = dict(self._unclaimed)
        for callback in self.callbacks:
            state = callback.state_dict() if hasattr(callback, "state_dict") else {}
            if state:
                states[_key(callback)] = state
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore each callback in place; states of absent ones are kept for the next save."""
        self._unclaimed = dict(states)
        for callback in self.callbacks:
            key = _key(callback)
            if key in self._unclaimed:
                callback.load_state_dict(self._unclaimed.pop(key))


def _name(callback: Any) -> str:
    return str(getattr(callback, "state_key", None) or type(callback).__qualname__)


def _key(callback: Any) -> str:
    stateless = not hasattr(callback, "state_dict")
    return f"{_name(callback)}@{id(callback)}" if stateless else _name(callback)


def _saves(callback: Any) -> bool:
    return callable(getattr(callback, "resume_root", None))


def _overrides(callback: Any, hook: str) -> bool:
    if hook in getattr(callback, "__dict__", {}):
        return True
    own = getattr(type(callback), hook, None)
    return own is not None and own is not getattr(Callback, hook, None)


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        raise TypeError(f"{callback.__name__} is a class: pass an instance, {callback.__name__}().")
    for name in dir(callback):
        if name.startswith("on_") and name not in HOOKS:
            raise TypeError(
                f"{type(callback).__qualname__}.{name} is no hook.{nearest(name, HOOKS)}"
            )
