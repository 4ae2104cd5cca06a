"""The states of replicas: what ranks keep equal."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks.strategy.state_access import StateAccess

__all__ = ["ReplicaStates"]


class ReplicaStates(StateAccess):
    """States of models that DDP wraps.

    Args:
        unwrap: as of the base class.
        rank: likewise.
        apart: the models that ranks train without averaging.
    """

    def __init__(
        self,
        unwrap: Callable[[torch.nn.Module], torch.nn.Module],
        rank: int,
        apart: Collection[torch.nn.Module],
    ) -> None:
        super().__init__(unwrap, rank)
        self._apart = apart

    def replicated_parameters(self, model: torch.nn.Module) -> set[str]:
        """Return the parameters that DDP broadcasts at first and averages from then on."""
        if not isinstance(model, DistributedDataParallel) or model in self._apart:
            return set()
        ignored = {
            id(parameter)
            for name, parameter in model.module.named_parameters(remove_duplicate=False)
            if name in model.parameters_to_ignore
        }
        named = self._unwrap(model).named_parameters(remove_duplicate=False)
        return {name for name, parameter in named if id(parameter) not in ignored}
