"""The states of sharded models, and whole parameters for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from accel_callbacks import collectives
from accel_callbacks.collectives.sharded import refuse_on_subset
from accel_callbacks.strategy.checks import is_plain
from accel_callbacks.strategy.state_access import StateAccess, reshard

__all__ = ["ShardedStates"]


class ShardedStates(StateAccess):
    """States of models with shards in place of the parameters that the user built.

    Args:
        unwrap: as of the base class.
        rank: likewise.
        plain: whether each model had a plain state before its parameters were replaced.
    """

    def __init__(
        self,
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        rank: int,
        plain: Mapping[torch.nn.Module, bool],
    ) -> None:
        super().__init__(unwrap, rank)
        self._plain = plain

    def full_parameters(
        self, module: torch.nn.Module, *, writeback: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which each rank has whole parameters."""
        refuse_on_subset("full_parameters")
        return _whole_parameters(module, writeback=writeback)

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether the model was plain before its parameters were replaced."""
        return self._plain.get(model, is_plain(model))


@contextmanager
def _whole_parameters(module: torch.nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Context manager, collective: have whole parameters in a sharded module.

    Each rank holds all of them, in the dtype of the shards. The module cannot be called inside.

    Args:
        module: a sharded model or a part of it; one that is not sharded is left as it is.
        writeback: keep what rank 0 has changed; off by default.
    """
    # A forward may have left whole parameters in place of the shards.
    reshard(module)
    slots = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and collectives.is_sharded(parameter)
    ]
    # One for each shard, so that tied weights stay tied; in the same order on all ranks.
    whole: dict[int, torch.nn.Parameter] = {}
    for _, _, shard in slots:
        if id(shard) not in whole:
            gathered = _gather(shard)
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
def _gather(shard: Any) -> torch.Tensor:
    mesh = shard.device_mesh
    on_device = shard.detach()
    # Offloaded shards are on the host, where the mesh may have no backend.
    if on_device.device.type != mesh.device_type:
        on_device = on_device.to(mesh.device_type)
    gathered: torch.Tensor = on_device.full_tensor()
    # Where the mesh has one rank, it is the shard itself, which must not change with it.
    return gathered.clone() if gathered.data_ptr() == on_device.to_local().data_ptr() else gathered


@torch.no_grad()
def _write_back(slots: list[tuple[Any, str, Any]], whole: dict[int, torch.nn.Parameter]) -> None:
    written: set[int] = set()
    for _, _, shard in slots:
        if id(shard) not in written:
            written.add(id(shard))
            changed = collectives.broadcast(whole[id(shard)].detach())
            collectives.copy_part(shard, changed)
