"""``trainer.strategy``: what Lightning's callbacks ask of the other processes and of storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.callbacks.adapters.missing import Part
from accel_callbacks.callbacks.adapters.removal import remove_saved

if TYPE_CHECKING:
    from accel_callbacks.integrations.lightning.trainer import TrainerFacade

__all__ = ["StrategyFacade"]


class StrategyFacade(Part):
    """The run's processes, device and checkpoints, with the names of Lightning's Strategy."""

    _trainer: TrainerFacade

    @property
    def root_device(self) -> torch.device:
        """Where this process computes."""
        return self._trainer.accel_run.accelerator.device

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return collectives.world_size()

    @property
    def global_rank(self) -> int:
        """Index of this process."""
        return collectives.rank()

    @property
    def is_global_zero(self) -> bool:
        """True on the main process."""
        return collectives.rank() == 0

    @property
    def model(self) -> Any:
        """The prepared model, with its wrapper."""
        return next(iter(self._trainer.accel_run.accelerator.models), None)

    @property
    def lightning_module(self) -> Any:
        """The facade of the user's model."""
        return self._trainer.lightning_module

    @property
    def optimizers(self) -> list[Any]:
        """The user's optimizers."""
        return self._trainer.optimizers

    @property
    def precision_plugin(self) -> Any:
        """What says which type is computed in."""
        return self._trainer.precision_plugin

    @property
    def accelerator(self) -> Any:
        """Lightning's object for this kind of device."""
        return self._trainer.accelerator

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        collectives.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What one process has, on all."""
        return collectives.broadcast_object(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes say yes, or with ``all=False`` any."""
        decision = bool(decision)
        if collectives.world_size() == 1:
            return decision
        return (
            not collectives.any_process(not decision)
            if all
            else (collectives.any_process(decision))
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Mean or sum over the processes."""
        name = "mean" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        return collectives.reduce(tensor, "mean" if name in ("mean", "avg") else name)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Tensors of all processes along a new first dimension."""
        if collectives.world_size() == 1:
            return tensor
        return collectives.map_tensors(tensor, lambda one: collectives.gather(one[None]))

    def remove_checkpoint(self, filepath: str) -> None:
        """Remove what ``trainer.save_checkpoint`` wrote in this run, on the main process."""
        if self.is_global_zero:
            remove_saved(str(filepath), self._trainer.accel_run.run_id)
