"""From tensors, arrays and PIL images to what trackers take: numpy, of one layout and type.

Two steps: `held` copies on the caller's thread, without waiting for a device; the others, on the
hub's thread, convert.
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
    "as_numbers",
    "as_pictures",
    "as_table",
    "check_shape",
    "held",
    "size_of",
]

Channels = Literal["first", "last"]
"""Where the channels of a picture stand: ``(C, H, W)`` or ``(H, W, C)``."""

_COUNTS = (1, 3, 4)
_OBJECT = 1 << 16  # bytes of what does not say (a figure, a picture of PIL), roughly


def held(value: Any) -> Any:
    """Return a copy that later changes do not reach; tensors stay on their device.

    >>> import numpy as np
    >>> array = np.zeros(2)
    >>> copy = held([array])
    >>> array += 1
    >>> copy
    [array([0., 0.])]
    """
    if isinstance(value, list | tuple):
        return [held(item) for item in value]
    if _is_tensor(value):
        copied = value.detach().clone()
        if copied.is_cuda:
            order_before_reads(copied.device)
        return copied
    copy = getattr(value, "copy", None)  # numpy arrays and PIL images
    return copy() if callable(copy) else value


def size_of(value: Any) -> int:
    """Return about how many bytes a value keeps from being used for something else.

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


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def channels_of(value: Any, channels: Channels | None) -> Channels:
    """Return where the channels stand: as told; else first in tensors, last in anything else."""
    return channels or ("first" if _is_tensor(value) else "last")


def check_shape(name: str, value: Any, channels: Channels | None, *, film: bool = False) -> None:
    """Raise TypeError or ValueError, on the caller's thread, for what `as_pictures` cannot take.

    >>> import numpy as np
    >>> check_shape("digit", np.zeros((8, 8)), None)
    >>> check_shape("digit", np.zeros((3, 8, 8)), None)
    Traceback (most recent call last):
    ValueError: 'digit' has 8 channels in shape (3, 8, 8): pictures have 1, 3 or 4. Tensors are \
taken as (C, H, W), arrays as (H, W, C); say channels="first" or "last"
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
            f"{name!r} is a {type(value).__name__}: a picture is a tensor, a numpy array, a PIL "
            "image, or a list of these that is not empty"
        )
    shape = tuple(shape)
    if len(shape) not in ((4,) if film else (2, 3, 4)):
        wanted = "(T, C, H, W)" if film else "(H, W), (C, H, W) or (N, C, H, W)"
        raise ValueError(f"{name!r} has shape {shape}: expected {wanted}, or channels last")
    at = -3 if channels_of(value, channels) == "first" else -1
    if len(shape) > 2 and shape[at] not in _COUNTS:
        raise ValueError(
            f"{name!r} has {shape[at]} channels in shape {shape}: pictures have 1, 3 or 4. "
            'Tensors are taken as (C, H, W), arrays as (H, W, C); say channels="first" or "last"'
        )


def as_pictures(value: Any, channels: Channels | None = None) -> np.ndarray:
    """Return uint8 of shape (N, H, W, C), C one of 1, 3, 4.

    Args:
        value: what `check_shape` accepts. Floats are in [0, 1], integers in [0, 255]; what is
            outside is clipped, and NaN is 0. Pictures of a list that are smaller than the largest
            are filled up with 0 at the right and at the bottom.
        channels: where the channels stand; first in tensors, last in arrays if None.

    >>> import numpy as np
    >>> as_pictures(np.array([[0.0, 0.5, 2.0]])).ravel(), as_pictures(np.zeros((8, 8))).shape
    (array([  0, 128, 255], dtype=uint8), (1, 8, 8, 1))
    """
    import numpy as np

    if isinstance(value, list | tuple):
        return _stacked([as_pictures(item, channels) for item in value])
    if hasattr(value, "getbands"):
        return _from_pil(value)
    first = channels_of(value, channels) == "first"
    array = _as_bytes(_as_array(value))
    if array.ndim == 2:
        array = array[..., None]
    elif first:
        array = np.moveaxis(array, -3, -1)
    return np.ascontiguousarray(array if array.ndim == 4 else array[None])


def as_audio(value: Any) -> np.ndarray:
    """Return float32 in [-1, 1] of shape (samples,) or (samples, channels).

    Args:
        value: floats, clipped; or integers, divided by the largest of their type. Tensors have
            their channels first, as torchaudio has them, arrays last.

    >>> import numpy as np
    >>> as_audio(np.array([0, -32768], dtype=np.int16))
    array([ 0., -1.], dtype=float32)
    """
    import numpy as np

    array = _as_array(value)
    if array.ndim not in (1, 2):
        raise ValueError(f"audio has shape {array.shape}: expected (samples,) and channels, if any")
    if array.ndim == 2 and _is_tensor(value):
        array = array.T
    if array.dtype.kind in "iu":
        array = array / float(np.iinfo(array.dtype).max)
    clean = np.nan_to_num(np.asarray(array, np.float32))
    return np.ascontiguousarray(np.clip(clean, -1.0, 1.0))


def as_numbers(value: Any) -> np.ndarray:
    """Return the finite numbers in any array, tensor or list, as one dimension.

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
    """Return rows of numbers, bool, str and None; anything else becomes its text.

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


def _as_array(value: Any) -> np.ndarray:
    """Read a tensor (this waits for its device), or make an array."""
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
        raise TypeError(f"pictures are made of numbers, got {array.dtype}")
    if kind in "bf":
        unit = np.nan_to_num(array.astype(np.float64), posinf=1.0, neginf=0.0)
        array = np.rint(np.clip(unit, 0.0, 1.0) * 255.0)
    return np.asarray(np.clip(array, 0, 255), np.uint8)


def _from_pil(image: Any) -> np.ndarray:
    import numpy as np

    known = {"1": "L", "L": "L", "RGB": "RGB", "RGBA": "RGBA", "P": "RGBA", "LA": "RGBA"}
    array = np.asarray(image.convert(known.get(image.mode, "RGB")))
    return (array if array.ndim == 3 else array[..., None])[None]


def _stacked(pictures: list[np.ndarray]) -> np.ndarray:
    """Join pictures of several sizes and counts of channels."""
    import numpy as np

    count = max(array.shape[3] for array in pictures)
    pictures = [_with_channels(array, count) for array in pictures]
    height, width = (max(array.shape[axis] for array in pictures) for axis in (1, 2))
    filled = [
        np.pad(array, ((0, 0), (0, height - array.shape[1]), (0, width - array.shape[2]), (0, 0)))
        for array in pictures
    ]
    return np.concatenate(filled)


def _with_channels(array: np.ndarray, count: int) -> np.ndarray:
    """Make grey ones coloured, and opaque where others have an opacity."""
    import numpy as np

    if array.shape[3] == 1 and count > 1:
        array = np.repeat(array, 3, axis=3)
    if array.shape[3] == 3 and count == 4:
        opaque = np.full((*array.shape[:3], 1), 255, np.uint8)
        array = np.concatenate([array, opaque], axis=3)
    return array
