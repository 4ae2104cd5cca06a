"""Encode images, videos, audio, histograms and tables in formats that any tool can show."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "figure_image",
    "figure_png",
    "gif",
    "histogram",
    "markdown",
    "named_images",
    "pil_image",
    "png",
    "size_of_png",
    "video_file",
    "wav",
]

_PNG_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # grayscale, RGB, RGBA
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(image: np.ndarray) -> bytes:
    """Encode uint8 of shape (H, W, C), C one of 1, 3, 4, as PNG; needs no package.

    >>> import numpy as np
    >>> size_of_png(png(np.zeros((2, 3, 1), np.uint8)))
    (3, 2)
    """
    import numpy as np

    height, width, channels = image.shape
    # Each row is a filter type, of which 0 is none, and the pixels.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOR_TYPES[channels], 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return _PNG_SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: length, type, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def size_of_png(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a PNG in pixels."""
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def figure_png(figure: Any) -> bytes:
    """Draw a matplotlib figure as PNG, without changing it."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def pil_image(array: np.ndarray) -> Any:
    """Return uint8 pixels of shape (H, W, C), C one of 1, 3, 4, as a PIL image.

    Raises:
        ImportError: Pillow is not installed.
    """
    return _pillow().fromarray(array[:, :, 0] if array.shape[-1] == 1 else array)


def figure_image(figure: Any) -> Any:
    """Return a matplotlib figure as a PIL image, without changing the figure.

    Raises:
        ImportError: Pillow is not installed.
    """
    return _pillow().open(io.BytesIO(figure_png(figure))).convert("RGB")


def named_images(
    images: Mapping[str, np.ndarray], captions: Mapping[str, Sequence[str]] | None
) -> Iterator[tuple[str, Any, str | None]]:
    """Yield name, PIL image and caption of each image; several of one name get ``/0``, ``/1``..."""
    for name, array in images.items():
        texts = (captions or {}).get(name, ())
        for index, pixels in enumerate(array):
            caption = texts[index] if index < len(texts) else None
            yield (name if len(array) == 1 else f"{name}/{index}"), pil_image(pixels), caption


def _pillow() -> Any:
    """Import PIL.Image; the error has the command that installs it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"images and videos are encoded with Pillow ({error}): pip install pillow"
        ) from error
    return Image


def gif(frames: np.ndarray, fps: float) -> bytes:
    """Encode uint8 of shape (T, H, W, C) as an animated GIF that loops forever.

    Raises:
        ImportError: Pillow is not installed.
    """
    first, *others = (pil_image(frame) for frame in frames)
    file = io.BytesIO()
    duration = round(1000 / fps)  # of a frame, in milliseconds
    first.save(file, "GIF", save_all=True, append_images=others, duration=duration, loop=0)
    return file.getvalue()


def video_file(frames: np.ndarray, fps: float) -> tuple[str, bytes]:
    """Return a file suffix and its bytes: a GIF, or without Pillow the frames as ``.npy``."""
    import numpy as np

    try:
        return ".gif", gif(frames, fps)
    except ImportError:
        file = io.BytesIO()
        np.save(file, frames, allow_pickle=False)
        return ".npy", file.getvalue()


def wav(samples: np.ndarray, sample_rate: int) -> bytes:
    """Encode floats in [-1, 1] of shape (samples,) or (samples, channels) as 16-bit WAV.

    >>> import numpy as np
    >>> len(wav(np.zeros(10), 8000))
    64
    """
    import numpy as np

    columns = samples[:, None] if samples.ndim == 1 else samples
    scaled = np.nan_to_num(np.clip(columns, -1.0, 1.0)) * 32767.0
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(columns.shape[1])
        out.setsampwidth(2)
        out.setframerate(sample_rate)
        out.writeframes(scaled.round().astype("<i2").tobytes())
    return file.getvalue()


def histogram(values: np.ndarray, bins: int = 64) -> dict[str, Any]:
    """Return a histogram with bins of equal width and summary statistics, as JSON types.

    NaN and infinities are only counted. Without a finite value there are no bins.

    Returns:
        ``count`` and ``non_finite``; ``min``, ``max``, ``mean``, ``std``; ``counts`` (``bins``
        of them) and ``edges`` (one more).

    >>> import numpy as np
    >>> one = histogram(np.array([0.0, 1.0, 1.0, np.nan]), bins=2)
    >>> one["counts"], one["edges"], one["non_finite"]
    ([1, 2], [0.0, 0.5, 1.0], 1)
    """
    import numpy as np

    wide = np.asarray(values, np.float64).ravel()
    finite = wide[np.isfinite(wide)]
    result: dict[str, Any] = {"count": wide.size, "non_finite": wide.size - finite.size}
    if not finite.size:
        return {**result, "counts": [], "edges": []}
    counts, edges = np.histogram(finite, bins)
    summary = {kind: float(getattr(finite, kind)()) for kind in ("min", "max", "mean", "std")}
    return {**result, **summary, "counts": counts.tolist(), "edges": edges.tolist()}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown; each cell on one line.

    >>> print(markdown(["a", "b|c"], [[1, None]]))
    | a | b&#124;c |
    |---|---|
    | 1 | None |
    """
    lines = [_row(columns), "|---" * len(columns) + "|", *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[Any]) -> str:
    plain = (str(c).replace("|", "&#124;").replace("\r", "").replace("\n", "<br>") for c in cells)
    return "| " + " | ".join(plain) + " |"
