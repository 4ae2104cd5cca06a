"""Fully sharded data parallelism: FSDP2, and HSDP over two axes of the mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_callbacks.distributed.topology import DistributedType, Topology
from accel_callbacks.modeling.activation_checkpointing import checkpoint_with
from accel_callbacks.modeling.compile import regions
from accel_callbacks.modeling.empty_weights import init_empty_weights
from accel_callbacks.modeling.from_pretrained import weights_on_rank_0
from accel_callbacks.modeling.initial_weights import InitialWeights, whole_parameters_freed
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.fsdp import FullyShardedDataParallelPlugin
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategies.base import SetUp, Strategy
from accel_callbacks.strategies.checks import is_on_several_devices, is_plain, refuse_spread

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

    def check(self, model: torch.nn.Module) -> None:
        """Accept a model without weights, which are filled after it is sharded."""
        if self.topology.world_size > 1:
            refuse_spread(model)

    def init_context(self) -> AbstractContextManager[None]:
        """Return ``init_empty_weights()``."""
        return init_empty_weights()

    def pretrained_context(self) -> AbstractContextManager[None]:
        """Return a context in which rank 0 alone loads weights, to send them when sharding."""
        if self.topology.world_size == 1 or self.options.cpu_ram_efficient_loading is False:
            return nullcontext()
        return weights_on_rank_0(self.topology.rank)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Leave the model where it is: nowhere is all of it on one device."""
        return model

    def checkpoint_activations(self, model: torch.nn.Module) -> None:
        """Apply ``activation_checkpointing`` of the options."""
        checkpoint_with(self.options.activation_checkpointing, model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the model."""
        weights = InitialWeights(
            model,
            torch.device("cpu") if self.options.cpu_offload else self.topology.device,
            sync=self.options.sync_module_states is not False,
            param_init_fn=self.options.param_init_fn,
        )
        mesh = self.device_mesh
        if mesh is None:
            if is_on_several_devices(model):  # its parts come when they are needed
                return model
            weights.fill()
            return model.to(self.topology.device)
        assert self.parallelism is not None
        from torch.distributed.fsdp import fully_shard

        mesh = mesh[tuple(self.parallelism.fsdp_dim_names)]
        before = dict(model.named_parameters(remove_duplicate=False))
        self._plain[model] = is_plain(model)
        for unit in (*regions(model), model):
            with whole_parameters_freed(unit):
                fully_shard(unit, mesh=mesh)
        weights.fill()
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
            sharded: Any = self._sharded
            group["params"][:] = [sharded.get(one, one) for one in group["params"]]

    def loads_in_place(self, model: torch.nn.Module) -> bool:
        """Return whether the model was plain before it was sharded."""
        return self._plain.get(model, False)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip by the total norm over all shards, and return it as a plain tensor."""
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
