"""Whether loading a model is nothing more than filling its parameters and buffers."""

from __future__ import annotations

import torch

__all__ = ["is_plain"]

_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_METHODS = (
    "state_dict",
    "load_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_save_to_state_dict",
    "_load_from_state_dict",
)


def is_plain(model: torch.nn.Module) -> bool:
    """False where a module saves or loads in a way of its own, which must then be asked.

    Example:
        >>> import torch
        >>> from accel_callbacks.plain_modules import is_plain
        >>> is_plain(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        True
        >>> class Counts(torch.nn.Module):
        ...     def get_extra_state(self):
        ...         return {"seen": 3}
        >>> is_plain(Counts())
        False
    """
    kinds = {type(module) for module in model.modules()}
    if not all(_inherits(kind, method) for kind in kinds for method in _METHODS):
        return False
    return not any(vars(module).get(hooks) for module in model.modules() for hooks in _HOOKS)


def _inherits(kind: type, method: str) -> bool:
    """torch's own modules only know older forms of a state, which has been checked for."""
    return str(getattr(kind, method).__module__).startswith("torch.nn.modules.")
