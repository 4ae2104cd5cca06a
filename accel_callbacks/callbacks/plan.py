"""The firing plan: who is called in which hook, in which order, as text."""

from __future__ import annotations

from accel_callbacks.callbacks.base import HOOKS
from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
from accel_callbacks.callbacks.entry import Entry

__all__ = ["firing_plan"]


def firing_plan(dispatch: Dispatcher) -> str:
    """The callbacks in the order of their calls, and for each hook those that have it.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.dispatcher import Dispatcher
        >>> from accel_callbacks.callbacks.plan import firing_plan
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
