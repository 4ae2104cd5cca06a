"""Evaluate a model in the middle of training without side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from accel_callbacks.distributed.rng import capture_rng, devices_of, restore_rng

__all__ = ["undisturbed_eval"]


@contextmanager
def undisturbed_eval(models: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Context manager: eval mode and no gradients; restore modes and random generators after it.

    Args:
        models: those that the block may call.
        device: its generator is restored, as are those of the host and of the models' devices.
    """
    device = torch.device("cpu") if device.type == "meta" else device
    devices = devices_of(models)
    rng = capture_rng(device, devices)
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        restore_rng(rng, device, devices)
