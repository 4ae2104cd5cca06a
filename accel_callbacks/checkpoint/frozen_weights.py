"""Fingerprints of frozen weights, which tell whether a checkpoint without them fits a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from accel_callbacks.errors import ResumeError, nearest

__all__ = ["check_same_model", "differing_weights", "fingerprints"]

_ELEMENTS = 1024  # of each tensor, evenly spaced: a fine-tuned or another model differs in most
_SHOWN = 3


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape, dtype and a hash over a sample of the elements of each tensor.

    Tensors that are sharded over ranks, or have no values, are left out. One copy from each device.

    Example:
        >>> import torch
        >>> from accel_callbacks.checkpoint.frozen_weights import fingerprints
        >>> shape, dtype, digest = fingerprints({"weight": torch.ones(2, 3)})["weight"]
        >>> shape, dtype, len(digest)
        ([2, 3], 'torch.float32', 16)
    """
    whole = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
        and not (tensor.is_meta or hasattr(tensor, "device_mesh"))
    }
    samples = {name: sample for name, one in whole.items() if (sample := _sample(one)) is not None}
    found = {}
    for name, data in _to_host(samples).items():
        digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        found[name] = [list(whole[name].shape), str(whole[name].dtype), digest]
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of some elements, on the device; None where they cannot be seen."""
    try:
        flat = tensor.reshape(-1)
        return flat[:: max(1, -(-flat.numel() // _ELEMENTS))].contiguous().view(torch.uint8)
    except (RuntimeError, NotImplementedError, TypeError):  # of quantized kinds of tensors
        return None


def _to_host(samples: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of all samples, with one copy a device."""
    devices: dict[torch.device, list[str]] = {}
    for name, sample in samples.items():
        devices.setdefault(sample.device, []).append(name)
    found: dict[str, bytes] = {}
    for names in devices.values():
        data = torch.cat([samples[name] for name in names]).cpu().numpy().tobytes()
        begin = 0
        for name in names:
            end = begin + samples[name].numel()
            found[name], begin = data[begin:end], end
    return found


def check_same_model(saved: Mapping[str, list[Any]], here: Mapping[str, Any]) -> None:
    """Raise if frozen weights of the checkpoint are not in the model, or have another shape.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        here: the weights of the model.

    Raises:
        ResumeError: it is another model.

    Example:
        >>> import torch
        >>> from accel_callbacks.checkpoint.frozen_weights import check_same_model, fingerprints
        >>> saved = fingerprints({"weight": torch.ones(2)})
        >>> check_same_model(saved, {"weight": torch.ones(3)})
        Traceback (most recent call last):
        accel_callbacks.errors.ResumeError: the checkpoint was saved without frozen weights, over \
another model: 'weight' had shape (2,) and has (3,) here. Build the model that the run was \
started with.
    """
    start = "the checkpoint was saved without frozen weights, over another model: "
    end = " Build the model that the run was started with."
    for name, (shape, _, _) in saved.items():
        if name not in here:
            raise ResumeError(f"{start}{name!r} is not in this one.{nearest(name, here)}{end}")
        if tuple(here[name].shape) != tuple(shape):
            now = tuple(here[name].shape)
            raise ResumeError(f"{start}{name!r} had shape {tuple(shape)} and has {now} here.{end}")


def differing_weights(saved: Mapping[str, list[Any]], here: Mapping[str, Any]) -> str:
    """Describe frozen weights whose values are not those of the save; empty if there are none.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        here: the weights of the model.

    Example:
        >>> import torch
        >>> from accel_callbacks.checkpoint.frozen_weights import differing_weights, fingerprints
        >>> saved = fingerprints({"weight": torch.ones(2), "bias": torch.ones(1)})
        >>> differing_weights(saved, {"weight": torch.zeros(2), "bias": torch.ones(1)})
        "1 of 2 frozen weights differ ('weight')"
    """
    now = fingerprints({name: here[name] for name in saved if name in here})
    changed = [name for name, mark in now.items() if mark != list(saved[name])]
    if not changed:
        return ""
    shown = ", ".join(map(repr, changed[:_SHOWN])) + (", ..." if len(changed) > _SHOWN else "")
    return f"{len(changed)} of {len(saved)} frozen weights differ ({shown})"
