"""Parameters in optimizer groups of their own, with the schedulers that move their rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["give_own_groups"]

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # of a group
_RATE_LISTS = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")  # of a scheduler, one for each group
_OTHER_LISTS = ("lr_lambdas", "base_momentums", "max_momentums")


def give_own_groups(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    parameters: Sequence[torch.nn.Parameter],
    factor: float,
) -> None:
    """Put parameters into groups of their own, with their group's options and a part of its rate.

    A group that has no other parameters stays and gets the rate. What no optimizer has is added to
    the first one, with the options of its first group.

    Args:
        optimizers: those that may have the parameters.
        schedulers: of these optimizers; their lists get an entry for each new group.
        parameters: what to put there.
        factor: multiplies the learning rate.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.own_groups import give_own_groups
        >>> weight, bias = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight, bias], lr=1.0)
        >>> give_own_groups([optimizer], [], [bias], 0.5)
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 1.0), (1, 0.5)]
    """
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        moving = [one for scheduler in schedulers for one in _of(scheduler, optimizer)]
        for index, group in enumerate(list(optimizer.param_groups)):
            taken = [p for p in group["params"] if id(p) in wanted]
            wanted -= {id(p) for p in taken}
            if taken and len(taken) == len(group["params"]):
                _scale(group, factor)
                _scale_lists(moving, index, factor)
            elif taken:
                group["params"] = [p for p in group["params"] if all(p is not t for t in taken)]
                _add(optimizer, moving, index, taken, factor)
    left = [parameter for parameter in parameters if id(parameter) in wanted]
    if left and optimizers:
        moving = [one for scheduler in schedulers for one in _of(scheduler, optimizers[0])]
        _add(optimizers[0], moving, 0, left, factor)


def _add(
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    like: int,
    parameters: list[torch.nn.Parameter],
    factor: float,
) -> None:
    """A new group, with the options of the one at ``like``."""
    group = {**optimizer.param_groups[like], "params": parameters}
    _scale(group, factor)
    optimizer.add_param_group(group)
    for scheduler in schedulers:
        for name in (*_RATE_LISTS, *_OTHER_LISTS):
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) > like:
                values.append(values[like])
    _scale_lists(schedulers, len(optimizer.param_groups) - 1, factor)


def _scale(group: dict[str, Any], factor: float) -> None:
    for name in _RATES:
        if name in group:
            group[name] = group[name] * factor  # a new tensor, where it is one


def _scale_lists(schedulers: Sequence[Any], index: int, factor: float) -> None:
    for scheduler in schedulers:
        for name in _RATE_LISTS:
            values = getattr(scheduler, name, None)
            if isinstance(values, list) and len(values) > index:
                values[index] = values[index] * factor


def _of(scheduler: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """A scheduler and those inside of it, if they move this optimizer."""
    own = getattr(scheduler, "optimizer", None)
    if own is optimizer or getattr(own, "optimizer", None) is optimizer:
        yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _of(inner, optimizer)
