"""Fully sharded data parallelism: FSDP2, and HSDP over two axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_callbacks.distributed.topology import DistributedType, Topology
from accel_callbacks.modeling.compile import regions
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import AXES, ParallelismConfig
from accel_callbacks.strategies.base import SetUp, Strategy
from accel_callbacks.strategies.checks import is_plain

__all__ = ["FSDP"]


class FSDP(Strategy):
    """A strategy that shards parameters, gradients and optimizer states over the ranks.

    Args:
        topology: the rank and device of this process.
        handlers: options of other parts.
        parallelism: how the ranks are arranged; one shard on each if ``None``.
        options: what is sharded, and how.

    Example:
        >>> from accel_callbacks.strategies import FSDP
        >>> FSDP.has_gradient_sync
        True
    """

    name = "fsdp"
    has_gradient_sync = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
        options: FullyShardedDataParallelPlugin | None = None,
    ) -> None:
        if parallelism is None:
            parallelism = ParallelismConfig(
                dp_replicate_size=1,
                dp_shard_size=topology.world_size,
                tp_size=1,
                cp_size=1,
                sp_size=1,
            )
        super().__init__(topology, handlers, parallelism)
        self.options = options or FullyShardedDataParallelPlugin()
        self._plain: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        self._sharded = WeakIdKeyDictionary()  # the parameters in place of those of the user

    @property
    def distributed_type(self) -> DistributedType:
        """``DistributedType.FSDP``."""
        return DistributedType.FSDP

    @property
    def device_mesh(self) -> Any:
        """The named mesh of the ranks, None for one rank."""
        assert self.parallelism is not None
        return self.parallelism.build_device_mesh(self.topology.device.type)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model."""
        mesh = self.device_mesh
        if mesh is None:
            return model
        assert self.parallelism is not None
        from torch.distributed.fsdp import fully_shard

        mesh = mesh[tuple(self.parallelism.fsdp_dim_names)]
        before = dict(model.named_parameters(remove_duplicate=False))
        self._plain[model] = is_plain(model)
        for block in regions(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._sharded[before[name]] = parameter
        return model

    def setup(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
    ) -> SetUp:
        """Shard the models, and let the optimizers step with the shards."""
        done = super().setup(models, optimizers, schedulers)
        for optimizer in optimizers:
            self._bind(optimizer)
        return done

    def _bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters by their shards, in place."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._sharded.get(one, one) for one in group["params"]]

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether the model was plain before it was sharded."""
        return self._plain.get(model, False)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm over all shards, and return it as a plain tensor."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
