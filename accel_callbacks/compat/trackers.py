"""The classes of ``accelerate.tracking``, each a hub with one tracker of this library."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import loggers
from accel_callbacks.compat.stand_in import StandIn
from accel_callbacks.distributed.topology import process_rank
from accel_callbacks.tracking.general_tracker import (
    GeneralTracker,
    LoggerType,
    is_general,
    on_main_process,
)
from accel_callbacks.tracking.media import table_of
from accel_callbacks.tracking.trackers import chosen_trackers
from accel_callbacks.warning import warn

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "register_tracker_class",
]


class _NamedTracker(GeneralTracker, metaclass=StandIn):
    """A tracker that is made with the name of its run, and opened by :meth:`start`.

    Args:
        run_name: name of the run, or of the project.
        **kwargs: options of the tracker of this library.
    """

    requires_logging_directory = False
    stands_for: type[loggers.Tracker]

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._hub: loggers.TrackerHub | None = None
        self._step = 0

    @on_main_process
    def start(self) -> None:
        """Open the tool."""
        tracker = self.stands_for(**self.init_kwargs)
        run = loggers.RunInfo(
            name=self.run_name,
            logging_dir=os.fspath(getattr(self, "logging_dir", None) or "."),
            run_id=uuid.uuid4().hex[:8],
            rank=process_rank()[0],
        )
        self._hub = loggers.TrackerHub([tracker], run=run)
        self._hub.start()

    @property
    def tracker(self) -> Any:
        """The tool's own object, None before :meth:`start`."""
        return None if self._hub is None else self._hub.trackers[0].raw

    #: The tool's own object, by the names that it has in several classes.
    writer = run = task = live = active_run = tracker

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Record the run's settings."""
        self._started().log_config(values)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values at a step, without one at that of the last call."""
        hub = self._started()
        hub.log(values, self._at(step), {hub.trackers[0].name: kwargs} if kwargs else None)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images by name."""
        self._started().log_images(values, self._at(step), **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table: its columns and rows, or a data frame of pandas."""
        columns, data = table_of(columns, data, dataframe)
        self._started().log_table(table_name, columns, data, self._at(step), **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write what is pending, and close the tool."""
        if self._hub is not None:
            self._hub.finish()

    def _at(self, step: int | None) -> int:
        self._step = self._step if step is None else step
        return self._step

    def _started(self) -> loggers.TrackerHub:
        if self._hub is None:
            self.start()
        assert self._hub is not None
        return self._hub


class TensorBoardTracker(_NamedTracker):
    """TensorBoard's event files, in a folder of the name of the run."""

    name = "tensorboard"
    requires_logging_directory = True
    stands_for = loggers.TensorBoardTracker

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **{"subdir": run_name, **kwargs})
        self.logging_dir = logging_dir


class WandBTracker(_NamedTracker):
    """Weights & Biases."""

    name = "wandb"
    stands_for = loggers.WandBTracker


class TrackioTracker(_NamedTracker):
    """Trackio."""

    name = "trackio"
    stands_for = loggers.TrackioTracker


class CometMLTracker(_NamedTracker):
    """Comet."""

    name = "comet_ml"
    stands_for = loggers.CometTracker


class SwanLabTracker(_NamedTracker):
    """SwanLab."""

    name = "swanlab"
    stands_for = loggers.SwanLabTracker


class ClearMLTracker(_NamedTracker):
    """ClearML."""

    name = "clearml"
    stands_for = loggers.ClearMLTracker

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "accelerate", **kwargs)


class DVCLiveTracker(_NamedTracker):
    """DVCLive.

    Raises:
        ValueError: there is a ``live`` object, which this library makes itself.
    """

    name = "dvclive"
    stands_for = loggers.DVCLiveTracker

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        if live is not None:
            raise ValueError("live= is made here: pass its options, such as dir=, instead.")
        super().__init__(run_name or "accelerate", **kwargs)


class MLflowTracker(_NamedTracker):
    """MLflow.

    Raises:
        ValueError: the run is nested in another one.
    """

    name = "mlflow"
    stands_for = loggers.MLflowTracker

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        if nested_run:
            raise ValueError("nested_run=True: runs are not nested here; leave it out.")
        options = {
            **{"experiment_name": experiment_name, "run_id": run_id, "tags": tags},
            **{"run_name": run_name, "description": description},
        }
        if logging_dir is not None:
            options["artifact_location"] = os.fspath(logging_dir)
        super().__init__(experiment_name or "accelerate", **options)


#: The class of each tracker, by its name.
LOGGER_TYPE_TO_CLASS: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (
        *(ClearMLTracker, CometMLTracker, DVCLiveTracker, MLflowTracker, SwanLabTracker),
        *(TensorBoardTracker, TrackioTracker, WandBTracker),
    )
}
_BUILT_IN = frozenset(LOGGER_TYPE_TO_CLASS)
_FOLDER = "requires_logging_directory"


def register_tracker_class(tracker_class: type[Any]) -> None:
    """Let ``log_with`` know a class of trackers by its name.

    Args:
        tracker_class: a subclass of :class:`GeneralTracker` with ``name`` and
            ``requires_logging_directory``.

    Raises:
        ValueError: it is something else, or its name is empty.

    Warns:
        UserWarning: the name is that of another class, in whose place it is from now on.
    """
    lacks_name = not getattr(tracker_class, "name", None)
    if not is_general(tracker_class) or lacks_name or not hasattr(tracker_class, _FOLDER):
        raise ValueError(
            f"{tracker_class!r} cannot be registered: it must be a subclass of GeneralTracker with "
            "`name` and `requires_logging_directory`."
        )
    before = LOGGER_TYPE_TO_CLASS.get(tracker_class.name)
    if before not in (None, tracker_class):
        warn(
            f"log_with={tracker_class.name!r} is {tracker_class.__qualname__} from now on, and was "
            f"{before.__qualname__}: give it another name to use both."
        )
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def registered(log_with: Any) -> Any:
    """Return ``log_with`` with the classes that were registered in place of their names."""
    choices = log_with if isinstance(log_with, (list, tuple)) else [log_with]
    classes = {key: kind for key, kind in LOGGER_TYPE_TO_CLASS.items() if not _is_own(key, kind)}
    return [
        classes.get(choice, choice) if isinstance(choice, str) else choice for choice in choices
    ]


def with_project_folder(
    log_with: Sequence[Any], project_name: str, init_kwargs: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of trackers, with TensorBoard's files in a folder of the project's name.

    Args:
        log_with: trackers, and names of some.
        project_name: as of ``init_trackers``.
        init_kwargs: options by the name of the tracker.
    """
    name = TensorBoardTracker.name
    names = [choice for choice in log_with if isinstance(choice, str)]
    if name not in names and not ("all" in names and name in get_available_trackers()):
        return init_kwargs
    return {**init_kwargs, name: {"subdir": project_name, **init_kwargs.get(name, {})}}


def _is_own(name: str, kind: type[Any]) -> bool:
    return name in _BUILT_IN and issubclass(kind, _NamedTracker)


def get_available_trackers() -> list[LoggerType]:
    """Return those of Accelerate's trackers whose tool is installed."""
    installed = set(loggers.installed_trackers())
    names = {"comet_ml" if name == "comet" else name for name in installed} & _BUILT_IN
    return [LoggerType(name) for name in sorted(names)]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return each tracker of ``log_with`` once, those whose tool is installed for ``"all"``.

    Args:
        log_with: names, classes and instances of trackers, or one of them.
        logging_dir: folder of their files.

    Raises:
        ValueError: a name is unknown, or a tracker needs the folder.
    """
    if log_with is None:
        return []
    choices = registered(log_with)
    if "all" in choices:
        trackers = [choice for choice in choices if not isinstance(choice, str)]
        choices = [*trackers, *get_available_trackers()]
    chosen_trackers(choices, {})  # raises for an unknown name
    for choice in choices:
        kind = LOGGER_TYPE_TO_CLASS.get(choice) if isinstance(choice, str) else choice
        if logging_dir is None and getattr(kind, _FOLDER, False):
            raise ValueError(f"{choice} writes files: pass logging_dir= with their folder.")
    return [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
