"""PartialState and AcceleratorState: handles over the topology, under their well-known names."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from accel_callbacks.config import AcceleratorConfig, resolve_config
from accel_callbacks.process import ProcessControl
from accel_callbacks.state import DistributedType, resolve_topology

__all__ = ["AcceleratorState", "PartialState"]


class PartialState(ProcessControl):
    """Where this process stands, without an Accelerator; for inference and data preparation.

    Any number of handles may be made: all look at the same facts.

    Args:
        cpu: compute on the CPU even where an accelerator is there; what ``accel launch`` said
            where ``None``.
        timeout: how long a collective waits; torch's default if ``None``.

    Example:
        >>> from accel_callbacks import PartialState
        >>> state = PartialState(cpu=True)
        >>> state.num_processes, state.is_main_process
        (1, True)
    """

    def __init__(self, cpu: bool | None = None, *, timeout: timedelta | None = None) -> None:
        self._config = resolve_config({"cpu": cpu}, os.environ)
        self.topology = resolve_topology(cpu=self._config.cpu, timeout=timeout)

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        return self.topology.device

    @property
    def backend(self) -> str | None:
        """The torch.distributed backend, ``None`` for one process."""
        return self.topology.backend

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of run."""
        return self.topology.distributed_type

    def __repr__(self) -> str:
        here = self.topology
        return f"{type(self).__name__}(rank={here.rank}/{here.world_size}, device={here.device})"


class AcceleratorState(PartialState):
    """A :class:`PartialState` that also knows the options given by the launcher.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``; the launcher's where ``None``.
        cpu: as for :class:`PartialState`.

    Example:
        >>> from accel_callbacks import AcceleratorState
        >>> AcceleratorState("bf16", cpu=True).mixed_precision
        'bf16'
    """

    def __init__(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        super().__init__(cpu)
        explicit = {"mixed_precision": mixed_precision, "cpu": cpu}
        self._config = resolve_config(explicit, os.environ)

    @property
    def config(self) -> AcceleratorConfig:
        """The resolved options."""
        return self._config

    @property
    def mixed_precision(self) -> str:
        """The precision asked for."""
        return self._config.mixed_precision
