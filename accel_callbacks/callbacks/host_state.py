"""Copies of the state of models, optimizers and other objects, in host memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from accel_callbacks.placeholder import Placeholder
from accel_callbacks.strategy.state_access import reshard

__all__ = ["Undo", "capture"]

Undo = Callable[[], None]


def capture(target: Any, *, gradients: bool = True) -> Undo:
    """Copy an object's state into host memory, of sharded tensors this rank's part.

    Args:
        target: a model (parameters, buffers, gradients, modes), an optimizer, or an object with
            ``state_dict`` and ``load_state_dict``.
        gradients: copy the gradients of a model too; else restoring it drops them.

    Returns:
        A function that restores it, in place, as often as it is called.

    Raises:
        TypeError: it is none of these.
        ValueError: the model has lazy parameters.
    """
    if isinstance(target, torch.nn.Module):
        return _capture_model(target, gradients)
    if isinstance(target, torch.optim.Optimizer):
        return _capture_optimizer(target)
    if hasattr(target, "state_dict") and hasattr(target, "load_state_dict"):
        state = _to_host(target.state_dict())
        return lambda: target.load_state_dict(_from_host(state))
    raise TypeError(
        f"{type(target).__name__} cannot be restored: give models, optimizers, and objects with "
        "state_dict() and load_state_dict()."
    )


def _capture_model(model: torch.nn.Module, gradients: bool) -> Undo:
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
        if tensor is not None and not isinstance(tensor, Placeholder)  # nobody writes to those
    ]
    values = {id(tensor): _to_host(tensor) for _, _, tensor in slots}
    grads = {id(tensor): _to_host(tensor.grad) if gradients else None for _, _, tensor in slots}

    def undo() -> None:
        reshard(model)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for held, name, tensor in slots:
                held[name] = tensor  # a buffer may have been replaced
                tensor.copy_(values[id(tensor)].tensor)
                tensor.grad = _from_host(grads[id(tensor)])

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
        return _map_values(data, _to_host)
    return copy.deepcopy(data)


def _from_host(data: Any) -> Any:
    if isinstance(data, _HostCopy):
        return data.tensor.to(data.device)
    if isinstance(data, (dict, list, tuple)):
        return _map_values(data, _from_host)
    return data


def _map_values(data: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the values of a dict, list or tuple."""
    if isinstance(data, dict):
        return {key: function(value) for key, value in data.items()}
    values = [function(value) for value in data]
    if hasattr(data, "_fields"):
        return type(data)(*values)
    return tuple(values) if isinstance(data, tuple) else values
