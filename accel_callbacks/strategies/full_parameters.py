"""Whole parameters in place of their shards, to be read or changed by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accel_callbacks.collectives import broadcast, copy_part, is_sharded
from accel_callbacks.strategies.fsdp_groups import reshard

__all__ = ["full_parameters"]


@contextmanager
def full_parameters(module: torch.nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Context manager, collective: have whole parameters in a sharded module.

    Each rank holds all of them, in the dtype of the shards. The module cannot be called inside.

    Args:
        module: a sharded model or a part of it; one that is not sharded is left as it is.
        writeback: keep what rank 0 has changed; off by default.
    """
    reshard(module)
    slots = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and is_sharded(parameter)
    ]
    whole: dict[int, torch.nn.Parameter] = {}
    for _, _, shard in slots:
        if id(shard) not in whole:
            gathered = _gathered(shard)
            whole[id(shard)] = torch.nn.Parameter(gathered, requires_grad=shard.requires_grad)
    try:
        for owner, name, shard in slots:
            owner._parameters[name] = whole[id(shard)]
        yield
        if writeback:
            _write_back(slots, whole)
    finally:
        for owner, name, shard in slots:
            owner._parameters[name] = shard


@torch.no_grad()
def _gathered(shard: Any) -> torch.Tensor:
    mesh = shard.device_mesh
    on_device = shard.detach()
    # Offloaded shards are on the host, where the mesh may have no backend.
    if on_device.device.type != mesh.device_type:
        on_device = on_device.to(mesh.device_type)
    gathered: torch.Tensor = on_device.full_tensor()
    return gathered.clone() if gathered.data_ptr() == on_device.to_local().data_ptr() else gathered


@torch.no_grad()
def _write_back(slots: list[tuple[Any, str, Any]], whole: dict[int, torch.nn.Parameter]) -> None:
    written: set[int] = set()
    for _, _, shard in slots:
        if id(shard) not in written:
            written.add(id(shard))
            copy_part(shard, broadcast(whole[id(shard)].detach()))
