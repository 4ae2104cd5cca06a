"""Registry of trackers by name, and trackers with options and filters."""

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

__all__ = [
    "ConfiguredTracker",
    "TrackerSpec",
    "available_trackers",
    "check_name",
    "configured_tracker",
    "create",
    "installed_trackers",
    "register_tracker",
]

ENTRY_POINT_GROUP = "accel_callbacks.trackers"

TrackerSpec = str | Tracker | type[Tracker]
"""A tracker given by registered name, instance or class."""

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
    """Register ``cls`` under ``name`` in this process.

    Packages that should be found without an import declare an entry point in the group
    ``accel_callbacks.trackers`` instead.

    Args:
        name: the name for ``log_with``.
        cls: a subclass of `Tracker`.

    Raises:
        TypeError: ``cls`` is not a subclass of `Tracker`.
        ValueError: another class already has this name.

    Example:
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
    """Return every name that `create` accepts, sorted, including other packages' entry points.

    Example:
        >>> {"jsonl", "tensorboard", "wandb"} <= set(available_trackers())
        True
    """
    declared = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted({*_classes, *(entry.name for entry in declared)})


def check_name(name: str) -> None:
    """Raise unless ``name`` is that of a tracker, without creating it.

    Raises:
        ValueError: the name is unknown; the message lists the nearest name and all names.
        ImportError: the package that declares the name cannot be imported.

    Example:
        >>> check_name("jsonl")
    """
    _lookup(name)


def create(spec: TrackerSpec, **kwargs: Any) -> Tracker:
    """Create a tracker from a name or class.

    Args:
        spec: a name, a `Tracker` class, or an instance, which is returned unchanged.
        **kwargs: options for the constructor.

    Raises:
        ValueError: the name is unknown; the message lists the nearest name and all names.
        TypeError: ``spec`` is something else, or there are options for an instance.
        ImportError: the package that declares the name cannot be imported.

    Example:
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
        tracker.name = spec  # the key in get() and state_dict()
        return tracker
    _check_class(spec, "log_with")
    return spec(**kwargs)


def _check_class(cls: object, where: str) -> type[Tracker]:
    """Return ``cls``, or raise TypeError unless it is a tracker class."""
    if isinstance(cls, type) and issubclass(cls, Tracker):
        return cls
    raise TypeError(f"{where} needs a name, a loggers.Tracker or a subclass, got {cls!r}")


def _lookup(name: str) -> type[Tracker]:
    """Find a class by name; installed packages are scanned only for unknown names."""
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
    """Import the object of an entry point."""
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
    """A tracker with options and filters; created by `configured_tracker`.

    Args:
        tracker: a name, a class or an instance.
        include: patterns of the names that it receives; all if empty.
        exclude: patterns of the names that it does not receive.
        label: its name in ``get`` and checkpoints; the tracker's own name if None.
        options: keyword arguments of its constructor.

    Example:
        >>> ConfiguredTracker("jsonl", include=("val/*",)).takes("train/loss")
        False
    """

    tracker: Any
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    label: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """Return whether the tracker receives what is logged under this name."""
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    @property
    def owns_files(self) -> bool:
        """True if the tracker, which need not exist yet, writes files that two runs would mix."""
        kind = _lookup(self.tracker) if isinstance(self.tracker, str) else self.tracker
        return bool(getattr(kind, "owns_files", False))

    def create(self) -> Tracker:
        """Create the tracker, named by its label."""
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
    """Return a tracker with options and filters, for ``log_with`` and hubs.

    Args:
        tracker: a name, a class or an instance.
        include: patterns such as ``"val/*"`` of the names that it receives; all if empty.
        exclude: patterns of the names that it does not receive. Artifacts and graphs are not
            filtered.
        label: its name in ``get`` and checkpoints, so that one kind can be used twice.
        **options: keyword arguments of its constructor.

    Raises:
        TypeError: ``include`` or ``exclude`` is a single str.

    Example:
        >>> chosen = configured_tracker(
        ...     "jsonl", include=["val/*"], filename="val.jsonl", label="val"
        ... )
        >>> chosen.takes("val/loss"), chosen.takes("train/loss"), chosen.create().name
        (True, False, 'val')
    """
    for argument, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            raise TypeError(f"{argument}={patterns!r} is one str: write {argument}=[{patterns!r}]")
    return ConfiguredTracker(tracker, tuple(include), tuple(exclude), label, options)


def installed_trackers() -> list[str]:
    """Return the names of all trackers whose tool is installed, sorted, without importing it.

    Example:
        >>> "jsonl" in installed_trackers()
        True
    """
    return [name for name in available_trackers() if _is_installed(name)]


def _is_installed(name: str) -> bool:
    """Return whether the modules that a tracker imports exist."""
    try:
        modules = create(name).requires
    except Exception:  # a broken entry point, or a constructor with required arguments
        return False
    return all(importlib.util.find_spec(module) is not None for module in modules)
