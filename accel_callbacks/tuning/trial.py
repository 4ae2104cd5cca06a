"""Try, and put everything back; plotting axes."""

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

__all__ = ["as_before", "new_axes"]

Undo = Callable[[], None]


def new_axes(instead: str) -> Any:
    """The axes of a new matplotlib figure, which is their ``figure``.

    Args:
        instead: what else to do, for the error.

    Raises:
        ImportError: matplotlib is not installed.

    Example:
        >>> from accel_callbacks.tuning.trial import new_axes
        >>> new_axes("look at the trials").figure  # doctest: +SKIP
        <Figure size 700x400 with 1 Axes>
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError(
            f"plot() draws with matplotlib: pip install matplotlib. Or {instead}."
        ) from None
    return figures.Figure(figsize=(7, 4), layout="constrained").subplots()


@contextmanager
def as_before(objects: Sequence[Any]) -> Iterator[None]:
    """Put objects and the random generators back after the block, whatever happens in it.

    Copies are kept in the host's memory, so that the block has the device's for itself.

    Args:
        objects: models (parameters, buffers, gradients, modes), optimizers, and whatever has
            ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: an object is none of these.
        ValueError: a model has parameters that have no shape yet.

    Example:
        >>> import torch
        >>> from accel_callbacks.tuning.trial import as_before
        >>> model = torch.nn.Linear(1, 1)
        >>> before = model.weight.item()
        >>> with as_before([model]):
        ...     torch.nn.init.zeros_(model.weight).sum().backward()
        >>> model.weight.item() == before, model.weight.grad is None
        (True, True)
    """
    undo = [_remember(one) for one in objects]
    device = _device_in_use()
    rng = capture_rng(device)
    try:
        yield
    finally:
        for step in undo:
            step()
        restore_rng(rng, device)


def _device_in_use() -> torch.device:
    """Not an accelerator that nobody has used: to ask it would take memory there."""
    kind = own_accelerator()
    if kind is None:
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return torch.device("cpu")
    index = module.current_device() if hasattr(module, "current_device") else 0
    return torch.device(kind.type, index)


def _remember(one: Any) -> Undo:
    if isinstance(one, torch.nn.Module):
        return _remember_model(one)
    if isinstance(one, torch.optim.Optimizer):
        return _remember_optimizer(one)
    if hasattr(one, "state_dict") and hasattr(one, "load_state_dict"):
        state = _put_away(one.state_dict())
        return lambda: one.load_state_dict(_brought_back(state))
    raise TypeError(
        f"{type(one).__name__} cannot be restored: give models, optimizers, and objects with "
        "state_dict() and load_state_dict()."
    )


def _remember_model(model: torch.nn.Module) -> Undo:
    lazy = [name for name, one in model.named_parameters() if is_lazy(one)]
    if lazy:
        raise ValueError(
            f"{lazy[0]} has no shape yet, so it cannot be restored: call the model once before."
        )
    modules = list(model.modules())
    modes = [module.training for module in modules]
    slots: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (held, name, tensor)
        for module in modules
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    values = {id(tensor): _put_away(tensor) for _, _, tensor in slots}
    gradients = {id(tensor): _put_away(tensor.grad) for _, _, tensor in slots}

    def undo() -> None:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        with torch.no_grad():
            for held, name, tensor in slots:
                held[name] = tensor  # a buffer may have been replaced
                tensor.copy_(values[id(tensor)].tensor)
                tensor.grad = _brought_back(gradients[id(tensor)])

    return undo


def _remember_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    """Not by ``load_state_dict``, which changes the type of states to that of the parameter."""
    groups = [
        {name: _put_away(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    states = [(key, _put_away(value)) for key, value in optimizer.state.items()]

    def undo() -> None:
        del optimizer.param_groups[len(groups) :]
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            for name in set(group) - {"params"} - set(before):
                del group[name]
            for name, value in before.items():
                _assign(group, name, _brought_back(value))
        optimizer.state.clear()
        optimizer.state.update((key, _brought_back(value)) for key, value in states)

    return undo


def _assign(group: dict[str, Any], name: str, value: Any) -> None:
    """A learning rate that is a tensor may be held elsewhere too: change it in place."""
    now = group.get(name)
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        now.copy_(value)
    else:
        group[name] = value


@dataclass(frozen=True)
class _Away:
    """A copy of a tensor in the host's memory, and where it belongs."""

    tensor: torch.Tensor
    device: torch.device


def _put_away(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return _Away(data.detach().to("cpu", copy=True), data.device)
    if isinstance(data, (dict, list, tuple)):
        return _mapped(data, _put_away)
    return copy.deepcopy(data)


def _brought_back(data: Any) -> Any:
    if isinstance(data, _Away):
        return data.tensor.to(data.device)
    if isinstance(data, (dict, list, tuple)):
        return _mapped(data, _brought_back)
    return data


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same dict, list or tuple with its values changed."""
    if isinstance(data, dict):
        return {key: change(value) for key, value in data.items()}
    values = [change(value) for value in data]
    if hasattr(data, "_fields"):
        return type(data)(*values)
    return tuple(values) if isinstance(data, tuple) else values
