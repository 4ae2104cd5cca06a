"""Convert tensors, arrays and PIL images to numpy arrays of one layout and type, for trackers.

Two steps: `snapshot` copies on the caller's thread, without waiting for a device; the ``as_...``
functions convert on the hub's thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from loggers.values import order_before_reads

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Channels",
    "as_audio",
    "as_images",
    "as_numbers",
    "as_table",
    "check_shape",
    "size_of",
    "snapshot",
]

Channels = Literal["first", "last"]
"""The position of the channels of an image: ``(C, H, W)`` or ``(H, W, C)``."""

_COUNTS = (1, 3, 4)
_OBJECT = 1 << 16  # estimated bytes of an object without a size, e.g. a figure


def check_shape(name: str, value: Any, channels: Channels | None, *, video: bool = False) -> None:
    """Raise TypeError or ValueError for a value that `as_images` cannot convert.

    Called on the caller's thread, so that the traceback shows the user's call.

    >>> import numpy as np
    >>> check_shape("digit", np.zeros((8, 8)), None)
    >>> check_shape("digit", np.zeros((3, 8, 8)), None)
    Traceback (most recent call last):
    ValueError: 'digit' has 8 channels in shape (3, 8, 8): images have 1, 3 or 4. Tensors are \
read as (C, H, W), arrays as (H, W, C); pass channels="first" or "last" otherwise
    """
    if isinstance(value, list | tuple) and value:
        for item in value:
            check_shape(name, item, channels)
        return
    if hasattr(value, "getbands"):  # a PIL image
        return
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        raise TypeError(
            f"{name!r} is a {type(value).__name__}: an image is a tensor, a numpy array, a PIL "
            "image, or a list of these that is not empty"
        )
    shape = tuple(shape)
    if len(shape) not in ((4,) if video else (2, 3, 4)):
        wanted = "(T, C, H, W)" if video else "(H, W), (C, H, W) or (N, C, H, W)"
        raise ValueError(f"{name!r} has shape {shape}: expected {wanted}, or channels last")
    at = -3 if _channels_of(value, channels) == "first" else -1
    if len(shape) > 2 and shape[at] not in _COUNTS:
        raise ValueError(
            f"{name!r} has {shape[at]} channels in shape {shape}: images have 1, 3 or 4. Tensors "
            'are read as (C, H, W), arrays as (H, W, C); pass channels="first" or "last" otherwise'
        )


def snapshot(value: Any) -> Any:
    """Return a copy that later in-place changes do not affect; tensors stay on their device.

    >>> import numpy as np
    >>> array = np.zeros(2)
    >>> copy = snapshot([array])
    >>> array += 1
    >>> copy
    [array([0., 0.])]
    """
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    if _is_tensor(value):
        copied = value.detach().clone()
        if copied.is_cuda:
            order_before_reads(copied.device)
        return copied
    copy = getattr(value, "copy", None)  # numpy arrays and PIL images
    return copy() if callable(copy) else value


def size_of(value: Any) -> int:
    """Return the approximate size of a value in bytes.

    >>> import numpy as np
    >>> size_of({"a": [np.zeros(8), np.zeros(8)]})
    128
    """
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    if value is None or isinstance(value, int | float):
        return 32
    if isinstance(value, str):
        return 64 + len(value)
    if hasattr(value, "getbands"):  # a PIL image
        return int(value.width * value.height * 4)
    return int(getattr(value, "nbytes", _OBJECT))


def as_images(value: Any, channels: Channels | None = None) -> np.ndarray:
    """Return uint8 of shape (N, H, W, C), C one of 1, 3, 4.

    Args:
        value: a value that `check_shape` accepts. Floats are in [0, 1], integers in [0, 255];
            others are clipped, and NaN is 0. Images of a list are padded with 0 at the right and
            at the bottom to the size of the largest.
        channels: position of the channels; by default first for tensors and last for arrays.

    >>> import numpy as np
    >>> as_images(np.array([[0.0, 0.5, 2.0]])).ravel(), as_images(np.zeros((8, 8))).shape
    (array([  0, 128, 255], dtype=uint8), (1, 8, 8, 1))
    """
    import numpy as np

    if isinstance(value, list | tuple):
        return _stack([as_images(item, channels) for item in value])
    if hasattr(value, "getbands"):
        return _from_pil(value)
    first = _channels_of(value, channels) == "first"
    array = _as_bytes(_as_array(value))
    if array.ndim == 2:
        array = array[..., None]
    elif first:
        array = np.moveaxis(array, -3, -1)
    return np.ascontiguousarray(array if array.ndim == 4 else array[None])


def as_audio(value: Any) -> np.ndarray:
    """Return float32 in [-1, 1] of shape (samples,) or (samples, channels).

    Args:
        value: floats, which are clipped; or integers, which are divided by the largest of their
            type. Tensors have their channels first, as in torchaudio, arrays last.

    >>> import numpy as np
    >>> as_audio(np.array([0, -32768], dtype=np.int16))
    array([ 0., -1.], dtype=float32)
    """
    import numpy as np

    array = _as_array(value)
    if array.ndim not in (1, 2):
        raise ValueError(
            f"audio has shape {array.shape}: expected (samples,), or 2-d with channels"
        )
    if array.ndim == 2 and _is_tensor(value):
        array = array.T
    if array.dtype.kind in "iu":
        array = array / float(np.iinfo(array.dtype).max)
    clean = np.nan_to_num(np.asarray(array, np.float32))
    return np.ascontiguousarray(np.clip(clean, -1.0, 1.0))


def as_numbers(value: Any) -> np.ndarray:
    """Return the finite numbers in an array, tensor or list, in one dimension.

    >>> as_numbers([[1, 2], [3, float("nan")]])
    array([1., 2., 3.])
    """
    import numpy as np

    array = np.ravel(_as_array(value))
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"a histogram is made of numbers, got {array.dtype}")
    return array[np.isfinite(array)] if array.dtype.kind == "f" else array


def as_table(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return rows of numbers, bool, str and None; other cells are converted with ``str``.

    >>> import numpy as np
    >>> as_table([(np.float32(0.5), "seven", None, [1, 2])])
    [[0.5, 'seven', None, '[1, 2]']]
    """
    return [[_cell(value) for value in row] for row in rows]


def _cell(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        return _cell(value.item())
    return str(value)


def _channels_of(value: Any, channels: Channels | None) -> Channels:
    """Return the position of the channels; by default first for tensors, last otherwise."""
    return channels or ("first" if _is_tensor(value) else "last")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_array(value: Any) -> np.ndarray:
    """Return a tensor (synchronizing with its device) or any other value as an array."""
    import numpy as np

    if _is_tensor(value):
        torch = sys.modules["torch"]
        value = value.detach().cpu()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        value = value.numpy()
    array: np.ndarray = np.asarray(value)
    return array


def _as_bytes(array: np.ndarray) -> np.ndarray:
    import numpy as np

    kind = array.dtype.kind
    if kind not in "biuf":
        raise TypeError(f"images are made of numbers, got {array.dtype}")
    if kind in "bf":
        unit = np.nan_to_num(array.astype(np.float64), posinf=1.0, neginf=0.0)
        array = np.rint(np.clip(unit, 0.0, 1.0) * 255.0)
    return np.asarray(np.clip(array, 0, 255), np.uint8)


def _from_pil(image: Any) -> np.ndarray:
    import numpy as np

    known = {"1": "L", "L": "L", "RGB": "RGB", "RGBA": "RGBA", "P": "RGBA", "LA": "RGBA"}
    array = np.asarray(image.convert(known.get(image.mode, "RGB")))
    return (array if array.ndim == 3 else array[..., None])[None]


def _stack(images: list[np.ndarray]) -> np.ndarray:
    """Join images that differ in size and number of channels."""
    import numpy as np

    count = max(array.shape[3] for array in images)
    images = [_with_channels(array, count) for array in images]
    height, width = (max(array.shape[axis] for array in images) for axis in (1, 2))
    padded = [
        np.pad(array, ((0, 0), (0, height - array.shape[1]), (0, width - array.shape[2]), (0, 0)))
        for array in images
    ]
    return np.concatenate(padded)


def _with_channels(array: np.ndarray, count: int) -> np.ndarray:
    """Convert grayscale images to RGB, and add an opaque alpha channel if others have one."""
    import numpy as np

    if array.shape[3] == 1 and count > 1:
        array = np.repeat(array, 3, axis=3)
    if array.shape[3] == 3 and count == 4:
        opaque = np.full((*array.shape[:3], 1), 255, np.uint8)
        array = np.concatenate([array, opaque], axis=3)
    return array
