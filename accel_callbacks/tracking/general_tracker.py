"""GeneralTracker of Accelerate, adapted."""

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
    """Whether this is a tracker, or its class, written as Accelerate's are.

    Example:
        >>> from accel_callbacks.tracking.general_tracker import is_general
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


class LoggerType(str, Enum):
    """Names of trackers, for ``log_with``; each is the same as its value.

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
    """Decorator for a tracker's method: call it on the main process only.

    It holds where the tracker's ``main_process_only`` is true, and is decided at each call.

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
    """Base of trackers that are written as Accelerate's are. New ones subclass `loggers.Tracker`.

    A subclass has ``name``, ``requires_logging_directory`` and the property ``tracker``. Give an
    instance to ``log_with``; or the class, which is then made with the run's name, with the logging
    directory if it requires that, and with what ``init_kwargs`` has for it. Its methods are called
    on a thread of the tracker's own.

    Attributes:
        name: what ``get_tracker`` goes by.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        main_process_only: whether only the main process uses it, True by default.

    Raises:
        TypeError: one of the three is missing.

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
        """Open the tool, where the constructor did not."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Record the run's settings, a nested dict of JSON types."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record flat values, float, int or str, at a step."""

    def finish(self) -> None:
        """Close the tool."""
