"""A folder of pictures, sounds and films beside the file whose records name them."""

from __future__ import annotations

import hashlib
import os
import posixpath
from urllib.parse import quote

from loggers.trackers.line_file import filesystem, is_remote, local_path, write_object

__all__ = ["MediaFolder"]

_LONGEST = 120  # file systems allow 255 bytes; step, number and ending need some of them


class MediaFolder:
    """Writes ``<logging_dir>/<folder>/<run>/<kind>/<step>-<name>-<number><ending>``.

    Args:
        logging_dir: a path or an fsspec URL.
        folder: name of the folder below it.
        run_id: its runs keep their files apart.
    """

    def __init__(self, logging_dir: str, folder: str, run_id: str) -> None:
        self._root = logging_dir if is_remote(logging_dir) else local_path(logging_dir)
        self._below = f"{folder}/{_safe(run_id)}"

    def save(self, kind: str, name: str, step: int, number: int, ending: str, data: bytes) -> str:
        """Write one file, over what a step that is done again has left; return its path.

        The path is relative to ``logging_dir``, with slashes on every system.
        """
        path = f"{self._below}/{kind}/{step:08d}-{_safe(name)}-{number}{ending}"
        if is_remote(self._root):
            fs, key = filesystem(f"{self._root.rstrip('/')}/{path}")
            write_object(fs, key, data)
            return path
        target = os.path.join(self._root, *path.split(posixpath.sep))
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(data)
        return path


def _safe(name: str) -> str:
    """Make any name a part of a path: no slash, no dots that lead out, not too long."""
    plain = quote(name, safe=" ").replace("%", "=")  # a percent sign means something in URLs
    if len(plain) > _LONGEST:
        plain = plain[:_LONGEST] + "-" + hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return f"={plain}" if plain.strip(". ") == "" else plain
