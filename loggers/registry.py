"""Names -> trackers; configured_tracker."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from loggers.base import Tracker
from loggers.trackers.clearml import ClearMLTracker
from loggers.trackers.comet import CometTracker
from loggers.trackers.console import ConsoleTracker
from loggers.trackers.csv import CSVTracker
from loggers.trackers.dvclive import DVCLiveTracker
from loggers.trackers.jsonl import JSONLTracker
from loggers.trackers.mlflow import MLflowTracker
from loggers.trackers.swanlab import SwanLabTracker
from loggers.trackers.tensorboard import TensorBoardTracker
from loggers.trackers.trackio import TrackioTracker
from loggers.trackers.wandb import WandBTracker

__all__ = ["ConfiguredTracker", "configured_tracker", "installed_trackers"]

ENTRY_POINT_GROUP = "accel_callbacks.trackers"

TrackerSpec = str | Tracker | type[Tracker]
"""How a tracker is named: by a registered name, an instance or a class."""

_classes: dict[str, type[Tracker]] = {
    cls.name: cls
    for cls in (
        ClearMLTracker,
        CometTracker,
        ConsoleTracker,
        CSVTracker,
        DVCLiveTracker,
        JSONLTracker,
        MLflowTracker,
        SwanLabTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
    )
}


def register_tracker(name: str, cls: type[Tracker]) -> None:
    """Make ``cls`` known under ``name`` in this process.

    Packages that want to be found without an import declare an entry point in the group
    ``accel_callbacks.trackers`` instead.

    Args:
        name: what users write in ``log_with``.
        cls: a subclass of `Tracker`.

    Raises:
        TypeError: ``cls`` is not a subclass of `Tracker`.
        ValueError: another class already has this name.

    >>> from loggers import NullTracker
    >>> register_tracker("nothing", NullTracker)
    >>> create("nothing").name
    'nothing'
    """
    _check_class(cls, f"register_tracker({name!r}, ...)")
    known = _classes.setdefault(name, cls)
    if known is not cls:
        raise ValueError(
            f"a tracker named {name!r} is already registered ({known.__module__}."
            f"{known.__qualname__}): choose another name"
        )


def available_trackers() -> list[str]:
    """Return every name that `create` accepts, sorted, entry points of other packages included.

    >>> {"jsonl", "tensorboard", "wandb"} <= set(available_trackers())
    True
    """
    declared = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({*_classes, *(entry.name for entry in declared)})


def check_name(name: str) -> None:
    """Raise unless ``name`` is that of a tracker; nothing is made of it.

    Raises:
        ValueError: the name is unknown; the message has the nearest name and all of them.
        ImportError: the package that declares the name cannot be imported.

    >>> check_name("jsonl")
    """
    _lookup(name)


def create(spec: TrackerSpec, **kwargs: Any) -> Tracker:
    """Return the tracker that ``spec`` names.

    Args:
        spec: a name, a `Tracker` class, or an instance (returned as it is).
        **kwargs: options for the constructor.

    Raises:
        ValueError: the name is unknown; the message has the nearest name and all of them.
        TypeError: ``spec`` is something else, or options came with an instance.
        ImportError: the package that declares the name cannot be imported.

    >>> create("jsonl", filename="history.jsonl").name
    'jsonl'
    """
    if isinstance(spec, Tracker):
        if kwargs:
            options = ", ".join(kwargs)
            raise TypeError(f"options ({options}) cannot be given to a tracker that already exists")
        return spec
    if isinstance(spec, str):
        tracker = _lookup(spec)(**kwargs)
        tracker.name = spec  # what the user wrote is what get() and state_dict() go by
        return tracker
    _check_class(spec, "log_with")
    return spec(**kwargs)


def _check_class(cls: object, where: str) -> type[Tracker]:
    """Return ``cls``, or raise TypeError unless it is a tracker class."""
    if isinstance(cls, type) and issubclass(cls, Tracker):
        return cls
    raise TypeError(f"{where} needs a name, a loggers.Tracker or a subclass, got {cls!r}")


def _lookup(name: str) -> type[Tracker]:
    """Find a class by name; the scan of installed packages is only done for unknown names."""
    if name in _classes:
        return _classes[name]
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        cls = _check_class(_load(entry), f"entry point {entry.name} = {entry.value}")
        _classes[name] = cls
        return cls
    names = available_trackers()
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown tracker {name!r}.{hint} Available: {', '.join(names)}")


def _load(entry: importlib.metadata.EntryPoint) -> Any:
    """Import what an entry point names."""
    try:
        return entry.load()
    except Exception as error:
        package = entry.dist.name if entry.dist else "an installed package"
        raise ImportError(
            f"tracker {entry.name!r} is declared by {package} as {entry.value}, which cannot be "
            f"imported: {error}. Update or remove that package"
        ) from error


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
