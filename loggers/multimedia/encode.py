"""Pictures, films, sounds and distributions as bytes and numbers that any tool can show."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["figure_png", "film", "gif", "histogram", "markdown", "npy", "png", "size_of_png", "wav"]

_PNG_KINDS = {1: 0, 3: 2, 4: 6}  # grey, RGB, RGBA
_PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def png(picture: np.ndarray) -> bytes:
    """Encode uint8 of shape (H, W, C), C one of 1, 3, 4; needs no package.

    >>> import numpy as np
    >>> size_of_png(png(np.zeros((2, 3, 1), np.uint8)))
    (3, 2)
    """
    import numpy as np

    height, width, channels = picture.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row: filter 0, pixels
    rows[:, 1:] = picture.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_KINDS[channels], 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return _PNG_HEAD + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    """One part of a PNG file: length, kind, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def size_of_png(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels."""
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def figure_png(figure: Any) -> bytes:
    """Draw a matplotlib figure, which stays as it is."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def gif(frames: np.ndarray, fps: float) -> bytes:
    """Encode uint8 of shape (T, H, W, C) as an animation that goes on for ever.

    Raises:
        ImportError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"a video is written as a GIF with Pillow ({error}): pip install pillow"
        ) from error
    first, *others = (Image.fromarray(f[..., 0] if f.shape[-1] == 1 else f) for f in frames)
    file = io.BytesIO()
    pause = round(1000 / fps)  # milliseconds
    first.save(file, "GIF", save_all=True, append_images=others, duration=pause, loop=0)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    """Encode any array of numbers in NumPy's own format."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def film(frames: np.ndarray, fps: float) -> tuple[str, bytes]:
    """Return the ending of a file and its bytes: a GIF, or the frames where Pillow is missing."""
    try:
        return ".gif", gif(frames, fps)
    except ImportError:
        return ".npy", npy(frames)


def wav(samples: np.ndarray, sample_rate: int) -> bytes:
    """Encode floats in [-1, 1] of shape (samples,) or (samples, channels) in 16 bits.

    >>> import numpy as np
    >>> len(wav(np.zeros(10), 8000))
    64
    """
    import numpy as np

    columns = samples[:, None] if samples.ndim == 1 else samples
    whole = np.nan_to_num(np.clip(columns, -1.0, 1.0)) * 32767.0
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(columns.shape[1])
        out.setsampwidth(2)
        out.setframerate(sample_rate)
        out.writeframes(whole.round().astype("<i2").tobytes())
    return file.getvalue()


def histogram(values: np.ndarray, bins: int = 64) -> dict[str, Any]:
    """Count values in bins of equal width, and describe them; as JSON types.

    NaN and the infinities are only counted. Without a finite value there are no bins.

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
    described = {kind: float(getattr(finite, kind)()) for kind in ("min", "max", "mean", "std")}
    return {**result, **described, "counts": counts.tolist(), "edges": edges.tolist()}


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
