"""Whole models that stay on the CPU until they run, for pipelines of several."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from accel_callbacks.data.device import send_to_device
from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.memory import clear_device_cache
from accel_callbacks.offload.hooks import (
    ModelHook,
    add_hook_to_module,
    outside_graphs,
    remove_hook_from_module,
)
from accel_callbacks.offload.tensors import Device, as_device

__all__ = ["CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook"]

_Model = TypeVar("_Model", bound=torch.nn.Module)


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward, and on the device after it.

    It goes back when ``init_hook`` is called again, as :class:`UserCpuOffloadHook` does.

    Args:
        execution_device: the accelerator of this machine, or else the CPU, if ``None``.
        prev_module_hook: of the model that runs before this one in a pipeline; that model goes to
            the CPU before this one comes to the device.

    Example:
        >>> import torch
        >>> from accel_callbacks.utils import CpuOffload, add_hook_to_module
        >>> layer = add_hook_to_module(torch.nn.Linear(2, 1), CpuOffload("cpu"))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        default = own_accelerator() or torch.device("cpu")
        self.execution_device = default if execution_device is None else as_device(execution_device)

    def init_hook(self, module: Any) -> Any:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the model and its inputs to the device, and the model before it away."""
        self._exchange(module)
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device),
        )

    @outside_graphs
    def _exchange(self, module: torch.nn.Module) -> None:
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and not _is_on(before.model, torch.device("cpu")):
            before.offload()
            clear_device_cache()
        if not _is_on(module, self.execution_device):
            module.to(self.execution_device)


def _is_on(model: torch.nn.Module, device: torch.device) -> bool:
    """Return whether all tensors of a model are on a device."""
    return all(
        one.device.type == device.type and device.index in (None, one.device.index)
        for one in (*model.parameters(), *model.buffers())
    )


class UserCpuOffloadHook:
    """A model with its hook: moves it to the CPU, or removes the hook.

    Args:
        model: the model.
        hook: its hook.

    Example:
        >>> import torch
        >>> from accel_callbacks import cpu_offload_with_hook
        >>> model, hook = cpu_offload_with_hook(torch.nn.Linear(2, 1), "cpu")
        >>> hook.offload()
        >>> hook.remove()
    """

    def __init__(self, model: torch.nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU; its next forward brings it back."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: _Model,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[_Model, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it runs, and on the device until it is told to go.

    For pipelines that run several models, one of them in a loop: the one that runs is on the
    device, and the one before it leaves when the next begins.

    Args:
        model: changed in place, and moved to the CPU.
        execution_device: the accelerator of this machine, or else the CPU, if ``None``.
        prev_module_hook: what this function returned for the model that runs before.

    Returns:
        The model, and what moves it to the CPU.

    Example:
        >>> import torch
        >>> from accel_callbacks import cpu_offload_with_hook
        >>> encoder, first = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
        >>> decoder, second = cpu_offload_with_hook(torch.nn.Linear(2, 1), "cpu", first)
        >>> decoder(encoder(torch.ones(1, 2))).shape
        torch.Size([1, 1])
        >>> second.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
