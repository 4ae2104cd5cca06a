"""HostCopy: a small tensor copied to the host without blocking, for which only reading waits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["HostCopy"]

_ASYNC_DEVICES = ("cuda", "xpu")  # devices that copy to pinned memory without blocking the host


class HostCopy:
    """The values that a small tensor had when this was made, on the host.

    On a GPU the copy is queued on the current stream, and :meth:`read` waits for it alone, not for
    what is queued afterwards. Other devices keep the copy, and :meth:`read` waits for the device.

    Args:
        tensor: of any dtype and shape.

    Example:
        >>> import torch
        >>> from accel_callbacks.host_copy import HostCopy
        >>> flag = torch.tensor(1.0)
        >>> copy = HostCopy(flag)
        >>> _ = flag.zero_()
        >>> copy.read()
        tensor(1.)
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        tensor = tensor.detach()
        if tensor.device.type in _ASYNC_DEVICES:
            self._copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()
        else:
            self._copy = tensor.clone()

    @property
    def is_ready(self) -> bool:
        """False while :meth:`read` would wait for a copy that is queued."""
        return self._event is None or bool(self._event.query())

    def read(self) -> torch.Tensor:
        """Return the tensor on the CPU; wait for the copy if it is not done."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy if self._copy.device.type == "cpu" else self._copy.cpu()
