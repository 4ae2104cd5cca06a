"""A callback as it is registered: its name, its options, and its hooks made ready to be called."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.dispatch.ledger import Ledger, Tally
from accel_callbacks.callbacks.dispatch.registration import Configured, as_tuple, checked_policy
from accel_callbacks.callbacks.recognising import accepted, overrides, saves

__all__ = ["Entry", "Hook"]

Hook = Callable[..., None]
_log = logging.getLogger("accel_callbacks")


class Entry:
    """One registered callback.

    Args:
        given: a callback, or what ``configured`` returned.

    Attributes:
        given: the object that the user passed.
        callback: the object that is called; an adapter for a callback of Lightning.
        name: its state key, or the name of its class.
        key: under which its state is saved; one of its own where it has no state.
        off: it is called no more.
        calls: its hooks, each wrapped once with the ledger and the error policy.

    Raises:
        TypeError: it is no callback.
        ValueError: an unknown ``on_error``, or one that could part the processes.

    Example:
        >>> from accel_callbacks.callbacks import EarlyStopping
        >>> from accel_callbacks.callbacks.entry import Entry
        >>> entry = Entry(EarlyStopping("loss"))
        >>> entry.name, entry.votes, entry.saves
        ('EarlyStopping:loss', True, False)
    """

    def __init__(self, given: Any) -> None:
        options = given if isinstance(given, Configured) else Configured(given)
        self.given = options.callback
        self.callback = callback = accepted(options.callback)
        self.name = str(getattr(callback, "state_key", None) or type(callback).__qualname__)
        self.has_state = hasattr(callback, "state_dict")
        self.key = self.name if self.has_state else f"{self.name}@{id(callback)}"
        self.before = (*_own_targets(callback, "before"), *options.before)
        self.after = (*_own_targets(callback, "after"), *options.after)
        self.saves = saves(callback)
        self.votes = bool(getattr(callback, "can_vote", False))
        self.saves_alike = bool(getattr(callback, "saves_alike", False))
        self.runs_last = bool(getattr(callback, "runs_last", False))
        self.meets_others = self.saves or bool(getattr(callback, "collective", False))
        self.on_error = checked_policy(
            options.on_error or getattr(callback, "on_error", None) or "raise"
        )
        if self.meets_others and self.on_error != "raise":
            raise ValueError(
                f"{self.name} meets the other processes in its hooks, which would wait for it "
                f"after an error: on_error={self.on_error!r} cannot be; leave it 'raise'."
            )
        self.off = False
        self._state: dict[str, Any] = {}
        self.calls: dict[str, Hook] = {}

    def wrap(self, ledger: Ledger, name: str) -> None:
        """Make the hooks ready to be called, and counted under this name."""
        self.name = name
        for hook in HOOKS:
            if overrides(self.callback, hook):
                call = _counted(getattr(self.callback, hook), self, ledger.tally(name, hook))
                self.calls[hook] = call if self.on_error == "raise" else _guarded(call, self, hook)

    def is_meant_by(self, target: Any) -> bool:
        """Whether a constraint names it: as an object, by its class or by its name."""
        own = (self.callback, self.given)
        if isinstance(target, Configured):
            target = target.callback
        if isinstance(target, type):
            return isinstance(self.callback, target) or isinstance(self.given, target)
        if isinstance(target, str):
            return target in (self.name, self.key, *(type(one).__qualname__ for one in own))
        return any(target is one for one in own)

    def state(self) -> dict[str, Any]:
        """The callback's state; where its errors do not end the run, the last that it gave."""
        if not self.has_state:
            return {}
        if self.on_error == "raise":
            state: dict[str, Any] = self.callback.state_dict()
            return state
        try:
            self._state = self.callback.state_dict()
        except Exception as error:
            self.failed("state_dict", error)
        return self._state

    def failed(self, hook: str, error: Exception) -> None:
        """A hook raised, and the run goes on."""
        self.off = self.off or self.on_error == "disable"
        what = "is called no more" if self.off else "goes on"
        text = f"{self.name}.{hook} failed, and {what}: {type(error).__name__}: {error}"
        _log.warning(text, exc_info=error)
        warnings.warn(text, stacklevel=3)


def _own_targets(callback: Any, name: str) -> tuple[Any, ...]:
    """What a callback says of its place; such names may also mean something else to its author."""
    targets = as_tuple(getattr(callback, name, ()))
    fits = all(
        isinstance(target, type | str) or any(overrides(target, hook) for hook in HOOKS)
        for target in targets
    )
    return targets if fits else ()


def _counted(method: Callable[..., Any], entry: Entry, tally: Tally) -> Hook:
    """The hook with the ledger; this runs for each call, so each line of it is felt."""
    clock = perf_counter_ns

    def call(*args: Any) -> None:
        if entry.off:  # removed while this round of calls goes on
            return
        started = clock()
        try:
            method(*args)
        finally:
            spent = clock() - started
            tally.calls += 1
            tally.total_ns += spent
            if spent > tally.longest_ns:
                tally.longest_ns = spent

    return call


def _let_go(entry: Entry, run: Any, model: Any) -> None:
    """A callback that is called no more closes what it holds."""
    try:
        if overrides(entry.callback, "teardown"):
            entry.callback.teardown(run, model, "fit")
    except Exception as error:
        _log.warning("%s.teardown failed", entry.name, exc_info=error)


def _guarded(call: Hook, entry: Entry, hook: str) -> Hook:
    """The hook of a callback whose errors do not end the run."""

    def guarded(*args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            entry.failed(hook, error)
            if entry.off and hook != "teardown":
                _let_go(entry, *args[:2])

    return guarded
