"""The error message for an option that the Accelerator does not have."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from accel_callbacks import plugins
from accel_callbacks.errors import nearest

__all__ = ["unknown_option"]

_STRATEGIES = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
    "torch_tp_plugin",
)


def unknown_option(name: str, owner: type[Any]) -> str:
    """Return one line with what to pass instead of this argument of a constructor.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.plugins.unknown import unknown_option
        >>> unknown_option("mixed_precison", Accelerator)
        "Accelerator() has no option 'mixed_precison'. Did you mean 'mixed_precision'?"
    """
    text = f"{owner.__name__}() has no option {name!r}."
    if name in _STRATEGIES:
        return f"{text} This version trains with data parallelism, in which it has no place."
    for argument, part in _parts():
        if name in (field.name for field in fields(part)):
            return f"{text} Give {argument.format(f'{part.__name__}({name}=...)')}."
    return text + nearest(name, inspect.signature(owner).parameters)


def _parts() -> list[tuple[str, type[Any]]]:
    """Return the arguments that take the options of one part, with the class of the options."""
    from accel_callbacks.checkpoint.project import ProjectConfiguration
    from accel_callbacks.data.config import DataLoaderConfiguration

    own = [
        ("dataloader_config={}", DataLoaderConfiguration),
        ("project_config={}", ProjectConfiguration),
        ("gradient_accumulation_plugin={}", plugins.GradientAccumulationPlugin),
        ("dynamo_plugin={}", plugins.TorchDynamoPlugin),
    ]
    handlers = (plugins.DistributedDataParallelKwargs, plugins.GradScalerKwargs)
    return own + [("kwargs_handlers=[{}]", handler) for handler in handlers]
