"""Devices that are not there: tensors that say where they are, and refuse to meet elsewhere.

Their values are computed on the CPU, without gradients: autograd asks for a real device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

KIND = "ipu"  # has no code of its own in torch, and needs no driver
aten = torch.ops.aten


class FakeDeviceTensor(torch.Tensor):
    """A tensor on a device that is not there."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> FakeDeviceTensor:
        made: FakeDeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.inner} on {self.device}"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def fake_devices() -> Iterator[None]:
    """Context manager: ``"ipu:0"``, ``"ipu:1"`` and so on are devices; without gradients."""
    with _Mode(), torch.no_grad():
        yield


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    flat = tree_flatten((args, kwargs))[0]
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    devices = {one.device for one in tensors if one.dim() or one.device.type == KIND}
    is_copy = func is aten.copy_.default
    if len(devices) > 1 and not is_copy and func is not aten._to_copy.default:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {devices}")
    result = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
    if is_copy:
        return args[0]
    device = kwargs.get("device") or next(
        (one for one in devices if one.type == KIND), torch.device("cpu")
    )
    if torch.device(device).type != KIND:
        return result
    return tree_map(
        lambda one: FakeDeviceTensor(one, device) if type(one) is torch.Tensor else one, result
    )


def _on_cpu(item: Any) -> Any:
    if isinstance(item, FakeDeviceTensor):
        return item.inner
    if isinstance(item, torch.device) and item.type == KIND:
        return torch.device("cpu")
    return item
