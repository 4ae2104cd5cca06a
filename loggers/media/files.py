"""Pictures and files in the forms that the packages of other tools take."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loggers.media.encode import figure_png

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Scratch", "figure_picture", "named_pictures", "picture"]


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
