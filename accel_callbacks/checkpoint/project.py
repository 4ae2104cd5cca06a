"""ProjectConfiguration: where a run keeps its files, and how it names checkpoints."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from accel_callbacks import collectives
from accel_callbacks.checkpoint.async_save import SaveCallbacks
from accel_callbacks.distributed.failures import shared_failure
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.errors import nearest
from accel_callbacks.loop.run import TrainingRun
from accel_callbacks.options import OnConflict
from checkpoint_io.local_files import absolute, base_name

if TYPE_CHECKING:
    from checkpoint_io import CheckpointFolder, CheckpointInfo

__all__ = [
    "ProjectConfiguration",
    "SavePlace",
    "chosen_project",
    "number_of",
    "path_in",
    "project_save",
    "refuse_each_node",
]

_NUMBERED = re.compile(r"checkpoint_([0-9]{1,18})", re.ASCII)
_MARK = {"saved_by": "save_state"}


@dataclass
class ProjectConfiguration:
    """Options of the project folder, and of checkpoints that ``save_state()`` names itself.

    An Accelerator takes a copy, so that several can share one configuration. Folders are those of
    the moment in which they are given: a later ``os.chdir`` moves nothing.

    Args:
        project_dir: folder (or fsspec URL) of the run; ``None`` for the current folder.
        logging_dir: folder of the trackers' files; the project folder where ``None``.
        automatic_checkpoint_naming: number the checkpoints, ``checkpoints/checkpoint_0`` and so on,
            instead of naming them by step.
        total_limit: how many checkpoints that ``save_state()`` has named to keep; all if ``None``.
            Older ones of the same run are removed once a new one is durable, but never the one
            that the run was resumed from.
        iteration: the number of the next checkpoint; it goes on behind those that are there.
        save_on_each_node: for nodes that share no disk: ``save`` and ``save_model`` write on one
            process of each node. A training state is one checkpoint, written by all processes, and
            needs a place that all nodes see: ``save_state`` refuses this option on several nodes.
        on_conflict: what to do if another process that lives has a run in a folder to which this
            one writes rows or checkpoints: ``"refuse"`` to start, ``"wait"`` for its end, or
            ``"take_over"``, after which it writes nothing more. ``None`` is what
            ``accel launch --on_conflict`` says, else ``"refuse"``.

    Raises:
        ValueError: ``total_limit`` below 1, ``iteration`` below 0, or an unknown ``on_conflict``.

    Example:
        >>> from accel_callbacks import ProjectConfiguration
        >>> ProjectConfiguration("/runs/digits").log_folder
        '/runs/digits'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    on_conflict: OnConflict | None = None

    def __post_init__(self) -> None:
        if self.total_limit is not None and _whole("total_limit", self.total_limit) < 1:
            raise ValueError(
                f"total_limit={self.total_limit} must be at least 1, or None to keep all."
            )
        if _whole("iteration", self.iteration) < 0:
            raise ValueError(f"iteration={self.iteration} must be at least 0.")
        if self.on_conflict not in (None, *(known := get_args(OnConflict))):
            hint = nearest(str(self.on_conflict), known)
            raise ValueError(
                f"on_conflict={self.on_conflict!r} is unknown: use 'refuse', 'wait' or "
                f"'take_over'.{hint}"
            )
        self.set_directories(self.project_dir)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ("project_dir", "logging_dir"):
            # Where it is now: the script may change its folder.
            vars(self)[f"_{name}"] = absolute("." if value is None else value)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Put the project, and the trackers' files where they have no folder yet, into a folder.

        Args:
            project_dir: the folder or fsspec URL.

        Example:
            >>> from accel_callbacks import ProjectConfiguration
            >>> config = ProjectConfiguration(total_limit=3)
            >>> config.set_directories("/runs/digits")
            >>> config.root, config.log_folder
            ('/runs/digits', '/runs/digits')
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def count_from(self, number: int | None) -> None:
        """Number the next checkpoint after this one, if it has a number."""
        if number is not None:
            self.iteration = max(self.iteration, number + 1)

    @property
    def root(self) -> str:
        """The project folder, from the root of the file system on, or its URL."""
        root: str = vars(self)["_project_dir"]
        return root

    def path(self, *names: object) -> str:
        """Return a path (or URL) inside of the project folder.

        Example:
            >>> from accel_callbacks import ProjectConfiguration
            >>> ProjectConfiguration("/runs/digits").path("checkpoints")
            '/runs/digits/checkpoints'
        """
        return path_in(self.root, *names)

    def contains(self, path: str) -> bool:
        """Return whether a path is inside of the project folder; False if none was given.

        Example:
            >>> from accel_callbacks import ProjectConfiguration
            >>> ProjectConfiguration("runs/digits").contains("runs/digits/best")
            True
        """
        return self.project_dir is not None and _whole_path(path).startswith(
            _whole_path(self.root) + "/"
        )

    @property
    def log_folder(self) -> str:
        """The folder that trackers write to."""
        folder: str = self.root if self.logging_dir is None else vars(self)["_logging_dir"]
        return folder


def path_in(root: str, *names: object) -> str:
    """Return a path (or URL) inside of a folder."""
    # "memory://" is a root, whose slashes belong to it.
    if not root.endswith("://"):
        root = root.rstrip("/") + "/"
    return root + "/".join(map(str, names))


def _whole_path(path: str) -> str:
    """Return an absolute path, or a URL, with slashes and none at its end."""
    whole = absolute(path)
    return (whole if "://" in whole else whole.replace(os.sep, "/")).rstrip("/")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    return value


def chosen_project(
    folder: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """Return the Accelerator's own configuration from its arguments.

    Raises:
        TypeError: ``config`` is no ProjectConfiguration.
        ValueError: the two name different folders.
    """
    if config is None:
        return ProjectConfiguration(folder)
    if not isinstance(config, ProjectConfiguration):
        raise TypeError(f"project_config={config!r} must be a ProjectConfiguration.")
    project = copy.copy(config)
    if folder is None:
        return project
    if project.project_dir is None:
        project.set_directories(folder)
    elif absolute(folder) != project.root:
        raise ValueError(
            f"project_dir={os.fspath(folder)!r} and project_config={project.root!r} name two "
            "folders: give one of them, not both."
        )
    return project


@dataclass(frozen=True)
class SavePlace:
    """The place of a checkpoint, and what follows its save.

    Attributes:
        target: its path, or the folder in which it is the newest.
        name: of the checkpoint in the folder, if not that of its step.
        metadata: JSON values that mark it as named here.
        callbacks: called when the save ends.
        started: called once the save has started.
    """

    target: str | CheckpointFolder
    name: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    callbacks: SaveCallbacks = field(default_factory=SaveCallbacks)
    started: Callable[[], None] = lambda: None


def project_save(
    config: ProjectConfiguration,
    run: TrainingRun,
    folder: CheckpointFolder,
) -> SavePlace:
    """Collective: return the place of the next checkpoint that ``save_state`` names itself.

    Args:
        config: the project.
        run: owns the checkpoints; those of other runs are never removed.
        folder: the project's checkpoints.

    Raises:
        RemoteError: rank 0 could not list the folder.
    """
    callbacks = _retention(folder, config.total_limit, run)
    if not config.automatic_checkpoint_naming:
        return SavePlace(folder, None, dict(_MARK), callbacks)
    with shared_failure(f"looking into {folder.url}"):
        # Of any run, and of checkpoints that are not valid: their names are taken too.
        names = folder.names() if collectives.rank() == 0 else []
        behind = 1 + max((n for n in map(number_of, names) if n is not None), default=-1)
    number = max(config.iteration, collectives.broadcast_object(behind))

    def started() -> None:
        config.iteration = number + 1

    metadata = {**_MARK, "iteration": number}
    return SavePlace(folder, f"checkpoint_{number}", metadata, callbacks, started)


def refuse_each_node(config: ProjectConfiguration, topology: Topology) -> None:
    """Refuse to write one checkpoint to disks of which each node sees only its own.

    Args:
        config: the project.
        topology: tells how many nodes there are.

    Raises:
        ValueError: ``save_on_each_node``, and there are several nodes.
    """
    if config.save_on_each_node and topology.local_world_size < topology.world_size:
        raise ValueError(
            "save_on_each_node=True: a training state is one checkpoint that all processes write "
            "together, and needs a place that all nodes see, such as a shared disk or s3://. "
            "Leave the option out; save() and save_model() are for disks of each node."
        )


def number_of(path: str) -> int | None:
    """Return the number of a checkpoint that was named automatically, None for others."""
    match = _NUMBERED.fullmatch(base_name(path))
    return int(match[1]) if match else None


def _retention(folder: CheckpointFolder, limit: int | None, run: TrainingRun) -> SaveCallbacks:
    """Remove all but the newest checkpoints named for this run, once a new one is durable."""
    if limit is None or collectives.rank() != 0:
        return SaveCallbacks()
    run_id = run.run_id
    protect = [] if run.resumed_from is None else [run.resumed_from]

    def choose(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        named = [i for i in infos if i.manifest.metadata.get("saved_by") == _MARK["saved_by"]]
        gone = {info.path for info in named[:-limit]}
        return [info for info in infos if info.path not in gone]

    def prune() -> None:
        folder.prune(choose, run_id=run_id, protect=protect, missing_ok=True)

    return SaveCallbacks(cleanup=prune)
