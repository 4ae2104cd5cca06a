"""Move inputs to the device of the module that runs, and outputs back to the caller's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch

from accel_callbacks.collectives.nested import find_device
from accel_callbacks.data.device import is_on, send_to_device
from accel_callbacks.models.offload.assignment import Assignment
from accel_callbacks.models.offload.placeholder import AbsentWeight
from checkpoint_io.warning import warn

__all__ = ["MOVERS", "AlignHook", "align", "guard_moves", "unalign"]

#: What Accelerate's `dispatch_model` and ours put in front of methods of the module, as warnings.
MOVERS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
_ATTRIBUTE = "_align_hook"


class AlignHook:
    """Move the inputs of a module to a device: a forward pre-hook and a forward hook.

    Args:
        device: where the module runs.
        returns: move its output to where the first input tensor was.
        skip_keys: keys of keyword arguments, and of dicts in the output, that are not moved.
    """

    def __init__(
        self, device: torch.device, returns: bool = False, skip_keys: Collection[str] = ()
    ) -> None:
        self.device = device
        self.returns = returns
        self.skip_keys = frozenset(skip_keys)
        self._from: list[torch.device | None] = []

    def attach(self, module: torch.nn.Module) -> None:
        """Register the hooks."""
        self._handles = [
            module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after, always_call=True),
        ]
        vars(module)[_ATTRIBUTE] = self

    def detach(self, module: torch.nn.Module) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        vars(module).pop(_ATTRIBUTE, None)

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Move the inputs that are on another device."""
        self._from.append(find_device((args, kwargs)) if self.returns else None)
        return (
            tuple(_move_item(item, self.device, self.skip_keys) for item in args),
            {
                key: item
                if key in self.skip_keys
                else _move_item(item, self.device, self.skip_keys)
                for key, item in kwargs.items()
            },
        )

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Move the output to the device of the input."""
        device = self._from.pop() if self._from else None
        return output if device is None else _move_item(output, device, self.skip_keys)


def _move_item(item: Any, device: torch.device, skip_keys: frozenset[str]) -> Any:
    """Return the item itself, unless a tensor in it is on another device."""
    if is_on(item, device):
        return item
    return send_to_device(item, device, skip_keys=skip_keys)


def align(
    model: torch.nn.Module, assignment: Assignment, skip_keys: str | Iterable[str] | None = None
) -> None:
    """Move inputs to the device of each part of a model, and outputs back to the caller's.

    Args:
        model: the model.
        assignment: where its weights are used.
        skip_keys: keys of what is not moved.
    """
    skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
    devices: dict[int, list[torch.device]] = {}
    for assigned in assignment.weights:
        for slot in assigned.weight.slots:
            devices.setdefault(id(slot.module), []).append(assigned.device)
    below: dict[int, set[torch.device]] = {}

    def collect(module: torch.nn.Module) -> set[torch.device]:
        if id(module) not in below:
            below[id(module)] = inside = set(devices.get(id(module), ()))
            for child in module.children():
                inside |= collect(child)
        return below[id(module)]

    def visit(module: torch.nn.Module) -> None:
        # Modules in a part that is on one device too: who calls them may be elsewhere.
        if _ATTRIBUTE in vars(module):  # a module with two names
            return
        if len(below[id(module)]) == 1 or id(module) in devices:
            device = next(iter(devices.get(id(module), below[id(module)])))
            AlignHook(device, False, skipped).attach(module)
        for child in module.children():
            visit(child)

    AlignHook(assignment.main, True, skipped).attach(model)
    if collect(model) - {assignment.main}:
        for child in model.children():
            visit(child)


def unalign(model: torch.nn.Module) -> None:
    """Remove what :func:`align` and :func:`guard_moves` have added."""
    for module in model.modules():
        hook = vars(module).get(_ATTRIBUTE)
        if hook is not None:
            hook.detach(module)
        for name in MOVERS:
            if isinstance(vars(module).get(name), _Guard):
                del vars(module)[name]


def guard_moves(model: torch.nn.Module) -> None:
    """Make ``model.to(device)`` and the like warn, or raise if weights are offloaded."""
    for name in MOVERS:
        if hasattr(type(model), name):
            vars(model)[name] = _Guard(_move, model, name)


class _Guard(partial):  # type: ignore[type-arg]
    """A guarded method of one model; copies and pickles with it."""


def _move(model: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    # ``to`` with a dtype alone moves nothing.
    moves = name != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None
    if any(isinstance(tensor, AbsentWeight) for tensor in (*model.parameters(), *model.buffers())):
        raise RuntimeError(
            "You can't move a model that has some modules offloaded to cpu or disk: dispatch it "
            "again with another device_map, or give dtype= to load_checkpoint_and_dispatch. "
            "accel_callbacks.utils.remove_hook_from_submodules(model) brings its weights back."
        )
    if moves:
        warn(
            "You shouldn't move a model that is dispatched over several devices: its parts still "
            "run where the device_map has put them."
        )
    return getattr(type(model), name)(model, *args, **kwargs)
