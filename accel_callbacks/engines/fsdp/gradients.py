"""Gradients under FSDP2: reduced and sharded in backward, or held back until a window ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from accel_callbacks import collectives
from accel_callbacks.engines.fsdp.groups import (
    drop_held,
    has_held,
    parameter_groups,
    reduce_held,
    reducing,
)
from accel_callbacks.engines.fsdp.sharded_calls import explain_backward
from accel_callbacks.engines.fsdp.unit_agreement import UnitAgreement
from accel_callbacks.engines.sharded_gradients import ShardedGradients
from accel_callbacks.gradients import has_gradients, local_part, parameters_of
from accel_callbacks.strategy.data_ranks import DataRanks

__all__ = ["FSDPGradients"]


class FSDPGradients(ShardedGradients):
    """Gradients of models that FSDP2 shards.

    Args:
        models: as of the base class.
        shard_of: likewise.
        data: likewise.
        plainer: likewise.
        holds_whole: ranks keep whole gradients of their own until the last backward of a window,
            in place of reducing and sharding them in each.
        fills: parameters that a rank has not used count as zeros.
    """

    def __init__(
        self,
        models: Callable[[], list[torch.nn.Module]],
        shard_of: Callable[[Any], Any],
        data: DataRanks,
        plainer: str,
        *,
        holds_whole: bool,
        fills: bool,
    ) -> None:
        super().__init__(models, shard_of, data, plainer)
        self._holds_whole = holds_whole
        self._units = UnitAgreement(fills=fills)
        # By model: FSDP's groups, which refer to the model and must not keep it; and parameters
        # that are not sharded.
        self._groups: WeakKeyDictionary[torch.nn.Module, list[ref[Any]]] = WeakKeyDictionary()
        self._whole: WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]] = (
            WeakKeyDictionary()
        )
        # Gradients where the optimizer does not see them. Until then zero_grad looks into no group.
        self._may_hold = False

    def watch(self, model: torch.nn.Module) -> None:
        """Follow the gradients of a sharded model from now on."""
        self._groups[model] = list(map(ref, parameter_groups(model)))
        self._units.watch(model)
        self.watch_inputs(model)

    def average_whole(
        self, model: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Average gradients of parameters that FSDP does not shard, as it does with the others."""
        self._whole[model] = list(parameters)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients; average those of parameters that are not sharded."""
        for groups in self._groups.values():
            for group in groups:
                _admit_unfrozen(group())
        try:
            super().backward(loss, **kwargs)
        except RuntimeError as error:
            explain_backward(error)
            raise
        self._units.finish_backward()
        for model, whole in self._whole.items():
            # FSDP reduces none of these. In no_sync, where it reduces no others either, they stay
            # on their rank too.
            trained = [parameter for parameter in whole if parameter.requires_grad]
            if trained and all(group.reduce_grads for group in parameter_groups(model)):
                _average(trained, self._data.copies, self._replica_mesh)

    @property
    def _replica_mesh(self) -> Any:
        """The mesh of ranks that have different losses: of other data, or of other tokens."""
        parallelism = self._data.parallelism
        assert parallelism is not None
        return parallelism.get_submesh(parallelism.fsdp_dim_names, self._data.mesh.device_type)

    def no_sync(
        self, model: torch.nn.Module, *, in_window: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which each rank keeps whole gradients of its own.

        In a window, unless the options say otherwise, gradients are reduced and sharded each time,
        so that no rank holds whole ones; replicas exchange theirs at the end of the window only.
        """
        parallelism = self._data.parallelism
        assert parallelism is not None
        shards_each = in_window and not self._holds_whole
        is_sharded = hasattr(model, "_get_fsdp_state")
        if shards_each and not (parallelism.dp_replicate_enabled and is_sharded):
            return nullcontext()
        self._may_hold = True
        # None leaves it on: each rank has its shard of the sum over a replica, and FSDP adds these
        # up until the replicas exchange them.
        return reducing(model, scatter=None if shards_each else False, all_reduce=False)

    def trigger_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward reduces gradients."""
        return reducing(model, scatter=True, all_reduce=True)

    def reduce_gradients(self) -> None:
        """Collective: bring the gradients that FSDP holds back into ``parameter.grad``."""
        reduce_held(self._models())

    def has_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether there are gradients to step with, those held back by FSDP included."""
        return has_gradients(optimizer) or has_held(self._models(), _ids(optimizer))

    def drop_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients that FSDP holds back until the end of a window."""
        if self._may_hold:
            drop_held(self._models(), _ids(optimizer))


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return set(map(id, parameters_of([optimizer])))


def _admit_unfrozen(group: Any) -> None:
    """Let FSDP reduce gradients of a group that was all frozen at its first forward."""
    if getattr(group, "_orig_dtype", 0) is None and any(
        parameter.sharded_param.requires_grad for parameter in group.fsdp_params
    ):
        group._init_mp_dtypes()


@torch.no_grad()
def _average(parameters: Sequence[torch.nn.Parameter], copies: int, mesh: Any) -> None:
    """Collective: average gradients over data; a missing one is 0, unless it is so on all ranks.

    The average of an average is itself, so this may run after each backward of a window.

    Args:
        parameters: whole on all ranks, or cut by tensor parallelism.
        copies: number of ranks that read the same data.
        mesh: the dimensions whose ranks have different losses: of other data, or other tokens.
    """
    for parameter in parameters:
        part = local_part(parameter)
        gradient = parameter.grad
        if gradient is not None and any(
            placement.is_partial() for placement in getattr(gradient, "placements", ())
        ):
            gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        local_gradient = torch.zeros_like(part) if gradient is None else local_part(gradient)
        flat = torch.cat(
            [local_gradient.flatten(), local_gradient.new_tensor([gradient is not None])]
        )
        if copies == 1:
            dist.all_reduce(flat, group=collectives.group_for(flat))
        else:
            for dimension in range(mesh.ndim):
                dist.all_reduce(flat, group=mesh.get_group(dimension))
        if flat[-1] == 0:
            continue
        mean = (flat[:-1] / mesh.size()).view_as(part)
        if gradient is None:
            parameter.grad = torch.zeros_like(parameter)
        elif gradient is not parameter.grad:
            parameter.grad = gradient
        assert parameter.grad is not None
        local_part(parameter.grad).copy_(mean)
