"""The folder of a Trainer: which of its checkpoints are whole."""

from __future__ import annotations

import json
import os
import zipfile

from accel_callbacks.logging import notice
from checkpoint_io import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from checkpoint_io.folder.sealed import SEAL, check_seal
from checkpoint_io.local_files import base_name
from checkpoint_io.storage.local_read import open_regular
from checkpoint_io.weights.safetensors import header_of

__all__ = ["PREFIX", "SAVING", "STATE", "candidates", "newest_whole", "problem_of", "step_of"]

#: The folder in which checkpoints are written; what begins so is not uploaded to the Hub.
SAVING = "_accel_saving"
PREFIX = "checkpoint-"
STATE = "trainer_state.json"


def newest_whole(folder: str | os.PathLike[str]) -> str | None:
    """Return the newest checkpoint of a folder whose files are all there, None without one.

    Of those that this library has not sealed, the formats of the files tell whether they end.

    Args:
        folder: the ``output_dir`` of a Trainer.
    """
    for _, path in candidates(os.fspath(folder)):
        problem = problem_of(path)
        if problem is None:
            return path
        notice(f"{path} is passed over: {problem}")
    return None


def candidates(folder: str) -> list[tuple[int, str]]:
    """Return steps and paths of checkpoints, the newest first."""
    found = []
    # A kill may have come between the end of a save and the folder's name.
    for place in (folder, os.path.join(folder, SAVING)):
        if place != folder and not os.path.isdir(place):
            continue
        for name in os.listdir(place):
            step = name.removeprefix(PREFIX)
            path = os.path.join(place, name)
            is_named = place == folder or os.path.exists(os.path.join(path, SEAL))
            if name.startswith(PREFIX) and step.isdecimal() and os.path.isdir(path) and is_named:
                found.append((int(step), path))
    return sorted(found, key=lambda item: item[0], reverse=True)


def step_of(path: str | None) -> int | None:
    """Return the step of a checkpoint."""
    return None if path is None else int(base_name(path).removeprefix(PREFIX))


def problem_of(path: str, *, full: bool = False) -> str | None:
    """Return what is wrong with a checkpoint, None for a whole one."""
    try:
        check_seal(path, full=full)
    except CheckpointNotFoundError:
        return _problem_of_foreign(path)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}: ").partition(";")[0]
    return None


def _problem_of_foreign(path: str) -> str | None:
    """Return what is wrong with a checkpoint that another program has written."""
    try:
        with open(os.path.join(path, STATE), encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError):
        return f"its {STATE} is missing or cut off, as where a process is killed while it saves"
    for name in sorted(os.listdir(path)):
        file_path = os.path.join(path, name)
        if name.endswith((".pt", ".pth")) and not zipfile.is_zipfile(file_path):
            return f"its {name} is cut off"
        if name.endswith(".safetensors") and not _ends(file_path):
            return f"its {name} is cut off"
    return None


def _ends(path: str) -> bool:
    """Return whether a safetensors file has all bytes that its header speaks of."""
    try:
        with open_regular(os.path.realpath(path)) as reader:
            header_of(reader, path)
    except CorruptCheckpointError:
        return False
    return True
