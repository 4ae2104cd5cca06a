"""Gradients of a pipeline, of which each rank has those of its own stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from accel_callbacks.engines.sharded_gradients import ShardedGradients
from accel_callbacks.gradients import combined_norm, parameters_of, scale_gradients, total_norm

__all__ = ["StageGradients"]


class StageGradients(ShardedGradients):
    """Gradients of models that are cut into stages.

    Args:
        models: as of the base class.
        shard_of: likewise.
        data: likewise.
        plainer: likewise.
    """

    @property
    def _group(self) -> Any:
        """The ranks that have the stages of a replica."""
        return self._data.mesh["pp"].get_group()

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer holds no parameter of a pipeline, and no gradient."""
        optimizer_ids = set(map(id, parameters_of([optimizer])))
        known = {id(p) for model in self._models() for p in model.parameters()}
        if not optimizer_ids & known:
            super().check_step(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm over all stages."""
        parameters = [self._shard_of(parameter) for parameter in parameters]
        of_stages = {id(p) for model in self._models() for p in model.parameters()}
        stage_parameters = [parameter for parameter in parameters if id(parameter) in of_stages]
        rest = [parameter for parameter in parameters if id(parameter) not in of_stages]
        norm = self._over_stages(total_norm(stage_parameters, norm_type), norm_type)
        if rest:  # the same on all stages
            norm = combined_norm([norm, total_norm(rest, norm_type)], norm_type)
        scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        # Of one number on the device, which no rank waits for.
        local = norm.to(self._data.device).contiguous()
        norms = [torch.empty_like(local) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(norms, local, group=self._group)
        return combined_norm(norms, norm_type)

    def join_norms(
        self, norms: Mapping[str, torch.Tensor], norm_type: float
    ) -> dict[str, torch.Tensor]:
        """Collective: return norms of the gradients of all stages; of one name, the total."""
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        local_norms = {name: float(norm) for name, norm in norms.items()}
        dist.all_gather_object(gathered, local_norms, group=self._group)
        parts: dict[str, list[torch.Tensor]] = {}
        for stage_norms in gathered:
            for name, norm in stage_norms.items():
                parts.setdefault(name, []).append(torch.tensor(norm, device=self._data.device))
        return {name: combined_norm(several, norm_type) for name, several in parts.items()}
