"""Checkpoints that ``save_state`` names itself: their numbers, and how many are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from accel_callbacks import collectives
from accel_callbacks.checkpoint.async_save import Then
from accel_callbacks.checkpoint.training_state import open_folder
from accel_callbacks.distributed.failures import shared_failure

if TYPE_CHECKING:
    from accel_callbacks.accelerator import Accelerator
    from checkpoint_io import CheckpointFolder, CheckpointInfo

__all__ = ["NamedFolder", "SavePlace", "number_of", "project_save", "refuse_each_node"]

_NUMBERED = re.compile(r"checkpoint_([0-9]{1,18})", re.ASCII)
_MARK = {"saved_by": "save_state"}


class NamedFolder:
    """A folder of checkpoints whose next one has a given name instead of that of its step.

    Example:
        >>> from accel_callbacks.checkpoint.training_state import open_folder
        >>> from accel_callbacks.checkpoint.project import NamedFolder
        >>> NamedFolder(open_folder("memory://doc-named"), "checkpoint_0").path(200)
        'memory://doc-named/checkpoint_0'
    """

    def __init__(self, folder: CheckpointFolder, name: str) -> None:
        self._folder = folder
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def path(self, step: int) -> str:
        """The URL of the checkpoint, whatever the step."""
        url = self._folder.url  # "memory://" is a root, whose slashes belong to it
        return f"{url}{self._name}" if url.endswith("/") else f"{url}/{self._name}"

    def prepare_save(self, step: int, state: Mapping[str, Any], **options: Any) -> Any:
        """``CheckpointFolder.prepare_save`` under the name."""
        return self._folder.prepare_save(step, state, name=self._name, **options)


@dataclass(frozen=True)
class SavePlace:
    """Where a checkpoint goes, and what follows.

    Attributes:
        target: its path, or the folder in which it is the newest.
        metadata: what its manifest says of its name.
        then: what follows once it is durable.
        started: called once it has its place among the others.

    Example:
        >>> from accel_callbacks.checkpoint.project import SavePlace
        >>> SavePlace("runs/before").metadata
        {}
    """

    target: str | CheckpointFolder
    metadata: dict[str, Any] = field(default_factory=dict)
    then: Then | None = None
    started: Callable[[], None] = lambda: None


def project_save(accel: Accelerator, storage_options: Mapping[str, Any] | None = None) -> SavePlace:
    """Collective: the place of the next checkpoint that ``save_state`` names itself.

    Args:
        accel: whose project.
        storage_options: for the filesystem behind the project's URL.

    Raises:
        RemoteError: the main process could not list the folder.

    Example:
        >>> from accel_callbacks import Accelerator, ProjectConfiguration
        >>> from accel_callbacks.checkpoint.project import project_save
        >>> config = ProjectConfiguration("memory://doc-saves", automatic_checkpoint_naming=True)
        >>> project_save(Accelerator(cpu=True, project_config=config)).target.path(0)
        'memory://doc-saves/checkpoints/checkpoint_0'
    """
    config = accel.project_configuration
    folder = open_folder(accel._in_project("checkpoints"), storage_options)
    then = _then(folder, accel)
    if not config.automatic_checkpoint_naming:
        return SavePlace(folder, dict(_MARK), then)
    with shared_failure(f"looking into {folder.url}"):
        behind = 1 + _highest(folder) if accel.is_main_process else 0
    number = max(config.iteration, collectives.broadcast_object(behind))

    def started() -> None:
        config.iteration = number + 1

    target = cast("CheckpointFolder", NamedFolder(folder, f"checkpoint_{number}"))
    return SavePlace(target, {**_MARK, "iteration": number}, then, started)


def refuse_each_node(accel: Accelerator) -> None:
    """Refuse to write one checkpoint to disks of which each node sees only its own.

    Raises:
        ValueError: ``save_on_each_node``, and there are several nodes.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.checkpoint.project import refuse_each_node
        >>> refuse_each_node(Accelerator(cpu=True))
    """
    here = accel.topology
    if accel.project_configuration.save_on_each_node and here.local_world_size < here.world_size:
        raise ValueError(
            "save_on_each_node=True: a training state is one checkpoint that all processes write "
            "together, and needs a place that all nodes see, such as a shared disk or s3://. "
            "Leave the option out; save() and save_model() are for disks of each node."
        )


def number_of(path: str) -> int | None:
    """The number of a checkpoint that was named automatically.

    Example:
        >>> from accel_callbacks.checkpoint.project import number_of
        >>> number_of("runs/checkpoints/checkpoint_12"), number_of("runs/best")
        (12, None)
    """
    found = _NUMBERED.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
    return int(found[1]) if found else None


def _highest(folder: CheckpointFolder) -> int:
    """The highest number in a folder, whoever wrote it and whether or not it is whole; or -1."""
    numbers = (number_of(entry.name) for entry in folder.survey())
    return max((number for number in numbers if number is not None), default=-1)


def _then(folder: CheckpointFolder, accel: Accelerator) -> Then:
    """Once a checkpoint is durable: remove all but the newest that have been named for this run."""
    limit, run = accel.project_configuration.total_limit, accel.loop.run
    if limit is None or not accel.is_main_process:
        return Then()
    run_id = run.run_id
    protect = [] if run.resumed_from is None else [run.resumed_from]

    def choose(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
        named = [i for i in infos if i.manifest.metadata.get("saved_by") == _MARK["saved_by"]]
        gone = {info.path for info in named[:-limit]}
        return [info for info in infos if info.path not in gone]

    def tidy() -> None:
        folder.prune(choose, run_id=run_id, protect=protect)

    return Then(tidy=tidy)
