"""Trackers with options and filters, and all that are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from loggers.base import Tracker
from loggers.registry import TrackerSpec, available_trackers, create

__all__ = ["ConfiguredTracker", "configured_tracker", "installed_trackers"]


@dataclass(frozen=True)
class ConfiguredTracker:
    """A tracker with options and filters; made by `configured_tracker`.

    Args:
        tracker: a name, a class or an instance.
        include: patterns of the names that it is to get; all if empty.
        exclude: patterns of the names that it is not to get.
        label: what ``get`` and checkpoints go by; the tracker's own name if None.
        options: of its constructor.

    >>> ConfiguredTracker("jsonl", include=("val/*",)).takes("train/loss")
    False
    """

    tracker: Any
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    label: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Say whether the tracker is to get what is logged under this name."""
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def create(self) -> Tracker:
        """Make the tracker, under its label."""
        tracker = create(self.tracker, **self.options)
        if self.label is not None:
            tracker.name = self.label
        return tracker


def configured_tracker(
    tracker: TrackerSpec,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    label: str | None = None,
    **options: Any,
) -> ConfiguredTracker:
    """Give a tracker options of its own and say what it is to get, for ``log_with`` and hubs.

    Args:
        tracker: a name, a class or an instance.
        include: patterns such as ``"val/*"`` of the names that it is to get; all if empty.
        exclude: patterns of the names that it is not to get. Artifacts and graphs are not
            filtered.
        label: what ``get`` and checkpoints go by, so that one kind can be used twice.
        **options: of its constructor.

    Raises:
        TypeError: patterns are one str rather than several.

    >>> chosen = configured_tracker("jsonl", include=["val/*"], filename="val.jsonl", label="val")
    >>> chosen.takes("val/loss"), chosen.takes("train/loss"), chosen.create().name
    (True, False, 'val')
    """
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise TypeError(f"{argument}={patterns!r} is one str: write {argument}=[{patterns!r}]")
    return ConfiguredTracker(tracker, tuple(include), tuple(exclude), label, options)


def chosen(spec: Any) -> ConfiguredTracker:
    """Return ``spec`` with the filters that it has, or none."""
    return spec if isinstance(spec, ConfiguredTracker) else ConfiguredTracker(spec)


def installed_trackers() -> list[str]:
    """Return the names of all trackers whose tool is installed, sorted; nothing is imported.

    >>> "jsonl" in installed_trackers()
    True
    """
    return [name for name in available_trackers() if _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Look for what a tracker imports; one of another package that is broken does not count."""
    try:
        modules = create(name).requires
    except Exception:  # someone else's entry point, or a constructor that wants arguments
        return False
    return all(importlib.util.find_spec(module) is not None for module in modules)
