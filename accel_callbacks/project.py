"""Where a run keeps its files, and how it names and keeps its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["ProjectConfiguration", "chosen_project"]


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files, and how ``save_state()`` without a path names and keeps them.

    An Accelerator takes a copy, so one configuration can serve several.

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

    Raises:
        ValueError: ``total_limit`` below 1 or ``iteration`` below 0.

    Example:
        >>> from accel_callbacks import ProjectConfiguration
        >>> ProjectConfiguration("runs/digits").log_folder
        'runs/digits'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and _whole("total_limit", self.total_limit) < 1:
            raise ValueError(
                f"total_limit={self.total_limit} must be at least 1, or None to keep all."
            )
        if _whole("iteration", self.iteration) < 0:
            raise ValueError(f"iteration={self.iteration} must be at least 0.")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Put the project, and the trackers' files where they have no folder yet, into a folder.

        Args:
            project_dir: the folder or fsspec URL.

        Example:
            >>> from accel_callbacks import ProjectConfiguration
            >>> config = ProjectConfiguration(total_limit=3)
            >>> config.set_directories("runs/digits")
            >>> config.root, config.log_folder
            ('runs/digits', 'runs/digits')
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def count_from(self, number: int | None) -> None:
        """Go on behind the checkpoint of this number, if it has one."""
        if number is not None:
            self.iteration = max(self.iteration, number + 1)

    @property
    def root(self) -> str:
        """The project folder as a string."""
        return os.fspath(self.project_dir) if self.project_dir is not None else "."

    @property
    def log_folder(self) -> str:
        """The folder that trackers write to."""
        return os.fspath(self.logging_dir) if self.logging_dir is not None else self.root


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be a whole number.")
    return value


def chosen_project(
    folder: str | os.PathLike[str] | None, config: ProjectConfiguration | None
) -> ProjectConfiguration:
    """A configuration of the Accelerator's own, from what it was given.

    Raises:
        TypeError: the configuration is none.
        ValueError: both name a folder, and not the same.

    Example:
        >>> from accel_callbacks.project import ProjectConfiguration, chosen_project
        >>> chosen_project("runs/digits", None).root
        'runs/digits'
        >>> chosen_project("runs/digits", ProjectConfiguration(total_limit=2)).root
        'runs/digits'
    """
    if config is None:
        return ProjectConfiguration(folder)
    if not isinstance(config, ProjectConfiguration):
        raise TypeError(f"project_config={config!r} must be a ProjectConfiguration.")
    own = replace(config)
    if folder is None:
        return own
    if own.project_dir is None:
        own.set_directories(folder)
    elif os.fspath(folder) != own.root:
        raise ValueError(
            f"project_dir={os.fspath(folder)!r} and project_config={own.root!r} name two folders: "
            "give one of them, not both."
        )
    return own
