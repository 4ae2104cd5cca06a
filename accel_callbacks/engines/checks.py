"""Checks of models, and errors for those that an engine cannot train."""

from __future__ import annotations

import torch

from accel_callbacks.placeholder import placeholders
from accel_callbacks.strategy.checks import is_on_several_devices

__all__ = ["ignored_weights", "is_of_transformers", "refuse_distributed", "refuse_spread"]


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Return whether a module is a whole model of transformers."""
    # By name: a model of transformers is here only if the script has imported it.
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.startswith("transformers.")
        for base in type(module).__mro__
    )


def ignored_weights(model: torch.nn.Module, device: torch.device) -> list[str]:
    """Return the offloaded weights of a model, which each rank fetches for itself.

    Args:
        model: the model.
        device: of this rank, on which the rest of the model has to be.

    Raises:
        ValueError: one of them is trained, or the model runs on another device.
    """
    absent = dict(placeholders(model))
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
    if is_on_several_devices(model) and not any(placeholders(model)):
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
