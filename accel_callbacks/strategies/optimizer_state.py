"""Optimizer state by parameter name, so that any engine can load what another one saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.errors import ResumeError, nearest
from accel_callbacks.gradients import parameters_of

__all__ = ["named_optimizer_state", "parameter_names", "positional_optimizer_state"]


def parameter_names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Map ``id(parameter)`` to ``"<model index>.<name>"`` for all parameters of the models."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        # The first name of a tied parameter counts, so torch need not look for duplicates.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{index}.{name}")
    return names


def _ordered_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return names in the order of torch's positions.

    A parameter that belongs to no model is named by its position.
    """
    parameters = enumerate(parameters_of([optimizer]))
    return [names.get(id(parameter), f"parameter.{index}") for index, parameter in parameters]


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with names in place of positions."""
    ordered = _ordered_names(optimizer, names)
    state = optimizer.state_dict()
    return {
        **state,
        "state": {ordered[i]: value for i, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [ordered[i] for i in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def positional_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Invert :func:`named_optimizer_state` for the order of this optimizer.

    Raises:
        ResumeError: the optimizer holds other parameters than the saved one.
    """
    ordered = _ordered_names(optimizer, names)
    position = {name: i for i, name in enumerate(ordered)}
    current_groups, first = [], 0
    for group in optimizer.param_groups:
        current_groups.append(ordered[first : first + len(group["params"])])
        first += len(group["params"])
    _check_groups([group["params"] for group in state["param_groups"]], current_groups)
    return {
        **state,
        "state": {position[name]: value for name, value in state["state"].items()},
        # torch pairs parameters by their place in the group: use the order of this optimizer.
        "param_groups": [
            {**group, "params": [position[name] for name in group_names]}
            for group, group_names in zip(state["param_groups"], current_groups, strict=True)
        ],
    }


def _check_groups(saved: Sequence[Sequence[str]], current: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(current):
        raise ResumeError(
            f"the optimizer has {len(current)} parameter groups and the checkpoint's {len(saved)}: "
            "add the groups before loading."
        )
    for number, (before, after) in enumerate(zip(saved, current, strict=True)):
        for name in sorted(set(before) ^ set(after)):
            place, other = ("checkpoint", after) if name in before else ("optimizer", before)
            raise ResumeError(
                f"{name!r} is only in the {place}'s parameter group {number}.{nearest(name, other)}"
            )
