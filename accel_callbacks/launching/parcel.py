"""What a function returns in a forked process, on its way to the process that launched it."""

from __future__ import annotations

import io
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

__all__ = ["Parcel"]


class Parcel:
    """A value, packed where a failure to do so can still be told; it arrives unpacked.

    Tensors arrive on the CPU and without gradients, wherever in the value they are. They travel as
    bytes: shared memory would keep one open file a tensor, and the device memory of a process is
    gone when it ends.

    Args:
        value: what a function has returned.

    Raises:
        TypeError: it cannot leave its process.

    Example:
        >>> import torch
        >>> from multiprocessing.reduction import ForkingPickler
        >>> from accel_callbacks.launching.parcel import Parcel
        >>> ForkingPickler.loads(ForkingPickler.dumps(Parcel({"loss": torch.tensor(0.5)})))
        {'loss': tensor(0.5000)}
    """

    def __init__(self, value: Any) -> None:
        packed = io.BytesIO()
        try:
            _Packer(packed).dump(value)
        except Exception as error:
            raise TypeError(
                f"the function returned a {type(value).__name__} that cannot be handed from its "
                f"process to the notebook ({type(error).__name__}: {error}). Return numbers, text, "
                "lists, dicts and tensors; save models to a file."
            ) from None
        self._data = packed.getvalue()

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return ForkingPickler.loads, (self._data,)


class _Packer(ForkingPickler):
    """Tensors as bytes, where they are plain ones; the others as torch hands them on."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter, (value.detach(), value.requires_grad)
        if kind is not torch.Tensor or value.is_meta:
            return NotImplemented
        here = value.detach().cpu()
        if here.layout is not torch.strided or here.is_quantized:
            return reduce_tensor(here)  # type: ignore[no-untyped-call]
        plain = here.resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _unpack, (data, plain.dtype, tuple(plain.shape))


def _unpack(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
