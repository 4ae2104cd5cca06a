"""Strategies, one per file; a new one is added to the registry here."""

from __future__ import annotations

from accel_callbacks.distributed.topology import DistributedType, Topology
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.strategies.base import Strategy
from accel_callbacks.strategies.ddp import DDP
from accel_callbacks.strategies.single_device import SingleDevice

__all__ = ["DDP", "SingleDevice", "Strategy", "create_strategy"]

_REGISTRY: dict[DistributedType, type[Strategy]] = {
    DistributedType.NO: SingleDevice,
    DistributedType.MULTI_CPU: DDP,
    DistributedType.MULTI_GPU: DDP,
}


def create_strategy(topology: Topology, handlers: Handlers | None = None) -> Strategy:
    """Return the strategy for this topology, with these options.

    Example:
        >>> import torch
        >>> from accel_callbacks import Topology
        >>> from accel_callbacks.strategies import create_strategy
        >>> create_strategy(Topology(torch.device("cpu"), world_size=2)).name
        'ddp'
    """
    return _REGISTRY[topology.distributed_type](topology, handlers)
