"""Folders of states that get their names when they are whole.

Scripts for Accelerate choose what they resume from by a listing, which does not look for a
manifest: what a killed save leaves must not be in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable

from accel_callbacks import collectives
from accel_callbacks.distributed.failures import shared_failure
from checkpoint_io import CheckpointConflictError
from checkpoint_io.local_files import local_path, replace, split_path, sync_folder
from checkpoint_io.storage.local import folder_lock

__all__ = ["PREFIX", "remove_leftovers", "save_beside"]

#: Of the folder in which a state is written; no script looks for it.
PREFIX = "_accel_saving-"


def save_beside(output_dir: str | os.PathLike[str], save: Callable[[str], str]) -> str:
    """Collective: save into a folder beside a new one, and rename it; else save in place.

    A place that there is already keeps its state until the new one is committed, by its manifest.

    Args:
        output_dir: the place of a state; a URL is saved to as it is.
        save: saves to a path, and returns it.

    Returns:
        The path of the state.

    Raises:
        RemoteError: another rank failed.
    """
    place = local_path(os.fspath(output_dir))
    with shared_failure("save_state"):
        is_new = place is not None and not os.path.exists(place)
    if place is None or not collectives.broadcast_object(is_new):
        return save(os.fspath(output_dir))
    folder, name = split_path(place)
    staged = f"{folder}{PREFIX}{name}"
    with shared_failure("save_state"):
        if collectives.rank() == 0:
            _remove_leftover(staged)
    save(staged)
    with shared_failure("save_state"):
        if collectives.rank() == 0:
            replace(staged, place)
            sync_folder(folder)
    return os.fspath(output_dir)


def remove_leftovers(folders: Iterable[str]) -> None:
    """Remove what killed saves have left in local folders, unless somebody is saving there."""
    for folder in {os.path.abspath(folder) for folder in folders}:
        if not os.path.isdir(folder):
            continue
        for name in os.listdir(folder):
            if name.startswith(PREFIX):
                try:
                    _remove_leftover(os.path.join(folder, name))
                except (CheckpointConflictError, OSError):
                    continue  # another process's


def _remove_leftover(path: str) -> None:
    if os.path.isdir(path):
        with folder_lock(path):
            shutil.rmtree(path)
