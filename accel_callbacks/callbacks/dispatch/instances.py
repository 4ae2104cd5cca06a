"""Several callbacks of one class: keys for their states, and which saved state belongs to which."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

__all__ = ["family", "key_candidates", "option_text", "options_of", "pair_states", "remedy"]

Options = Mapping[str, str]
_CLASS = "class"  # among the options; no option can have that name
_SIMPLE = (bool, int, float, str, type(None))


def key_candidates(name: str) -> Iterator[str]:
    """Yield the name, then the name with ``#2``, ``#3``, ..."""
    yield name
    number = 2
    while True:
        yield f"{name}#{number}"
        number += 1


def family(keys: Iterable[str], base: str) -> list[str]:
    """Return the keys that are the base or numbered after it, by their number.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.instances import family
        >>> family(["EMA#10", "EMA:slow", "EMA#2", "EMA"], "EMA")
        ['EMA', 'EMA#2', 'EMA#10']
    """
    members = [key for key in keys if re.fullmatch(re.escape(base) + r"(#[0-9]{1,9})?", key)]
    return sorted(members, key=lambda key: (len(key), key))


def options_of(callback: Any) -> dict[str, str]:
    """Return the class and the plain attributes of a callback as text, which tell it from others.

    Example:
        >>> from accel_callbacks.callbacks import EMA
        >>> from accel_callbacks.callbacks.dispatch.instances import options_of
        >>> options_of(EMA(0.9))["decay"]
        '0.9'
    """
    kind = type(callback)
    held = getattr(callback, "__dict__", {})
    public = {name: value for name, value in held.items() if not name.startswith("_")}
    # Of the attributes those that the constructor takes; others may be counters.
    names = public.keys() & _parameters(kind) or public.keys()
    plain = {name: repr(public[name]) for name in names if isinstance(public[name], _SIMPLE)}
    return {**plain, _CLASS: f"{kind.__module__}.{kind.__qualname__}"}


def _parameters(kind: type[Any]) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # a class without a signature
        return set()


def pair_states(present: Sequence[Options], saved: Mapping[str, Options]) -> dict[int, str]:
    """Return for each callback, by its index, the key of the saved one that is most like it.

    Of equally alike ones those at the same place are paired.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.instances import pair_states
        >>> pair_states([{"decay": "0.9"}], {"EMA": {"decay": "0.5"}, "EMA#2": {"decay": "0.9"}})
        {0: 'EMA#2'}
    """
    ranked = sorted(
        (-_likeness(options, saved[key]), abs(index - place), index, key)
        for index, options in enumerate(present)
        for place, key in enumerate(saved)
    )
    pairs: dict[int, str] = {}
    for _, _, index, key in ranked:
        if index not in pairs and key not in pairs.values():
            pairs[index] = key
    return pairs


def _likeness(options: Options, other: Options) -> int:
    """Return how many options are equal; one of another class is like none."""
    equal = options.items() & other.items()
    same_class = options.get(_CLASS) == other.get(_CLASS)
    return len(equal) if same_class else len(equal) - len(options) - len(other)


def option_text(options: Options, among: Iterable[Options]) -> str:
    """Return the options in which several callbacks differ, such as ``decay=0.9``.

    Example:
        >>> from accel_callbacks.callbacks.dispatch.instances import option_text
        >>> option_text({"a": "1", "b": "2"}, [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
        'b=2'
    """
    from loggers.redaction import redacted  # imports all of loggers, and errors are rare

    others = list(among)
    differing = [
        name
        for name, value in options.items()
        if name != _CLASS and any(other.get(name) != value for other in others)
    ]
    return ", ".join(f"{name}={redacted(options[name], name)}" for name in sorted(differing))


def remedy(callback: Any) -> str:
    """Return how to give several callbacks of one class keys of their own."""
    option = getattr(callback, "name_option", "")
    if not option:
        return "give each its own `state_key`"
    return f"{type(callback).__qualname__}({option}=...) gives each its own key"
