"""Checks of models that hold for every strategy."""

from __future__ import annotations

import torch

from accel_callbacks.placeholder import placeholders

__all__ = ["is_dispatched", "is_on_several_devices", "is_plain", "refuse_empty"]

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
    """Return False if a module customizes how its state is saved or loaded.

    The state of a plain model can be read and written through its tensors alone.
    """
    kinds = {type(module) for module in model.modules()}
    methods = (getattr(kind, method) for kind in kinds for method in _METHODS)
    # torch's own modules override them only to convert older state dicts.
    if not all(str(method.__module__).startswith("torch.nn.modules.") for method in methods):
        return False
    registries = (vars(module).get(name) or {} for module in model.modules() for name in _HOOKS)
    hooks = (hook for registry in registries for hook in registry.values())
    return all(getattr(hook, "leaves_names", False) for hook in hooks)


def is_on_several_devices(model: torch.nn.Module) -> bool:
    """Return whether a ``device_map`` has put parts of the model on different devices."""
    maps = [getattr(module, "hf_device_map", None) for module in model.modules()]
    return any(len(set(places.values())) > 1 for places in maps if isinstance(places, dict))


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether a ``device_map`` has placed a model, which must not be moved then."""
    return is_on_several_devices(model) or any(placeholders(model))


def refuse_empty(model: torch.nn.Module) -> None:
    """Raise for parameters without values, unless a ``device_map`` brings them when needed."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and not is_dispatched(model):
        raise ValueError(
            f"{empty[0]!r} and {len(empty) - 1} more parameters of {type(model).__name__} are on "
            "the meta device and have no values: load the weights before prepare(), or use "
            "model.to_empty(device=...) and initialize them."
        )
