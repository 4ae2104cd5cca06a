"""A tracker written for Accelerate, behind the protocol of this library's trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loggers import RunInfo, Scalar, Status, Tracker

__all__ = ["AdaptedTracker", "is_general"]


def is_general(spec: Any) -> bool:
    """Whether this is a tracker, or its class, written as Accelerate's are.

    Example:
        >>> from accel_callbacks.adapted_tracker import is_general
        >>> from accel_callbacks.tracking.trackers import GeneralTracker
        >>> is_general(GeneralTracker), is_general("jsonl")
        (True, False)
    """
    return all(callable(getattr(spec, name, None)) for name in ("store_init_configuration", "log"))


class AdaptedTracker(Tracker):
    """Calls a :class:`GeneralTracker` from a hub.

    Args:
        wrapped: an instance, or the class.
        options: further arguments of the class.

    Raises:
        TypeError: a class has no ``name`` before it is made, or options came with an instance.

    Example:
        >>> from accel_callbacks.adapted_tracker import AdaptedTracker
        >>> from accel_callbacks.tracking.trackers import GeneralTracker
        >>> class Quiet(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "quiet", False, None
        >>> AdaptedTracker(Quiet(), {}).name
        'quiet'
    """

    def __init__(self, wrapped: Any, options: Mapping[str, Any]) -> None:
        name = getattr(wrapped, "name", None)
        if not isinstance(name, str):
            raise TypeError(f"{wrapped!r} has no `name` that is a str: set it on the class.")
        if options and not isinstance(wrapped, type):
            raise TypeError(f"init_kwargs for {name!r}, which is made already: {list(options)}.")
        self.name = name
        self.main_process_only = getattr(wrapped, "main_process_only", True)
        self.wrapped = wrapped
        self._options = dict(options)
        # Only what the wrapped one has counts as had; see `loggers.media`.
        if hasattr(wrapped, "log_images"):
            self.log_images = self._log_images  # type: ignore[method-assign]
        if hasattr(wrapped, "log_table"):
            self.log_table = self._log_table  # type: ignore[method-assign]

    def start(self, run: RunInfo) -> None:
        """Make the tracker where a class was given, and start it."""
        if isinstance(self.wrapped, type):
            places = [run.logging_dir] if self.wrapped.requires_logging_directory else []  # type: ignore[attr-defined]
            self.wrapped = self.wrapped(run.name, *places, **self._options)
        start = getattr(self.wrapped, "start", None)  # older ones open in their constructor
        if start is not None:
            start()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Hand on the settings."""
        self.wrapped.store_init_configuration(dict(config))

    def log(self, scalars: Mapping[str, Scalar], step: int, **kwargs: Any) -> None:
        """Hand on a row, with what ``log_kwargs`` had for this tracker."""
        self.wrapped.log(dict(scalars), step=step, **kwargs)

    def finish(self, status: Status = "success") -> None:
        """Close the tracker, which is not told how the run ended."""
        if not isinstance(self.wrapped, type):
            self.wrapped.finish()

    @property
    def raw(self) -> Any:
        """The tool's own object."""
        return getattr(self.wrapped, "tracker", None)

    def _log_images(
        self,
        images: Mapping[str, Any],
        step: int,
        *,
        captions: Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.wrapped.log_images(dict(images), step=step, **kwargs)

    def _log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int,
        **kwargs: Any,
    ) -> None:
        data = [list(row) for row in rows]
        self.wrapped.log_table(name, columns=list(columns), data=data, step=step, **kwargs)
