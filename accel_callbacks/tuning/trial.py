"""Restore objects after trial steps, and make the axes to plot them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accel_callbacks.distributed.rng import capture_rng, restore_rng
from accel_callbacks.distributed.topology import own_accelerator
from accel_callbacks.offload.placeholder import AbsentWeight
from accel_callbacks.strategies.fsdp_groups import reshard

__all__ = ["new_axes", "restored"]

Undo = Callable[[], None]


def new_axes(instead: str) -> Any:
    """Return the axes of a new matplotlib figure.

    Args:
        instead: an alternative to plotting, for the error.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            f"plot() draws with matplotlib: pip install matplotlib. Or {instead}."
        ) from None
    return figures.Figure(figsize=(7, 4), layout="constrained").subplots()


@contextmanager
def restored(objects: Sequence[Any]) -> Iterator[None]:
    """Restore objects and the random generators after the block, also after an error.

    Copies are kept in host memory, so that the block can use all of the device's.

    Args:
        objects: models (parameters, buffers, gradients, modes), optimizers, and objects with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: an object is none of these.
        ValueError: a model has lazy parameters.
    """
    undo = [_capture(target) for target in objects]
    device = _device_in_use()
    rng = capture_rng(device)
    try:
        yield
    finally:
        for restore in undo:
            restore()
        restore_rng(rng, device)


def _device_in_use() -> torch.device:
    """Return the current accelerator if it is initialized, else the CPU."""
    # Asking an accelerator that is not in use for its RNG state would take memory there.
    kind = own_accelerator()
    if kind is None:
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return torch.device("cpu")
    index = module.current_device() if hasattr(module, "current_device") else 0
    return torch.device(kind.type, index)


def _capture(target: Any) -> Undo:
    """Copy an object's state; returns a function that restores it."""
    if isinstance(target, torch.nn.Module):
        return _capture_model(target)
    if isinstance(target, torch.optim.Optimizer):
        return _capture_optimizer(target)
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        state = _to_host(target.state_dict())
        return lambda: target.load_state_dict(_from_host(state))
    raise TypeError(
        f"{type(target).__name__} cannot be restored: give models, optimizers, and objects with "
        "state_dict() and load_state_dict()."
    )


def _capture_model(model: torch.nn.Module) -> Undo:
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet, so it cannot be restored: call the model once before."
        )
    reshard(model)
    modules = list(model.modules())
    modes = [module.training for module in modules]
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, tensor)
        for module in modules
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None and not isinstance(tensor, AbsentWeight)  # nobody writes to those
    ]
    values = {id(tensor): _to_host(tensor) for _, _, tensor in slots}
    gradients = {id(tensor): _to_host(tensor.grad) for _, _, tensor in slots}

    def undo() -> None:
        reshard(model)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for held, name, tensor in slots:
                held[name] = tensor  # a buffer may have been replaced
                tensor.copy_(values[id(tensor)].tensor)
                tensor.grad = _from_host(gradients[id(tensor)])

    return undo


def _capture_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    # Not with load_state_dict, which casts states to the dtype of their parameter.
    groups = [
        {name: _to_host(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    states = [(key, _to_host(value)) for key, value in optimizer.state.items()]

    def undo() -> None:
        del optimizer.param_groups[len(groups) :]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for name in set(group) - {"params"} - set(before):
                del group[name]
            for name, value in before.items():
                _assign(group, name, _from_host(value))
        optimizer.state.clear()
        optimizer.state.update((key, _from_host(value)) for key, value in states)

    return undo


def _assign(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option of a group; a tensor in place, because other objects may share it."""
    now = group.get(name)
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        now.copy_(value)
    else:
        group[name] = value


@dataclass(frozen=True)
class _HostCopy:
    """A copy of a tensor in host memory, and its original device."""

    tensor: torch.Tensor
    device: torch.device


def _to_host(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return _HostCopy(data.detach().to("cpu", copy=True), data.device)
    if isinstance(data, (dict, list, tuple)):
        return _mapped(data, _to_host)
    return copy.deepcopy(data)


def _from_host(data: Any) -> Any:
    if isinstance(data, _HostCopy):
        return data.tensor.to(data.device)
    if isinstance(data, (dict, list, tuple)):
        return _mapped(data, _from_host)
    return data


def _mapped(data: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the values of a dict, list or tuple."""
    if isinstance(data, dict):
        return {key: function(value) for key, value in data.items()}
    values = [function(value) for value in data]
    if hasattr(data, "_fields"):
        return type(data)(*values)
    return tuple(values) if isinstance(data, tuple) else values
