"""Checks of models, and errors for those that a strategy cannot train."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from accel_callbacks.models.offload.placeholder import AbsentWeight

__all__ = [
    "is_dispatched",
    "is_of_transformers",
    "is_on_several_devices",
    "is_plain",
    "refuse_distributed",
    "refuse_empty",
    "refuse_spread",
]

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


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Return whether a module is a whole model of transformers."""
    # By name: a model of transformers is here only if the script has imported it.
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
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
    return is_on_several_devices(model) or any(_absent(model))


def _absent(model: torch.nn.Module) -> Iterator[tuple[str, AbsentWeight]]:
    """Yield the tensors that are fetched while their module runs."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return ((name, tensor) for name, tensor in named if isinstance(tensor, AbsentWeight))


def refuse_empty(model: torch.nn.Module) -> None:
    """Raise for parameters without values, unless a ``device_map`` brings them when needed."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty and not is_dispatched(model):
        raise ValueError(
            f"{empty[0]!r} and {len(empty) - 1} more parameters of {type(model).__name__} are on "
            "the meta device and have no values: load the weights before prepare(), or use "
            "model.to_empty(device=...) and initialize them."
        )


def ignored_weights(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Return the offloaded weights of a model, which each rank fetches for itself.

    Args:
        model: the model.
        device: of this rank, on which the rest of the model has to be.

    Raises:
        ValueError: one of them is trained, or the model runs on another device.
    """
    absent = dict(_absent(model))
    if not absent:
        return []
    kind = type(model).__name__
    for name, weight in absent.items():
        if weight.requires_grad:
            raise ValueError(
                f"{name!r} of {kind} is offloaded and requires a gradient, which would be lost: "
                "freeze the offloaded weights with requires_grad_(False) before prepare()."
            )
    for name, parameter in model.named_parameters():
        if name not in absent and parameter.device != device:
            raise ValueError(
                f"{name!r} of {kind} is on {parameter.device} and this rank's device is {device}: "
                "dispatch the model with that device in the device_map, such as accel.device."
            )
    return list(absent)


def refuse_spread(model: torch.nn.Module) -> None:
    """Raise for a model on several devices, of which each process would need all.

    A part that is offloaded is on none: each process fetches it for itself.
    """
    if is_on_several_devices(model) and not any(_absent(model)):
        raise ValueError(
            f"{type(model).__name__} was loaded with a device_map over several devices, which "
            "cannot be trained by several processes: run it on one process, or load it with "
            "device_map={'': accel.device}."
        )


def refuse_distributed(model: torch.nn.Module) -> None:
    """Raise for parameters that are already split over processes."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):  # a DTensor, without importing torch's module of it
            raise ValueError(
                f"{name!r} is a DTensor, split over processes already, and data parallelism needs "
                "a whole replica on each: pass the model before it is parallelized, or call its "
                "full_tensor() first. It can be used without prepare()."
            )
