"""The part of a training state that is restored, and the names of its weights here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from accel_callbacks.errors import ResumeError, nearest

__all__ = ["Only", "Rename", "Selection", "all_keys"]

Only = str | Iterable[str] | Callable[[str], bool]
Rename = Mapping[str, str] | Callable[[str], str]

#: Sections whose entries have names (or numbers) of their own, and those that are one thing.
LISTED = ("models", "optimizers", "schedulers", "loaders", "registered")
SINGLE = ("precision", "run", "callbacks", "trackers", "window", "rng")


class Selection:
    """Selects parts of a checkpoint by key, and renames its weights.

    Keys are paths in the saved state: ``models/0/encoder.weight``, ``optimizers/0``,
    ``registered/ema``, ``run``.

    Args:
        only: sections, keys or glob patterns of keys (``*`` also matches ``/``), or a function of
            a key; everything if ``None``.
        rename: beginnings of saved keys of weights to what they are here, or a function of such
            a key; unchanged if ``None``.
    """

    def __init__(self, only: Only | None = None, rename: Rename | None = None) -> None:
        from checkpoint_io.loader import renamer, selector

        if only is not None and not callable(only):
            only = [only] if isinstance(only, str) else list(only)
        self.patterns: list[str] = [] if only is None or callable(only) else list(only)
        deeper = [f"{pattern.rstrip('/')}/*" for pattern in self.patterns]
        self.partial = only is not None
        self.renames = rename is not None
        self._takes = selector(only if callable(only) or only is None else self.patterns + deeper)
        self._rename = renamer(rename)

    def takes(self, key: str) -> bool:
        """Return whether the entry of a key is restored."""
        return self._takes(key)

    def weight(self, name: str) -> str:
        """Return the name here of a saved parameter ``"<model>.<name>"``."""
        index, _, parameter_name = name.partition(".")
        if not self.renames or not index.isdecimal():
            return name  # a parameter of no model is named by its position
        key = self._rename(f"models/{index}/{parameter_name}")
        parts = key.split("/", 2)
        if len(parts) != 3 or parts[0] != "models" or not parts[1].isdecimal():
            raise ValueError(
                f"rename= turns models/{index}/{parameter_name} into {key!r}: the keys of weights "
                "are models/<number>/<name>, before and after."
            )
        return f"{parts[1]}.{parts[2]}"

    def apply(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the selected part of a saved state, with its weights renamed.

        Raises:
            ValueError: two weights get one name, or a new name is no name of a weight.
        """
        part = dict(state)
        for section in LISTED[:-1]:
            part[section] = self._entries(section, state[section])
        registered = state.get("registered", {"objects": {}, "unnamed": []})
        part["registered"] = {
            **registered,
            "objects": self._select_named(registered["objects"]),
        }
        if self.renames:
            part["models"] = self._rename_models(part["models"])
            part["optimizers"] = {
                k: self._rename_optimizer(v) for k, v in part["optimizers"].items()
            }
            part["dropped_weights"] = self._rename_dropped(state.get("dropped_weights", {}))
        return part

    def _entries(self, section: str, saved: Mapping[str, Any]) -> dict[str, Any]:
        if not self.partial:
            return dict(saved)
        chosen: dict[str, Any] = {}
        for number, entry in saved.items():
            key = f"{section}/{number}"
            if section == "models" and entry is not None:
                entry = {n: value for n, value in entry.items() if self.takes(f"{key}/{n}")}
                if entry:
                    chosen[number] = entry
            elif self.takes(key):
                chosen[number] = entry
        return chosen

    def _select_named(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        return {name: obj for name, obj in objects.items() if self.takes(f"registered/{name}")}

    def _rename_models(self, models: Mapping[str, Any]) -> dict[str, Any]:
        renamed: dict[str, Any] = {k: {} if v is not None else None for k, v in models.items()}
        for number, weights in models.items():
            for name, value in (weights or {}).items():
                index, _, new = self.weight(f"{number}.{name}").partition(".")
                place = renamed.setdefault(index, {})
                if new in place:
                    raise ValueError(f"rename= makes two saved weights models/{index}/{new}.")
                place[new] = value
        return {k: v for k, v in renamed.items() if v != {} or models.get(k) == {}}

    def _rename_optimizer(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": [self.weight(name) for name in group["params"]]}
            for group in saved["param_groups"]
        ]
        state = {self.weight(name): value for name, value in saved["state"].items()}
        return {**saved, "state": state, "param_groups": groups}

    def _rename_dropped(self, names: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
        renamed: dict[str, list[str]] = {}
        for number, dropped in names.items():
            for name in dropped:
                index, _, new = self.weight(f"{number}.{name}").partition(".")
                renamed.setdefault(index, []).append(new)
        return renamed

    def check(self, keys: Iterable[str]) -> None:
        """Raise if a pattern or the function selects nothing.

        Raises:
            ResumeError: with the nearest key.
        """
        known = list(keys) if self.partial else []
        if self.partial and not self.patterns and not any(map(self.takes, known)):
            raise ResumeError(
                "only= selects nothing of this checkpoint: a function is asked for keys like "
                f"models/0/<name of a weight>, optimizers/0, {', '.join(SINGLE)}."
            )
        for pattern in self.patterns:
            if not any(map(Selection(pattern).takes, known)):
                close = nearest(pattern, [*LISTED, *SINGLE]) or nearest(pattern, known)
                raise ResumeError(
                    f"only={pattern!r} selects nothing of this checkpoint.{close} Sections are "
                    f"{', '.join((*LISTED, *SINGLE))}; keys are like models/0/<name of a weight>, "
                    "optimizers/0, registered/<name>."
                )


def all_keys(state: Mapping[str, Any]) -> Iterator[str]:
    """Iterate the keys of all entries of a saved state that can be restored."""
    yield from SINGLE
    for section in LISTED:
        entries = state.get(section, {})
        entries = entries.get("objects", {}) if section == "registered" else entries
        for name, value in entries.items():
            weights = value if section == "models" else None
            if weights is None:
                yield f"{section}/{name}"
            else:
                yield from (f"{section}/{name}/{weight_name}" for weight_name in weights)
