"""Optimizer state by parameter name, so that any engine can load what another one saved."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_callbacks.errors import ResumeError, nearest
from accel_callbacks.gradients import parameters_of

__all__ = [
    "find_unsaved",
    "named_optimizer_state",
    "parameter_names",
    "positional_optimizer_state",
    "restore_exactly",
]

STATE_BY_KEY = "state_by_key"  # what an optimizer keeps under other keys than its parameters
_PLAIN = (type(None), bool, int, float, str)
_STRAY = (
    "{} keeps state of a tensor {} that is in none of its parameter groups, and torch's "
    "state_dict() cannot name it: keep that state under a name, or add the tensor to a group."
)


def parameter_names(models: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Map ``id(parameter)`` to ``"<model index>.<name>"`` for all parameters of the models."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        # The first name of a tied parameter counts, so torch need not look for duplicates.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{index}.{name}")
    return names


def _names_in_order(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return names in the order of torch's positions.

    A parameter that belongs to no model is named by its position.
    """
    parameters = enumerate(parameters_of([optimizer]))
    return [names.get(id(parameter), f"parameter.{index}") for index, parameter in parameters]


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with names in place of positions.

    Raises:
        ValueError: it keeps state of a tensor that is in no parameter group.
    """
    ordered = _names_in_order(optimizer, names)
    try:
        state = optimizer.state_dict()
    except KeyError as error:
        stray = _find_stray(optimizer)
        raise error if stray is None else ValueError(stray) from error
    positions = range(len(ordered))
    by_key = {key: value for key, value in state["state"].items() if key not in positions}
    if by_key:
        state[STATE_BY_KEY] = by_key
    return {
        **state,
        "state": {ordered[i]: value for i, value in state["state"].items() if i not in by_key},
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
    ordered = _names_in_order(optimizer, names)
    position = {name: i for i, name in enumerate(ordered)}
    current_groups, first = [], 0
    for group in optimizer.param_groups:
        current_groups.append(ordered[first : first + len(group["params"])])
        first += len(group["params"])
    _check_groups([group["params"] for group in state["param_groups"]], current_groups)
    return {
        **{key: value for key, value in state.items() if key != STATE_BY_KEY},
        "state": {
            **{position[name]: value for name, value in state["state"].items()},
            **state.get(STATE_BY_KEY, {}),
        },
        # torch pairs parameters by their place in the group: use the order of this optimizer.
        "param_groups": [
            {**group, "params": [position[name] for name in group_names]}
            for group, group_names in zip(state["param_groups"], current_groups, strict=True)
        ],
    }


def restore_exactly(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what torch's ``load_state_dict`` has changed of a state by position.

    It makes another text of a text, a deque without a limit of one with a limit, and floats of the
    integers of a parameter of floats.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for place, parameter in enumerate(parameters_of([optimizer])):
        saved, loaded = state["state"].get(place), optimizer.state.get(parameter)
        if isinstance(saved, dict) and isinstance(loaded, dict):
            loaded.update({k: _exact(loaded[k], v) for k, v in saved.items() if k in loaded})


def _exact(loaded: Any, saved: Any) -> Any:
    if type(loaded) is not type(saved):  # as the optimizer wants it
        return loaded
    if isinstance(saved, torch.Tensor):
        fits = saved.dtype == loaded.dtype or saved.is_floating_point() or saved.is_complex()
        return loaded if fits else saved.to(loaded.device)
    if isinstance(saved, dict):
        return {key: _exact(loaded[key], value) for key, value in saved.items()}
    if isinstance(saved, deque):
        return deque(map(_exact, loaded, saved), saved.maxlen)
    if isinstance(saved, (list, tuple)):
        return type(saved)(map(_exact, loaded, saved))
    return saved if isinstance(saved, str) else loaded


def find_unsaved(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str | None:
    """Return why a checkpoint cannot hold the state of an optimizer; None if it can.

    Args:
        optimizer: as the user made it. One that makes its own ``state_dict`` is not looked into.
        names: from :func:`parameter_names`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict or any(hooks):
        return None
    if (stray := _find_stray(optimizer)) is not None:
        return stray
    ordered = iter(_names_in_order(optimizer, names))
    by_id = {id(parameter): next(ordered) for parameter in parameters_of([optimizer])}
    tree = {
        "state": {by_id.get(id(key), key): value for key, value in optimizer.state.items()},
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }
    if _is_plain(tree):  # as almost all are, for which nothing is imported
        return None
    from checkpoint_io import UnsupportedStateError
    from checkpoint_io.format.tree import TreeEncoder

    encoder = TreeEncoder(type(optimizer).__name__, lambda path, tensor: "", sharded=True)
    try:
        encoder.encode(tree)
    except UnsupportedStateError as error:
        return f"{error}."
    return None


def _find_stray(optimizer: torch.optim.Optimizer) -> str | None:
    """Return an error for a tensor of which an optimizer keeps state, and which no group has."""
    known = {id(parameter) for parameter in parameters_of([optimizer])}
    tensors = (key for key in optimizer.state if isinstance(key, torch.Tensor))
    stray = next((tensor for tensor in tensors if id(tensor) not in known), None)
    return None if stray is None else _STRAY.format(type(optimizer).__name__, list(stray.shape))


def _is_plain(value: Any) -> bool:
    """Return whether a state has nothing but what every checkpoint can hold."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.layout is torch.strided and value.dtype is not torch.complex128
    if kind is dict:
        return all(type(key) in _PLAIN and _is_plain(item) for key, item in value.items())
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return kind in _PLAIN or hasattr(value, "device_mesh")


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
