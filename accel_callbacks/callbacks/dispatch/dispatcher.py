"""Dispatch: for each hook, the methods that somebody overrode, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS
from accel_callbacks.callbacks.dispatch.ledger import Ledger
from accel_callbacks.callbacks.entry import Entry, Hook
from accel_callbacks.callbacks.ordering import check_targets, in_order

__all__ = ["Dispatcher"]


class Dispatcher:
    """Holds the callbacks and a tuple of calls for each hook.

    Any object with methods of the right names is a callback; :class:`Callback` is not needed.
    Callbacks may come and go at any time; what goes is not called again, in this round neither.

    Args:
        callbacks: in the order in which they are called, as far as their ``before``, ``after`` and
            ``runs_last`` allow; exit hooks run in reverse.

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

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
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
        new = [Entry(callback) for callback in callbacks]
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
