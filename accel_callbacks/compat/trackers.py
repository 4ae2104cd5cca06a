"""The classes of ``accelerate.tracking``, each a hub with one tracker of this library."""

from __future__ import annotations

import importlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import loggers
from accel_callbacks.compat.logged_values import split, whole_step
from accel_callbacks.compat.stand_in import StandIn
from accel_callbacks.distributed.topology import process_rank
from accel_callbacks.tracking.adapted_tracker import AdaptedTracker
from accel_callbacks.tracking.general_tracker import (
    GeneralTracker,
    LoggerType,
    is_general,
    on_main_process,
)
from accel_callbacks.tracking.media import table_of
from accel_callbacks.tracking.trackers import chosen_trackers
from checkpoint_io.warning import warn

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
    """A tracker that is made with the name of its run, or that is one of an Accelerator.

    Args:
        run_name: name of the run, or of the project.
        **kwargs: options of the tracker of this library.
    """

    name: str
    requires_logging_directory = False
    stands_for: type[loggers.Tracker]
    logging_dir_param: str | os.PathLike[str] | None = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name: str | None = run_name
        self._project = run_name
        self.init_kwargs = kwargs
        self._hub: loggers.TrackerHub | None = None
        self._is_shared = False  # the hub is that of an Accelerator
        self._step = 0
        self._now: Callable[[], int] = lambda: self._step

    @classmethod
    def of(
        cls,
        hub: loggers.TrackerHub,
        name: str,
        options: Mapping[str, Any],
        now: Callable[[], int],
    ) -> _NamedTracker:
        """Return a tracker of an Accelerator.

        Args:
            hub: its trackers.
            name: of the one among them.
            options: what it was made with.
            now: returns the step of values without one.
        """
        tracker = hub.configured[name]
        own = (kind for kind in LOGGER_TYPE_TO_CLASS.values() if issubclass(kind, _NamedTracker))
        kind = next((kind for kind in own if isinstance(tracker, kind.stands_for)), _OtherTracker)
        view = kind.__new__(kind)
        _NamedTracker.__init__(view, hub.run.name)
        view.init_kwargs = dict(options)
        view.name, view.logging_dir_param = name, hub.run.logging_dir
        view._hub, view._is_shared, view._now = hub, True, now
        return view

    @on_main_process
    def start(self) -> None:
        """Open the tool; that of an Accelerator is open."""
        if self._is_shared:
            return
        tracker = self.stands_for(**self.init_kwargs)
        tracker.name = self.name
        run = loggers.RunInfo(
            name=self._project,
            logging_dir=self._folder(),
            run_id=uuid.uuid4().hex[:8],
            rank=process_rank()[0],
        )
        self._hub = loggers.TrackerHub([tracker], run=run)
        self._hub.start()

    @property
    def tracker(self) -> Any:
        """The tool's own object, None before :meth:`start`."""
        return None if self._hub is None else self._hub.get(self.name).raw

    @property
    def logging_dir(self) -> str:
        """The folder of the files."""
        return self._folder()

    @on_main_process
    def store_init_configuration(self, values: Any) -> None:
        """Record the run's settings."""
        self._open_hub().log_config(values, self.name)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values at a step, without one at that of the last call.

        Args:
            values: numbers, texts, dicts of these, and what the tool's own call takes.
            step: the step.
            **kwargs: further arguments of the tool's own call.
        """
        hub, step = self._open_hub(), self._at(step)
        scalars, objects = split(values)
        keywords = {self.name: kwargs} if kwargs else None
        if scalars:
            hub.put(hub.flat(scalars), step, keywords, self.name)
        if objects:
            hub.log_objects(objects, step, keywords, only=self.name)

    @on_main_process
    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        dataformats: str | None = None,
        captions: Mapping[str, Sequence[str] | str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record images by name.

        Args:
            values: by name, arrays, tensors, PIL images, or lists of these.
            step: the step.
            dataformats: the order of their axes, such as ``"NHWC"``.
            captions: one text per image, under the same names.
            **kwargs: further arguments of the tool's own call.
        """
        hub, step = self._open_hub(), self._at(step)
        channels = None if dataformats is None or "C" not in dataformats else _channels(dataformats)
        keywords = {self.name: kwargs} if kwargs else None
        hub.log_images(
            values, step, captions=captions, channels=channels, log_kwargs=keywords, only=self.name
        )

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
        """Record a table.

        Args:
            table_name: name of the table.
            columns: names of the columns, by default the first row.
            data: the rows.
            dataframe: a data frame of pandas in place of both.
            step: the step.
            **kwargs: further arguments of the tool's own call.
        """
        if columns is None and data:
            columns, data = data[0], data[1:]
        columns, data = table_of(columns, data, dataframe)
        hub, step = self._open_hub(), self._at(step)
        keywords = {self.name: kwargs} if kwargs else None
        hub.log_table(table_name, columns, data, step, log_kwargs=keywords, only=self.name)

    @on_main_process
    def finish(self) -> None:
        """Write what is pending, and close the tool; that of an Accelerator ends with it."""
        if self._hub is not None:
            self._hub.flush() if self._is_shared else self._hub.finish()

    def _folder(self) -> str:
        return os.fspath(self.logging_dir_param or ".")

    def _at(self, step: Any) -> int:
        self._step = self._now() if step is None else whole_step(step)
        return self._step

    def _open_hub(self) -> loggers.TrackerHub:
        if self._hub is None:
            self.start()
        assert self._hub is not None
        return self._hub


def _channels(dataformats: str) -> Literal["first", "last"]:
    """Return where the channels are in an order of axes.

    Raises:
        ValueError: they are between the others.
    """
    places = {"CHW": "first", "HWC": "last"}
    axes = dataformats.upper().removeprefix("N")
    if axes not in places:
        raise ValueError(
            f"dataformats={dataformats!r}: the axes of images are CHW or HWC, with N before them "
            "where there are several; permute them first."
        )
    return cast('Literal["first", "last"]', places[axes])


class _OtherTracker(_NamedTracker):
    """A tracker that Accelerate has not, such as JSONL, with the methods of those that it has."""

    name = "other"
    stands_for = loggers.NullTracker


class TensorBoardTracker(_NamedTracker):
    """TensorBoard's event files, in a folder of the name of the run."""

    name = "tensorboard"
    requires_logging_directory = True
    stands_for = loggers.TensorBoardTracker
    writer = _NamedTracker.tracker

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **{"subdir": run_name, **kwargs})
        self.logging_dir_param = logging_dir

    @property
    def logging_dir(self) -> str:
        """The folder of the event files."""
        folder = os.path.join(self._folder(), self._project)
        return folder if self.writer is None else str(self.writer.log_dir)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images: those of one array by ``SummaryWriter.add_images``, N before CHW.

        Args:
            values: by name, arrays or tensors, or what other trackers take.
            step: the step.
            **kwargs: further arguments of ``add_images``, such as ``dataformats``.
        """
        step = self._at(step)
        for name, images in values.items():
            if getattr(images, "ndim", 0) == 4 or kwargs.keys() & {"dataformats", "walltime"}:
                self._open_hub()
                self.writer.add_images(name, images, global_step=step, **kwargs)
            else:
                super().log_images({name: images}, step, **kwargs)


class _RunTracker(_NamedTracker):
    """A tracker whose tool has a run, a class for tables or images, and a call for all values."""

    run = _NamedTracker.tracker

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images by name, each as the tool's own ``Image``.

        Args:
            values: by name, a list of what ``Image`` takes.
            step: the step.
            **kwargs: further arguments of the tool's own call.
        """
        image = self._package().Image
        for name, images in values.items():
            self.log({name: [image(one) for one in images]}, step, **kwargs)

    def _package(self) -> Any:
        return importlib.import_module(self.name)


class WandBTracker(_RunTracker):
    """Weights & Biases."""

    name = "wandb"
    stands_for = loggers.WandBTracker

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
        """Record a ``wandb.Table``, whose cells may be images and others of its objects."""
        table = self._package().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step, **kwargs)


class TrackioTracker(_RunTracker):
    """Trackio."""

    name = "trackio"
    stands_for = loggers.TrackioTracker
    log_images = _NamedTracker.log_images


class CometMLTracker(_NamedTracker):
    """Comet."""

    name = "comet_ml"
    stands_for = loggers.CometTracker
    writer = _NamedTracker.tracker


class SwanLabTracker(_RunTracker):
    """SwanLab."""

    name = "swanlab"
    stands_for = loggers.SwanLabTracker


class ClearMLTracker(_NamedTracker):
    """ClearML."""

    name = "clearml"
    stands_for = loggers.ClearMLTracker
    task = _NamedTracker.tracker
    user_provided_run_name: str | None = None

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "accelerate", **kwargs)
        self.user_provided_run_name = run_name


class DVCLiveTracker(_NamedTracker):
    """DVCLive."""

    name = "dvclive"
    stands_for = loggers.DVCLiveTracker
    live = _NamedTracker.tracker

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        given = {} if live is None else {"live": live}
        super().__init__(run_name or "accelerate", **given, **kwargs)


class MLflowTracker(_NamedTracker):
    """MLflow."""

    name = "mlflow"
    stands_for = loggers.MLflowTracker
    nested_run = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, str] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        options = mlflow_options(
            {
                **{"experiment_name": experiment_name, "run_id": run_id, "tags": tags},
                **{"run_name": run_name, "description": description},
                **{"logging_dir": logging_dir, "nested_run": nested_run},
            }
        )
        super().__init__(options.get("experiment_name") or "accelerate")
        self.init_kwargs = options
        self.run_name, self.nested_run = run_name, nested_run
        self.logging_dir_param = logging_dir

    @property
    def experiment_name(self) -> str:
        """The name of the experiment."""
        return str(self.init_kwargs.get("experiment_name") or self._project)

    @property
    def run_id(self) -> str | None:
        """The id of the run; before :meth:`start` that of the one to continue."""
        run = self.tracker
        return run.info.run_id if run else self.init_kwargs.get("run_id")

    @property
    def tags(self) -> Any:
        """The tags of the run."""
        return self.init_kwargs.get("tags")

    @property
    def description(self) -> Any:
        """The note of the run."""
        return self.init_kwargs.get("description")

    @property
    def tracker(self) -> Any:
        """The run, with its ``info`` and ``data``; None before :meth:`start`."""
        client = super().tracker
        if not client:  # not started, or on a process that does not log
            return client
        assert self._hub is not None
        return client.get_run(self._hub.configured[self.name].state_dict()["run_id"])

    active_run = tracker

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure as a file of the run.

        Args:
            figure: of matplotlib or plotly.
            artifact_file: path below the run's artifacts.
            **save_kwargs: of ``mlflow.log_figure``.
        """
        self._on_client("log_figure", figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record all files of a folder.

        Args:
            local_dir: the folder.
            artifact_path: folder below the run's artifacts.
        """
        self._on_client("log_artifacts", local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file.

        Args:
            local_path: the file.
            artifact_path: folder below the run's artifacts.
        """
        self._on_client("log_artifact", local_path, artifact_path)

    def _on_client(self, method: str, *args: Any, **kwargs: Any) -> None:
        tracker = self._open_hub().get(self.name)
        getattr(tracker.raw, method)(tracker.state_dict().get("run_id"), *args, **kwargs)


def mlflow_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of :class:`loggers.MLflowTracker` for those of Accelerate's."""
    options = dict(given)
    for name in ("experiment_name", "run_id", "tags", "nested_run"):
        if (value := os.environ.get(f"MLFLOW_{name.upper()}")) is not None:
            options[name] = value
    folder, nested = options.pop("logging_dir", None), options.pop("nested_run", False)
    if folder is not None:
        options.setdefault("artifact_location", os.fspath(folder))
    if isinstance(tags := options.get("tags"), str):
        options["tags"] = json.loads(tags)
    if nested:
        active = importlib.import_module("mlflow").active_run()
        if active is not None:
            parent = {"mlflow.parentRunId": active.info.run_id}
            options["tags"] = {**(options.get("tags") or {}), **parent}
    return options


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


def named_tracker(
    hub: loggers.TrackerHub | None, name: str, options: Mapping[str, Any], now: Callable[[], int]
) -> Any:
    """Return a tracker of an Accelerator as Accelerate's classes have it, or the user's own.

    Args:
        hub: the trackers; without any, the one that is returned does nothing.
        name: of the tracker.
        options: what it was made with.
        now: returns the step of values without one.
    """
    if hub is None:
        return loggers.NullTracker(name)
    used = hub.get(name)
    if isinstance(used, AdaptedTracker):
        return used.wrapped
    if isinstance(hub.configured[name], AdaptedTracker):
        return used
    return _NamedTracker.of(hub, name, options, now)


def get_available_trackers() -> list[LoggerType]:
    """Return those of Accelerate's trackers whose tool is installed."""
    installed = set(loggers.installed_trackers())
    names = {"comet_ml" if name == "comet" else name for name in installed} & _BUILT_IN
    return [LoggerType(name) for name in sorted(names)]


def check_folder(choices: Sequence[Any]) -> None:
    """Raise ValueError for the first tracker that writes files, of a run without a folder."""
    for choice in choices:
        kind = LOGGER_TYPE_TO_CLASS.get(choice) if isinstance(choice, str) else choice
        if isinstance(kind, type) and getattr(kind, _FOLDER, False):
            name = getattr(kind, "name", choice)
            raise ValueError(
                f"Logging with `{name}` requires a `logging_dir` to be passed in: give the "
                'Accelerator project_dir="runs", say, or a project_config with a logging_dir.'
            )


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
    if logging_dir is None:
        check_folder(choices)
    return [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
