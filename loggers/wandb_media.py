"""Media as the objects that W&B shows, made from files that it copies."""

from __future__ import annotations

import html
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loggers.media.encode import figure_png, gif, histogram, png, wav

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MediaObjects", "artifact", "media_objects"]


@contextmanager
def media_objects(wandb: Any) -> Iterator[MediaObjects]:
    """Make objects inside the block, and log them there: their files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="accel-wandb-") as folder:
        yield MediaObjects(wandb, folder)


class MediaObjects:
    """Makes objects of the package ``wandb`` out of arrays.

    Args:
        wandb: the package.
        folder: for the files, until they are logged.
    """

    def __init__(self, wandb: Any, folder: str) -> None:
        self._wandb = wandb
        self._folder = folder
        self._files = 0

    def images(self, pictures: np.ndarray, captions: Sequence[str] | None) -> list[Any]:
        """Pictures of one name: uint8 of shape (N, H, W, C)."""
        said: list[str | None] = list(captions or []) or [None] * len(pictures)
        paths = [self._file(png(picture), ".png") for picture in pictures]
        return [
            self._wandb.Image(path, caption=caption)
            for path, caption in zip(paths, said, strict=True)
        ]

    def figure(self, figure: Any) -> Any:
        """A matplotlib figure, drawn."""
        return self._wandb.Image(self._file(figure_png(figure), ".png"))

    def audio(self, samples: np.ndarray, sample_rate: int) -> Any:
        """A sound: floats of shape (samples,) or (samples, channels)."""
        path = self._file(wav(samples, sample_rate), ".wav")
        return self._wandb.Audio(path, sample_rate=sample_rate)

    def video(self, frames: np.ndarray, fps: int) -> Any:
        """A film: uint8 of shape (T, H, W, C)."""
        return self._wandb.Video(self._file(gif(frames, fps), ".gif"), format="gif")

    def text(self, text: str) -> Any:
        """A text as it is, in a fixed width."""
        return self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """A table; a column may have several types."""
        data = [list(row) for row in rows]
        return self._wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)

    def histogram(self, values: np.ndarray) -> Any:
        """A distribution of the finite values; None where there are none."""
        counted = histogram(values)
        if not counted["counts"]:
            return None
        return self._wandb.Histogram(np_histogram=(counted["counts"], counted["edges"]))

    def _file(self, data: bytes, ending: str) -> str:
        self._files += 1
        path = os.path.join(self._folder, f"{self._files}{ending}")
        with open(path, "wb") as file:
            file.write(data)
        return path


def artifact(wandb: Any, path: str, name: str | None, kind: str) -> Any:
    """Make an artifact of a file, a folder, or a URL, which is only referred to."""
    shown = name or os.path.basename(path.rstrip("/")) or "artifact"
    made = wandb.Artifact(re.sub(r"[^A-Za-z0-9_.-]", "-", shown), type=kind)
    if "://" in path:
        made.add_reference(path, checksum=False)
    elif os.path.isdir(path):
        made.add_dir(path)
    else:
        made.add_file(path)
    return made
