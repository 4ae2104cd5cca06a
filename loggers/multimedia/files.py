"""Media as files beside the log, or for a tool."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from loggers.multimedia.encode import figure_png
from loggers.trackers.line_file import filesystem, is_remote, local_path, write_object

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MediaFolder", "Scratch", "figure_picture", "named_pictures", "picture"]

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


def picture(array: np.ndarray) -> Any:
    """Return uint8 pixels of shape (H, W, C), C one of 1, 3, 4, as a PIL image.

    Raises:
        ImportError: Pillow is not installed.
    """
    return _pillow().fromarray(array[:, :, 0] if array.shape[-1] == 1 else array)


def figure_picture(figure: Any) -> Any:
    """Return a matplotlib figure as a PIL image; the figure stays as it is.

    Raises:
        ImportError: Pillow is not installed.
    """
    return _pillow().open(io.BytesIO(figure_png(figure))).convert("RGB")


def named_pictures(
    images: Mapping[str, np.ndarray], captions: Mapping[str, Sequence[str]] | None
) -> Iterator[tuple[str, Any, str | None]]:
    """Give each of (N, H, W, C) as name, PIL image and caption; several get ``/0``, ``/1``, ..."""
    for name, array in images.items():
        texts = (captions or {}).get(name, ())
        for index, one in enumerate(array):
            caption = texts[index] if index < len(texts) else None
            yield (name if len(array) == 1 else f"{name}/{index}"), picture(one), caption


class Scratch:
    """A folder for files that a tool reads some time later; gone after `close`."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._count = 0

    def file(self, data: bytes, suffix: str) -> str:
        """Write a file of its own and return its path."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        self._count += 1
        path = os.path.join(self._folder.name, f"{self._count}{suffix}")
        with open(path, "wb") as file:
            file.write(data)
        return path

    def close(self) -> None:
        """Remove the folder, if one was needed."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()


def _pillow() -> Any:
    """Import PIL, or say how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("pictures need Pillow: pip install pillow") from error
    return Image
