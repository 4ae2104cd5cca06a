"""GeneralTracker: Accelerate's base class of trackers, and its adapter to a hub."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, cast

from accel_callbacks.distributed.topology import process_rank
from loggers import RunInfo, Scalar, Status, Tracker

__all__ = ["AdaptedTracker", "GeneralTracker", "LoggerType", "is_general", "on_main_process"]

F = TypeVar("F", bound=Callable[..., Any])


def is_general(spec: Any) -> bool:
    """Return whether this is a tracker, or tracker class, with Accelerate's interface.

    Example:
        >>> from accel_callbacks.tracking.general_tracker import is_general
        >>> from accel_callbacks.tracking.trackers import GeneralTracker
        >>> is_general(GeneralTracker), is_general("jsonl")
        (True, False)
    """
    return all(callable(getattr(spec, name, None)) for name in ("store_init_configuration", "log"))


class AdaptedTracker(Tracker):
    """Adapter that lets a hub call a :class:`GeneralTracker`.

    Args:
        wrapped: an instance, or the class.
        options: extra arguments of the class.

    Raises:
        TypeError: there is no ``name``, which a class must have too, or there are options for an
            instance.

    Example:
        >>> from accel_callbacks.tracking.general_tracker import AdaptedTracker
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
            raise TypeError(
                f"init_kwargs for {name!r}, which is an instance already: {list(options)}."
            )
        self.name = name
        self.main_process_only = getattr(wrapped, "main_process_only", True)
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


class LoggerType(str, Enum):
    """Names of trackers, for ``log_with``; each is equal to its value.

    Example:
        >>> from accel_callbacks import LoggerType
        >>> LoggerType.TENSORBOARD == "tensorboard", str(LoggerType.ALL)
        (True, 'all')
    """

    ALL = "all"
    JSONL = "jsonl"
    CSV = "csv"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    SWANLAB = "swanlab"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"

    def __str__(self) -> str:
        return str(self.value)


def on_main_process(function: F) -> F:
    """Decorate a tracker's method to run on the main process only.

    Applies if the tracker's ``main_process_only`` is true, which is checked at each call.

    Example:
        >>> from accel_callbacks.tracking.trackers import on_main_process
        >>> class Print:
        ...     main_process_only = True
        ...
        ...     @on_main_process
        ...     def log(self, values):
        ...         print(values)
        >>> Print().log({"loss": 0.5})
        {'loss': 0.5}
    """

    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and process_rank()[0] != 0:
            return None
        return function(self, *args, **kwargs)

    return cast(F, guarded)


class GeneralTracker:
    """Base class of trackers with Accelerate's interface. New ones subclass `loggers.Tracker`.

    A subclass has ``name``, ``requires_logging_directory`` and the property ``tracker``. Pass an
    instance in ``log_with``; or the class, which is then instantiated with the run's name, with the
    logging directory if it requires one, and with its ``init_kwargs``. Its methods are called on
    one thread per tracker, which is not the main thread.

    Attributes:
        name: key for ``get_tracker``.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        main_process_only: whether only the main process uses it, True by default.

    Raises:
        TypeError: ``name``, ``requires_logging_directory`` or ``tracker`` is missing.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.tracking.trackers import GeneralTracker, on_main_process
        >>> class Print(GeneralTracker):
        ...     name = "print"
        ...     requires_logging_directory = False
        ...
        ...     @property
        ...     def tracker(self):
        ...         return print
        ...
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> accel = Accelerator(cpu=True, log_with=Print())
        >>> accel.init_trackers("digits", {"lr": 0.1})
        >>> accel.log({"loss": 0.5}, step=3)
        >>> accel.end_training()
        3 {'loss': 0.5}
    """

    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        required = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in required if name not in dir(self)]
        if missing and not _blank:
            raise TypeError(
                f"{type(self).__name__} lacks {', '.join(missing)}: a GeneralTracker has "
                "`name`, `requires_logging_directory` and the property `tracker`."
            )

    def start(self) -> None:
        """Open the tool, if the constructor did not."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Record the run's settings, a nested dict of JSON types."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record flat values (float, int or str) at a step."""

    def finish(self) -> None:
        """Close the tool."""
