"""Fingerprints of frozen weights, which tell whether a checkpoint without them fits a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.errors import ResumeError, nearest

__all__ = ["check_same_model", "differing_weights", "fingerprints"]

_ELEMENTS = 1024  # of each tensor, evenly spaced: a fine-tuned or another model differs in most
_SHOWN = 3
_UNSEEN = (RuntimeError, NotImplementedError, TypeError)  # of quantized kinds of tensors


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return shape, dtype and a hash over a sample of the elements of each tensor.

    Tensors without values are left out. One copy from each device. Collective if some are sharded
    (then they must be so on all ranks): the samples are gathered, in one all-reduce, and never a
    tensor, so that the fingerprint is that of the whole tensor.
    """
    present = {
        name: tensor.detach()
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta
    }
    sharded = {name: tensor for name, tensor in present.items() if collectives.is_sharded(tensor)}
    samples = {name: _sample(tensor) for name, tensor in present.items() if name not in sharded}
    data = _to_host({name: sample for name, sample in samples.items() if sample is not None})
    if sharded:
        data |= _gather_samples(sharded)
    return {
        name: [
            list(tensor.shape),
            str(tensor.dtype),
            hashlib.blake2b(data[name], digest_size=8).hexdigest(),
        ]
        for name, tensor in present.items()
        if name in data
    }


def _step(tensor: torch.Tensor) -> int:
    """Return the distance between two elements of a sample, in elements of the whole tensor."""
    return max(1, -(-tensor.numel() // _ELEMENTS))


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of some elements, on the device; None where they cannot be seen."""
    try:
        return tensor.reshape(-1)[:: _step(tensor)].contiguous().view(torch.uint8)
    except _UNSEEN:
        return None


class _Part(NamedTuple):
    """The bytes of the elements of a sample that this rank holds, and their places in it."""

    places: np.ndarray[Any, np.dtype[np.int64]]
    data: torch.Tensor


def _part_of_sample(name: str, tensor: torch.Tensor) -> _Part | None:
    """Return the part of the sample of a sharded tensor; None where it cannot be seen."""
    # Imported here, because a training without sharded weights does not need it.
    from checkpoint_io.sharding import local_boxes, local_of

    shape = tuple(tensor.shape)
    flat = np.arange(0, tensor.numel(), _step(tensor))
    at = np.stack(np.unravel_index(flat, shape)) if shape else np.zeros((0, 1), np.int64)
    try:
        places, indices = [], []
        for box in local_boxes(tensor, repr(name)):
            low = np.array(box.offsets, np.int64).reshape(-1, 1)
            length = np.array(box.shape, np.int64).reshape(-1, 1)
            held = np.flatnonzero(((at >= low) & (at < low + length)).all(axis=0))
            places.append(held)
            indices.append(at[:, held] - low + np.array(box.local_offsets).reshape(-1, 1))
        local = local_of(tensor)
        if not places or not shape:
            return _Part(np.arange(len(places)), local.reshape(-1)[: len(places)].view(torch.uint8))
        chosen = torch.from_numpy(np.concatenate(indices, axis=1)).to(local.device)
        return _Part(np.concatenate(places), local[tuple(chosen)].view(torch.uint8))
    except _UNSEEN:  # UnsupportedStateError is a TypeError
        return None


def _gather_samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Collective: return the samples of sharded tensors, whole on each rank.

    One that a rank cannot see is left out on all.
    """
    parts = {name: _part_of_sample(name, tensor) for name, tensor in tensors.items()}
    local_data = _to_host({name: part.data for name, part in parts.items() if part is not None})
    counts = {name: -(-tensor.numel() // _step(tensor)) for name, tensor in tensors.items()}
    sizes = {name: counts[name] * tensor.dtype.itemsize for name, tensor in tensors.items()}
    # Each sample after a byte that says that a rank cannot see it. Elsewhere zeros, so that the
    # maximum over the ranks is what those have that hold it: one, or several replicas.
    buffer = np.zeros(sum(sizes.values()) + len(sizes), np.uint8)
    slots, begin = {}, 0
    for name, part in parts.items():
        slots[name] = slice(begin + 1, end := begin + 1 + sizes[name])
        if part is None:
            buffer[begin] = 1
        elif len(part.places):
            rows = buffer[slots[name]].reshape(counts[name], -1)
            held = np.frombuffer(local_data[name], np.uint8)
            rows[part.places] = held.reshape(len(part.places), -1)
        begin = end
    whole = _maximum(torch.from_numpy(buffer)).numpy()
    return {name: whole[at].tobytes() for name, at in slots.items() if not whole[at.start - 1]}


@collectives.explained("the comparison of frozen weights")
def _maximum(data: torch.Tensor) -> torch.Tensor:
    """Collective: return the element-wise maximum over the ranks, on the CPU."""
    collectives.begin("the comparison of frozen weights", size=len(data))
    if collectives.world_size() > 1:
        data = collectives.on_backend(data)
        dist.all_reduce(data, dist.ReduceOp.MAX, group=collectives.group_for(data))
    return data.cpu()


def _to_host(samples: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of all samples, with one copy a device."""
    devices: dict[torch.device, list[str]] = {}
    for name, sample in samples.items():
        devices.setdefault(sample.device, []).append(name)
    data_of: dict[str, bytes] = {}
    for names in devices.values():
        data = torch.cat([samples[name] for name in names]).cpu().numpy().tobytes()
        begin = 0
        for name in names:
            end = begin + samples[name].numel()
            data_of[name], begin = data[begin:end], end
    return data_of


def check_same_model(saved: Mapping[str, list[Any]], weights: Mapping[str, Any]) -> None:
    """Raise if frozen weights of the checkpoint are not in the model, or have another shape.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        weights: of the model.

    Raises:
        ResumeError: it is another model.
    """
    start = "the checkpoint was saved without frozen weights, over another model: "
    end = " Build the model that the run was started with."
    for name, (shape, _, _) in saved.items():
        if name not in weights:
            raise ResumeError(f"{start}{name!r} is not in this one.{nearest(name, weights)}{end}")
        if tuple(weights[name].shape) != tuple(shape):
            now = tuple(weights[name].shape)
            raise ResumeError(f"{start}{name!r} had shape {tuple(shape)} and has {now} here.{end}")


def differing_weights(saved: Mapping[str, list[Any]], weights: Mapping[str, Any]) -> str:
    """Describe frozen weights whose values are not those of the save; empty if there are none.

    Collective if some are sharded.

    Args:
        saved: the fingerprints in the checkpoint, by name.
        weights: of the model.
    """
    now = fingerprints({name: weights[name] for name in saved if name in weights})
    changed = [name for name, mark in now.items() if mark != list(saved[name])]
    if not changed:
        return ""
    shown = ", ".join(map(repr, changed[:_SHOWN])) + (", ..." if len(changed) > _SHOWN else "")
    return f"{len(changed)} of {len(saved)} frozen weights differ ({shown})"
