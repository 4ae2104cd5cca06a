"""Models built without memory for their weights, under Accelerate's names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["init_empty_weights", "init_on_device"]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager: models built in it have parameters on the meta device, without memory.

    ``prepare`` of a strategy that shards gives each rank memory for its part, which is filled by
    ``load_checkpoint_in_model``, ``load_state`` or ``initialize_weights`` after it. Only modules
    that this thread builds are affected.

    Args:
        include_buffers: put buffers on the meta device too. By default they keep their values: of
            those that no checkpoint has, such as tables of positions, there is no other source.

    Example:
        >>> import torch
        >>> from accel_callbacks import init_empty_weights
        >>> with init_empty_weights():
        ...     layer = torch.nn.BatchNorm1d(3)
        >>> layer.weight.device.type, layer.running_mean.device.type
        ('meta', 'cpu')
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Iterator[None]:
    """Context manager: build modules with their parameters on a device.

    Args:
        device: where they are.
        include_buffers: all that is made in the context is on the device, buffers too; not by
            default.

    Example:
        >>> import torch
        >>> from accel_callbacks import init_on_device
        >>> with init_on_device("meta", include_buffers=True):
        ...     layer = torch.nn.BatchNorm1d(3)
        >>> layer.running_mean.is_meta
        True
    """
    place = torch.device(device)
    if include_buffers:
        with place:
            yield
        return
    thread, moved = threading.get_ident(), WeakIdKeyDictionary()

    def move(module: torch.nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.device == place or threading.get_ident() != thread:
            return None
        if isinstance(parameter, UninitializedParameter):  # it has no shape yet
            return None
        # One parameter in two modules is tied, and stays so.
        if parameter not in moved:
            kind, attributes = type(parameter), vars(parameter)
            value = parameter.detach().to(place)
            if kind is torch.nn.Parameter:
                moved[parameter] = torch.nn.Parameter(value, parameter.requires_grad)
                vars(moved[parameter]).update(attributes)
            else:
                moved[parameter] = kind(value, requires_grad=parameter.requires_grad, **attributes)
        return moved[parameter]

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()
