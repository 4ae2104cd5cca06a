"""Learning rates: change those of parameter groups, and of the schedules that follow them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = [
    "SCHEDULER_RATES",
    "scale_group",
    "scale_schedulers",
    "schedulers_of",
    "set_learning_rate",
]

_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
#: Attributes of a scheduler with one rate for each parameter group.
SCHEDULER_RATES = ("base_lrs", "_last_lr", "max_lrs", "min_lrs")


def set_learning_rate(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], rate: float
) -> float:
    """Set the rate of the first parameter group, and scale all others and their schedules by it.

    Args:
        optimizers: whose groups are scaled.
        schedulers: of these optimizers; they go on from the new rates.
        rate: above 0.

    Returns:
        The rate of the first group before.

    Raises:
        ValueError: there is no rate, or it is 0, from which nothing can be scaled.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.group_rates import set_learning_rate
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        >>> set_learning_rate([optimizer], [schedule], 0.25)
        1.0
        >>> optimizer.step()
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.125]
    """
    before = first_rate(optimizers)
    factor = rate / before
    for optimizer in optimizers:
        followers = schedulers_of(optimizer, schedulers)
        for index, group in enumerate(optimizer.param_groups):
            # Exactly the rate where it was the first one: a product may be another bit off.
            is_first = float(group["lr"]) == before
            scale_group(group, factor)
            if is_first:
                lr = group["lr"]
                group["lr"] = torch.full_like(lr, rate) if isinstance(lr, torch.Tensor) else rate
            scale_schedulers(followers, index, factor)
    return before


def first_rate(optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """Return the rate of the first parameter group; see :func:`set_learning_rate`."""
    if not optimizers:
        raise ValueError("lr cannot be set: no optimizer is prepared.")
    rate = float(optimizers[0].param_groups[0]["lr"])
    if not rate > 0:
        raise ValueError(
            f"lr is {rate:g} at this step, from which a schedule cannot be scaled: send it again "
            "once the schedule is above 0."
        )
    return rate


def scale_group(group: dict[str, Any], factor: float) -> None:
    """Multiply the rates of a parameter group."""
    for name in _GROUP_RATES:
        if name in group:
            group[name] = group[name] * factor  # not in place: groups may share a tensor


def scale_schedulers(schedulers: Sequence[Any], index: int, factor: float) -> None:
    """Multiply the rates that schedulers hold for the parameter group at an index."""
    scaled: list[list[Any]] = []
    for scheduler in schedulers:
        for name in SCHEDULER_RATES:
            rates = getattr(scheduler, name, None)
            # A SequentialLR shares its last rates with the schedule that is active.
            is_new = not any(rates is other for other in scaled)
            if isinstance(rates, list) and len(rates) > index and is_new:
                rates[index] = rates[index] * factor
                scaled.append(rates)


def schedulers_of(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any]) -> list[Any]:
    """Return those of some schedulers, and of those nested in them, that follow an optimizer."""
    followers = []
    for scheduler in schedulers:
        owner = getattr(scheduler, "optimizer", None)
        if owner is optimizer or getattr(owner, "optimizer", None) is optimizer:
            followers.append(scheduler)
        followers += schedulers_of(optimizer, getattr(scheduler, "_schedulers", ()))
    return followers
