"""The run that a command is for: which of a folder lives, and whether it still does."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.addons.journal.state import holder_of
from accel_callbacks.addons.steering.mailbox import CONTROL, require_private
from accel_callbacks.checkpoint.project import path_in
from checkpoint_io.local_files import base_name, local_path

__all__ = ["LivingRun", "living_run"]

_LOOK_EVERY = 1.0  # seconds, for a run on this machine


@dataclass
class LivingRun:
    """A run that takes commands.

    Args:
        folder: of its journal.
        number: of the holder of its lease.
        patience: seconds between two looks whether it lives.
    """

    folder: str
    number: int
    patience: float = field(default=_LOOK_EVERY)

    @property
    def mailbox(self) -> str:
        """The folder of its mailbox."""
        return path_in(self.folder, CONTROL)

    def problem(self) -> str | None:
        """Return why the run will not answer any more, None while it may."""
        holder = holder_of(self.folder)
        if holder is None:
            return _dead(self.folder)
        if holder.number != self.number:
            return "the run was started again before it could do that: send the command again"
        return None


def living_run(folder: str, run_id: str | None = None) -> LivingRun:
    """Return the run of a folder that lives and takes commands.

    Args:
        folder: a project folder, its folder ``journal``, or that of one run in it.
        run_id: of the run.

    Raises:
        JournalError: there is none, or more than one; the text says which.
        OSError: the run is another user's.
    """
    local = local_path(folder)
    if local is None:
        raise JournalError(f"{folder} is a URL: a run is steered through a folder on a disk.")
    folders = _with_mailbox(local)
    if run_id is not None:
        folders = [path for path in folders if base_name(path) == run_id]
    if not folders:
        named = "" if run_id is None else f" {run_id}"
        raise JournalError(
            f"no run{named} of {folder} can be steered: give its Accelerator a Control() callback "
            "and a project_dir, and start it."
        )
    runs = []
    for path in folders:
        require_private(path_in(path, CONTROL))
        began = time.monotonic()
        holder = holder_of(path)
        if holder is not None:
            # Of a run on another machine, a look waits for a renewal of its lease.
            took = time.monotonic() - began
            runs.append(LivingRun(path, holder.number, max(_LOOK_EVERY, 6 * took)))
    if not runs:
        newest = max(folders, key=lambda path: os.stat(path_in(path, CONTROL)).st_mtime)
        raise JournalError(_dead(newest))
    if len(runs) > 1:
        ids = ", ".join(sorted(base_name(run.folder) for run in runs))
        raise JournalError(f"{folder} has more than one run that lives: give --run_id, of {ids}.")
    return runs[0]


def _with_mailbox(folder: str) -> list[str]:
    """Return the folders of runs that have or had a mailbox."""
    if os.path.isdir(path_in(folder, CONTROL)):
        return [folder]
    for root in (path_in(folder, "journal"), folder):
        if os.path.isdir(root):
            paths = [path_in(root, name) for name in sorted(os.listdir(root))]
            if runs := [path for path in paths if os.path.isdir(path_in(path, CONTROL))]:
                return runs
    return []


def _dead(folder: str) -> str:
    return f"the run {base_name(folder)} is not alive: `accel report` shows how it ended"
