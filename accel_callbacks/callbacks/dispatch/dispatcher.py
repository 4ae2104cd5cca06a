"""Dispatcher: entries, order, tables of bound hooks, the plan as text."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter_ns
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS
from accel_callbacks.callbacks.dispatch.ledger import Ledger, Tally
from accel_callbacks.callbacks.dispatch.registration import (
    Adapter,
    Configured,
    accepted,
    as_tuple,
    checked_policy,
    overrides,
    saves,
)
from accel_callbacks.errors import nearest

__all__ = ["Dispatcher", "Entry", "Hook", "check_targets", "firing_plan", "in_order"]

Hook = Callable[..., None]
_log = logging.getLogger("accel_callbacks")


class Entry:
    """One registered callback.

    Args:
        given: a callback, or what ``configured`` returned.
        adapters: recognise callbacks of other libraries.

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
        >>> from accel_callbacks.callbacks.dispatch.dispatcher import Entry
        >>> entry = Entry(EarlyStopping("loss"))
        >>> entry.name, entry.votes, entry.saves
        ('EarlyStopping:loss', True, False)
    """

    def __init__(self, given: Any, adapters: Iterable[Adapter] = ()) -> None:
        options = given if isinstance(given, Configured) else Configured(given)
        self.given = options.callback
        self.callback = callback = accepted(options.callback, adapters)
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


def check_targets(new: Sequence[Entry], known: Sequence[Entry]) -> None:
    """Refuse a constraint that names what nobody is; a class may be absent.

    Raises:
        ValueError: a state key that no callback has, or an object that is not registered.
    """
    names = [entry.name for entry in known]
    for entry in new:
        for target in (*entry.before, *entry.after):
            if isinstance(target, type) or any(one.is_meant_by(target) for one in known):
                continue
            shown = repr(target) if isinstance(target, str) else type(target).__qualname__
            hint = nearest(target, names) if isinstance(target, str) else ""
            raise ValueError(
                f"{entry.name} is to be called before or after {shown}, and no such callback is "
                f"registered.{hint} There are {', '.join(names)}."
            )


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each as early as what it waits for allows; those that run last after others.

    Raises:
        ValueError: a circle of constraints.
    """
    waits = _constraints(entries)
    left = sorted(entries, key=lambda entry: entry.runs_last)
    placed: list[Entry] = []
    while left:
        there = {id(entry) for entry in left}
        ready = next((entry for entry in left if not waits[id(entry)].keys() & there), None)
        if ready is None:
            names = " before ".join(_circle(left, waits))
            raise ValueError(f"callbacks wait for each other: {names}.")
        left.remove(ready)
        placed.append(ready)
    return placed


def _constraints(entries: Sequence[Entry]) -> dict[int, dict[int, Entry]]:
    """For each entry those that come before it."""
    waits: dict[int, dict[int, Entry]] = {id(entry): {} for entry in entries}
    for entry in entries:
        for other in entries:
            if other is entry:
                continue
            if any(other.is_meant_by(target) for target in entry.after):
                waits[id(entry)][id(other)] = other
            if any(other.is_meant_by(target) for target in entry.before):
                waits[id(other)][id(entry)] = entry
    return waits


def _circle(left: Sequence[Entry], waits: dict[int, dict[int, Entry]]) -> list[str]:
    """The names along one circle, its first one again at the end."""
    there = {id(entry) for entry in left}
    path = [left[0]]
    while True:
        before = next(one for key, one in waits[id(path[-1])].items() if key in there)
        if before in path:
            names = [entry.name for entry in (*path[path.index(before) :], before)]
            return names[::-1]
        path.append(before)


class Dispatcher:
    """Holds the callbacks and a tuple of calls for each hook.

    Any object with methods of the right names is a callback; :class:`Callback` is not needed.
    Callbacks may come and go at any time; what goes is not called again, in this round neither.

    Args:
        callbacks: in the order in which they are called, as far as their ``before``, ``after`` and
            ``runs_last`` allow; exit hooks run in reverse.
        adapters: recognise callbacks of other libraries.

    Attributes:
        hooks: for each hook what to call, none where nobody overrides it.
        can_vote: a callback may ask for a stop, a save or a preemption within an epoch.
        ledger: what the calls have cost.

    Raises:
        TypeError: a method begins with ``on_`` but is no hook.
        ValueError: two callbacks have one ``state_key``, or constraints that cannot be met.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
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

    def __init__(self, callbacks: Iterable[Any] = (), adapters: Iterable[Adapter] = ()) -> None:
        self._adapters = tuple(adapters)
        self.entries: list[Entry] = []
        self.hooks: dict[str, tuple[Hook, ...]] = dict.fromkeys(HOOKS, ())
        self.ledger = Ledger()
        self.can_vote = False
        self._order: list[Entry] = []
        self._unclaimed: dict[str, Any] = {}
        self._retired: set[str] = set()
        self._voter_retired = False
        self.add(*callbacks)

    # --- who is there -------------------------------------------------------------------------

    def add(self, *callbacks: Any) -> list[Entry]:
        """Register more callbacks, all or, where one is refused, none."""
        new = [Entry(callback, self._adapters) for callback in callbacks]
        entries = [*self.entries, *new]
        _check_keys(entries)
        check_targets(new, entries)
        order = in_order(entries)
        names = {entry.name for entry in self.entries}
        for entry in new:
            name = next(n for n in _numbered(entry.name) if n not in names)
            names.add(name)
            entry.wrap(self.ledger, name)
        self._settle(entries, order)
        return new

    def remove(self, callback: Any) -> Entry:
        """Take a callback out, with its state.

        Raises:
            ValueError: it is not registered.
        """
        for entry in self.entries:
            if callback is entry.callback or callback is entry.given:
                entry.off = True
                others = [other for other in self.entries if other is not entry]
                self._settle(others, [other for other in self._order if other is not entry])
                return entry
        there = ", ".join(entry.name for entry in self.entries) or "none"
        raise ValueError(f"{type(callback).__qualname__} is not registered; there are: {there}.")

    def retire(self, callback: Any) -> None:
        """Take a callback out whose work is done; its state is saved on, so that a resume knows."""
        entry = self.remove(callback)
        self._unclaimed[entry.key] = callback.state_dict()
        self._retired.add(entry.key)
        # Its work may be done on this process only, while the others go on to vote.
        self._voter_retired = self._voter_retired or entry.votes
        self.can_vote = self.can_vote or entry.votes

    def _settle(self, entries: list[Entry], order: list[Entry]) -> None:
        """Make the tables for these callbacks."""
        self.entries, self._order = entries, order
        self.can_vote = self._voter_retired or any(entry.votes for entry in entries)
        first = [entry for entry in order if not entry.runs_last]
        leaving = [*reversed(first), *(entry for entry in order if entry.runs_last)]
        for hook in HOOKS:
            ways = leaving if hook in EXIT_HOOKS else order
            self.hooks[hook] = tuple(e.calls[hook] for e in ways if hook in e.calls)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks in the order in which they were given."""
        return [entry.callback for entry in self.entries]

    @property
    def order(self) -> list[Entry]:
        """The entries in the order in which they are called."""
        return list(self._order)

    @property
    def savers(self) -> list[Any]:
        """The callbacks that save, and know where a run can be resumed from."""
        return [entry.callback for entry in self._order if entry.saves]

    @property
    def edits_saves(self) -> bool:
        """A callback may put other tensors into a checkpoint than the other processes do."""
        return any("on_save_checkpoint" in e.calls and not e.saves_alike for e in self.entries)

    def free_key(self, name: str) -> str:
        """A state key that no callback has: the name, or with a number."""
        taken = {entry.key for entry in self.entries} | self._retired
        return next(key for key in _numbered(name) if key not in taken)

    def check_alike(self) -> None:
        """Collective: callbacks that meet the other processes must be there on all of them.

        Raises:
            ValueError: a callback that votes, saves or is collective is missing on some.
        """
        names = [entry.name for entry in self._order if entry.votes or entry.meets_others]
        first, *others = collectives.all_objects(names)
        for rank, here in enumerate(others, start=1):
            if here != first:
                raise ValueError(
                    "callbacks that vote, save or are collective must be given on all processes, "
                    f"in one order: process 0 has {first}, process {rank} has {here}."
                )

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of each callback by name, and what was loaded for callbacks not here."""
        states = dict(self._unclaimed)
        for entry in self.entries:
            state = entry.state()
            if state:
                states[entry.key] = state
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore each callback in place; states of absent ones are kept for the next save."""
        self._unclaimed = dict(states)
        for entry in list(self.entries):
            self.claim(entry)

    def claim(self, entry: Entry) -> None:
        """Give a callback what was loaded for it, once."""
        if entry.has_state and entry.key in self._unclaimed:
            entry.callback.load_state_dict(self._unclaimed.pop(entry.key))


def _numbered(name: str) -> Iterable[str]:
    """The name, then with ``#2``, ``#3``, ..."""
    yield name
    number = 2
    while True:
        yield f"{name}#{number}"
        number += 1


def _check_keys(entries: list[Entry]) -> None:
    keys = [entry.key for entry in entries]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(
                f"two callbacks save their state under {key!r}: give one of them another "
                "`state_key`."
            )


def firing_plan(dispatch: Dispatcher) -> str:
    """The callbacks in the order of their calls, and for each hook those that have it.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
        >>> from accel_callbacks.callbacks.dispatch.dispatcher import firing_plan
        >>> firing_plan(Dispatcher())
        'no callbacks'
    """
    order = dispatch.order
    if not order:
        return "no callbacks"
    width = max(len(entry.name) for entry in order)
    lines = ["callbacks"]
    for number, entry in enumerate(order, start=1):
        text = f"{number:3}  {entry.name:{width}}  {', '.join(_notes(entry))}"
        lines.append(text.rstrip())
    lines.append("hooks")
    called = {hook: names for hook in HOOKS if (names := _called(dispatch, hook))}
    width = max(map(len, called), default=0)
    lines += [f"  {hook:{width}}  {', '.join(names)}" for hook, names in called.items()]
    return "\n".join(lines)


def _called(dispatch: Dispatcher, hook: str) -> list[str]:
    """The names of those that this hook calls, in order."""
    names = {entry.calls[hook]: entry.name for entry in dispatch.order if hook in entry.calls}
    return [names[call] for call in dispatch.hooks[hook]]


def _notes(entry: Entry) -> list[str]:
    facts = {
        "votes": entry.votes,
        "saves": entry.saves,
        "collective": entry.meets_others and not entry.saves,
        "runs last": entry.runs_last,
        f"on_error={entry.on_error}": entry.on_error != "raise",
        "switched off by an error": entry.off,
    }
    return [text for text, holds in facts.items() if holds]
