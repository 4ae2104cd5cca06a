"""DistributedDataParallel around each model: a replica on each rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from accel_callbacks import collectives
from accel_callbacks.distributed.topology import Topology
from accel_callbacks.engines.checks import ignored_weights, refuse_distributed, refuse_spread
from accel_callbacks.engines.ddp.forward_methods import (
    DistributedDataParallel as PreparedDDP,
)
from accel_callbacks.engines.ddp.gradients import AveragedGradients
from accel_callbacks.engines.shared_buffers import SharedBuffers
from accel_callbacks.plugins.base import Handlers
from accel_callbacks.plugins.ddp import DDPCommunicationHookType as Hook
from accel_callbacks.plugins.ddp import DistributedDataParallelKwargs
from accel_callbacks.plugins.parallelism import ParallelismConfig
from accel_callbacks.strategy.base import Strategy

if TYPE_CHECKING:
    from accel_callbacks.engines.ddp.states import ReplicaStates

__all__ = ["DDP"]


class DDP(Strategy):
    """A strategy that wraps each model with trainable parameters in DistributedDataParallel.

    Args:
        topology: the rank and device of this process.
        handlers: for their :class:`accel_callbacks.DistributedDataParallelKwargs`.
        parallelism: how the ranks are arranged.

    Example:
        >>> from accel_callbacks.engines import DDP
        >>> DDP.has_gradient_sync
        True
    """

    name = "ddp"
    has_gradient_sync = True

    def __init__(
        self,
        topology: Topology,
        handlers: Handlers | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> None:
        super().__init__(topology, handlers, parallelism)
        default = DistributedDataParallelKwargs()
        self.options = self.handlers.get(DistributedDataParallelKwargs, default)

    @cached_property
    def gradients(self) -> AveragedGradients:
        """The gradients of replicas."""
        return AveragedGradients(self.options, self.topology.device)

    @cached_property
    def states(self) -> ReplicaStates:
        """The states of replicas."""
        from accel_callbacks.engines.ddp.states import ReplicaStates

        return ReplicaStates(self.unwrap, self.topology.rank, self.gradients.apart)

    def check(self, model: torch.nn.Module, num_steps: int = 1) -> None:
        """Refuse models that are distributed already, and windows with a static graph.

        torch learns the graph in a first backward that averages.
        """
        super().check(model, num_steps)
        if self.options.static_graph and num_steps > 1:
            raise ValueError(
                "DistributedDataParallelKwargs(static_graph=True) does not work with a gradient "
                f"window of {num_steps} micro-batches, of whose backward passes torch averages the "
                "last alone: leave static_graph out, or average after each one with "
                f"GradientAccumulationPlugin(num_steps={num_steps}, sync_each_batch=True)."
            )
        refuse_spread(model)
        refuse_distributed(model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model unless all of it is frozen."""
        frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
        if len(frozen) == sum(1 for _ in model.parameters()):
            return model
        self._refuse_other_ranks()  # which the constructor below would wait for
        ignored = set(ignored_weights(model, self.topology.device))
        if ignored:  # neither sent at the start nor averaged
            known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
            # As DDP's _set_params_and_buffers_to_ignore_for_model does.
            model._ddp_params_and_buffers_to_ignore = {*known, *ignored}  # type: ignore[assignment]
            frozen = [(name, parameter) for name, parameter in frozen if name not in ignored]
        index = self.topology.device.index
        options = self.options.to_kwargs()
        if self.sequences.shared:  # DDP would send rank 0's part of a buffer that is cut
            options["broadcast_buffers"] = False
        with warnings.catch_warnings():
            # The name that replaces it always shares buffers at the start.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            wrapped = PreparedDDP(model, device_ids=None if index is None else [index], **options)
        if self.sequences.shared and self.options.broadcast_buffers:
            SharedBuffers(self.sequences.is_cut).watch(wrapped)
        # Moved to the end of __dict__, so that it is freed after the reducer: a group whose last
        # reference is the reducer's can deadlock when it is freed.
        wrapped.process_group = wrapped.__dict__.pop("process_group")
        if self.options.comm_hook is not Hook.NO:
            # Imported here, because most runs have none.
            from accel_callbacks.engines.ddp.communication_hooks import register_hook

            register_hook(wrapped, self.options)
        self.gradients.watch(wrapped)
        if frozen:
            wrapped.register_forward_pre_hook(_FrozenGuard(frozen))
        return wrapped

    def _refuse_other_ranks(self) -> None:
        """Raise if the script has replaced the process group by one of other ranks, or by none."""
        rank, world_size = collectives.rank(), collectives.world_size()
        if (rank, world_size) != (self.topology.rank, self.topology.world_size):
            raise RuntimeError(
                f"this Accelerator was made on rank {self.topology.rank} of "
                f"{self.topology.world_size}, and the process is rank {rank} of {world_size} "
                "now: make a new Accelerator on all processes."
            )

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the replica inside the wrapper."""
        model = super().unwrap(model)
        if isinstance(model, DistributedDataParallel):
            return self.unwrap(model.module)
        return model

    def mark_forward_methods(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        """Run these methods of a model through the wrapper.

        Raises:
            ValueError: the wrapper is the user's own, or has a method of this name itself.
        """
        if isinstance(model, PreparedDDP):
            model.mark_forward_methods(names)
        elif isinstance(model, DistributedDataParallel):
            raise ValueError(
                "forward_methods: the model is wrapped in DistributedDataParallel already, which "
                "has no other methods: pass the model itself to prepare()."
            )


class _FrozenGuard:
    """A forward hook that raises if a parameter is trained that was frozen at ``prepare``.

    DDP averages only the parameters that required gradients when it was constructed.
    """

    def __init__(self, frozen: list[tuple[str, torch.nn.Parameter]]) -> None:
        self.frozen = frozen

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        for name, parameter in self.frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name!r} was frozen when the model was prepared, and is trained now: its "
                    "gradients would differ between processes. Prepare the model unfrozen, with "
                    "DistributedDataParallelKwargs(find_unused_parameters=True), and freeze it "
                    "afterwards."
                )
