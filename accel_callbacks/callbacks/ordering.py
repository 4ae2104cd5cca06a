"""The order of callbacks: as given, except where one must come before or after another."""

from __future__ import annotations

from collections.abc import Sequence

from accel_callbacks.callbacks.entry import Entry
from accel_callbacks.errors import nearest

__all__ = ["check_targets", "in_order"]


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
