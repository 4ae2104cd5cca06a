"""Media files: in a folder next to the log, or temporary for a tool."""

from __future__ import annotations

import os
import posixpath
import tempfile
from contextlib import suppress

from checkpoint_io.local_files import advised, local_path, remove
from loggers.file_names import file_name
from loggers.trackers.line_file import filesystem, write_object

__all__ = ["MediaFolder", "Scratch"]


class MediaFolder:
    """Writes ``<logging_dir>/<folder>/<run>/<kind>/<step>-<name>-<number><suffix>``.

    Args:
        logging_dir: a path or an fsspec URL.
        folder: name of the folder below ``logging_dir``.
        run_id: id of the run; each run has a subfolder.
    """

    def __init__(self, logging_dir: str, folder: str, run_id: str) -> None:
        self._url = logging_dir.rstrip("/")
        self._root = local_path(logging_dir)
        self._below = f"{folder}/{file_name(run_id)}"

    def save(self, kind: str, name: str, step: int, number: int, suffix: str, data: bytes) -> str:
        """Write one file and return its path; after a resume, repeated steps overwrite their files.

        The path is relative to ``logging_dir``, with slashes on every system.
        """
        path = f"{self._below}/{kind}/{step:08d}-{file_name(name)}-{number}{suffix}"
        if self._root is None:
            fs, key = filesystem(f"{self._url}/{path}")
            write_object(fs, key, data)
            return path
        target = os.path.join(self._root, *path.split(posixpath.sep))
        with advised(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            _write(target, data)
        return path


class Scratch:
    """A temporary folder for files that a tool reads later; removed by `close`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def file(self, data: bytes, suffix: str) -> str:
        """Write a new file and return its path."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        self._count += 1
        path = os.path.join(self._folder.name, f"{self._count}{suffix}")
        with open(path, "wb") as file:
            file.write(data)
        return path

    def close(self) -> None:
        """Remove the folder, if there is one."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def _write(path: str, data: bytes) -> None:
    """Write a file; remove it if that fails, as on a full disk."""
    with open(path, "wb") as file:
        try:
            file.write(data)
            file.flush()
            return
        except BaseException as error:
            failure = error
    with suppress(OSError):  # after it was closed: Windows removes no file that is open
        remove(path)
    raise failure
