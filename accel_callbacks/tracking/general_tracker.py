"""GeneralTracker: Accelerate's base class of trackers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, cast

from accel_callbacks.distributed.topology import process_rank

__all__ = ["GeneralTracker", "LoggerType", "is_general", "on_main_process"]

F = TypeVar("F", bound=Callable[..., Any])


def is_general(spec: Any) -> bool:
    """Return whether this is a tracker, or tracker class, with Accelerate's interface."""
    return all(callable(getattr(spec, name, None)) for name in ("store_init_configuration", "log"))


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

    @classmethod
    def list(cls) -> Any:
        """Return the values."""
        return [member.value for member in cls]


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
