"""Dispatcher: order callbacks, and keep a tuple of bound methods for each hook."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter_ns
from types import FrameType
from typing import Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import EXIT_HOOKS, HOOKS
from accel_callbacks.callbacks.dispatch.instances import (
    family,
    key_candidates,
    option_text,
    options_of,
    pair_states,
    remedy,
)
from accel_callbacks.callbacks.dispatch.ledger import MOST_ROWS, Ledger, Tally
from accel_callbacks.callbacks.dispatch.registration import (
    Adapter,
    Configured,
    accepted,
    as_tuple,
    check_policy,
    overrides,
    saves,
)
from accel_callbacks.errors import nearest
from accel_callbacks.logging import notice
from checkpoint_io.warning import warn

__all__ = ["Dispatcher", "Entry", "Hook", "check_targets", "firing_plan", "in_hook", "in_order"]

Hook = Callable[..., None]
# Of these the next callback is called even where one raises.
_ONE_BY_ONE = frozenset({"on_exception", "teardown"})
_log = logging.getLogger("accel_callbacks")


class Dispatcher:
    """Hold the callbacks and a tuple of calls for each hook.

    Any object with methods of the right names is a callback; a subclass of :class:`Callback` is not
    needed. Callbacks can be added and removed at any time; a removed callback is not called again,
    not even for the hook being fired.

    Args:
        callbacks: in the order of their calls, as far as their ``before``, ``after`` and
            ``runs_last`` allow; exit hooks are called in reverse.

    Attributes:
        hooks: for each hook the calls; an empty tuple if no callback overrides it. Several
            callbacks have one call together, except in ``on_exception`` and ``teardown``.
        can_vote: a callback may request a stop, a save or a preemption within an epoch.
        ends_batches: a callback votes, or has a hook, at the end of each training batch.
        keeps_loss: a callback gets the loss of each training batch at its end.
        end_batch: of the observers, called with the run and the batch before the hooks of a
            training batch's end; None without one.
        ledger: number and time of the calls.

    Raises:
        TypeError: a method name starts with ``on_`` but is no hook.
        ValueError: a callback is given twice, two save into one folder, or constraints contradict
            each other.
    """

    def __init__(self, callbacks: Iterable[Any] = (), adapters: Iterable[Adapter] = ()) -> None:
        self._adapters = tuple(adapters)
        self.entries: list[Entry] = []
        self.hooks: dict[str, tuple[Hook, ...]] = dict.fromkeys(HOOKS, ())
        self.ledger = Ledger()
        self.can_vote = self.ends_batches = self.keeps_loss = False
        self._observers: Sequence[Any] = ()
        self.end_batch: Callable[[Any, Any], None] | None = None
        self._order: list[Entry] = []
        self._unclaimed: dict[str, Any] = {}  # loaded states of callbacks not registered
        self._absent: dict[
            str, Mapping[str, str]
        ] = {}  # options of loaded states that share a class
        self._retired: set[str] = set()
        self._voter_retired = False
        self.add(*callbacks)

    # --- registration -------------------------------------------------------------------------

    def add(self, *callbacks: Any) -> list[Entry]:
        """Register more callbacks: all of them, or none if one is refused."""
        # Whatever may refuse one of them comes before the first change.
        new = [Entry(callback, self._adapters) for callback in callbacks]
        entries = [*self.entries, *new]
        self._give_keys(new)
        check_targets(new, entries)
        order = in_order(entries)
        names = {entry.name for entry in self.entries}
        for entry in new:
            name = next(n for n in key_candidates(entry.name) if n not in names)
            names.add(name)
            entry.wrap(self.ledger, name)
        self._set_entries(entries, order)
        return new

    def _give_keys(self, new: Sequence[Entry]) -> None:
        """Number the keys of new entries that have one already, in the order of registration."""
        by_key = {entry.key: entry for entry in self.entries}
        for entry in new:
            first = by_key.get(entry.key)
            if any(entry.given is other.given for other in by_key.values()):
                raise ValueError(f"{entry.name} is given twice: give each callback once.")
            if first is not None and entry.saves:
                raise ValueError(
                    f"two {type(entry.given).__qualname__} save into the same place, where each "
                    f"removes what the other keeps: {remedy(entry.given)}, or one is enough."
                )
            used = by_key.keys() | self._retired
            entry.use_key(next(key for key in key_candidates(entry.key) if key not in used))
            by_key[entry.key] = entry

    def remove(self, callback: Any) -> Entry:
        """Remove a callback and its state.

        Raises:
            ValueError: it is not registered.
        """
        for entry in self.entries:
            if callback is entry.callback or callback is entry.given:
                # A hook that is being fired goes on over the tuple of before, which has it.
                entry.disabled = True
                others = [other for other in self.entries if other is not entry]
                self._set_entries(others, [other for other in self._order if other is not entry])
                return entry
        names = ", ".join(entry.name for entry in self.entries) or "none"
        raise ValueError(f"{type(callback).__qualname__} is not registered; there are: {names}.")

    def retire(self, callback: Any) -> None:
        """Remove a callback after its last call, but keep saving its state for a resume."""
        entry = self.remove(callback)
        self._unclaimed[entry.key] = callback.state_dict()
        self._retired.add(entry.key)
        # It may be retired on this rank only, and a vote is a collective: keep voting.
        self._voter_retired = self._voter_retired or entry.votes
        self.can_vote = self.can_vote or entry.votes
        self.ends_batches = self.ends_batches or entry.votes

    def _set_entries(self, entries: list[Entry], order: list[Entry]) -> None:
        """Set the entries, and rebuild the table of hooks."""
        self.entries, self._order = entries, order
        self.can_vote = self._voter_retired or any(entry.votes for entry in entries)
        self.votes_at_once = any(entry.votes_at_once for entry in entries)
        for hook in HOOKS:
            called = self.called(hook)
            if len(called) > 1 and hook not in _ONE_BY_ONE:
                methods = [entry.methods[hook] for entry in called]
                self.hooks[hook] = (_time_calls(methods, self.ledger),)
            else:
                self.hooks[hook] = tuple(entry.calls[hook] for entry in called)
            # Observers come first, and see what no callback has changed yet.
            self.hooks[hook] = (*_methods(self._observers, hook), *self.hooks[hook])
        self.keeps_loss = bool(self.hooks["on_train_batch_end"])
        self.ends_batches = self.can_vote or self.keeps_loss

    def observe(self, observers: Sequence[Any]) -> None:
        """Call the hooks of observers before those of callbacks, in place of those of before."""
        self._observers = observers
        ends = _methods(observers, "end_batch")

        def end_batch(run: Any, batch: Any) -> None:
            for end in ends:
                end(run, batch)

        self.end_batch = None if not ends else ends[0] if len(ends) == 1 else end_batch
        self._set_entries(self.entries, self._order)

    def called(self, hook: str) -> list[Entry]:
        """Return the entries that a hook calls, in order."""
        order = [entry for entry in self._order if hook in entry.calls]
        if hook not in EXIT_HOOKS:
            return order
        # Reversed, but for those that save: a checkpoint has what the others did in the hook.
        first = [entry for entry in order if not entry.runs_last]
        return [*reversed(first), *(entry for entry in order if entry.runs_last)]

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
        """The callbacks that save, and that a run can be resumed from."""
        return [entry.callback for entry in self._order if entry.saves]

    @property
    def saves_differ_between_ranks(self) -> bool:
        """True if a callback may put tensors into a checkpoint that differ between ranks."""
        return any("on_save_checkpoint" in e.calls and not e.saves_alike for e in self.entries)

    def free_key(self, name: str) -> str:
        """Return a state key that no callback has: the name, or the name with a number."""
        used = {entry.key for entry in self.entries} | self._retired
        return next(key for key in key_candidates(name) if key not in used)

    def require_same_on_all_ranks(self) -> None:
        """Check that all ranks have the same callbacks that vote, save or are collective.

        Collective.

        Raises:
            ValueError: such a callback is missing on some ranks.
        """
        names = [
            f"{entry.name} (votes at once)" if entry.votes_at_once else entry.name
            for entry in self._order
            if entry.votes or entry.collective
        ]
        first, *others = collectives.all_objects(names)
        for rank, keys in enumerate(others, start=1):
            if keys != first:
                raise ValueError(
                    "callbacks that vote, save or are collective must be given on all ranks, in "
                    f"the same order: rank 0 has {first}, rank {rank} has {keys}."
                )

    # --- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each callback by key, and loaded states of absent callbacks."""
        states = dict(self._unclaimed)
        for entry in self.entries:
            state = entry.state()
            if state:
                states[entry.key] = state
        return states

    def options(self) -> dict[str, dict[str, str]]:
        """Return by key the options of callbacks that share a class, absent ones included."""
        recorded = {key: dict(self._absent[key]) for key in self._absent if key in self._unclaimed}
        for base, entries in self._families().items():
            if len(entries) > 1 or family(recorded, base):
                recorded.update({entry.key: entry.options for entry in entries})
        return recorded

    def _families(self) -> dict[str, list[Entry]]:
        """Return the entries with a state by the key that they would have alone."""
        families: dict[str, list[Entry]] = {}
        for entry in self.entries:
            if entry.has_state:
                families.setdefault(entry.base, []).append(entry)
        return families

    def claim_keys(
        self, states: Mapping[str, Any], options: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Give callbacks of one class the keys under which those like them were saved.

        Args:
            states: saved states by key.
            options: what :meth:`options` returned then.
        """
        self._absent = {key: recorded for key, recorded in options.items() if key in states}
        for base, entries in self._families().items():
            saved = {key: self._absent[key] for key in family(self._absent, base)}
            if saved:
                _claim(entries, saved)
            elif len(entries) > 1 and base in states:  # only one was saved, without its options
                _claim(entries, {base: entries[0].options})

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore each callback in place; keep the states of absent ones for the next save."""
        self._unclaimed = dict(states)
        # Over a copy: a function that was called once already retires as it is restored.
        for entry in list(self.entries):
            self._restore(entry)

    def restore_unclaimed(self, entry: Entry) -> None:
        """Restore a callback that was added late, if a state of its class is left."""
        left = [key for key in family(self._absent, entry.base) if key in self._unclaimed]
        if left and entry.has_state:
            _claim([entry], {key: self._absent[key] for key in left})
        self._restore(entry)

    def _restore(self, entry: Entry) -> None:
        if entry.has_state and entry.key in self._unclaimed:
            entry.callback.load_state_dict(self._unclaimed.pop(entry.key))


def _claim(entries: Sequence[Entry], saved: Mapping[str, Mapping[str, str]]) -> None:
    """Give entries of one base the saved keys, and print what is not where it was."""
    pairs = pair_states([entry.options for entry in entries], saved)
    everyone = [*saved.values(), *(entry.options for entry in entries)]
    news: list[str] = []
    used = set(saved)
    for index, entry in enumerate(entries):
        named = entry.described(everyone)
        if index not in pairs:
            news.append(f"{named} has no saved state")
            key = next(key for key in key_candidates(entry.base) if key not in used)
            used.add(key)
        else:
            key = pairs[index]
            before = option_text(saved[key], [entry.options])
            if before or key != entry.key:
                moved = f" ({before})" if before else ""
                news.append(f"{named} takes the state that was saved as {key!r}{moved}")
        entry.use_key(key)
    for key in saved.keys() - set(pairs.values()):
        options = option_text(saved[key], everyone)
        differences = f" ({options})" if options else ""
        news.append(
            f"there is no callback for {key!r}{differences}, whose state is kept for the next save"
        )
    if news:
        notice(f"{'; '.join(news)}. To tell them apart, {remedy(entries[0].given)}.")


class Entry:
    """Hold a registered callback, its place among the others and what its errors do.

    Args:
        given: a callback, or the result of ``configured``.

    Attributes:
        given: the object that the user passed.
        callback: the object that is called; an adapter for a callback of Lightning.
        name: its state key, or the name of its class.
        key: of its saved state; unique even without a state.
        base: the key that it has unless another callback has that.
        options: what tells it from others of its class.
        methods: its hooks, each wrapped once with the error policy, for calls of several callbacks.
        calls: the same with the ledger, for calls of this one.

    Raises:
        TypeError: it is not a callback.
        ValueError: ``on_error`` is unknown, or other than ``"raise"`` for a collective callback.
    """

    def __init__(self, given: Any, adapters: Iterable[Adapter] = ()) -> None:
        options = given if isinstance(given, Configured) else Configured(given)
        self.given = options.callback
        self.callback = callback = accepted(options.callback, adapters)
        self.name = str(getattr(callback, "state_key", None) or type(callback).__qualname__)
        # A Callback that keeps the base class's has none.
        self.has_state = overrides(callback, "state_dict")
        self.base = self.key = self.name if self.has_state else f"{self.name}@{id(callback)}"
        self.options = options_of(self.given)
        self.before = (*_declared_targets(callback, "before"), *options.before)
        self.after = (*_declared_targets(callback, "after"), *options.after)
        self.saves = saves(callback)
        self.votes = bool(getattr(callback, "can_vote", False))
        self.votes_at_once = self.votes and bool(getattr(callback, "votes_at_once", False))
        self.saves_alike = bool(getattr(callback, "saves_alike", False))
        self.runs_last = bool(getattr(callback, "runs_last", False))
        self.collective = self.saves or bool(getattr(callback, "collective", False))
        self.on_error = check_policy(
            options.on_error or getattr(callback, "on_error", None) or "raise"
        )
        if self.collective and self.on_error != "raise":
            raise ValueError(
                f"{self.name} calls collectives in its hooks, in which the other ranks would wait "
                f"for it after an error: on_error={self.on_error!r} is not possible; use 'raise'."
            )
        self._disabled = False
        self._state: dict[str, Any] = {}
        self.methods: dict[str, _Method] = {}
        self.calls: dict[str, Hook] = {}

    def wrap(self, ledger: Ledger, name: str) -> None:
        """Wrap the hooks, and count their calls under this name."""
        self.name = name
        for hook in HOOKS:
            if overrides(self.callback, hook):
                method = getattr(self.callback, hook)
                method = method if self.on_error == "raise" else _guard(method, self, hook)
                self.methods[hook] = _Method(method, ledger.tally(name, hook))
                self.calls[hook] = _time_call(self.methods[hook])

    @property
    def disabled(self) -> bool:
        """True once it is removed or disabled, and not called any more; may be set."""
        return self._disabled

    @disabled.setter
    def disabled(self, disabled: bool) -> None:
        self._disabled = disabled
        for method in self.methods.values():
            method.switch(off=disabled)

    def use_key(self, key: str) -> None:
        """Save under this key from now on."""
        self.key = key
        if callable(use := getattr(self.callback, "use_state_key", None)) and self.has_state:
            use(key)

    def described(self, among: Iterable[Mapping[str, str]]) -> str:
        """Return its class with the options in which it differs from others."""
        options = option_text(self.options, among)
        name = type(self.given).__qualname__
        return f"{name}({options})" if options else name

    def matches(self, target: Any) -> bool:
        """Return whether a constraint refers to it: as an object, by its class or by its name."""
        objects = (self.callback, self.given)
        if isinstance(target, Configured):
            target = target.callback
        if isinstance(target, type):
            return isinstance(self.callback, target) or isinstance(self.given, target)
        if isinstance(target, str):
            return target in (self.name, self.key, *(type(known).__qualname__ for known in objects))
        return any(target is known for known in objects)

    def state(self) -> dict[str, Any]:
        """Return the callback's state; if ``state_dict`` fails and may, its last one."""
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
        """Warn about an error in a hook that does not end the run, and apply ``on_error``."""
        self.disabled = self.disabled or self.on_error == "disable"
        outcome = "is disabled" if self.disabled else "stays enabled"
        text = f"{self.name}.{hook} failed; the callback {outcome}: {type(error).__name__}: {error}"
        _log.warning(text, exc_info=error)
        warn(text)


def _declared_targets(callback: Any, name: str) -> tuple[Any, ...]:
    """Return a callback's ``before`` or ``after``."""
    targets = as_tuple(getattr(callback, name, ()))
    # An object that is no Callback of ours may use these names for something else.
    valid = all(
        isinstance(target, type | str) or any(overrides(target, hook) for hook in HOOKS)
        for target in targets
    )
    return targets if valid else ()


def in_hook() -> bool:
    """Return whether a callback is being called on this thread; walks the stack, so ask rarely."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is globals():  # all calls of callbacks are made by this module
            return True
        frame = frame.f_back
    return False


class _Method:
    """Hold a hook of a callback, and its counters.

    Attributes:
        call: what is called: the method, or what counts nothing while the callback is disabled.
        tally: the counters.
    """

    __slots__ = ("_method", "call", "tally")

    def __init__(self, method: Hook, tally: Tally) -> None:
        self.call = self._method = method
        self.tally = tally

    def switch(self, *, off: bool) -> None:
        """Leave it out from now on, also of hooks that are being fired; or call it again."""
        self.call = self.tally.take_back if off else self._method


def _methods(observers: Sequence[Any], name: str) -> list[Hook]:
    return [getattr(observer, name) for observer in observers if hasattr(observer, name)]


def _time_call(method: _Method) -> Hook:
    """Wrap a hook with the ledger. Hot path: this runs for each call of each hook."""
    clock, tally = perf_counter_ns, method.tally

    def call(*args: Any) -> None:
        started = clock()
        try:
            method.call(*args)
        finally:
            spent = clock() - started
            tally.calls += 1
            tally.total_ns += spent
            if spent > tally.longest_ns:
                tally.longest_ns = spent

    return call


def _time_calls(methods: Sequence[_Method], ledger: Ledger) -> Hook:
    """Return one call of a hook of several callbacks, with the ledger. Hot path.

    A clock read between two of them ends the time of one and begins that of the next, and the times
    are added up later: a call of each costs half as much as by :func:`_time_call`.
    """
    clock, rows = perf_counter_ns, ledger.rows
    reads = iter(clock, None)
    tallies = [method.tally for method in methods]

    def call(*args: Any) -> None:
        times: list[int] = []
        try:
            # zip reads the clock before each call, and runs no Python for it.
            for method, _ in zip(methods, map(times.append, reads), strict=False):
                method.call(*args)
        finally:
            times.append(clock())
            rows.append((tallies, times))
            if len(rows) >= MOST_ROWS:
                ledger.add_up()

    return call


def _guard(method: Hook, entry: Entry, hook: str) -> Hook:
    """Wrap a hook whose errors do not end the run."""

    def guarded(*args: Any) -> None:
        try:
            method(*args)
        except Exception as error:
            entry.failed(hook, error)
            if entry.disabled and hook != "teardown":
                _tear_down(entry, *args[:2])  # each hook is passed the run and the model first

    return guarded


def _tear_down(entry: Entry, run: Any, model: Any) -> None:
    """Call the ``teardown`` of a disabled callback, so that it releases its resources."""
    try:
        if overrides(entry.callback, "teardown"):
            entry.callback.teardown(run, model, "fit")
    except Exception as error:
        _log.warning("%s.teardown failed", entry.name, exc_info=error)


def check_targets(new: Sequence[Entry], known: Sequence[Entry]) -> None:
    """Raise if a constraint of a new entry matches no callback; classes may match none.

    Raises:
        ValueError: a state key that no callback has, or an object that is not registered.
    """
    names = [entry.name for entry in known]
    for entry in new:
        for target in (*entry.before, *entry.after):
            if isinstance(target, type) or any(entry.matches(target) for entry in known):
                continue
            shown = repr(target) if isinstance(target, str) else type(target).__qualname__
            hint = nearest(target, names) if isinstance(target, str) else ""
            raise ValueError(
                f"{entry.name} is to be called before or after {shown}, and no such callback is "
                f"registered.{hint} There are {', '.join(names)}."
            )


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Sort the entries by their constraints, stably, and those with ``runs_last`` after others.

    Raises:
        ValueError: the constraints contain a cycle.
    """
    predecessors = _predecessors(entries)
    left = sorted(entries, key=lambda entry: entry.runs_last)
    placed: list[Entry] = []
    while left:
        remaining = {id(entry) for entry in left}
        ready = next(
            (entry for entry in left if not predecessors[id(entry)].keys() & remaining), None
        )
        if ready is None:
            names = " before ".join(_cycle(left, predecessors))
            raise ValueError(f"callbacks wait for each other: {names}.")
        left.remove(ready)
        placed.append(ready)
    return placed


def _predecessors(entries: Sequence[Entry]) -> dict[int, dict[int, Entry]]:
    """Return for each entry those that must come before it."""
    predecessors: dict[int, dict[int, Entry]] = {id(entry): {} for entry in entries}
    for entry in entries:
        for other in entries:
            if other is entry:
                continue
            if any(other.matches(target) for target in entry.after):
                predecessors[id(entry)][id(other)] = other
            if any(other.matches(target) for target in entry.before):
                predecessors[id(other)][id(entry)] = entry
    return predecessors


def _cycle(left: Sequence[Entry], predecessors: dict[int, dict[int, Entry]]) -> list[str]:
    """Return the names along a cycle, the first one again at the end."""
    remaining = {id(entry) for entry in left}
    path = [left[0]]
    while True:
        before = next(
            other for key, other in predecessors[id(path[-1])].items() if key in remaining
        )
        if before in path:
            names = [entry.name for entry in (*path[path.index(before) :], before)]
            return names[::-1]
        path.append(before)


def firing_plan(dispatch: Dispatcher) -> str:
    """Format the callbacks in the order of their calls, and for each hook those that have it."""
    order = dispatch.order
    if not order:
        return "no callbacks"
    width = max(len(entry.name) for entry in order)
    lines = ["callbacks"]
    for number, entry in enumerate(order, start=1):
        text = f"{number:3}  {entry.name:{width}}  {', '.join(_notes(entry))}"
        lines.append(text.rstrip())
    lines.append("hooks")
    called = {
        hook: names for hook in HOOKS if (names := [entry.name for entry in dispatch.called(hook)])
    }
    width = max(map(len, called), default=0)
    lines += [f"  {hook:{width}}  {', '.join(names)}" for hook, names in called.items()]
    return "\n".join(lines)


def _notes(entry: Entry) -> list[str]:
    facts = {
        "votes": entry.votes,
        "saves": entry.saves,
        "collective": entry.collective and not entry.saves,
        "runs last": entry.runs_last,
        f"on_error={entry.on_error}": entry.on_error != "raise",
        "switched off by an error": entry.disabled,
    }
    return [text for text, holds in facts.items() if holds]
