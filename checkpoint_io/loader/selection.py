"""Match saved names with wanted ones: patterns, renaming, missing and unexpected names."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkpoint_io.errors import StateMismatchError

__all__ = ["Matched", "Only", "Rename", "match_names", "nearest", "renamer", "selector"]

Only = str | Iterable[str] | Callable[[str], bool]
"""Saved names to load: a glob pattern (`*` also matches `/`), several, or a function."""

Rename = Mapping[str, str] | Callable[[str], str]
"""Prefixes of saved names mapped to replacements (the longest match wins), or a function."""

_SHOWN = 8
_COMPARED = 5000


@dataclass(frozen=True)
class Matched:
    """The result of `match_names`.

    Attributes:
        pairs: (wanted name, saved name), in the order of the wanted names.
        missing: wanted names for which nothing was saved.
        unexpected: selected saved names that are not wanted.
    """

    pairs: list[tuple[str, str]]
    missing: list[str]
    unexpected: list[str]

    def describe(self) -> str:
        """Return the missing and unexpected names, with the nearest name on the other side."""
        saved = self.unexpected or [saved for _, saved in self.pairs]
        wanted = self.missing or [wanted for wanted, _ in self.pairs]
        lines = [
            _label_list("missing", [name + _hint(name, saved) for name in self.missing[:_SHOWN]]),
            _label_list("unexpected", [n + _hint(n, wanted) for n in self.unexpected[:_SHOWN]]),
        ]
        totals = (len(self.missing), len(self.unexpected))
        texts = [
            text + (f" and {total - _SHOWN} more" if total > _SHOWN else "")
            for text, total in zip(lines, totals, strict=True)
            if total
        ]
        return "; ".join(texts)

    def require(self, url: str) -> None:
        """Raise `StateMismatchError` if a name is missing or unexpected."""
        if self.missing or self.unexpected:
            raise StateMismatchError(
                f"{url}: the names do not match: {self.describe()}; nothing was changed. Select "
                "with only=, translate with rename=, or pass strict=False to load what matches"
            )


def match_names(
    wanted: Iterable[str],
    available: Iterable[str],
    only: Only | None = None,
    rename: Rename | None = None,
) -> Matched:
    """Match wanted names with saved ones.

    Args:
        wanted: the names of the caller's targets.
        available: the saved names.
        only: which saved names to load, by their saved name; default all. A wanted name that was
            not selected is neither matched nor missing.
        rename: from a saved name to the wanted one; default unchanged.

    Raises:
        ValueError: renaming maps two saved names to the same name.
    """
    selected, translate = selector(only), renamer(rename)
    by_new: dict[str, str] = {}
    for saved in available:
        new = translate(saved)
        if new in by_new:
            raise ValueError(
                f"rename= turns both {by_new[new]!r} and {saved!r} into {new!r}: "
                "map each saved name to a different one"
            )
        by_new[new] = saved
    pairs: list[tuple[str, str]] = []
    missing: list[str] = []
    places = list(wanted)
    for name in places:
        source = by_new.get(name)
        if source is None:
            # `only` selects saved names. Under rename=, the saved name that would have become this
            # one is not known, so that the name always counts as missing.
            if rename is not None or selected(name):
                missing.append(name)
        elif selected(source):
            pairs.append((name, source))
    known = set(places)
    unexpected = [saved for new, saved in by_new.items() if new not in known and selected(saved)]
    return Matched(pairs, missing, unexpected)


def selector(only: Only | None) -> Callable[[str], bool]:
    """Return `only` as a function; None selects everything."""
    if only is None:
        return lambda name: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else list(only)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"only= takes glob patterns or a function, not {only!r:.200}")
    match = re.compile(
        "|".join(fnmatch.translate(pattern) for pattern in patterns) or r"(?!)"
    ).match
    return lambda name: match(name) is not None


def reusable(only: Only | None) -> Only | None:
    """Return the same selection in a form that can be iterated more than once."""
    return only if only is None or isinstance(only, str) or callable(only) else tuple(only)


def unmatched_patterns(
    only: Only | None, available: Sequence[str], url: str, strict: bool
) -> list[str]:
    """Return the patterns that select nothing, none for a function; with `strict`, raise."""
    if only is None or callable(only):
        return []
    patterns = [only] if isinstance(only, str) else list(only)
    unmatched = [pattern for pattern in patterns if not any(map(selector(pattern), available))]
    if unmatched and strict:
        hints = [repr(pattern) + _hint(pattern, available) for pattern in unmatched]
        raise StateMismatchError(
            f"{url}: in only=, no saved tensor matches {', '.join(hints)}; nothing was "
            "changed: correct the pattern, or pass strict=False"
        )
    return unmatched


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """Return `rename` as a function; None changes nothing."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    # longest first: the most specific prefix wins
    prefixes = sorted(rename.items(), key=lambda item: -len(item[0]))

    def translate(name: str) -> str:
        for prefix, new in prefixes:
            if name.startswith(prefix):
                return new + name[len(prefix) :]
        return name

    return translate


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return the most similar name, None if none is similar."""
    # comparing with all of a long list takes too long: a typo rarely hits the last component
    if len(names) > _COMPARED:
        ending = name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
        names = [other for other in names if other.endswith(ending)][:_COMPARED]
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return similar[0] if similar else None


def _hint(name: str, names: Sequence[str]) -> str:
    """Return the nearest name in parentheses, "" if there is none, for a message."""
    close = nearest(name, names)
    return f" (nearest: {close})" if close else ""


def _label_list(label: str, names: Sequence[str]) -> str:
    """Return a labeled list for a message."""
    return f"{label} {', '.join(names)}"
