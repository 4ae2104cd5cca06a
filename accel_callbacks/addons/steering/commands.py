"""The file of commands of a run: ``accel ctl`` appends lines, which the run reads.

It is the file ``commands`` beside the run's journal. A line is what stands after the run on the
command line, such as ``set lr=1e-4``.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from accel_callbacks.addons.journal.format import JournalError
from accel_callbacks.addons.journal.state import holder_of
from accel_callbacks.checkpoint.project import path_in
from checkpoint_io.local_files import advised, base_name, local_path, remove

__all__ = ["FILE", "CommandFile", "send_command"]

#: Name of the file, beside the journal of the run.
FILE = "commands"
# A link or a pipe that somebody else has put in the place of the file is not followed, nor waited
# for. Windows has neither flag.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class CommandFile:
    """The side of the run.

    Args:
        folder: of the run's journal.

    Attributes:
        stale: commands for an earlier start of the run, which it did not do.

    Raises:
        OSError: the file cannot be created, or is another user's.

    Example:
        >>> import os, tempfile
        >>> from accel_callbacks.addons.steering.commands import CommandFile
        >>> folder = tempfile.mkdtemp()
        >>> commands = CommandFile(folder)
        >>> with open(os.path.join(folder, "commands"), "a") as file:
        ...     print("set lr=0.1", file=file)
        >>> commands.read(), commands.read()
        (['set lr=0.1'], [])
    """

    def __init__(self, folder: str) -> None:
        self._path = path_in(folder, FILE)
        self._read_to = 0
        self.stale: list[str] = []
        with advised(folder):
            os.makedirs(folder, exist_ok=True)
            if os.path.lexists(self._path):
                self.stale = self.read()
                self.remove()
            os.close(_open_own(self._path, os.O_WRONLY | os.O_CREAT))
        self._read_to = 0

    def read(self) -> list[str]:
        """Return the lines that are new.

        Raises:
            OSError: the file is gone, or others than this user may write to it by now.
        """
        with os.fdopen(_open_own(self._path, os.O_RDONLY), "rb") as file:
            file.seek(self._read_to)
            lines, newline, _ = file.read().rpartition(b"\n")  # the last line may not be whole
        self._read_to += len(lines) + len(newline)
        return lines.decode(errors="replace").splitlines()

    def remove(self) -> None:
        """Remove the file: the run takes no more commands."""
        with suppress(FileNotFoundError):
            remove(self._path)


def send_command(folder: str, command: str, run_id: str | None = None) -> str:
    """Append a command to the file of the run of a folder that is alive; return the run's id.

    Args:
        folder: a project folder, its folder ``journal``, or that of one run in it.
        command: the line.
        run_id: of the run.

    Raises:
        JournalError: no run is alive and takes commands, or more than one; the text says which.
        OSError: the run is another user's.
    """
    local = local_path(folder)
    if local is None:
        raise JournalError(f"{folder} is a URL: a run is steered through a folder on a disk.")
    folders = [path for path in _with_commands(local) if run_id in (None, base_name(path))]
    alive = [path for path in folders if holder_of(path) is not None]
    if not alive:
        named = "no run" if run_id is None else f"no run {run_id}"
        raise JournalError(
            f"{named} of {folder} is alive and can be steered: `accel report` shows how it ended. "
            "It needs a Control() callback and a project_dir."
        )
    if len(alive) > 1:
        ids = ", ".join(sorted(map(base_name, alive)))
        raise JournalError(f"{folder} has more than one run that is alive: give --run_id, of {ids}")
    with os.fdopen(_open_own(path_in(alive[0], FILE), os.O_WRONLY | os.O_APPEND), "ab") as file:
        file.write(f"{command}\n".encode())
    return base_name(alive[0])


def _with_commands(folder: str) -> list[str]:
    """Return the folders of runs that have a file of commands."""
    if os.path.lexists(path_in(folder, FILE)):
        return [folder]
    journal = path_in(folder, "journal")
    root = journal if os.path.isdir(journal) else folder
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    return [path_in(root, name) for name in names if os.path.lexists(path_in(root, name, FILE))]


def _open_own(path: str, flags: int) -> int:
    """Open a file of commands; return its descriptor.

    On Windows, where a file has the rights of its folder, every file is taken.

    Raises:
        PermissionError: the file is not this user's, or others may write to it.
    """
    descriptor = os.open(path, flags | _FLAGS, 0o600)
    status = os.fstat(descriptor)
    if sys.platform != "win32" and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
        os.close(descriptor)
        raise PermissionError(
            f"{path} must belong to the user who runs this, and nobody else may write to it "
            "(`chmod 600`): only the user of a run may steer it"
        )
    return descriptor
