"""The adapter that lets a tracker hub call a GeneralTracker.

A file of its own, because it imports `loggers`: a script whose own file hides that package can
still import `GeneralTracker`, and gets an error that names the file when a tracker is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loggers import RunInfo, Scalar, Status, Tracker

__all__ = ["AdaptedTracker"]


class AdaptedTracker(Tracker):
    """Adapter that lets a hub call a :class:`GeneralTracker`.

    Args:
        wrapped: an instance, or the class.
        options: extra arguments of the class.

    Raises:
        TypeError: there is no ``name``, which a class must have too, or there are options for an
            instance.
    """

    def __init__(self, wrapped: Any, options: Mapping[str, Any]) -> None:
        name = getattr(wrapped, "name", None)
        if not isinstance(name, str):
            raise TypeError(f"{wrapped!r} has no `name` that is a str: set it on the class.")
        if options and not isinstance(wrapped, type):
            raise TypeError(
                f"init_kwargs for {name!r}, which is an instance already: {list(options)}."
            )
        self.name = name
        self.main_process_only = getattr(wrapped, "main_process_only", True)
        self.lossless = getattr(wrapped, "lossless", False)
        self.wrapped = wrapped
        self._options = dict(options)
        # Overridden only if the wrapped tracker has the method, because `loggers.media` reports
        # the methods that are overridden.
        if hasattr(wrapped, "log_images"):
            self.log_images = self._log_images  # type: ignore[method-assign]
        if hasattr(wrapped, "log_table"):
            self.log_table = self._log_table  # type: ignore[method-assign]

    def start(self, run: RunInfo) -> None:
        """Instantiate the tracker if a class was given, and start it."""
        if isinstance(self.wrapped, type):
            folder = [run.logging_dir] if self.wrapped.requires_logging_directory else []  # type: ignore[attr-defined]
            self.wrapped = self.wrapped(run.name, *folder, **self._options)
        start = getattr(self.wrapped, "start", None)  # older trackers open in their constructor
        if start is not None:
            start()

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Pass on the settings."""
        self.wrapped.store_init_configuration(dict(config))

    def log(self, scalars: Mapping[str, Scalar], step: int, **kwargs: Any) -> None:
        """Pass on a row, with the ``log_kwargs`` of this tracker."""
        self.wrapped.log(dict(scalars), step=step, **kwargs)

    def takes_object(self, value: Any) -> bool:
        """Return True: its interface has no types of values."""
        return True

    def log_objects(self, objects: Mapping[str, Any], step: int, **kwargs: Any) -> None:
        """Pass on values as they are."""
        self.wrapped.log(dict(objects), step=step, **kwargs)

    def finish(self, status: Status = "success") -> None:
        """Close the tracker; its interface has no argument for the status."""
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
